"""Where the nodes of CUDA graphs were created: nsys records that as CUDA_GRAPH_NODE_EVENTS.

Instantiating a graph clones its nodes; a clone names the node that it was made of
(``originalGraphNodeId``). The moment and thread at which the first of them was created lies inside
the ranges that were open then: XLA's thunk, for instance, that recorded the command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW, innermost
from thence.readers.nsight.store import process_of, thread_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.readers.nsight.store import Store

__all__ = ["creation_rows"]

_CLONES = 8  # of clones: child graphs make two or three


def creation_rows(store: Store, gpu: pl.DataFrame, host: pl.DataFrame) -> npt.NDArray[np.int64]:
    """Host row of the innermost range that was open when each activity's graph node was created.

    Args:
        store: the export.
        gpu: process and node of the activities.
        host: ranges in the order of `HOST`: process, thread, start, duration and parent.

    Returns:
        int64 array, `NO_ROW` outside graphs and where nothing is known.

    Raises:
        DamagedInput: the table cannot be read.
    """
    columns = ("start", "globalTid", "graphNodeId", "originalGraphNodeId")
    frame = store.frame("CUDA_GRAPH_NODE_EVENTS", columns).select(
        "start",
        process_of(pl.col("globalTid")).alias("process"),
        thread_of(pl.col("globalTid")).alias("thread"),
        pl.col("graphNodeId").cast(pl.UInt64, strict=False).alias("node"),
        pl.col("originalGraphNodeId").cast(pl.UInt64, strict=False).alias("original"),
    )
    # A clone is recorded twice, when it is made and when it is known of which node.
    events = frame.drop_nulls(["start", "node", "process"]).sort("original", nulls_last=True)
    events = _originals(events.unique(["process", "node"], keep="first", maintain_order=True))
    events = events.with_columns(range=pl.Series(_around(events, host), dtype=pl.Int64))
    keys = ["process", "node"]
    found = gpu.select(keys).join(
        events.select(*keys, "range"), on=keys, how="left", maintain_order="left"
    )
    return found["range"].fill_null(NO_ROW).to_numpy()


def _originals(events: pl.DataFrame) -> pl.DataFrame:
    """Time and thread of each node's creation are those of the node that it was cloned from."""
    moments = events.select(
        "process", pl.col("node").alias("original"), pl.col("start").alias("began"),
        pl.col("thread").alias("on"), pl.col("original").alias("further"),
    )  # fmt: skip
    for _ in range(_CLONES):
        if events["original"].null_count() == events.height:
            break
        joined = events.join(moments, on=["process", "original"], how="left", maintain_order="left")
        events = joined.select(
            "process", "node", start=pl.coalesce("began", "start"),
            thread=pl.coalesce("on", "thread"), original="further",
        )  # fmt: skip
    return events


def _around(events: pl.DataFrame, host: pl.DataFrame) -> npt.NDArray[np.int64]:
    """Row of the innermost range around each moment."""
    result = np.full(events.height, NO_ROW, np.int64)
    start = host["start"].to_numpy()
    end = start + host["duration"].to_numpy()
    parent = host["parent"].cast(pl.Int64).fill_null(NO_ROW).to_numpy()
    keys = ["process", "thread"]
    rows = host.select(*keys).with_row_index("row").group_by(keys).agg(
        pl.col("row").min().alias("low"), pl.len().alias("count")
    )  # fmt: skip
    moments = events.with_row_index("event").join(rows, on=keys)
    for (low, count), part in moments.group_by("low", "count"):
        time = part["start"].to_numpy()
        track = int(str(low)) + np.arange(int(str(count)))
        result[part["event"].to_numpy()] = innermost(track, start, end, parent, (time, time))
    return result
