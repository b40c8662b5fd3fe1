"""The identity of the recording process: host, rank, process id, and the versions of what it runs."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from thence.capture.cuda.synchronization import devices, driver_version
from thence.capture.recorder.process_identity import (
    first_number,
    process_identity,
    rank_of_launcher,
    rank_of_process_group,
)
from thence.version import __version__

_FURTHER_RANKS = ("PMIX_RANK", "JAX_PROCESS_ID", "JAX_PROCESS_INDEX")
_FRAMEWORKS = ("torch", "jax", "jaxlib", "triton", "cupy", "numba", "numpy", "tensorflow")


def rank_of_framework() -> int | None:
    """Rank of this process in its job, from PyTorch or JAX while connected to the other processes; else None."""
    known = rank_of_process_group()
    if known is not None:
        return known
    distributed = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if getattr(distributed, "client", None) is not None:
        return int(distributed.process_id)  # type: ignore[union-attr]
    return None


def rank_of_environment() -> int | None:
    """Rank of this process in its job, from environment variables; None outside of a job."""
    known = rank_of_launcher()
    return first_number(_FURTHER_RANKS) if known is None else known


def folder_name(rank: int | None) -> str:
    """Name of this process's folder: ``<host>-rank<R>-<pid>``."""
    host = re.sub(r"[^A-Za-z0-9._]+", "_", socket.gethostname()) or "host"
    return f"{host}-rank{rank or 0}-{os.getpid()}"


def process_facts(rank: int | None) -> dict[str, Any]:
    """The identity of the process, versions of the frameworks imported so far, its devices and threads."""
    modules = {name: sys.modules.get(name) for name in _FRAMEWORKS}
    versions = {name: str(getattr(module, "__version__", "")) for name, module in modules.items() if module}
    return {
        **process_identity(),
        "thence": __version__,
        "host": socket.gethostname(),
        "rank": rank,
        "parent_pid": os.getppid(),
        "program": Path(sys.argv[0]).name if getattr(sys, "argv", None) else None,
        "python": platform.python_version(),
        "versions": {name: version for name, version in versions.items() if version},
        "xla_flags": os.environ.get("XLA_FLAGS") or None,
        "driver_cuda": driver_version(),
        "devices": devices(),
        "threads": _threads(),
    }


def _threads() -> dict[str, str]:
    """Names of the threads by their ids: Python's name of a thread, else the system's."""
    names = {}
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread ended meanwhile
            names[task.parent.name] = task.read_text(errors="replace").strip()
    return names | {str(thread.native_id): thread.name for thread in threading.enumerate()}
