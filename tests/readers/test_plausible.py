"""Hostile inputs: an error in a sentence, or what was read with a warning; never an exception of another kind."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import struct
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import polars as pl
import pytest

import thence
from helpers import event, kernel, launch, opened, opened_text, run_thence, written
from thence.cli import main
from thence.errors import ThenceError
from thence.inside.files import load
from thence.model.column_file import DamagedPart, decode
from thence.model.tables import GPU, HOST, PROGRAMS, Meta, Tables
from thence.readers.plausible import plausible, with_affordable_names

if TYPE_CHECKING:
    from pathlib import Path

HUGE = 1 << 70


def gpu(**columns: list[Any]) -> Tables:
    rows = {
        "rank": [0, 0], "device": [0, 0], "stream": [7, 7], "kind": ["kernel"] * 2, "name": ["a", "b"],
        "start": [10, 20], "duration": [5, 5],
    } | columns  # fmt: skip
    return Tables(gpu=GPU.frame(rows), meta=Meta(inputs=("x",), formats=("made",)))


def totals(trace: thence.Trace) -> dict[str, int]:
    durations = trace.tables.gpu["duration"].to_list()
    assert all(ns >= 0 for ns in durations)
    summary = trace.report()
    assert summary.sum_ns == sum(durations)
    assert summary.span_ns >= 0
    return dict(zip(trace.tables.gpu["name"].to_list(), durations, strict=True))


def test_tables_that_are_as_they_must_be_stay_the_same() -> None:
    tables = gpu()
    assert plausible(tables, "x") is tables


def test_an_impossible_time_of_the_clock_s_zero_is_unknown() -> None:
    tables = gpu()
    tables = dataclasses.replace(tables, meta=dataclasses.replace(tables.meta, epoch_ns=9_227_837_584_286_749_201))
    meta = plausible(tables, "x").meta
    assert meta.epoch_ns is None
    assert meta.warnings == ("x: states an impossible time at which its clock reads 0, so that time is unknown",)


@pytest.mark.parametrize("column", ["rank", "device", "stream", "kind", "name", "start", "duration"])
def test_a_row_without_what_every_row_has_is_refused(column: str) -> None:
    known = gpu().gpu[column].to_list()[0]
    with pytest.raises(thence.DamagedInput, match=f"x: has rows of the table gpu without {column}"):
        plausible(gpu(**{column: [known, None]}), "x")


@pytest.mark.parametrize("column", ["process", "thread", "category", "name", "start", "duration"])
def test_a_host_range_without_what_every_range_has_is_refused(column: str) -> None:
    known = {
        "rank": [0], "process": [1], "thread": [1], "category": ["op"], "name": ["mm"], "start": [0],
        "duration": [10],
    }  # fmt: skip
    whole = Tables(host=HOST.frame(known), meta=Meta(inputs=("x",), formats=("made",)))
    assert plausible(whole, "x") is whole
    lacking = Tables(host=HOST.frame(known | {column: [None]}), meta=whole.meta)
    with pytest.raises(thence.DamagedInput, match=f"x: has rows of the table host without {column}"):
        plausible(lacking, "x")


@pytest.mark.parametrize("start", [5 * 10**18, -5 * 10**18])
def test_a_time_that_no_clock_shows_is_refused(start: int) -> None:
    with pytest.raises(thence.DamagedInput, match="1 device activity with an impossible time"):
        plausible(gpu(start=[0, start]), "x")


@pytest.mark.parametrize(("column", "what"), [("start", "execution"), ("launch", "launch")])
def test_a_time_of_a_program_that_no_clock_shows_is_refused(column: str, what: str) -> None:
    known = {
        "rank": [0],
        "device": [0],
        "program": ["p"],
        "name": ["jit_step"],
        "execution": [0],
        "start": [10],
        "duration": [5],
    }
    programs = PROGRAMS.frame(known | {column: [-(1 << 63)]})
    with pytest.raises(thence.DamagedInput, match=f"1 program {what} with an impossible time"):
        plausible(dataclasses.replace(gpu(), programs=programs), "x")


@pytest.mark.parametrize("duration", [-1, 200 * 86_400 * 10**9])
def test_a_duration_that_cannot_be_counts_as_0_and_is_a_loss(duration: int) -> None:
    mended = plausible(gpu(duration=[5, duration]), "x")
    assert mended.gpu["duration"].to_list() == [5, 0]
    assert "x: 1 device activity and 0 host ranges" in mended.meta.warnings[0]
    assert [(loss.code, loss.count) for loss in mended.meta.losses] == [("repaired", 1)]


def test_durations_that_overflow_together_are_refused() -> None:
    day = 86_400 * 10**9
    rows = 70_000
    many = gpu(
        **{c: gpu().gpu[c].to_list()[:1] * rows for c in ("rank", "device", "stream", "kind", "name")},
        start=[0] * rows, duration=[99 * day] * rows,
    )  # fmt: skip
    with pytest.raises(thence.DamagedInput, match="more than a century"):
        plausible(many, "x")


ODD = [
    kernel(9, 1, name="odd", args={"grid": [HUGE, 1, 1]}),
    kernel(9, 1, name="odd", args={"Collective name": "allreduce", "Process Group Ranks": [HUGE]}),
    kernel(9, "1\n2", name="odd"),
    kernel(9, 1, HUGE, name="odd"),
    kernel(9, 9223372036854775.0, 9223372036854775.0, name="odd"),
    kernel(9, 9e15, 9e15, name="odd"),
    kernel(9, -9e15, 1, name="odd"),
    kernel(9, 1, name="odd", tid=HUGE, pid=HUGE),
    event("cpu_op", "odd", 1, 1, args={"Fwd thread id": HUGE}),
    kernel(9, 1, name="odd", args={"graph node id": HUGE, "label_rule": "x", "label_confidence": 10**400}),
    kernel(9, 1, name="odd", args={"block": [1, 1]}),
]  # fmt: skip


OTHERS = [
    launch(1, 10),
    # Numbers as text and as floats are read in either decoding; ints beyond 64 bits in neither.
    kernel(1, "20.125", 5.0625, name="text", args={"stream": 9.0, "bytes": 3}),
    kernel(2, 30, 7, name="plain"),
]
ALONE = {"text": 5062, "plain": 7000}  # half to even


def test_numbers_as_text_and_as_floats_are_read(tmp_path: Path) -> None:
    assert totals(opened(tmp_path, OTHERS)) == ALONE


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_an_odd_event_does_not_change_what_its_neighbours_are(tmp_path: Path, odd: Any) -> None:
    """Whatever is odd in one event, the others of its piece are read as they are without it."""
    trace = opened(tmp_path, [*OTHERS[:2], odd, *OTHERS[2:]])
    found = totals(trace)
    found.pop("odd", None)
    assert found == ALONE
    assert trace.tables.gpu.filter(name="text")["stream"].to_list() == [9]


def test_events_that_begin_with_any_usual_key_are_found_beside_a_broken_one(tmp_path: Path) -> None:
    """Where one event is no JSON, the others are cut out of the text by how events begin."""
    fields = kernel(1, 20, 5)
    texts = []
    for first in ("dur", "tid", "ts", "name"):
        turned = {first: fields[first], **fields, "name": f"first {first}"}
        if first == "name":
            turned = {"name": "first name", **turned}
        texts.append(json.dumps(turned))
    text = '{"traceEvents": [{"ph": "X", "name": "broken" "}, ' + ", ".join(texts) + "]}"
    assert set(totals(opened_text(tmp_path, text))) == {
        "first dur", "first tid", "first ts", "first name",
    }  # fmt: skip


def test_a_second_list_of_events_is_told(tmp_path: Path) -> None:
    one, two = (json.dumps(kernel(i, 10 * i, name=f"k{i}")) for i in (1, 2))
    trace = opened_text(tmp_path, f'{{"traceEvents": [{one}], "traceEvents": [{two}]}}')
    assert trace.tables.gpu["name"].to_list() == ["k1"]
    assert any("holds a second list of events" in text for text in trace.meta.warnings)


def named_nothing(path: Path) -> Path:
    """A zip file with a member that has no name."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "content")
    data = path.read_bytes()
    local, central = data.index(b"PK\x03\x04"), data.index(b"PK\x01\x02")
    end = data.index(b"PK\x05\x06")
    local_part = data[: local + 26] + b"\0\0" + data[local + 28 : central].replace(b"a", b"", 1)
    central_part = (data[central : central + 28] + b"\0\0" + data[central + 30 : end]).replace(b"a", b"", 1)
    tail = bytearray(data[end:])
    tail[12:20] = struct.pack("<II", len(central_part), len(local_part))
    path.write_bytes(local_part + central_part + bytes(tail))
    return path


def test_a_zip_member_without_a_name_is_no_exception(tmp_path: Path) -> None:
    path = named_nothing(tmp_path / "x.zip")
    with pytest.raises(ThenceError):
        thence.open(path)
    with pytest.raises(DamagedPart):
        decode(path.read_bytes())
    with pytest.raises(ThenceError):
        load(path)


def unclosed(path: Path, member: str) -> Path:
    """An .npz file with an array whose header opens a bracket and never closes it."""
    np.savez(path, **{member: np.zeros(2, np.int64)})
    with zipfile.ZipFile(path) as archive:
        content = archive.read(f"{member}.npy").replace(b"(2,), }", b"(2,(, ")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{member}.npy", content)
        archive.writestr("description.npy", content)
    return path


def test_an_unclosed_header_of_an_array_is_no_exception(tmp_path: Path) -> None:
    with pytest.raises(ThenceError):
        load(unclosed(tmp_path / "x.npz", "buffer"))


def test_a_file_name_that_is_no_text_is_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path / "t.json", [launch(1, 10), kernel(1, 20)])
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.json")
    source.rename(odd)
    with pytest.raises(ThenceError, match=r"\\xff.json: its name is not valid UTF-8"):
        thence.open(odd)
    with pytest.raises(SystemExit) as stopped:
        main(["report", odd])
    assert stopped.value.code == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_arrow_data_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    frame = pl.DataFrame({"start": [1], "end": [2]})
    path = tmp_path / "CUPTI_ACTIVITY_KIND_KERNEL.arrow"
    frame.write_ipc(path)
    whole = path.read_bytes()
    for at in range(8, len(whole), len(whole) // 8):
        path.write_bytes(whole[:at] + b"\xff\xff\xff\x7f" + whole[at + 4 :])
        try:
            thence.open(tmp_path)
        except ThenceError:
            continue


def test_more_rows_than_polars_counts_are_all_rows(tmp_path: Path) -> None:
    source = written(tmp_path / "t.json", [launch(1, 10), kernel(1, 20)])
    done = run_thence("report", source, "--top", str(10**20))
    assert done.returncode == 0, done.stderr
    assert done.stdout == run_thence("report", source, "--top", "1000").stdout


def test_ctrl_c_is_left_to_the_process_that_asked() -> None:
    """A terminal sends it to the decoding processes as well: they print nothing, and end with their input."""
    child = subprocess.Popen(
        [sys.executable, "-m", "thence.readers.kineto.decoding", "0", "1"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    piece = {"offset": 0, "size": 2, "events": b"{}", "annotated": False}
    message = msgspec.msgpack.encode(("x", piece))
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(len(message).to_bytes(8, "little") + message)
    child.stdin.flush()
    assert len(child.stdout.read(8)) == 8  # it has begun
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (0, b"")


def test_a_cache_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nsys").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "nsys").chmod(0o755)
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "r.nsys-rep").write_bytes(b"report")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(thence.MissingRequirement, match="set XDG_CACHE_HOME to another folder"):
        thence.open(tmp_path / "r.nsys-rep")


def test_a_user_without_a_home_is_told_how_to_name_a_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")  # as pathlib says it

    (tmp_path / "r.nsys-rep").write_bytes(b"report")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", no_home)
    with pytest.raises(thence.MissingRequirement, match="no home directory; set XDG_CACHE_HOME"):
        thence.open(tmp_path / "r.nsys-rep")


def test_names_that_too_many_rows_refer_to_are_shortened_and_stay_different() -> None:
    """Two names of a million characters, and 20,000 rows: 20 GB, if each row had its own."""
    names = ["x" * 1_000_000 + "1", "x" * 1_000_000 + "2", "short"]
    rows = 20_000
    columns = {
        "rank": [0] * rows, "device": [0] * rows, "stream": [7] * rows, "kind": ["kernel"] * rows,
        "name": pl.Series(names, dtype=pl.Categorical()).gather(np.arange(rows) % 3),
        "start": range(rows), "duration": [1] * rows,
    }  # fmt: skip
    tables = Tables(gpu=GPU.frame(columns), meta=Meta(inputs=("x",), formats=("made",)))
    narrow = with_affordable_names({"x": tables})["x"]
    assert narrow.meta.warnings == ("x: its longest names are shortened, because rows refer to them too often",)
    count = narrow.gpu["name"].cast(pl.String).value_counts(sort=True)
    assert count["count"].to_list() == [6667, 6667, 6666]
    assert sorted(len(name) for name in count["name"]) == [5, 1000, 1000]


def test_names_are_shortened_only_in_the_inputs_whose_rows_refer_to_them_too_often() -> None:
    """16 million characters are allowed for each input, and 1000 for each row; b has 18 million on two rows."""
    long = "y" * 9_000_000

    def named(*names: str | None) -> Tables:
        ranges = {"rank": [0] * len(names), "start": [0] * len(names), "duration": [0] * len(names)}
        return Tables(host=HOST.frame({**ranges, "name": list(names), "inputs": [None] * len(names)}))

    inputs = {"empty": Tables(), "a": named(None, long), "b": named(long, long), "c": named(long)}
    shorter = with_affordable_names(inputs)
    assert list(shorter) == list(inputs)
    assert [name for name in inputs if shorter[name] is not inputs[name]] == ["b"]
    assert shorter["b"].host["name"].cast(pl.String).str.len_chars().to_list() == [4000, 4000]
    assert [warning.partition(":")[0] for warning in shorter["b"].meta.warnings] == ["b"]


def test_the_files_of_a_folder_are_asked_for_too_long_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 characters are allowed here for each file, and 1 for each row; b has 120 on two rows."""
    monkeypatch.setattr("thence.readers.plausible.MAX_TEXT", 100)
    monkeypatch.setattr("thence.readers.plausible.MAX_TEXT_PER_ROW", 1)
    for file, length in (("a", 20), ("b", 60)):
        written(tmp_path / f"{file}.json", [kernel(1, 0, name="k" * length), kernel(2, 9, name="k" * length)])
    trace = thence.open(tmp_path)
    assert [len(name) for name in trace.tables.gpu["name"].to_list()] == [20, 20, 40, 40]
    assert [warning for warning in trace.meta.warnings if "shortened" in warning] == [
        f"{tmp_path}/b.json: its longest names are shortened, because rows refer to them too often"
    ]
