"""Formats that thence recognises without reading them, with what to do instead."""

from __future__ import annotations

import re

_DECOMPRESS = "; decompress it first ({}): thence reads gzip and no other compression"
_CONTENTS = {
    rb"\xfd7zXZ\x00": "is compressed with xz" + _DECOMPRESS.format("xz -dk"),
    rb"\x28\xb5\x2f\xfd": "is compressed with Zstandard" + _DECOMPRESS.format("zstd -d"),
    rb"BZh[1-9]": "is compressed with bzip2" + _DECOMPRESS.format("bunzip2 -k"),
    rb"\x04\x22\x4d\x18": "is compressed with LZ4" + _DECOMPRESS.format("lz4 -d"),
    rb"(?s).{257}ustar": "is a tar archive; unpack it (tar -xf) and name the folder or the traces in it",
    rb"PK\x03\x04": (
        "is a zip archive, but not of nsys-jax; if it holds traces, unpack it and name the folder or the traces in it"
    ),
    rb"version https://git-lfs\.github\.com/": (
        "is a pointer of Git LFS, not the file itself; fetch the file (git lfs pull)"
    ),
    rb"(?i)(?:\xef\xbb\xbf)?\s*<(?:!doctype html|html)\b": (
        "is an HTML page; if it was downloaded, the server may have sent a login page or an error instead of the trace"
    ),
    rb"\xff\xfe|\xfe\xff": (
        "is UTF-16, as PowerShell redirects output; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"
    ),
    # The first bytes that TensorFlow's and XLA's trace_events_to_json.cc write.
    rb'\{"displayTimeUnit": ?"ns", ?"metadata": ?\{"highres-ticks": ?true\}': (
        "is what jax.profiler and TensorFlow write for viewers, without programs and HLO; name the .xplane.pb file"
    ),
    rb'"?Time ?\(%\)"?,"?Total Time ?\([a-z]+\)"?,': (
        "is a summary without times of each kernel; use nsys stats --report cuda_gpu_trace --format csv"
    ),
}
"""Regular expression of how a file begins, and the end of the sentence about it."""
_ENDINGS = {
    ".ncu-rep": "is a report of Nsight Compute, which measures single kernels; thence reads reports of Nsight Systems",
    ".qdstrm": (
        "is what Nsight Systems writes before it makes a report; make it with QdstrmImporter, which is part of "
        "Nsight Systems"
    ),
    ".pftrace": (
        "is a timeline for Perfetto, which thence writes and does not read; name the recording or trace that it was "
        "made from"
    ),
}
"""Ending of a file name, for formats without a fixed beginning, and the end of the sentence about it."""


def described(name: str, head: bytes) -> str | None:
    """What is said about a file that no reader accepts; None if its format is not known either.

    Args:
        name: of the file.
        head: its first decompressed bytes.
    """
    by_content = (text for beginning, text in _CONTENTS.items() if re.match(beginning, head))
    by_name = (text for ending, text in _ENDINGS.items() if name.endswith(ending))
    return next(by_content, None) or next(by_name, None)
