"""The forward op of each backward op.

Kineto records this link in two ways: as a flow arrow between the two ops, which is exact, and as the
autograd sequence number of both ops together with the thread that ran the forward op. Traces written
without flows have only the latter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.arrays import Int64


def forward_rows(ops: dict[str, Any], flows: dict[str, Any], parent: npt.NDArray[Any]) -> Int64:
    """Host row of the forward op, for the rows of backward ops.

    Args:
        ops: columns of the host rows with a sequence number, in their order: row, rank, track (number
            of the thread in the order of the host table), start, sequence, forward_thread (0 for a
            forward op, else the autograd engine's number of the thread that ran it).
        flows: columns of the ends of forward-backward arrows: id, rank, track (-1 for a thread without host
            rows), time, is_start.
        parent: parent row of every host row, `NO_ROW` for outermost rows.

    Returns:
        int64 array with a value for each host row, `NO_ROW` if it has no forward op.
    """
    forward = np.full(len(parent), NO_ROW, np.int64)
    begins, ends = _by_flow(ops, flows)
    forward[ends] = begins
    # An arrow ends at the backward op itself; the autograd engine's range around it has the same sequence
    # number and gets the same forward op.
    sequence = np.full(len(parent), NO_ROW, np.int64)
    sequence[ops["row"]] = ops["sequence"]
    around = parent[ends]
    same = (around != NO_ROW) & (sequence[around] == sequence[ends]) & (forward[around] == NO_ROW)
    forward[around[same]] = begins[same]
    without = (ops["forward_thread"] != 0) & (forward[ops["row"]] == NO_ROW)
    if without.any():
        pairs = _by_sequence(pl.DataFrame(ops), pl.Series(without))
        forward[pairs["row"].to_numpy()] = pairs["forward"].to_numpy()
    return forward


def _by_flow(ops: dict[str, Any], flows: dict[str, Any]) -> tuple[Int64, Int64]:
    """The rows at which arrows begin, and the rows at which they end.

    Each end of an arrow is matched to the op that begins at the same time on the same thread, the
    innermost op if there are several.
    """
    if not len(flows["id"]) or not len(ops["row"]):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    op_key, flow_key = _keys(ops, flows)
    op_before = np.searchsorted(op_key, flow_key, side="right") - 1
    tied = (op_before >= 0) & (op_key[op_before] == flow_key)
    row = ops["row"][op_before]
    _, identity = np.unique(flows["id"], return_inverse=True)
    arrow = flows["rank"].astype(np.int64) * (int(identity.max()) + 1) + identity
    begin_ids, begin_rows = _once(arrow[tied & flows["is_start"]], row[tied & flows["is_start"]])
    end_ids, end_rows = _once(arrow[tied & ~flows["is_start"]], row[tied & ~flows["is_start"]])
    _, begins, ends = np.intersect1d(begin_ids, end_ids, assume_unique=True, return_indices=True)
    return begin_rows[begins], end_rows[ends]


def _keys(ops: dict[str, Any], flows: dict[str, Any]) -> tuple[Int64, Int64]:
    """(track, time) as one number, for ops and flows; ascending for ops, which are sorted by track and start."""
    first = min(int(ops["start"].min()), int(flows["time"].min()))
    span = max(int(ops["start"].max()), int(flows["time"].max())) - first + 1
    start, time = ops["start"] - first, flows["time"] - first
    if (int(ops["track"].max()) + 2) * span >= 1 << 63:  # times that far apart are rare: number them
        _, moment = np.unique(np.concatenate([start, time]), return_inverse=True)
        start, time = moment[: len(start)], moment[len(start) :]
        span = len(moment)
    return ops["track"] * span + start, flows["track"] * span + time


def _once(keys: Int64, rows: Int64) -> tuple[Int64, Int64]:
    """Keys that occur exactly once, and their rows; other keys do not identify an arrow with certainty."""
    distinct, first, counts = np.unique(keys, return_index=True, return_counts=True)
    return distinct[counts == 1], rows[first[counts == 1]]


def _by_sequence(ops: pl.DataFrame, wanted: pl.Series) -> pl.DataFrame:
    """The last forward op with the same sequence number before each wanted backward op.

    Each forward thread has its own sequence numbers. The file does not state which thread the autograd engine's
    number stands for: the thread that has most of the wanted sequence numbers is taken.
    """
    backward = ops.filter(wanted).sort("start")
    forward = ops.filter(pl.col("forward_thread") == 0).sort("start")
    threads = (
        backward.select("rank", "sequence", "forward_thread")
        .unique()
        .join(forward.select("rank", "sequence", "track").unique(), on=["rank", "sequence"])
        .group_by("rank", "forward_thread", forward_track="track")
        .len()
        .sort("len", "forward_track", descending=[True, False])
        .unique(["rank", "forward_thread"], keep="first", maintain_order=True)
        .select("rank", "forward_thread", "forward_track")
    )
    return (
        backward.join(threads, on=["rank", "forward_thread"])
        .sort("start")
        .join_asof(
            forward.select("sequence", "start", forward_track="track", forward="row"),
            on="start",
            by=["sequence", "forward_track"],
            strategy="backward",
            check_sortedness=False,
        )
        .drop_nulls("forward")
        .select("row", "forward")
    )
