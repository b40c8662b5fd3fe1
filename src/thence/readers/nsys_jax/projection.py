"""Thunks and programs from NVTX ranges projected on the GPU, in the three layouts that nsys has written.

1. up to nsys 2024.4: columns ``Projected Start``, ``Orig Start``, ..., the domain is part of the name.
2. 2024.5 to 2025: columns ``Text``, ``Start``, ``End``, ...; no domain, no host times.
3. from 2026.1: as 2, with a column ``Domain``.

Rules (those of nsys-jax, generalised): of nested Thunk ranges only the innermost launched work, and a thunk is
part of the innermost XlaModule range around it, whatever other ranges (NCCL, user) are between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.errors import DamagedInput
from thence.model.intervals import NO_ROW, chain_to
from thence.readers.nsys_jax.archive import as_int64, renamed

if TYPE_CHECKING:
    import numpy.typing as npt

_LEVELS_LOG2 = 10

_CLASSIC = {
    "name": ("Name",),
    "start": ("Projected Start",),
    "duration": ("Projected Duration",),
    "launch": ("Orig Start", ""),
    "launch_duration": ("Orig Duration", ""),
    "process": ("PID",),
    "thread": ("TID",),
    "range": ("RangeId",),
    "parent": ("ParentId",),
}
_LATER = {
    "name": ("Text",),
    "start": ("Start",),
    "end": ("End",),
    "launch": ("",),
    "launch_duration": ("",),
    "process": ("PID",),
    "thread": ("TID", ""),
    "range": ("Range ID",),
    "parent": ("Parent ID",),
}
_NUMBERS = ("start", "duration", "launch", "launch_duration", "process", "thread", "range", "parent")

THUNK = r"^(?:TSL:)?Thunk:#(?:.*,)?hlo_op=([^#,]+)"
MODULE = r"^(?:TSL:)?XlaModule:#(?:.*,)?hlo_module=([^#,]+)"
PROGRAM_ID = r",program_id=(\d{1,18})#?$"


@dataclass(frozen=True)
class Projection:
    """Device time of thunks and of program executions.

    Attributes:
        thunks: leaf thunks: hlo (instruction), start, duration (ns), process, thread, and module
            (row in ``modules``; null if recording began inside the program).
        modules: executions of programs: name, id (null for programs of the autotuner), start, duration,
            launch, launch_duration (ns; null if the layout lacks host times), process, thread.
        unreadable: rows of thunks or programs that were left out because they have no times.
    """

    thunks: pl.DataFrame
    modules: pl.DataFrame
    unreadable: int


def projection(frame: pl.DataFrame, path: str) -> Projection:
    """Thunks and programs from the content of trace.parquet.

    Args:
        frame: as read, in one of the three layouts.
        path: for messages.

    Raises:
        DamagedInput: a needed column is missing or of another type.
    """
    ranges = _ranges(frame, path)
    named = ranges.with_columns(
        hlo=pl.col("name").str.extract(THUNK),
        module_name=pl.col("name").str.extract(MODULE),
        id=pl.col("name").str.extract(PROGRAM_ID).cast(pl.Int64),
    )
    wanted = pl.col("hlo").is_not_null() | pl.col("module_name").is_not_null()
    timed = pl.col("start").is_not_null() & (pl.col("duration") >= 0)
    unreadable = named.filter(wanted & ~timed.fill_null(value=False)).height
    named = named.filter(timed.fill_null(value=False)).sort("start", "range", maintain_order=True)
    return _placed(named, unreadable)


def _ranges(frame: pl.DataFrame, path: str) -> pl.DataFrame:
    """The ranges of any layout, with the columns name and `_NUMBERS`."""
    if "Projected Start" in frame.columns:
        ranges = renamed(frame, _CLASSIC, path)
    else:
        ranges = as_int64(renamed(frame, _LATER, path), ("start", "end"), path)
        ranges = ranges.with_columns(duration=pl.col("end") - pl.col("start"))
    if ranges.schema["name"] not in (pl.String, pl.Categorical, pl.Null):
        raise DamagedInput(path, f"holds names of type {ranges.schema['name']}; expected text")
    ranges = as_int64(ranges, _NUMBERS, path).with_columns(
        pl.col("name").cast(pl.String), pl.col("thread").fill_null(0), pl.col("process").fill_null(0)
    )
    # Rows without a range id are sums over whole threads, not ranges.
    return ranges.filter(pl.col("range").is_not_null()).unique("range", keep="first", maintain_order=True)


def _placed(named: pl.DataFrame, unreadable: int) -> Projection:
    """Leaf thunks and the innermost program around each of them."""
    parent = _parent_rows(named["range"].to_numpy(), named["parent"])
    is_thunk = named["hlo"].is_not_null().to_numpy()
    is_module = named["module_name"].is_not_null().to_numpy()
    thunks = np.flatnonzero(is_thunk)
    above = chain_to(parent, parent[thunks], is_thunk | is_module)
    outer = above[above >= 0]
    inner = is_thunk.copy()
    inner[outer[is_thunk[outer]]] = False
    module = chain_to(parent, parent[thunks], is_module)
    leaf = inner[thunks]
    # Autotuning runs inside a compile range, and modules nest: only modules that have thunks of their own are kept.
    used = np.unique(module[leaf & (module >= 0)])
    numbers = np.full(named.height + 1, NO_ROW, np.int64)  # the last element is for no module
    numbers[used] = np.arange(len(used))
    place = pl.Series("module", numbers[module[leaf]], pl.Int64)
    columns = ("start", "duration", "process", "thread")
    leaves = named[thunks[leaf]].select("hlo", *columns)
    return Projection(
        thunks=leaves.with_columns(module=place.replace(NO_ROW, None)),
        modules=named[used].select(pl.col("module_name").alias("name"), "id", *columns, "launch", "launch_duration"),
        unreadable=unreadable,
    )


def _parent_rows(ids: npt.NDArray[np.int64], parents: pl.Series) -> npt.NDArray[np.int64]:
    """Row of each range's parent, with cycles and deep nesting cut by `bounded_nesting`."""
    rows = pl.DataFrame({"range": ids, "row": np.arange(len(ids), dtype=np.int64)})
    wanted = pl.DataFrame({"range": parents})
    parent_row = wanted.join(rows, on="range", how="left", maintain_order="left")["row"]
    parent = parent_row.fill_null(NO_ROW).to_numpy().astype(np.int64)
    return bounded_nesting(parent)


def bounded_nesting(parent: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The parents, with those of rows 1024 levels deep or more, or of rows in a cycle, replaced by `NO_ROW`.

    Real ranges nest some 20 deep; a chain of a million would take too long to walk.

    Args:
        parent: parent row of every row, `NO_ROW` for outermost rows.
    """
    far = parent.copy()
    for _ in range(_LEVELS_LOG2):
        far = np.where(far >= 0, far[far], NO_ROW)  # doubles the distance to the ancestor
        if not (far >= 0).any():
            return parent
    return np.where(far >= 0, NO_ROW, parent)
