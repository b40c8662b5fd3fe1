"""What a running program or job does, from the summaries of its windows: the answer of ``thence top``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.errors import MissingData
from thence.model.answer import Answer, Caveats, TableView
from thence.model.formats import DESCRIPTION, OLDER_SUMMARIES_FILE
from thence.model.json_fields import NotAsWritten, decoded
from thence.readers.recording.folder import Description
from thence.readers.recording.sniffing import process_folders
from thence.units import format_ns, format_share, several
from thence.watch.estimates import share_intervals
from thence.watch.summary_file import Tails

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from thence.watch.summary_file import Window

_LATE_SHARE = 0.02
"""A rank is late if it waited for the others in so much less of the steps than the average rank."""
_RANKS = {
    "rank": pl.Int64(),
    "host": pl.String(),
    "pid": pl.Int64(),
    "step": pl.Int64(),
    "steps_per_s": pl.Float64(),
    "median_step_ns": pl.Int64(),
    "busy_share": pl.Float64(),
    "exposed_share": pl.Float64(),
    "wait_share": pl.Float64(),
    "windows": pl.Int64(),
    "age_ns": pl.Int64(),
    "dropped": pl.Int64(),
    "cost_share": pl.Float64(),
}
_SHARES = {
    "by": pl.String(),
    "name": pl.String(),
    "share": pl.Float64(),
    "low_share": pl.Float64(),
    "high_share": pl.Float64(),
}


@dataclass(frozen=True)
class WatchedJob(Answer):
    """The processes of a job in a period of time.

    Attributes:
        begin_unix_ns, end_unix_ns: of the windows.
        windows: number of windows that were recorded in turn, of all processes.
        ranks: a row for each process: rank, host, pid, step (the last one with a summary), steps_per_s and
            median_step_ns (of the steps before its last window), busy_share, exposed_share and wait_share (of the time
            in windows; the last one is what its collectives waited for late ranks, null if no other rank has the same
            collectives), windows, age_ns (since its last window), dropped (records), cost_share (of recording).
        shares: of the time in windows of all processes: by (busy, idle, module), name, share, low_share and high_share
            (the interval of the share of all steps, see `thence.watch.estimates`; null for few windows). Idle shares
            add up to 1 - busy; those of modules to busy, with rows for other modules and work without one. Work that
            runs at the same time counts twice in modules.
        late: ranks that the others wait for.
        damaged: lines of summaries that could not be read.
        deleted: whether older summaries were deleted for lack of room.
    """

    begin_unix_ns: int
    end_unix_ns: int
    windows: int
    ranks: pl.DataFrame
    shares: pl.DataFrame
    late: tuple[int, ...] = ()
    damaged: int = 0
    deleted: bool = False

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return ("what the program does", next(self._lead()))

    def views(self) -> tuple[TableView, ...]:
        """The shares, and the ranks."""
        shares = {"by": "", "name": "", "share": "of the time", "low_share": "from", "high_share": "to"}
        ranks = {
            "rank": "rank", "step": "step", "steps_per_s": "steps/s", "median_step_ns": "median step",
            "busy_share": "busy", "exposed_share": "exposed", "wait_share": "waits", "windows": "windows",
            "age_ns": "last window", "cost_share": "recording costs", "dropped": "lost",
        }  # fmt: skip
        return (
            TableView(self.shares, shares, "\n".join(self._lead()), bar="share", full="name"),
            TableView(self.ranks, ranks),
        )

    def line(self) -> str:
        """The job in one line: pace, busy share with its interval, the largest causes of idle time and modules."""
        parts = [*self._lead()]
        for by, most in (("idle", 2), ("module", 3)):
            rows = self.shares.filter(pl.col("by") == by, pl.col("name") != "(none)").sort("share", descending=True)
            largest = rows.head(most).select("name", "share").rows()
            if largest:
                parts.append(f"{by} {', '.join(f'{name} {format_share(share, 1)}' for name, share in largest)}")
        return "; ".join(parts)

    def _lead(self) -> Iterator[str]:
        busy = self.shares.row(0, named=True)
        bounds = (
            ""
            if busy["low_share"] is None
            else f" ({format_share(busy['low_share'], 1)} to {format_share(busy['high_share'], 1)})"
        )
        pace = self.ranks["steps_per_s"].min()
        yield (
            f"{several(self.ranks['rank'].n_unique(), 'rank')}, {float(str(pace or 0)):,.2f} steps/s; GPU busy "
            f"{format_share(busy['share'], 1)}{bounds}, by {several(self.windows, 'window')} in "
            f"{format_ns(self.end_unix_ns - self.begin_unix_ns)}"
        )
        if self.late:
            yield f"the others wait for {'rank' if len(self.late) == 1 else 'ranks'} {', '.join(map(str, self.late))}"

    def remarks(self) -> Iterator[str]:
        """See `Answer`."""
        if self.damaged:
            yield f"{several(self.damaged, 'line')} of the summaries could not be read"
        if self.deleted:
            yield "the oldest summaries were deleted for lack of room"
        if self.shares["low_share"].is_null().all():
            yield "there are too few windows to say how far the shares of all steps may be from these"

    def to_frame(self) -> pl.DataFrame:
        """The ranks."""
        return self.ranks

    def to_json(self) -> dict[str, Any]:
        """See `Answer`."""
        return {
            "begin_unix_ns": self.begin_unix_ns,
            "end_unix_ns": self.end_unix_ns,
            "windows": self.windows,
            "late_ranks": list(self.late),
            "damaged_lines": self.damaged,
            "shares": self.shares,
            "ranks": self.ranks,
        }


class Watch:
    """Reads the summaries of a recording again and again.

    Args:
        directory: of the recording.
        since_ns: how far before the last window the first one may be that counts.
    """

    def __init__(self, directory: Path, since_ns: int) -> None:
        self._directory = directory
        self._since_ns = since_ns
        self._tails = Tails(directory)
        self._windows: list[Window] = []
        self._damaged = 0

    def now(self, now_unix_ns: int) -> WatchedJob:
        """What the summaries say.

        Args:
            now_unix_ns: Unix time in ns.

        Raises:
            MissingData: there is no summary of a window yet.
        """
        for _, new in self._tails.new():
            self._windows += new.windows
            self._damaged += new.damaged
        if not self._windows:
            raise MissingData(f"{self._directory}: {_why_empty(self._directory)}")
        end = max(window.end_unix_ns for window in self._windows)
        self._windows = [window for window in self._windows if window.end_unix_ns > end - self._since_ns]
        in_turn = [window for window in self._windows if window.asked is None] or self._windows
        waits = _waits(in_turn)
        ranks = [_rank(windows, waits, now_unix_ns) for windows in _by_process(self._windows)]
        return WatchedJob(
            begin_unix_ns=min(window.begin_unix_ns for window in in_turn),
            end_unix_ns=end,
            windows=len(in_turn),
            ranks=pl.DataFrame(ranks, _RANKS, orient="row").sort("rank", "pid"),
            shares=_shares(in_turn),
            late=_late(waits, in_turn),
            damaged=self._damaged,
            deleted=any((folder / OLDER_SUMMARIES_FILE).exists() for folder in self._tails.folders),
            caveats=Caveats(inputs=(str(self._directory),)),
        )


def _why_empty(directory: Path) -> str:
    recorded = process_folders(directory)
    if not recorded:
        return "there is no recording yet"
    samples = any(_samples(folder / DESCRIPTION) for folder in recorded)
    return "no window has ended yet" if samples else "it was recorded without --always, so it has no windows"


def _samples(path: Path) -> bool:
    try:
        return decoded(path.read_bytes(), Description).sampling is not None
    except (OSError, NotAsWritten):
        return False


def _by_process(windows: Sequence[Window]) -> Iterator[list[Window]]:
    processes: dict[tuple[str, int, int], list[Window]] = {}
    for window in windows:
        processes.setdefault((window.host, window.pid, window.rank), []).append(window)
    yield from processes.values()


def _rank(windows: Sequence[Window], waits: Mapping[int, tuple[int, int]], now: int) -> tuple[Any, ...]:
    last = windows[-1]
    steps = last.all_steps
    whole = sum(window.duration_ns for window in windows) or 1
    wait, waited_in = waits.get(last.rank, (0, 0))
    return (
        last.rank,
        last.host,
        last.pid,
        last.first_step + last.steps - 1,
        None if steps is None or steps.total_ns <= 0 else 1e9 * steps.count / steps.total_ns,
        None if steps is None else steps.median_ns,
        sum(window.busy_ns for window in windows) / whole,
        sum(window.exposed_ns for window in windows) / whole,
        wait / waited_in if waited_in else None,
        len(windows),
        max(0, now - last.end_unix_ns),
        last.dropped,
        last.cost_share,
    )


def _shares(windows: Sequence[Window]) -> pl.DataFrame:
    """Shares of busy time, causes of idle time and modules; windows of one step on several ranks count as one."""
    causes = [("idle", name) for name, _ in _totals(window.idle_ns for window in windows)]
    modules = [("module", name) for name, _ in _totals(window.modules for window in windows)]
    columns = [("busy", ""), *causes, *modules, ("module", "(others)"), ("module", "(none)")]
    number = {column: index for index, column in enumerate(columns)}
    groups: dict[tuple[int, int], int] = {}
    rows = [groups.setdefault(key, len(groups)) for key in _steps_of_job(windows)]
    parts, whole = np.zeros((len(groups), len(columns))), np.zeros(len(groups))
    for row, window in zip(rows, windows, strict=True):
        whole[row] += window.duration_ns
        parts[row, 0] += window.busy_ns
        for kind, totals in (("idle", window.idle_ns), ("module", window.modules)):
            for name, total in totals.items():
                parts[row, number[kind, name]] += total
        parts[row, -2] += window.other_ns
        parts[row, -1] += window.unattributed_ns
    kept = whole > 0
    parts, whole = parts[kept], whole[kept]
    bounds = share_intervals(parts, whole)
    shares = parts.sum(axis=0) / max(whole.sum(), 1)
    low, high = (None, None) if bounds is None else bounds
    frame = pl.DataFrame(
        {
            "by": [by for by, _ in columns],
            "name": [name for _, name in columns],
            "share": shares,
            "low_share": low,
            "high_share": high,
        },
        _SHARES,
    )
    return frame.filter((pl.col("share") > 0) | (pl.col("by") == "busy"))


def _totals(each: Any) -> list[tuple[str, int]]:
    totals: Counter[str] = Counter()
    for names in each:
        totals.update(names)
    return totals.most_common()


def _steps_of_job(windows: Sequence[Window]) -> Iterator[tuple[int, int]]:
    """For each window the step that it begins with, and how often its rank had been started by then."""
    starts: dict[int, dict[tuple[str, int], int]] = {}
    for window in windows:
        known = starts.setdefault(window.rank, {})
        yield known.setdefault((window.host, window.pid), len(known)), window.first_step


def _waits(windows: Sequence[Window]) -> dict[int, tuple[int, int]]:
    """By rank, ns that its collectives waited for other ranks, and ns of the windows in which that is known.

    The kernels of one collective end at about the same time on all ranks, so the shortest is that of the rank that
    came last, and what the others take longer is their wait.
    """
    together: dict[tuple[int, int], dict[int, Window]] = {}
    for key, window in zip(_steps_of_job(windows), windows, strict=True):
        together.setdefault(key, {})[window.rank] = window
    waits: dict[int, tuple[int, int]] = {}
    for of_step in together.values():
        for rank, wait in _waits_of_step(of_step).items():
            before, whole = waits.get(rank, (0, 0))
            waits[rank] = before + wait, whole + of_step[rank].duration_ns
    return waits


def _waits_of_step(windows: Mapping[int, Window]) -> dict[int, int]:
    waits: dict[int, int] = {}
    named: dict[tuple[str, str | None, int], dict[int, list[int]]] = {}
    for rank, window in windows.items():
        for c in window.collectives:
            if c.durations_us is not None:
                named.setdefault((c.name, c.group, c.count), {})[rank] = c.durations_us
    for durations in named.values():
        if len(durations) > 1 and len({len(each) for each in durations.values()}) == 1:
            shortest = np.min(list(durations.values()), axis=0)
            for rank, each in durations.items():
                waits[rank] = waits.get(rank, 0) + int((np.array(each) - shortest).sum()) * 1_000
    return waits


def _late(waits: Mapping[int, tuple[int, int]], windows: Sequence[Window]) -> tuple[int, ...]:
    if len({window.rank for window in windows}) < 2 or len(waits) < 2:
        return ()
    shares = {rank: wait / whole for rank, (wait, whole) in waits.items() if whole}
    average = sum(shares.values()) / max(1, len(shares))
    return tuple(sorted(rank for rank, share in shares.items() if average - share > _LATE_SHARE))
