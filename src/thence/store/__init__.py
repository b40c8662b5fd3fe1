"""Stores: the ranks of a job as Parquet, one folder a rank, with a small summary of each.

`ingest` writes one, `store` reads it, `stored_trace` asks it what a `Trace` is asked. `layout` is the format.
"""
