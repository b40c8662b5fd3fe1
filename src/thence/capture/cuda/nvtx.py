"""Connects NVTX, by whose ranges XLA, PyTorch and others name their work, to the libcupti of the recorder.

NVTX reads an environment variable once, at the first range of each library in a process, and loads the file that the
variable names. This has to be the same libcupti that records: another copy would get the ranges, and nothing would
read them there.
"""

from __future__ import annotations

import os
from pathlib import Path

from thence.capture.cuda.libraries import find_libcupti
from thence.errors import ThenceError

VARIABLE = "NVTX_INJECTION64_PATH"
"""Environment variable: the library that NVTX (``nvtxInit.h``) loads."""


def collect_nvtx() -> bool:
    """Have NVTX report its ranges to libcupti, in libraries that have not used it yet; returns whether this was set.

    If the variable is set already, for another tool that collects NVTX, it stays as it is.
    """
    if os.environ.get(VARIABLE):
        return False
    try:
        path = find_libcupti()
    except ThenceError:
        return False  # reported when the recording begins
    if Path(path).is_absolute():
        os.environ[VARIABLE] = path
        return True
    return False


def leave_nvtx() -> None:
    """Unset the variable: libraries that use NVTX for the first time from now on report to no tool."""
    os.environ.pop(VARIABLE, None)
