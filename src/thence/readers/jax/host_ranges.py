"""Host events of an XSpace as the HOST table: categories, readable names, nesting."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW
from thence.model.tables import HOST, HOST_CATEGORIES, THREADS
from thence.readers.categories import positions_of_functions
from thence.readers.nesting import host_order, host_parents, parent_column

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thence.readers.jax.xspace import XSpace

_FRAME = re.compile(r"\$(?P<file>[^ ]+):(?P<line>\d+) (?P<function>.*)", re.DOTALL)
# Overhead records of CUPTI, which XLA writes to separate lines (cupti_collector.cc).
_OVERHEAD = re.compile(r"BUFFER_FLUSH|<UNKNOWN>|CUPTI.*|RESOURCE|(?:DRIVER_)?COMPILER|INSTRUMENTATION")
_COMPILING = re.compile(r"Compil(?!ed)|HloPass|RunHlo|Autotun|^backend_compile")
_JITTED = r"^(?:PjitFunction|PmapFunction)\("
"""A call of a jitted function, the outermost range that jax itself opens (pjit.cc)."""


def host_table(space: XSpace, rank: int, process: int) -> pl.DataFrame:
    """The host events in the columns and the order of `HOST`.

    Each line is a thread. Ranges of jax and XLA (TraceMe) have the category ``op``. A range that
    encloses a call of a jitted function, and is not such a call itself, was opened by the user's
    program: all ranges of its name get the category ``range``.

    Args:
        space: the decoded file.
        rank: of the process.
        process: its id, 0 if unknown.
    """
    ranges, parent = _nested(_named(space))
    named_by_user = _around_jitted(ranges, parent)
    if named_by_user:
        category = pl.when(pl.col("shown").is_in(named_by_user) & (pl.col("category") == "op"))
        dtype = pl.Enum(HOST_CATEGORIES)
        changed = category.then(pl.lit("range", dtype)).otherwise("category")
        ranges, parent = _nested(ranges.with_columns(category=changed))
    return HOST.frame(
        {
            "rank": np.full(ranges.height, rank, np.int32),
            "process": np.full(ranges.height, process, np.int64),
            "thread": ranges["thread"],
            "category": ranges["category"],
            "name": ranges["shown"].cast(pl.Categorical()),
            "start": ranges["start"],
            "duration": ranges["duration"],
            "correlation": ranges["correlation"],
            "position": positions_of_functions(ranges["category"]),
            "parent": parent_column(parent),
        }
    )


def threads_table(space: XSpace, rank: int, process: int) -> pl.DataFrame:
    """The host threads in the columns of `THREADS`."""
    lines = space.lines.filter(pl.col("plane").str.starts_with("/host:")).unique(
        "line", keep="first", maintain_order=True
    )
    return THREADS.frame(
        {
            "rank": np.full(lines.height, rank, np.int32),
            "process": np.full(lines.height, process, np.int64),
            "thread": lines["line"],
            "name": lines["name"],
        }
    )


def _named(space: XSpace) -> pl.DataFrame:
    """Events with the name to show and the category; each distinct name is processed once."""
    name = pl.col("name").cast(pl.String).fill_null("")
    stepped = pl.format("{}#{}", name, pl.col("step"))
    events = space.host.select(
        "thread", "start", "duration", "correlation",
        name=pl.when(pl.col("step").is_not_null()).then(stepped).otherwise(name),
        sure=pl.when(pl.col("step").is_not_null()).then(pl.lit("step"))
        .when(pl.col("correlation").is_not_null()).then(pl.lit("driver")),
    )  # fmt: skip
    names = events.select("name").unique(maintain_order=True)
    texts = names["name"].to_list()
    names = names.with_columns(
        shown=pl.Series([_shown(text) for text in texts], dtype=pl.String),
        likely=pl.Series([_category(text) for text in texts], dtype=pl.String),
    )
    return (
        events.join(names, on="name", how="left", maintain_order="left")
        .with_columns(
            # XLA subscribes to the driver API; a call of the runtime API is recognized only by its name.
            category=pl.when((pl.col("sure") == "driver") & (pl.col("likely") == "runtime"))
            .then("likely")
            .otherwise(pl.coalesce("sure", "likely"))
            .cast(pl.Enum(HOST_CATEGORIES))
        )
        .drop("sure", "likely", "name")
    )


def _shown(name: str) -> str:
    """The name to show: frames of the Python tracer, ``$file.py:12 function``, in the form of HOST_CATEGORIES."""
    match = _FRAME.fullmatch(name)
    if match:
        return f"{match['file']}({match['line']}): {match['function']}"
    return name.removeprefix("$")


def _category(name: str) -> str:
    if name.startswith("$"):
        return "python"
    if re.match(r"cuda[A-Z]", name):
        return "runtime"
    if re.match(r"cu[A-Z]", name):
        return "driver"
    if _OVERHEAD.fullmatch(name):
        return "overhead"
    return "compile" if _COMPILING.search(name) and not re.match(_JITTED, name) else "op"


def _nested(ranges: pl.DataFrame) -> tuple[pl.DataFrame, NDArray[np.int64]]:
    """The ranges in the order of `HOST`, and the row of each range's parent."""
    names = ("thread", "category", "start", "duration")
    columns = [ranges[name].to_physical().to_numpy() for name in names]
    order = host_order(*columns)
    return ranges[order], host_parents(*(column[order] for column in columns))


def _around_jitted(ranges: pl.DataFrame, parent: NDArray[np.int64]) -> list[str]:
    """Names of ranges that enclose a call of a jitted function and are not such calls themselves."""
    jitted = ranges["shown"].str.contains(_JITTED).to_numpy()
    around = np.zeros(ranges.height, np.bool_)
    level = np.flatnonzero(jitted)
    while len(level := np.unique(parent[level])) and level[-1] != NO_ROW:
        level = level[level != NO_ROW]
        level = level[~around[level]]
        around[level] = True
    rows = ranges.filter(pl.Series(around & ~jitted) & (pl.col("category") == "op"))
    return rows["shown"].unique(maintain_order=True).to_list()
