"""The compiled scanner: a piece as columns of the fields of its events, without a Python object for each of them.

Fields and types are those of `thence.readers.kineto.event_structs`. Fields that only few events have are not made
columns: the scanner checks their types, and such events are decoded by msgspec. Texts are numbered as they are written,
and decoded here once for each piece.

The scanner refuses a piece with anything that it does not know to be valid and of these types; msgspec decodes such
pieces, event by event if need be. So msgspec accepts what the scanner accepts, with equal values.
"""

from __future__ import annotations

import types
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from thence.readers.compiled import SCANNER
from thence.readers.kineto.event_structs import Args, Event
from thence.readers.kineto.rows import INPUTS, UNSIGNED
from thence.readers.kineto.times import NO_TIME_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from thence.model.arrays import Array

_LANE = ("pid", "tid")
_COMBINED = (_LANE, INPUTS)
"""Fields whose values are numbered together."""
_INTEGERS = frozenset(
    (
        "id", "external", "correlation", "device", "stream", "original_stream", "bytes", "registers", "shared_memory",
        "from_device", "sequence", "forward_thread", "wait_on_stream", "wait_on_record", "wait_on_event", "event_id",
        "memory_bytes", "address", "allocated", "reserved", "device_type", "device_id",
    )
)  # fmt: skip
_TYPED_TEXTS = ("ph", "cat", "name", *_LANE, "label", "collective")
_TEXTS = frozenset(
    (
        *_TYPED_TEXTS, *INPUTS, "kernel", "kernel_file", "kernel_backend", "label_rule",
        "module", "annotated_stream", "autograd_phase", "module_fqn", "annotation", "annotation_text",
    )
)  # fmt: skip
"""Fields whose texts are numbered: they repeat, or show that an event has others that are rare."""
_KINDS = {
    **dict.fromkeys(_INTEGERS, "INTEGER"),
    **dict.fromkeys(UNSIGNED, "UNSIGNED"),
    **dict.fromkeys(("ts", "dur"), "TIME"),
    **dict.fromkeys(("grid", "block"), "TRIPLE"),
    **dict.fromkeys(_TEXTS, "TEXT"),
}
"""How the compiled module reads the fields that have a column."""
_WIDTHS = {"INTEGER": np.int64, "UNSIGNED": np.uint64, "TIME": np.int64, "TRIPLE": np.int64, "TEXT": np.int32}
_NO_NUMBER = -1
_FIELDS = {field.name: field for struct in (Event, Args) for field in msgspec.structs.fields(struct)}
_MISSING = {
    name: NO_TIME_NS if kind == "TIME" else _FIELDS[name].default if kind in ("INTEGER", "UNSIGNED") else _NO_NUMBER
    for name, kind in _KINDS.items()
}
_COLUMNS = tuple(name for name in _FIELDS if name in _KINDS)
"""Fields that have a column, in the order of the columns."""
_event = msgspec.json.Decoder(Event)
_distinct_values: dict[str, Any] = {
    name: msgspec.json.Decoder(types.GenericAlias(list, (_FIELDS[name].type,))) for name in _TYPED_TEXTS
}


def scanned(piece: bytes | memoryview) -> Callable[[], ScannedRows] | None:
    """The events of a piece; None if there is no compiled scanner, or if it refuses the piece.

    Args:
        piece: a JSON array of events.

    Returns:
        A function of the events. What this function does before it returns needs no GIL; what that one does, does.
        It raises MsgspecError or ValueError if a text is not valid UTF-8, or not of the type of its field.
    """
    module = SCANNER.load()
    if module is None or (scan := _scanner(module).scan(piece)) is None:
        return None
    return lambda: ScannedRows(_Scan(module, piece, *scan))


def is_scanned(piece: bytes | memoryview) -> bool:
    """Whether the compiled scanner reads this piece."""
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        if (rows := scanned(piece)) is not None:
            rows()
            return True
    return False


@cache
def _scanner(module: ModuleType) -> Any:
    """The scanner of all fields."""
    described = tuple(
        (int(struct is Args), field.encode_name.encode(), getattr(module, _kind(field)), _MISSING.get(field.name, 0))
        for struct in (Event, Args)
        for field in msgspec.structs.fields(struct)
    )
    return module.Scanner(described, tuple(tuple(map(_COLUMNS.index, fields)) for fields in _COMBINED))


def _kind(field: msgspec.structs.FieldInfo) -> str:
    """The name in the compiled module of how a field is read; of `str | list[int]` it accepts only texts."""
    if field.type is Args:
        return "ARGUMENTS"
    other = {int: "CHECKED_INTEGER", Any: "ANYTHING"}.get(field.type, "CHECKED_STRING")
    return _KINDS.get(field.name, other)


class _Scan:
    """What the scanner read of a piece: columns, and the places of events and distinct texts in the piece."""

    def __init__(
        self,
        module: ModuleType,
        piece: bytes | memoryview,
        rows: int,
        non_ascii: bool,  # noqa: FBT001 - as the compiled module gives it
        extents: Any,
        texts: Any,
        columns: Sequence[Any],
        combinations: Sequence[Any],
    ) -> None:
        self.rows = rows
        self._module = module
        self._piece = piece
        self._extents, self._texts = (_array(pairs, np.uint32).reshape(-1, 2) for pairs in (extents, texts))
        if non_ascii:
            str(piece, "utf-8")
        self._columns = {
            name: _array(column, _WIDTHS[_KINDS[name]])
            for name, column in zip(_COLUMNS, columns, strict=True)
            if column is not None
        }
        numbers, entries = combinations[::2], combinations[1::2]
        self._combinations = {
            fields: (None if n is None else _array(n, np.int32), _array(e, np.int32).reshape(-1, 4))
            for fields, n, e in zip(_COMBINED, numbers, entries, strict=True)
        }
        self._values = {name: self._decoded(name) for name in _TYPED_TEXTS}
        self.null = self._null()

    def column(self, name: str) -> Array | None:
        """The column of a field; None if no event has it."""
        return self._columns.get(name)

    def combination(self, fields: tuple[str, ...]) -> tuple[Array | None, list[tuple[Any, ...]]]:
        """The number of each event's combination of values (None: there are none), and the combinations."""
        numbers, entries = self._combinations[fields]
        values = [self.values(name, entries[:, place]) for place, name in enumerate(fields)]
        return numbers, list(zip(*values, strict=True))

    def values(self, name: str, numbers: Array) -> list[Any]:
        """The values of texts, by their numbers; of no text the value that an event without the field has."""
        if name in INPUTS:
            return self._texts_of(numbers)
        return list(map(self._values[name].__getitem__, numbers.tolist()))

    def in_order(self, codes: Array) -> tuple[Array, Array]:
        """Codes (int32) renumbered in the order of their first appearance, and the codes in this order."""
        number = np.empty(len(codes), np.int32)
        return number, _array(self._module.in_order(codes, number), np.int32)

    def events(self, rows: Array) -> list[bytes]:
        """The JSON of events."""
        return [bytes(self._piece[begin : begin + size]) for begin, size in self._extents[rows].tolist()]

    def _texts_of(self, numbers: Array) -> list[bytes]:
        """Texts by their numbers; of no number an empty text."""
        extents = np.zeros((len(numbers), 2), np.uint32)
        extents[numbers >= 0] = self._texts[numbers[numbers >= 0]]
        return [bytes(self._piece[begin : begin + size]) for begin, size in extents.tolist()]

    def _decoded(self, name: str) -> dict[int, Any]:
        """The value of each text that a field has, by its number."""
        default = {_NO_NUMBER: _FIELDS[name].default}
        if (column := self.column(name)) is None:
            return default
        _, used = self.in_order(column)
        numbers = used[used != _NO_NUMBER]
        values = _distinct_values[name].decode(b"[" + b",".join(self._texts_of(numbers)) + b"]")
        return dict(zip(numbers.tolist(), values, strict=True)) | default

    def _null(self) -> int:
        """The number of the text ``null``; one that no text has if there is none."""
        short = np.flatnonzero(self._texts[:, 1] == len(b"null"))
        texts = zip(short.tolist(), self._texts_of(short), strict=True)
        return next((number for number, text in texts if text == b"null"), len(self._texts))


def _array(memory: Any, dtype: Any) -> Array:
    return np.empty(0, dtype) if memory is None else np.frombuffer(memory, dtype)


class ScannedRows:
    """`thence.readers.kineto.rows.Rows` of what the scanner read.

    Args:
        scan: of the piece.
        rows: indices of the events; None for all.
    """

    def __init__(self, scan: _Scan, rows: Array | None = None) -> None:
        self._scan = scan
        self._rows = rows

    def __len__(self) -> int:
        return self._scan.rows if self._rows is None else len(self._rows)

    def chosen(self, rows: Array) -> ScannedRows:
        """As `Rows.chosen`."""
        return ScannedRows(self._scan, rows if self._rows is None else self._rows[rows])

    def coded(self, *fields: str) -> tuple[Array, list[Any]]:
        """As `Rows.coded`."""
        if len(fields) > 1:
            whole, known = self._scan.combination(fields)
            codes, numbers = self._scan.in_order(self._of(whole, _NO_NUMBER, np.int32))
            none = tuple(value for name in fields for value in self._scan.values(name, np.array([_NO_NUMBER])))
            return codes, [known[number] if number >= 0 else none for number in numbers.tolist()]
        codes, numbers = self._scan.in_order(self._of(self._scan.column(fields[0]), _NO_NUMBER, np.int32))
        return codes, self._scan.values(fields[0], numbers)

    def integers(self, field: str) -> Array:
        """As `Rows.integers`."""
        return self._of(self._scan.column(field), _MISSING[field], _WIDTHS[_KINDS[field]])

    def triples(self, field: str) -> Array:
        """As `Rows.triples`."""
        column = self._scan.column(field)
        if column is None:
            return np.full((len(self), 3), _MISSING[field], np.int64)
        return self._of(column.reshape(-1, 3), _MISSING[field], np.int64)

    def times(self, field: str) -> Array:
        """As `Rows.times`."""
        return self.integers(field)

    def identifiers(self) -> Array:
        """As `Rows.identifiers`: the scanner refuses texts."""
        return self.integers("id")

    def given(self, field: str) -> Array:
        """As `Rows.given`."""
        column = self._scan.column(field)
        if column is None:
            return np.empty(0, np.int64)
        numbers = self._of(column, _NO_NUMBER, np.int32)
        null = _NO_NUMBER if field in INPUTS else self._scan.null
        return np.flatnonzero((numbers != _NO_NUMBER) & (numbers != null))

    def events(self) -> list[Event]:
        """As `Rows.events`."""
        return list(map(_event.decode, self.texts(np.arange(len(self)))))

    def texts(self, rows: Array) -> list[bytes]:
        """As `Rows.texts`."""
        return self._scan.events(rows if self._rows is None else self._rows[rows])

    def _of(self, column: Array | None, missing: int, dtype: Any) -> Array:
        if column is None:
            return np.full(len(self), missing, dtype)
        return column if self._rows is None else column.take(self._rows, axis=0)  # faster than an index
