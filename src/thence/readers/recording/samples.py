"""What the samples of a recording show: which part of the time between two calls of a thread each of them stands for.

The length of that time is known exactly, because calls are recorded. It is divided among its samples: each stands for
the time around it, to the middle between it and the next one. So a change of function is known to half a period, and
the times of all functions in a gap add up to the gap. A sample stands for no time further away than `_REACH_NS`, or a
50th of the time since the last call if that is more, except between two samples that show the same: the rest was not
sampled, and stays what the boundaries around it say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thence.readers.recording.engine_places import Noted

if TYPE_CHECKING:
    import numpy.typing as npt
    import polars as pl

    from thence.model.arrays import Int64


_REACH_NS = 10_000_000
"""The sampler may be late by its longest look while launches come (5 ms), and by work of the recorder's thread."""
_SHARE_OF_QUIET = 50
"""Samples are a 100th of the time since the last call apart in long gaps (``SHARE_OF_QUIET`` of _samples.c)."""
_LAST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Cells:
    """Pieces of time between calls, with what samples show of them; sorted by thread and time, without overlaps.

    Attributes:
        thread: id.
        start, end: Unix ns.
        line, frame: numbers of places, 0 for none.
        state: number in `SAMPLE_STATES`.
    """

    thread: Int64
    start: Int64
    end: Int64
    line: Int64
    frame: Int64
    state: Int64


NO_CELLS = Cells(*(np.empty(0, np.int64),) * 6)
"""Of a recording without samples."""


def cells_of(samples: pl.DataFrame, calls: pl.DataFrame) -> Cells:
    """Divides the time between calls among the samples.

    Args:
        samples: rows of ``samples``.
        calls: columns thread, start and end (Unix ns) of the calls of all threads.
    """
    samples = samples.drop_nulls().sort("thread", "time")
    begin, end = _gaps(samples["thread"].to_numpy(), samples["time"].to_numpy(), calls)
    outside = begin <= samples["time"].to_numpy()  # of calls; the sampler drops others
    columns = {name: samples[name].to_numpy()[outside] for name in samples.columns}
    thread, first, until = columns["thread"], columns["time"], columns["until"]
    begin, end = begin[outside], end[outside]
    until = np.clip(until, first, np.maximum(end, first))
    # Of neighbours in one gap, each gets the time to the middle between them, as far as it reaches.
    reach = np.maximum(_REACH_NS, (first - begin) // _SHARE_OF_QUIET)
    same = (thread[1:] == thread[:-1]) & (begin[1:] == begin[:-1])
    alike = same.copy()
    for name in ("line", "frame", "state"):
        alike &= columns[name][1:] == columns[name][:-1]
    between = (until[:-1] + first[1:]) // 2
    left, right = np.maximum(begin, first - reach), np.minimum(end, until + reach)
    left[1:][same] = np.maximum(between, first[1:] - reach[1:])[same]
    right[:-1][same] = np.minimum(between, until[:-1] + reach[1:])[same]
    left[1:][alike] = right[:-1][alike] = between[alike]
    return _merged(columns, left, right, alike)


def _gaps(thread: Int64, time: Int64, calls: pl.DataFrame) -> tuple[Int64, Int64]:
    """For moments of threads: when the last call of the thread before it was over, and when its next one begins.

    1 ns is left between them and the calls, so that calls are outside. Before the first call, the time begins with the
    first of the moments.
    """
    begin, end = np.zeros(len(thread), np.int64), np.full(len(thread), _LAST)
    calls = calls.drop_nulls(["thread", "start", "end"]).sort("thread", "start")
    of_call, starts, ends = (calls[name].to_numpy() for name in ("thread", "start", "end"))
    for number in np.unique(thread).tolist():
        ours = thread == number
        low, high = np.searchsorted(of_call, (number, number + 1))
        before = np.searchsorted(starts[low:high], time[ours], "right")
        over = np.append(time[ours].min(), np.maximum.accumulate(ends[low:high]) + 1)
        begin[ours] = over[before]
        end[ours] = np.append(starts[low:high] - 1, _LAST)[before]
    return begin, end


def _merged(columns: dict[str, Int64], left: Int64, right: Int64, alike: npt.NDArray[np.bool_]) -> Cells:
    """The cells, of which adjacent ones that show the same are one."""
    first = np.append(True, ~alike)[: len(left)]
    last = np.append(first[1:], True)[: len(left)]
    start, end = left[first], right[last]
    lasting = end > start
    kept = {name: columns[name][first][lasting] for name in ("thread", "line", "frame", "state")}
    return Cells(start=start[lasting], end=end[lasting], **kept)


def without_notes(noted: Noted, cells: Cells, place: Int64) -> Noted:
    """The boundaries of one kind, with a place for each cell in place of what boundaries say of that time.

    After a cell, the thread is where the boundaries before its next call say.

    Args:
        noted: boundaries of the kind.
        cells: as `cells_of` returns them.
        place: of each cell, 0 for none: then the boundaries are kept.
    """
    rows = np.flatnonzero(place > 0) if len(noted.time) else np.arange(len(place))
    if not len(rows):
        return noted
    thread, start, end, place = cells.thread[rows], cells.start[rows], cells.end[rows], place[rows]
    # The place after each cell: that of the last boundary up to a moment after it, at which the next call begins.
    after = np.zeros(len(rows), np.int64)
    dropped = np.zeros(len(noted.time), np.bool_)
    for number in np.unique(thread).tolist():
        ours = thread == number
        low, high = np.searchsorted(noted.thread, (number, number + 1))
        times = noted.time[low:high]
        latest = np.searchsorted(times, end[ours] + 1, "right") - 1
        places = np.append(noted.place[low:high], 0)
        after[ours] = places[latest]
        cell = np.searchsorted(start[ours], times, "right") - 1
        dropped[low:high] = (cell >= 0) & (times < end[ours][np.maximum(cell, 0)])
    follows = np.append((thread[1:] == thread[:-1]) & (start[1:] <= end[:-1]), False)[: len(end)]
    parts = (
        (noted.thread[~dropped], noted.time[~dropped], noted.place[~dropped]),
        (thread[~follows], end[~follows], after[~follows]),
        (thread, start, place),
    )
    threads, times, numbers = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((times, threads))
    return Noted(threads[order], times[order], numbers[order])
