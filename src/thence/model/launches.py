"""Matches device activities to the host rows that launched them, by shared ids."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import polars as pl

from thence.model.intervals import NO_ROW
from thence.model.tables import API_CALLS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt

__all__ = ["CALLS", "COUNTED", "IDENTIFIED", "UNCERTAIN", "launch_correlations", "matched_rows"]

COUNTED = ("launch, by its number", "GraphLaunch, by its number")
"""Names of launches, of something else and of a CUDA graph, that were found by CUPTI's number of them: the call
itself was not recorded (`thence.readers.recording.counted`)."""
UNCERTAIN: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "launched_together": ("launch, of which thread?", "GraphLaunch, of which thread?"),
        "launched_unseen": ("launch, unseen", "GraphLaunch, unseen"),
        "launched_before": ("launch, before all places", "GraphLaunch, before all places"),
        "number_reused": ("launch, of a number used twice", "GraphLaunch, of a number used twice"),
    }
)
"""Names of launches whose number does not tell their thread, by the code of the reason. They have a time, on a
thread of their own, 0."""

CALLS = pl.col("category").is_in(API_CALLS)
"""Host rows that are API calls."""
IDENTIFIED = pl.col("correlation") != 0
"""Host rows with a correlation id: CUPTI and Nsight Systems write 0 where there is none."""

_GRAPH = ["rank", "device", "graph"]


def matched_rows(
    gpu: pl.DataFrame, host: pl.DataFrame, key: str, among: pl.Expr
) -> npt.NDArray[np.int64]:
    """The host row with the same key as each activity, in the same rank.

    A key that several of these host rows share identifies none of them.

    Args:
        gpu: table of activities.
        host: table of host ranges.
        key: column of both: correlation or external. The body of a conditional node of a CUDA graph has
            the correlation id of the launch of its graph (`launch_correlations`).
        among: which host rows count.

    Returns:
        Row numbers in ``host``, one for each row of ``gpu``; `NO_ROW` where there is none.
    """
    if key == "correlation":
        gpu = gpu.with_columns(launch_correlations(gpu))
    used = gpu.select("rank", key).filter(pl.col(key).is_not_null()).unique().lazy()
    once = (
        host.with_row_index("launch")
        .lazy()
        .filter(among)
        .select("rank", key, "launch")
        .join(used, on=["rank", key], how="semi")
        .unique(["rank", key], keep="none")
    )
    joined = (
        gpu.lazy()
        .select("rank", key)
        .join(once, on=["rank", key], how="left", maintain_order="left")
    )
    return (
        joined.select(pl.col("launch").cast(pl.Int64).fill_null(NO_ROW))
        .collect()
        .to_series()
        .to_numpy()
    )


def launch_correlations(gpu: pl.DataFrame) -> pl.Series:
    """The correlation id of the API call that each activity came from.

    The driver starts the body of a conditional node of a CUDA graph on the device, and CUPTI then records
    the correlation id 0. Such an activity came from the launch of its graph: that of the latest activity
    of the same graph with an id of its own that started no later. Launches of one executable graph do
    not overlap.

    Args:
        gpu: columns rank, device, graph, start and correlation, as in `GPU`, in any order.

    Returns:
        Column correlation, in the order of ``gpu``; 0 only where no such activity precedes.
    """
    started_on_device = (pl.col("correlation") == 0) & pl.col("graph").is_not_null()
    if not gpu.select(started_on_device.any()).item():
        return gpu["correlation"]
    columns = gpu.select(*_GRAPH, "start", "correlation").with_row_index("row")
    bodies = columns.filter(started_on_device)
    launched = columns.filter(pl.col("correlation") != 0, pl.col("graph").is_not_null())
    of_body = bodies.sort("start").join_asof(
        launched.sort("start").select(*_GRAPH, "start", pl.col("correlation").alias("launch")),
        on="start",
        by=_GRAPH,
        strategy="backward",
        check_sortedness=False,
    )
    return columns.join(
        of_body.select("row", "launch"), on="row", how="left", maintain_order="left"
    ).select(pl.coalesce("launch", "correlation").alias("correlation"))["correlation"]
