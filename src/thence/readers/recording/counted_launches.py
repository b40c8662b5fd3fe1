"""Finds launches whose API call was not recorded, by the number that CUPTI gave them (the correlation id).

CUPTI numbers the launches of a process with one counter, and every activity holds the number of its launch. A
boundary (`thence.capture.boundaries.log`) holds the value of the counter when a thread crossed it, and takes a number
itself. So a launch lies after the last boundary with a smaller number and before the first with a greater
number. This order is exact and does not depend on clocks.

The thread of a launch is certain if only one thread can have launched between these two boundaries. A thread
can launch between each of its boundaries and its next boundary, unless the first has the flag `ENDS` (the
thread goes idle) or the second has the flag `BEGINS` (it was idle); before its first boundary it cannot launch.
If several threads can have launched, or none, the launch gets the code of the reason in place of a thread;
threads are never guessed. Threads that cross no boundary are not known here.

CUPTI's numbers have 32 bits and wrap around; here they are extended to 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.capture.boundaries.log import BEGINS, ENDS, READ, REPEATED
from thence.model.intervals import NO_ROW
from thence.model.launches import COUNTED, UNCERTAIN

if TYPE_CHECKING:
    from thence.model.arrays import Int64, Mask


_WORD = 1 << 32
_NO_THREAD = 0
_NEVER = np.iinfo(np.int64).max
_CODES = (None, *UNCERTAIN)
"""Results of `_owners` for a launch: None if its thread is certain, else the code of the reason."""


@dataclass(frozen=True)
class Boundaries:
    """The boundaries of one process, in order of the counter.

    Attributes:
        counter: value of CUPTI's counter, extended to 64 bits.
        time: Unix ns; it increases from row to row of a thread.
        thread: id.
        place: number of the place from here on; 0 changes no place.
        following: row of the thread's next boundary; the number of rows if there is none.
        launches: whether the thread may have launched between this boundary and its next.
        noted: whether the boundary was noted when it was crossed; else it was read from the stack at a later call.
        numbered: whether the counter was read at all; else ``counter`` is the order of recording.
        reused: lowest and highest of the numbers that CUPTI gave twice; None if there are none.
        first: the first number as recorded, from which the extended numbers count.
    """

    counter: Int64
    time: Int64
    thread: Int64
    place: Int64
    following: Int64
    launches: Mask
    noted: Mask
    numbered: bool
    reused: tuple[int, int] | None
    first: int

    def __len__(self) -> int:
        return len(self.counter)


def boundaries_of(table: pl.DataFrame) -> Boundaries:
    """The boundaries of a recording.

    Args:
        table: rows of ``boundaries``, in the order of recording.
    """
    table = table.drop_nulls()
    numbered = bool((table["counter"] > 0).any())
    if numbered:
        table = table.filter(pl.col("counter") > 0)
    else:  # launches were recorded instead of counted: the order of recording serves as the counter
        table = table.with_columns(counter=pl.int_range(1, pl.len() + 1))
    table = _repeated_first(table)
    raw = table["counter"].to_numpy()
    first = int(raw[0]) if len(raw) else 0
    counter = numbers_of(raw, first)
    frame = table.select("time", "thread", "place", "flags").with_columns(
        counter=pl.Series(counter), arrival=pl.int_range(pl.len())
    )
    # A thread notes one boundary after the other, so its numbers increase, unless CUPTI's counter started again.
    # Boundaries read from a stack are left out: they took no number.
    before = pl.col("counter").cum_max().shift(1).over("thread")
    noted = frame.filter((pl.col("flags") & (READ | REPEATED)) == 0)
    again = noted.select("counter", before=before).filter(pl.col("counter") <= pl.col("before"))
    reused = None
    if again.height:
        reused = int(again["counter"].min()), int(again["before"].max())  # type: ignore[arg-type]
    frame = frame.sort("counter", "arrival").with_columns(row=pl.int_range(pl.len()))
    # Times of a thread are made to increase by at least 1 ns, so that none of its ranges is empty.
    number = pl.int_range(pl.len())
    frame = frame.with_columns(
        time=((pl.col("time") - number).cum_max() + number).over("thread"),
        following=pl.col("row").shift(-1).over("thread"),
        idle_before_next=((pl.col("flags") & BEGINS) != 0).shift(-1).over("thread"),
    )
    launches = ((pl.col("flags") & ENDS) == 0) & ~pl.col("idle_before_next").fill_null(value=False)
    columns = frame.select(
        *("counter", "time", "thread", "place"),
        pl.col("following").fill_null(frame.height),
        launches=launches,
        noted=(pl.col("flags") & READ) == 0,
    )
    arrays: dict[str, Any] = {name: columns[name].to_numpy() for name in columns.columns}
    return Boundaries(**arrays, numbered=numbered, reused=reused, first=first)


def _repeated_first(table: pl.DataFrame) -> pl.DataFrame:
    """The boundaries, those before them that later parts repeat whose own part was deleted."""
    is_repeated = (table["flags"] & REPEATED) != 0
    if not is_repeated.any():
        return table
    columns = ("counter", "time", "thread", "place")
    rest = table.filter(~is_repeated)
    repeated = table.filter(is_repeated).unique(columns, keep="first", maintain_order=True)
    return pl.concat([repeated.join(rest, on=columns, how="anti", maintain_order="left").sort("counter"), rest])


def numbers_of(raw: Int64, first: int) -> Int64:
    """Extends numbers of 32 bits that wrapped around: of the possible values, the nearest to the previous one.

    Args:
        raw: numbers nearly in order, shape (n,).
        first: a number near the first of them, from which the extended numbers count.
    """
    values: Int64 = np.concatenate([[first], raw]).astype(np.int64)
    steps: Int64 = values[1:] - values[:-1]
    return first + np.cumsum(np.mod(steps + _WORD // 2, _WORD) - _WORD // 2)


def counted_launches(gpu: pl.DataFrame, queued: pl.Series, calls: pl.Series, boundaries: Boundaries) -> pl.DataFrame:
    """The launches of activities whose call was not recorded.

    Args:
        gpu: columns start (Unix ns), graph and correlation of the activities, in order of time.
        queued: when the host queued each, Unix ns; 0 or null where CUPTI does not report it.
        calls: correlation ids of recorded calls.

    Returns:
        correlation, thread, name (of `COUNTED` or `UNCERTAIN`), start and end (Unix ns, equal), and latest: the
        latest possible time of the launch, equal to start where its time is known. Ordered by number.
    """
    launches = _distinct(gpu, queued, calls, boundaries)
    number = launches["number"].to_numpy()
    interval = np.searchsorted(boundaries.counter, number, "left") - 1
    owner, why = _owners(boundaries, interval, number)
    row = np.maximum(owner, 0)
    certain = owner != NO_ROW
    times = np.append(boundaries.time, _NEVER)  # the time after a thread's last boundary
    reached = np.append(np.maximum.accumulate(boundaries.time), 0)
    frame = launches.with_columns(
        why=pl.Series(why),
        thread=pl.Series(np.where(certain, np.append(boundaries.thread, 0)[row], _NO_THREAD)),
        earliest=pl.Series(np.where(certain, times[row], reached[interval])),
        latest=pl.Series(np.where(certain, times[np.append(boundaries.following, 0)[row]] - 1, _NEVER)),
    )
    # A launch precedes the start of its first activity.
    last = pl.min_horizontal("latest", pl.max_horizontal("first", "earliest"))
    exact = pl.when(pl.col("queued") > 0).then(pl.col("queued").clip("earliest", last))
    frame = frame.with_columns(last.alias("latest"), exact=exact)
    # The launch time of a copy or graph is unknown, but lies between the thread's launches before and after it.
    known = pl.coalesce("exact", "earliest").cum_max().over("thread")
    until = pl.col("exact").fill_null(_NEVER).cum_min(reverse=True).over("thread")
    frame = frame.with_columns(
        start=pl.coalesce("exact", pl.max_horizontal(known, "earliest")), until=pl.min_horizontal("latest", until)
    )
    return frame.select(
        "correlation",
        "thread",
        _names(why, launches["graphs"].to_numpy()),
        "start",
        end="start",
        latest=pl.coalesce("exact", pl.max_horizontal("start", "until")),
    )


def outside_of_ranges(launches: pl.DataFrame, ranges: pl.DataFrame) -> pl.DataFrame:
    """Moves each launch of unknown time to the possible time at which the fewest of some ranges are open.

    A launch is then in no range that began or ended during its possible times, because it is not known whether
    it was inside of that range.

    Args:
        launches: as `counted_launches` returns them; only their start and end change.
        ranges: thread, start and end of ranges for which no boundaries were noted.
    """
    start = launches["start"].to_numpy().copy()
    open_for = launches.with_row_index("row").filter(pl.col("latest") > pl.col("start"))
    for (thread,), rows in open_for.group_by("thread"):
        of_thread = ranges.filter(pl.col("thread") == thread)
        times = np.concatenate([of_thread["start"].to_numpy(), of_thread["end"].to_numpy()])
        order = np.argsort(times, kind="stable")
        times = times[order]
        change = np.where(order < of_thread.height, 1, -1)
        depth = np.concatenate([[0], np.cumsum(change)])  # before each event, and after the last
        begin = np.searchsorted(times, rows["start"].to_numpy(), "right")
        end = np.searchsorted(times, rows["latest"].to_numpy(), "right")
        crossing = np.flatnonzero(end > begin)
        if not len(crossing):
            continue
        # The lowest depth of events begin to end, and the first event that reaches it.
        key = np.append(depth[1:] * len(depth) + np.arange(len(times)), _NEVER)
        pairs = np.column_stack([begin[crossing], end[crossing]]).ravel()
        lowest = np.minimum.reduceat(key, pairs)[::2]
        lower = lowest // len(depth) < depth[begin[crossing]]
        start[rows["row"].to_numpy()[crossing[lower]]] = times[lowest[lower] % len(depth)]
    return launches.with_columns(start=pl.Series(start), end=pl.Series(start))


def _names(why: Int64, graphs: Mask) -> pl.Series:
    """The name of each launch, by the position of its reason in `_CODES`."""
    pairs = [COUNTED if code is None else UNCERTAIN[code] for code in _CODES]
    names = pl.Series("name", [name for pair in pairs for name in pair], dtype=pl.Categorical())
    return names.gather(2 * why + graphs)


def _distinct(gpu: pl.DataFrame, queued: pl.Series, calls: pl.Series, boundaries: Boundaries) -> pl.DataFrame:
    """One row for each launch: correlation, number, queued (0: unknown), graphs, and first (the earliest start)."""
    in_graph = pl.col("graph").is_not_null()
    rows = gpu.select("correlation", "start", graphs=in_graph, queued=queued.fill_null(0))
    rows = rows.filter(pl.col("correlation") > 0)
    recorded = calls.drop_nulls().unique()
    if len(recorded):
        rows = rows.filter(~pl.col("correlation").is_in(recorded.implode()))
    number = numbers_of(rows["correlation"].to_numpy() % _WORD, boundaries.first)
    # For kernels in graphs, CUPTI repeats an old queued time.
    rows = rows.with_columns(pl.when("graphs").then(0).otherwise("queued").alias("queued"), number=pl.Series(number))
    return (
        rows.group_by("number")
        .agg(pl.col("correlation").first(), pl.col("queued").max(), pl.col("graphs").any(), first=pl.col("start").min())
        .sort("number")
    )


def _owners(boundaries: Boundaries, interval: Int64, number: Int64) -> tuple[Int64, Int64]:
    """The row of the last boundary of its own thread before each launch (`NO_ROW`: unknown), and the place in `_CODES`.

    Args:
        interval: row of the last boundary before each launch, -1 for none.
        number: of each launch.
    """
    rows = len(boundaries)
    begins = np.flatnonzero(boundaries.launches)
    ends = boundaries.following[begins]
    threads = np.bincount(begins, minlength=rows + 1) - np.bincount(ends, minlength=rows + 1)
    sums = np.zeros(rows + 1, np.int64)
    sums[begins] += begins
    np.subtract.at(sums, ends, begins)
    threads, sums = np.cumsum(threads), np.cumsum(sums)
    # `sums` adds up the rows of the latest boundaries of all threads that may launch: of one thread alone, its row.
    boundary = np.maximum(interval, 0)
    code = np.full(len(interval), _CODES.index("launched_together"))
    code[threads[boundary] == 0] = _CODES.index("launched_unseen")
    code[threads[boundary] == 1] = 0
    code[interval < 0] = _CODES.index("launched_before")
    if boundaries.reused is not None:
        low, high = boundaries.reused
        code[(number >= low) & (number <= high)] = _CODES.index("number_reused")
    return np.where(code == 0, sums[boundary], NO_ROW), code
