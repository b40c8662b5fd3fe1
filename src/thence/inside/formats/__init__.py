"""Decoders of buffer layouts, one module for each: words of a buffer -> `thence.inside.columns.Columns`."""
