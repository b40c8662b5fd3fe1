"""The log of marks and steps in a recording: begin and end events, which the reader pairs into ranges.

Codes of ``what`` in the table ``marks``: see `thence.model.formats.OPENED` and the following. The begin and end event
of a range have the same ``serial``, and end events have no thread; ``forward`` is the serial of the mark that was
open around the forward op.

The table ``collectives`` describes each collective by the ``serial`` of its mark. Descriptions repeat from step to
step, except for the sequence number of the call in its process group; so each distinct description is processed once
for all of its calls.
"""

from __future__ import annotations

import itertools
import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.capture.boundaries.log import BoundaryLog
from thence.capture.boundaries.moments import NOTHING
from thence.capture.marks.graph_labels import as_text, metadata_text
from thence.model.collectives import KINETO_KEYS, NUMBERS, TEXTS, CallFacts
from thence.model.formats import BACKWARD_OPENED, CLOSED, STEP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from thence.capture.recorder.names import Names

_SEQUENCE = KINETO_KEYS["sequence"]
_FIRST_BACKWARD = 1 << 62
"""First serial of backward nodes; the serials of marks are smaller."""


class _Local(threading.local):
    """The backward nodes that one thread is in."""

    def __init__(self) -> None:
        self.backward: list[int] = []


class MarkLog:
    """A `thence.capture.marks.Listener` that notes when, and on which thread, marks open and close.

    A forked child needs its own `MarkLog`, because a `MarkLog` remembers the ids of its process's threads.

    Args:
        boundaries: log in which a boundary is noted with every event, so that launches can be matched to marks; None
            if launches are recorded.

    Attributes:
        opened, closed: see `thence.capture.marks.Listener`; they are the methods of
        `thence.capture.boundaries.moments.Moments`, so
            that a mark calls no Python function in between.
    """

    opened: Callable[[int, str, str | None, Mapping[str, object]], None]
    closed: Callable[[int], None]

    def __init__(self, boundaries: BoundaryLog | None = None) -> None:
        self._moments = (BoundaryLog(lambda: 0) if boundaries is None else boundaries).moments()
        self.opened, self.closed = self._moments.opened, self._moments.closed
        self._serials = itertools.count(_FIRST_BACKWARD)
        self._local = _Local()

    def backward_opened(self, number: int | None, name: str) -> None:
        """A node of autograd begins on this thread; `number` is the mark around its forward op."""
        serial = next(self._serials)
        self._local.backward.append(serial)
        forward = NOTHING if number is None else number
        self._moments.began(BACKWARD_OPENED, serial, forward, name)

    def backward_closed(self) -> None:
        """The innermost node of autograd on this thread is done."""
        stack = self._local.backward
        if stack:
            self.closed(stack.pop())

    def step(self, number: int, *, recorded: bool) -> None:
        """A step of the program begins. It has no name: the names of a recording are kept in memory."""
        self._moments.began(STEP, number, int(recorded), "")

    def take(self, names: Names) -> dict[str, dict[str, Any]]:
        """The events since the last call: rows of ``marks``, begin events before end events, and ``collectives``."""
        rows, texts = self._moments.take()
        if not len(rows["what"]):
            return {}
        order = np.argsort(rows["what"] == CLOSED, kind="stable")
        rows = {column: values[order] for column, values in rows.items()}
        texts_of = rows.pop("texts")
        metadata = [facts for _, _, facts in texts]
        numbers = {
            "name": _numbers([name for name, _, _ in texts], names),
            "lane": _numbers([lane for _, lane, _ in texts], names),
            "metadata": _numbers(_texts(metadata), names),
        }
        named = {column: values[texts_of] for column, values in numbers.items()}
        marks = {**rows, "thread": rows["thread"].astype(np.int64), **named}
        called = np.array([False, *(isinstance(facts, CallFacts) for facts in metadata)])[texts_of]
        calls = [
            (serial, metadata[number - 1])
            for serial, number in zip(rows["serial"][called].tolist(), texts_of[called].tolist(), strict=True)
        ]
        return {"marks": marks, **_collectives(calls, names)}


def _numbers(texts: Iterable[str | None], names: Names) -> np.ndarray[Any, Any]:
    """Numbers of these texts, after a 0 for no text."""
    return np.array([0, *(names.of_text(text) if text else 0 for text in texts)], np.uint32)


def _texts(metadata: Iterable[Mapping[str, object] | None]) -> list[str | None]:
    """The JSON of each, encoded once for all marks that share one metadata object; None for collectives."""
    distinct = {id(facts): facts for facts in metadata if facts and not isinstance(facts, CallFacts)}
    texts = {key: _json(facts) for key, facts in distinct.items()}
    return [texts.get(id(facts)) for facts in metadata]


def _json(metadata: Mapping[str, object]) -> str:
    try:
        return json.dumps(dict(metadata), default=as_text)
    except (ValueError, TypeError, RecursionError):  # a list that holds itself, keys that are objects
        return metadata_text(metadata)


def _collectives(calls: Sequence[tuple[int, Any]], names: Names) -> dict[str, dict[str, Any]]:
    """The table ``collectives`` for pairs of serial and facts; no table if there are none."""
    if not calls:
        return {}
    distinct = {id(facts.shared): facts.shared for _, facts in calls}
    rows = {key: number for number, key in enumerate(distinct)}
    which = np.array([rows[id(facts.shared)] for _, facts in calls])
    columns: dict[str, Any] = {"serial": np.array([serial for serial, _ in calls], np.int64)}
    for name in TEXTS:
        values = (facts.get(KINETO_KEYS[name]) for facts in distinct.values())
        texts = [0 if text is None else names.of_text(str(text)) for text in values]
        columns[name] = np.array(texts, np.uint32)[which]
    for name in NUMBERS:
        values = (facts.get(KINETO_KEYS[name]) for facts in distinct.values())
        columns[name] = np.array([_number(value) for value in values], np.int64)[which]
    numbers = (_number(facts.get(_SEQUENCE)) for _, facts in calls)
    columns["sequence"] = np.fromiter(numbers, np.int64, len(calls))
    return {"collectives": columns}


def _number(value: object) -> int:
    return value if type(value) is int and 0 <= value < 1 << 62 else NOTHING
