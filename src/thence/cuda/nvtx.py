"""Making NVTX, which XLA, PyTorch and others name their work with, tell the recorder's libcupti of it.

NVTX reads the variable once, at the first range of each library in a process, and loads the file that it
names. It has to be the very libcupti that records: another copy gets the ranges, and nobody reads them.
"""

from __future__ import annotations

import os
from pathlib import Path

from thence.cuda.libraries import find_libcupti
from thence.errors import ThenceError

__all__ = ["VARIABLE", "collect_nvtx", "leave_nvtx"]

VARIABLE = "NVTX_INJECTION64_PATH"
"""Environment variable: the library that NVTX (``nvtxInit.h``) loads."""


def collect_nvtx() -> bool:
    """Have NVTX tell libcupti, wherever it has not been used yet; whether that was set here.

    Another tool that collects NVTX already goes on doing so.
    """
    if os.environ.get(VARIABLE):
        return False
    try:
        path = find_libcupti()
    except ThenceError:
        return False  # said when recording begins
    if Path(path).is_absolute():
        os.environ[VARIABLE] = path
        return True
    return False


def leave_nvtx() -> None:
    """Libraries that use NVTX for the first time from now on tell nobody."""
    os.environ.pop(VARIABLE, None)
