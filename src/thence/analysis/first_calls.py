"""First calls of communicators of PyTorch, which are warm-up.

torch.distributed makes a communicator of NCCL when it is first used: ranks come to that call at very
different times, connections are made and code is loaded. A trace that begins later does not hold that
call, so one is left out only with evidence:

- its sequence number is 1 (torch.distributed counts the collectives of each group from 1), or
- it is the first that its rank launched after a range ``ncclCommInit...``, or
- it is the first of its group in the trace, and took more than `_TIMES` times the median of the others
  (where there are at least `_OTHERS`), by the rank on which each took longest.

All kernels of an instance are left out together. Collectives of XLA programs are warm-up with the execution
that they are part of (`thence.analysis.warmup`), and replays of CUDA graphs come after their capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.units import format_ns

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

__all__ = ["NONE", "FirstCalls", "first_calls"]

_TIMES = 10
_OTHERS = 4
_INITIALISED = r"(?i)^(?:nccl|rccl)CommInit"


@dataclass(frozen=True)
class FirstCalls:
    """First calls that are left out.

    Attributes:
        row: rows in ``trace.collectives``, ascending.
        kernels: how many kernels.
        communicators: of how many groups.
        total_ns: sum of their durations.
    """

    row: pl.Series
    kernels: int
    communicators: int
    total_ns: int

    @property
    def statement(self) -> str:
        """What is left out, one sentence for people; empty where nothing is."""
        if not self.kernels:
            return ""
        groups = (
            "1 communicator" if self.communicators == 1 else f"{self.communicators:,} communicators"
        )
        return (
            f"left out as warm-up: the first call of {groups}, {self.kernels:,} kernels that took "
            f"{format_ns(self.total_ns)} in all; --warm-up keep counts them"
        )


NONE = FirstCalls(pl.Series("row", [], dtype=pl.UInt32), 0, 0, 0)


def first_calls(trace: Attributed, rows: pl.DataFrame) -> FirstCalls:
    """The first calls of communicators; none if nothing else would be left.

    Args:
        trace: whose host ranges may show when communicators were made.
        rows: as `thence.analysis.collective_instances.Instances` holds them.
    """
    eager = rows.filter(~pl.col("of_xla"), ~pl.col("replayed")).with_columns(
        duration=pl.col("end") - pl.col("start"),
        first=pl.col("start") == pl.col("start").min().over("group", "rank", "device"),
    )
    longest = eager.group_by("group", "instance").agg(
        pl.col("duration").max(), pl.col("start").min(), pl.col("first").any()
    )
    slow = longest.filter("first").join(
        longest.filter(~pl.col("first"))
        .group_by("group")
        .agg(usual=pl.col("duration").median(), others=pl.len()),
        on="group",
    )
    slow = slow.filter(pl.col("duration") > _TIMES * pl.col("usual"), pl.col("others") >= _OTHERS)
    numbered = eager.filter("first", pl.col("sequence") == 1)
    seeds = pl.concat(
        [part.select("instance") for part in (slow, numbered, _after_initialising(trace, eager))]
    ).unique()
    found = eager.join(seeds, on="instance", how="semi")
    if found.is_empty() or found.height == rows.height:
        return NONE
    return FirstCalls(
        found["row"].sort(),
        found.height,
        found["group"].n_unique(),
        int(found["duration"].sum()),
    )


def _after_initialising(trace: Attributed, rows: pl.DataFrame) -> pl.DataFrame:
    """The first collective that each rank launched after each range that makes a communicator."""
    made = trace.host.filter(
        pl.col("name").cast(pl.String).str.contains(_INITIALISED).fill_null(value=False)
    )
    launched = rows.drop_nulls("launch").sort("rank", "launch")
    parts = [rows.clear()]
    for (rank,), ranges in made.group_by("rank"):
        ours = launched.filter(pl.col("rank") == rank)
        at = np.searchsorted(ours["launch"].to_numpy(), ranges["start"].to_numpy(), side="left")
        parts.append(ours[np.unique(at[at < ours.height])])
    return pl.concat(parts)
