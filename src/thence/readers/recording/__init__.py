"""Recordings of ``thence record``: a folder of parts for each process, or a directory of such folders."""

from __future__ import annotations

from thence.readers.recording.read import NAME, PATTERNS, read, sniff_archive

__all__ = ["NAME", "PATTERNS", "read", "sniff_archive"]
