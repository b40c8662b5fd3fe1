"""Kernels by stream, and concurrency of streams and kernel groups.

busy        time in which at least one activity of a stream ran (interval union)
concurrent  part of the busy time in which another stream of the device was also busy
overlap     of groups A and B: time in which at least one activity of each ran, on any streams;
            of A with itself: time in which at least two activities of A ran
hidden      part of the communication time during which a kernel or thunk that is not communication ran:
            see `thence.analysis.collectives.exposure`, which `collectives` also uses
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.collectives.exposure import exposure
from thence.analysis.grouping.kernel_groups import NO_PATTERNS, Patterns, kernel_groups
from thence.analysis.no_device_work import no_device_work
from thence.errors import UsageError
from thence.model.answer import Answer, Lines, TableView
from thence.model.columns import group_sums
from thence.model.grouped_intervals import GroupedIntervals, numbered
from thence.model.intervals import covered_lengths, levels, union, unions
from thence.model.totals import must
from thence.units import format_ns, format_share, several

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed
    from thence.model.tables import Meta
    from thence.units import Ns


IN_GRAPHS = (
    "{:,} activities ran inside CUDA graphs: their streams are those to which the driver assigned the "
    "branches of the graph"
)
_MAX_PAIRS = 5
"""Pairs of groups whose overlap is shown as text."""
NO_STREAMS = "the trace does not say on which streams its kernels ran"


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Concurrency on one device. All times are ns.

    Attributes:
        rank, device: of the device.
        busy_ns: time in which anything ran.
        busy_streams_ns: time in which exactly 1, 2, 3 ... streams were busy; it adds up to busy_ns.
            Empty if the trace does not record the streams of all activities.
        overlap_ns: by two groups, as the module docstring defines it; symmetric, without zeros.
        communication_ns: time in which communication ran.
        hidden_ns: as the module docstring defines it.
    """

    rank: int
    device: int
    busy_ns: Ns
    busy_streams_ns: tuple[Ns, ...]
    overlap_ns: Mapping[str, Mapping[str, Ns]]
    communication_ns: Ns
    hidden_ns: Ns

    @property
    def hidden_share(self) -> float | None:
        """Hidden part of the communication, from 0 to 1; None without communication."""
        return self.hidden_ns / self.communication_ns if self.communication_ns else None

    def lines(self) -> Iterator[str]:
        """Lines about the concurrency on the device."""
        one_stream, two_streams, *more = (*self.busy_streams_ns, 0, 0)
        times = (("1 stream", one_stream), ("2 streams", two_streams), ("3 or more", sum(more)))
        shares = [f"{name} {format_ns(ns)} ({format_share(ns, self.busy_ns)})" for name, ns in times if ns]
        where = f"rank {self.rank} GPU {self.device}"
        yield f"{where}: busy {format_ns(self.busy_ns)}{': ' if shares else ''}{', '.join(shares)}"
        pairs = [(ns, a, b) for a, row in self.overlap_ns.items() for b, ns in row.items() if a <= b]
        pairs.sort(reverse=True)
        if pairs:
            named = [f"{a} and {b} {format_ns(ns)}" for ns, a, b in pairs[:_MAX_PAIRS]]
            rest = f"; {len(pairs) - _MAX_PAIRS} more pairs" if len(pairs) > _MAX_PAIRS else ""
            yield f"  at the same time: {', '.join(named)}{rest}"
        if self.communication_ns:
            share = format_share(self.hidden_ns, self.communication_ns)
            exposed = format_ns(self.communication_ns - self.hidden_ns)
            yield (
                f"  communication: {format_ns(self.communication_ns)}, {share} of it hidden behind other"
                f" kernels, {exposed} exposed"
            )

    def to_json(self) -> dict[str, Any]:
        """The concurrency of the device as JSON values."""
        one_stream, two_streams, *more = (*self.busy_streams_ns, 0, 0)
        return {
            "busy_ns": self.busy_ns,
            "busy_streams_ns": {"1": one_stream, "2": two_streams, "3+": sum(more)} if self.busy_streams_ns else None,
            "overlap_ns": {a: dict(row) for a, row in self.overlap_ns.items()},
            "communication": {
                "busy_ns": self.communication_ns,
                "hidden_ns": self.hidden_ns,
                "exposed_ns": self.communication_ns - self.hidden_ns,
                "hidden_share": self.hidden_share,
            },
        }


@dataclass(frozen=True)
class Devices:
    """The concurrency of each device: columns, because a trace may have a hundred thousand devices.

    Attributes:
        rows: rank, device, and as in `Concurrency` busy_ns, busy_streams_ns, communication_ns, hidden_ns, and overlaps
            (a, b, ns; null without any).
    """

    rows: pl.DataFrame

    def __len__(self) -> int:
        return self.rows.height

    def __iter__(self) -> Iterator[Concurrency]:
        """Makes the concurrency of one device after the other."""
        for rank, device, busy, by_depth, communication, hidden, overlaps in self.rows.select(
            "rank", "device", "busy_ns", "busy_streams_ns", "communication_ns", "hidden_ns", "overlaps"
        ).iter_rows():
            overlap: dict[str, dict[str, Ns]] = {}
            for pair in overlaps or ():
                overlap.setdefault(pair["a"], {})[pair["b"]] = pair["ns"]
            yield Concurrency(rank, device, busy, tuple(by_depth or ()), overlap, communication, hidden)


@dataclass(frozen=True)
class Streams(Answer):
    """The streams of a trace. All times are ns.

    Attributes:
        meta: facts of the trace.
        groups: names of all groups, those of the user first.
        rows: rank, device, stream (null where the trace does not record it), group, count, total_ns (sum
            of durations), share (of the stream's sum).
        streams: rank, device, stream, busy_ns, concurrent_ns (null if streams of the device are not recorded).
        concurrency: the concurrency of each device.
        notes: caveats that are needed to read the numbers, one sentence each.
        checks: the expectations that were asked for, judged.
    """

    meta: Meta
    groups: tuple[str, ...]
    rows: pl.DataFrame
    streams: pl.DataFrame
    concurrency: Devices
    notes: tuple[str, ...]
    checks: tuple[Check, ...] = ()

    def check(self, *expectations: str) -> tuple[Check, ...]:
        """Checks expectations such as ``GEMM>=2``: see `thence.analysis.streams`.

        Raises:
            UsageError: the syntax of one is wrong, or no group has that name.
        """
        return tuple(judge(parse_expectation(text, self.groups), self.rows) for text in expectations)

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return (f"{several(self.streams.height, 'stream')} of {several(len(self.concurrency), 'GPU')}", self.meta.named)

    def views(self) -> tuple[TableView | Lines, ...]:
        """The groups of each stream, the streams, and what ran at the same time on each device."""
        groups = {
            "rank": "rank", "device": "GPU", "stream": "stream", "group": "group", "count": "count",
            "total_ns": "total", "share": "share",
        }  # fmt: skip
        lanes = {
            "rank": "rank", "device": "GPU", "stream": "stream", "busy_ns": "busy",
            "concurrent_ns": "while another ran",
        }  # fmt: skip
        lines = tuple(("\n".join(device.lines()), "") for device in self.concurrency)
        return (
            TableView(self.rows, groups, bar="total_ns"),
            TableView(self.streams, lanes),
            Lines(lines, limited=True, at_least=100, counted="devices"),
        )

    def remarks(self) -> tuple[str, ...]:
        """See `Answer`."""
        return self.notes

    def self_check(self) -> None:
        """See `Answer`."""
        sums = pl.col("busy_streams_ns").list.sum()
        adds_up = self.concurrency.rows.select((sums == pl.col("busy_ns")).fill_null(value=True).all()).item()
        must(self.meta.inputs, adds_up, "times with one, two and more busy streams do not add up to the busy time")

    def to_json(self) -> dict[str, Any]:
        """The streams and the checked expectations as JSON values."""
        place = ("rank", "device", "stream")
        counted: dict[tuple[Any, ...], dict[str, dict[str, int]]] = {}
        for *lane, group, count, total in self.rows.select(*place, "group", "count", "total_ns").iter_rows():
            counted.setdefault(tuple(lane), {})[group] = {"count": count, "total_ns": total}
        lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for rank, device, stream, busy, concurrent in self.streams.iter_rows():
            lanes.setdefault((rank, device), []).append(
                {
                    "stream": stream,
                    "busy_ns": busy,
                    "concurrent_ns": concurrent,
                    "groups": counted[rank, device, stream],
                }
            )
        devices = [
            {"rank": lane.rank, "device": lane.device, "streams": lanes[lane.rank, lane.device]} | lane.to_json()
            for lane in self.concurrency
        ]
        return {
            "inputs": list(self.meta.inputs),
            "groups": list(self.groups),
            "devices": devices,
            "checks": [check.to_json() for check in self.checks],
        }


def streams(trace: Attributed, patterns: Patterns = NO_PATTERNS) -> Streams:
    """Analyses which kernels ran on which stream, and which streams and groups ran concurrently.

    Args:
        patterns: groups of the user.

    Raises:
        MissingData: the trace holds no device activity.
    """
    if trace.gpu.is_empty():
        raise no_device_work(trace)
    # A thunk stands for kernels whose streams its producer did not record.
    recorded_stream = pl.when(pl.col("kind") != "thunk").then("stream")
    activities = trace.gpu.select("rank", "device", recorded_stream.alias("stream"), "start", "duration").with_columns(
        kernel_groups(trace, patterns)
    )
    lanes, concurrency = _concurrency(activities, exposure(trace).devices, patterns.names)
    in_graphs = trace.gpu["graph"].count()
    notes = [IN_GRAPHS.format(in_graphs)] if in_graphs else []
    if activities["stream"].null_count():
        notes.append(NO_STREAMS)
    return Streams(
        meta=trace.meta,
        groups=patterns.names,
        rows=_rows(activities),
        streams=lanes,
        concurrency=concurrency,
        notes=tuple(notes),
    )


def _concurrency(
    activities: pl.DataFrame, communication: pl.DataFrame, groups: Sequence[str]
) -> tuple[pl.DataFrame, Devices]:
    """`Streams.streams` and `Streams.concurrency`.

    Args:
        activities: rank, device, stream (null if not recorded), start, duration, group (categorical).
        communication: rank, device, communication_ns, exposed_ns of devices that communicate.
    """
    of_device, devices = numbered(activities, "rank", "device")
    recorded = activities.group_by("rank", "device").agg(recorded=pl.col("stream").null_count() == 0)
    devices = devices.join(recorded, on=["rank", "device"], how="left", maintain_order="left")
    lanes = _Lanes.of(activities, of_device, devices.height)
    of_stream = lanes.streams.join(devices, on=["rank", "device"], how="left", maintain_order="left")
    streams = lanes.frame(of_stream["recorded"])
    number = activities["group"].to_physical().cast(pl.Int64).to_numpy()
    by_depth, overlaps = lanes.by_depth(), lanes.overlaps(number, groups)
    del lanes  # arrays as large as the trace
    rows = (
        devices.with_row_index("number")
        .join(communication, on=["rank", "device"], how="left", maintain_order="left")
        .join(by_depth, on="number", how="left", maintain_order="left")
        .join(overlaps, on="number", how="left", maintain_order="left")
    )
    talked, exposed = (pl.col(name).fill_null(0) for name in ("communication_ns", "exposed_ns"))
    return streams, Devices(
        rows.select(
            "rank",
            "device",
            busy_ns=pl.col("busy_streams_ns").list.sum().fill_null(0),
            busy_streams_ns=pl.when("recorded").then("busy_streams_ns"),
            communication_ns=talked,
            hidden_ns=talked - exposed,
            overlaps="overlaps",
        )
    )


def _rows(activities: pl.DataFrame) -> pl.DataFrame:
    lane = ("rank", "device", "stream")
    counted = activities.group_by(*lane, "group").agg(
        pl.len().cast(pl.Int64).alias("count"), total_ns=pl.col("duration").sum()
    )
    whole = pl.col("total_ns").sum().over(lane)
    share = pl.col("total_ns") / pl.when(whole > 0).then(whole)
    ordered = counted.sort(*lane, "total_ns", "group", descending=[False] * 3 + [True, False])
    return ordered.with_columns(share=share)


@dataclass(frozen=True)
class _Lanes:
    """The activities of all devices, on one timeline.

    Attributes:
        timeline: all activities, with devices one after the other.
        lane: number of the stream, start and end of each busy interval of a stream, on the timeline.
        streams: rank, device, stream of each number.
    """

    timeline: GroupedIntervals
    lane: tuple[Int64, Int64, Int64]
    streams: pl.DataFrame

    @classmethod
    def of(cls, activities: pl.DataFrame, of_device: Int64, devices: int) -> _Lanes:
        start = activities["start"].to_numpy()
        timeline = GroupedIntervals.of(of_device, start, start + activities["duration"].to_numpy(), devices)
        of_stream, streams = numbered(activities, "rank", "device", "stream")
        return cls(timeline, unions(of_stream, timeline.start, timeline.end), streams)

    @cached_property
    def depth(self) -> tuple[Int64, Int64, Int64]:
        """Starts and ends of the pieces of the timeline in which anything runs, and the number of busy streams."""
        _, begins, ends = self.lane
        starts, finishes, depth = levels(begins, ends, np.ones(len(begins), np.int64))
        busy = depth > 0
        return starts[busy], finishes[busy], depth[busy]

    def frame(self, recorded: pl.Series) -> pl.DataFrame:
        """`Streams.streams`.

        Args:
            recorded: for each stream, whether all streams of its device are known.
        """
        lane, begins, ends = self.lane
        starts, finishes, depth = self.depth
        several = union(starts[depth > 1], finishes[depth > 1])  # the union has far fewer intervals
        shared = covered_lengths(begins, ends, *several)
        return self.streams.with_columns(
            pl.col("stream").cast(pl.Int64),
            busy_ns=group_sums(lane, ends - begins, self.streams.height),
            concurrent_ns=pl.when(recorded).then(pl.lit(group_sums(lane, shared, self.streams.height))),
        )

    def by_depth(self) -> pl.DataFrame:
        """For each device that was busy: number, and the times with exactly one, two, three ... busy streams."""
        starts, finishes, depth = self.depth
        device = self.timeline.group_at(starts)
        most = np.zeros(self.timeline.groups, np.int64)
        np.maximum.at(most, device, depth)
        first = np.cumsum(most) - most
        times = group_sums(first[device] + depth - 1, finishes - starts, int(most.sum()))
        return _lists(np.repeat(np.arange(len(most)), most), busy_streams_ns=pl.Series(times))

    def overlaps(self, group: Int64, names: Sequence[str]) -> pl.DataFrame:
        """For each device where groups ran concurrently: number, and for how long (`Devices.rows`)."""
        all_of = self.timeline
        of_group = {int(g): group == g for g in np.unique(group)}
        joined = {g: union(all_of.start[m], all_of.end[m]) for g, m in of_group.items()}
        overlaps = [(np.empty(0, np.int64), "", "", np.empty(0, np.int64))]

        def note(a: int, b: int, time: Int64, lengths: Int64) -> None:
            totals = all_of.sums(time, lengths)
            devices = np.flatnonzero(totals)
            overlaps.extend((devices, names[a], names[b], totals[devices]) for a, b in {(a, b), (b, a)})

        for a, (begins, ends) in joined.items():
            mine = of_group[a]
            if int((all_of.end[mine] - all_of.start[mine]).sum()) > int((ends - begins).sum()):
                pieces = levels(all_of.start[mine], all_of.end[mine], np.ones(int(mine.sum()), np.int64))
                twice = pieces[2] > 1
                note(a, a, pieces[0][twice], (pieces[1] - pieces[0])[twice])
            for b, theirs in joined.items():
                if b > a:
                    note(a, b, begins, covered_lengths(begins, ends, *theirs))
        order = {name: i for i, name in enumerate(names)}
        overlaps.sort(key=lambda pair: (order.get(pair[1], -1), order.get(pair[2], -1)))
        pairs = pl.concat(
            pl.DataFrame({"number": devices, "ns": ns}).select(
                "number", pl.struct(pl.lit(a).alias("a"), pl.lit(b).alias("b"), "ns").alias("overlaps")
            )
            for devices, a, b, ns in overlaps
        ).sort("number", maintain_order=True)
        return _lists(pairs["number"].to_numpy(), overlaps=pairs["overlaps"])


def _lists(number: Int64, **column: pl.Series) -> pl.DataFrame:
    """A frame with a list of the values of each number, in their order; of numbers that have any."""
    ((name, values),) = column.items()
    frame = pl.DataFrame({"number": pl.Series(number, dtype=pl.UInt32), name: values})
    return frame.group_by("number", maintain_order=True).agg(name)


_COUNTED: dict[str, Callable[[int, int], bool]] = {">=": operator.ge, "==": operator.eq, "<=": operator.le}
_FORM = re.compile(r"\s*([^=<>!]+?)\s*(>=|==|<=|!=)\s*([^=<>!]+?)\s*")


@dataclass(frozen=True, slots=True)
class _Expectation:
    """One expectation, parsed.

    Attributes:
        text: as the user wrote it.
        group: group whose streams are counted.
        sign: one of >=, ==, <=, !=.
        count: expected number of streams, at least 1; 0 for !=.
        other: the other group of !=; None otherwise.
    """

    text: str
    group: str
    sign: str
    count: int = 0
    other: str | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """The result of checking one expectation.

    Attributes:
        expect: the expectation as the user wrote it.
        ok: whether it holds; None if that cannot be judged.
        streams: streams of the deciding device on which kernels of the group ran. The deciding device is the
            first one on which the expectation fails, else the first one that was judged.
        reason: one sentence.
        devices: for each device judged: rank, device, streams, ok; for != also other_streams.
    """

    expect: str
    ok: bool | None
    streams: tuple[int, ...]
    reason: str
    devices: tuple[dict[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The check as the command line prints it with ``--format json``."""
        return {
            "expect": self.expect,
            "streams": list(self.streams),
            "ok": self.ok,
            "reason": self.reason,
            "devices": list(self.devices),
        }

    def __str__(self) -> str:
        verdict = {True: "ok", False: "FAILED", None: "cannot be judged"}[self.ok]
        return f"{verdict}: {self.expect}: {self.reason}"


def parse_expectation(text: str, groups: Sequence[str]) -> _Expectation:
    """Parses an expectation.

    Args:
        text: such as ``GEMM>=2``; group names may be written in any case.
        groups: names of all existing groups.

    Raises:
        UsageError: the syntax is wrong, or no group has that name.
    """
    match = _FORM.fullmatch(text)
    if not match:
        raise UsageError(f"cannot read the expectation {text!r}: write GROUP>=N, GROUP==N, GROUP<=N or GROUP!=GROUP")
    name, sign, right = match.groups()
    group = _group_named(name, groups, text)
    if sign == "!=":
        other = _group_named(right, groups, text)
        if other == group:
            raise UsageError(f"{text}: the group is the same on both sides; name two different groups")
        return _Expectation(text, group, sign, other=other)
    if not (right.isascii() and right.isdecimal() and len(right) < 10 and int(right)):
        raise UsageError(f"{text}: expected a number of streams, 1 or more, after {sign}")
    return _Expectation(text, group, sign, count=int(right))


def _group_named(name: str, groups: Sequence[str], text: str) -> str:
    if name in groups:
        return name
    alike = [group for group in groups if group.casefold() == name.casefold()]
    if len(alike) != 1:
        raise UsageError(
            f"{text}: there is no group {name!r}; choose one of {', '.join(groups)}, or define it with "
            "--group NAME=REGEX"
        )
    return alike[0]


def judge(expectation: _Expectation, rows: pl.DataFrame) -> Check:
    """Checks an expectation on every device that ran its groups.

    Args:
        rows: rank, device, stream (null where the trace does not record it) and group of all activities,
            each combination at least once.
    """
    wanted = [name for name in (expectation.group, expectation.other) if name is not None]
    relevant = rows.filter(pl.col("group").cast(pl.String).is_in(wanted))
    missing = [name for name in wanted if not (relevant["group"] == name).any()]
    if missing:
        absent = f"the trace has no kernels of the group {' or '.join(missing)}"
        return Check(expectation.text, None, (), absent)
    if relevant["stream"].null_count():
        return Check(expectation.text, None, (), "the trace does not say on which streams kernels ran")
    devices = [
        verdict
        for (rank, device), activities in relevant.group_by("rank", "device", maintain_order=True)
        if (verdict := _on_device(expectation, activities, {"rank": rank, "device": device}))
    ]
    if not devices:
        reason = f"no device ran kernels of both {' and '.join(wanted)}"
        return Check(expectation.text, None, (), reason)
    devices.sort(key=lambda verdict: (verdict["rank"], verdict["device"]))
    failed = [verdict for verdict in devices if not verdict["ok"]]
    decided = failed[0] if failed else devices[0]
    reason = _reason(expectation, decided, len(failed), len(devices))
    return Check(expectation.text, not failed, tuple(decided["streams"]), reason, tuple(devices))


def _on_device(expectation: _Expectation, activities: pl.DataFrame, place: dict[str, Any]) -> dict[str, Any] | None:
    """The verdict on one device; None if it did not run both groups of a ``!=`` expectation."""
    streams = _streams(activities, expectation.group)
    if expectation.other is None:
        ok = _COUNTED[expectation.sign](len(streams), expectation.count)
        return place | {"streams": streams, "ok": ok}
    others = _streams(activities, expectation.other)
    if not streams or not others:
        return None
    return place | {"streams": streams, "other_streams": others, "ok": not {*streams} & {*others}}


def _streams(activities: pl.DataFrame, group: str) -> list[int]:
    return sorted(activities.filter(pl.col("group") == group)["stream"].unique().to_list())


def _reason(expectation: _Expectation, decided: dict[str, Any], failed: int, judged: int) -> str:
    where = f"rank {decided['rank']} GPU {decided['device']}"
    text = f"{expectation.group} ran on {_streams_text(decided['streams'])}"
    if expectation.other is not None:
        text += f", {expectation.other} on {_streams_text(decided['other_streams'])}"
    text += f" of {where}"
    if judged > 1:
        passed = judged - failed
        text += f"; the expectation holds on {passed} of {judged} GPUs"
    return text


def _streams_text(streams: list[int]) -> str:
    return f"stream{'s' if len(streams) != 1 else ''} {', '.join(map(str, streams))}"
