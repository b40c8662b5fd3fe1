"""First calls of PyTorch's communicators, which are warm-up.

torch.distributed creates an NCCL communicator when it is first used: ranks reach that call at very
different times, connections are established and code is loaded. A trace that begins later does not contain the first
call, so a call is left out only if

- its sequence number is 1 (torch.distributed counts the collectives of each group from 1), or
- it is the first that its rank launched after a range ``ncclCommInit...`` began, or
- it is the first of its group and device in the trace, and its host op (``c10d::...``), which creates the communicator,
  took more than `FIRST_CALL_NS` and more than `FIRST_CALL_RATIO` times the median of the group's other ops, if there
  are any.

All kernels of an instance are left out together; a kernel of a batch is an instance of its own.
Collectives of XLA programs are warm-up if the execution that contains them is (`thence.analysis.programs.warmup`).
Replays of CUDA graphs are never first calls, because the capture came before them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.columns import row_numbers
from thence.model.intervals import NO_ROW, chain_to
from thence.model.names import matching
from thence.model.thresholds import FIRST_CALL_NS, FIRST_CALL_RATIO
from thence.units import format_ns

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

_OPS = r"^(?:c10d::|record_param_comms$)"
_INITIALISED = r"(?i)^(?:nccl|rccl)CommInit"


@dataclass(frozen=True)
class FirstCalls:
    """First calls that are left out.

    Attributes:
        row: rows in ``trace.collectives``, ascending.
        kernels: number of kernels.
        communicators: number of groups of these kernels.
        total_ns: sum of the kernels' durations.
    """

    row: pl.Series
    kernels: int
    communicators: int
    total_ns: int

    @property
    def statement(self) -> str:
        """One sentence on what is left out, as text for the user; empty if nothing is."""
        if not self.kernels:
            return ""
        groups = "1 communicator" if self.communicators == 1 else f"{self.communicators:,} communicators"
        kernels = "1 kernel" if self.kernels == 1 else f"{self.kernels:,} kernels"
        return (
            f"left out as warm-up: the first call of {groups}, {kernels} that took "
            f"{format_ns(self.total_ns)} in all; --warm-up keep counts them"
        )


NONE = FirstCalls(pl.Series("row", [], dtype=pl.UInt32), 0, 0, 0)


def first_calls(trace: Attributed, rows: pl.DataFrame) -> FirstCalls:
    """The first calls of communicators; `NONE` if leaving them out would leave no kernel.

    Args:
        trace: its host ranges may show when communicators were created.
        rows: as `thence.analysis.collectives.instances.Instances` holds them.
    """
    several = pl.col("group_size").ne_missing(1)  # a group of one rank establishes no connections
    eager = rows.filter(~pl.col("of_xla"), ~pl.col("replayed"), several).with_columns(
        duration=pl.col("end") - pl.col("start"),
        first=pl.col("start") == pl.col("start").min().over("group", "rank", "device"),
    )
    numbered = eager.filter("first", pl.col("sequence") == 1)
    evident = (numbered, _long_ops(trace, eager), _after_initialising(trace, eager))
    seeds = pl.concat([part.select("instance") for part in evident]).unique()
    earliest = eager.join(seeds, on="instance", how="semi")
    if earliest.is_empty() or earliest.height == rows.height:
        return NONE
    return FirstCalls(
        earliest["row"].sort(), earliest.height, earliest["group"].n_unique(), int(earliest["duration"].sum())
    )


def first_calls_of_ranks(trace: Attributed, rows: pl.DataFrame) -> pl.Series:
    """Rows in ``trace.collectives`` that `first_calls` of each rank alone would leave out.

    Args:
        trace: as for `first_calls`.
        rows: as for `first_calls`.
    """
    instance = pl.struct("instance", "rank").rank("dense").alias("instance")
    alone = rows.with_columns(instance)
    calls = first_calls(trace, alone)
    if not calls.kernels:
        return calls.row
    earliest = alone.filter(pl.col("row").is_in(calls.row.implode()))
    every = alone.group_by("rank").len("every")
    left_out = earliest.group_by("rank").len("left_out").join(every, on="rank")
    kept = left_out.filter(pl.col("left_out") < pl.col("every"))["rank"]
    return earliest.filter(pl.col("rank").is_in(kept.implode()))["row"]


def _long_ops(trace: Attributed, rows: pl.DataFrame) -> pl.DataFrame:
    """First calls whose host op took so long that it must have created the communicator."""
    wanted = matching(trace.host["name"], _OPS)
    launch = trace.places["launch"].gather(rows["gpu"].cast(pl.UInt32))
    parent = row_numbers(trace.host["parent"])
    op = chain_to(parent, row_numbers(launch), wanted.to_numpy())
    known = op != NO_ROW
    took = np.zeros(rows.height, np.int64)
    took[known] = trace.host["duration"].to_numpy()[op[known]]
    timed = rows.with_columns(took=pl.Series(took)).filter(pl.Series(known))
    usual = pl.col("took").filter(~pl.col("first")).median().over("group", "rank", "device")
    long = (pl.col("took") > FIRST_CALL_NS) & (pl.col("took") > FIRST_CALL_RATIO * usual).fill_null(value=True)
    return timed.filter("first", long)


def _after_initialising(trace: Attributed, rows: pl.DataFrame) -> pl.DataFrame:
    """The first collective that each rank launched after the start of each range that creates a communicator."""
    made = trace.host.select("rank", "start").filter(matching(trace.host["name"], _INITIALISED))
    if made.is_empty():
        return rows.clear()
    launched = rows.drop_nulls("launch").sort("rank", "launch").with_row_index("number")
    following = made.sort("start").join_asof(
        launched.select("rank", "number", "launch").sort("launch"),
        left_on="start", right_on="launch", by="rank", strategy="forward", check_sortedness=False,
    )  # fmt: skip
    return launched[following["number"].drop_nulls().unique().sort()].drop("number")
