"""Several computations at once, in threads: NumPy and Polars release the interpreter's lock while they compute."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["in_threads", "threads"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def threads() -> int:
    """How many threads this process may compute with: as many as Polars, so ``POLARS_MAX_THREADS`` counts."""
    return pl.thread_pool_size()


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """What the function returns for each item, in their order; raises what the first of them raises."""
    every = list(items)
    if threads() < 2 or len(every) < 2:
        return [function(item) for item in every]
    with ThreadPoolExecutor(min(threads(), len(every))) as pool:
        return list(pool.map(function, every))
