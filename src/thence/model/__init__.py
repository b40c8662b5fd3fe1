"""The vocabulary: tables, intervals, names. Imports nothing of thence but errors and units."""
