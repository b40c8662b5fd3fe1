"""Streams: groups per stream, concurrency, expectations and the command line."""

from __future__ import annotations

import csv
import gc
import io
import json
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import DATA, FSDP, TORCH, kernel, launch, opened, run_thence, shared, written
from thence.analysis.grouping.kernel_groups import GROUPS
from thence.analysis.streams import Streams, judge, parse_expectation, streams
from thence.attribution.attribute import attribute
from thence.cli import main
from thence.model.tables import GPU, Tables

if TYPE_CHECKING:
    from pathlib import Path

JAX = DATA / "jax"
MOVED, DEFAULT = JAX / "streams_moved.xplane.pb", JAX / "streams_default.xplane.pb"


def on(stream: int, name: str, start: int, duration: int, device: int = 0) -> dict[str, Any]:
    """A kernel; times in us."""
    arguments = {"device": device, "stream": stream}
    return kernel(start + 1, start, duration, name=name, args=arguments, pid=device)


# us:       0    5   10   15   20   25   30
# stream 7  GGGGGGGGGG      AAAAA
# stream 9       GGGGGGGGGG
# stream 20           NNNNNNNNNNNNNNNN          (N: communication)
EVENTS = [
    on(7, "gemm", 0, 10), on(7, "loop_add_fusion", 16, 5), on(9, "gemm", 5, 10),
    on(20, "ncclDevKernel_AllReduce", 10, 16),
]  # fmt: skip


@pytest.fixture
def small(tmp_path: Path) -> Streams:
    return opened(tmp_path, EVENTS).streams()


def test_groups_are_counted_per_stream(small: Streams) -> None:
    assert small.rows.drop("share").rows() == [
        (0, 0, 7, "GEMM", 1, 10_000),
        (0, 0, 7, "elementwise", 1, 5_000),
        (0, 0, 9, "GEMM", 1, 10_000),
        (0, 0, 20, "communication", 1, 16_000),
    ]
    assert small.rows["share"].to_list() == pytest.approx([2 / 3, 1 / 3, 1, 1])


def test_a_stream_knows_how_long_another_ran_beside_it(small: Streams) -> None:
    assert small.streams.drop("rank", "device").rows() == [
        (7, 15_000, 10_000),  # 5-10 and 16-21
        (9, 10_000, 10_000),
        (20, 16_000, 10_000),  # 10-15 and 16-21
    ]


def test_time_by_busy_streams_adds_up(small: Streams) -> None:
    (device,) = small.concurrency
    # One: 0-5, 15-16, 21-26. Two: 5-10, 10-15, 16-21.
    assert device.busy_streams_ns == (11_000, 15_000)
    assert device.busy_ns == 26_000


def test_overlap_of_groups_is_symmetric_and_of_one_with_itself_needs_two(small: Streams) -> None:
    (device,) = small.concurrency
    assert device.overlap_ns == {
        "GEMM": {"GEMM": 5_000, "communication": 5_000},
        "elementwise": {"communication": 5_000},
        "communication": {"GEMM": 5_000, "elementwise": 5_000},
    }


def test_communication_is_hidden_behind_kernels_not_copies(tmp_path: Path) -> None:
    copy = {**on(30, "Memcpy DtoD", 22, 4), "cat": "gpu_memcpy"}
    (device,) = opened(tmp_path, [*EVENTS, copy]).streams().concurrency
    assert device.communication_ns == 16_000
    assert device.hidden_ns == 10_000
    assert device.hidden_share == pytest.approx(10 / 16)
    assert device.overlap_ns["communication"]["copy"] == 4_000


def test_kernels_of_one_stream_that_overlap_make_no_second_busy_stream(tmp_path: Path) -> None:
    (device,) = opened(tmp_path, [on(7, "gemm", 0, 10), on(7, "gemm", 5, 10)]).streams().concurrency
    assert device.busy_streams_ns == (15_000,)
    assert device.overlap_ns == {"GEMM": {"GEMM": 5_000}}


def test_devices_are_apart(tmp_path: Path) -> None:
    events = [on(7, "gemm", 0, 10), on(8, "gemm", 0, 10, device=1)]
    found = opened(tmp_path, events).streams()
    assert [c.busy_streams_ns for c in found.concurrency] == [(10_000,), (10_000,)]


def test_devices_are_held_in_columns() -> None:
    """Objects of a hundred thousand devices take more memory than a hostile trace may."""
    devices = 3000
    columns = {
        "rank": [0] * 2 * devices, "device": [*range(devices)] * 2, "stream": [7] * devices + [8] * devices,
        "kind": ["kernel"] * 2 * devices, "name": ["gemm"] * 2 * devices, "start": [0] * devices + [5] * devices,
        "duration": [10] * 2 * devices,
    }  # fmt: skip
    trace = attribute(Tables(gpu=GPU.frame(columns)))
    streams(trace)  # what is imported and remembered
    gc.collect()
    before = len(gc.get_objects())
    found = streams(trace)
    gc.collect()
    assert len(gc.get_objects()) - before < 200
    expected = ((10, 5), {"GEMM": {"GEMM": 5}})
    assert [(c.busy_streams_ns, c.overlap_ns) for c in found.concurrency] == [expected] * devices


def test_groups_of_the_user_are_counted(tmp_path: Path) -> None:
    found = opened(tmp_path, EVENTS).streams({"adds": "_add_", "GEMM": "nothing"})
    assert found.groups == ("adds", "GEMM", *GROUPS[1:])
    assert found.rows.filter(pl.col("group") == "adds")["stream"].to_list() == [7]


def test_a_trace_without_device_activity_has_no_streams(tmp_path: Path) -> None:
    trace = opened(tmp_path, [launch(1, 1)])
    with pytest.raises(thence.MissingData, match="no GPU activity"):
        trace.streams()


def thunks() -> Tables:
    """As nsys-jax archives are read: one row per thunk, its stream not recorded."""
    columns = {
        "rank": [0, 0], "device": [0, 0], "stream": [0, 0], "kind": ["thunk", "thunk"],
        "name": ["gemm_fusion", "loop_add_fusion"], "start": [0, 5], "duration": [10, 10],
    }  # fmt: skip
    return Tables(gpu=GPU.frame(columns))


def test_streams_that_a_format_does_not_tell_are_unknown() -> None:
    found = streams(attribute(thunks()))
    assert found.rows["stream"].to_list() == [None, None]
    device = next(iter(found.concurrency))
    assert device.busy_streams_ns == ()
    assert device.overlap_ns["GEMM"] == {"elementwise": 5}
    assert found.streams["concurrent_ns"].to_list() == [None]
    assert found.to_json()["devices"][0]["busy_streams_ns"] is None
    (check,) = found.check("GEMM==1")
    assert check.ok is None
    assert "which streams" in check.reason


# Expectations


@pytest.mark.parametrize(
    ("expectation", "ok", "on_streams"),
    [
        ("GEMM>=2", True, (7, 9)),
        ("GEMM>=3", False, (7, 9)),
        ("GEMM==2", True, (7, 9)),
        ("GEMM==1", False, (7, 9)),
        ("GEMM<=2", True, (7, 9)),
        ("GEMM<=1", False, (7, 9)),
        (" gemm >= 2 ", True, (7, 9)),
        ("communication!=GEMM", True, (20,)),
        ("elementwise!=GEMM", False, (7,)),
        ("attention>=1", None, ()),
        ("attention<=1", None, ()),
        ("GEMM!=attention", None, ()),
    ],
)
def test_an_expectation_holds_fails_or_cannot_be_judged(
    small: Streams, expectation: str, ok: bool | None, on_streams: tuple[int, ...]
) -> None:
    (check,) = small.check(expectation)
    assert check.ok is ok
    assert check.streams == on_streams
    assert check.expect == expectation


def lanes(*rows: tuple[int, int, int | None, str]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=["rank", "device", "stream", "group"], orient="row")


def test_streams_of_several_devices_do_not_add_up() -> None:
    rows = lanes((0, 0, 7, "GEMM"), (0, 1, 8, "GEMM"), (1, 0, 7, "GEMM"), (1, 0, 8, "GEMM"))
    check = judge(parse_expectation("GEMM>=2", GROUPS), rows)
    assert check.ok is False
    assert check.streams == (7,)
    assert [d["ok"] for d in check.devices] == [False, False, True]
    assert "rank 0 GPU 0; the expectation holds on 1 of 3 GPUs" in check.reason


def test_devices_without_the_group_do_not_count() -> None:
    rows = lanes((0, 0, 7, "GEMM"), (0, 0, 8, "GEMM"), (0, 1, 8, "copy"))
    assert judge(parse_expectation("GEMM>=2", GROUPS), rows).ok is True


def test_the_same_stream_number_on_two_devices_is_not_the_same_stream() -> None:
    rows = lanes((0, 0, 7, "GEMM"), (0, 1, 7, "copy"))
    check = judge(parse_expectation("GEMM!=copy", GROUPS), rows)
    assert check.ok is None
    assert "both GEMM and copy" in check.reason


def test_an_unknown_stream_decides_nothing() -> None:
    rows = lanes((0, 0, 7, "GEMM"), (0, 0, None, "GEMM"))
    assert judge(parse_expectation("GEMM==1", GROUPS), rows).ok is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("GEMM", "GROUP>=N"),
        ("GEMM>2", "GROUP>=N"),
        ("GEMM=2", "GROUP>=N"),
        ("GEMM>=", "GROUP>=N"),
        ("", "GROUP>=N"),
        ("GEMM>=2>=3", "GROUP>=N"),
        ("GEMM>=two", "number of streams"),
        ("GEMM>=0", "number of streams"),
        ("GEMM>=-1", "number of streams"),
        ("GEMM>=²", "number of streams"),
        ("gems>=2", "no group 'gems'; choose one of GEMM, attention"),
        ("GEMM!=2", "no group '2'"),
        ("GEMM!=gemm", "two different groups"),
    ],
)
def test_what_is_no_expectation_is_refused(text: str, message: str) -> None:
    with pytest.raises(thence.UsageError, match=message):
        parse_expectation(text, GROUPS)


# Recordings


def test_a_moved_layer_runs_its_gemms_on_streams_of_their_own() -> None:
    found = shared(MOVED).streams()
    # Twenty steps; XLA took turns between two streams for the moved layer.
    counted = found.rows.filter(pl.col("group") == "GEMM").select("stream", "count", "total_ns")
    assert counted.rows() == [(14, 20, 513_791), (67, 10, 245_663), (68, 10, 243_517)]
    assert found.check("GEMM>=2")[0].ok is True


def test_fsdp_keeps_communication_off_the_compute_stream() -> None:
    found = shared(*FSDP).streams()
    assert len(found.concurrency) == 4
    first, second = found.check("communication!=GEMM", "GEMM==1")
    assert first.ok is True
    assert second.ok is True
    for device in found.concurrency:
        assert 0 < device.hidden_ns < device.communication_ns <= device.busy_ns


def test_hidden_time_agrees_with_that_of_collectives() -> None:
    # One collective at a time on this rank and stream: unions and sums are the same.
    trace = shared(FSDP[0])
    (device,) = trace.streams().concurrency
    by_kernel = trace.collectives().by_size
    together = device.overlap_ns["communication"].get("communication", 0)
    assert device.hidden_ns == pytest.approx(by_kernel["hidden_ns"].sum(), abs=together)
    assert (
        device.communication_ns
        == by_kernel.select((pl.col("hidden_ns") + pl.col("exposed_ns")).sum() - together).item()
    )


# The command line


@pytest.mark.parametrize(
    ("path", "expectations", "code"),
    [
        (MOVED, ["GEMM>=2"], 0),
        (DEFAULT, ["GEMM>=2"], 1),
        (MOVED, ["communication>=1"], 2),
        (MOVED, ["GEMM>=2", "communication>=1"], 2),
        (MOVED, ["GEMM>=9", "communication>=1"], 1),
        (MOVED, ["GEMM>=2", "gems>=1"], 2),
        (MOVED, [], 0),
    ],
)
def test_the_exit_code_is_the_verdict(path: Path, expectations: list[str], code: int) -> None:
    options = [word for text in expectations for word in ("--expect", text)]
    with pytest.raises(SystemExit) as stopped:
        main(["streams", str(path), *options])
    assert stopped.value.code == code


def test_every_expectation_has_its_line() -> None:
    done = run_thence("streams", MOVED, "--expect", "GEMM>=2", "--expect", "copy!=GEMM")
    assert done.stdout.decode().splitlines()[-2:] == [
        "ok: GEMM>=2: GEMM ran on streams 14, 67, 68 of rank 0 GPU 0",
        "cannot be judged: copy!=GEMM: the trace has no kernels of the group copy",
    ]
    failed = run_thence("streams", DEFAULT, "--expect", "GEMM>=2").stdout.decode()
    assert "FAILED: GEMM>=2: GEMM ran on stream 14 of rank 0 GPU 0" in failed


def test_json_keeps_its_contract() -> None:
    done = run_thence("streams", MOVED, "--expect", "GEMM>=2", "--format", "json")
    found = json.loads(done.stdout)
    (device,) = found["devices"]
    assert (device["rank"], device["device"]) == (0, 0)
    assert {s["stream"]: s["groups"] for s in device["streams"]} == {
        14: {"GEMM": {"count": 20, "total_ns": 513_791}, "elementwise": {"count": 20, "total_ns": 122_336}},
        67: {"GEMM": {"count": 10, "total_ns": 245_663}},
        68: {"GEMM": {"count": 10, "total_ns": 243_517}},
    }
    (check,) = found["checks"]
    assert {k: check[k] for k in ("expect", "streams", "ok")} == {
        "expect": "GEMM>=2", "streams": [14, 67, 68], "ok": True,
    }  # fmt: skip
    assert sum(device["busy_streams_ns"].values()) == device["busy_ns"]
    assert device["communication"]["hidden_share"] is None


def test_csv_holds_the_groups() -> None:
    done = run_thence("streams", DEFAULT, "--format", "csv", "--expect", "GEMM>=2")
    rows = list(csv.DictReader(io.StringIO(done.stdout.decode())))
    assert [row["group"] for row in rows] == ["GEMM", "copy", "elementwise"]
    assert done.stderr.decode().startswith("FAILED: GEMM>=2")


@pytest.mark.parametrize(
    ("option", "message"),
    [("rope", "write NAME=REGEX"), ("rope=", "write NAME=REGEX"), ("rope=(", "regular expression")],
)
def test_a_group_that_cannot_be_read_is_refused(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["streams", str(MOVED), "--group", option])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_group_of_the_user_can_be_expected() -> None:
    done = run_thence("streams", MOVED, "--group", "adds=^wrapped_add$", "--expect", "adds==1")
    assert done.returncode == 0


def test_no_line_is_wider_than_the_terminal_and_none_gives_orders(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.json", EVENTS)
    done = run_thence("streams", path, *FSDP[:2], "--group", "\x1b[2J=gemm", "--expect", "\x1b[2J>=1", COLUMNS="80")
    lines = done.stdout.decode().splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert "\x1b" not in done.stdout.decode()


def test_graphs_are_mentioned() -> None:
    found = shared(TORCH / "torch-2.12_graph_replay_rank0.json.gz").streams()
    assert "inside CUDA graphs" in found.notes[0]
