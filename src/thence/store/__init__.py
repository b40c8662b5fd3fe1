"""Stores: the ranks of a job as Parquet files, one folder for each input, with a small summary of each rank.

`ingest` writes a store, `store` reads it, `stored_trace` gives it the interface of `Trace`, and `layout` defines the
format.
"""
