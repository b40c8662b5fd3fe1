"""Matches buffers of in-kernel events to kernel launches of a trace.

%globaltimer and a trace's clock are different clocks: their offset was -57, +66, +215 and +1,437 us
in four processes on one H200, and it drifts by tens of us within seconds. So the time alone does not
identify a launch. These criteria do, applied in this order:

name, grid, block, device, process     must be equal
length                                 the kernel took at least as long as the ranges inside it
times on the host's clock              launched after its buffer was made, ended before it was read
neighbours on the host's clock         the only launch before the next buffer was made, if one was
distances between several buffers      equal those between their launches, up to clock drift

If several launches remain, an error asks the user to choose one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.errors import MissingData, UsageError
from thence.inside.clocks import MAX_GHZ
from thence.units import format_ns, format_share, several

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thence.inside.decoding import Decoded
    from thence.model.arrays import Int64, Mask
    from thence.model.timeline import Timeline

    Parts = Sequence[tuple[str, Decoded]]

_MAX_SHIFT_NS = 60_000_000_000
"""A larger offset between timer and trace means that they were recorded at different times."""
_UNIX_TIMES_NS = 1_500_000_000_000_000_000
"""A timer with smaller values does not count from 1970."""
_HOST_SLACK_NS = 2_000
"""Tolerance between the host's clock and the trace's clock."""
_JITTER_NS, _DRIFT = 5_000, 1e-4
"""Tolerance between the distances of two launches by timer and by trace: constant ns, and a share."""
_SHORT, _SHORT_SHARE = 2_000, 0.05
"""By how much a slice may be shorter than the ranges in it: ns, and a share."""
_WRAP = 1 << 32
_MAX_NAMED = 6


class KernelLaunches:
    """The kernel launches of a trace, looked up by kernel name and cached for all buffers.

    Attributes:
        recorded: the trace.
    """

    def __init__(self, recorded: Timeline) -> None:
        self.recorded = recorded
        self._named: dict[str, pl.DataFrame] = {}

    def of(self, name: str, decoded: Decoded) -> pl.DataFrame:
        """The launches of a buffer's kernel in order of start.

        Args:
            name: name of the buffer, for the error message.

        Returns:
            id (row of gpu), rank, device, duration, corrected (start on the timeline), and, on the clock as
            recorded, start (of the kernel) and call (start of the launch call; the kernel's start if there is none).

        Raises:
            MissingData: the trace has no such launch.
        """
        description = decoded.description
        pid = description.launch.get("pid")
        chosen = _of_process(self.recorded, self._of_kernel(description.kernel), pid)
        for column, size in (("grid", description.grid), ("block", description.block)):
            wanted = pl.lit(list(size), pl.Array(pl.UInt32, 3))
            if size != (1, 1, 1):
                chosen = chosen.filter((pl.col(column) == wanted).fill_null(value=True))
        if knows_device(decoded):
            of_device = chosen.filter(pl.col("device") == description.device)
            chosen = chosen if of_device.is_empty() else of_device
        if chosen.is_empty():
            what = f"of {description.kernel!r}" if description.kernel else "of a kernel"
            raise MissingData(
                f"{name}: the trace has no launch {what} with grid {description.grid} and block"
                f" {description.block}, so its ranges cannot be drawn"
            )
        correction = pl.lit(0, pl.Int64)
        for rank, ns in self.recorded.corrections.items():
            correction = pl.when(pl.col("rank") == rank).then(ns).otherwise(correction)
        return (
            chosen.select(
                "id", "rank", "device", "duration", corrected="start", start=pl.col("start") + correction,
                call=pl.coalesce("call", "start") + correction,
            )
            .sort("start")
        )  # fmt: skip

    def _of_kernel(self, kernel: str) -> pl.DataFrame:
        """Rows of gpu with this kernel, on the timeline's clock, with the start of their launch call."""
        if kernel not in self._named:
            self._named[kernel] = _with_calls(self.recorded, _named(self.recorded, kernel))
        return self._named[kernel]


def _with_calls(recorded: Timeline, launches: pl.DataFrame) -> pl.DataFrame:
    calls = (
        recorded.trace.host.filter(pl.col("category").is_in(["runtime", "driver"]))
        .join(launches, on=["rank", "correlation"], how="semi")
        .group_by("rank", "correlation")
        .agg(call=pl.col("start").min())
    )
    return launches.join(calls, on=["rank", "correlation"], how="left", maintain_order="left")


def _named(recorded: Timeline, kernel: str) -> pl.DataFrame:
    """Rows of gpu whose kernel has this name, exactly or as a word of a longer name; all kernels if it is empty."""
    gpu = recorded.trace.gpu.with_row_index("id").filter(pl.col("kind") == "kernel")
    full = pl.col("name").cast(pl.String)
    if not kernel:
        return gpu
    chosen = gpu.filter(full == kernel)
    word = pl.escape_regex(kernel)
    if chosen.is_empty():  # with its return type and parameters, as demanglers write it
        pattern = rf"(^|[^A-Za-z0-9_]){word}([^A-Za-z0-9_]|$)"
        chosen = gpu.filter(full.str.contains(pattern))
    if chosen.is_empty():  # as Mosaic GPU names it
        pattern = rf"(^|[^A-Za-z0-9]){word}([^A-Za-z0-9]|$)"
        chosen = gpu.filter(full.str.contains(pattern) & full.str.contains("mosaic", literal=True))
    return chosen


def _of_process(recorded: Timeline, launches: pl.DataFrame, process: Any) -> pl.DataFrame:
    """The launches of the ranks with this process id; all launches if the trace does not have it."""
    process = positive_or_none(process)
    if process is None or launches["rank"].n_unique() < 2:
        return launches
    ranks = recorded.trace.host.filter(pl.col("process") == process)["rank"].unique()
    return launches.filter(pl.col("rank").is_in(ranks.implode())) if len(ranks) else launches


def knows_device(decoded: Decoded) -> bool:
    """Whether a buffer's description tells on which device its kernel ran."""
    return not isinstance(decoded.description.launch.get("device"), str)  # "one of 8"


def positive_or_none(value: Any) -> int | None:
    """The value if it is a positive int below 2^62, else None: descriptions may hold anything."""
    return value if type(value) is int and 0 < value < 1 << 62 else None


@dataclass(frozen=True)
class _Place:
    """The kernel launch that a buffer belongs to, shown as a slice of the timeline.

    Attributes:
        rank, device: of the slice.
        number, of: number of the launch among the kernel's launches in order of start, from 0, and their count.
        slice_ns: duration of the slice.
        span_ns: from the first start to the last end of the buffer's traces.
        moved_ns: shift from the buffer's times to the timeline: the mean of the differences between the
            starts and between the ends of slice and buffer.
        at_start_ns, at_end_ns: offset of the GPU's timer from the trace's clock at the start and at the
            end; None if these clocks cannot be compared.
        how: the criterion that identified this launch, as the end of a sentence.
    """

    rank: int
    device: int
    number: int
    of: int
    slice_ns: int
    span_ns: int
    moved_ns: int
    at_start_ns: int | None
    at_end_ns: int | None
    how: str

    def sentence(self, name: str) -> str:
        """Describes the match as a sentence about the buffer ``name``."""
        which = f"launch {self.number} of {self.of}" if self.of > 1 else "the only launch"
        text = (
            f"{name}: {format_ns(self.span_ns)} of ranges are drawn under {which} of the kernel,"
            f" which took {format_ns(self.slice_ns)}{self.how}"
        )
        if self.at_start_ns is None or self.at_end_ns is None:
            text += "; their middle is drawn at the middle of the kernel, as the clocks cannot be compared"
        else:
            text += (
                f"; the GPU's timer differed by {self.at_start_ns:+,} ns from the trace's clock at the start of"
                f" the kernel and by {self.at_end_ns:+,} ns at its end: the mean is used, for this"
                " launch alone"
            )
        if self.span_ns > self.slice_ns + _SHORT:
            text += "; the ranges are longer than the kernel: the clock's rate, or the launch, is wrong"
        return text


@dataclass(frozen=True)
class _Buffer:
    """A buffer and its candidate launches.

    Attributes:
        launches: launches of its kernel, as `KernelLaunches.of` returns them.
        possible: rows of ``launches`` that it can belong to.
        offsets: for each row of ``launches``, the offset of the buffer's timer from the trace's clock if the buffer
            belongs to that launch; modulo 2^32 ns if ``wrapped``.
        wrapped: whether the timer has 32 bits.
        alone: whether the times of neighbouring buffers left exactly one launch.
        clocked: whether the trace's clock has a known epoch.
    """

    name: str
    decoded: Decoded
    launches: pl.DataFrame
    possible: Int64
    offsets: Int64
    wrapped: bool
    alone: bool
    clocked: bool

    @property
    def timed(self) -> bool:
        """Whether its times are comparable with those of other buffers of the device."""
        return self.decoded.timer_bits > 0


def span(decoded: Decoded) -> tuple[int, int]:
    """First start and last end of any trace, in ns of the buffer's timer."""
    traces = decoded.as_ns(decoded.traces)
    first, last = traces["start_ns"].min(), traces["end_ns"].max()
    assert isinstance(first, int)
    assert isinstance(last, int)
    return first, last


def find_launches(recorded: Timeline, parts: Parts, launch: int | None = None) -> list[_Place]:
    """Finds the launch of each buffer.

    Args:
        recorded: timeline of a trace recorded at the same time.
        parts: name and decoded content of each buffer; each holds at least one trace.
        launch: number of the launch among the kernel's launches, in order of start from 0; None to find it.

    Raises:
        MissingData: no launch, or more than one, matches a buffer.
        UsageError: the kernel has no launch with the number ``launch``.
    """
    launches = KernelLaunches(recorded)
    buffers = [_buffer(launches, name, decoded) for name, decoded in parts]
    if launch is not None:
        return [_requested_launch(buffer, launch) for buffer in buffers]
    buffers = [_with_possible(buffer, recorded.trace.meta.epoch_ns) for buffer in buffers]
    places: dict[int, _Place] = {}
    for group in _groups(buffers):
        members = [buffers[i] for i in group]
        places |= dict(zip(group, _match_together(members), strict=True))
    return [places[i] for i in range(len(buffers))]


def with_rates(recorded: Timeline, parts: Parts, launch: int | None = None) -> Parts:
    """The buffers, those in cycles converted to ns at the rate that this run tells.

    That is the median rate that other buffers measured on the same device, or else the rate at which the ranges fill
    their launches in the trace.

    Args:
        recorded: timeline of a trace recorded at the same time.
        parts: name and decoded content of each buffer; each holds at least one trace.
        launch: number of the launch among the kernel's launches; None to find it.

    Raises:
        MissingData: no launch, or more than one, matches a buffer; or the launches tell no rate.
        UsageError: the kernel has no launch with the number ``launch``.
    """
    unknown = [(name, decoded) for name, decoded in parts if decoded.unit == "cycles"]
    if not unknown:
        return parts
    devices = {decoded.description.device for _, decoded in unknown}
    measured = [
        decoded.traces["clock_ghz"].median()
        for _, decoded in parts
        if decoded.unit == "ns" and decoded.description.device in devices
    ]
    others = [ghz for ghz in measured if isinstance(ghz, float)]
    if others and len(devices) == 1:
        ghz = float(np.median(others))
        note = (
            f"cycles are converted to ns with {ghz:.3f} GHz for the SM clock of all traces, the median of "
            f"{several(len(others), 'other buffer')} of this run"
        )
        return _at_rate(parts, ghz, note)
    places = find_launches(recorded, parts, launch)
    rates = [
        decoded.rate_in_slice(place.slice_ns)
        for place, (_, decoded) in zip(places, parts, strict=True)
        if decoded.unit == "cycles"
    ]
    known = [rate for rate in rates if rate is not None]
    if not known:
        raise MissingData(
            f"{unknown[0][0]}: its times are in cycles, and neither the buffer nor the kernel's duration in the trace "
            "tells the rate of the SM clock: give it (--clock-ghz)"
        )
    ghz, uncertainty = (float(np.median([rate[i] for rate in known])) for i in (0, 1))
    note = (
        f"cycles are converted to ns with {ghz:.2f} GHz, +-{format_share(uncertainty, 1)}, for the SM clock, at which "
        f"the ranges fill their kernel in the trace ({several(len(known), 'launch')})"
    )
    return _at_rate(parts, ghz, note)


def _at_rate(parts: Parts, ghz: float, note: str) -> Parts:
    return [(name, decoded.at_rate(ghz, note) if decoded.unit == "cycles" else decoded) for name, decoded in parts]


def _requested_launch(buffer: _Buffer, launch: int) -> _Place:
    count = buffer.launches.height
    if not 0 <= launch < count:
        raise UsageError(
            f"{buffer.name}: its kernel has {count:,} launch{'es' if count > 1 else ''}, numbered from 0; got "
            f"--launch {launch}"
        )
    return _place(buffer, launch, ", as given by --launch")


def _buffer(launches: KernelLaunches, name: str, decoded: Decoded) -> _Buffer:
    """A buffer with every launch of its kernel as a candidate."""
    if decoded.unit == "cycles":
        # At the highest rate the ranges are not longer than they were, so no launch is ruled out wrongly.
        decoded = decoded.at_rate(MAX_GHZ, "")
    buffer = launches.of(name, decoded)
    epoch = launches.recorded.trace.meta.epoch_ns
    start, duration = (buffer[c].to_numpy().astype(np.int64) for c in ("start", "duration"))
    first, last = span(decoded)
    zero = epoch or 0
    wrapped = decoded.timer_bits == 32  # only the low word of the timer is known
    return _Buffer(
        name=name,
        decoded=decoded,
        launches=buffer,
        possible=np.arange(len(start)),
        offsets=_signed(((first - zero - start) + (last - zero - start - duration)) // 2, wrapped),
        wrapped=wrapped,
        alone=False,
        clocked=epoch is not None,
    )


def _with_possible(buffer: _Buffer, epoch: int | None) -> _Buffer:
    """The buffer with only the candidate launches whose length and time fit.

    Raises:
        MissingData: no launch fits.
    """
    decoded, launches = buffer.decoded, buffer.launches
    first, last = span(decoded)
    ordered, alone = _in_order(launches, epoch, decoded.description.launch)
    same_time = np.ones(launches.height, np.bool_)
    if epoch is not None and decoded.timer_bits == 64 and first > _UNIX_TIMES_NS:
        same_time = np.abs(buffer.offsets) <= _MAX_SHIFT_NS
    duration = launches["duration"].to_numpy().astype(np.int64)
    long = duration + max(_SHORT, int(_SHORT_SHARE * (last - first))) >= last - first
    _check_candidates(buffer.name, same_time, ordered, long, buffer.offsets, last - first)
    possible = np.flatnonzero(same_time & long & ordered)
    within = possible[alone[possible]]
    possible = within if len(within) == 1 else possible
    only_one = bool(len(possible) == 1 and alone[possible].all() and not alone.all())
    return replace(buffer, possible=possible, alone=only_one)


def _in_order(launches: pl.DataFrame, epoch: int | None, facts: Mapping[str, Any]) -> tuple[Mask, Mask]:
    """Which launches fit the host times of a buffer, and which also fit those of its neighbours.

    A buffer is made before its launch (host_ns) and read after it (taken_ns). Most programs launch the
    kernel before they make the next buffer (next_ns), or read a buffer before the next launch (previous_ns);
    programs that make all buffers first do neither.
    """
    call = launches["call"].to_numpy().astype(np.int64)
    end = (launches["start"] + launches["duration"]).to_numpy().astype(np.int64)
    made, taken, previous, following = (
        positive_or_none(facts.get(key)) for key in ("host_ns", "taken_ns", "previous_ns", "next_ns")
    )
    ordered = np.ones(len(call), np.bool_)
    if epoch is None:
        return ordered, ordered
    if made is not None:
        ordered &= call >= made - epoch - _HOST_SLACK_NS
    if taken is not None:
        ordered &= end <= taken - epoch + _HOST_SLACK_NS
    alone = ordered.copy()
    if previous is not None:
        alone &= call >= previous - epoch - _HOST_SLACK_NS
    if following is not None:
        alone &= call <= following - epoch
    return ordered, alone


def _check_candidates(name: str, same_time: Mask, ordered: Mask, long: Mask, offsets: Int64, span_ns: int) -> None:
    """Raises MissingData if no candidate launch remains; the message names the criterion that failed."""
    if (same_time & ordered & long).any():
        return
    count = len(offsets)
    if not same_time.any():
        nearest = format_ns(int(np.abs(offsets).min()))
        why = f"the nearest is {nearest} away: the trace was recorded at another time"
    elif not (same_time & ordered).any():
        why = (
            "none was launched after its buffer was created and ended before the buffer was read: the trace"
            " does not cover that time, or is of another process"
        )
    else:
        why = (
            f"none took as long as the {format_ns(span_ns)} from the first start to the last end in the buffer:"
            " the trace does not contain the launch, or the SM clock's rate is wrong (--clock-ghz)"
        )
    raise MissingData(
        f"{name}: of {count:,} launches of its kernel, {why}; if one of them is right nevertheless,"
        f" name it with --launch (0 to {count - 1:,})"
    )


def _signed(values: Int64, wrapped: bool) -> Int64:  # noqa: FBT001 - of the clock
    return (values + _WRAP // 2) % _WRAP - _WRAP // 2 if wrapped else values


def _groups(buffers: Sequence[_Buffer]) -> list[list[int]]:
    """Groups buffers of one process and device, whose times are comparable; others get a group each."""
    groups: dict[Any, list[int]] = {}
    for i, buffer in enumerate(buffers):
        about = buffer.decoded.description
        comparable = buffer.timed and knows_device(buffer.decoded)
        process = positive_or_none(about.launch.get("pid"))
        groups.setdefault((process, about.device) if comparable else i, []).append(i)
    # 64-bit times give the order of the buffers; with a 32-bit time among them, the given order is kept.
    for group in groups.values():
        if not any(buffers[i].wrapped for i in group):
            group.sort(key=lambda i: span(buffers[i].decoded)[0])
    return list(groups.values())


def _match_together(buffers: Sequence[_Buffer]) -> list[_Place]:
    """Matches the buffers of one group together, using the distances between them."""
    chosen = _chains(buffers)
    if chosen.shape[1] > 1:
        # If the user names the launch of the first ambiguous buffer, that may determine the others.
        several = next(i for i, rows in enumerate(chosen) if len(np.unique(rows)) > 1)
        _raise_ambiguous(buffers[several], np.unique(chosen[several]), len(buffers) > 1)
    return [
        _place(buffer, int(row), _match_reason(buffer, len(buffers)))
        for buffer, row in zip(buffers, chosen[:, 0], strict=True)
    ]


def _chains(buffers: Sequence[_Buffer]) -> Int64:
    """Every assignment of launches to buffers that preserves the distances between the buffers.

    Returns:
        Rows of each buffer's launches: shape (buffers, ways), at least one way.

    Raises:
        MissingData: there is no such assignment.
    """
    head = buffers[0]
    ways = head.possible[None, :]
    shift = head.offsets[head.possible]
    for before, buffer in itertools.pairwise(buffers):
        rows, off = _nearest(buffer, before, ways[-1], shift)
        apart = np.abs(buffer.launches["start"].to_numpy()[rows] - before.launches["start"].to_numpy()[ways[-1]])
        good = np.abs(off) <= _JITTER_NS + _DRIFT * apart
        ids = buffer.launches["id"].to_numpy()[rows]
        for other, taken in zip(buffers, ways, strict=False):  # a launch belongs to one buffer only
            good &= ids != other.launches["id"].to_numpy()[taken]
        if not good.any():
            raise MissingData(
                f"{buffer.name}: no launch of its kernel is as far from the launch of {before.name} as the"
                " two buffers are from each other: the trace does not contain all of their launches"
            )
        ways = np.concatenate([ways[:, good], rows[None, good]])
        shift = _signed(buffer.offsets[ways[-1]], buffer.wrapped)
    return ways


def _nearest(buffer: _Buffer, before: _Buffer, taken: Int64, shift: Int64) -> tuple[Int64, Int64]:
    """For each way, the launch on the same GPU whose clock shift is nearest to ``shift``, and the difference."""
    rows, off = np.zeros(len(taken), np.int64), np.full(len(taken), _WRAP * _WRAP // 4, np.int64)
    gpus = [b.launches.select("rank", "device").to_numpy() for b in (before, buffer)]
    wrapped = buffer.wrapped or before.wrapped
    for gpu in np.unique(gpus[0][taken], axis=0):
        ways = np.flatnonzero((gpus[0][taken] == gpu).all(axis=1))
        left = buffer.possible[(gpus[1][buffer.possible] == gpu).all(axis=1)]
        if not len(left):
            continue
        ahead = _signed(buffer.offsets[left], wrapped)
        order = np.argsort(ahead, kind="stable")
        wanted = _signed(shift[ways], wrapped)
        position = np.searchsorted(ahead[order], wanted)
        for place in (position - 1, position):
            row = left[order[place % len(left)]]
            apart = _signed(buffer.offsets[row] - wanted, wrapped)
            nearer = np.abs(apart) < np.abs(off[ways])
            rows[ways] = np.where(nearer, row, rows[ways])
            off[ways] = np.where(nearer, apart, off[ways])
    return rows, off


def _match_reason(buffer: _Buffer, buffers: int) -> str:
    if buffer.launches.height == 1:
        return ""
    if buffer.alone:
        return ", the only one of this length between the times at which buffers were created or read"
    if len(buffer.possible) == 1:
        return ", the only one of this length and time"
    return f", the only one that fits the distances between the {buffers:,} buffers"


def _raise_ambiguous(buffer: _Buffer, rows: Int64, several: bool) -> None:  # noqa: FBT001 - words it
    shown = buffer.launches[rows[:_MAX_NAMED]].select("start", "duration").iter_rows()
    named = [
        f"{row} (at {format_ns(start)}, {format_ns(duration)})"
        for row, (start, duration) in zip(rows.tolist(), shown, strict=False)
    ]
    more = f" and {len(rows) - _MAX_NAMED:,} more" if len(rows) > _MAX_NAMED else ""
    raise MissingData(
        f"{buffer.name}: could be any of {len(rows):,} launches of its kernel, and its content does"
        f" not identify one: name it with --launch{', one buffer at a time' * several}:"
        f" {', '.join(named)}{more}"
    )


def _place(buffer: _Buffer, row: int, how: str) -> _Place:
    launch = buffer.launches.row(row, named=True)
    first, last = span(buffer.decoded)
    start, end = launch["corrected"], launch["corrected"] + launch["duration"]
    moved = ((start - first) + (end - last)) // 2
    comparable = buffer.timed and buffer.clocked
    half = ((last - first) - launch["duration"]) // 2
    offset = int(buffer.offsets[row])
    return _Place(
        rank=launch["rank"],
        device=launch["device"],
        number=row,
        of=buffer.launches.height,
        slice_ns=launch["duration"],
        span_ns=last - first,
        moved_ns=moved,
        at_start_ns=offset - half if comparable else None,
        at_end_ns=offset + half if comparable else None,
        how=how,
    )
