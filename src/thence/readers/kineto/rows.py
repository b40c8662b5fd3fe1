"""Events of a piece, field by field: what `thence.readers.kineto.events` makes columns of.

`DecodedRows` are events that msgspec decoded. `thence.readers.kineto.scanner` has the same of events that the compiled
scanner read. Both give equal values for the same events.
"""

from __future__ import annotations

import zlib
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from thence.readers.kineto.event_structs import Args, Event
from thence.readers.kineto.times import nanoseconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from thence.model.arrays import Array

UNSIGNED = frozenset(("graph", "node"))
"""Fields of 64 bits without a sign: a node id is executable graph id << 32 | node id."""
INPUTS = ("dims", "types", "strides", "values")
"""Fields that stay text (JSON as bytes), empty for events without the field."""
_ARGUMENTS = frozenset(field.name for field in msgspec.structs.fields(Args))
"""Fields that are arguments of an event; no field of the event itself has such a name."""
_raw_events = msgspec.json.Decoder(list[msgspec.Raw])


class Rows(Protocol):
    """Some events of a piece, in its order. A field is an attribute of `Event`, or of the `Args` of its arguments."""

    def __len__(self) -> int: ...

    def chosen(self, rows: Array) -> Rows:
        """The events with these indices."""

    def coded(self, *fields: str) -> tuple[Array, list[Any]]:
        """The distinct values of a field, or tuples of the values of several fields.

        Returns:
            The number (int32) of each event's value, and the values. Values are in the order of their first
            appearance; equal ones may occur more than once.
        """

    def integers(self, field: str) -> Array:
        """Integers (int64; uint64 of fields in `UNSIGNED`), with the struct's default for events without the field."""

    def triples(self, field: str) -> Array:
        """Three integers (int64) of each event, shape (events, 3), with -1 for events without the field."""

    def times(self, field: str) -> Array:
        """Times (int64) in ns, with `NO_TIME_NS` for events without the field."""

    def identifiers(self) -> Array:
        """The field ``id`` (int64); a text, which other writers may use, becomes its checksum."""

    def given(self, field: str) -> Array:
        """Indices of the events that have the field, with another value than null (of `INPUTS`, with any)."""

    def events(self) -> Sequence[Event]:
        """The events as structs; costly for many events."""

    def texts(self, rows: Array) -> list[bytes]:
        """The JSON of the events with these indices."""


class DecodedRows:
    """Rows of decoded events.

    Args:
        events: the events.
        text: their JSON, as one array or one text for each event.
        positions: indices of the events in ``text``; None if it holds no others.
    """

    def __init__(
        self, events: Sequence[Event], text: bytes | memoryview | Sequence[bytes], positions: Array | None = None
    ) -> None:
        self._events = events
        self._text = text
        self._positions = positions
        self._args: list[Args] = []

    def __len__(self) -> int:
        return len(self._events)

    def chosen(self, rows: Array) -> DecodedRows:
        """As `Rows.chosen`."""
        events = [self._events[row] for row in rows.tolist()]
        return DecodedRows(events, self._text, rows if self._positions is None else self._positions[rows])

    def coded(self, *fields: str) -> tuple[Array, list[Any]]:
        """As `Rows.coded`."""
        numbers: dict[Any, int] = _Numbers()
        values = zip(*map(self._values, fields), strict=True) if len(fields) > 1 else self._values(*fields)
        codes = np.fromiter(map(numbers.__getitem__, values), np.int32, len(self))
        return codes, list(numbers)

    def integers(self, field: str) -> Array:
        """As `Rows.integers`; raises OverflowError for an integer beyond 64 bits."""
        return np.fromiter(self._values(field), np.uint64 if field in UNSIGNED else np.int64, len(self))

    def triples(self, field: str) -> Array:
        """As `Rows.triples`; raises OverflowError for an integer beyond 64 bits."""
        flat = chain.from_iterable(value or (-1, -1, -1) for value in self._values(field))
        return np.fromiter(flat, np.int64, 3 * len(self)).reshape(len(self), 3)

    def times(self, field: str) -> Array:
        """As `Rows.times`."""
        return nanoseconds(list(self._values(field)))

    def identifiers(self) -> Array:
        """As `Rows.identifiers`; raises OverflowError for an integer beyond 64 bits."""
        ids = (value if isinstance(value, int) else zlib.crc32(value.encode()) for value in self._values("id"))
        return np.fromiter(ids, np.int64, len(self))

    def given(self, field: str) -> Array:
        """As `Rows.given`; fast if no event has the field, as is so of most fields."""
        values, none = list(self._values(field)), b"" if field in INPUTS else None
        if values.count(none) == len(values):
            return np.empty(0, np.int64)
        return np.array([row for row, value in enumerate(values) if value != none], np.int64)

    def events(self) -> Sequence[Event]:
        """As `Rows.events`."""
        return self._events

    def texts(self, rows: Array) -> list[bytes]:
        """As `Rows.texts`."""
        if isinstance(self._text, bytes | memoryview):
            self._text = _raw_events.decode(self._text)
        positions = rows if self._positions is None else self._positions[rows]
        return [bytes(self._text[position]) for position in positions.tolist()]

    def _values(self, field: str) -> Iterable[Any]:
        if field not in _ARGUMENTS:
            return map(attrgetter(field), self._events)
        self._args = self._args or list(map(attrgetter("args"), self._events))
        values = map(attrgetter(field), self._args)
        return map(bytes, values) if field in INPUTS else values


class _Numbers(dict[Any, int]):
    """Numbers values in the order of their first appearance."""

    def __missing__(self, value: object) -> int:
        number = self[value] = len(self)
        return number
