"""Runs several computations at once in threads: NumPy and Polars release the GIL while they compute."""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MAX_THREADS = 4
"""Most threads at once: each needs memory of its own, and more threads gain little."""

MIN_ROWS = 10_000
"""Minimum number of rows of each item for which threads are started."""

Item = TypeVar("Item")
Result = TypeVar("Result")
Other = TypeVar("Other")


def in_threads(function: Callable[[Item], Result], items: Iterable[Item], rows: int = MIN_ROWS) -> list[Result]:
    """The results of the function for all items, in their order; raises the exception of the first item that fails.

    It uses no more threads than Polars has, so ``POLARS_MAX_THREADS`` applies here, too. If the process cannot start
    another thread, the items are computed one after the other; the function may then be called twice for an item.

    Args:
        function: called with each item.
        items: what it is called with.
        rows: how many rows each item has; with fewer than `MIN_ROWS`, starting threads takes longer than the work.
    """
    every = list(items)
    if rows < MIN_ROWS:
        return [function(item) for item in every]
    threads = min(pl.thread_pool_size(), len(every), _MAX_THREADS)
    if threads < 2:
        return [function(item) for item in every]
    with ThreadPoolExecutor(threads) as pool:
        try:
            later = [pool.submit(function, item) for item in every]
        except RuntimeError:  # no thread could be started
            pool.shutdown(cancel_futures=True)
            return [function(item) for item in every]
        return [future.result() for future in later]


def give_back_memory() -> None:
    """Gives free memory back to the system. glibc keeps what a thread has freed, for the allocations of this thread."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have no such function
        if trim is not None:
            trim(0)


def both(first: Callable[[], Result], second: Callable[[], Other], rows: int = MIN_ROWS) -> tuple[Result, Other]:
    """The results of two functions that run at once, or one after the other if no second thread is available.

    Args:
        first: called in this thread.
        second: called in another one.
        rows: as of `in_threads`.
    """
    if pl.thread_pool_size() < 2 or rows < MIN_ROWS:
        return first(), second()
    with ThreadPoolExecutor(1) as pool:
        try:
            later = pool.submit(second)
        except RuntimeError:  # no thread could be started
            return first(), second()
        return first(), later.result()
