"""Pickles of plain values, read without executing anything.

A pickle is a program: unpickling one from an untrusted source can run any code. Before anything is
unpickled, every opcode is checked: only those that build containers, texts, numbers, booleans and None
are allowed. Every other opcode, such as those that import or call something, is refused by name. A defaultdict
becomes a dict: its name and that of its factory are compared with `_NAMES`, and nothing is imported or called.

Keys of dicts and elements of sets must be texts, bytes, numbers of 64 bits, or None: tuples can be crafted to
have equal hashes, and building a dict of such tuples takes time quadratic in their number.
"""

from __future__ import annotations

import io
import pickle
import pickletools

__all__ = ["PickleRefused", "load_plain"]

_INSTRUCTIONS = """
    PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE
    INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE BINUNICODE8 SHORT_BINUNICODE
    BINBYTES BINBYTES8 SHORT_BINBYTES
    EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS
    EMPTY_SET ADDITEMS FROZENSET
    PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET MEMOIZE
    GLOBAL STACK_GLOBAL REDUCE
"""
_NAMES = frozenset(
    (
        "collections defaultdict",
        *(
            f"{module} {kind}"
            for module in ("builtins", "__builtin__")
            for kind in ("list", "dict")
        ),
    )
)
"""The names that a pickle may refer to: `_PlainUnpickler` replaces them."""
_ADMITTED = frozenset(_INSTRUCTIONS.split())
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_MOST_BYTES = 256 << 20
# Bits of one integer: node ids have 64; larger integers can be crafted to have equal hashes.
_MOST_BITS = 64
# Bytes that a pickle must have for each container beyond _FEW; a container takes ten times as much in memory.
_LEAST_BYTES = 8
_FEW = 100_000  # containers that a pickle of any size may hold
_DEEPEST = 100
_MOST_COPIES = 1000


class PickleRefused(ValueError):
    """The bytes are not a pickle, or the pickle is not accepted; the message says why."""


class _PlainUnpickler(pickle.Unpickler):
    """Refuses imports and persistent ids, in case `_reason_to_refuse` lets them through by mistake."""

    def find_class(self, module: str, name: str) -> object:
        if f"{module} {name}" in _NAMES:
            return _empty_dict if name == "defaultdict" else None
        raise PickleRefused(f"the pickle wants to import {module}.{name}")

    def persistent_load(self, _pid: object) -> object:
        raise PickleRefused("the pickle refers to objects outside of itself")


def _empty_dict(_factory: object = None) -> dict[object, object]:
    return {}


def load_plain(content: bytes) -> object:
    """The value in a pickle of containers, texts, numbers, booleans and None.

    Args:
        content: the whole pickle.

    Raises:
        PickleRefused: the pickle is cut, too large, nested too deeply, or holds anything else.
    """
    if len(content) > _MOST_BYTES:
        raise PickleRefused("the pickle is larger than 256 MB")
    # Damaged pickles raise nearly anything.
    try:
        reason = _reason_to_refuse(content)
    except Exception as error:
        raise PickleRefused(f"is not a pickle, or is damaged ({error})") from error
    if reason is not None:
        raise PickleRefused(reason)
    try:
        value = _PlainUnpickler(io.BytesIO(content)).load()
    except PickleRefused:
        raise
    except Exception as error:
        raise PickleRefused(f"the pickle is damaged ({type(error).__name__}: {error})") from error
    _check_depth(value)
    return value


def _reason_to_refuse(content: bytes) -> str | None:
    """The reason not to unpickle the content, or None; checks every opcode without executing any."""
    stack = _Stack()
    texts: list[object] = []  # the arguments of the last two opcodes that push texts
    for opcode, argument, _ in pickletools.genops(content):
        named = " ".join(map(str, texts)) if opcode.name == "STACK_GLOBAL" else argument
        texts = [*texts, argument][-2:] if "UNICODE" in opcode.name else texts
        admitted = opcode.name in _ADMITTED and ("GLOBAL" not in opcode.name or named in _NAMES)
        if not admitted:
            return f"the pickle holds the opcode {opcode.name}, which can run code or needs other objects; not loaded"
        if isinstance(argument, int) and argument.bit_length() > _MOST_BITS:
            return "the pickle holds an integer that is too large"
        # A PUT at memo index n makes the unpickler allocate n memo entries.
        if opcode.name in _PUTS and not 0 <= int(argument or 0) < len(content):
            return "the pickle uses memo indices that are too large"
        stack.take(opcode.name, argument)
        if stack.refusal is not None:
            return stack.refusal
    if stack.containers > _FEW + len(content) // _LEAST_BYTES:
        return f"the pickle holds {stack.containers:,} containers, most of them empty or nearly so"
    return None


_MARK = None
_CLOSING = ("LIST", "TUPLE", "DICT", "FROZENSET", "APPENDS", "SETITEMS", "ADDITEMS", "POP_MARK")
"""Opcodes that pop everything above the last mark."""
_POPS = {
    "POP": 1,
    "APPEND": 1,
    "SETITEM": 2,
    "TUPLE1": 1,
    "TUPLE2": 2,
    "TUPLE3": 3,
    "STACK_GLOBAL": 2,
    "REDUCE": 2,
}
_CONTAINERS = ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
               "LIST", "TUPLE", "DICT", "FROZENSET", "REDUCE")  # fmt: skip


class _Stack:
    """A model of the unpickler's stack: each value is True for a container, None for a mark, else False.

    Attributes:
        refusal: why the pickle is refused, such as a container used as a key or as an element of a set; None if
            no opcode so far is a reason.
        containers: number of containers that the opcodes so far create.
    """

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.containers = 0
        self._copies = 0
        self._values: list[bool | None] = []
        self._memo = bytearray()  # for each memo index, whether it holds a container

    def take(self, name: str, argument: object) -> None:
        """Applies one opcode.

        Raises:
            IndexError: the opcode needs a value that is not on the stack or in the memo.
        """
        values = self._values
        self.containers += name in _CONTAINERS
        if name in ("PROTO", "FRAME", "STOP"):
            return
        if "PUT" in name or "GET" in name or name == "MEMOIZE":
            self._remember(name, argument)
        elif name in _CLOSING:
            self._close(name)
        elif name in _POPS:
            count = _POPS[name]
            if name == "SETITEM":
                self._check_keys(values[-2:-1])
            del values[len(values) - count :]
            if name.startswith("TUPLE") or name in ("REDUCE", "STACK_GLOBAL"):
                values.append(name != "STACK_GLOBAL")
        elif name == "MARK":
            values.append(_MARK)
        elif name == "DUP":
            values.append(values[-1])
            # A copy may be of the whole value so far: the limit keeps the value from outgrowing the file.
            self._copies += 1
            if self._copies > _MOST_COPIES:
                self.refusal = "the pickle copies values too often"
        else:
            values.append(name in _CONTAINERS)

    def _remember(self, name: str, argument: object) -> None:
        """Stores the last value in the memo, or pushes a value from the memo."""
        place = len(self._memo) if name == "MEMOIZE" else int(str(argument))
        if "GET" in name:
            self._values.append(bool(self._memo[place]))
            return
        self._memo.extend(bytes(max(0, place + 1 - len(self._memo))))
        self._memo[place] = self._values[-1] is not False

    def _close(self, name: str) -> None:
        """Pops the last mark and everything above it, and pushes the container that the opcode builds, if any."""
        values = self._values
        at = len(values) - 1
        while values[at] is not _MARK:
            at -= 1
            if at < 0:
                raise IndexError("a mark is missing")
        keys = values[at + 1 :: 2 if name in ("DICT", "SETITEMS") else 1]
        if name in ("DICT", "SETITEMS", "FROZENSET", "ADDITEMS"):
            self._check_keys(keys)
        del values[at:]
        if name in _CONTAINERS:
            values.append(True)

    def _check_keys(self, keys: list[bool | None]) -> None:
        if any(key is not False for key in keys):
            self.refusal = "the pickle has keys that are neither strings nor numbers"


def _check_depth(value: object) -> None:
    """Raises `PickleRefused` for a value that is nested too deeply, contains itself, or has too many elements."""
    level = [value]
    left = 50_000_000
    for _ in range(_DEEPEST):
        inner: list[object] = []
        for container in level:
            if isinstance(container, dict):
                inner += container.keys()
                inner += container.values()
            elif isinstance(container, list | tuple | set | frozenset):
                inner += container
            if len(inner) > left:
                raise PickleRefused("the pickle repeats its values too often")
        if not inner:
            return
        left -= len(inner)
        level = inner
    raise PickleRefused("the pickle is nested too deeply, or contains itself")
