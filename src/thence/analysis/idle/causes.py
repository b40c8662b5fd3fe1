"""Assigns exactly one cause to every nanosecond in which a device is idle.

A gap ends when an activity starts. If the launch of that activity is not known, the cause is unknown. Else, with the
launch call lasting from ``b`` to ``e``, the cause of a part of the gap is the first of these rules that applies:

    before b                    by the host (`thence.analysis.idle.rules`): the innermost host row of the thread that
                                launched. If that thread was in no row, only in a step or a range, or waited for another
                                thread, the row of a thread of the rank that was in an operator or a call, or ran
                                according to its samples; of several such threads, the one that leaves its row last.
                                first_use if an operator takes over 1 ms until it launches
                                the first kernel of a name, and not again before later kernels of that name
    b to e                      launch; first_use if the call takes over 200 us and the kernel is the first of its name
    launched before the gap     queued for the first 5 us, and to the end of the gap if the same call launched an
                                activity that began before the gap (nodes of a CUDA graph wait for each other and for
                                the graph's conditions); then event_wait while work runs that its stream waited for,
                                or if its stream waited for the host, else unknown
    from e to the start         launch for 100 us, then event_wait or unknown

If no thread is in a recorded row, the cause is host if the main thread is known to run the program at that time
(`thence.analysis.idle.silence`), else unknown.

In addition to the cause, pieces hold the last call that waited before the launch that ended the gap, if it returned
in the gap or right before it: it emptied the queue. It is not the cause: without it the gap might exist all the same.

A kernel that waits for another rank counts as busy, so this time is never idle time;
`thence.analysis.collectives.waits` computes it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.extent import cut, extent, in_parts
from thence.analysis.idle.host_threads import NOWHERE, Pieces, thread_numbers, together
from thence.analysis.idle.host_time import HostTime
from thence.analysis.idle.late_starts import Gaps, Starts, device_gaps, held_until
from thence.analysis.idle.pieces import IDLE, NO_REASON, IdlePieces, idle_frame
from thence.analysis.idle.rules import NUMBER, REASONS, host_causes
from thence.analysis.idle.silence import says_what_runs
from thence.model.grouped_intervals import numbered, rows_of_groups
from thence.model.intervals import NEVER, NO_ROW, last_begun
from thence.model.thresholds import EARLY_RETURN_NS, FIRST_USE_CALL_NS, FIRST_USE_OPERATOR_NS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from thence.model.arrays import Int64, Mask, UInt8
    from thence.model.attributed import Attributed


_MOST_DEVICES = 1_000  # of one rank; real ranks have at most 16, and each device takes 10 ms
_MOST_PIECES = 1_000_000  # in addition to
_MOST_OF_A_ROW = 16  # pieces per row of the trace: a host row may be in a gap of every device
_OF_NAMES = 32  # bits for the number of a kernel's name
_UNKNOWN = NUMBER["unknown"]
_REASON = {reason: number for number, reason in enumerate(REASONS)}


def idle_causes(trace: Attributed, windows: pl.DataFrame | None = None) -> pl.DataFrame:
    """Pieces of idle time with their causes, in order of rank, device and time.

    Args:
        trace: attributed; its devices are idle while none of their work runs, whether or not it is selected.
        windows: the windows of time in which idle time counts, as `thence.analysis.extent.extent` returns them; None
            for those of the trace's selection.

    Returns:
        Columns of `IDLE`: rank, device, start and duration (ns) of the piece; cause; reason, if the cause is
        unknown; host, the host row that determined the cause (null if none did); gpu, the activity that ended
        the gap (row of ``trace.around``); wait, the host row of the last call that waited, if it emptied the queue. The
        pieces of a gap tile it, as far as it is in a window. With more than 1,000 devices in a rank, or more than a
        million pieces plus 16 for each row of the trace, each gap is one piece with an unknown cause.
    """
    if windows is None:
        if not in_parts(trace):
            return _causes_of(trace, device_gaps(trace))
        windows = extent(trace)
    end = pl.col("start") + pl.col("duration")
    spans = windows.group_by("rank", "device").agg(pl.col("start").min(), end=end.max())
    of_device = {(rank, device): (start, last) for rank, device, start, last in spans.rows()}
    pieces = _causes_of(trace.around, device_gaps(trace.around, of_device))
    piece, _, begin, finish = cut(pieces, windows)
    parts = {"start": pl.Series(begin), "duration": pl.Series(finish - begin)}
    return pieces[piece].with_columns(**parts)


def _causes_of(trace: Attributed, parts: Sequence[Gaps]) -> pl.DataFrame:
    """The pieces of gaps with their causes, as `idle_causes` returns them."""
    parts = sorted(parts, key=lambda of: (of.rank, of.device))
    devices = Counter(of.rank for of in parts)
    if max(devices.values(), default=0) > _MOST_DEVICES:
        return _undivided(parts)
    facts = _Facts.of(trace)
    most = _MOST_PIECES + _MOST_OF_A_ROW * (trace.host.height + trace.gpu.height)
    pieces = []
    for of, wait in zip(parts, _emptied(facts, parts), strict=True):
        pieces.append(_of_device(facts, of).joined(of.gpu, wait))
        most -= len(pieces[-1].start)
        if most < 0:
            return _undivided(parts)
    return idle_frame([(of.rank, of.device) for of in parts], pieces)


def _undivided(parts: Sequence[Gaps]) -> pl.DataFrame:
    """Every gap as one piece, whose cause is unknown because there are too many devices or pieces."""
    sizes = [len(of.start) for of in parts]
    start, end, gpu = (np.concatenate([getattr(of, name) for of in parts]) for name in ("start", "end", "gpu"))
    rank, device = (np.repeat([getattr(of, name) for of in parts], sizes) for name in ("rank", "device"))
    lasting = pl.Series(end > start)
    return (
        pl.DataFrame({"rank": rank, "device": device, "start": start, "duration": end - start, "gpu": gpu})
        .with_columns(
            gpu=pl.when(pl.col("gpu") != NO_ROW).then(pl.col("gpu")),
            cause=pl.lit("unknown"),
            reason=pl.lit("too_many"),
            host=pl.lit(None, pl.Int32()),
            wait=pl.lit(None, pl.Int32()),
        )
        .filter(lasting)
        .select(list(IDLE))
        .cast(IDLE)  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class _Facts:
    """The inputs of the rules, as arrays: by host row, and by activity its launch.

    Attributes:
        trace: attributed.
        start, end: of each host row, ns.
        cause: number of the cause of each host row.
        thread: number of the thread of each host row.
        hosts: the rows of all threads over time.
        launch: host row that launched each activity, `NO_ROW` where unknown.
        starts: when each activity was launched, and until when it was held.
        kernel: number of the name of each activity.
        first_of_name: whether an activity is the first of its name in its rank.
        said: by rank, whether the trace holds operators, compilations, modules or Python frames.
    """

    trace: Attributed
    start: Int64
    end: Int64
    cause: UInt8
    thread: Int64
    hosts: HostTime
    launch: Int64
    starts: Starts
    kernel: npt.NDArray[np.uint32]
    first_of_name: Mask
    said: dict[int, bool]

    @classmethod
    def of(cls, trace: Attributed) -> _Facts:
        host = trace.host
        start = host["start"].to_numpy()
        thread = thread_numbers(host)
        hosts = HostTime.of(trace, thread)
        is_call = hosts.is_call
        launch = trace.places["launch"].cast(pl.Int64).fill_null(NO_ROW).to_numpy()
        cause = host_causes(trace.host, trace.meta.formats)
        calls = launch[launch != NO_ROW]
        calls = calls[is_call[calls] & (cause[calls] == NUMBER["operator"])]
        cause[calls] = NUMBER["launch"]
        end = start + host["duration"].to_numpy()
        begins, ends = _launch_times(trace, launch, start, end, is_call)
        by_call = (launch != NO_ROW) & is_call[launch] if len(is_call) else launch != NO_ROW
        call = np.where(by_call, launch, NO_ROW)
        held = held_until(trace, launch)
        starts = Starts.of(trace.gpu["start"].to_numpy(), call, begins, ends, held)
        return cls(
            trace, start, end, cause, thread, hosts, launch, starts, trace.gpu["name"].to_physical().to_numpy(),
            trace.gpu.select(pl.struct("rank", "name").is_first_distinct()).to_series().to_numpy(),
            says_what_runs(trace, hosts.first),
        )  # fmt: skip


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
        of = trace.gpu["program"].fill_null(NO_ROW).to_numpy().astype(np.int64)
        at = trace.programs["launch"].fill_null(-1).to_numpy()
        took = trace.programs["launch_duration"].fill_null(0).to_numpy()
        by_program = ~known & (of != NO_ROW) & (at[of] >= 0)
        begins = np.where(by_program, at[of], begins)
        ends = np.where(by_program, at[of] + took[of], ends)
    return begins, ends


def _emptied(facts: _Facts, parts: Sequence[Gaps]) -> list[Int64]:
    """The host row of the last wait before the launch that ended each gap, if it returned after the queue was empty."""
    waits = facts.trace.waits
    begins = np.full(facts.trace.gpu.height, NEVER)  # of the gap before each activity
    for of in reversed(parts):
        ending = np.flatnonzero(of.gpu != NO_ROW)[::-1]
        begins[of.gpu[ending]] = of.start[ending]
    number, ranks = numbered(waits, "rank")
    of_waits = dict(zip(ranks["rank"], rows_of_groups(number, ranks.height), strict=True))
    host = waits["host"].to_numpy().astype(np.int64)
    results = []
    for of in parts:
        result = np.full(len(of.gpu), NO_ROW)
        rows = host[of_waits.get(of.rank, [])]
        act = np.maximum(of.gpu, 0)
        ours = np.flatnonzero((of.gpu != NO_ROW) & (facts.starts.launched[act] >= 0))
        if len(rows) and len(ours):
            act = act[ours]
            last = last_begun(facts.start[rows], facts.starts.launched[act])
            row = np.where(last == NO_ROW, NO_ROW, rows[last])
            emptied = (row != NO_ROW) & (facts.end[row] >= begins[act] - EARLY_RETURN_NS)
            result[ours] = np.where(emptied, row, NO_ROW)
        results.append(result)
    return results


def _of_device(facts: _Facts, of: Gaps) -> IdlePieces:
    """The pieces of the gaps of one device."""
    pieces = IdlePieces()
    gpu, begin, end = of.gpu, of.start, of.end
    act, every = np.maximum(gpu, 0), np.arange(len(gpu))
    parts = facts.starts.parts(of)
    known = parts.known
    pieces.add(every, (np.where(known, end, begin), end), _UNKNOWN, NO_ROW, _REASON["no_launch"])
    row = np.where(known, facts.launch[act], NO_ROW)
    took = facts.starts.returned[act] - facts.starts.launched[act]
    loads = facts.first_of_name[act] & (took > FIRST_USE_CALL_NS)
    _before_launch(facts, of, parts.launched, pieces)
    codes = np.where(loads, NUMBER["first_use"], NUMBER["launch"]).astype(np.uint8)
    pieces.add(every, (parts.launched, parts.returned), codes, row)
    codes = np.where(parts.queued, NUMBER["queued"], NUMBER["launch"]).astype(np.uint8)
    pieces.add(every, (parts.returned, parts.patience), codes, row)
    held = np.where(known, parts.held, parts.patience)
    pieces.add(every, (parts.patience, held), NUMBER["event_wait"], row)
    pieces.add(every, (parts.held, end), _UNKNOWN, row, _REASON["started_late"])
    return pieces


def _before_launch(facts: _Facts, of: Gaps, until: Int64, parts: IdlePieces) -> None:
    """Adds the pieces from the beginning of each gap until the launch that ended it, with causes by the host."""
    waiting = np.flatnonzero(until > of.start)
    if not len(waiting):
        return
    pieces = _in_threads(facts, of, until, waiting)
    pieces = facts.hosts.elsewhere(of.rank, pieces)
    codes = _host_codes(facts, pieces, of.gpu[pieces.of])
    reason = np.full(len(codes), NO_REASON, np.uint8)
    unknown = np.flatnonzero(codes == _UNKNOWN)
    nowhere = pieces.row[unknown] == NO_ROW
    silent = _REASON["outside" if facts.said.get(of.rank) else "only_calls"]
    reason[unknown] = np.where(nowhere, silent, _REASON["profiler"])
    runs = facts.hosts.runs_program(of.rank, pieces)
    codes[runs], reason[runs] = NUMBER["host"], NO_REASON
    parts.add(pieces.of, (pieces.start, pieces.end), codes, pieces.row, reason)


def _in_threads(facts: _Facts, of: Gaps, until: Int64, waiting: Int64) -> Pieces:
    """The rows of the launching thread over time, for the gaps that waited for a launch."""
    row = facts.launch[np.maximum(of.gpu[waiting], 0)]
    thread = row if not len(facts.thread) else np.where(row == NO_ROW, NO_ROW, facts.thread[row])
    found = []
    for number in _used(thread):
        ours = waiting[thread == number]
        leaves = NOWHERE if number == NO_ROW else facts.hosts.leaves[number]
        pieces = leaves.within(of.start[ours], until[ours])
        found.append(Pieces(ours[pieces.of], pieces.start, pieces.end, pieces.row))
    return together(found)


def _host_codes(facts: _Facts, pieces: Pieces, gpu: Int64) -> UInt8:
    """The cause of each piece by its host row, and by the activity that was launched at its end."""
    if not len(facts.cause):
        return np.full(len(gpu), _UNKNOWN, np.uint8)
    codes = facts.cause[pieces.row]
    codes[pieces.row == NO_ROW] = _UNKNOWN
    long = np.flatnonzero(pieces.end - pieces.start > FIRST_USE_OPERATOR_NS)
    long = long[(codes[long] == NUMBER["operator"]) & (gpu[long] != NO_ROW)]
    gpu = gpu[long]
    ended = facts.end[pieces.row[long]] > facts.starts.launched[gpu]
    long, gpu = long[ended], gpu[ended]
    launch, first = facts.launch[gpu], facts.first_of_name[gpu]
    # If a later kernel of the name also takes that long on the same thread, it is not a first use.
    thread = np.where(launch == NO_ROW, NO_ROW, facts.thread[launch])
    kernel = (thread << _OF_NAMES) + facts.kernel[gpu]
    codes[long[first & ~np.isin(kernel, kernel[~first])]] = NUMBER["first_use"]
    return codes


def _used(numbers: Int64) -> list[int]:
    """The distinct numbers, all at least `NO_ROW`; faster than by sorting."""
    return [int(number) for number in np.flatnonzero(np.bincount(numbers - NO_ROW)) + NO_ROW]
