"""The iteration of a program's outermost loop that each activity belongs to, by XLA's ranges around thunks.

The range of a while contains the ranges of the thunks that it runs, iteration by iteration: condition and body, or
only the body if the number of iterations is known. An iteration begins whenever the first thunk occurs again. The
evaluation of the condition that ends the loop is not an iteration: if the last iteration has fewer thunks than the
first, its thunks belong to the one before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.columns import row_numbers
from thence.model.intervals import NO_ROW, chain_to

if TYPE_CHECKING:
    from thence.model.arrays import Int64, Mask
    from thence.model.tables import Tables

_LOOP = r"^(?:(?:TSL:)?Thunk:#(?:[^#]*,)?hlo_op=)?(while(?:\.\d+)*)(?:[,#]|$)"
_ROUND = ("loop", "start", "iteration")


def iterations(tables: Tables, launch: Int64, used: pl.Series) -> pl.Series | None:
    """Names such as ``jit_f(0)/while.5(3)``: the first execution of jit_f, the fourth iteration of the loop.

    Args:
        tables: gpu, host and programs are read.
        launch: host row that launched each activity, `NO_ROW` where unknown.
        used: the distinct names of host rows, Categorical.

    Returns:
        One Categorical for each row of gpu, null outside of loops; None where the trace shows no loops.
    """
    names = tables.host["name"]
    loop_names = (
        used.to_frame("name").with_columns(loop=pl.col("name").cast(pl.String).str.extract(_LOOP)).drop_nulls("loop")
    )
    if loop_names.is_empty():
        return None
    op = names.to_frame("name").join(loop_names, on="name", how="left", maintain_order="left")["loop"]
    parent = row_numbers(tables.host["parent"])
    outer = _outermost(parent, launch, op.is_not_null().to_numpy())
    rows = np.flatnonzero(outer != NO_ROW)
    launched = pl.DataFrame(
        {
            "row": rows,
            "loop": outer[rows],
            "start": tables.host["start"].gather(launch[rows]),
            "op": op.gather(outer[rows]),
            "program": tables.gpu["program"].gather(rows),
        }
    )
    executions = tables.programs.select(
        pl.int_range(pl.len(), dtype=pl.Int32).alias("program"),
        of=pl.format("{}({})/", pl.col("name").cast(pl.String), "execution"),
    )
    places = (
        launched.sort("start")
        .join_asof(_rounds(tables.host, launched["loop"]), on="start", by="loop", check_sortedness=False)
        .join(executions, on="program", how="left")
        .select(
            "row",
            place=pl.concat_str(
                pl.col("of").fill_null(""), pl.format("{}({})", "op", pl.col("iteration").fill_null(0))
            ).cast(pl.Categorical()),
        )
    )
    all_rows = pl.DataFrame({"row": np.arange(tables.gpu.height)})
    return all_rows.join(places, on="row", how="left", maintain_order="left")["place"]


def _outermost(parent: Int64, launch: Int64, is_loop: Mask) -> Int64:
    """The outermost loop around each launch."""
    loops = chain_to(parent, launch, is_loop)
    while True:
        inside = np.flatnonzero(loops != NO_ROW)
        up = chain_to(parent, parent[loops[inside]], is_loop)
        nested = up != NO_ROW
        if not nested.any():
            return loops
        loops[inside[nested]] = up[nested]


def _rounds(host: pl.DataFrame, loops: pl.Series) -> pl.DataFrame:
    """When each iteration of some loops began, in the columns of `_ROUND`."""
    inside = (
        host.select(loop=pl.col("parent").cast(pl.Int64), start="start", name=pl.col("name").to_physical())
        .filter(pl.col("loop").is_in(loops.unique().implode()))
        .filter(pl.col("name").is_not_null())
        .sort("loop", "start", maintain_order=True)
    )
    first = pl.col("name") == pl.col("name").first().over("loop")
    rounds = (
        inside.with_columns(iteration=first.cast(pl.Int64).cum_sum().over("loop") - 1)
        .group_by("loop", "iteration", maintain_order=True)
        .agg(pl.col("start").first(), thunks=pl.len())
    )
    last = pl.col("iteration") == pl.col("iteration").max().over("loop")
    short = pl.col("thunks") < pl.col("thunks").first().over("loop")
    return rounds.filter(~(last & short)).select(*_ROUND).sort("start")
