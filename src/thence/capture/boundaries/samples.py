"""Samples what threads that launch do while they launch nothing, by the compiled probe (``_samples.c``).

A thread of C samples a thread 0.5 ms after its last call that CUPTI reports, and then each millisecond, or each 100th
of the time since that call if that is more, but at least each 100 ms. Nothing is stopped, no signal is sent, and no
code of the program runs. It is not the recorder's thread, because that waits for the GIL when it writes: in a program
that runs Python, a tenth of all pauses of 6 ms got no sample then.

The offsets of the fields that a sample needs beside those of `thence.capture.boundaries.stacks` are found in each
process, from objects that are known: the name of a code object is where its address is. Then a sample of the calling
thread is compared with what Python says of it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from bisect import bisect_right
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thence.capture.boundaries.places import FRAME, LINE, Place
from thence.capture.boundaries.stacks import LAYOUTS, why_unreadable
from thence.model.formats import SAMPLE_STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import CodeType, FrameType, ModuleType

    from thence.capture.boundaries.places import Places

SAMPLE = np.dtype(
    [(name, "<i8") for name in ("time", "until")]
    + [(name, "<u4") for name in ("thread", "chain", "position", "count", "state", "call")]
)
"""``Sample`` of _samples.c."""
_CODECS = {0: "utf-8", 1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}
"""By the width of characters that the probe gives; 0: ASCII."""
COUNTS = (*("read", "torn", "refused", "no_frame", "launched", "late", "unmoved"), *("lost", "lost_functions"))
"""What the probe counts: samples by outcome, rows and functions for which there was no room."""
_RUNS = len(SAMPLE_STATES)
"""``RUNS`` of _samples.c."""
_RUNNING = (SAMPLE_STATES.index("python"), SAMPLE_STATES.index("c"))
_MIN_SAMPLES = 4
_MAX_SHARE_OF_CALL = 0.8
"""A loop of Python that calls a short C function is at this call in a third to two thirds of its samples."""
_MOVES = (0, SAMPLE_STATES.index("python"))
"""States in which the innermost frame may be at another line right away; 0: unknown."""
_STATE_BYTES = 256
"""Of PyThreadState, whose fields that are looked for lie before it in all versions."""
_TRIES = 4  # copies with the GIL and without: other bits of the state change between them
_RTLD_DL_SYMENT = 1
"""Of dlfcn.h: dladdr1 gives the symbol."""
_MAX_INNER = 40
"""Limit on the frames that are kept of a stack without a function of the user's."""


class SampleLayout(NamedTuple):
    """Offsets in bytes, and addresses, in the order in which the probe takes them.

    Attributes:
        owner: of the kind of a frame, in _PyInterpreterFrame.
        thread: of the system's thread id, in PyThreadState.
        gil, gil_mask: of a word in PyThreadState, and its bit that is set while the thread holds the GIL.
        first_line, filename, qualname, lines: in PyCodeObject.
        ascii, compact: of the characters of a str that is ASCII, and of any other.
        kind_shift, ascii_bit: in the word with the state of a str: width of its characters, and whether it is ASCII.
        content: of the content of a bytes object.
        code_type, text_type, bytes_type: addresses of the types.
        gil_begin, gil_end: addresses between which the GIL of the main interpreter lies; 0 if they are not known.
    """

    owner: int
    thread: int
    gil: int
    gil_mask: int
    first_line: int
    filename: int
    qualname: int
    lines: int
    ascii: int
    compact: int
    kind_shift: int
    ascii_bit: int
    content: int
    code_type: int
    text_type: int
    bytes_type: int
    gil_begin: int
    gil_end: int


def why_not_sampled(native: ModuleType | None) -> str | None:
    """Why threads cannot be sampled here; None if they can, and the probe has been given the offsets."""
    if native is None:
        return "the compiled probe is not in use"
    unreadable = why_unreadable(native, by_events=True)
    if unreadable is not None:
        return unreadable
    try:
        method, error_number = native.use_sample_layout(*_layout())
    except (LookupError, ValueError, OSError) as error:
        return f"the layout of this Python is not known: {error}"
    if method is None:
        why = os.strerror(error_number)
        return f"the system does not let a process read its own memory by process_vm_readv ({why})"
    if not all(_agrees(native, call) for call in _calls()):
        return "what is sampled of this Python's stack differs from what Python says"
    return None


# Finding offsets.


def _layout() -> SampleLayout:
    """The offsets in this process.

    Raises:
        LookupError: something is not where it was looked for.
    """
    code = _layout.__code__
    content = ctypes.string_at(id(code), LAYOUTS[sys.version_info[:2]].code)
    gil, mask = _gil_bit()
    texts = [
        # PyASCIIObject: 16 bytes of header, length and hash, then the state.
        (text, _word(id(text) + 32, ctypes.c_uint32))
        for text in ("abc", "\u00e9\u00e0", "\u0100\u0101", "\U0001d6fc\U0001d6fd")
    ]
    # The kind of a text is its bytes a character, in three bits.
    shift = next(s for s in range(30) if [w >> s & 7 for _, w in texts] == [1, 1, 2, 4])
    of_ascii = texts[0][1] & ~texts[1][1]
    ascii_bit = next(b for b in range(shift + 3, 32) if of_ascii >> b & 1)
    return SampleLayout(
        owner=_owner_offset(),
        thread=_thread_offset(),
        gil=gil,
        gil_mask=mask,
        first_line=_offset_in(content, code.co_firstlineno.to_bytes(4, sys.byteorder)),
        filename=_offset_in(content, _pointer(code.co_filename)),
        qualname=_offset_in(content, _pointer(code.co_qualname), last=True),
        lines=_offset_in(content, _pointer(code.co_linetable)),
        ascii=sys.getsizeof("") - 1,
        compact=sys.getsizeof("Ā") - 4,
        kind_shift=shift,
        ascii_bit=ascii_bit,
        content=sys.getsizeof(b"") - 1,
        code_type=id(type(code)),
        text_type=id(str),
        bytes_type=id(bytes),
        **dict(zip(("gil_begin", "gil_end"), _runtime(), strict=True)),
    )


def _word(address: int, kind: type[Any] = ctypes.c_size_t) -> int:
    return int(kind.from_address(address).value)


def _pointer(thing: object) -> bytes:
    return id(thing).to_bytes(8, sys.byteorder)


def _offset_in(content: bytes, value: bytes, *, last: bool = False) -> int:
    """Where an aligned value is in an object: the first place or the last one.

    A code object has its qualified name after its name, which may be the same object.
    """
    places = [offset for offset in range(0, len(content) - len(value) + 1, 4) if content.startswith(value, offset)]
    if not places:
        raise LookupError("a field of code objects was not found")
    return places[-1] if last else places[0]


def _thread_state() -> int:
    function = ctypes.pythonapi.PyGILState_GetThisThreadState
    function.restype = ctypes.c_void_p
    return int(function() or 0)


def _thread_offset() -> int:
    """Of the system's thread id, which comes right after Python's."""
    state = _thread_state()
    wanted = threading.get_ident(), threading.get_native_id()
    for offset in range(0, _STATE_BYTES, 8):
        if (_word(state + offset), _word(state + offset + 8)) == wanted:
            return offset + 8
    raise LookupError("the thread id was not found")


def _gil_bit() -> tuple[int, int]:
    """Offset and mask of a bit of the thread's state that is set while it holds the GIL, and only then."""
    state, size = _thread_state(), 64
    copies: dict[bool, list[bytes]] = {True: [], False: []}
    for _ in range(_TRIES):
        for holds, library in ((True, ctypes.PyDLL(None)), (False, ctypes.CDLL(None))):
            to = ctypes.create_string_buffer(size)  # a call by CDLL releases the GIL, one by PyDLL does not
            library.memcpy(to, ctypes.c_void_p(state), ctypes.c_size_t(size))
            copies[holds].append(to.raw)
    for offset in range(24, size, 4):  # before it are pointers to other states
        words = {
            holds: [int.from_bytes(raw[offset : offset + 4], sys.byteorder) for raw in snapshots]
            for holds, snapshots in copies.items()
        }
        always, ever = 0xFFFFFFFF, 0
        for word in words[True]:
            always &= word
        for word in words[False]:
            ever |= word
        only = always & ~ever
        if only:
            return offset, only & -only
    raise LookupError("no field says who holds the GIL")


def _owner_offset() -> int:
    """Of the kind of a frame: 0 for a function, 1 for a generator."""

    def frame() -> bytes:
        layout = LAYOUTS[sys.version_info[:2]]
        state = _thread_state()
        if layout.through >= 0:
            state = _word(state + layout.through)
        here = _word(_word(state + layout.top) + layout.previous)  # the innermost is that of _word
        return ctypes.string_at(_word(here + layout.previous), layout.locals)

    def plain() -> bytes:
        return frame()

    def generator() -> Iterator[bytes]:
        yield frame()

    pair = plain(), next(generator())
    for offset in range(LAYOUTS[sys.version_info[:2]].locals - 1, 63, -1):  # backwards: it is near the locals
        if (pair[0][offset], pair[1][offset]) == (0, 1):
            return offset
    raise LookupError("the kind of a frame was not found")


class _Symbol(ctypes.Structure):
    """Elf64_Sym of elf.h."""

    _fields_ = [
        ("name", ctypes.c_uint32), ("info", ctypes.c_uint8), ("other", ctypes.c_uint8),
        ("section", ctypes.c_uint16), ("value", ctypes.c_uint64), ("size", ctypes.c_uint64),
    ]  # fmt: skip


def _runtime() -> tuple[int, int]:
    """Begin and end of ``_PyRuntime``, in which the GIL of the main interpreter lies; zeros if they are not known."""
    try:
        begin = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
        symbol = ctypes.POINTER(_Symbol)()
        facts = (ctypes.c_void_p * 4)()  # Dl_info
        known = ctypes.CDLL(None).dladdr1(ctypes.c_void_p(begin), facts, ctypes.byref(symbol), _RTLD_DL_SYMENT)
    except (ValueError, AttributeError, OSError):
        return 0, 0
    return (begin, begin + int(symbol.contents.size)) if known and symbol else (0, 0)


# Testing them.


def _calls() -> list[Callable[[Callable[[], bool]], bool]]:
    """Ways to call a function, with names of all widths of characters."""

    def deep(function: Callable[[], bool], left: int = 30) -> bool:
        return deep(function, left - 1) if left else function()

    def generator(function: Callable[[], bool]) -> Iterator[bool]:
        yield False
        yield function()

    def resumed(function: Callable[[], bool]) -> bool:
        frames = generator(function)
        next(frames)
        return next(frames)

    space: dict[str, Any] = {}
    named: list[Callable[[Callable[[], bool]], bool]] = []
    for name in ("\u00e9", "\u0101", "\U0001d6fc"):  # of one, two and four bytes
        exec(compile("def f(function):\n\n    return function()\n", f"<{name}>", "exec"), space)  # noqa: S102 - its text
        # Named afterwards: Python imports unicodedata, which may be a file of the program, to compile such a name.
        code = space["f"].__code__.replace(co_name=f"f{name}", co_qualname=f"f{name}")
        named.append(FunctionType(code, space))
    return [lambda function: function(), deep, resumed, *named]


def _agrees(native: ModuleType, call: Callable[[Callable[[], bool]], bool]) -> bool:
    """Whether a sample of this thread shows the same functions and lines as Python does, and that it has the GIL."""

    def compare() -> bool:
        sample = native.try_sample()
        frame: FrameType | None = sys._getframe()  # noqa: SLF001 - no other way to a frame
        if sample is None:
            return False
        chain, _, holds = sample
        names = ChainNames(native)
        read = [(names.of(code), position) for code, position in names.chain(chain)]
        true = []
        while frame is not None:
            true.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        # The innermost frame has moved on since then, and a long stack is cut.
        return (
            bool(holds)
            and 0 < len(read) == min(len(read), len(true))
            and all(
                _same(function, code) and (number == 0 or position == lasti)
                for number, ((function, position), (code, lasti)) in enumerate(zip(read, true, strict=False))
            )
        )

    return bool(call(compare))


def _same(function: Function, code: CodeType) -> bool:
    lines = [line or 0 for _, _, line in code.co_lines()]
    return (function.name, function.file, function.lines) == (
        code.co_qualname, code.co_filename, lines,
    )  # fmt: skip


# Names.


class Function(NamedTuple):
    """A function: its qualified name and file; the first instruction (bytes) of each run of one line, and the lines."""

    name: str
    file: str
    starts: list[int]
    lines: list[int]

    def line(self, position: int) -> int:
        """The line of an instruction; 0 if it has none."""
        index = bisect_right(self.starts, position) - 1
        return self.lines[index] if index >= 0 else 0


_UNKNOWN = Function("(a function for which there was no room)", "<unknown>", [], [])


class ChainNames:
    """The functions and chains of the probe's samples, each of which is decoded once."""

    def __init__(self, native: ModuleType) -> None:
        self._native = native
        self._functions: list[Function] = []
        self._chains: list[list[tuple[int, int]]] = []

    def of(self, code: int) -> Function:
        """The function with a number."""
        if code > len(self._functions):
            new = self._native.sample_codes(len(self._functions) + 1)
            self._functions += [_function(*row) for row in new]
        return self._functions[code - 1] if code <= len(self._functions) else _UNKNOWN

    def chain(self, number: int) -> list[tuple[int, int]]:
        """Number of the function and position of each frame of a chain, innermost first."""
        if number > len(self._chains):
            words = np.frombuffer(self._native.sample_chains(len(self._chains) + 1), np.uint32).tolist()
            begin = 0
            while begin < len(words):
                end = begin + 1 + words[begin]
                self._chains.append(list(zip(words[begin + 1 : end : 2], words[begin + 2 : end : 2], strict=True)))
                begin = end
        return self._chains[number - 1]


def _function(first: int, size: int, texts: bytes) -> Function:
    parts = []
    offset = 0
    for _ in range(3):
        length, width = np.frombuffer(texts, np.uint32, 2, offset).tolist()
        parts.append((texts[offset + 8 : offset + 8 + length], width))
        offset += 8 + length
    name, file = (content.decode(_CODECS[width], errors="replace") for content, width in parts[:2])
    try:
        code = _model.replace(
            co_linetable=parts[2][0], co_firstlineno=first, co_code=bytes(size), co_exceptiontable=b""
        )
        rows = list(code.co_lines())
    except ValueError:
        rows = [(0, size, first)]
    return Function(name, file, [start for start, _, _ in rows], [line or 0 for _, _, line in rows])


_model = (lambda: 0).__code__


def _decided(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The state of each row, uint8: that of a thread that ran, but got no CPU time while it was read, is decided here.

    On a machine with more work than cores that is most threads. If the samples of a function are spread over several of
    its instructions, it was running Python; a function that waits for C code is at the instruction of this call.
    """
    state = rows["state"].astype(np.uint8)
    undecided = state == _RUNS
    state[undecided] = 0
    runs = np.flatnonzero(undecided | np.isin(state, _RUNNING))
    for chain in sorted(set(rows["chain"][undecided].tolist())):
        ours = runs[rows["chain"][runs] == chain]
        _, which = np.unique(rows["position"][ours], return_inverse=True)
        counts = np.bincount(which, rows["count"][ours])
        if counts.sum() >= _MIN_SAMPLES and counts.max() < _MAX_SHARE_OF_CALL * counts.sum():
            state[ours[undecided[ours]]] = _RUNNING[0]
    return state


class HostSamples:
    """The samples of one recording.

    Args:
        native: the compiled probe, which can sample here (`why_not_sampled`).
    """

    def __init__(self, native: ModuleType) -> None:
        self._native = native
        self._names = ChainNames(native)
        self._placed: dict[tuple[int, int, bool], tuple[int, int]] = {}
        native.begin_samples()

    def end(self) -> None:
        """Sample no more. What was sampled can still be taken."""
        self._native.end_samples()

    def facts(self) -> Mapping[str, int]:
        """For ``recording.json``: how many samples were taken, and how many were not usable."""
        return dict(zip(COUNTS, self._native.count_samples(), strict=True))

    @property
    def lost(self) -> int:
        """Rows for which there was no room."""
        return self.facts()["lost"]

    def take(self, places: Places, is_own: Callable[[str], bool]) -> dict[str, Any]:
        """Rows of the table ``samples`` (`thence.model.formats`) since the last call."""
        rows = np.frombuffer(self._native.take_samples(), SAMPLE)
        state = _decided(rows)
        moves = np.isin(state, _MOVES)
        # One number for each different chain, position in its innermost frame, and whether that may have moved on.
        keys = rows["chain"].astype(np.uint64) << 32 | rows["position"] << 1 | moves
        distinct, which = np.unique(keys, return_inverse=True)
        placed = [
            self._place((key >> 32, (key & 0xFFFFFFFF) >> 1, bool(key & 1)), places, is_own)
            for key in distinct.tolist()
        ]
        numbers = np.array(placed, np.uint32).reshape(-1, 2)[which]
        return {
            **{name: rows[name] for name in ("time", "until", "thread", "count")},
            "state": state,
            "line": numbers[:, 0],
            "frame": numbers[:, 1],
        }

    def _place(self, key: tuple[int, int, bool], places: Places, is_own: Callable[[str], bool]) -> tuple[int, int]:
        """Numbers of two places: the innermost line of the user's code, and the innermost frame.

        The first is a `LINE`, whose parents are the user's lines that called it; 0 if there is none. It has no line
        number if the thread was running Python in that function itself: in a loop it would be another one in each
        sample. The second is a `FRAME`, whose parents are the frames between the two, up to the user's function itself.

        Args:
            key: chain, position of the innermost frame, and whether the thread was running Python.
            places: takes numbers for functions and lines.
            is_own: whether a file is the user's.
        """
        if key in self._placed:
            return self._placed[key]
        chain, position, moves = key
        frames = [(self._names.of(code), offset) for code, offset in self._names.chain(chain)]
        frames[0] = frames[0][0], position
        own = [number for number, (function, _) in enumerate(frames) if is_own(function.file)]
        line = frame = 0
        for number in reversed(own):
            function, offset = frames[number]
            shown = 0 if moves and number == 0 else function.line(offset)
            line = places.number(Place(LINE, line, function.name, function.file, shown))
        for function, offset in reversed(frames[: own[0] + 1 if own else _MAX_INNER]):
            place = Place(FRAME, frame, function.name, function.file, function.line(offset))
            frame = places.number(place)
        self._placed[key] = line, frame
        return line, frame
