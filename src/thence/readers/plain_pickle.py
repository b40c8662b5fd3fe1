"""Pickles of plain values, read without executing anything.

A pickle is a program for a machine with a stack, and Python's unpickler runs any code that it names. The machine
here has only the instructions that build containers, texts, numbers, booleans and None, as protocols 2 to 5 write
them; every other instruction is refused by name. An OrderedDict or a defaultdict becomes a dict: their names are
compared with a list, and nothing is imported or called.

What a pickle may cost:

- Memory: its objects are estimated while they are made, and limited by its size: with the pickle itself they
  take less than the 200 MB and five times its size that any input may take.
- Time: every object is visited once, however often the pickle refers to it. Keys of dicts and elements of sets must
  be texts, bytes, numbers of 64 bits, booleans or None: tuples and larger integers can be made to share one hash,
  and a dict of such keys takes time quadratic in their number.
- Repetition: a few kB of lists that refer to each other can describe a value with any number of elements.
  `_check_shape` limits what a reader meets who follows every reference.

Why not Python's `pickle.Unpickler` with a `find_class` that refuses: it has no limit between opcodes. A pickle of 9
bytes that stores at memo index 2^29 takes 8 GB and a minute there; 8 million empty lists take 629 MB (here refused at
100 MB); 60,000 integers with one hash take over two minutes (here refused at the first). The price is time: a flight
record of 1.6 MB takes 0.5 s here and 0.03 s there, which is 3 and 50 MB/s. That is enough for flight records and
annotations, which have some megabytes. It is not for memory snapshots of hundreds of megabytes, nor is the unpickler,
whose objects take 14 times the size of the file: `thence.readers.memory_snapshot.tape` reads those.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
import sys
from itertools import compress
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_BYTES = 256 << 20
MAX_BITS = 64  # of one integer: node ids have them
MAX_DEPTH = 100  # of containers in containers: readers may recurse
MAX_WRITTEN = 1_000_000
"""Elements and characters of one value, written out, beyond as many as the pickle has bytes."""


class PickleRefused(ValueError):
    """The bytes are not a pickle, or the pickle is not accepted; the message says why."""


def load_plain(content: bytes, max_written: int | None = None) -> object:
    """The value in a pickle of containers, texts, numbers, booleans and None.

    A container that the pickle refers to several times is one object. If the value is a container, each of its
    elements written out in full, shared objects at each of their places, has at most `MAX_WRITTEN` elements and
    characters more than the pickle has bytes.

    Args:
        content: the whole pickle.
        max_written: elements and characters of each element of the value, written out; None: as above. A caller
            that gives more must not follow every reference.

    Raises:
        PickleRefused: the pickle is cut, too large, nested too deeply, repeats itself too often, or holds
            anything else.
    """
    if len(content) > MAX_BYTES:
        raise PickleRefused("the pickle is larger than 256 MB")
    machine = _Machine(content)
    # Damaged pickles raise nearly anything.
    try:
        value = machine.run()
    except PickleRefused:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise PickleRefused(f"is not a pickle, or is damaged ({reason})") from error
    limit = MAX_WRITTEN + len(content) if max_written is None else max_written
    _check_shape(value, machine.shared(), limit)
    return value


class _Name:
    """A class that the pickle names; it is never imported."""

    def __init__(self, name: str) -> None:
        self.name = name


_DICTS = {"collections.OrderedDict", "collections.defaultdict"}
_BUILTINS = {
    f"{module}.{name}"
    for module in ("builtins", "__builtin__")  # protocol 2 has the names of Python 2
    for name in ("bool", "bytes", "dict", "float", "int", "list", "set", "str", "tuple")
}
"""Classes that a defaultdict may make its missing values with; a dict has no use for them."""
_KEYS = {str, bytes, int, float, bool, type(None)}
_CONTAINERS = {list, tuple, dict, set, frozenset}


class _Machine:
    """The stack, the marks and the memo of an unpickler; each method without arguments is an instruction.

    Attributes:
        stack: values above the last mark.
        marks: for each mark, the values below it and above the mark before.
        memo: values that were given a number, which the pickle may refer to.
        fetched: for each of them, 1 if the pickle did refer to it.
        taken: estimated bytes of texts and of elements of dicts and sets; `_TABLE` has those of other objects.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.position = self.taken = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: list[Any] = []
        self.fetched = bytearray()

    def run(self) -> object:
        """The value that the pickle builds."""
        content, instructions, costs, stop = self.content, _INSTRUCTIONS, _COSTS, _STOP
        # What the objects may take: 100 MB, and four bytes for each of the pickle's.
        left = limit = 100_000_000 + 4 * len(content)
        while (code := content[self.position]) != stop:
            self.position += 1
            instructions[code](self)
            left -= costs[code]
            if left < self.taken:
                raise PickleRefused(
                    f"the pickle holds so many objects for its size that they take more than {limit / 1e6:,.0f} MB"
                )
        return self.stack.pop()

    def take(self, size: int) -> bytes:
        """The next bytes."""
        begin, self.position = self.position, self.position + size
        if self.position > len(self.content):
            raise PickleRefused("the pickle is cut")
        return self.content[begin : self.position]

    def number(self, size: int) -> int:
        """The number in the next bytes."""
        begin = self.position
        self.position = end = begin + size
        return int.from_bytes(self.content[begin:end], "little")

    def _line(self) -> str:
        end = self.content.index(b"\n", self.position)
        line = self.take(end - self.position)
        self.position += 1
        return line.decode()

    def _since_mark(self) -> list[Any]:
        values = self.stack
        self.stack = self.marks.pop()
        return values

    def protocol(self) -> None:
        self.position += 1

    def frame(self) -> None:
        self.position += 8

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def integer(self) -> None:
        value = int.from_bytes(self.take(self.number(1)), "little", signed=True)
        if value.bit_length() > MAX_BITS:
            raise PickleRefused("the pickle holds an integer that is too large")
        self.stack.append(value)

    def signed(self) -> None:
        self.stack.append(int.from_bytes(self.take(4), "little", signed=True))

    def float(self) -> None:
        self.stack += struct.unpack(">d", self.take(8))

    def append(self) -> None:
        value = self.stack.pop()
        _typed(self.stack[-1], list).append(value)

    def appends(self) -> None:
        values = self._since_mark()
        _typed(self.stack[-1], list).extend(values)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _typed(self.stack[-1], dict)[_keys([key])[0]] = value
        self.taken += 50

    def set_items(self) -> None:
        values = self._since_mark()
        pairs = zip(_keys(values[::2]), values[1::2], strict=True)
        _typed(self.stack[-1], dict).update(pairs)
        self.taken += 25 * len(values)

    def add_items(self) -> None:
        elements = _keys(self._since_mark())
        _typed(self.stack[-1], set).update(elements)
        self.taken += 120 * len(elements)

    def frozen_set(self) -> None:
        elements = _keys(self._since_mark())
        self.stack.append(frozenset(elements))
        self.taken += 120 * len(elements)

    def tuple(self) -> None:
        values = self._since_mark()
        self.stack.append(tuple(values))

    def short_tuple(self) -> None:
        """A tuple of the last 1 to 3 values, by the opcode."""
        size = self.content[self.position - 1] - pickle.TUPLE1[0] + 1
        values = self.stack[-size:]
        del self.stack[-size:]
        self.stack.append(tuple(values))

    def memoize(self) -> None:
        self.memo.append(self.stack[-1])
        self.fetched.append(0)

    def put(self) -> None:
        self._put(self.number(1))

    def long_put(self) -> None:
        self._put(self.number(4))

    def _put(self, place: int) -> None:
        if place != len(self.memo):
            raise PickleRefused("the pickle uses memo indices that do not count up")
        self.memoize()

    def get(self) -> None:
        place = self.content[self.position]
        self.position += 1
        self.stack.append(self.memo[place])
        self.fetched[place] = 1

    def long_get(self) -> None:
        place = self.number(4)
        self.stack.append(self.memo[place])
        self.fetched[place] = 1

    def shared(self) -> set[int]:
        """The ids of the containers that may be at several places of the value."""
        fetched = compress(self.memo, self.fetched)
        return {id(value) for value in fetched if type(value) in _CONTAINERS}

    def name_lines(self) -> None:
        """Names a class, in two lines."""
        self._name(self._line(), self._line())

    def name_values(self) -> None:
        """Names a class, by the last two values."""
        name, module = self.stack.pop(), self.stack.pop()
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        full = f"{module}.{name}"
        if full not in _DICTS | _BUILTINS:
            raise PickleRefused(f"the pickle wants to import {full}; it is not loaded")
        self.stack.append(_Name(full))

    def call(self) -> None:
        """An empty dict, if an empty OrderedDict or defaultdict is to be made."""
        arguments, made = self.stack.pop(), _typed(self.stack.pop(), _Name)
        plain = all(x is None or type(x) is _Name for x in _typed(arguments, tuple))
        if made.name not in _DICTS or not plain:
            raise PickleRefused(f"the pickle wants to call {made.name}; it is not loaded")
        self.stack.append({})


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise PickleRefused(f"is damaged: it uses a {type(value).__name__} as a {kind.__name__}")
    return value


def _keys(values: list[Any]) -> list[Any]:
    if not _KEYS.issuperset(map(type, values)):
        raise PickleRefused("the pickle has keys that are neither strings nor numbers")
    return values


def _push(value: object) -> Callable[[_Machine], None]:
    """The instruction that pushes a constant."""
    return lambda machine: machine.stack.append(value)


def _push_new(kind: type) -> Callable[[_Machine], None]:
    """The instruction that pushes an empty container."""
    return lambda machine: machine.stack.append(kind())


def _push_number(width: int) -> Callable[[_Machine], None]:
    """The instruction that pushes the number in the next bytes."""
    return lambda machine: machine.stack.append(machine.number(width))


def _push_sized(width: int, encoding: str | None) -> Callable[[_Machine], None]:
    """The instruction that pushes bytes or text, after a length of so many bytes."""

    def push(machine: _Machine) -> None:
        content = machine.take(machine.number(width))
        value = content if encoding is None else str(content, encoding, "surrogatepass")
        machine.stack.append(value)
        machine.taken += sys.getsizeof(value)

    return push


_TABLE: dict[str, tuple[Callable[[_Machine], None], int]] = {
    "PROTO": (_Machine.protocol, 0), "FRAME": (_Machine.frame, 0), "MARK": (_Machine.mark, 100),
    "NONE": (_push(None), 16), "NEWTRUE": (_push(value=True), 16), "NEWFALSE": (_push(value=False), 16),
    "BININT1": (_push_number(1), 16), "BININT2": (_push_number(2), 48), "BININT": (_Machine.signed, 48),
    "LONG1": (_Machine.integer, 56), "BINFLOAT": (_Machine.float, 40),
    "SHORT_BINSTRING": (_push_sized(1, "ascii"), 16), "BINSTRING": (_push_sized(4, "ascii"), 16),
    "SHORT_BINUNICODE": (_push_sized(1, "utf-8"), 16), "BINUNICODE": (_push_sized(4, "utf-8"), 16),
    "BINUNICODE8": (_push_sized(8, "utf-8"), 16),
    "SHORT_BINBYTES": (_push_sized(1, None), 16), "BINBYTES": (_push_sized(4, None), 16),
    "BINBYTES8": (_push_sized(8, None), 16),
    "EMPTY_LIST": (_push_new(list), 110), "APPEND": (_Machine.append, 0), "APPENDS": (_Machine.appends, 0),
    "EMPTY_TUPLE": (_push(()), 16), "TUPLE1": (_Machine.short_tuple, 80), "TUPLE2": (_Machine.short_tuple, 80),
    "TUPLE3": (_Machine.short_tuple, 80), "TUPLE": (_Machine.tuple, 80),
    "EMPTY_DICT": (_push_new(dict), 110), "SETITEM": (_Machine.set_item, 0), "SETITEMS": (_Machine.set_items, 0),
    "EMPTY_SET": (_push_new(set), 250), "ADDITEMS": (_Machine.add_items, 0),
    "FROZENSET": (_Machine.frozen_set, 250),
    "BINPUT": (_Machine.put, 10), "LONG_BINPUT": (_Machine.long_put, 10), "MEMOIZE": (_Machine.memoize, 10),
    "BINGET": (_Machine.get, 16), "LONG_BINGET": (_Machine.long_get, 16),
    "GLOBAL": (_Machine.name_lines, 200), "STACK_GLOBAL": (_Machine.name_values, 200), "REDUCE": (_Machine.call, 110),
}  # fmt: skip
"""What is done for each opcode, and estimated bytes of the object that it makes and of the references to it."""


def _refused(machine: _Machine) -> NoReturn:
    """Refuses the opcode before the machine's position."""
    code = machine.content[machine.position - 1]
    name = next((op.name for op in pickletools.opcodes if ord(op.code) == code), None)
    what = f"the opcode {name}" if name else f"the byte {code:#x} in place of an opcode"
    raise PickleRefused(f"the pickle holds {what}, which no plain value needs; it is not loaded")


_STOP = pickle.STOP[0]
_INSTRUCTIONS: list[Callable[[_Machine], None]] = [_refused] * 256
_COSTS = [0] * 256
for _name, (_instruction, _cost) in _TABLE.items():
    _INSTRUCTIONS[getattr(pickle, _name)[0]] = _instruction
    _COSTS[getattr(pickle, _name)[0]] = _cost


class _Level:
    """A container that is being visited.

    Attributes:
        inner: containers in it that are still to be visited.
        size: elements and characters of what was visited of it, if written out.
        depth: 1, or one more than that of the deepest container in it.
    """

    def __init__(self, container: Any) -> None:
        self.container = container
        is_dict = type(container) is dict
        elements = [*container, *container.values()] if is_dict else container
        self.inner = [x for x in elements if type(x) in _CONTAINERS]
        self.size, self.depth = len(elements), 1
        if len(self.inner) < len(elements):
            self.size += sum(len(x) for x in elements if type(x) is str or type(x) is bytes)
            if named := next((x.name for x in elements if type(x) is _Name), None):
                raise PickleRefused(f"the pickle holds the class {named}")


def _check_shape(value: object, shared: set[int], limit: int) -> None:
    """Refuses a value that is nested too deeply, contains itself, or has elements that are too large.

    Args:
        shared: ids of the containers that may have several places: each is visited once.
        limit: on elements and characters of each element of the value, written out.
    """
    known: dict[int, tuple[int, int]] = {}  # size and depth of shared containers
    levels = [_Level([value])]
    while True:
        level = levels[-1]
        if len(levels) + level.depth > MAX_DEPTH:
            raise PickleRefused("the pickle is nested too deeply, or contains itself")
        if level.inner:
            container = level.inner.pop()
            if id(container) not in known:
                levels.append(_Level(container))
                continue
            size, depth = known[id(container)]
        elif levels.pop() and not levels:
            return
        else:
            size, depth = level.size, level.depth
            if id(level.container) in shared:
                known[id(level.container)] = size, depth
            if size > limit and len(levels) > 1:
                raise PickleRefused("the pickle repeats its values too often")
            level = levels[-1]
        level.size += size
        if depth >= level.depth:
            level.depth = depth + 1
