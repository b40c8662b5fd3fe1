"""Identifies this process, so that what it wrote is not mistaken for what another process wrote."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_NS = 1_000_000_000


def process_identity() -> dict[str, int | str | None]:
    """Process id, rank in the job, boot id of the machine, Unix times in ns of start and of now."""
    group = rank_of_process_group()
    return {
        "pid": os.getpid(),
        "rank": rank_of_launcher() if group is None else group,
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "started_ns": _started_ns(),
        "saved_ns": time.time_ns(),
    }


def rank_of_process_group() -> int | None:
    """Rank of this process from torch.distributed; None while there is no process group."""
    distributed = sys.modules.get("torch.distributed")
    # While another thread imports it, it is there without its functions.
    initialized = getattr(distributed, "is_initialized", None)
    if distributed is not None and initialized is not None and distributed.is_available() and initialized():
        return int(distributed.get_rank())
    return None


def rank_of_launcher() -> int | None:
    """Rank of this process from the environment variables of the job's launcher; None outside of a job."""
    return first_number(_RANKS)


def first_number(variables: Iterable[str]) -> int | None:
    """The value of the first of these environment variables that holds a number; None if none does."""
    values = (os.environ.get(name, "") for name in variables)
    return next((int(value) for value in values if value.isdecimal()), None)


def _started_ns() -> int | None:
    """Unix time in ns at which this process began, to 10 ms; the same in every call. None without /proc."""
    stat, system = _text("/proc/self/stat"), _text("/proc/stat")
    if stat is None or system is None:
        return None
    boot = next(line.split()[1] for line in system.splitlines() if line.startswith("btime "))
    after_name = stat.rpartition(")")[2].split()  # the name may hold spaces and brackets
    ticks = int(after_name[19])  # field 22, starttime
    return int(boot) * _NS + ticks * _NS // os.sysconf("SC_CLK_TCK")


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None
