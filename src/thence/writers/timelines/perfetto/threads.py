"""Order and names of the tracks of host threads.

Threads of the program come first, threads with nothing but the profiler's own overhead last. Producers of traces put
ids into thread names in different ways (``thread 2639 (pt_autograd_0)``, ``py_xla_execute/-5594605286789560846``).
Here the name is shown without it; the thread's id follows in parentheses if it is an id of the operating system.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from thence.model.tables import API_CALLS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_OF_KINETO = re.compile(r"thread -?\d+ \((.+)\)", re.DOTALL)
_WITH_ID = re.compile(r"(.+)/-?\d+", re.DOTALL)
_MOST_ID = 1 << 31
"""Thread ids of the operating system are below this; larger ids are handles and hashes, useless to the reader."""
_PROFILER = "overhead"


@dataclass(frozen=True, slots=True)
class HostThread:
    """One thread: its id in the table ``host``, and the name that is shown."""

    thread: int
    name: str


@dataclass(frozen=True, slots=True)
class HostProcess:
    """One process of a rank.

    Attributes:
        rank: rank of the process.
        process: id in the table ``host``.
        name: the name that is shown.
        threads: threads, in the order in which they are shown.
        of_profiler: whether the process has nothing but the profiler's own overhead.
    """

    rank: int
    process: int
    name: str
    threads: tuple[HostThread, ...]
    of_profiler: bool


def host_processes(host: pl.DataFrame, names: pl.DataFrame) -> list[HostProcess]:
    """The processes of all ranks, in the order in which they are shown; processes of the profiler come last.

    Args:
        host: the table ``host``.
        names: the table ``threads``.
    """
    category = pl.col("category").cast(pl.String)
    threads = (
        host.group_by("rank", "process", "thread")
        .agg(profiler=(category == _PROFILER).all(), calls=category.is_in(API_CALLS).all())
        .join(names.unique(["rank", "process", "thread"], keep="first"), on=["rank", "process", "thread"], how="left")
        .with_columns(main=pl.col("process") == pl.col("thread"))
        .sort("rank", "process", "profiler", ~pl.col("main"), "calls", "thread")
    )
    found = [
        HostProcess(rank, process, *_described(process, rows))
        for (rank, process), rows in threads.group_by("rank", "process", maintain_order=True)
    ]
    return sorted(found, key=lambda each: each.of_profiler)


def _described(process: int, rows: pl.DataFrame) -> tuple[str, tuple[HostThread, ...], bool]:
    """Name of a process, its threads, and whether it has only overhead of the profiler."""
    of_profiler = bool(rows["profiler"].all())
    columns = rows.select("thread", "name", "main", "calls", "profiler").rows()
    titles = _distinct([_title(*column) for column in columns])
    threads = tuple(HostThread(t, title) for t, title in zip(rows["thread"], titles, strict=True))
    return ("profiler" if of_profiler else f"process {process}"), threads, of_profiler


def _title(thread: int, name: str | None, main: bool, calls: bool, profiler: bool) -> str:  # noqa: FBT001 - a row
    """The name under which a thread is shown."""
    if not name:
        known = f"thread {thread}"
        return f"{known}, calls only" if calls else f"{known}, profiler" if profiler else known
    match = _OF_KINETO.fullmatch(name) or _WITH_ID.fullmatch(name)
    plain = match[1] if match else name
    if main and plain != "MainThread":
        return f"{plain}, main thread"
    return f"{plain} ({thread})" if match and 0 < thread < _MOST_ID else plain


def _distinct(titles: Sequence[str]) -> Iterable[str]:
    """The titles; titles of several threads get a number each."""
    several = {title for title, count in Counter(titles).items() if count > 1}
    seen: Counter[str] = Counter()
    for title in titles:
        seen[title] += 1
        yield f"{title} {seen[title]}" if title in several else title
