"""The compiled unpickler gives what Python's way gives, or leaves the pickle to it."""

from __future__ import annotations

import io
import pickle
import random
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from readers.memory_snapshot.data import busy
from thence.errors import DamagedInput
from thence.readers.compiled import UNPICKLER
from thence.readers.memory_snapshot import tape as tapes
from thence.readers.memory_snapshot.tape import DICT, FLOAT, LIST, TEXT, TUPLE, Tape, read_tape, tape_of
from thence.readers.plain_pickle import PickleRefused, load_plain
from thence.readers.source import Source
from torch_allocator import snapshot

if TYPE_CHECKING:
    from pathlib import Path

compiled = pytest.mark.skipif(UNPICKLER.load() is None, reason="the unpickler was not built")
MUTANTS = 600


def value_of(tape: Tape, cell: Any, depth: int = 0) -> Any:
    """The value of a cell as Python's objects."""
    kind, number = int(cell) & 7, int(cell) >> 3
    if depth > 90:
        raise RecursionError
    if kind == 0:
        return [None, False, True][number]
    if kind == TEXT:
        return tape.texts[number]
    if kind == FLOAT:
        return float(tape.large[number : number + 1].view(np.float64)[0])
    if kind in (LIST, TUPLE):
        elements = [value_of(tape, element, depth + 1) for element in tape.elements(cell)]
        return elements if kind == LIST else tuple(elements)
    if kind == DICT:
        one = np.array([cell], np.uint32)
        return {key: value_of(tape, tape.field(one, key)[0], depth + 1) for key in tape.keys(cell)}
    return int(tape.integers(np.array([cell], np.uint32))[0][0])


def by_machine(content: bytes, piece: int = 1 << 30) -> Tape | None:
    """The tape by the compiled unpickler, fed in pieces of so many bytes; None if it refuses, or the pickle is cut."""
    module = UNPICKLER.load()
    assert module is not None
    machine, rest, state = module.Machine(), b"", module.MORE
    for begin in range(0, len(content), piece):
        rest += content[begin : begin + piece]
        consumed, state = machine.feed(rest)
        rest = rest[consumed:]
        if state != module.MORE:
            break
    columns = machine.take() if state == module.DONE else None
    return None if columns is None else tapes._of_columns(columns, "a pickle", len(content))


SNAPSHOT = snapshot(busy(seed=1, steps=30))
VALUES = [
    SNAPSHOT,
    {"segments": [], "device_traces": [[], [{}]], "x": [(), (1, -1, 2**40, -(2**59), 1.5, None, True)]},
    {"a": [list(range(2500)), "ü" * 300, "\ud800", {"b": {"c": []}}, {}]},
]


@compiled
@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("value", VALUES, ids=["snapshot", "values", "batches"])
def test_values_of_every_protocol_and_in_pieces_of_any_size(value: Any, protocol: int) -> None:
    content = pickle.dumps(value, protocol)
    for piece in (1 << 30, 7):
        tape = by_machine(content, piece)
        assert tape is not None
        assert value_of(tape, tape.root) == value
    in_python = tape_of(load_plain(content, 1 << 62), len(content))
    assert value_of(in_python, in_python.root) == value


def mutant(content: bytes, dice: random.Random) -> bytes:
    """A pickle with opcodes and lengths changed, and parts moved or repeated."""
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 2, 5))):
        at = dice.randrange(len(changed))
        kind = dice.randrange(4)
        if kind == 0:
            changed[at] = dice.choice(b"}](ue.as\x94\x85\x86\x87t)hjqrNKMJGX\x8c\x8a\x88\x89\x95\x80\x00\xff")
        elif kind == 1:
            changed[at] = dice.randrange(256)
        elif kind == 2:
            del changed[at : at + dice.choice((1, 2, 9))]
        else:
            begin = dice.randrange(len(changed))
            changed[at:at] = changed[begin : begin + dice.choice((1, 3, 20))]
    return bytes(changed)


@compiled
def test_what_the_machine_accepts_python_accepts_with_equal_values() -> None:
    dice = random.Random(44)
    contents = [pickle.dumps(value, protocol) for value in (VALUES[1], snapshot(busy(2, 8))) for protocol in (2, 4)]
    accepted = 0
    for _ in range(MUTANTS):
        content = mutant(dice.choice(contents), dice)
        try:
            tape = by_machine(content, dice.choice((1 << 30, 16)))
            found = None if tape is None else value_of(tape, tape.root)
        except (DamagedInput, RecursionError):
            continue
        if tape is None:
            continue
        accepted += 1
        try:
            assert repr(load_plain(content, 1 << 62)) == repr(found)
        except PickleRefused as error:
            assert "nested too deeply" in str(error)  # noqa: PT017 - the tape has no limit of depth
    assert accepted > MUTANTS // 10


HOSTILE = {
    "code": b"\x80\x04cos\nsystem\n(X\x02\x00\x00\x00idtR.",
    "memo of 2^29": b"\x80\x04}r\x00\x00\x00\x20.",
    "text of 2^62 bytes": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x3f" + b"x" * 100,
    "marks": b"\x80\x04" + b"(" * 100_000,
    "key twice": b"\x80\x04}(K\x01N",
    "dict of a list": b"\x80\x04](\x8c\x01aNu.",
    "list of a dict": b"\x80\x04}(Ne.",
    "below the mark": b"\x80\x04]((ee.",
    "no value": b"\x80\x04.",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("way", ["compiled", "python"])
def test_hostile_pickles_are_refused(content: bytes, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNPICKLER.variable, way)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)
    with Source.open(str(path)) as source, pytest.raises(DamagedInput):
        read_tape(source, lambda _done: None)


@compiled
@pytest.mark.parametrize("part", [b"\x94", b"(", b"N", b"]"], ids=["memo", "marks", "stack", "lists"])
def test_memory_is_limited_by_what_was_read(part: bytes) -> None:
    """Each of these opcodes takes 4 bytes or more, so 32 MB of them would take 128 MB or more."""
    module = UNPICKLER.load()
    assert module is not None
    machine = module.Machine()
    state, fed = machine.feed(b"\x80\x04N")[1], 3
    piece = part * (1 << 20)
    while state == module.MORE and fed < 1 << 25:
        consumed, state = machine.feed(piece)
        fed += consumed
    assert state == module.REFUSED


def test_without_the_machine_large_files_are_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(UNPICKLER.variable, "python")
    monkeypatch.setattr(tapes, "_MAX_IN_PYTHON", 1000)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(SNAPSHOT))
    with Source.open(str(path)) as source, pytest.raises(DamagedInput, match="thence doctor says why"):
        read_tape(source, lambda _done: None)


def test_objects_that_a_pickle_refers_to_many_times_are_visited_once() -> None:
    """30 lists of two references each describe 2^30 elements."""
    value: list[Any] = []
    for _ in range(30):
        value = [value, value]
    out = io.BytesIO()
    pickle.dump({"segments": value}, out)
    tracemalloc.start()
    in_python = tape_of(load_plain(out.getvalue(), 1 << 62), 0)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
    assert len(in_python.lists) == 31
    if UNPICKLER.load() is not None:
        tape = by_machine(out.getvalue())
        assert tape is not None
        assert len(tape.lists) == 31
