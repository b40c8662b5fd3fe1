"""Snapshots of PyTorch's memory: what was live when, to the byte, and which line allocated it."""

from __future__ import annotations

import pickle
import random
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import thence
from helpers import TORCH
from readers.memory_snapshot.data import busy, fragmented, stack
from thence.errors import DamagedInput, MissingData, UnknownFormat
from thence.readers import registry
from thence.readers.compiled import UNPICKLER
from thence.readers.memory_snapshot.read import _Reader
from thence.readers.memory_snapshot.tape import tape_of
from torch_allocator import MIB, Allocator, snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from thence.model.tables import Tables

SNAPSHOTS = TORCH / "memory_snapshots"


def read(folder: Path, value: Any, name: str = "snapshot.pickle", protocol: int = 4) -> Tables:
    path = folder / name
    path.write_bytes(pickle.dumps(value, protocol))
    return registry.read([str(path)])


def live_after(tables: Tables, row: int) -> pl.DataFrame:
    """The allocations that are live after the change of a row of memory_totals, by the definition of the columns."""
    opened = pl.col("opened").is_null() | (pl.col("opened") <= row)
    closed = pl.col("closed").is_null() | (pl.col("closed") > row)
    return tables.memory.filter(opened & closed)


@pytest.mark.parametrize("seed", range(8))
def test_the_peak_and_every_reading_are_those_of_the_allocator(tmp_path: Path, seed: int) -> None:
    allocator = busy(seed, 500)
    tables = read(tmp_path, snapshot(allocator))
    totals = tables.memory_totals
    assert totals["allocated"].max() == allocator.peak
    assert totals.row(-1)[4:7] == (allocator.allocated, allocator.reserved, allocator.reserved - allocator.allocated)
    assert not tables.meta.warnings
    for row in range(0, len(totals), 37):
        assert live_after(tables, row)["bytes"].sum() == totals["allocated"][row]


@pytest.mark.parametrize("seed", range(4))
def test_a_history_that_begins_late_is_seeded_from_the_final_state(tmp_path: Path, seed: int) -> None:
    """Blocks above 1 MiB that were there before and are returned are exact where nothing was left of their segment."""
    allocator = busy(seed, 600, before=300)
    tables = read(tmp_path, snapshot(allocator))
    totals = tables.memory_totals
    assert (totals["allocated"][-1], totals["reserved"][-1]) == (allocator.allocated, allocator.reserved)
    (note,) = [note for note in tables.meta.notes if "before the history" in note] or ["0 0"]
    inferred = int(note.removeprefix(f"{tmp_path}/snapshot.pickle: ").split()[0])
    assert abs(totals["allocated"].max() - allocator.peak) <= inferred * MIB  # type: ignore[operator]
    assert totals["allocated"][0] > 0
    before = tables.memory.filter(pl.col("start").is_null())
    assert before["bytes"].sum() == totals["allocated"][0]


def test_small_blocks_from_before_the_history_are_exact(tmp_path: Path) -> None:
    allocator = Allocator()
    old = [allocator.malloc(1000, stack(10)), allocator.malloc(300_000, stack(11))]
    allocator.recording = False
    allocator.trace.clear()
    allocator.recording = True
    assert old[0] is not None
    allocator.free(old[0])
    allocator.malloc(5000, stack(12))
    tables = read(tmp_path, snapshot(allocator))
    assert tables.memory_totals["allocated"].to_list() == [1024 + 300_032, 300_032, 300_032 + 5120]
    columns = ("start", "bytes", "requested", "source")
    assert tables.memory.select(*columns).rows() == [
        (None, 1024, 1000, None),  # only the event that returned it is there
        (None, 300_032, 300_000, "/home/user/model.py:11 forward"),
        (tables.memory_totals["start"][2], 5120, 5000, "/home/user/model.py:12 forward"),
    ]


def test_the_place_is_the_line_of_the_own_code_and_the_stack_begins_outside(tmp_path: Path) -> None:
    allocator = Allocator()
    allocator.malloc(MIB, stack(21), pool=(0, 2), user_metadata="step 3")
    row = read(tmp_path, snapshot(allocator)).memory.row(0, named=True)
    assert (row["source"], row["position"]) == ("/home/user/model.py:21 forward", "line")
    assert row["stack"].split(";") == [
        "/home/user/train.py:7 <module>",
        "/home/user/model.py:21 forward",
        "/venv/lib/python3.12/site-packages/torch/nn/functional.py:100 linear",
    ]
    assert (row["pool"], row["allocator"], row["label"], row["module"]) == ("(0, 2)", "torch", "step 3", None)


def test_metadata_of_a_dict_is_a_label(tmp_path: Path) -> None:
    allocator = Allocator()
    allocator.malloc(512, user_metadata={"step": 3, "part": "loss"})
    row = read(tmp_path, snapshot(allocator)).memory.row(0, named=True)
    assert (row["label"], row["source"], row["position"]) == ('{"step": 3, "part": "loss"}', None, None)


REAL = {
    "checkpoints": (281_305_600, 152_773_120, 320_864_256, 320_864_256),
    "captured": (408_817_664, 218_793_472, 494_927_872, 494_927_872),
    "oom": (375_647_744, 152_069_120, 421_527_552, 218_103_808),
}
"""What memory_stats said of real programs: allocated, then reserved, each at its peak and at the end."""


@pytest.mark.parametrize("name", REAL)
def test_real_snapshots_are_exact(name: str) -> None:
    tables = registry.read([str(SNAPSHOTS / f"{name}.pickle.gz")])
    allocated, reserved = tables.memory_totals["allocated"], tables.memory_totals["reserved"]
    assert (allocated.max(), allocated[-1], reserved.max(), reserved[-1]) == REAL[name]


def test_a_real_failure() -> None:
    """The message of the exception: 1.15 GiB asked, 145.02 MiB allocated, 62.98 MiB reserved but unallocated."""
    (row,) = registry.read([str(SNAPSHOTS / "oom.pickle.gz")]).memory_failures.rows(named=True)
    assert (row["bytes"], row["source"]) == (1_234_568_192, "/home/user/gpu_memory.py:312 ask")
    assert (row["allocated"] / MIB, row["reserved"] / MIB) == (pytest.approx(145.02, abs=0.01), 145.02 + 62.98)
    assert row["device_free"] / (1 << 30) == pytest.approx(78.21, abs=0.01)


def test_verbs_about_time_point_to_the_one_about_memory() -> None:
    with pytest.raises(MissingData, match="thence memory shows it"):
        thence.open(SNAPSHOTS / "oom.pickle.gz").report()


def test_a_timeline_of_a_snapshot_has_its_counters(tmp_path: Path) -> None:
    thence.open(SNAPSHOTS / "oom.pickle.gz").convert(tmp_path / "a.pftrace")
    content = (tmp_path / "a.pftrace").read_bytes()
    assert b"GPU 0" in content
    assert b"allocated" in content


def test_real_stacks_have_phases_and_a_graph_has_its_pool() -> None:
    checkpoints, captured = (
        registry.read([str(SNAPSHOTS / f"{name}.pickle.gz")]).memory for name in ("checkpoints", "captured")
    )
    assert set(checkpoints["phase"].cast(pl.String).drop_nulls()) == {"forward", "backward", "recompute"}
    assert captured.filter(pl.col("pool") == "(1, 0)")["bytes"].sum() > 100 * MIB


def test_stacks_of_c_say_operator_and_phase(tmp_path: Path) -> None:
    """What torch.nn calls is forward if anything runs in the autograd engine; what a checkpoint runs there is not."""
    engine = {"filename": "engine.cpp", "line": 0, "name": "torch::autograd::Engine::evaluate_function(int)"}
    call = {
        "filename": "/venv/lib/python3.12/site-packages/torch/nn/modules/module.py",
        "line": 9,
        "name": "_call_impl",
    }
    again = {
        "filename": "/venv/lib/python3.12/site-packages/torch/utils/checkpoint.py",
        "line": 9,
        "name": "unpack_hook",
    }
    step = {"filename": "/venv/lib/python3.12/site-packages/torch/optim/optimizer.py", "line": 9, "name": "wrapper"}
    empty, mm, linear = (
        {"filename": "??", "line": 0, "name": f"at::_ops::{op}::call(c10::ArrayRef<long>)"}
        for op in ("empty_memory_format", "mm", "linear")
    )
    allocator = Allocator()
    for frames in ([empty, mm, linear, *stack(5), call], [empty, mm, engine], [empty, call, again, engine], [step]):
        allocator.malloc(512, frames)
    rows = read(tmp_path, snapshot(allocator)).memory.select("op", "phase", "source").rows()
    assert rows == [
        ("aten::mm", "forward", "/home/user/model.py:5 forward"),
        ("aten::mm", "backward", None),
        (None, "recompute", f"{call['filename']}:9 _call_impl"),
        (None, "optimizer", f"{step['filename']}:9 wrapper"),
    ]


def test_annotations_that_are_open_are_labels(tmp_path: Path) -> None:
    allocator = Allocator()

    def annotate(stage: str, name: str, device: int = 0) -> None:
        allocator.time_us += 1
        entry = {"stage": stage, "name": name, "device": device, "time_us": allocator.time_us}
        allocator.annotations.append(entry)

    allocator.malloc(512)
    annotate("START", "step 1")
    annotate("START", "loss")
    annotate("START", "of another device", 1)
    allocator.malloc(512)
    annotate("END", "loss")
    allocator.malloc(512, user_metadata="noted")
    allocator.malloc(512)
    annotate("END", "step 1")
    allocator.malloc(512)
    labels = read(tmp_path, snapshot(allocator)).memory["label"].to_list()
    assert labels == [None, "step 1/loss", "noted", "step 1", None]


def test_the_pool_of_an_event_without_one_is_that_of_its_segment(tmp_path: Path) -> None:
    allocator = Allocator()
    allocator.malloc(512, pool=(1, 0))
    allocator.malloc(512)
    for entry in allocator.trace:
        del entry["pool_id"]
    assert read(tmp_path, snapshot(allocator)).memory["pool"].to_list() == ["(1, 0)", None]


def test_a_failure_says_what_was_free(tmp_path: Path) -> None:
    """60 MiB are free in five parts; the largest has 12 MiB, and 40 MiB were asked for."""
    tables = read(tmp_path, snapshot(fragmented()))
    (row,) = tables.memory_failures.rows(named=True)
    assert (row["bytes"], row["largest_inactive"], row["device_free"]) == (40 * MIB, 12 * MIB, 2 * MIB)
    assert (row["reserved"], row["allocated"]) == (110 * MIB, 50 * MIB)
    assert row["source"] == "/home/user/model.py:41 forward"


def test_devices_and_ranks(tmp_path: Path) -> None:
    first, second = busy(1, 30), busy(2, 30)
    second.device = 1
    tables = read(tmp_path, snapshot(first, second), "snapshot_rank3.pickle")
    assert tables.meta.ranks_stated
    peaks = tables.memory_totals.group_by("rank", "device", maintain_order=True).agg(pl.col("allocated").max())
    assert peaks.rows() == [(3, 0, first.peak), (3, 1, second.peak)]
    opened = tables.memory.filter(pl.col("device") == 1)["opened"]
    assert (tables.memory_totals["device"].gather(opened.drop_nulls()) == 1).all()


def test_a_snapshot_without_history_has_what_is_live(tmp_path: Path) -> None:
    allocator = busy(5, 60)
    state = snapshot(allocator) | {"device_traces": [[]]}
    tables = read(tmp_path, state)
    assert tables.memory_totals.drop("outside").rows() == [
        (0, 0, "torch", 0, allocator.allocated, allocator.reserved, allocator.reserved - allocator.allocated)
    ]
    assert tables.memory["bytes"].sum() == allocator.allocated
    assert any("holds no history" in note for note in tables.meta.notes)


def test_a_history_without_returns_is_told(tmp_path: Path) -> None:
    allocator = busy(3, 80)
    allocator.trace[:] = [entry for entry in allocator.trace if not entry["action"].startswith("free")]
    tables = read(tmp_path, snapshot(allocator))
    assert any("without the event that returned them" in warning for warning in tables.meta.warnings)
    assert [loss.code for loss in tables.meta.losses] == ["dropped"]
    assert tables.memory_totals["allocated"][-1] == allocator.allocated


@pytest.mark.parametrize("seed", range(6))
def test_a_history_in_disorder_still_ends_in_the_final_state(seed: int) -> None:
    """Half of the events are at other places or have other addresses; what is live at the end is stated elsewhere."""
    allocator, dice = busy(seed, 200), random.Random(seed)
    for entry in allocator.trace[::2]:
        other = dice.choice(allocator.trace)
        key = dice.choice(("addr", "size", "action"))
        entry[key], other[key] = other.get(key, 0), entry.get(key, 0)
    totals = _Reader(tape_of(snapshot(allocator), 1 << 20), "a snapshot").tables().memory_totals
    assert totals["allocated"][-1] == allocator.allocated
    assert totals["reserved"][-1] == allocator.reserved


@pytest.mark.parametrize("protocol", [2, 5])
def test_both_ways_give_equal_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    value = snapshot(busy(11, 200, capacity=1 << 28))
    with_machine = read(tmp_path, value, protocol=protocol)
    monkeypatch.setenv(UNPICKLER.variable, "python")
    in_python = read(tmp_path, value, protocol=protocol)
    for name in ("memory", "memory_totals", "memory_failures"):
        assert_frame_equal(getattr(with_machine, name), getattr(in_python, name), categorical_as_str=True)
    assert len(with_machine.memory_failures)


DAMAGED = {
    "a size that is a text": ("size", "12"),
    "a negative size": ("size", -1),
    "an impossible size": ("size", 1 << 55),
    "a time of next millennia": ("time_us", 1 << 58),
}


@pytest.mark.parametrize(("key", "value"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_values_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    allocator = busy(1, 20)
    allocator.trace[3][key] = value
    with pytest.raises(DamagedInput, match=key):
        read(tmp_path, snapshot(allocator))


def test_events_and_blocks_that_the_file_only_repeats_are_refused(tmp_path: Path) -> None:
    """A list of a million references to one event, and 300 segments of one list of 300 blocks, take a few kB or MB."""
    state = snapshot(busy(1, 20))
    entry = state["device_traces"][0][0]
    with pytest.raises(DamagedInput, match="repeats"):
        read(tmp_path, state | {"device_traces": [[entry] * 100_000]})
    segment = state["segments"][0]
    segment["blocks"] = segment["blocks"][:1] * 300
    with pytest.raises(DamagedInput, match="repeats"):
        read(tmp_path, state | {"segments": [dict(segment) for _ in range(300)]})


@pytest.mark.parametrize("value", [{"segments": [], "device_traces": [[]]}, {"segments": None, "device_traces": []}])
def test_snapshots_of_nothing_are_told(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UnknownFormat):
        read(tmp_path, value)


def test_values_of_other_types_are_a_sentence() -> None:
    """Every value of an entry, a block and a segment in turn is one of another type."""
    odd = (None, "x", -1, [{}])
    refused = 0
    for place in ("entry", "block", "segment"):
        state = snapshot(busy(4, 12))
        target = {
            "entry": state["device_traces"][0][2],
            "block": state["segments"][0]["blocks"][0],
            "segment": state["segments"][0],
        }[place]
        for key, before in list(target.items()):
            for value in odd:
                target[key] = value
                try:
                    _Reader(tape_of(state, 1 << 20), "a snapshot").tables()
                except (DamagedInput, UnknownFormat):
                    refused += 1
            target[key] = before
    assert refused > 15


def test_what_torch_2_14_adds_changes_no_bytes(tmp_path: Path) -> None:
    """Pinned memory of the host comes first in the file, and tensors are annotated after they were allocated."""
    allocator = busy(3, 200)
    before = read(tmp_path, snapshot(allocator))
    state = snapshot(allocator)
    (trace,) = state.pop("device_traces")
    annotated = [
        with_annotation
        for event in trace
        for with_annotation in (
            event,
            {**event, "action": "annotate", "size": 0, "user_metadata": "saved for backward"},
        )
    ]
    pinned = {"address": 0x7E0000000000, "total_size": 4096, "allocated_size": 4096, "active_size": 4096}
    host = {"host_segments": [pinned], "host_traces": [{**trace[0], "addr": 0x7E0000000000}]}
    after = read(tmp_path, {**host, **state, "device_traces": [annotated]})
    assert after.memory.equals(before.memory)
    assert after.memory_totals.equals(before.memory_totals)
