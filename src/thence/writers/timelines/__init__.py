"""Writers of timelines as files: Perfetto traces, Chrome JSON, Parquet."""
