"""Recordings of ``thence record``: a folder of parts for each process, or a directory of such folders."""
