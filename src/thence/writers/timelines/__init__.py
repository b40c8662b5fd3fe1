"""Timelines as files for viewers: Perfetto, Chrome JSON, Parquet."""
