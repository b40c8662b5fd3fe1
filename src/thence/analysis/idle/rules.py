"""Causes of idle time: their codes, and the cause of each host row.

The names of a host row and of the rows around it show why a thread has not launched yet:

    gc           garbage collection (gc.collect, or collections that the producer records)
    compile      compilation: phases of XLA and of torch.compile
    loader       in a DataLoader, in a range or function named for loading data, or in the phase `input` of a recording
    sync         a call that waits (`thence.model.waiting`): the device is done, but the call has not returned yet
    allocation   memory is allocated, freed, pinned or queried
    first_use    code or kernels are loaded or looked up
    launch       another launch, memcpy or memset
    operator     a framework operator, a range that a library opened, or another API call
    python       Python code: a frame, a module's call, a range of the user, a step
    unknown      the profiler's own overhead, or no row at all

gc, compile and loader also apply to all rows inside such a row, except rows whose own cause is sync, allocation,
first_use, compile or gc.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW
from thence.model.phases import Phase
from thence.model.tables import API_CALLS
from thence.model.waiting import names_of_calls

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64 = npt.NDArray[np.int64]
    Codes = npt.NDArray[np.uint8]

__all__ = ["CAUSES", "MEANINGS", "NUMBER", "REASONS", "REASON_TITLES", "host_causes"]

MEANINGS = {
    "launch": "from the beginning of the launch to the beginning of its kernel, or another launch before it",
    "queued": "between two kernels that were both queued, up to 5 us, or inside one launch of a CUDA graph",
    "event_wait": "queued, but behind an event of another stream",
    "sync": "a call that waits returned to the program: item(), synchronize() and the like",
    "allocation": "memory was allocated, freed, pinned or queried",
    "loader": "the host loaded data",
    "first_use": "kernels or libraries were loaded at their first use",
    "compile": "the host compiled",
    "operator": "the host was inside a framework's operator",
    "python": "the host ran Python between operators",
    "gc": "the host collected garbage",
    "unknown": "the trace does not show the cause; the reasons are listed below",
}
"""Every cause of idle time and what it means, in the order in which documents list them."""
REASONS = {
    "no_launch": "the trace holds no launch of the activity that ended the wait",
    "started_late": "it was launched long before, and nothing recorded held it back",
    "only_calls": (
        "the host was between API calls, and neither its operators nor its Python frames were recorded; "
        "torch.profiler (with_stack=True), thence record, or nsys profile --trace=cuda,nvtx "
        "--pytorch=autograd-nvtx records them"
    ),
    "outside": (
        "no thread of the process was in a recorded range or call; Python frames were not recorded: "
        "torch.profiler (with_stack=True) or thence record records them"
    ),
    "profiler": "the profiler itself took the time",
    "too_many": (
        "over 1,000 devices in one rank, or too many pieces of idle time per recorded row; --device selects some "
        "of the devices"
    ),
}
"""Reasons why a cause is unknown."""
REASON_TITLES = {
    "no_launch": "no launch recorded",
    "started_late": "started late",
    "only_calls": "between API calls",
    "outside": "outside of all ranges and calls",
    "profiler": "the profiler itself",
    "too_many": "not divided",
}
"""Short names of the reasons, for tables."""
CAUSES = tuple(MEANINGS)
NUMBER = {cause: number for number, cause in enumerate(CAUSES)}
"""Number of each cause in the arrays."""

_ALLOCATION = re.compile(
    r"(?i)(?:cuda|cu|hip)(?:Mem(?!cpy|set)\w*(?:Alloc|Free|Map|Unmap|Create|Release|GetInfo|AddressReserve)\w*|"
    r"(?:Host)?(?:Malloc|Alloc|Free)\w*|(?:Mem)?Host(?:Alloc|Register|Unregister)\w*|MemGetInfo\w*)"
)
_FIRST_USE = re.compile(
    r"(?i)(?:cuda|cu|hip)(?:Module|Library|Kernel(?:Get|Set)|Func(?:Get|Set|Load)|Occupancy|Link|GetProcAddress|"
    r"Init|DeviceGet|DevicePrimaryCtx|GetDeviceProperties)\w*"
)
_LAUNCH = re.compile(
    r"(?i)(?:cuda|cu|hip)(?:Ext)?(?:Launch|GraphLaunch|Memcpy|Memset|GraphUpload)\w*.*"
)
_COMPILE = re.compile(
    r"(?i).*(?:dynamo_timed|_compile\.compile_inner|torchdynamo cache miss|async_compile).*"
)
_LOADER = re.compile(
    r"(?i)(?:enumerate\(DataLoader\)|.*dataloader\b.*|.*data[ _.]?load(?:er|ing)?\b.*|"
    r".*\b(?:load|get|fetch|next)_batch.*|.*\bprefetch\w*.*|load|loader|loading|.*torch/utils/data/.*)"
)
_GC = re.compile(
    r"(?i)(?:.*\bgc\.(?:collect|py).*|.*built-in function collect.*|python gc\b.*|gc|.*garbage collect.*)"
)
_BY_CATEGORY = {
    "step": "python",
    "phase": "python",
    "module": "python",
    "python": "python",
    "range": "python",
    "framework": "operator",
    "op": "operator",
    "compile": "compile",
    "runtime": "operator",
    "driver": "operator",
    "overhead": "unknown",
}
_CALLS = ((_LAUNCH, "launch"), (_ALLOCATION, "allocation"), (_FIRST_USE, "first_use"))
_INHERITED = ((_GC, "gc"), (_COMPILE, "compile"), (_LOADER, "loader"))
_LOADING = ("step", "module", "python", "range", "framework")
_WAITING = ("device", "stream", "event")
"""Kinds of waits by calls that do nothing but wait."""
_OWN = ("sync", "allocation", "first_use", "compile", "gc")
"""Causes of a row that are not overridden by rows around it."""


def host_causes(host: pl.DataFrame) -> Codes:
    """The number of the cause of each host row.

    Args:
        host: as `thence.model.tables.HOST`.
    """
    first, number = _distinct(host)
    pairs = host.select(pl.col("category", "name").gather(first)).cast(pl.String)
    kinds = names_of_calls(pairs["name"].cast(pl.Categorical()))
    waits = set(kinds.filter(pl.col("kind").is_in(_WAITING))["name"].cast(pl.String))
    told = [_told(str(category), name or "", waits) for category, name in pairs.rows()]
    own = np.array([NUMBER[own] for own, _ in told], np.uint8)[number]
    given = np.array([NUMBER[inner] if inner else 255 for _, inner in told], np.uint8)[number]
    if (given == 255).all():
        return own
    inherited = _from_around(given, host["parent"].fill_null(NO_ROW).to_numpy().astype(np.int64))
    keeps = np.isin(own, [NUMBER[cause] for cause in _OWN])
    return np.where((inherited != 255) & ~keeps, inherited, own).astype(np.uint8)


def _distinct(host: pl.DataFrame) -> tuple[Int64, Int64]:
    """One row of each combination of category and name, and the number of each row's combination."""
    name = host["name"].to_physical().cast(pl.Int64).fill_null(-1).to_numpy() + 1
    category = host["category"].to_physical().to_numpy().astype(np.int64)
    key = name * len(_BY_CATEGORY) + category
    row = np.full(int(key.max(initial=-1)) + 1, NO_ROW)
    row[key] = np.arange(len(key))
    used = np.flatnonzero(row != NO_ROW)
    number = np.zeros(len(row), np.int64)
    number[used] = np.arange(len(used))
    return row[used], number[key]


def _told(category: str, name: str, waits: set[str]) -> tuple[str, str | None]:
    """The cause of a row by its category and name, and the cause that rows inside it inherit, or None."""
    if category in API_CALLS:
        if name in waits:
            return "sync", None
        return next((c for pattern, c in _CALLS if pattern.fullmatch(name)), "operator"), None
    if category == "phase" and name == Phase.INPUT.value:
        return "loader", "loader"
    for pattern, cause in _INHERITED:
        if (cause != "loader" or category in _LOADING) and pattern.fullmatch(name):
            return cause, cause
    return _BY_CATEGORY[category], "compile" if category == "compile" else None


def _from_around(given: Codes, parent: Int64) -> Codes:
    """The code in ``given`` of each row or else of the nearest row around it that has one; 255 for none.

    By pointer jumping: each round looks twice as far up.
    """
    top = len(given)  # the parent of the outermost rows, which gives nothing
    above = np.append(np.where(parent == NO_ROW, top, parent), top).astype(np.int32)
    result = np.append(given, np.uint8(255))
    while (above != top).any():
        result = np.where(result == 255, result[above], result)
        above = above[above]
    return result[:top]
