"""Flame graphs: GPU time by the frames that it ran under, as a prefix tree.

total of a frame = self + totals of the frames below it
total of the root = sum of durations, + idle where that is included
                  = span where nothing overlaps; parallel streams make it larger, by sum - busy
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.flame_tree import COLUMNS, Groups, largest, tree
from thence.analysis.group_by import weighed
from thence.analysis.idle import idle_gaps
from thence.analysis.summary import summarize
from thence.attribution.stacks import stacks_of
from thence.errors import UsageError
from thence.model.kernel_names import short_names
from thence.model.places import FLAMES
from thence.model.reasons import REASONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from thence.attribution.stacks import Stacks
    from thence.model.attributed import Attributed
    from thence.model.tables import Meta
    from thence.units import Ns

__all__ = ["COLUMNS", "IDLE", "Flame", "Idle", "Split", "default_kind", "flame"]

IDLE = "GPU idle"
"""Name of the frame that holds idle time."""

_COMMUNICATION = r"(?i)^(?:nccl|rccl|nvshmem)"
_GUESSES = ("module", "label", "ops")


class Split(enum.Enum):
    """Whether the passes stand apart."""

    NONE = "none"
    PHASE = "phase"
    """The outermost frame is forward, backward, or why it is neither."""


class Idle(enum.Enum):
    """Whether idle time has frames of its own."""

    INCLUDE = "include"
    EXCLUDE = "exclude"


@dataclass(frozen=True)
class Flame:
    """GPU time by path, as a prefix tree. All times are ns.

    Attributes:
        meta: facts of the trace.
        by: one of `thence.model.places.FLAMES`.
        split: whether forward and backward stand apart.
        ranks: those that are in it.
        devices: how many are in it.
        span_ns, busy_ns, sum_ns: as in `thence.analysis.summary`, of those ranks.
        nodes: one row per frame, a frame after the one around it: node, parent (null for the root),
            depth, name, full_name (of kernels whose name is shortened, else null), kind (root, frame,
            unattributed, compute, communication, copy, idle, or smaller: frames put together by
            `largest`), self_ns, total_ns, count (activities; of idle frames gaps), forward_ns and
            backward_ns (parts of total_ns), idle.
        notes: what must be said beside it, one sentence each.
    """

    meta: Meta
    by: str
    split: Split
    ranks: tuple[int, ...]
    devices: int
    span_ns: Ns
    busy_ns: Ns
    sum_ns: Ns
    nodes: pl.DataFrame
    notes: tuple[str, ...]

    @property
    def total_ns(self) -> Ns:
        """Time of the root."""
        return int(self.nodes["total_ns"][0])

    def largest(self, nodes: int) -> Flame:
        """The same with at most about so many frames; smaller ones are put together beside their siblings."""
        kept, hidden = largest(self.nodes, nodes)
        if not hidden:
            return self
        smaller = kept.filter(pl.col("kind") == "smaller")
        share = 100 * int(smaller["total_ns"].sum()) / max(self.total_ns, 1)
        note = (
            f"{hidden:,} of {self.nodes.height:,} frames were too small to keep apart; put together, "
            f"they are {share:.2g} % of the time."
        )
        return dataclasses.replace(self, nodes=kept, notes=(*self.notes, note))

    def stacks(self) -> Iterator[tuple[tuple[str, ...], Ns]]:
        """Frames and time of each stack that took any, outermost frame first, without the root.

        Larger frames come before smaller ones beside them, idle ones last.
        """
        ordered = self.nodes.sort("idle", "total_ns", "node", descending=[True, False, False])
        below: dict[int | None, list[tuple[int, str, Ns]]] = {}
        for node, parent, name, self_ns in ordered.select(
            "node", "parent", "name", "self_ns"
        ).iter_rows():
            below.setdefault(parent, []).append((node, name, self_ns))
        waiting: list[tuple[tuple[str, ...], tuple[int, str, Ns]]] = [
            ((), child) for child in below.get(0, [])
        ]
        while waiting:
            outer, (node, name, self_ns) = waiting.pop()
            frames = (*outer, name)
            if self_ns:
                yield frames, self_ns
            waiting += ((frames, child) for child in below.get(node, []))


def default_kind(trace: Attributed) -> str:
    """The kind of path that says most of a trace: op_name for XLA, else module, label or ops, as recorded."""
    if not trace.programs.is_empty():
        return "op_name"
    known = (kind for kind in _GUESSES if not trace.places[kind].is_null().all())
    return next(known, "ops")


def flame(
    trace: Attributed,
    by: str,
    split: Split = Split.NONE,
    idle: Idle = Idle.INCLUDE,
) -> Flame:
    """The flame graph of a trace.

    Args:
        trace: attributed.
        by: one of `thence.model.places.FLAMES`.
        split: whether forward and backward stand apart.
        idle: whether idle time has frames of its own.

    Raises:
        UsageError: ``by`` is none of them.
        MissingData: the trace holds no device activity.
    """
    if by not in FLAMES:
        raise UsageError(f"no flame graph by {by!r}; choose one of {', '.join(FLAMES)}")
    totals = summarize(trace, "kind")
    ranks = sorted(trace.gpu["rank"].unique().to_list())
    stacks = stacks_of(trace, by)
    groups = _groups(trace, stacks, split)
    if idle is Idle.INCLUDE:
        groups = groups.with_more(_idle(trace))
    return Flame(
        meta=trace.meta,
        by=by,
        split=split,
        ranks=tuple(ranks),
        devices=totals.devices,
        span_ns=totals.span_ns,
        busy_ns=totals.busy_ns,
        sum_ns=totals.sum_ns,
        nodes=tree(groups, _root_name(trace, ranks)),
        notes=_notes(totals.sum_ns - totals.busy_ns, idle, stacks),
    )


def _root_name(trace: Attributed, ranks: Sequence[int]) -> str:
    if len(ranks) > 1:
        return f"GPU time of {len(ranks)} ranks"
    return f"GPU time of rank {ranks[0]}" if trace.selection.ranks else "GPU time"


def _notes(overlap: Ns, idle: Idle, stacks: Stacks) -> tuple[str, ...]:
    notes = []
    if overlap and idle is Idle.INCLUDE:
        notes.append(
            "The total is larger than the span of the GPUs: activities on parallel streams overlap, "
            "and each counts in full."
        )
    elif overlap:
        notes.append("Activities on parallel streams overlap; each counts in full.")
    if stacks.shared:
        notes.append(
            "A fusion's time is divided among the stacks of what it is made of, in proportion to "
            "their estimated work; it counts as one activity at each."
        )
    return tuple(notes)


def _groups(trace: Attributed, stacks: Stacks, split: Split) -> Groups:
    """Activities that share their frames and their kernel, put together."""
    claims = stacks.claims
    at = claims["gpu"].cast(pl.UInt32)
    time = weighed(trace, claims) if stacks.shared else trace.gpu["duration"].gather(at)
    gpu, places = trace.gpu, trace.places
    rows = pl.DataFrame(
        {
            "gpu": at,
            "path": claims["path"],
            "name": gpu["name"].gather(at),
            "kind": _kinds(trace).gather(at),
            "phase": places["phase"].gather(at).cast(pl.String),
            "outermost": _outermost(trace, split).gather(at),
            "time": time,
        }
    )
    keys = ["path", "name", "kind", "outermost"]
    grouped = rows.group_by(keys, maintain_order=True).agg(
        "gpu",
        self_ns=pl.col("time").sum(),
        count=pl.len().cast(pl.Int64),
        forward_ns=pl.col("time").filter(pl.col("phase") == "forward").sum(),
        backward_ns=pl.col("time").filter(pl.col("phase") == "backward").sum(),
    )
    names = grouped["name"].cast(pl.String)
    kernels = names.filter(grouped["kind"].is_in(["compute", "communication"])).unique().to_list()
    short = short_names([name for name in kernels if name is not None])
    frames = []
    for path, name, kind, outer in grouped.select("path", names, "kind", "outermost").iter_rows():
        around = [] if outer is None else [(outer, "frame", None)]
        role = "frame" if stacks.paths[path].attributed else "unattributed"
        around += [(frame, role, None) for frame in stacks.paths[path].frames]
        shown = short.get(name, name) or "(no name)"
        frames.append((*around, (shown, kind, None if shown == name else name)))
    members = grouped["gpu"] if stacks.shared else None
    return Groups(frames, grouped.select("self_ns", "count", "forward_ns", "backward_ns"), members)


def _outermost(trace: Attributed, split: Split) -> pl.Series:
    """Name of the outermost frame of each activity; null where there is none."""
    places = trace.places
    if split is Split.NONE:
        return pl.Series([None], dtype=pl.String).new_from_index(0, places.height)
    reason = pl.format("[{}]", pl.col("phase_rule").cast(pl.String).replace(REASONS))
    return places.select(pl.coalesce(pl.col("phase").cast(pl.String), reason)).to_series()


def _kinds(trace: Attributed) -> pl.Series:
    """What each activity is: compute, communication or copy."""
    described = np.zeros(trace.gpu.height, np.bool_)
    described[trace.collectives["gpu"].drop_nulls().to_numpy()] = True
    copy = pl.col("kind").is_in(["memcpy", "memset"])
    named = pl.col("name").cast(pl.String).str.contains(_COMMUNICATION).fill_null(value=False)
    return trace.gpu.select(
        pl.when(copy)
        .then(pl.lit("copy"))
        .when(pl.lit(pl.Series(described)) | named)
        .then(pl.lit("communication"))
        .otherwise(pl.lit("compute"))
    ).to_series()


def _idle(trace: Attributed) -> Groups:
    """Idle time: by program where there are XLA programs, else by device."""
    gaps = idle_gaps(trace).group_by("rank", "device", "where", "program", maintain_order=True).agg(
        self_ns=pl.col("duration").sum(), count=pl.len().cast(pl.Int64)
    )  # fmt: skip
    several = trace.gpu.select("rank", "device").n_unique() > 1
    frames = []
    for rank, device, where, program in gaps.select(
        "rank", "device", "where", "program"
    ).iter_rows():
        inner = []
        if where is not None:
            inner.append("after the last program" if program is None else f"{where} {program}")
        elif several:
            inner.append(f"rank {rank} device {device}")
        frames.append(tuple((name, "idle", None) for name in (IDLE, *inner)))
    zero = pl.lit(0, pl.Int64)
    return Groups(frames, gaps.select("self_ns", "count", forward_ns=zero, backward_ns=zero), None)
