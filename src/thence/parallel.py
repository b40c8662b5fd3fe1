"""Several computations at once, in threads: NumPy and Polars release the interpreter's lock while they compute."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["both", "in_threads"]

_MOST = 4
"""Threads at once: each needs memory of its own, and more gain little."""

Item = TypeVar("Item")
Result = TypeVar("Result")
Other = TypeVar("Other")


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """What the function returns for each item, in their order; raises what the first of them raises.

    No more at once than Polars has threads, so ``POLARS_MAX_THREADS`` counts here, too. Where the system lets this
    process start no more threads, one after the other: a function may then be called twice for an item.
    """
    every = list(items)
    threads = min(pl.thread_pool_size(), len(every), _MOST)
    if threads < 2:
        return [function(item) for item in every]
    with ThreadPoolExecutor(threads) as pool:
        try:
            later = [pool.submit(function, item) for item in every]
        except RuntimeError:  # no thread could be started
            pool.shutdown(cancel_futures=True)
            return [function(item) for item in every]
        return [one.result() for one in later]


def both(first: Callable[[], Result], second: Callable[[], Other]) -> tuple[Result, Other]:
    """What two functions return that run at once; one after the other where there is one thread."""
    if pl.thread_pool_size() < 2:
        return first(), second()
    with ThreadPoolExecutor(1) as pool:
        try:
            later = pool.submit(second)
        except RuntimeError:  # no thread could be started
            return first(), second()
        return first(), later.result()
