"""What profilers and readers say of themselves, as facts of the trace."""

from __future__ import annotations

import gzip
import json
import shutil
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from helpers import DATA, event, kernel, launch, opened
from nsight_data import changed as changed_export
from nsight_data import unpacked
from protowire import message
from recording_data import kernel as recorded_kernel
from recording_data import written as written_recording
from thence.analysis.soundness.check import check
from thence.model.losses import LOSSES, says_lost
from thence.readers.registry import read

if TYPE_CHECKING:
    from pathlib import Path


def found(path: Path) -> list[tuple[str, int]]:
    return [(f.code, f.count) for f in check(read([path])).findings]


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"dropped": 1234}, [("lost_records", 1234)]),
        ({"lost": {"kernels": 7, "calls": 2}}, [("lost_records", 7), ("lost_records", 2)]),
        ({"finished": False}, [("damaged_input", 1)]),
        ({"warnings": ["3 buffers were dropped"]}, [("lost_records", 1)]),
        ({"warnings": ["the device is old"]}, []),
    ],
    ids=["dropped", "unwritable", "killed", "said", "harmless"],
)
def test_what_a_recording_says_that_it_lost(
    tmp_path: Path, about: dict[str, object], expected: list[tuple[str, int]]
) -> None:
    row = recorded_kernel(name=0)
    folder = written_recording(tmp_path / "run", {"kernels": [[row]]}, **about)
    assert found(folder) == expected


def test_a_damaged_part_of_a_recording_is_a_finding(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(DATA / "recording" / "two_ranks", folder)
    part = next(folder.rglob("copies-000001.arrow"))
    rows = pl.read_ipc(part.read_bytes()).height
    part.write_bytes(part.read_bytes()[:100])
    codes = dict(found(folder))
    assert codes["damaged_input"] == rows > 1


@pytest.mark.parametrize(
    ("severity", "text", "expected"),
    [
        (3, "Number of CUDA events lost: 1250", [("lost_records", 1)]),
        (2, "Not all CUDA events might have been collected.", [("lost_records", 1)]),
        (2, "CPU IP/backtrace sampling not supported, disabling.", []),
        (1, "Number of lost NVTX events: 0", []),
    ],
    ids=["error", "warning", "other", "information"],
)
def test_what_nsight_systems_says_that_it_lost(
    tmp_path: Path, severity: int, text: str, expected: list[tuple[str, int]]
) -> None:
    statement = f"insert into DIAGNOSTIC_EVENT values (1, 1, 1, {severity}, '{text}', null)"
    path = changed_export(unpacked("torch_graph", tmp_path), _TABLE, statement)
    assert found(path) == expected
    assert [w for w in read([path]).meta.warnings if text in w] == (
        [f"{path}: Nsight Systems reports: {text}"] if expected else []
    )


_TABLE = (
    "create table if not exists DIAGNOSTIC_EVENT (timestamp integer, timestampType integer, source integer,"
    " severity integer, text text, globalPid integer)"
)


def test_repaired_times_of_an_export_are_counted(tmp_path: Path) -> None:
    path = changed_export(
        unpacked("torch_graph", tmp_path),
        "update CUPTI_ACTIVITY_KIND_KERNEL set end = start - 5 where rowid in (20, 30, 40)",
    )
    assert ("damaged_input", 3) in found(path)


@pytest.mark.parametrize(
    ("field", "text", "expected"),
    [
        (2, "CUPTI could not be initialised", [("lost_records", 1)]),
        (3, "5 events were dropped", [("lost_records", 1)]),
        (3, "a newer version is available", []),
    ],
    ids=["error", "dropped", "harmless"],
)
def test_what_jax_profiler_says_of_itself(
    tmp_path: Path, field: int, text: str, expected: list[tuple[str, int]]
) -> None:
    content = gzip.decompress((DATA / "jax" / "jax_single.xplane.pb.gz").read_bytes())
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(content + message((field, text)))  # XSpace.errors and XSpace.warnings
    assert found(path) == expected


def test_overhead_while_the_device_works_is_nothing_to_know(tmp_path: Path) -> None:
    events = [launch(1, 1), kernel(1, 10, 100), launch(2, 120), kernel(2, 130, 100)]
    busy = event("overhead", "Activity Buffer Request", 20, 50)
    assert opened(tmp_path, [*events, busy]).check().notes == ()
    idle = event("overhead", "Activity Buffer Request", 105, 30)
    (note,) = opened(tmp_path, [*events, idle]).check().notes
    assert (note.code, note.span_ns) == ("profiler_overhead", 20_000)  # 110 to 130 us
    assert note.span_share == pytest.approx(20 / 220)


def test_most_of_the_span_is_too_much(tmp_path: Path) -> None:
    events = [launch(1, 1), kernel(1, 10, 10), launch(2, 120), kernel(2, 130, 10)]
    flush = event("overhead", "Buffer Flush", 15, 110)
    (finding,) = opened(tmp_path, [*events, flush]).check().findings
    assert (finding.code, finding.span_ns) == ("profiler_overhead", 105_000)


def test_every_loss_has_a_code_and_a_meaning() -> None:
    assert all(text and not text.endswith(".") for text in LOSSES.values())


@pytest.mark.parametrize("text", ["Dropped 12 buffers", "some events were LOST", "buffer overflow"])
def test_messages_about_loss_are_recognised(text: str) -> None:
    assert says_lost(text)


def test_a_selection_keeps_the_soundness_of_the_whole() -> None:
    trace = thence.open(DATA / "torch" / "torch_eager_rank0.json.gz")
    assert trace.select(steps="1:2").check().sound
    assert json.dumps(trace.check().to_json())
