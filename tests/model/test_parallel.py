"""Computations in threads give what they give one after the other."""

from __future__ import annotations

import threading

import polars as pl
import pytest

from thence import parallel


def test_results_are_in_the_order_of_the_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pl, "thread_pool_size", lambda: 3)
    later = threading.Event()

    def square(number: int) -> int:
        if number == 0:
            assert later.wait(10)  # the first item is done last
        if number == 1:
            later.set()
        return number * number

    assert parallel.in_threads(square, range(5)) == [0, 1, 4, 9, 16]


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_reaches_the_caller(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pl, "thread_pool_size", lambda: threads)
    with pytest.raises(ZeroDivisionError):
        parallel.in_threads(lambda number: 1 // number, [1, 0, 2])


def test_where_polars_has_one_thread_no_other_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pl, "thread_pool_size", lambda: 1)
    ran_on = parallel.in_threads(lambda _: threading.get_ident(), range(3))
    assert set(ran_on) == {threading.get_ident()}


@pytest.mark.parametrize("threads", [1, 2])
def test_both_give_what_they_give_alone(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pl, "thread_pool_size", lambda: threads)
    assert parallel.both(lambda: 1, lambda: "two") == (1, "two")
    with pytest.raises(ZeroDivisionError):
        parallel.both(lambda: 1, lambda: 1 // 0)


@pytest.mark.parametrize(("rows", "at_once"), [(parallel.MIN_ROWS, True), (parallel.MIN_ROWS - 1, False)])
def test_few_rows_start_no_thread(rows: int, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pl, "thread_pool_size", lambda: 2)
    first, second = parallel.both(threading.get_ident, threading.get_ident, rows)
    assert (first != second) == at_once


@pytest.mark.parametrize("started", [0, 1])
def test_where_the_system_starts_no_more_threads_the_work_is_done_all_the_same(
    started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pl, "thread_pool_size", lambda: 3)
    start, left = threading.Thread.start, [None] * started

    def limited(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")  # as Python says it
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    assert parallel.in_threads(lambda number: number * number, range(5)) == [0, 1, 4, 9, 16]
    assert parallel.both(lambda: 1, lambda: "two") == (1, "two")
