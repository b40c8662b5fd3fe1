"""Archives of nsys-jax (JAX-Toolbox): projected NVTX ranges, HLO protos and compile ranges."""

from __future__ import annotations

from thence.readers.nsys_jax.archive import sniff_archive
from thence.readers.nsys_jax.read import NAME, PATTERNS, read

__all__ = ["NAME", "PATTERNS", "read", "sniff_archive"]
