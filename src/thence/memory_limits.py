"""Whether the memory that this process may use suffices for an input, told before it is read.

If the system refuses memory, Polars aborts the process; and a machine that runs out of memory kills processes, not
always the right one. This module imports only the standard library, so that the command line can ask it first.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from thence.errors import MissingRequirement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.units import Bytes

MAX_RATIO = 5
"""Bytes of memory for each decompressed byte of an input, at most: the promise of docs/security.md. An address space
that is smaller than that is refused, because Polars aborts where it ends."""
MIN_RATIO = 1
"""Bytes of memory for each decompressed byte, at least: real traces of torch.profiler take 1.8."""
_SMALL: Bytes = 16_000_000
"""Of a smaller input it is not asked how much memory is free: any machine on which thence starts has so much, and
thousands of small files would be asked about."""
_LIBRARIES: Bytes = 800_000_000
_THREAD: Bytes = 300_000_000
_MAX_THREADS: Bytes = 1_600_000_000
_STACK: Bytes = 10_000_000
"""Address space of thence and its libraries before they read anything, most of which is never used: 1.05, 1.34, 1.51
and 1.53 GB with 1, 2, 4 and 8 threads of Polars on Linux."""
_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_FIGURES = ("memory.max", "memory.current", "inactive_file")
"""Of a control group: the files of its limit and of what it uses, and what of it can be given back, in memory.stat."""
_FIGURES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""The same in version 1 of control groups."""


def check_memory(name: str = "", decompressed: Bytes = 0) -> None:
    """Refuses an input for which the memory does not suffice.

    Args:
        name: the input as the user named it; empty: only thence itself is considered.
        decompressed: its size, or a lower bound.

    Raises:
        MissingRequirement: the address space is limited to less than the input can take, or the memory that is free
            is less than it takes at least. The message says how much is needed.
    """
    subject = f"{name}: " if name else ""
    limit, needed = _address_space(), _libraries(_threads()) + MAX_RATIO * decompressed
    if limit is not None and limit < needed:
        fewer = _libraries(1) + MAX_RATIO * decompressed
        way_out = f"; with POLARS_MAX_THREADS=1 {_mb(fewer)}" if fewer < needed else ""
        raise MissingRequirement(
            f"{subject}the address space of this process is limited to {_mb(limit)} (ulimit -v), and {_mb(needed)} "
            f"are needed{way_out}"
        )
    free = free_bytes() if decompressed >= _SMALL else None
    if free is not None and free < MIN_RATIO * decompressed:
        raise MissingRequirement(
            f"{subject}needs more than {_mb(MIN_RATIO * decompressed)} of memory, and {_mb(free)} are free; read it "
            "on a larger machine, record fewer steps, or read one rank at a time (thence ingest)"
        )


def free_bytes() -> Bytes | None:
    """Memory that this process can still use without swapping; None if the system does not report it."""
    of_kind = _numbers("/proc/meminfo")
    free = [1024 * of_kind["MemAvailable:"]] if "MemAvailable:" in of_kind else []  # /proc/meminfo counts in KiB
    for folder, (limit, used, reclaimable) in _groups():
        with suppress(OSError, ValueError):  # "max" is no number
            allowed = int((folder / limit).read_text("ascii"))
            taken = int((folder / used).read_text("ascii"))
            free.append(allowed - taken + _numbers(folder / "memory.stat").get(reclaimable, 0))
    return max(0, min(free)) if free else None


def _groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders of the control groups that may limit the memory of this process, with the names of their figures.

    These are its own group, as of a job of Slurm or a unit of systemd, and those around it. In a container, whose view
    of the folders may begin at its own group, some do not exist.
    """
    groups = []
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text("utf-8", "replace").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                groups += [(_CGROUP, path, _FIGURES), (_CGROUP / "unified", path, _FIGURES)]
            elif "memory" in controllers.split(","):
                groups.append((_CGROUP / "memory", path, _FIGURES_V1))
    for root, path, figures in groups or [(_CGROUP, "/", _FIGURES)]:
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            yield folder, figures
            if folder == root:
                break


def _numbers(path: str | Path) -> dict[str, int]:
    """The first number of each line by the word before it; empty if the file cannot be read."""
    with suppress(OSError, ValueError):
        lines = (line.split() for line in Path(path).read_text("ascii").splitlines())
        return {word: int(number) for word, number, *_ in lines}
    return {}


def _address_space() -> Bytes | None:
    """The limit of this process's address space; None if there is none, or the system does not enforce one."""
    if sys.platform != "linux":
        return None
    import resource

    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _threads() -> int:
    with suppress(KeyError, ValueError):
        return max(1, int(os.environ["POLARS_MAX_THREADS"]))
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _libraries(threads: int) -> Bytes:
    return min(_LIBRARIES + _THREAD * threads, _MAX_THREADS) + _STACK * threads


def _mb(size: Bytes) -> str:
    return f"{size / 1e6:,.0f} MB"
