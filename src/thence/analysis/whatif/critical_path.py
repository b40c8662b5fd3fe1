"""The critical path of a recorded program: a tiling of its time by the work and latencies that determined its end.

The path is followed back from the node that ended last: from each node to the node that determined its time. Its
tiles follow each other without gaps or overlaps, so they add up exactly to the time from the start of the first step
to the end. Work that takes a large part of the path would not necessarily gain as much if it were removed:
`thence.analysis.whatif.answer` predicts gains.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.idle.host_causes import CAUSES, NUMBER, host_causes
from thence.analysis.idle.host_threads import HostThreads, InnermostRows
from thence.analysis.whatif.edges import EDGES
from thence.model.grouped_intervals import distinct
from thence.model.intervals import NEVER, NO_ROW, Intervals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.analysis.whatif.graph import Program
    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed


KINDS = ("gpu", "host", "launch", "gap", "event", "return", "handover", "graph")
"""Kinds of tiles. gpu: an activity runs. host: a thread works. launch: from the launch call to the activity. gap:
between activities of a stream. event: from an event record to the work that waited for it. return: from the end of
the device's work to the end of the call that waited for it. handover: from one thread to another. graph: the
activities of a CUDA graph whose edges are unknown, after its first one."""
_HOST, _GPU = KINDS.index("host"), KINDS.index("gpu")
TILE = {
    "start": pl.Int64(), "duration": pl.Int64(), "kind": pl.Enum(KINDS), "rank": pl.Int32(), "gpu": pl.Int32(),
    "host": pl.Int32(), "cause": pl.Enum(CAUSES), "step": pl.Int32(),
}  # fmt: skip
_AFTER_ACTIVITY = {
    "stream": "gap", "event": "event", "wait": "return", "ranks": "gap", "graph": "gap", "opaque_graph": "graph",
}  # fmt: skip


def critical_path(trace: Attributed, program: Program) -> pl.DataFrame:
    """The tiles in order of time, in the columns of `TILE`.

    Args:
        trace: the trace from which the program was made.
        program: the program; its simulation is exact.

    Returns:
        start (ns on the clock of the graph, see `Program.origin_ns`) and duration (ns); kind; rank; gpu (the activity's
        row in gpu), or host (the row in host that the thread was in) and cause (as ``thence idle`` names it); step
        (number of the step on the first rank, from 0; null if the trace holds none). The tiles of a step add up to the
        time from its start to the start of the next step, or, for the last step, to the end.
    """
    graph = program.graph
    path, kind = _path(program)
    duration = program.gpu.duration
    start, end = graph.time[path[:-1]], graph.time[path[1:]]
    row = program.row[path[:-1]]
    runs = program.is_activity[path[:-1]]
    ran = np.where(runs, np.clip(start + duration[np.where(runs, row, 0)], start, end), start)
    rest = np.array([KINDS.index(_AFTER_ACTIVITY.get(name, name)) for name in EDGES])[kind]
    root = graph.time[path[:1]]
    since = np.minimum(graph.time[program.steps[:1]] if len(program.steps) else graph.time[:1], root)
    parts = [
        _Tiles.of(start, ran, _GPU, gpu=np.where(runs, row, NO_ROW)),
        _Tiles.of(ran, end, rest),
        _Tiles.of(since, root, _HOST),
    ]
    if program.is_activity[path[-1]]:
        last, row = graph.time[path[-1:]], program.row[path[-1:]]
        parts.append(_Tiles.of(last, last + duration[row], _GPU, gpu=row))
    tiles = _Tiles.together(parts)
    return _described(trace, program, tiles, _threads(program, path, tiles.start))


@dataclass(frozen=True)
class _Tiles(Intervals):
    """Tiles (ns on the clock of the graph) that are not empty, in order of time.

    Attributes:
        kind: index in `KINDS`.
        gpu, host: rows of these tables, or `NO_ROW`.
        cause: index in `CAUSES`, or `NO_ROW`.
        step: number of the step on the first rank, or `NO_ROW`.
    """

    kind: Int64
    gpu: Int64
    host: Int64
    cause: Int64
    step: Int64

    @classmethod
    def of(cls, start: Int64, end: Int64, kind: Int64 | int, **columns: Int64) -> _Tiles:
        """Tiles of one kind or of a kind each; columns that are not given are `NO_ROW`. They may be empty."""
        every = {name: np.full(len(start), NO_ROW) for name in ("gpu", "host", "cause", "step")} | columns
        return cls(start, end, np.broadcast_to(np.asarray(kind), len(start)), **every)

    @classmethod
    def together(cls, parts: Sequence[_Tiles]) -> _Tiles:
        """The tiles of all parts in order, without empty ones."""
        every = cls(*(np.concatenate([getattr(part, x.name) for part in parts]) for x in fields(cls)))
        order = np.lexsort((every.end, every.start))
        return every.chosen(order[every.duration[order] > 0])

    def chosen(self, which: Int64 | Mask) -> _Tiles:
        """Some of the tiles."""
        return _Tiles(*(getattr(self, x.name)[which] for x in fields(self)))


def _path(program: Program) -> tuple[Int64, Int64]:
    """Nodes of the path in order, and the kind of edge between each node and the next.

    The path is the last node with its ancestors. They are found by pointer doubling: each round doubles their number.
    """
    graph = program.graph
    decided = np.where(graph.previous == NO_ROW, NEVER, graph.time[graph.previous] + graph.weight)
    before = graph.previous.copy()
    host = program.thread != NO_ROW
    kind = np.where(host, EDGES.index("host"), EDGES.index("stream"))
    offered = graph.time[graph.source] + graph.edge_weight
    order = np.lexsort((offered, graph.target))
    best = order[np.append(graph.target[order][1:] != graph.target[order][:-1], True)] if len(order) else order
    target = graph.target[best]
    wins = offered[best] > decided[target]
    before[target[wins]] = graph.source[best[wins]]
    kind[target[wins]] = program.edge_kind[best[wins]]
    ends = graph.time.copy()
    lasts = program.node_of_activity
    ends[lasts] += np.where(program.end_of_activity == NO_ROW, program.gpu.duration, 0)
    reached = np.array([int(np.argmax(ends))])
    jump = before
    while True:
        further = jump[reached]
        further = further[further != NO_ROW]
        if not len(further):
            break
        reached = distinct(np.concatenate([reached, further]))
        jump = np.where(jump == NO_ROW, NO_ROW, jump[jump])
    return reached, kind[reached[1:]].astype(np.int64)


def _threads(program: Program, path: Int64, times: Int64) -> Int64:
    """The thread of the path at each time: the thread of the path's next node on a host."""
    on_host = path[program.thread[path] != NO_ROW]
    if not len(on_host):
        return np.full(len(times), NO_ROW)
    following = np.minimum(np.searchsorted(program.graph.time[on_host], times, side="right"), len(on_host) - 1)
    result: Int64 = program.thread[on_host][following]
    return result


def _described(trace: Attributed, program: Program, tiles: _Tiles, thread: Int64) -> pl.DataFrame:
    """The tiles in the columns of `TILE`, cut at the starts of steps; tiles of hosts also where the row changes.

    Args:
        trace: the trace from which the program was made.
        program: the program of the path.
        tiles: of the whole path.
        thread: thread of the path at the start of each tile, or `NO_ROW`.
    """
    borders = program.graph.time[program.steps]
    since = int(borders[0]) if len(borders) else int(tiles.start.min(initial=0))
    starts = InnermostRows.of(np.zeros(len(borders), np.int64), borders, np.arange(len(borders)), 1)
    cut = starts.within(np.zeros(len(tiles.start), np.int64), tiles)
    uncut = tiles.chosen(cut.interval)
    parts = replace(uncut, start=cut.start, end=cut.end, step=cut.row.astype(np.int64))
    is_host = parts.kind == _HOST
    every = [parts.chosen(~is_host)]
    if is_host.any():
        every.append(_host_tiles(trace, program, parts.chosen(is_host), thread[cut.interval[is_host]]))
    tiles = _Tiles.together(every)
    return _frame(trace, tiles.chosen(tiles.start >= since))


def _host_tiles(trace: Attributed, program: Program, tiles: _Tiles, thread: Int64) -> _Tiles:
    """Tiles of hosts, cut by the row that the host was in, with causes as in `thence.analysis.idle.causes`.

    Args:
        trace: the trace from which the program was made.
        program: the program of the path.
        tiles: of hosts.
        thread: thread of each tile, or `NO_ROW`.
    """
    hosts = HostThreads.of(trace, program.thread_of_row)
    causes = np.append(host_causes(trace.host, trace.meta.formats), NUMBER["unknown"]).astype(np.int64)
    shift = program.host.start - trace.host["start"].to_numpy()
    known = thread != NO_ROW
    part, nowhere, thread = tiles.chosen(known), tiles.chosen(~known), thread[known]
    moved, rank = shift[hosts.first[thread]], hosts.rank[thread]
    own = hosts.innermost.within(thread, Intervals(part.start - moved, part.end - moved))
    pieces = hosts.informed(rank, own)
    row = pieces.row.astype(np.int64)
    cause = np.where(hosts.runs_program(rank, pieces), NUMBER["host"], causes[row])
    start, end = (time + moved[pieces.interval] for time in (pieces.start, pieces.end))
    found = _Tiles.of(start, end, _HOST, host=row, cause=cause, step=part.step[pieces.interval])
    return _Tiles.together([found, replace(nowhere, cause=np.full(len(nowhere.start), NUMBER["unknown"]))])


def _frame(trace: Attributed, tiles: _Tiles) -> pl.DataFrame:
    """A frame with the columns of `TILE`."""
    gpu = pl.Series(tiles.gpu).replace(NO_ROW, None)
    host = pl.Series(tiles.host).replace(NO_ROW, None)
    ranks = pl.select(
        pl.coalesce(trace.gpu["rank"].gather(gpu.cast(pl.UInt32)), trace.host["rank"].gather(host.cast(pl.UInt32)))
    ).to_series()
    return pl.DataFrame(
        {
            "start": tiles.start,
            "duration": tiles.duration,
            "kind": pl.Series(KINDS, dtype=TILE["kind"]).gather(tiles.kind),
            "rank": ranks,
            "gpu": gpu,
            "host": host,
            "cause": pl.Series(CAUSES, dtype=TILE["cause"]).gather(pl.Series(tiles.cause).replace(NO_ROW, None)),
            "step": pl.Series(tiles.step).replace(NO_ROW, None),
        }
    ).cast(TILE)  # type: ignore[arg-type]


def path_summary(trace: Attributed, tiles: pl.DataFrame) -> pl.DataFrame:
    """The path by kind and name (kernel, or cause on the host): total_ns, share, count; most time first."""
    kernel = trace.gpu["name"].cast(pl.String).gather(tiles["gpu"].cast(pl.UInt32))
    named = tiles.with_columns(name=pl.coalesce(kernel, pl.col("cause").cast(pl.String)))
    total = max(int(tiles["duration"].sum()), 1)
    return (
        named.group_by(pl.col("kind").cast(pl.String), "name")
        .agg(total_ns=pl.col("duration").sum(), count=pl.len().cast(pl.Int64))
        .with_columns(share=pl.col("total_ns") / total)
        .sort("total_ns", "kind", "name", descending=[True, False, False])
    )


def path_track(trace: Attributed, tiles: pl.DataFrame) -> pl.DataFrame:
    """The path as a track of each device, as in `Timeline.spans`; tiles of a host are on its rank's first device.

    Args:
        trace: the trace of the path.
        tiles: as `critical_path` returns them, but on the trace's clock.
    """
    kernel = trace.gpu["name"].cast(pl.String).gather(tiles["gpu"].cast(pl.UInt32))
    device = trace.gpu["device"].gather(tiles["gpu"].cast(pl.UInt32))
    first = trace.gpu.group_by("rank").agg(first=pl.col("device").min())
    host = pl.concat_str(pl.col("kind").cast(pl.String), pl.lit(": "), pl.col("cause").cast(pl.String))
    return (
        tiles.with_columns(device=device, kernel=kernel)
        .with_columns(rank=pl.col("rank").forward_fill().backward_fill())
        .join(first, on="rank", how="left", maintain_order="left")
        .select(
            "rank", pl.coalesce("device", "first").cast(pl.Int32).alias("device"), "start", "duration",
            track=pl.lit("critical path"), name=pl.coalesce("kernel", host, pl.col("kind").cast(pl.String)),
        )
        .drop_nulls(["rank", "device"])
    )  # fmt: skip
