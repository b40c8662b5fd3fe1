"""What autograd's threads do for no node has the line of the call that waits for them."""

from __future__ import annotations

import numpy as np
import polars as pl

from thence.readers.recording.place_ranges import EngineCalls, Noted, engine_calls, with_places_of_calls

CALLER, ENGINE, OTHER = 10, 20, 30
NAMES = pl.Series([None, "forward", "backward", "optimizer", None])
FORWARD, BACKWARD, OPTIMIZER, NONE = 1, 2, 3, 4


def noted(*rows: tuple[int, int, int]) -> Noted:
    thread, time, place = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return Noted(thread, time, place)


def states(found: Noted, thread: int) -> list[tuple[int, int]]:
    """Time and place of one thread, without rows that change nothing."""
    rows = [
        (time, place)
        for one, time, place in zip(found.thread.tolist(), found.time.tolist(), found.place.tolist(), strict=True)
        if one == thread
    ]
    last = dict(rows)  # the last one of a moment holds
    result: list[tuple[int, int]] = []
    for time, place in sorted(last.items()):
        if place != (result[-1][1] if result else 0):
            result.append((time, place))
    return result


def test_calls_are_the_backward_phases_of_threads_that_do_other_things_too() -> None:
    phases = noted(
        (CALLER, 100, FORWARD), (CALLER, 200, BACKWARD), (CALLER, 300, OPTIMIZER), (CALLER, 400, BACKWARD),
        (ENGINE, 210, BACKWARD),
    )  # fmt: skip
    calls = engine_calls(phases, NAMES, 500)
    assert calls.engines.tolist() == [ENGINE]
    assert calls.thread.tolist() == [CALLER, CALLER]
    assert list(zip(calls.begin.tolist(), calls.end.tolist(), strict=True)) == [(200, 300), (400, 500)]


def test_calls_of_two_threads_at_once_are_left_out() -> None:
    phases = noted(
        (CALLER, 100, FORWARD), (CALLER, 200, BACKWARD), (CALLER, 300, FORWARD), (CALLER, 600, BACKWARD),
        (CALLER, 700, FORWARD), (ENGINE, 210, BACKWARD),
        (OTHER, 100, FORWARD), (OTHER, 299, BACKWARD), (OTHER, 400, FORWARD),
    )  # fmt: skip
    calls = engine_calls(phases, NAMES, 1000)
    assert list(zip(calls.thread.tolist(), calls.begin.tolist(), strict=True)) == [(CALLER, 600)]


LINES = np.array([False, True, True, True, False])
"""Places 1 to 3 are lines; 0 and 4 say that there is none."""
ONE_CALL = EngineCalls(*(np.array([value]) for value in (ENGINE, CALLER, 200, 300)))


def test_a_thread_of_autograd_without_a_line_has_that_of_the_call() -> None:
    """Before its first node, between two, and after the last one, but not once the call is over."""
    lines = noted(
        (CALLER, 150, 1), (CALLER, 200, 2), (CALLER, 320, 1),
        (ENGINE, 210, 3), (ENGINE, 220, NONE), (ENGINE, 240, 3), (ENGINE, 290, NONE), (ENGINE, 310, 3),
    )  # fmt: skip
    found = with_places_of_calls(lines, LINES, ONE_CALL)
    assert states(found, ENGINE) == [
        (200, 2), (210, 3), (220, 2), (240, 3), (290, 2), (300, 0), (310, 3),
    ]  # fmt: skip
    assert states(found, CALLER) == [(150, 1), (200, 2), (320, 1)]
    assert (np.diff(found.time)[np.diff(found.thread) == 0] >= 0).all()


def test_the_line_of_the_call_is_that_of_its_moment() -> None:
    """The stack of the caller is read a moment after the call was noted, and again while hooks run on it."""
    lines = noted((CALLER, 150, 1), (CALLER, 201, 2), (CALLER, 250, 3), (CALLER, 320, 1), (ENGINE, 90, NONE))
    found = with_places_of_calls(lines, LINES, ONE_CALL)
    assert states(found, ENGINE) == [(90, NONE), (200, 1), (201, 2), (250, 3), (300, 0)]


def test_a_thread_that_begins_as_the_call_ends_keeps_its_line() -> None:
    lines = noted((CALLER, 200, 2), (ENGINE, 200, 3), (ENGINE, 250, NONE), (ENGINE, 300, 3))
    found = with_places_of_calls(lines, LINES, ONE_CALL)
    assert states(found, ENGINE) == [(200, 3), (250, 2), (300, 3)]


def test_without_a_line_of_the_caller_there_is_none_to_give() -> None:
    lines = noted((CALLER, 350, 2), (ENGINE, 210, 3), (ENGINE, 220, NONE))
    found = with_places_of_calls(lines, LINES, ONE_CALL)
    assert [place for _, place in states(found, ENGINE) if place not in (0, NONE)] == [3]


def test_nothing_noted_stays_nothing() -> None:
    empty = Noted(*(np.empty(0, np.int64) for _ in range(3)))
    calls = engine_calls(empty, NAMES, 100)
    assert len(calls.begin) == len(with_places_of_calls(empty, LINES, calls).time) == 0
