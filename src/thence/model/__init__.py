"""Data model: tables, intervals, names. Imports no other package of thence, only errors and units."""
