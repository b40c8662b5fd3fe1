"""Causes of idle time: their codes, and the cause that each host row stands for.

A host row, its name and the rows around it show why a thread has not launched yet:

    gc           garbage collection (gc.collect, or collections that the producer records)
    compile      compilation: phases of XLA and of torch.compile
    loader       in a DataLoader, in a range or function named for loading data, or in the phase `input` of a recording
    sync         a call that waits (`thence.model.waiting`): the device is done, but the call has not returned yet
    allocation   memory is allocated, freed, pinned or queried
    first_use    code or kernels are loaded or looked up
    launch       another launch, memcpy or memset
    operator     a framework operator, a range that a library opened, or another API call
    lock, sleep  a sample of a thread that waited for a lock or for the GIL, or slept; a recorded call of Python that
                 does nothing else
    python       a sample in which instructions of Python were run, or a Python frame that the profiler recorded
    host         nothing tells what the host ran: a sample of C code or of another system call, a recorded call of a C
                 function, a module's call, a range of the user, a step, or, in recordings of thence, a function around
                 two launches without a sample between them
    unknown      the profiler's own overhead, or no row at all

gc, compile and loader also apply to all rows inside such a row, except rows whose own cause is sync, allocation,
first_use, compile or gc. Samples inside a function of Python that waits for the device have the cause sync, as have
recorded frames of it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.columns import name_codes, row_numbers
from thence.model.formats import THENCE_RECORDING
from thence.model.intervals import NO_ROW
from thence.model.phases import HOST_STATES, HostState, Phase
from thence.model.tables import API_CALLS
from thence.model.thresholds import LONG_BUILT_IN_NS
from thence.model.waiting import names_of_calls

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thence.model.arrays import Int64, Mask, UInt8


MEANINGS = {
    "launch": "from the beginning of the launch to the beginning of its kernel, or another launch before it",
    "queued": "between two kernels that were both queued, up to 5 us, or inside one launch of a CUDA graph",
    "event_wait": "queued, but behind an event of another stream, a host function or a value in memory",
    "sync": "a call that waits returned to the program: item(), synchronize() and the like",
    "allocation": "memory was allocated, freed, pinned or queried",
    "loader": "the host loaded data",
    "first_use": "kernels or libraries were loaded, or an operator took over 1 ms before its first kernel of a name",
    "compile": "the host compiled",
    "operator": "the host was inside a framework's operator",
    "python": "the host ran Python, as samples or recorded frames show",
    "host": "the host ran C code, of a framework or another, or nothing shows what it ran",
    "lock": "the host waited for a lock, a queue or the GIL",
    "sleep": "the host slept",
    "gc": "the host collected garbage",
    "unknown": "the trace does not show the cause; the reasons are listed below",
}
"""Every cause of idle time and what it means, in the order in which documents list them."""
REASONS = {
    "no_launch": "the trace holds no launch of the activity that ended the wait",
    "nothing_after": "the trace holds no later activity of the device, so nothing shows what it waited for",
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
    "nothing_after": "after the last activity",
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
_NONE = 255
"""Number for no cause in the arrays."""

_ALLOCATION = re.compile(
    r"(?i)(?:cuda|cu|hip)(?:Mem(?!cpy|set)\w*(?:Alloc|Free|Map|Unmap|Create|Release|GetInfo|AddressReserve)\w*|"
    r"(?:Host)?(?:Malloc|Alloc|Free)\w*|(?:Mem)?Host(?:Alloc|Register|Unregister)\w*|MemGetInfo\w*)"
)
_FIRST_USE = re.compile(
    r"(?i)(?:cuda|cu|hip)(?:Module|Library|Kernel(?:GetFunction|Set)|Func(?:Get|Set|Load)|Occupancy|Link|GetProcAddress|"
    r"Init|DeviceGet|DevicePrimaryCtx|GetDeviceProperties)\w*"
)
_LAUNCH = re.compile(r"(?i)(?:cuda|cu|hip)(?:Ext)?(?:Launch|GraphLaunch|Memcpy|Memset|GraphUpload)\w*.*")
_COMPILE = re.compile(r"(?i).*(?:dynamo_timed|_compile\.compile_inner|torchdynamo cache miss|async_compile).*")
_LOADER = re.compile(
    r"(?i)(?:enumerate\(DataLoader\)|.*dataloader\b.*|.*data[ _.]?load(?:er|ing)?\b.*|"
    r".*\b(?:load|get|fetch|next)_batch.*|.*\bprefetch\w*.*|load|loader|loading|.*torch/utils/data/.*)"
)
_COMPILER = re.compile(
    r".*(?:torch/_dynamo/convert_frame\.py|torch/_inductor/compile_fx\.py|triton/compiler/compiler\.py|"
    r"jax/_src/compiler\.py)\(.*"
)
"""Frames of samples that are inside of a compiler."""
_WAITING_FRAME = re.compile(r".*: (?:\w+\.)*(?:block_until_ready|try_to_block|synchronize)")
"""Frames in which the device is waited for; ``try_to_block`` is inside of jax.block_until_ready."""
_BUILT_IN = re.compile(r"<built-in .*")
_BUILT_IN_CAUSES = (
    (re.compile(r"<built-in (?:function|method) sleep\b.*"), "sleep"),
    (re.compile(r"(?i)<built-in method (?:acquire|__enter__) of [\w.]*lock\b.*"), "lock"),
)
_GC = re.compile(r"(?i)(?:.*\bgc\.(?:collect|py).*|.*built-in function collect.*|python gc\b.*|gc|.*garbage collect.*)")
_BY_CATEGORY = {
    "step": "host",
    "phase": "host",
    "module": "host",
    "python": "python",
    "range": "host",
    "framework": "operator",
    "op": "operator",
    "compile": "compile",
    "sample": "host",
    "runtime": "operator",
    "driver": "operator",
    "overhead": "unknown",
}
_BY_STATE = {HostState.PYTHON: "python", HostState.GIL: "lock", HostState.LOCK: "lock", HostState.SLEEP: "sleep"}
"""Of a sample; in all other states, and in an unknown one: host."""
_CALL_CAUSES = ((_LAUNCH, "launch"), (_ALLOCATION, "allocation"), (_FIRST_USE, "first_use"))
_SAMPLE_CAUSES = ((_COMPILER, "compile"), (_WAITING_FRAME, "sync"))
_INHERITED_CAUSES = ((_GC, "gc"), (_COMPILE, "compile"), (_LOADER, "loader"))
_LOADER_CATEGORIES = ("step", "module", "python", "range", "framework", "sample")
_PURE_WAITS = ("device", "stream", "event")
"""Kinds of waits by calls that do nothing but wait."""
_KEPT = ("sync", "allocation", "first_use", "compile", "gc")
"""Causes of a row that are not overridden by rows around it."""


def host_causes(host: pl.DataFrame, formats: Iterable[str] = ()) -> UInt8:
    """The number of the cause of each host row.

    Args:
        host: as `thence.model.tables.HOST`.
        formats: of the trace (`Meta.formats`).
    """
    first, number = _distinct(host)
    rows = host[["category", "name", "state"]][first].cast(pl.String)
    kinds = names_of_calls(rows["name"].cast(pl.Categorical()))
    waits = {name for name, kind in kinds.iter_rows() if kind in _PURE_WAITS}
    # In recordings of thence, a row of this category is the function around two launches, not a frame that ran.
    frames = "host" if set(formats) == {THENCE_RECORDING} else "python"
    causes = [_named_cause(str(category), name or "", state, waits, frames) for category, name, state in rows.rows()]
    own = np.array([NUMBER[own] for own, _ in causes], np.uint8)[number]
    parent = row_numbers(host["parent"])
    traced = (host["category"] == "python").to_numpy() & (frames == "python")
    if traced.any():
        own = _with_traced_frames(own, traced, parent, host["duration"].to_numpy())
    given = np.array([NUMBER[inner] if inner else _NONE for _, inner in causes], np.uint8)[number]
    if (given == _NONE).all():
        return own
    inherited = _from_around(given, parent)
    keeps = np.isin(own, [NUMBER[cause] for cause in _KEPT])
    return np.where((inherited != _NONE) & ~keeps, inherited, own).astype(np.uint8)


def _with_traced_frames(own: UInt8, traced: Mask, parent: Int64, duration: Int64) -> UInt8:
    """The causes by what traced frames show: a frame that is innermost, or innermost but for a range, was running.

    Args:
        own: cause of each row by its name.
        traced: rows that are Python frames or calls of C functions.
        parent: row around each row.
        duration: of each row, ns.
    """
    host = NUMBER["host"]
    own = np.where(traced & (own == host) & (duration < LONG_BUILT_IN_NS), NUMBER["python"], own)
    around = _from_around(np.where(traced, own, _NONE).astype(np.uint8), parent)
    inside = (own == host) & ~traced & (around != _NONE)
    return np.where(inside, around, own).astype(np.uint8)


def _distinct(host: pl.DataFrame) -> tuple[Int64, Int64]:
    """One row of each combination of category, name and state, and the number of each row's combination."""
    name = name_codes(host["name"])
    category = host["category"].to_physical().to_numpy().astype(np.int64)
    key = name * len(_BY_CATEGORY) + category
    if host["state"].null_count() < host.height:
        state = host["state"].to_physical().cast(pl.Int64).fill_null(len(HOST_STATES)).to_numpy()
        key = key * (len(HOST_STATES) + 1) + state
    # Keys are dense enough for an array; a sort of millions of rows would take most of the time of the analysis.
    row = np.full(int(key.max(initial=-1)) + 1, NO_ROW)
    row[key] = np.arange(len(key))
    used = np.flatnonzero(row != NO_ROW)
    number = np.zeros(len(row), np.int64)
    number[used] = np.arange(len(used))
    return row[used], number[key]


def _named_cause(category: str, name: str, state: str | None, waits: set[str], frames: str) -> tuple[str, str | None]:
    """The cause of a row, and the cause that rows inside it inherit, or None.

    Args:
        category: of the row.
        state: of a sample, None elsewhere.
        waits: names of calls that wait.
        frames: the cause of Python frames.
    """
    if category in API_CALLS:
        if name in waits:
            return "sync", None
        return next((c for pattern, c in _CALL_CAUSES if pattern.fullmatch(name)), "operator"), None
    inherited = _inherited(category, name)
    if inherited is not None:
        return inherited, inherited
    if category == "sample" and state:
        return _BY_STATE.get(HostState(state), "host"), None
    if category == "python":
        return _cause_of_frame(name, frames), None
    return _BY_CATEGORY[category], "compile" if category == "compile" else None


def _inherited(category: str, name: str) -> str | None:
    """The cause of a row and of all rows inside it; None if its name shows none."""
    if category == "phase" and name == Phase.INPUT.value:
        return "loader"
    patterns = (*_SAMPLE_CAUSES, *_INHERITED_CAUSES) if category == "sample" else _INHERITED_CAUSES
    for pattern, cause in patterns:
        if (cause != "loader" or category in _LOADER_CATEGORIES) and pattern.fullmatch(name):
            return cause
    return None


def _cause_of_frame(name: str, otherwise: str) -> str:
    """The cause of a recorded call of Python: calls of C functions are named as such."""
    if not _BUILT_IN.fullmatch(name):
        return "sync" if otherwise == "python" and _WAITING_FRAME.fullmatch(name) else otherwise
    return next((cause for pattern, cause in _BUILT_IN_CAUSES if pattern.fullmatch(name)), "host")


def _from_around(given: UInt8, parent: Int64) -> UInt8:
    """The code in ``given`` of each row or else of the nearest row around it that has one; `_NONE` for none.

    By pointer jumping: each round looks twice as far up.
    """
    top = len(given)  # the parent of the outermost rows, which gives nothing
    above = np.append(np.where(parent == NO_ROW, top, parent), top).astype(np.int32)
    result = np.append(given, np.uint8(_NONE))
    while (above != top).any():
        result = np.where(result == _NONE, result[above], result)
        above = above[above]
    return result[:top]
