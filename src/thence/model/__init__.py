"""Data model: tables, intervals, names.

It imports no other package of thence, only modules such as `thence.errors`, `thence.units` and `thence.parallel`.
"""
