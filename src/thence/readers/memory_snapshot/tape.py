"""The value in a pickle as columns: what the compiled unpickler makes, or the same from Python's objects.

``_unpickler.c`` describes the tape. Objects that a pickle refers to many times are in it once, so a question about
them is asked once. A cell that holds nothing, of a dict without the key, is `NOTHING`: the constant None.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.errors import DamagedInput
from thence.readers.compiled import UNPICKLER
from thence.readers.plain_pickle import PickleRefused, load_plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from numpy.typing import NDArray

    from thence.readers.source import Source

    Cells = NDArray[np.uint32]

CONSTANT, SMALL, LARGE, FLOAT, TEXT, LIST, TUPLE, DICT = range(8)
"""Kinds of cells, in their lowest bits."""
_KIND_BITS, _KIND_MASK = 3, np.uint32(7)
NOTHING = np.uint32(0)
_CONSTANTS = {None: 0, False: 1, True: 2}
_CONTAINERS: dict[type, int] = {list: LIST, tuple: TUPLE, dict: DICT}
_PIECE = 4 << 20
_MAX_IN_PYTHON = 64 << 20
"""Bytes of a pickle that is read in Python, at 1 to 3 MB/s."""
_TOO_LARGE = (
    "is larger than 64 MB, the limit without the compiled unpickler, which is in the wheels for Linux and is built "
    "where there is a C compiler; thence doctor says why it is not used"
)
_UNUSUAL = "is a pickle, but holds what PyTorch's snapshots of its memory do not hold, or is damaged"


@dataclass(frozen=True)
class Tape:
    """The value in a pickle.

    Attributes:
        cells: lengths and elements of lists and tuples, shapes and values of dicts.
        large: 64-bit integers, and the bits of floats.
        texts: distinct texts.
        lists: for each list, its place in `cells`.
        tuples: the same for each tuple.
        dicts: the same for each dict.
        shapes: for each shape of a dict, the place of each key.
        root: the cell of the value.
        bytes: of the pickle.
    """

    cells: Cells
    large: NDArray[np.int64]
    texts: list[str]
    lists: Cells
    tuples: Cells
    dicts: Cells
    shapes: list[dict[str, int]] = field(repr=False)
    root: np.uint32
    bytes: int

    def field(self, dicts: Cells, key: str) -> Cells:
        """The values of one key of many dicts; `NOTHING` for what is no dict or does not have the key."""
        cells = np.zeros(len(dicts), np.uint32)
        rows = np.flatnonzero(dicts & _KIND_MASK == DICT)
        places = self.dicts[dicts[rows] >> _KIND_BITS]
        shapes = self.cells[places]
        offsets = np.array([shape.get(key, -1) for shape in self.shapes], np.int64)[shapes]
        has = offsets >= 0
        cells[rows[has]] = self.cells[places[has].astype(np.int64) + 1 + offsets[has]]
        return cells

    def elements(self, sequence: np.uint32) -> Cells:
        """The elements of a list or tuple; none if it is neither."""
        return self.all_elements(np.array([sequence], np.uint32))[0]

    def all_elements(self, sequences: Cells) -> tuple[Cells, NDArray[np.int64]]:
        """The elements of many lists and tuples in turn, and the number of each; 0 for what is neither."""
        places = self._places(sequences)
        counts = self.cells[places].astype(np.int64)  # at place 0: 0
        first = np.cumsum(counts) - counts
        cells = np.arange(counts.sum()) + np.repeat(places + 2 - first, counts)
        return self.cells[cells], counts

    def counts(self, sequences: Cells) -> NDArray[np.int64]:
        """How many elements lists and tuples have; 0 for what is neither."""
        return self.cells[self._places(sequences)].astype(np.int64)

    def keys(self, cell: np.uint32) -> tuple[str, ...]:
        """The keys of a dict."""
        return tuple(self.shapes[int(self.cells[self.dicts[cell >> _KIND_BITS]])])

    def distinct(self, dicts: Cells) -> tuple[Cells, NDArray[np.int64]]:
        """Of dicts with equal keys and values one, and for each dict the number of that; other cells: equal ones."""
        places = np.zeros(len(dicts), np.int64)
        is_dict = dicts & _KIND_MASK == DICT
        places[is_dict] = self.dicts[dicts[is_dict] >> _KIND_BITS]
        shapes = np.where(is_dict, self.cells[places].astype(np.int64), -1)
        cells: list[Cells] = []
        number, count = np.zeros(len(dicts), np.int64), 0
        for shape in np.unique(shapes).tolist():
            rows = np.flatnonzero(shapes == shape)
            values = dicts[rows, np.newaxis]
            if shape >= 0:
                values = self.cells[places[rows, np.newaxis] + np.arange(1, len(self.shapes[shape]) + 1)]
            _, first, inverse = np.unique(values, axis=0, return_index=True, return_inverse=True)
            cells.append(dicts[rows[first]])
            number[rows] = count + inverse.reshape(-1)
            count += len(first)
        return np.concatenate([np.zeros(0, np.uint32), *cells]), number

    def _places(self, sequences: Cells) -> NDArray[np.int64]:
        places = np.zeros(len(sequences), np.int64)
        for kind, column in ((LIST, self.lists), (TUPLE, self.tuples)):
            rows = np.flatnonzero(sequences & _KIND_MASK == kind)
            places[rows] = column[sequences[rows] >> _KIND_BITS]
        return places

    def integers(self, cells: Cells) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The integers of cells, 0 for others, and which are integers."""
        kinds = cells & _KIND_MASK
        values = np.where(kinds == SMALL, cells.view(np.int32) >> _KIND_BITS, np.int32(0)).astype(np.int64)
        large = np.flatnonzero(kinds == LARGE)
        values[large] = self.large[cells[large] >> _KIND_BITS]
        return values, (kinds == SMALL) | (kinds == LARGE)

    def text_numbers(self, cells: Cells) -> NDArray[np.int64]:
        """The row in `texts` of each cell; -1 for what is no text."""
        return np.where(cells & _KIND_MASK == TEXT, (cells >> _KIND_BITS).astype(np.int64), -1)


def read_tape(source: Source, progress: Callable[[int], None]) -> Tape:
    """The value in the pickle of a source, by the compiled unpickler, or in Python where that is missing or refuses.

    Raises:
        DamagedInput: it is cut, or no pickle of plain values, or too large to be read in Python.
    """
    module, begun = UNPICKLER.load(), b""
    if module is not None:
        read = _read_compiled(module, source, progress)
        if isinstance(read, Tape):
            return read
        begun = read
    content = begun + source.read(_MAX_IN_PYTHON + 1 - len(begun))
    if source.damage:
        raise DamagedInput(source.name, source.damage)
    if len(content) > _MAX_IN_PYTHON:
        raise DamagedInput(source.name, _TOO_LARGE if module is None else _UNUSUAL)
    progress(source.consumed)
    try:
        value = load_plain(content, max_written=1 << 62)  # no reference is followed twice here
    except PickleRefused as error:
        raise DamagedInput(source.name, f"{error}; expected a snapshot of PyTorch's memory") from error
    return tape_of(value, len(content))


def _read_compiled(module: ModuleType, source: Source, progress: Callable[[int], None]) -> Tape | bytes:
    """The tape, by the compiled unpickler; if that refuses the pickle, what was read of it so far.

    Raises:
        DamagedInput: the pickle is cut, or is refused and too large to be read in Python.
    """
    machine, state = module.Machine(), module.MORE
    seen, held, rest = [], 0, b""
    while state == module.MORE and (piece := source.read(_PIECE)):
        held += len(piece)
        if held <= _MAX_IN_PYTHON:
            seen.append(piece)
        rest += piece
        consumed, state = machine.feed(rest)
        rest = rest[consumed:]
        progress(source.consumed)
    if state == module.MORE:
        raise DamagedInput(source.name, source.damage or "the pickle is cut")
    columns = machine.take() if state == module.DONE else None
    if columns is not None:
        return _of_columns(columns, source.name, held)
    if held > _MAX_IN_PYTHON:
        raise DamagedInput(source.name, _UNUSUAL)
    return b"".join(seen)


def _of_columns(columns: tuple[Any, ...], name: str, size: int) -> Tape:
    """The tape from the columns of the compiled unpickler."""
    cells, large, text_ends, text_bytes, lists, tuples, dicts, keys, key_ends, root = columns
    ends, stored = np.frombuffer(text_ends, np.uint64).tolist(), bytes(text_bytes)
    try:
        texts = [stored[begin:end].decode("utf-8", "surrogatepass") for begin, end in pairwise([0, *ends])]
    except UnicodeDecodeError as error:
        raise DamagedInput(name, f"is not a pickle, or is damaged ({error})") from error
    numbers = (np.frombuffer(keys, np.uint32) >> _KIND_BITS).tolist()
    shapes = [
        {texts[number]: place for place, number in enumerate(numbers[begin:end])}
        for begin, end in pairwise([0, *np.frombuffer(key_ends, np.uint32).tolist()])
    ]
    places = [np.frombuffer(column, np.uint32) for column in (lists, tuples, dicts)]
    in_tape, integers = np.frombuffer(cells, np.uint32), np.frombuffer(large, np.int64)
    return Tape(in_tape, integers, texts, places[0], places[1], places[2], shapes, np.uint32(root), size)


class _Writer:
    """Makes a tape of Python's objects, each of which is visited once."""

    def __init__(self) -> None:
        self.cells: list[int] = [0, 0]
        self.large: list[int] = []
        self.texts: dict[str, int] = {}
        self.places: dict[int, list[int]] = {LIST: [], TUPLE: [], DICT: []}
        self.shapes: dict[tuple[str, ...], int] = {(): 0}
        self.known: dict[int, int] = {}
        self.waiting: list[tuple[Any, int, int]] = []

    def cell(self, value: Any) -> int:
        """The cell of a value; containers are filled later."""
        kind = type(value)
        if value is None or kind is bool:
            return _CONSTANTS[value] << _KIND_BITS | CONSTANT
        if kind is int:
            return self._integer(value)
        if kind is str:
            return self.texts.setdefault(value, len(self.texts)) << _KIND_BITS | TEXT
        if kind is float:
            self.large.append(int(np.float64(value).view(np.int64)))
            return (len(self.large) - 1) << _KIND_BITS | FLOAT
        made = _CONTAINERS.get(kind)
        if made is None:
            return int(NOTHING)  # bytes and sets, which no snapshot has
        if id(value) not in self.known:
            places = self.places[made]
            self.known[id(value)] = len(places) << _KIND_BITS | made
            self.waiting.append((value, made, len(places)))
            places.append(0)
        return self.known[id(value)]

    def _integer(self, value: int) -> int:
        if -(1 << 28) <= value < 1 << 28:
            return (value & 0x1FFFFFFF) << _KIND_BITS | SMALL  # 29 bits are left beside the kind
        if not -(1 << 63) <= value < 1 << 63:
            return int(NOTHING)
        self.large.append(value)
        return (len(self.large) - 1) << _KIND_BITS | LARGE

    def fill(self) -> None:
        """Writes the containers that were met, and those in them."""
        while self.waiting:
            value, kind, row = self.waiting.pop()
            if not value:
                continue
            if kind == DICT:
                keys = tuple([key for key in value if type(key) is str])
                header = [self.shapes.setdefault(keys, len(self.shapes))]
                elements = [value[key] for key in keys]
            else:
                header, elements = [len(value), 0], value
            filled = [self.cell(element) for element in elements]
            self.places[kind][row] = len(self.cells)
            self.cells += header
            self.cells += filled


def tape_of(value: object, size: int) -> Tape:
    """The tape of a value of Python's objects, from a pickle of so many bytes.

    Keys of dicts that are not texts, bytes, sets, and integers beyond 64 bits are left out: snapshots have none.
    """
    writer = _Writer()
    root = writer.cell(value)
    writer.fill()
    lists, tuples, dicts = (np.array(writer.places[kind], np.uint32) for kind in (LIST, TUPLE, DICT))
    return Tape(
        np.array(writer.cells, np.uint32),
        np.array(writer.large, np.int64),
        list(writer.texts),
        lists,
        tuples,
        dicts,
        [{key: place for place, key in enumerate(keys)} for keys in writer.shapes],
        np.uint32(root),
        size,
    )
