"""What marks, and steps, tell a recording: moments, put together by whoever reads it.

Codes of ``what`` in the table ``marks``: see `thence.model.formats.OPENED` and the following. ``serial`` ties
the end of a range to its beginning, and endings have no thread; ``forward`` is the serial of the mark that was
open around the forward op.

What a collective moves stands in the table ``collectives``, by the ``serial`` of its mark. It repeats itself
from step to step, only its number in its group never does; so each description is looked at once for all of
its calls.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import deque
from time import time_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.marks.graph_labels import as_text, metadata_text
from thence.model.collectives import KINETO_KEYS, NUMBERS, TEXTS, CallFacts
from thence.model.formats import BACKWARD_OPENED, CLOSED, OPENED, STEP

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from thence.boundaries.log import BoundaryLog
    from thence.recorder.names import Names

__all__ = ["MarkLog"]

_NONE = -1
_SEQUENCE = KINETO_KEYS["sequence"]
_FIRST_BACKWARD = 1 << 62
"""Serials of backward nodes count from here: marks have numbers of their own."""

_Beginning = tuple[int, int, int, int, int, int, str, str | None, "Mapping[str, object] | None"]
"""what, serial, forward, time, counter, thread, name, lane, metadata"""
_NO_THREAD = 0
"""Of endings: the serial says what ends, and finding the thread out would cost more than all the rest."""


class _Local(threading.local):
    """What one thread knows: its id, for which the system has to be asked, and its backward nodes."""

    def __init__(self) -> None:
        self.thread = threading.get_native_id()
        self.backward: list[int] = []


class MarkLog:
    """A `thence.marks.Listener` that notes when, and on which thread, marks open and close.

    A forked child needs one of its own: this one remembers the ids of the parent's threads.

    Args:
        boundaries: has a boundary noted with every moment, so that launches find their marks; None where the
            launches are recorded.
    """

    def __init__(self, boundaries: BoundaryLog | None = None) -> None:
        self._note = _no_counter if boundaries is None else boundaries.note
        self._beginnings: deque[_Beginning] = deque()
        self._endings: deque[tuple[int, int, int]] = deque()
        self._serials = itertools.count(_FIRST_BACKWARD)
        self._local = _Local()

    def opened(
        self, number: int, name: str, lane: str | None, metadata: Mapping[str, object]
    ) -> None:
        """A mark opens on this thread."""
        self._beginnings.append(
            (
                OPENED,
                number,
                _NONE,
                time_ns(),
                self._note(0),
                self._local.thread,
                name,
                lane,
                metadata,
            )
        )

    def closed(self, number: int) -> None:
        """A mark closes on this thread."""
        self._endings.append((number, time_ns(), self._note(0)))

    def backward_opened(self, number: int | None, name: str) -> None:
        """A node of autograd begins on this thread; `number` is the mark around its forward op."""
        serial = next(self._serials)
        self._local.backward.append(serial)
        self._begin(BACKWARD_OPENED, serial, _NONE if number is None else number, name)

    def backward_closed(self) -> None:
        """The innermost node of autograd on this thread is done."""
        stack = self._local.backward
        if stack:
            self.closed(stack.pop())

    def step(self, number: int, *, recorded: bool) -> None:
        """A step of the program begins."""
        self._begin(STEP, number, int(recorded), f"step {number}")

    def take(self, names: Names) -> dict[str, dict[str, Any]]:
        """The moments since the last question: rows of ``marks``, beginnings then endings, and ``collectives``."""
        beginnings, endings = _emptied(self._beginnings), _emptied(self._endings)
        if not beginnings and not endings:
            return {}
        what, serial, forward, moment, begins, thread, name, lane, metadata = _columns(
            beginnings, 9
        )
        ended, end, ends = _columns(endings, 3)
        facts = _texts(metadata)
        texts = dict.fromkeys((*name, *lane, *facts))
        known = {text: names.of_text(text) if text else 0 for text in texts}
        rows = {
            "what": ([*what], CLOSED, np.uint8),
            "serial": ([*serial, *ended], 0, np.int64),
            "forward": ([*forward], _NONE, np.int64),
            "time": ([*moment, *end], 0, np.int64),
            "counter": ([*begins, *ends], 0, np.uint32),
            "thread": ([*thread], _NO_THREAD, np.int64),
            "name": ([known[text] for text in name], 0, np.uint32),
            "lane": ([known[text] for text in lane], 0, np.uint32),
            "metadata": ([known[text] for text in facts], 0, np.uint32),
        }
        count = len(beginnings) + len(endings)
        marks = {
            column: _filled_up(values, count, rest, dtype)
            for column, (values, rest, dtype) in rows.items()
        }
        return {"marks": marks, **_collectives(serial, metadata, names)}

    def _begin(self, what: int, serial: int, forward: int, name: str) -> None:
        self._beginnings.append(
            (what, serial, forward, time_ns(), self._note(0), self._local.thread, name, None, None)
        )


def _no_counter(_place: int) -> int:
    return 0


def _emptied(events: deque[Any]) -> list[Any]:
    """What is in there by now; other threads go on adding to it."""
    return [events.popleft() for _ in range(len(events))]


def _columns(events: list[tuple[Any, ...]], count: int) -> list[tuple[Any, ...]]:
    return list(zip(*events, strict=True)) if events else [()] * count


def _filled_up(values: list[int], count: int, rest: int, dtype: Any) -> np.ndarray[Any, Any]:
    """These values, and what endings have in their place."""
    column = np.full(count, rest, dtype)
    column[: len(values)] = values
    return column


def _texts(metadata: Iterable[Mapping[str, object] | None]) -> list[str | None]:
    """JSON of each, made once for all marks that share their facts; None for collectives."""
    distinct = {
        id(facts): facts for facts in metadata if facts and not isinstance(facts, CallFacts)
    }
    texts = {key: _json(facts) for key, facts in distinct.items()}
    return [texts.get(id(facts)) for facts in metadata]


def _json(metadata: Mapping[str, object]) -> str:
    try:
        return json.dumps(dict(metadata), default=as_text)
    except (
        ValueError,
        TypeError,
        RecursionError,
    ):  # a list that holds itself, keys that are objects
        return metadata_text(metadata)


def _collectives(
    serials: Iterable[int], metadata: Iterable[Mapping[str, object] | None], names: Names
) -> dict[str, dict[str, Any]]:
    """The table ``collectives``, if there is anything in it."""
    calls = [
        (serial, facts)
        for serial, facts in zip(serials, metadata, strict=True)
        if isinstance(facts, CallFacts)
    ]
    if not calls:
        return {}
    distinct = {id(facts.shared): facts.shared for _, facts in calls}
    place = {key: number for number, key in enumerate(distinct)}
    which = np.array([place[id(facts.shared)] for _, facts in calls])
    columns: dict[str, Any] = {"serial": np.array([serial for serial, _ in calls], np.int64)}
    for name in TEXTS:
        said = (facts.get(KINETO_KEYS[name]) for facts in distinct.values())
        texts = [0 if text is None else names.of_text(str(text)) for text in said]
        columns[name] = np.array(texts, np.uint32)[which]
    for name in NUMBERS:
        said = (facts.get(KINETO_KEYS[name]) for facts in distinct.values())
        columns[name] = np.array([_number(value) for value in said], np.int64)[which]
    numbers = (_number(facts.get(_SEQUENCE)) for _, facts in calls)
    columns["sequence"] = np.fromiter(numbers, np.int64, len(calls))
    return {"collectives": columns}


def _number(value: object) -> int:
    return value if type(value) is int and 0 <= value < 1 << 62 else _NONE
