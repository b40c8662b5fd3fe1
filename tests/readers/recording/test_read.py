"""Recordings on disk: finished, cut, damaged, hostile."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from recording_data import BEGAN, kernel, written
from thence.capture.cuda.layouts import LAYOUTS
from thence.capture.recorder.names import Names
from thence.capture.session.mark_log import MarkLog
from thence.model.collectives import CallFacts
from thence.model.column_file import encode
from thence.readers.recording.folder import SCHEMAS
from thence.readers.registry import read

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [{"number": 1, "name": "_Z1fv", "demangled": "f()"}, {"number": 2, "name": "g", "demangled": None}]


def test_parts_are_put_together_in_their_order(tmp_path: Path) -> None:
    folder = written(
        tmp_path / "a",
        {"names": [NAMES[:1], NAMES[1:]], "kernels": [[kernel(start=BEGAN + 50, end=BEGAN + 60)], [kernel(name=2)]]},
    )
    tables = read([folder])
    assert tables.gpu["start"].to_list() == [10, 50]
    assert tables.gpu["name"].cast(pl.String).to_list() == ["g", "f()"]
    assert tables.gpu["rank"].to_list() == [3, 3]
    assert (tables.meta.epoch_ns, tables.meta.warnings) == (BEGAN, ())


def test_unfinished_activities_and_missing_names(tmp_path: Path) -> None:
    untimed = [kernel(start=0, end=0)] * 3
    rows = [kernel(end=0), kernel(end=0), *untimed, kernel(name=99), kernel(name=None)]
    tables = read([written(tmp_path / "a", {"names": [NAMES], "kernels": [rows]})])
    assert tables.gpu["name"].cast(pl.String).to_list() == ["(unnamed)", "(unnamed)"]
    assert [(loss.code, loss.count) for loss in tables.meta.losses] == [("no_times", 3), ("no_times", 2)]
    told = "\n".join(tables.meta.warnings)
    assert "3 activities without start and end, because CUPTI could not record the times" in told
    assert "2 activities without an end, because the recording ended first" in told


THREE = {"names": [NAMES], "kernels": [[kernel()], [kernel(), kernel()], [kernel()]]}


def warned(folder: Path) -> tuple[int, str]:
    """Kernels that were read, and all warnings."""
    tables = read([folder])
    return tables.gpu.height, "\n".join(tables.meta.warnings)


def test_a_damaged_part_is_left_out_and_said(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", THREE)
    part = folder / "kernels-000002.npz"
    part.write_bytes(part.read_bytes()[:-30])
    (folder / ".kernels-000004.npz.unfinished").write_bytes(b"half")
    kernels, text = warned(folder)
    assert kernels == 2
    assert "table kernels: part 2 is damaged; rows lost: 2 of 4" in text


@pytest.mark.parametrize(("number", "lost"), [(1, 1), (2, 2), (3, 1)])
def test_a_missing_part_is_said_with_its_rows(tmp_path: Path, number: int, lost: int) -> None:
    """Also the last one, which nothing but the description tells of."""
    folder = written(tmp_path / "a", THREE)
    (folder / f"kernels-00000{number}.npz").unlink()
    kernels, text = warned(folder)
    assert kernels == 4 - lost
    assert f"table kernels: part {number} is missing; rows lost: {lost} of 4" in text


def test_a_part_after_the_last_description_is_no_loss(tmp_path: Path) -> None:
    """A killed process may have written a part, and not yet counted it."""
    folder = written(tmp_path / "a", THREE, finished=False, parts={"kernels": 2}, counts={"kernels": 3, "names": 9})
    kernels, text = warned(folder)
    assert kernels == 4
    assert "missing" not in text.replace("the last records are missing", "")


def test_recordings_of_version_2_are_read_and_damage_is_said(tmp_path: Path) -> None:
    assert warned(written(tmp_path / "whole", THREE, version=2)) == (4, "")
    folder = written(tmp_path / "damaged", THREE, version=2)
    part = folder / "kernels-000002.arrow"
    part.write_bytes(part.read_bytes()[:100])
    kernels, text = warned(folder)
    assert kernels == 2
    assert "table kernels: part 2 is damaged" in text
    part.unlink()
    assert "table kernels: part 2 is missing" in warned(folder)[1]


def test_what_the_recorder_had_to_say_is_passed_on(tmp_path: Path) -> None:
    folder = written(
        tmp_path / "a", {"kernels": [[kernel()]]}, finished=False, dropped=12, lost={"calls": 5},
        unknown_kinds={"55": 2}, warnings=["the device was still busy"],
    )  # fmt: skip
    text = "\n".join(read([folder]).meta.warnings)
    for expected in ("was cut", "dropped 12 records", "5 rows of the table calls", "CUPTI's kind 55", "still busy"):
        assert expected in text


def test_a_recording_by_full_buffers_that_was_cut_promises_no_time(tmp_path: Path) -> None:
    times = {"began_ns": 0, "written_ns": 9_000_000_000, "flush_seconds": None}
    folder = written(tmp_path / "a", {"kernels": [[kernel()]]}, finished=False, **times)
    (text,) = (warning for warning in read([folder]).meta.warnings if "was cut" in warning)
    assert "while XLA launches graphs, only full buffers are written" in text
    assert " s of it" not in text


def test_clocks_count_while_the_device_worked_and_measured_peaks_are_facts(tmp_path: Path) -> None:
    ran = [kernel(device=1), kernel(device=1, start=BEGAN + 80, end=BEGAN + 90)]
    devices = [{"device": number, "name": "NVIDIA H200"} for number in (0, 1)]
    times = [BEGAN + at for at in (5, 10, 50, 90, 91)]
    sampled = [{"device": 1, "times_ns": times, "mhz": [345, 1900, 1700, 1800, 210]}, {"device": 0, "times_ns": [1]}]
    folder = written(tmp_path / "job" / "a", {"kernels": [ran]}, devices=devices, clocks=sampled)
    (tmp_path / "job" / "measured-peaks").write_text('{"device": "NVIDIA H200", "gbps": 4100.5, "bfloat16": 700}')
    meta = read([folder]).meta
    assert [device.clock_mhz for device in meta.devices] == [None, 1800]
    assert meta.facts[0]["measured_peaks"] == {"device": "NVIDIA H200", "gbps": 4100.5, "bfloat16": 700}
    (tmp_path / "job" / "measured-peaks").write_text("[]")
    damaged = read([folder]).meta
    assert damaged.facts[0]["measured_peaks"] is None
    assert any("measured-peaks cannot be read" in text for text in damaged.warnings)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"rank": "x"}', '{"format": "other"}', '{"rank": -5}', "\x00" * 50]
)
def test_a_description_that_cannot_be_read_costs_only_the_facts(tmp_path: Path, content: str) -> None:
    folder = written(tmp_path / "a", {"names": [NAMES], "kernels": [[kernel()]]})
    (folder / "recording.json").write_text(content)
    tables = read([folder])
    assert tables.gpu.height == 1
    assert tables.gpu["rank"].to_list() == [0]


@pytest.mark.parametrize("fact", ["pid", "rank", "began_ns", "dropped"])
@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1])
def test_a_description_with_a_number_that_no_column_holds_is_not_believed(
    tmp_path: Path, fact: str, number: int
) -> None:
    marks = [{"what": 0, "serial": 1, "time": 5, "thread": 1, "name": 1}]
    tables = {"names": [NAMES], "kernels": [[kernel()]], "marks": [marks]}
    folder = written(tmp_path / "a", tables, **{fact: number})
    kernels, text = warned(folder)
    assert kernels == 1
    assert "recording.json cannot be read" in text


def test_a_recording_without_anything_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(thence.DamagedInput, match="nothing of the recording can be read"):
        read([written(tmp_path / "a", {})])


def test_columns_of_other_types_do_no_harm(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", {"names": [NAMES], "kernels": [[kernel()]]}, version=2)
    text = pl.DataFrame({name: ["a", "18446744073709551615", None] for name in SCHEMAS["kernels"]})
    text.write_ipc(folder / "kernels-000002.arrow")
    lists = pl.DataFrame({name: [[1], [2]] for name in SCHEMAS["kernels"]})
    lists.write_ipc(folder / "kernels-000003.arrow")
    pl.DataFrame({"start": [5]}).write_ipc(folder / "kernels-000004.arrow")
    unsigned = dict.fromkeys(SCHEMAS["kernels"], pl.UInt64)
    huge = pl.DataFrame({name: [2**64 - 1] for name in SCHEMAS["kernels"]}, schema=unsigned)
    huge.write_ipc(folder / "kernels-000005.arrow")
    tables = read([folder])
    assert tables.gpu.height == 1
    assert tables.meta.warnings


@pytest.mark.parametrize("seed", range(2))
def test_random_damage_raises_nothing_but_our_errors(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    marks = [
        {"what": what, "serial": i // 2, "forward": -1, "time": BEGAN + i,
         "thread": 1, "name": 1, "lane": 0, "metadata": 0}
        for i, what in enumerate([0, 1] * 20)
    ]  # fmt: skip
    folder = written(
        tmp_path / "a",
        {"names": [NAMES], "kernels": [[kernel()] * 50], "marks": [marks],
         "ranges": [[dict.fromkeys(SCHEMAS["ranges"], 2)]]},
    )  # fmt: skip
    (folder / "labels.json").write_text('{"format": "thence.graph-labels", "version": 1}')
    for number in range(15):
        file = chance.choice(sorted(folder.iterdir()))
        content = bytearray(file.read_bytes())
        for _ in range(chance.choice([1, 1, 4, 40])):
            content[chance.randrange(len(content))] = chance.randrange(256)
        before = file.read_bytes()
        file.write_bytes(content)
        try:
            trace = thence.open(folder)
            if number % 5 == 0:
                trace.activities  # noqa: B018 - attributing is the point
        except thence.ThenceError:
            pass
        finally:
            file.write_bytes(before)


def test_marks_around_collectives_describe_their_kernels(tmp_path: Path) -> None:
    facts = {
        "Collective name": "_allgather_base", "In msg nelems": 1000, "Out msg nelems": 4000,
        "Group size": 4, "dtype": "BFloat16", "Process Group Name": "7", "Seq": 12,
    }  # fmt: skip
    names = [
        {"number": 1, "name": "ncclDevKernel_AllGather_RING_LL(x)", "demangled": None},
        {"number": 2, "name": "cudaLaunchKernelExC", "demangled": None},
        {"number": 3, "name": "nccl:_allgather_base", "demangled": None},
        {"number": 4, "name": json.dumps(facts), "demangled": None},
        {"number": 5, "name": "step", "demangled": None},
        {"number": 6, "name": '["Collective name"]', "demangled": None},
        {"number": 7, "name": '{"Collective name"', "demangled": None},
    ]

    def mark(serial: int, opens: int, closes: int, name: int, text: int) -> list[dict[str, Any]]:
        common = {"serial": serial, "forward": -1, "thread": 9, "lane": 0}
        return [
            {**common, "what": 0, "time": BEGAN + opens, "name": name, "metadata": text},
            {**common, "what": 1, "time": BEGAN + closes, "name": 0, "metadata": 0},
        ]

    call = dict.fromkeys(SCHEMAS["calls"], 1) | {
        "api": 5, "function": 2, "start": BEGAN + 30, "end": BEGAN + 35, "thread": 9, "correlation": 70,
    }  # fmt: skip
    folder = written(
        tmp_path / "a",
        {
            "names": [names],
            "kernels": [[kernel(name=1, start=BEGAN + 40, end=BEGAN + 90, correlation=70)]],
            "calls": [[call]],
            "marks": [
                [*mark(1, 5, 200, 5, 0), *mark(2, 20, 60, 3, 4),
                 *mark(3, 100, 110, 5, 6), *mark(4, 120, 130, 5, 7)]
            ],
        },
    )  # fmt: skip
    trace = thence.open(folder)
    trace.self_check()
    [row] = trace.tables.collectives.to_dicts()
    assert (row["gpu"], row["collective"], row["group_size"], row["sequence"]) == (
        0, "_allgather_base", 4, 12,
    )  # fmt: skip
    assert (row["in_elements"], row["out_elements"], row["element_type"]) == (1000, 4000, "BFloat16")
    assert row["bytes"] == 1000 * 2  # what one rank puts in; a bfloat16 has two bytes
    # The user's own mark is the label, that of the library an operator.
    assert trace.tables.places["label"].cast(str).to_list() == ["step"]
    assert trace.tables.places["ops"].cast(str).to_list() == ["nccl:_allgather_base"]


def test_collectives_are_described_by_columns(tmp_path: Path) -> None:
    """What the log of marks hands to the writer, read again: two calls alike but for their number, one mark."""
    names, log = Names(), MarkLog()
    shared: dict[str, object] = {
        "Collective name": "_reduce_scatter_base", "In msg nelems": 4000, "Out msg nelems": 1000,
        "Group size": 4, "dtype": "Float", "Process Group Name": "7", "Dst Rank": True,
    }  # fmt: skip
    for number in (1, 2):
        facts = CallFacts(shared)
        facts["Seq"] = 30 + number
        log.opened(number, "nccl:reduce_scatter", "lane", facts)
        log.closed(number)
    log.opened(3, "of the program", None, {**shared, "bucket": 1})
    log.closed(3)
    tables = log.take(names)
    known = names.new()
    assert set(tables["collectives"]) == set(SCHEMAS["collectives"])
    assert sum("Collective name" in text for text in known["name"]) == 1  # the program's own mark
    folder = written(tmp_path / "a", {"kernels": [[kernel()]]}, began_ns=1)
    for table, columns in {**tables, "names": known}.items():
        (folder / f"{table}-000001.npz").write_bytes(encode(columns))
    read_again = read([folder])
    assert read_again.meta.warnings == ()
    rows = read_again.collectives.with_columns(pl.col(pl.Categorical).cast(pl.String))
    assert rows["sequence"].to_list() == [31, 32, None]
    # A reduce-scatter is as large as what one rank gets, in float32; a truth value is no rank.
    expected = ("_reduce_scatter_base", 4000, 1000, 4000, 4, "Float", "7", None)
    columns = ("collective", "bytes", "out_elements", "in_elements", "group_size", "element_type", "group_name",
               "destination_rank")  # fmt: skip
    assert rows.select(columns).rows() == [expected] * 3
    said = read_again.host[rows["host"]].select(pl.col("name", "metadata").cast(pl.String))
    assert said.rows() == [("nccl:reduce_scatter", None)] * 2 + [("of the program", '{"bucket":1}')]


def test_what_is_recorded_is_what_is_read() -> None:
    """Columns of CUPTI's records, and those that are added to them, are the columns of the format."""
    added = {"calls": {"api"}}
    for layout in LAYOUTS.values():
        columns = {*layout.fields, *layout.later, *added.get(layout.table, ())}
        assert columns == set(SCHEMAS[layout.table]), layout.table
