"""Files that are cut, broken, empty, hostile or no trace at all: one clear error, or what could be read."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from typing import TYPE_CHECKING

import pytest

import forking
import thence
from helpers import STACK, kernel, opened_text, recording, unzipped, written
from thence.errors import DamagedInput, InputError, UnknownFormat
from thence.readers.kineto.events import decode

if TYPE_CHECKING:
    from pathlib import Path

EAGER = recording("torch_eager_rank0")
HOST = {"cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver", "overhead"}
GPU = {"kernel", "gpu_memcpy", "gpu_memset"}


def whole_events(text: str) -> list[dict[str, object]]:
    """Events that are complete in the text, one by one with the standard library's decoder."""
    decoder, events = json.JSONDecoder(), []
    position = text.index("[", text.index('"traceEvents"')) + 1
    while True:
        following = re.compile(r"[\s,]*").match(text, position)
        assert following is not None
        try:
            found, position = decoder.raw_decode(text, following.end())
        except ValueError:
            return events
        events.append(found)


def rows(text: str) -> tuple[int, int]:
    """How many rows of gpu and of host the complete events in the text make."""
    complete = [e for e in whole_events(text) if e["ph"] == "X"]
    return sum(e["cat"] in GPU for e in complete), sum(e["cat"] in HOST for e in complete)


@pytest.mark.parametrize(("path", "share"), [(EAGER, 0.2), (STACK, 0.61803), (EAGER, 0.95)])
def test_of_a_plain_file_cut_short_everything_before_the_cut_is_read(path: Path, share: float, tmp_path: Path) -> None:
    content = unzipped(path)
    cut = content[: int(len(content) * share)]
    trace = opened_text(tmp_path, cut)
    assert (trace.tables.gpu.height, trace.tables.host.height) == rows(cut.decode())
    assert any("cut short" in w for w in trace.meta.warnings)


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_of_a_gzipped_file_cut_short_everything_before_the_cut_is_read(share: float, tmp_path: Path) -> None:
    stored = EAGER.read_bytes()
    cut = stored[: int(len(stored) * share)]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(cut)
    trace = thence.open(path)
    trace.self_check()
    # What zlib gets out of it.
    text = zlib.decompressobj(wbits=31).decompress(cut).decode()
    assert (trace.tables.gpu.height, trace.tables.host.height) == rows(text)
    assert any("cut short" in w and "gzip" in w for w in trace.meta.warnings)


def test_a_file_cut_between_two_events_is_said_to_be_cut(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [kernel(1, 10), kernel(2, 20), kernel(3, 30)]})
    cut = text[: text.rindex("}, {") + 1]
    trace = opened_text(tmp_path, cut)
    assert trace.tables.gpu["start"].to_list() == [10_000, 20_000]
    assert any("cut short" in w for w in trace.meta.warnings)


def test_gzip_with_a_wrong_checksum_is_read_with_a_warning(tmp_path: Path) -> None:
    stored = bytearray(recording("graph_replay_rank0").read_bytes())
    stored[-8] ^= 0xFF
    path = tmp_path / "trace.json.gz"
    path.write_bytes(stored)
    trace = thence.open(path)
    # What cannot be trusted is the end: decompressed in steps, the last 32 kB may be missing.
    least, _ = rows(unzipped(recording("graph_replay_rank0"))[: -(1 << 15)].decode())
    assert 0 < least <= trace.tables.gpu.height <= 240
    assert any("gzip" in w for w in trace.meta.warnings)


def test_several_gzip_members_are_one_file(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [kernel(1, 10), kernel(2, 20)]}).encode()
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(text[:100]) + gzip.compress(text[100:]))
    assert thence.open(path).tables.gpu.height == 2


@pytest.mark.parametrize(
    "content",
    [
        b"hello",
        b"\x00\x01\x02\x03" * 1000,
        b'{"a": 1}',
        b"[1, 2, 3]",
        b"\x7fELF\x02\x01\x01",
        b"{" * 10,
        b"\xff\xfe{\x00",
        b"\x1f\x8b but no gzip",
        b"\x1f\x8b",
        gzip.compress(b"hello", mtime=0),  # part of the test's name, which must not change
        gzip.compress(b"", mtime=0),
    ],
)
def test_what_is_no_trace_is_named_as_such(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(str(path))):
        thence.open(path)


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.touch()
    with pytest.raises(UnknownFormat, match="is empty"):
        thence.open(path)


@pytest.mark.parametrize(
    "text",
    [
        '{"traceEvents": []}',
        '{"traceEvents": [',
        '{"schemaVersion": 1}',
        '{"traceEvents": 5}',
        '{"traceEvents": {"ph": "X"}}',
        '{"traceEvents": null}',
        '{"traceEvents": [1, "two", null]}',
        '{"schemaVersion": 1, "traceEvents": [{"ph": "X", "na',
    ],
)
def test_a_trace_without_any_event_is_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(DamagedInput):
        opened_text(tmp_path, text)


def test_events_of_wrong_types_leave_the_others_alone(tmp_path: Path) -> None:
    odd = [1, None, [], "x", {}, {"ph": 3}, {"ph": "X", "cat": ["kernel"], "args": 7}]
    odd += [kernel(1, 10, args={"grid": [1, 2], "block": "x", "device": {}, "stream": []})]
    trace = opened_text(tmp_path, json.dumps({"traceEvents": [*odd, kernel(2, 20)]}))
    assert trace.tables.gpu["start"].to_list() == [10_000, 20_000]
    assert trace.tables.gpu["grid"].to_list() == [None, None]


LIMITED = """
import resource, sys, thence
try:
    thence.open(sys.argv[1])
except thence.ThenceError as error:
    print(type(error).__name__, str(error)[-200:])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.parametrize(
    ("inside", "repeated"),
    [
        ("", '{"traceEvents":['),
        ('{"traceEvents": [{"ph": "X", "args": ', '{"a":'),
        ('{"traceEvents": [{"name": "', "\\"),
    ],
)
def test_endless_nesting_is_one_error_in_bounded_memory(inside: str, repeated: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"  # 20 MB, more than an event may have, that compress to some kB
    unit = repeated.encode()
    path.write_bytes(gzip.compress(inside.encode() + unit * (20_000_000 // len(unit)), 1))
    done = forking.run(["-c", LIMITED, str(path)], timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    message, megabytes = done.stdout.decode().strip().rsplit("\n", 1)
    assert "\n" not in message
    assert message.startswith(("DamagedInput", "UnknownFormat"))
    # The interpreter with Polars takes some 150 MB; 16 MB of one event become a few arrays.
    assert int(megabytes) < 800


def test_an_event_larger_than_any_real_one_is_an_error(tmp_path: Path) -> None:
    huge = kernel(1, 10, name="x" * (40 << 20))
    path = written(tmp_path / "trace.json", [kernel(2, 20), huge, kernel(3, 30)])
    with pytest.raises(DamagedInput, match="16 MB"):
        thence.open(path)


def test_a_directory_without_traces_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InputError, match=r"no trace in this directory.*\*\.json"):
        thence.open(tmp_path)


def test_a_directory_of_other_json_only_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"name": "x"}')
    with pytest.raises(InputError, match="holds no trace"):
        thence.open(tmp_path)


def test_a_glob_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file matches"):
        thence.open(tmp_path / "*.json")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.json: cannot be opened"):
        thence.open(tmp_path / "absent.json")


def test_a_path_that_is_none_is_an_error() -> None:
    with pytest.raises(InputError):
        thence.open("a\0b")


def test_other_json_beside_traces_is_skipped_with_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    written(folder / "trace.json", [kernel(1, 10)])
    (tmp_path / "package.json").write_text('{"name": "x"}')
    trace = thence.open(tmp_path)
    assert trace.tables.gpu.height == 1
    assert any("package.json: not a trace, skipped" in w for w in trace.meta.warnings)


def test_other_json_that_is_named_itself_is_an_error(tmp_path: Path) -> None:
    other = tmp_path / "package.json"
    other.write_text('{"name": "x"}')
    with pytest.raises(UnknownFormat, match=r"package\.json"):
        thence.open(written(tmp_path / "trace.json", [kernel(1, 10)]), other)


def test_the_same_file_twice_is_read_once(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.json", [kernel(1, 10)])
    assert thence.open(path, path, tmp_path).tables.gpu.height == 1


def test_two_files_that_claim_one_rank_are_told_apart_if_they_are_to_be_added(tmp_path: Path) -> None:
    for name in ("a", "b"):
        written(tmp_path / f"{name}.json", [kernel(1, 10)], distributedInfo={"rank": 3})
    trace = thence.open(tmp_path, add=True)
    assert sorted(trace.tables.gpu["rank"]) == [3, 4]
    assert any("rank already taken" in w for w in trace.meta.warnings)


def test_an_event_gives_the_same_whatever_its_neighbours_are(tmp_path: Path) -> None:
    """Keys in another order, and numbers of threads beyond 64 bits, beside an event of odd types."""
    events = [
        kernel(1, 10, 5),
        dict(reversed(kernel(2, 20, 5).items())),
        {**kernel(3, 30, 5), "tid": 1 << 70, "pid": (1 << 70) + 1},
        kernel(4, 40, 5),
    ]
    text = json.dumps({"schemaVersion": 1, "traceEvents": events})
    alone = opened_text(tmp_path, text).recorded.gpu
    assert alone.height == 4
    path = tmp_path / "beside.json"
    for odd in ('"no event"', "7", '{"ph": 5, "ts": {}}', '{"ph": "X", "args": []}'):
        path.write_text(text.replace("}}, {", "}}, " + odd + ", {", 1))
        assert thence.open(path).recorded.gpu.equals(alone), odd


def test_an_operator_keeps_its_inputs_beside_a_damaged_event() -> None:
    """Its hash of 19 digits made lenient decoding drop the inputs, which strict decoding keeps."""
    text = (
        '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 2, "ts": 1, "dur": 2, "args": '
        '{"Comms Id": 12345678901234567890, "Input Dims": [[2, 3]], "Concrete Inputs": ["1.5"]}}'
    )
    alone, beside = (decode(f"[{event}]".encode()) for event in (text, f'{text}, {{"tid": 1.5}}'))
    for columns in (alone, beside):
        inputs = columns["names"][columns["host.inputs"][0]]
        assert inputs == '{"dims":[[2,3]],"types":[],"strides":[],"values":["1.5"]}'
