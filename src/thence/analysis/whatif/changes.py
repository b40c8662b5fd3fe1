"""Changes to a recorded program, and the graph of the program with one of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import polars as pl

from thence.analysis.activity_rooflines import known_peaks, rooflines_of_known_devices
from thence.analysis.idle.host_causes import CAUSES, NUMBER, host_causes
from thence.analysis.idle.host_threads import HostThreads, program_spans
from thence.analysis.idle.places import Contexts, HostPlaces
from thence.analysis.whatif.edges import EDGES
from thence.analysis.whatif.graph import stream_weights
from thence.analysis.whatif.simulation import BEFORE_ALL
from thence.attribution.launch_places import places_of_rows
from thence.errors import UsageError
from thence.model.collective_kinds import kind_of
from thence.model.columns import row_numbers, values_or
from thence.model.grouped_intervals import rows_by_number
from thence.model.intervals import NO_ROW, Intervals, chain_to, covered_lengths
from thence.model.names import FROM_DEVICE, among, distinct_names, matching
from thence.model.own_code import OwnCode
from thence.model.places import FREE_BY, PLACES

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.analysis.whatif.graph import Program
    from thence.analysis.whatif.simulation import Graph
    from thence.model.arrays import Float64, Int64, Mask
    from thence.model.attributed import Attributed

    OfThreads = dict[int, Intervals]

Part = Literal["kernels", "with host work", "with waiting", "without waiting", ""]
_HOST_CATEGORIES = {"label": ("range",), "module": ("module",), "op": ("op",), "source": ("python",)}
"""Kinds of places whose work on the host can be changed with their kernels, and the categories of its host rows."""
_SHARE = re.compile(r"(.+)=([0-9]*\.?[0-9]+)")
_REMOVED = 2 * BEFORE_ALL
"""Weight of an edge that constrains nothing."""
_ITEM = r"aten::item|_local_scalar_dense"
_MAX_ITEM_BYTES = 16
"""The largest number that item() can return, in bytes: complex128."""


@dataclass(frozen=True)
class Change:
    """One change.

    Attributes:
        text: the change as the user wrote it.
        action: free and scale: work takes less (or more) time; at-roofline: as much as the device allows, as far as
            that is known (`thence.analysis.activity_rooflines`); no-wait: calls do not wait; on-time: no other rank
            waits for a rank.
        by: kind of the changed work, one of `FREE_BY`; empty for other actions.
        pattern: regular expression that is searched in names; for on-time, the number of the rank.
        factor: new time / recorded time; for at-roofline, the share of the roofline that is reached.
        part: which of two meanings the change has. kernels: only their time on the device; with host work: also the
            work of the host for them and for their backward operators. without waiting: only the time in which a
            collective moved data; with waiting: in addition, no rank waits for another in the collective.
    """

    text: str
    action: Literal["free", "scale", "at-roofline", "no-wait", "on-time"]
    by: str
    pattern: str
    factor: float = 0.0
    part: Part = ""

    @property
    def title(self) -> str:
        """The action and the text of the change."""
        return f"{self.action} {self.text}"

    @property
    def parts(self) -> list[Change]:
        """The change with each of its meanings."""
        if self.action == "at-roofline":
            return [replace(self, part="kernels")]
        if self.by == "collective":
            return [replace(self, part=part) for part in ("without waiting", "with waiting")]
        if self.by in _HOST_CATEGORIES:
            return [replace(self, part=part) for part in ("kernels", "with host work")]
        return [self]


def parse_change(action: str, text: str) -> Change:
    """Parses a change from the command line.

    These are free KIND:NAME, scale KIND:REGEX=FACTOR, at-roofline KIND:REGEX[=SHARE], no-wait WHAT and on-time rank:N.

    Raises:
        UsageError: the text is not such a change.
    """
    if action == "no-wait":
        return Change(text, "no-wait", "", _checked(_ITEM if text == "item" else text))
    by, colon, pattern = text.partition(":")
    if action == "on-time":
        if by != "rank" or not pattern.isdecimal():
            raise UsageError(f"--on-time takes rank:NUMBER; got {text!r}")
        return Change(text, "on-time", "", pattern)
    factor = 0.0
    if action == "at-roofline":
        return _at_roofline(text, by, pattern)
    if action == "scale":
        pattern, equals, number = pattern.rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = -1.0
        if not equals or not 0 <= factor <= 1000:
            raise UsageError(f"--scale takes KIND:REGEX=FACTOR, the factor from 0 to 1000; got {text!r}")
    by = "source" if by == "line" else by
    if not colon or by not in FREE_BY or not pattern:
        raise UsageError(f"--{action} takes KIND:NAME, the kind one of {', '.join(FREE_BY)}; got {text!r}")
    if by == "cause" and pattern not in CAUSES:
        raise UsageError(f"{pattern!r} is not a cause of idle time; choose one of {', '.join(CAUSES)}")
    return Change(text, "free" if action == "free" else "scale", by, _checked(pattern), factor)


def _at_roofline(text: str, by: str, pattern: str) -> Change:
    shared = _SHARE.fullmatch(pattern)
    expression, share = (shared[1], float(shared[2])) if shared else (pattern, 1.0)
    by = "source" if by == "line" else by
    if by not in FREE_BY or by == "cause" or not expression or not 0 < share <= 1:
        kinds = ", ".join(kind for kind in FREE_BY if kind != "cause")
        raise UsageError(
            f"--at-roofline takes KIND:REGEX or KIND:REGEX=SHARE, the kind one of {kinds}, the share above 0 and at "
            f"most 1; got {text!r}"
        )
    return Change(text, "at-roofline", by, _checked(expression), share)


def _checked(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{pattern!r} is not a valid regular expression: {error}") from error
    return pattern


def activities_of(trace: Attributed, change: Change) -> Mask:
    """Mask of the activities that a change applies to."""
    if change.by == "kernel":
        return _matching(trace.gpu["name"], change.pattern)
    if change.by == "collective":
        rows = trace.collectives.select("gpu", name=kind_of(pl.col("collective")))
        result = np.zeros(trace.gpu.height, np.bool_)
        chosen = rows.filter(pl.Series(_matching(rows["name"], change.pattern)))["gpu"].drop_nulls()
        result[chosen.to_numpy()] = True
        return result
    if change.by in PLACES:
        return _matching(trace.places[change.by], change.pattern)
    return np.zeros(trace.gpu.height, np.bool_)


def _matching(names: pl.Series, pattern: str) -> Mask:
    """Mask of the names in which the pattern is found; each distinct name is searched once."""
    distinct = distinct_names(names)
    expression = re.compile(pattern)
    matches = [expression.search(text) is not None for text in distinct.cast(pl.String)]
    return among(names, distinct.filter(pl.Series(matches, dtype=pl.Boolean)))


def modelled_share(trace: Attributed, change: Change) -> float | None:
    """Share of the time of the activities of a change to the roofline that has one; None of other changes."""
    if change.action != "at-roofline":
        return None
    known = rooflines_of_known_devices(trace)["roofline_ns"].is_not_null().to_numpy()
    time = np.where(activities_of(trace, change), trace.gpu["duration"].to_numpy(), 0)
    return float(time[known].sum() / max(time.sum(), 1))


@dataclass(frozen=True)
class ChangeFacts:
    """Data that several changes of one program use, computed lazily and cached.

    Attributes:
        trace: the attributed trace.
        program: its graph.
    """

    trace: Attributed
    program: Program
    _places: dict[str, pl.Series] = field(default_factory=dict)

    @cached_property
    def contexts(self) -> Contexts:
        """The contexts of all host rows."""
        return Contexts.of(self.trace.host)

    @cached_property
    def causes(self) -> npt.NDArray[np.uint8]:
        """Number of the cause that each host row stands for, as in `thence.analysis.idle.host_causes`."""
        return host_causes(self.trace.host, self.trace.meta.formats)

    @cached_property
    def hosts(self) -> HostThreads:
        """The innermost host row of every thread over time."""
        return HostThreads.of(self.trace, self.program.thread_of_row)

    @cached_property
    def roofline_ns(self) -> Float64:
        """The roofline of each activity; NaN where it is not known.

        Raises:
            MissingData: the peaks of none of the devices are known.
        """
        known_peaks(self.trace, None)  # or it is refused
        rated = rooflines_of_known_devices(self.trace)
        result: Float64 = values_or(rated["roofline_ns"], np.nan)
        return result

    def rows_at(self, by: str, pattern: str) -> Mask:
        """Mask of the host rows of a kind of places (`_HOST_CATEGORIES`) whose place matches the pattern."""
        of_kind = self.trace.host["category"].is_in(_HOST_CATEGORIES[by]).to_numpy()
        if by not in self._places:
            rows = pl.Series(np.flatnonzero(of_kind))
            self._places[by] = HostPlaces.of(self.trace, self.contexts, [rows], [by]).names[by]
        matching = np.append(_matching(self._places[by], pattern), False)
        result: Mask = of_kind & matching[self.contexts.number[:-1]]
        return result


def changed(facts: ChangeFacts, change: Change, activities: Mask) -> Graph | None:
    """The graph of a program with a change; None if the trace holds nothing that the change applies to.

    Args:
        facts: data of the program.
        activities: mask of its activities, from `activities_of`.
    """
    trace, program = facts.trace, facts.program
    if change.action == "no-wait":
        return _without_waits(trace, program, change)
    if change.action == "on-time":
        return _on_time(trace, program, int(change.pattern))
    graph = program.graph
    if change.by == "cause":
        intervals = _in_cause(facts, change)
    elif change.part == "with host work":
        intervals = _inside(program, _host_rows_of(facts, change))
    else:
        intervals = {}
    if not activities.any() and not intervals:
        return None
    factor = np.where(activities, change.factor, 1.0)
    if change.action == "at-roofline":
        reached = facts.roofline_ns / (change.factor * np.maximum(program.gpu.duration, 1))
        activities = activities & ~np.isnan(reached)
        if not activities.any():
            return None
        factor = np.where(activities, np.minimum(reached, 1.0), 1.0)
    duration = np.rint(program.gpu.duration * factor).astype(np.int64)
    moves = np.rint(program.moves * factor).astype(np.int64)
    edge_weight = _edge_weights(program, duration, moves)
    if change.part == "with waiting":
        waited = (program.edge_kind == EDGES.index("ranks")) & activities[np.maximum(program.edge_activity, 0)]
        edge_weight[waited] = _REMOVED
    weight = stream_weights(program, duration, moves)
    weight = _less_host_work(program, weight, intervals, change.factor)
    return replace(graph, weight=weight, edge_weight=edge_weight, shared=graph.order)


def _edge_weights(program: Program, duration: Int64, moves: Int64) -> Int64:
    """Weights of the edges with changed durations of activities, and changed moving times of collectives."""
    row, kind = program.edge_activity, program.edge_kind
    counted = (row != NO_ROW) & (kind != EDGES.index("ranks"))
    result = program.graph.edge_weight.copy()
    before = program.gpu.duration
    result[counted] += (duration - before)[row[counted]]
    shared = kind == EDGES.index("ranks")
    result[shared] = moves[row[shared]]
    return result


def _host_rows_of(facts: ChangeFacts, change: Change) -> Mask:
    """Mask of the host rows whose work a change changes, including backward operators of matching forward rows."""
    host = facts.trace.host
    result = facts.rows_at(change.by, change.pattern)
    parent, forward = (row_numbers(host[name]) for name in ("parent", "forward"))
    backward = np.flatnonzero(forward != NO_ROW)
    result[backward] |= chain_to(parent, forward[backward], result.copy()) != NO_ROW
    return result


def _in_cause(facts: ChangeFacts, change: Change) -> OfThreads:
    """The intervals in which each thread's innermost row stands for a cause, by the rules for idle time.

    For the cause host, these include intervals in which the main thread of a Python program is in no recorded row.
    """
    trace, program = facts.trace, facts.program
    host = trace.host
    if host.is_empty():
        return {}
    wanted: Mask = facts.causes == NUMBER[change.pattern]
    begins = facts.hosts.first
    shift = program.host.start[begins] - host["start"].to_numpy()[begins]
    runs = {}
    if change.pattern == "host":
        runs = program_spans(trace, begins, program.host.end - np.repeat(
            shift, np.diff(np.append(begins, host.height))
        ))  # fmt: skip
    thread, times = facts.hosts.innermost.chosen(wanted, runs)
    start, end = times.start + shift[thread], times.end + shift[thread]
    return {number: Intervals(start[rows], end[rows]) for number, rows in rows_by_number(thread)}


def _inside(program: Program, rows: Mask) -> OfThreads:
    """The intervals of each thread's rows among ``rows``; they may be nested."""
    start, end = program.host.start, program.host.end
    chosen = np.flatnonzero(rows & (end > start))
    groups = rows_by_number(program.thread_of_row[chosen])
    return {thread: Intervals(start[chosen[rows]], end[chosen[rows]]) for thread, rows in groups}


def _less_host_work(program: Program, weight: Int64, intervals: OfThreads, factor: float) -> Int64:
    """Scales, by ``factor``, the part of the work between a thread's nodes that is inside the thread's intervals."""
    graph = program.graph
    result = weight.copy()
    host_nodes = np.flatnonzero((program.thread != NO_ROW) & (graph.previous != NO_ROW))
    for thread, rows in rows_by_number(program.thread[host_nodes]):
        if thread not in intervals:
            continue
        ours, changed_work = host_nodes[rows], intervals[thread]
        before, time = graph.time[graph.previous[ours]], graph.time[ours]
        covered = covered_lengths(before, time, changed_work.start, changed_work.end)
        less = np.rint(covered * (1 - factor)).astype(np.int64)
        result[ours] = np.maximum(weight[ours] - less, 0)
    return result


def _without_waits(trace: Attributed, program: Program, change: Change) -> Graph | None:
    """The graph in which the chosen calls return at once."""
    waits = trace.waits
    rows = waits["host"].to_numpy().astype(np.int64)
    if not len(rows):
        return None
    own = OwnCode.of(trace.own, trace.installed)
    named = waits["kind"].cast(pl.String).to_numpy() == change.text
    if change.text == "all":
        named = np.ones(len(rows), np.bool_)
    elif not named.any():
        names = [trace.host["name"].gather(waits["host"].cast(pl.UInt32))]
        names += places_of_rows(trace, rows, own, ["ops", "label", "source"]).values()
        named = np.logical_or.reduce([_matching(column, change.pattern) for column in names])
    graph = program.graph
    wait = program.wait_of
    chosen = (wait != NO_ROW) & named[np.maximum(wait, 0)]
    if change.pattern == _ITEM and not (trace.host["category"] == "op").any():
        chosen = _waits_for_numbers(trace, program)
    if not chosen.any():
        return None
    into = chosen[graph.target]
    edge_weight = graph.edge_weight.copy()
    edge_weight[into] = np.where(program.edge_kind[into] == EDGES.index("wait"), _REMOVED, 0)
    return replace(graph, edge_weight=edge_weight, delay=np.where(chosen, 0, graph.delay), shared=graph.order)


def _waits_for_numbers(trace: Attributed, program: Program) -> Mask:
    """Mask of the ends of waits for a copy of one number to the host: by these, item() is known without operators."""
    copy = (
        trace.gpu["kind"].eq("memcpy")
        & matching(trace.gpu["name"], FROM_DEVICE)
        & (trace.gpu["bytes"] <= _MAX_ITEM_BYTES)
    ).fill_null(value=False)
    graph, activity = program.graph, program.edge_activity
    waits = np.flatnonzero((program.edge_kind == EDGES.index("wait")) & (activity != NO_ROW))
    result = np.zeros(len(graph.time), np.bool_)
    result[graph.target[waits[copy.to_numpy()[activity[waits]]]]] = True
    result &= program.wait_of != NO_ROW
    return result


def _on_time(trace: Attributed, program: Program, rank: int) -> Graph | None:
    """The graph in which no other rank waits for this one in a collective."""
    graph = program.graph
    ranks = trace.gpu["rank"].to_numpy()
    shared = np.flatnonzero(program.edge_kind == EDGES.index("ranks"))
    late = shared[ranks[program.row[graph.source[shared]]] == rank]
    if not len(late):
        return None
    edge_weight = graph.edge_weight.copy()
    edge_weight[late] = _REMOVED
    return replace(graph, edge_weight=edge_weight, shared=graph.order)
