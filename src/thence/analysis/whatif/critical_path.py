"""The critical path of a recorded program: a tiling of its time by the work and latencies that determined its end.

The path is followed back from the node that ended last: from each node to the node that determined its time. Its
tiles follow each other without gaps or overlaps, so they add up exactly to the time from the start of the first step
to the end. Work that takes a large part of the path would not necessarily gain as much if it were removed:
`thence.analysis.whatif.prediction` predicts gains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.idle.host_causes import CAUSES, NUMBER, host_causes
from thence.analysis.idle.host_threads import HostThreads, InnermostRows
from thence.analysis.whatif.edges import EDGES
from thence.model.intervals import NEVER, NO_ROW, Intervals
from thence.model.row_groups import rows_by_number

if TYPE_CHECKING:
    from thence.analysis.idle.host_threads import Pieces
    from thence.analysis.whatif.graph import Program
    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed


KINDS = ("gpu", "host", "launch", "gap", "event", "return", "handover")
"""Kinds of tiles. gpu: an activity runs. host: a thread works. launch: from the launch call to the activity. gap:
between activities of a stream. event: from an event record to the work that waited for it. return: from the end of
the device's work to the end of the call that waited for it. handover: from one thread to another."""
_HOST = KINDS.index("host")
TILE = {
    "start": pl.Int64(), "duration": pl.Int64(), "kind": pl.Enum(KINDS), "rank": pl.Int32(), "gpu": pl.Int32(),
    "host": pl.Int32(), "cause": pl.Enum(CAUSES), "step": pl.Int32(),
}  # fmt: skip
_AFTER_ACTIVITY = {"stream": "gap", "event": "event", "wait": "return", "ranks": "gap", "graph": "gap"}


def critical_path(trace: Attributed, program: Program) -> pl.DataFrame:
    """The tiles in order of time, in the columns of `TILE`.

    Args:
        trace: the trace from which the program was made.
        program: the program; its replay is exact.

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
    gpu = np.full(len(start), KINDS.index("gpu"))
    columns = [(start, ran, gpu, np.where(runs, row, NO_ROW)), (ran, end, rest, np.full(len(start), NO_ROW))]
    root = graph.time[path[:1]]
    since = np.minimum(graph.time[program.steps[:1]] if len(program.steps) else graph.time[:1], root)
    columns.append((since, root, np.array([_HOST]), np.array([NO_ROW])))
    if program.is_activity[path[-1]]:
        last = np.array([graph.time[path[-1]]])
        of = program.row[path[-1:]]
        columns.append((last, last + duration[of], np.array([KINDS.index("gpu")]), of))
    begins, ends, kinds, rows = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = np.lexsort((ends, begins))
    order = order[ends[order] > begins[order]]
    begins, ends, kinds, rows = (column[order] for column in (begins, ends, kinds, rows))
    tiles = _Tiles(begins, ends, kinds, rows, _threads(program, path, begins))
    return _described(trace, program, tiles)


@dataclass(frozen=True)
class _Tiles:
    """Tiles in order of time: starts and ends, kind (index in `KINDS`), row in gpu, and thread of tiles of a host."""

    start: Int64
    end: Int64
    kind: Int64
    gpu: Int64
    thread: Int64


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
        reached = np.union1d(reached, further)
        jump = np.where(jump == NO_ROW, NO_ROW, jump[jump])
    return reached, kind[reached[1:]].astype(np.int64)


def _threads(program: Program, path: Int64, times: Int64) -> Int64:
    """The thread of the path at each time: the thread of the path's next node on a host."""
    on_host = path[program.thread[path] != NO_ROW]
    if not len(on_host):
        return np.full(len(times), NO_ROW)
    at = np.minimum(np.searchsorted(program.graph.time[on_host], times, side="right"), len(on_host) - 1)
    result: Int64 = program.thread[on_host][at]
    return result


def _described(trace: Attributed, program: Program, tiles: _Tiles) -> pl.DataFrame:
    """The tiles in the columns of `TILE`, cut at the starts of steps; tiles of hosts also where the row changes."""
    borders = program.graph.time[program.steps]
    since = int(borders[0]) if len(borders) else int(tiles.start.min(initial=0))
    steps = InnermostRows(np.append(NEVER, borders), np.arange(-1, len(borders)))
    cut = steps.within(Intervals(tiles.start, tiles.end))
    kind, step = tiles.kind[cut.interval], cut.row.astype(np.int64)
    is_host = kind == _HOST
    nothing = np.full(len(kind), NO_ROW)
    columns = (cut.start, cut.end, kind, tiles.gpu[cut.interval], nothing, nothing, step)
    parts = [tuple(column[~is_host] for column in columns)]
    if is_host.any():
        host = cut.chosen(is_host)
        parts.append(_of_hosts(trace, program, host, tiles.thread[host.interval]))
    begin, end, *others = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((end, begin))
    order = order[(end > begin)[order] & (begin >= since)[order]]
    return _framed(trace, tuple(column[order] for column in (begin, end, *others)))


def _of_hosts(trace: Attributed, program: Program, tiles: Pieces, thread: Int64) -> tuple[Int64, ...]:
    """Tiles of hosts, cut by the row that the host was in, with causes as in `thence.analysis.idle.causes`.

    Args:
        trace: the trace from which the program was made.
        program: the program of the path.
        tiles: starts and ends on the clock of the graph; row is the step of each.
        thread: thread of each tile, or `NO_ROW`.

    Returns:
        The columns that `_framed` takes.
    """
    hosts = HostThreads.of(trace, program.thread_of_row)
    causes = np.append(host_causes(trace.host, trace.meta.formats), NUMBER["unknown"]).astype(np.int64)
    shift = program.host.start - trace.host["start"].to_numpy()
    parts = []
    for number, ours in rows_by_number(thread):
        if number == NO_ROW:
            of, start, end = ours, tiles.start[ours], tiles.end[ours]
            row, cause = np.full(len(ours), NO_ROW), np.full(len(ours), NUMBER["unknown"])
        else:
            moved, rank = int(shift[hosts.first[number]]), int(hosts.rank[number])
            asked = Intervals(tiles.start[ours], tiles.end[ours]).shifted(-moved)
            found = hosts.informed(rank, hosts.innermost[number].within(asked))
            of, start, end = ours[found.interval], found.start + moved, found.end + moved
            row = found.row.astype(np.int64)
            cause = np.where(hosts.runs_program(rank, found), NUMBER["host"], causes[row])
        no_activity, kind = np.full(len(of), NO_ROW), np.full(len(of), _HOST)
        parts.append((start, end, kind, no_activity, row, cause, tiles.row[of].astype(np.int64)))
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def _framed(trace: Attributed, columns: tuple[Int64, ...]) -> pl.DataFrame:
    """A frame with the columns of `TILE` from starts, ends, kinds, rows of gpu and host, causes and steps."""
    begin, end, kind, gpu, host, cause, step = columns
    not_gpu = kind != KINDS.index("gpu")
    of_gpu = pl.Series(np.where(not_gpu, NO_ROW, gpu)).replace(NO_ROW, None)
    of_host = pl.Series(host).replace(NO_ROW, None)
    ranks = pl.select(
        pl.coalesce(
            trace.gpu["rank"].gather(of_gpu.cast(pl.UInt32)), trace.host["rank"].gather(of_host.cast(pl.UInt32))
        )
    ).to_series()
    return pl.DataFrame(
        {
            "start": begin,
            "duration": end - begin,
            "kind": pl.Series(KINDS, dtype=TILE["kind"]).gather(kind),
            "rank": ranks,
            "gpu": of_gpu,
            "host": of_host,
            "cause": pl.Series(CAUSES, dtype=TILE["cause"]).gather(pl.Series(cause).replace(NO_ROW, None)),
            "step": pl.Series(step).replace(NO_ROW, None),
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
