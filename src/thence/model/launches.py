"""Matches device activities to the host rows that launched them, by shared ids."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.columns import not_null
from thence.model.intervals import NO_ROW
from thence.model.tables import API_CALLS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

COUNTED = ("launch, by its number", "GraphLaunch, by its number")
"""Names of launches that were identified by their CUPTI number alone, because the API call itself was not recorded
(`thence.readers.recording.counted_launches`): of a kernel, memcpy or memset, and of a CUDA graph."""
UNCERTAIN: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "launched_together": ("launch, thread unknown", "GraphLaunch, thread unknown"),
        "launched_unseen": ("launch, unseen", "GraphLaunch, unseen"),
        "launched_before": ("launch, before the first place", "GraphLaunch, before the first place"),
        "number_reused": ("launch, of a number used twice", "GraphLaunch, of a number used twice"),
    }
)
"""By the code of the reason, names of launches whose CUPTI number does not determine their thread (other launch, CUDA
graph). They have a time, and are on the artificial thread 0."""

CALLS = pl.col("category").is_in(API_CALLS)
"""Host rows that are API calls."""
IDENTIFIED = pl.col("correlation") != 0
"""Host rows with a correlation id: CUPTI and Nsight Systems write 0 if there is none."""

_GRAPH = ["rank", "device", "graph"]


def matched_rows(gpu: pl.DataFrame, host: pl.DataFrame, key: str, among: pl.Expr) -> npt.NDArray[np.int64]:
    """The host row with the same key as each activity, in the same rank.

    A key that several of these host rows share identifies none of them.

    Args:
        key: column of both: correlation or external. The body of a conditional node of a CUDA graph has
            the correlation id of the launch of its graph (`launch_correlations`).
        among: which host rows count.

    Returns:
        Row numbers in ``host``, one for each row of ``gpu``; `NO_ROW` where there is none.
    """
    ids = launch_correlations(gpu) if key == "correlation" else gpu[key]
    asked = np.flatnonzero(not_null(ids))
    counted = host.select((among & pl.col(key).is_not_null()).fill_null(value=False)).to_series()
    rows = np.flatnonzero(counted.to_numpy())
    of_host, of_gpu = (pl.Series(chosen).cast(pl.UInt32) for chosen in (rows, asked))
    keys = np.concatenate([host[key][of_host].to_numpy(), ids[of_gpu].to_numpy()])
    ranks = np.concatenate([host["rank"][of_host].to_numpy(), gpu["rank"][of_gpu].to_numpy()])
    number = _numbered(ranks, keys)
    number_of_call = number[: len(rows)]
    row = np.full(len(number), NO_ROW, np.int64)
    row[number_of_call] = rows
    row[np.flatnonzero(np.bincount(number_of_call) > 1)] = NO_ROW
    result = np.full(gpu.height, NO_ROW, np.int64)
    result[asked] = row[number[len(rows) :]]
    return result


def _numbered(ranks: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A number for each pair, equal for equal pairs; the sort is fast, because ids ascend with time."""
    order = np.lexsort((keys, ranks))
    first = np.zeros(len(order), np.bool_)
    first[1:] = (np.diff(keys[order]) != 0) | (np.diff(ranks[order]) != 0)
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(first)
    return number


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
    if gpu["graph"].null_count() == gpu.height or not gpu.select(started_on_device.any()).item():
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
    return columns.join(of_body.select("row", "launch"), on="row", how="left", maintain_order="left").select(
        pl.coalesce("launch", "correlation").alias("correlation")
    )["correlation"]
