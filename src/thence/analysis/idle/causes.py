"""Assigns exactly one cause to every nanosecond in which a device is idle.

A gap ends when an activity starts. If the launch of that activity is not known, the cause is unknown. Else, with the
launch call lasting from ``b`` to ``e``, the cause of a part of the gap is the first of these rules that applies:

    before b                    by the host (`thence.analysis.idle.host_causes`): the innermost host row of the thread
                                that launched. If that thread was in no row, only in a step or a range, or waited for
                                another thread, the row of a thread of the rank that was in an operator or a call, or
                                ran according to its samples; of several such threads, the one that leaves its row last.
                                first_use if an operator takes over 1 ms until it launches
                                the first kernel of a name, and not again before later kernels of that name
    b to e                      launch; first_use if the call takes over 200 us and the kernel is the first of its name
    launched before the gap     queued for the first 5 us, and to the end of the gap if the same call launched an
                                activity that began before the gap (nodes of a CUDA graph wait for each other and for
                                the graph's conditions); then event_wait while work runs that its stream waited for,
                                or if its stream waited for the host, else unknown
    from e to the start         launch for 100 us, then event_wait or unknown

If no thread is in a recorded row, the cause is host if the main thread is known to run the program at that time
(`thence.analysis.idle.host_threads`), else unknown.

In addition to the cause, pieces hold the last call that waited before the launch that ended the gap, if it returned
in the gap or right before it: it emptied the queue. It is not the cause: without it the gap might exist all the same.

A kernel that waits for another rank counts as busy, so this time is never idle time;
`thence.analysis.collectives.waits` computes it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from thence.analysis.idle.gaps import AllGaps, LaunchTimes, gaps_in_spans, held_activities
from thence.analysis.idle.host_causes import CAUSES, NUMBER, REASONS, host_causes
from thence.analysis.idle.host_threads import HostThreads, Pieces, records_host_activity, thread_numbers
from thence.analysis.selection.windows import covers_only_part, cut_to_windows, windows_of_selection
from thence.model.columns import row_numbers, values_or
from thence.model.grouped_intervals import GroupedTimes, in_order, numbered, numbered_together
from thence.model.intervals import NEVER, NO_ROW, Intervals
from thence.model.thresholds import EARLY_RETURN_NS, FIRST_USE_CALL_NS, FIRST_USE_OPERATOR_NS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from thence.model.arrays import Int64, Mask, UInt8
    from thence.model.attributed import Attributed

    Rows = npt.NDArray[np.int32] | Int64


IDLE = {
    "rank": pl.Int32(), "device": pl.Int32(), "start": pl.Int64(), "duration": pl.Int64(), "cause": pl.Enum(CAUSES),
    "reason": pl.Enum(tuple(REASONS)), "host": pl.Int32(), "gpu": pl.Int32(), "wait": pl.Int32(),
}  # fmt: skip
"""Columns of `idle_causes`."""
_MAX_DEVICES = 1_000  # of one rank; real ranks have at most 16
_MAX_PIECES = 1_000_000  # in addition to
_MAX_PIECES_PER_ROW = 16  # times the rows of the trace: a host row may be in a gap of every device
_PART = 200_000  # gaps, and host rows of their ranks, from which on the gaps of further devices are looked at later
_UNKNOWN = NUMBER["unknown"]
_REASON = {reason: number for number, reason in enumerate(REASONS)}
_NO_REASON = len(REASONS)
_CAUSE_NAMES = pl.Series(CAUSES, dtype=IDLE["cause"])
_REASON_NAMES = pl.Series([*REASONS, None], dtype=IDLE["reason"])  # the last element is for _NO_REASON


def idle_causes(trace: Attributed, windows: pl.DataFrame | None = None) -> pl.DataFrame:
    """Pieces of idle time with their causes, in order of rank, device and time.

    Args:
        trace: attributed; its devices are idle while none of their work runs, whether or not it is selected.
        windows: the windows of time in which idle time counts, as `windows_of_selection` returns them; None for
            those of the trace's selection.

    Returns:
        Columns of `IDLE`: rank, device, start and duration (ns) of the piece; cause; reason, if the cause is
        unknown; host, the host row that determined the cause (null if none did); gpu, the activity that ended
        the gap (row of ``trace.around``); wait, the host row of the last call that waited, if it emptied the queue. The
        pieces of a gap tile it, as far as it is in a window. With more than 1,000 devices in a rank, or more than a
        million pieces plus 16 for each row of the trace, each gap is one piece with an unknown cause.
    """
    if windows is None:
        if not covers_only_part(trace):
            return _causes_of_gaps(trace, AllGaps.of(trace))
        windows = windows_of_selection(trace)
    end = pl.col("start") + pl.col("duration")
    spans = windows.group_by("rank", "device").agg(pl.col("start").min(), end=end.max())
    pieces = _causes_of_gaps(trace.around, gaps_in_spans(trace.around, spans))
    piece, _, begin, finish = cut_to_windows(pieces, windows)
    return pieces[piece].with_columns(start=pl.Series(begin), duration=pl.Series(finish - begin))


def _causes_of_gaps(trace: Attributed, gaps: AllGaps) -> pl.DataFrame:
    """The pieces of gaps with their causes, as `idle_causes` returns them."""
    if max(Counter(gaps.devices["rank"]).values(), default=0) > _MAX_DEVICES:
        return _undivided(gaps)
    facts = _Facts.of(trace)
    room = _MAX_PIECES + _MAX_PIECES_PER_ROW * (trace.host.height + trace.gpu.height)
    wait = _emptying_waits(facts, gaps)
    pieces = []
    for part in _parts(trace.host, gaps):
        ours = gaps.chosen(part)
        pieces.append(_causes_of_devices(facts, ours).joined(ours, wait[part]))
        room -= len(pieces[-1].start)
        if room < 0:
            return _undivided(gaps)
    return _idle_frame(gaps, pieces)


def _parts(host: pl.DataFrame, gaps: AllGaps) -> Iterator[slice]:
    """The gaps in parts that hold whole devices: those of many small devices take as long as those of one."""
    rows = dict(host["rank"].value_counts().rows())
    border = np.searchsorted(gaps.number, np.arange(gaps.devices.height + 1))
    sizes = np.diff(border) + np.array([rows.get(rank, 0) for rank in gaps.devices["rank"]], np.int64)
    part = (np.cumsum(sizes) - sizes) // _PART
    first = np.flatnonzero(np.diff(part, prepend=-1))
    return itertools.starmap(slice, itertools.pairwise([*border[first].tolist(), len(gaps.number)]))


def _undivided(gaps: AllGaps) -> pl.DataFrame:
    """Every gap as one piece, whose cause is unknown because there are too many devices or pieces."""
    return (
        gaps.devices[gaps.number]
        .with_columns(start=gaps.start, duration=gaps.duration, gpu=gaps.gpu)
        .with_columns(
            gpu=pl.when(pl.col("gpu") != NO_ROW).then(pl.col("gpu")),
            cause=pl.lit("unknown"),
            reason=pl.lit("too_many"),
            host=pl.lit(None, pl.Int32()),
            wait=pl.lit(None, pl.Int32()),
        )
        .filter(pl.col("duration") > 0)
        .select(list(IDLE))
        .cast(IDLE)  # type: ignore[arg-type]
    )


class _Collector:
    """Collects the pieces of gaps, rule by rule.

    Attributes:
        columns: one tuple for each `add`: gap (number), start, end (ns), cause, reason (codes) and row (of host).
    """

    def __init__(self) -> None:
        self.columns: list[tuple[Rows, Int64, Int64, UInt8, UInt8, Rows]] = []

    def add(
        self, gap: Int64, times: Intervals, cause: UInt8 | int, row: Rows | int, reason: UInt8 | int = _NO_REASON
    ) -> None:
        """Adds the intervals that are not empty; cause, row and reason: one for all, or one for each."""
        lasting = np.flatnonzero(times.end > times.start)
        if not len(lasting):
            return
        given = (
            (gap, np.int32), (times.start, np.int64), (times.end, np.int64), (cause, np.uint8), (reason, np.uint8),
            (row, np.int32),
        )  # fmt: skip
        columns = (
            (values if len(lasting) == len(times.start) else values[lasting]).astype(kind, copy=False)
            if isinstance(values, np.ndarray)
            else np.full(len(lasting), values, kind)
            for values, kind in given
        )
        self.columns.append(tuple(columns))  # type: ignore[arg-type]

    def joined(self, gaps: AllGaps, wait: Int64) -> _Pieces:
        """The pieces in order of device and time; adjacent pieces with the same gap, cause, reason and row are merged.

        Args:
            gaps: of which these are pieces.
            wait: host row of the wait that emptied the queue before each gap, `NO_ROW` for none.
        """
        if not self.columns:
            nothing, codes = np.empty(0, np.int64), np.empty(0, np.uint8)
            return _Pieces(nothing, nothing, nothing, codes, codes, nothing, nothing, nothing)
        columns = [np.concatenate(column) for column in zip(*self.columns, strict=True)]
        self.columns.clear()  # these are the largest arrays of the analysis
        order = in_order(gaps.number[columns[0]], columns[1], gaps.devices.height)
        gap, start, end, cause, reason, row = (column[order] for column in columns)
        first = np.ones(len(start), np.bool_)
        first[1:] = start[1:] != end[:-1]
        for column in (gap, cause, reason, row):
            first[1:] |= column[1:] != column[:-1]
        last = np.append(first[1:], True)
        gap = gap[first]
        ended, emptied = gaps.gpu.astype(np.int32)[gap], wait.astype(np.int32)[gap]
        times = start[first], end[last] - start[first]
        return _Pieces(gaps.number[gap], *times, cause[first], reason[first], row[first], ended, emptied)


class _Pieces(NamedTuple):
    """Pieces as columns of `IDLE`: the number of the device, codes for cause and reason, and `NO_ROW` for null."""

    device: Int64
    start: Int64
    duration: Int64
    cause: UInt8
    reason: UInt8
    host: Rows
    gpu: Rows
    wait: Rows


def _idle_frame(gaps: AllGaps, pieces: Sequence[_Pieces]) -> pl.DataFrame:
    """The pieces of all devices, in their order, with the columns of `IDLE`."""
    if not pieces:
        return pl.DataFrame(schema=IDLE)
    columns = _Pieces(*(np.concatenate(column) for column in zip(*pieces, strict=True)))
    rows = pl.DataFrame({name: getattr(columns, name).astype(np.int32) for name in ("host", "gpu", "wait")})
    devices = {name: gaps.devices[name].to_numpy()[columns.device] for name in ("rank", "device")}
    return pl.DataFrame({
        **devices, "start": columns.start, "duration": columns.duration,
        "cause": _CAUSE_NAMES[columns.cause], "reason": _REASON_NAMES[columns.reason],
    }).hstack(rows.select(pl.when(pl.all() != NO_ROW).then(pl.all())))  # fmt: skip


@dataclass(frozen=True)
class _Facts:
    """The inputs of the rules, as arrays: by host row, and by activity its launch.

    Attributes:
        trace: attributed.
        start, end: of each host row, ns.
        cause: number of the cause of each host row.
        thread: number of the thread of each host row.
        threads: the rows of all threads over time.
        launch: host row that launched each activity, `NO_ROW` where unknown.
        launched: when each activity was launched, and until when it was held.
        kernel: number of the name of each activity.
        first_of_name: whether an activity is the first of its name in its rank.
        recorded: ranks of which the trace holds operators, compilations, modules or Python frames.
    """

    trace: Attributed
    start: Int64
    end: Int64
    cause: UInt8
    thread: Int64
    threads: HostThreads
    launch: Int64
    launched: LaunchTimes
    kernel: npt.NDArray[np.uint32]
    first_of_name: Mask
    recorded: set[int]

    @classmethod
    def of(cls, trace: Attributed) -> _Facts:
        host = trace.host
        start = host["start"].to_numpy()
        end = start + host["duration"].to_numpy()
        thread = thread_numbers(host)
        threads = HostThreads.of(trace, thread)
        is_call = threads.is_call
        launch = row_numbers(trace.places["launch"])
        cause = host_causes(trace.host, trace.meta.formats)
        # A call of which nothing is known but that it launched is a launch, whatever its name.
        calls = launch[launch != NO_ROW]
        calls = calls[is_call[calls] & (cause[calls] == NUMBER["operator"])]
        cause[calls] = NUMBER["launch"]
        begins, ends = _launch_times(trace, launch, start, end, is_call)
        by_call = (launch != NO_ROW) & is_call[launch] if len(is_call) else launch != NO_ROW
        call = np.where(by_call, launch, NO_ROW)
        launched = LaunchTimes.of(trace.gpu["start"].to_numpy(), call, begins, ends, held_activities(trace))
        first_of_name = trace.gpu.select(pl.struct("rank", "name").is_first_distinct()).to_series().to_numpy()
        kernel = trace.gpu["name"].to_physical().to_numpy()
        recorded = records_host_activity(trace)
        return cls(trace, start, end, cause, thread, threads, launch, launched, kernel, first_of_name, recorded)


def _launch_times(trace: Attributed, launch: Int64, start: Int64, end: Int64, is_call: Mask) -> tuple[Int64, Int64]:
    """Start and end of the launch of each activity in ns, -1 where unknown.

    The launches of XLA programs are in the table of programs. A host row that is linked to the activity but is not an
    API call launched it at an unknown time before its end: the latest possible time is assumed.
    """
    known = launch != NO_ROW
    row = np.maximum(launch, 0)
    if not len(start):
        begins = np.full(len(launch), -1)
        ends = begins.copy()
    else:
        begins, ends = np.where(known, start[row], -1), np.where(known, end[row], -1)
        linked = known & ~is_call[row]
        late = np.minimum(end[row], trace.gpu["start"].to_numpy())
        begins, ends = np.where(linked, late, begins), np.where(linked, late, ends)
    if trace.programs.height:
        program = row_numbers(trace.gpu["program"])
        launched = values_or(trace.programs["launch"], -1)
        took = values_or(trace.programs["launch_duration"], 0)
        by_program = ~known & (program != NO_ROW) & (launched[program] >= 0)
        begins = np.where(by_program, launched[program], begins)
        ends = np.where(by_program, launched[program] + took[program], ends)
    return begins, ends


def _emptying_waits(facts: _Facts, gaps: AllGaps) -> Int64:
    """The host row of the last wait before the launch that ended each gap, if it returned after the queue was empty."""
    waits = facts.trace.waits
    result = np.full(len(gaps.gpu), NO_ROW)
    if waits.is_empty():
        return result
    begins = np.full(facts.trace.gpu.height, NEVER)  # of the gap before each activity
    ending = np.flatnonzero(gaps.gpu != NO_ROW)[::-1]
    begins[gaps.gpu[ending]] = gaps.start[ending]
    launched = facts.launched.launched[gaps.gpu]
    known = np.flatnonzero((gaps.gpu != NO_ROW) & (launched >= 0))
    of_device, of_wait, ranks = numbered_together(gaps.devices, waits, "rank")
    host = waits["host"].to_numpy().astype(np.int64)
    order = in_order(of_wait, facts.start[host], ranks)
    host = host[order]
    waiting = GroupedTimes.of(of_wait[order], facts.start[host], ranks)
    row = np.append(host, NO_ROW)[waiting.last(of_device[gaps.number[known]], launched[known])]
    emptied = (row != NO_ROW) & (facts.end[row] >= begins[gaps.gpu[known]] - EARLY_RETURN_NS)
    result[known] = np.where(emptied, row, NO_ROW)
    return result


def _causes_of_devices(facts: _Facts, gaps: AllGaps) -> _Collector:
    """The pieces of gaps."""
    pieces = _Collector()
    begin, end = gaps.start, gaps.end
    gpu, every = np.maximum(gaps.gpu, 0), np.arange(len(gaps.gpu))
    parts = facts.launched.parts(gaps)
    known = parts.known
    why = np.where(gaps.gpu == NO_ROW, _REASON["nothing_after"], _REASON["no_launch"]).astype(np.uint8)
    pieces.add(every, Intervals(np.where(known, end, begin), end), _UNKNOWN, NO_ROW, why)
    row = np.where(known, facts.launch[gpu], NO_ROW)
    took = facts.launched.returned[gpu] - facts.launched.launched[gpu]
    loads = facts.first_of_name[gpu] & (took > FIRST_USE_CALL_NS)
    _add_before_launch(pieces, facts, gaps, parts.launched)
    codes = np.where(loads, NUMBER["first_use"], NUMBER["launch"]).astype(np.uint8)
    pieces.add(every, Intervals(parts.launched, parts.returned), codes, row)
    codes = np.where(parts.queued, NUMBER["queued"], NUMBER["launch"]).astype(np.uint8)
    pieces.add(every, Intervals(parts.returned, parts.latency_end), codes, row)
    held_end = np.where(known, parts.held_end, parts.latency_end)
    pieces.add(every, Intervals(parts.latency_end, held_end), NUMBER["event_wait"], row)
    pieces.add(every, Intervals(parts.held_end, end), _UNKNOWN, row, _REASON["started_late"])
    return pieces


def _add_before_launch(collector: _Collector, facts: _Facts, gaps: AllGaps, launched: Int64) -> None:
    """Adds the pieces from the beginning of each gap until the launch that ended it, with causes by the host."""
    waiting = np.flatnonzero(launched > gaps.start)
    if not len(waiting):
        return
    rank = gaps.devices["rank"].to_numpy()[gaps.number]
    pieces = facts.threads.informed(rank, _in_launching_threads(facts, gaps, launched, waiting))
    codes = _host_codes(facts, pieces, gaps)
    reason = np.full(len(codes), _NO_REASON, np.uint8)
    unknown = np.flatnonzero(codes == _UNKNOWN)
    nowhere = pieces.row[unknown] == NO_ROW
    recorded = np.isin(rank, list(facts.recorded))[pieces.interval[unknown]]
    no_row = np.where(recorded, _REASON["outside"], _REASON["only_calls"])
    reason[unknown] = np.where(nowhere, no_row, _REASON["profiler"])
    runs = facts.threads.runs_program(rank, pieces)
    codes[runs], reason[runs] = NUMBER["host"], _NO_REASON
    collector.add(pieces.interval, pieces, codes, pieces.row, reason)


def _in_launching_threads(facts: _Facts, gaps: AllGaps, launched: Int64, waiting: Int64) -> Pieces:
    """The rows of the launching thread over time, for the gaps that waited for a launch."""
    row = facts.launch[np.maximum(gaps.gpu[waiting], 0)]
    thread = row if not len(facts.thread) else np.where(row == NO_ROW, NO_ROW, facts.thread[row])
    order = np.argsort(thread, kind="stable")  # times in order are found faster
    waiting, thread = waiting[order], thread[order]
    pieces = facts.threads.innermost.within(thread, Intervals(gaps.start[waiting], launched[waiting]))
    return pieces.of(waiting)


def _host_codes(facts: _Facts, pieces: Pieces, gaps: AllGaps) -> UInt8:
    """The cause of each piece by its host row, and by the activity that was launched at its end."""
    gpu = gaps.gpu[pieces.interval]
    if not len(facts.cause):
        return np.full(len(gpu), _UNKNOWN, np.uint8)
    codes = facts.cause[pieces.row]
    codes[pieces.row == NO_ROW] = _UNKNOWN
    long = np.flatnonzero(pieces.duration > FIRST_USE_OPERATOR_NS)
    long = long[(codes[long] == NUMBER["operator"]) & (gpu[long] != NO_ROW)]
    gpu = gpu[long]
    ended = facts.end[pieces.row[long]] > facts.launched.launched[gpu]
    long, gpu = long[ended], gpu[ended]
    launch, first = facts.launch[gpu], facts.first_of_name[gpu]
    # If a later kernel of the name also takes that long on the same thread, it is not a first use.
    thread = np.where(launch == NO_ROW, NO_ROW, facts.thread[launch])
    keys = pl.DataFrame({"device": gaps.number[pieces.interval[long]], "thread": thread, "name": facts.kernel[gpu]})
    kernel, _ = numbered(keys, *keys.columns)
    codes[long[first & ~np.isin(kernel, kernel[~first])]] = NUMBER["first_use"]
    return codes
