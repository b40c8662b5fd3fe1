"""Which device activities belong to one execution of an XLA program, and to one run of a loop body."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW, chain_to

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["by_repetition", "iterations", "launching_ranges"]

_EXECUTES = r"GpuExecutable::ExecuteThunks|:XLA GPU module$"
"""Host ranges that launch everything of one execution on one device (gpu_executable.cc)."""


def launching_ranges(gpu: pl.DataFrame, host: pl.DataFrame) -> NDArray[np.int64]:
    """Host row of the range that executed the program each activity is part of.

    It is around the API call with the same correlation id.

    Args:
        gpu: with the column correlation.
        host: in the columns of `HOST`.

    Returns:
        Rows of ``host``, `NO_ROW` where the call or such a range was not recorded.
    """
    if host.is_empty():
        return np.full(gpu.height, NO_ROW, np.int64)
    calls = (
        host.with_row_index("call")
        .filter(pl.col("correlation").is_not_null())
        .select("correlation", pl.col("call").cast(pl.Int64))
        .unique("correlation", keep="first", maintain_order=True)
    )
    call = (
        gpu.select("correlation")
        .join(calls, on="correlation", how="left", maintain_order="left")["call"]
        .fill_null(NO_ROW)
        .to_numpy()
    )
    parent = host["parent"].fill_null(NO_ROW).cast(pl.Int64).to_numpy()
    names = host["name"].cast(pl.String)
    executes = names.str.contains(_EXECUTES).to_numpy() & (host["category"] == "op").to_numpy()
    inner = chain_to(parent, call, executes)
    # The two ranges nest; the outer one is the whole launch.
    outer = chain_to(parent, np.where(inner == NO_ROW, NO_ROW, parent[inner]), executes)
    return np.where(outer == NO_ROW, inner, outer)


def by_repetition(gpu: pl.DataFrame) -> pl.Series:
    """Number of the execution each activity is part of, for files that lack the host ranges.

    A new one begins whenever the first activity of the program comes again, in a launch of its own.

    Args:
        gpu: columns device, program, hlo_op, name and correlation, sorted by start.
    """
    place = ["device", "program"]
    same = (pl.col("name") == pl.col("name").first()) & pl.col("hlo_op").eq_missing(
        pl.col("hlo_op").first()
    )
    marked = gpu.with_columns(first=same.over(place)).with_columns(
        launch=pl.when("first").then(pl.col("correlation").fill_null(pl.int_range(pl.len())))
    )
    previous = pl.col("launch").forward_fill().shift(1).over(place)
    begins = pl.col("first") & pl.col("launch").ne_missing(previous)
    return marked.with_columns(begins=begins).select(pl.col("begins").cum_sum().over(place) - 1)[
        "begins"
    ]


def iterations(gpu: pl.DataFrame) -> pl.Series:
    """How often the same instruction ran before within the same execution.

    XLA gives every run of an instruction a number of its own (scope_range_id), which all that it
    launches shares. Older files lack it; there, a kernel of the same name is the next run.

    Args:
        gpu: columns execution, hlo, name and scope_range, sorted by start.

    Returns:
        Int32, null where the execution or the instruction is unknown.
    """
    instruction = ["execution", "hlo"]
    scope = pl.col("scope_range")
    numbered = scope.rank("dense").over(instruction) - 1
    counted = pl.int_range(pl.len()).over([*instruction, "name"])
    known = pl.col("execution").is_not_null() & pl.col("hlo").is_not_null()
    number = pl.when(scope.is_not_null() & (scope > 0)).then(numbered).otherwise(counted)
    return gpu.select(iteration=pl.when(known).then(number).cast(pl.Int32))["iteration"]
