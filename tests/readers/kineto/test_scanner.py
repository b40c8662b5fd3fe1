"""The compiled scanner gives what msgspec gives, or refuses."""

from __future__ import annotations

import functools
import json
import random
import sys
from collections import deque
from decimal import Decimal
from itertools import islice, repeat
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import RECORDINGS, TORCH, assert_same_tables, examples, kernel, output, recording, unzipped
from readers.kineto.test_fuzz import CHANGES
from thence.readers import registry
from thence.readers.compiled import SCANNER
from thence.readers.kineto import decoding, early_start, envelope, events, processes
from thence.readers.kineto.envelope import Piece
from thence.readers.kineto.scanner import is_scanned, scanned

if TYPE_CHECKING:
    from pathlib import Path

    from thence.model.arrays import Array

pytestmark = pytest.mark.skipif(SCANNER.load() is None, reason="the scanner was not built")
settings.register_profile("thence", deadline=None, max_examples=examples(200))
settings.load_profile("thence")


def in_python(piece: bytes, *, annotated: bool = False) -> dict[str, Any]:
    """The columns of a piece by msgspec."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SCANNER.variable, "python")
        return events.decode(piece, annotated=annotated)


def assert_same_columns(piece: bytes) -> None:
    for annotated in (False, True):
        found, expected = events.decode(piece, annotated=annotated), in_python(piece, annotated=annotated)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            if isinstance(values, np.ndarray):
                np.testing.assert_array_equal(found[name], values, err_msg=name, strict=True)
            else:
                assert found[name] == values, name


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_recordings_are_scanned_and_give_the_same_columns(path: Path) -> None:
    content = unzipped(path)
    inner = content[envelope._EVENTS_KEY.search(content).end() :]  # type: ignore[union-attr]
    piece = b"[" + inner[: envelope.boundaries(inner).array_end] + b"]"
    assert is_scanned(piece)
    assert_same_columns(piece)


ODD = (
    "", "null", '"', "\\", "é", "\u2028", "𝄞", "\x7f", "\x00", "a" * 40, "X", "M", "s", "B", "thread_name", "kernel",
    "cpu_op", "fwdbwd", "cuda_sync", "Trace", "1", "1.5", "GPU 0 Counters",
)  # fmt: skip
CATEGORIES = ("kernel", "cpu_op", "cuda_runtime", "fwdbwd", "cuda_sync", "Trace", "hardware_counters")
odd_texts = st.lists(st.sampled_from(ODD), max_size=3).map("".join)
odd_integers = st.sampled_from(
    [0, 1, -1, 7, 10**15, 10**18, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 10**30]
) | st.integers(0, 20)
odd_values = st.recursive(
    st.none() | st.booleans() | odd_integers | odd_texts | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd_texts, inner, max_size=2),
    max_leaves=5,
)
integers = st.integers(0, 9) | st.integers(0, 9) | odd_values
threes = st.lists(st.integers(0, 2**40), min_size=3, max_size=3) | odd_values
inputs = st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=3) | odd_values
ARGUMENTS = {
    **dict.fromkeys(("correlation", "device", "stream", "External id", "bytes", "fromDevice", "graph id"), integers),
    **dict.fromkeys(("graph node id", "Sequence number", "Fwd thread id", "event_id", "original_stream"), integers),
    **dict.fromkeys(("grid", "block"), threes),
    **dict.fromkeys(("Input Dims", "Input type", "Input Strides", "Concrete Inputs"), inputs),
    **dict.fromkeys(("name", "Collective name", "dtype", "Process Group Ranks", "In split size"), odd_texts | integers),
    **dict.fromkeys(("Seq", "Group size", "In msg nelems"), integers),
    **dict.fromkeys(
        ("kernel", "kernel_file", "kernel_hash", "kernel_backend", "annotation", "str"), odd_texts | integers
    ),
    **dict.fromkeys(("module", "label_rule", "label", "annotations", "stack", "unknown"), odd_texts | odd_values),
}
objects = st.fixed_dictionaries(
    {},
    optional={
        "ph": st.sampled_from("XXXXMsfBCC") | odd_values,
        "cat": st.sampled_from(CATEGORIES) | odd_values,
        "name": odd_texts | odd_values,
        "pid": integers | odd_texts,
        "tid": integers | odd_texts,
        "ts": st.integers(0, 10**16) | st.floats(0, 1e16) | odd_values,
        "dur": st.integers(0, 10**16) | st.floats(0, 1e16) | odd_values,
        "id": integers,
        "args": st.fixed_dictionaries({}, optional=ARGUMENTS) | odd_values,
        "other": odd_values,
    },
)


@given(st.lists(objects, max_size=6), st.booleans(), st.sampled_from([None, 1]))
def test_events_of_any_values_give_the_same_columns(document: list[Any], ascii_only: bool, indent: int | None) -> None:
    assert_same_columns(json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "replace"))


@functools.cache
def recorded_pieces() -> list[bytes]:
    """Some events each, from everywhere in recordings of each kind."""
    names = ("torch_fsdp_rank1", "graph_replay_rank0", "torch-2.12_graph_replay_rank0", "torch_compile_rank0")
    documents = [json.loads(unzipped(recording(name)))["traceEvents"] for name in names]
    return [json.dumps(d[at : at + 6], indent=1).encode() for d in documents for at in range(0, len(d), len(d) // 40)]


@pytest.mark.parametrize("change", CHANGES[1:], ids=lambda change: change.__name__)
def test_damaged_pieces_give_the_same_columns(change: Any) -> None:
    dice = random.Random(11)
    pieces = recorded_pieces()
    for number in range(examples(100)):
        inner = pieces[number * 11 % len(pieces)][1:-1]  # of all recordings
        assert_same_columns(b"[" + change(inner, dice) + b"]")


EVENT = b'{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1.5,"dur":2,"args":{"stream":7}}'


@pytest.mark.parametrize(
    "piece",
    [
        b"[]",
        b" [ ] ",
        b"[" + EVENT + b"]",
        b"[" + EVENT + b" ,\n\t" + EVENT + b"\r]",
        b"[{}, {}]",
        b'[{"args": {}}]',
        b'[{"name": "\\u00e9 \\n \\" \xc3\xa9", "cat": "kernel", "ts": 1}]',
        b'[{"unknown": [{"a": [1, -2.5e+3, true, false, null, "]}"]}, [], {}]}]',
    ],
)
def test_valid_pieces_are_scanned(piece: bytes) -> None:
    assert is_scanned(piece)
    assert_same_columns(piece)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"cat":', b'"cat" :'),
        (b'"cat":', b'"cat": '),
        (b',"cat"', b'"cat"'),
        (b',"cat"', b',,"cat"'),
        (b',"cat":', b',"cat"'),
        (b',"cat":', b',"cats":'),
        (b',"cat":', b',"ca\\u0074":'),
        (b'{"ph"', b'{,"ph"'),
        (b'{"ph"', b'"ph"'),
        (b'{"ph"', b'{{"ph"'),
        (b'"k"', b'"k'),
        (b'"k"', b'"kk"'),
        (b'"k"', b'"k"k'),
        (b'"tid":7', b'"tid":77'),
        (b'"tid":7', b'"tid":7.5'),
        (b'"stream":7', b'"stream":'),
        (b'"stream":7}}', b'"stream":7,"ph":"X"}}'),
        (b'"stream":7}}', b'"stream":7,}}'),
        (b'"stream":7}}', b'"stream":7'),
        (b',"args":', b',"ts":1,"args":'),
    ],
)
def test_an_event_nearly_like_those_before_it_gives_the_same_columns(before: bytes, after: bytes) -> None:
    """The scanner expects of an event what it read of the last one of its kind, and must see each difference."""
    for number in (0, 1, 2):
        events = [EVENT] * 3
        events[number] = EVENT.replace(before, after)
        assert_same_columns(b"[" + b",".join(events) + b"]")


@pytest.mark.parametrize(
    "piece",
    [
        b"",
        b"{}",
        b"[",
        b"[" + EVENT,
        b"[" + EVENT[:-1],
        b"[" + EVENT + b",]",
        b"[" + EVENT + EVENT + b"]",
        b"[" + EVENT + b"] x",
        b"[1]",
        b"[null]",
        b'[{"a" 1}]',
        b'[{"a": 1,}]',
        b'[{"a": [1 2]}]',
        b'[{"a": [1,]}]',
        b'[{"a": {"b"}}]',
        b'[{"a": [}]}]',
        b'[{"a": 01}]',
        b'[{"a": 1.}]',
        b'[{"a": .5}]',
        b'[{"a": 1e}]',
        b'[{"a": +1}]',
        b'[{"a": tru}]',
        b'[{"a": NaN}]',
        b'[{"a": "\\x"}]',
        b'[{"a": "\\u12g4"}]',
        b'[{"a": "\\ud800"}]',
        b'[{"a": "\n"}]',
        b'[{"a": "\xff"}]',
        b'[{"a": "',
        b'[{"a": "\\',
        b'[{"\\u0070h": "X"}]',
        b'[{"args": {}, "args": {}}]',
        b'[{"args": null}]',
        b'[{"name": "a", "name": "b"}]',
        b'[{"tid": 1.5, "tid": 2}]',
        b'[{"name": 1}]',
        b'[{"pid": 1.5}]',
        b'[{"id": "text"}]',
        b'[{"ts": "1"}]',
        b'[{"ts": 1e3}]',
        b'[{"ts": 1234567890123456}]',
        b'[{"args": {"stream": 9223372036854775808}}]',
        b'[{"args": {"graph node id": -1}}]',
        b'[{"args": {"grid": [1, 2]}}]',
        b'[{"args": {"grid": [1, 2, 3, 4]}}]',
        b'[{"args": {"grid": null}}]',
        b'[{"args": {"dtype": 5}}]',
        b'[{"a": ' + b"[" * 65 + b"]" * 65 + b"}]",
    ],
)
def test_what_is_unusual_is_refused_and_read_in_python(piece: bytes) -> None:
    assert not is_scanned(piece)
    assert_same_columns(piece)


@given(st.integers(0, 10**15 - 1), st.text("0123456789", max_size=12), st.booleans())
def test_times_are_exact(whole: int, decimals: str, negative: bool) -> None:
    text = f"{'-' * negative}{whole}" + f".{decimals}" * bool(decimals)
    rows = scanned(f'[{{"ts": {text}}}]'.encode())
    if len(str(whole) + decimals) > 18:
        assert rows is None
    else:
        assert rows is not None
        assert rows().times("ts").tolist() == [round(Decimal(text) * 1000)]


@pytest.mark.parametrize("digits", [1, 7, 8, 9, 15, 16, 17, 18, 19])
@pytest.mark.parametrize("room", [0, 7, 8, 15, 16, 24])
def test_integers_of_any_length_are_exact_also_near_the_end(digits: int, room: int) -> None:
    number = int("1234567890123456789"[:digits])
    written = b'[{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":1,"args":{"bytes":%d}}]' % number
    piece = np.frombuffer(written + b" " * room, np.uint8).copy().data
    rows = scanned(piece)
    assert rows is not None
    assert rows().integers("bytes").tolist() == [number]


@pytest.mark.parametrize("wrong", [b'{"dur":2', b'["dur":2', b',,"dur":2', b',"dur":2,', b'"dur":2', b'}{"dur":2'])
def test_what_is_between_values_is_not_mixed_up_with_a_beginning(wrong: bytes) -> None:
    event = b'{"ts":1,"dur":2,"ph":"X","cat":"kernel","name":"k","args":{"dur":2,"bytes":1}}'
    events_before = b",".join([event, b'{"dur":2}', b'{"dur":2,"ts":1}'] * 3)
    piece = b"[" + events_before + b',{"ts":1' + wrong + b',"ph":"X"}]'
    assert not is_scanned(piece)
    assert_same_columns(piece)


def test_columns_take_no_more_memory_than_some_times_the_piece() -> None:
    """One event with every argument, after a million without any, would fill a million rows of every column."""
    keys = ("External id", "correlation", "device", "stream", "bytes", "grid", "block", "graph id", "graph node id")
    last = {"args": {key: [1, 2, 3] if key in ("grid", "block") else 1 for key in keys}}
    assert is_scanned(b"[" + b"{}," * 1_000 + json.dumps(last).encode() + b"]")
    piece = b"[" + b"{}," * 1_000_000 + json.dumps(last).encode() + b"]"
    assert not is_scanned(piece)


def test_texts_made_to_collide_are_refused() -> None:
    """The hash of a text of eight bytes, as `hash_of` computes it."""

    def mixed(words: Array) -> Array:
        hashes = words * np.uint64(0xD6E8FEB86659FD93)
        return hashes ^ (hashes >> np.uint64(32))

    texts = np.array([f'"{number:06}"'.encode() for number in range(420_000)])
    hashes = mixed(mixed(texts.view("<u8") ^ mixed(np.array([8], np.uint64))))
    same = texts[(hashes & np.uint64(4095)) == 7][:100].tolist()
    objects = ", ".join(f'{{"cat": "kernel", "name": {text.decode()}, "ts": 1, "dur": 1}}' for text in same)
    piece = f"[{objects}]".encode()
    assert not is_scanned(piece)
    assert_same_columns(piece)


def test_many_distinct_texts_are_numbered() -> None:
    document = [kernel(n, n, name=f"kernel {n}", tid=n % 5_000, pid=n % 3) for n in range(8_000)]
    piece = json.dumps(document).encode()
    assert is_scanned(piece)
    assert_same_columns(piece)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of several pieces, which two threads read."""
    path = tmp_path / "rank0.json"
    path.write_bytes(unzipped(recording("torch_eager_rank0")))
    for name, size in (("PIECE_BYTES", 100_000), ("_WINDOW_BYTES", 50_000), ("_READ_BYTES", 25_000)):
        monkeypatch.setattr(envelope, name, size)
    for module in (early_start, decoding):
        monkeypatch.setattr(module, "BYTES_BEFORE_PROCESSES", 1)
    monkeypatch.setattr(processes, "PIECE_BYTES", 100_000)
    monkeypatch.setattr(processes, "_usable_cores", lambda: 2)
    return path


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_count: int) -> None:
        pytest.fail("decoding processes were started")

    monkeypatch.setattr(processes.Processes, "start", refused)


@given(st.lists(st.integers(-1, 9)))
def test_numbers_are_renumbered_in_the_order_of_their_first_appearance(numbers: list[int]) -> None:
    compiled: Any = SCANNER.load()
    column, codes = np.array(numbers, np.int32), np.empty(len(numbers), np.int32)
    order = np.frombuffer(compiled.in_order(column, codes), np.int32)
    assert order.tolist() == list(dict.fromkeys(numbers))
    assert order[codes].tolist() == numbers


@pytest.mark.parametrize(("numbers", "codes"), [([-2], 1), ([0, 1], 1), ([], 1)])
def test_columns_that_cannot_be_renumbered_are_refused(numbers: list[int], codes: int) -> None:
    compiled: Any = SCANNER.load()
    with pytest.raises(ValueError, match="int32"):
        compiled.in_order(np.array(numbers, np.int32), np.empty(codes, np.int32))


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("ahead", [False, True])
def test_threads_give_the_same_tables(small: Path, ahead: bool) -> None:
    expected = registry.read([small], cores=1)
    if ahead:
        early_start.begin(str(small))
    assert_same_tables(registry.read([small]), expected)


@pytest.mark.usefixtures("no_processes")
def test_decoding_that_nobody_asks_for_ends(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    stop = decoding._Threads.stop
    monkeypatch.setattr(decoding._Threads, "stop", lambda self: ended.append(stop(self)))
    early_start.begin(str(small))
    assert not ended
    early_start.forget()
    assert len(ended) == 1


def piece(text: bytes) -> Piece:
    return Piece(0, len(text), text)


@pytest.mark.usefixtures("no_processes")
def test_threads_keep_the_order_and_read_odd_pieces_in_python() -> None:
    texts = [EVENT.replace(b'"k"', f'"k{n}"'.encode()) for n in range(40)]
    texts[20] = texts[20].replace(b'"stream":7', b'"stream":"7"')
    found = list(decoding.decoded(map(piece, texts), "no file", 1 << 30, 3))
    assert [columns["names"] for columns in found] == [[f"k{n}"] for n in range(40)]
    assert {tuple(columns["gpu.stream"].tolist()) for columns in found} == {(7,)}


@pytest.mark.usefixtures("no_processes")
def test_whoever_stops_asking_ends_the_threads() -> None:
    found = decoding.decoded(map(piece, repeat(EVENT)), "no file", 1 << 30, 2)
    deque(islice(found, 3), maxlen=0)
    found.close()
    assert next(found, None) is None


def test_processes_read_a_file_whose_first_piece_is_odd(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    start = processes.Processes.start
    monkeypatch.setattr(processes.Processes, "start", lambda count: (started.append(count), start(count))[1])
    odd = EVENT.replace(b'"stream":7', b'"stream":"7"')
    found = list(decoding.decoded(map(piece, [odd, EVENT, EVENT]), "no file", 1 << 30, 2))
    assert [columns["gpu.stream"].tolist() for columns in found] == [[7]] * 3
    assert started == [2]


def test_a_scanner_of_an_earlier_source_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = ModuleType(SCANNER.module)
    earlier.__file__ = "_scanner.abi3.so"
    vars(earlier).update(Scanner=None, parents=None)
    monkeypatch.setitem(sys.modules, SCANNER.module, earlier)
    told = output(capsys, "report", TORCH / "torch_eager_rank0.json.gz", code=2)[1]
    assert told.startswith(
        "thence: _scanner.abi3.so: was compiled from another version of thence; install thence again"
    )
    assert len(told.splitlines()) == 1
    monkeypatch.setenv(SCANNER.variable, "python")
    assert SCANNER.load() is None
