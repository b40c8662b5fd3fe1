"""XLA's own files: HLO modules, profiler spaces, thunk metadata.

Decoders turn bytes into columns and know nothing of traces; ``host_ranges``, ``executions`` and
``hlo_files`` prepare what they give for the readers beside this package.
"""
