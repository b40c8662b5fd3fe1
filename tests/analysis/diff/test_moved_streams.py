"""Work that moved to another stream: what it gained and cost, on traces whose figures follow from how they are made."""

from __future__ import annotations

import dataclasses
import gzip
import json
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from answer_checks import possible
from helpers import DATA
from moved_runs import Kernel, trace_file
from thence.analysis.diff.answer import Diff, compare
from thence.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from thence.analysis.diff.sample import Sample

BEFORE: tuple[Kernel, ...] = (("a", 7, 0, 40), ("side", 7, 40, 60), ("b", 7, 60, 100))
"""A step of 100 us without idle time."""


def diff_of(folder: Path, before: Sequence[Kernel], after: Sequence[Kernel], lengths: tuple[float, float]) -> Diff:
    sides = [
        thence.open(trace_file(folder / f"{name}.json", kernels, length)).sample()
        for name, kernels, length in zip(("before", "after"), (before, after), lengths, strict=True)
    ]
    diff = compare(sides[:1], sides[1:])
    possible(diff)
    return diff


def changes(diff: Diff) -> dict[str, float]:
    assert diff.moved_streams is not None
    return {name: float(p["difference_ns"] or 0) for name, p in diff.moved_streams.parts.items()}


def test_overlap_contention_and_idle_time_are_those_that_were_planted(tmp_path: Path) -> None:
    # side runs beside a from 10 to 34, takes 4 us longer, and a takes 6 us longer; 1 us idle at the join.
    after = (("a", 7, 0, 46), ("side", 9, 10, 34), ("b", 7, 47, 87))
    diff = diff_of(tmp_path, BEFORE, after, (100, 87))
    found = diff.moved_streams
    assert found is not None
    assert found.rows["name"].to_list() == ["side"]
    assert found.streams == (1, 2)
    assert found.overlap_gained_ns == pytest.approx(24_000)
    assert found.contention_ns == pytest.approx(4_000 + 6_000)
    assert changes(diff)["idle"] == pytest.approx(1_000)
    assert changes(diff)["other"] == pytest.approx(0)
    assert diff.total.difference_ns == pytest.approx(-13_000)
    assert diff.total.difference_ns == pytest.approx(10_000 - 24_000 + 1_000 + 0)
    assert found.verdict == "faster"
    assert "overlap gained 24.00 us, contention paid 10.00 us, idle +1.000 us" in found.text
    assert found.text.endswith("moving it paid")
    assert found.text in diff.explanation


def test_moved_work_without_time_has_times_of_0(tmp_path: Path) -> None:
    diff = diff_of(tmp_path, BEFORE, (("a", 7, 0, 40), ("side", 9, 40, 40), ("b", 7, 40, 80)), (100, 80))
    assert changes(diff) == pytest.approx({"streams": -20_000, "overlapped": 0, "any": -20_000, "other": 0, "idle": 0})


def test_streams_with_other_numbers_are_no_move(tmp_path: Path) -> None:
    work = (("a", 7, 0, 46), ("side", 9, 10, 34), ("b", 7, 47, 87))
    other = tuple((name, {7: 9, 9: 31}[stream], *times) for name, stream, *times in work)
    diff = diff_of(tmp_path, work, other, (87, 87))  # type: ignore[arg-type]
    assert diff.moved_streams is None
    assert diff.to_json()["moved_streams"] is None


def test_work_that_moves_without_overlapping_gains_nothing(tmp_path: Path) -> None:
    after = tuple((name, 9 if name == "side" else 7, *times) for name, _, *times in BEFORE)
    diff = diff_of(tmp_path, BEFORE, after, (100, 100))  # type: ignore[arg-type]
    found = diff.moved_streams
    assert found is not None
    assert found.overlap_gained_ns == found.contention_ns == 0
    assert found.verdict == "unknown"  # one run a side shows no more
    assert found.text.endswith("because the change of the step may be noise")


def test_contention_that_takes_all_that_was_gained_is_no_gain(tmp_path: Path) -> None:
    # Both need all of the bandwidth: beside each other they take twice as long.
    after = (("a", 7, 0, 60), ("side", 9, 0, 40), ("b", 7, 60, 100))
    diff = diff_of(tmp_path, BEFORE, after, (100, 100))
    found = diff.moved_streams
    assert found is not None
    assert found.overlap_gained_ns == pytest.approx(40_000)
    assert found.contention_ns == pytest.approx(20_000 + 20_000)
    assert diff.total.difference_ns == 0


def test_a_step_that_became_shorter_for_other_reasons_is_no_gain_of_the_move(tmp_path: Path) -> None:
    after = (("a", 7, 0, 40), ("side", 9, 40, 60), ("b", 7, 60, 80))
    found = diff_of(tmp_path, BEFORE, after, (100, 80)).moved_streams
    assert found is not None
    assert found.verdict == "unknown"
    assert found.text.endswith("the step is faster because of other work")
    assert changes_of(found.parts)["other"] == pytest.approx(-20_000)


def changes_of(parts: Any) -> dict[str, float]:
    return {name: part["difference_ns"] for name, part in parts.items()}


def test_launches_of_one_kernel_of_which_a_part_moved_are_not_said_to_have_moved(tmp_path: Path) -> None:
    before = (("a", 7, 0, 40), ("k", 7, 40, 50), ("k", 7, 50, 60), ("side", 7, 60, 80))
    after = (("a", 7, 0, 40), ("k", 7, 40, 50), ("k", 9, 0, 10), ("side", 9, 10, 30))
    found = diff_of(tmp_path, before, after, (80, 50)).moved_streams
    assert found is not None
    assert found.rows["name"].to_list() == ["side"]
    assert found.partly.select("name", "moved_share").rows() == [("k", 0.5)]


def test_a_stream_that_has_another_number_in_each_step_is_one_stream(tmp_path: Path) -> None:
    """XLA takes streams from a pool: an asynchronous call alternates between two of them."""
    work = (("a", 7, 0, 46), ("side", 9, 10, 34), ("b", 7, 47, 87))
    one = trace_file(tmp_path / "one.json", work, 87)
    document = json.loads(one.read_text())
    kernels = [event for event in document["traceEvents"] if event["name"] == "side"]
    for number, event in enumerate(kernels):
        event["args"]["stream"] = event["tid"] = 67 + number % 2
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**document, "trace_id": "other"}))
    samples = [thence.open(path).sample() for path in (one, other)]
    assert compare(samples[:1], samples[1:]).moved_streams is None
    assert samples[1].streams is not None
    assert samples[1].streams.on["stream"].n_unique() == 3


def test_contention_of_work_that_is_launched_more_often_is_unknown(tmp_path: Path) -> None:
    after = (("a", 7, 0, 40), ("a", 7, 40, 80), ("side", 9, 10, 34), ("b", 7, 80, 120))
    found = diff_of(tmp_path, BEFORE, after, (100, 120)).moved_streams
    assert found is not None
    assert found.contention_ns is None
    assert found.verdict == "unknown"
    assert "contention unknown" in found.text


REAL = [DATA / "torch" / "moved" / f"{side}_{n}.json.gz" for side in ("before", "after") for n in (0, 1)]
"""A captured training step before and after the average of its weights went to a second stream, two runs each."""
TRUE_CHANGE = -0.091
"""Of the step in REAL, by CUDA events without a profiler: 0.386 -> 0.351 ms in the same processes."""


@pytest.fixture(scope="module")
def real() -> list[Sample]:
    return [thence.open(path).sample() for path in REAL]


def overlapped_ns_of_a_step(document: Any) -> float:
    """The time in which more than one activity ran, by the edges of the activities, divided by the replays."""
    work = [e for e in document["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    edges = sorted(edge for e in work for edge in ((e["ts"], 1), (round(e["ts"] + e["dur"], 3), -1)))
    total, running, last = 0.0, 0, 0.0
    for when, change in edges:
        total += (when - last) * (running > 1)
        running, last = running + change, when
    replays = sum("lerp_scalar_kernel" in e["name"] for e in work) / 8
    return 1000 * total / replays


def test_the_verdict_on_a_real_move_is_that_of_times_without_a_profiler(real: list[Sample]) -> None:
    diff = compare(real[:2], real[2:])
    found = diff.moved_streams
    assert found is not None
    assert found.verdict == "faster"
    assert found.streams == (1, 2)
    change = diff.total.difference_ns / diff.total.before_ns
    assert change == pytest.approx(TRUE_CHANGE, abs=0.02)
    assert any("lerp" in name for name in found.rows["name"])
    counted = [overlapped_ns_of_a_step(json.loads(gzip.decompress(p.read_bytes()))) for p in REAL]
    assert counted[:2] == [0, 0]
    assert found.overlap_gained_ns == pytest.approx(sum(counted[2:]) / 2, rel=0.02)


@pytest.mark.parametrize("side", [0, 2])
def test_nothing_moved_between_runs_of_one_program(real: list[Sample], side: int) -> None:
    assert compare(real[side : side + 1], real[side + 1 : side + 2]).moved_streams is None


def test_work_of_a_real_step_moved_by_hand_overlaps_as_it_was_moved(real: list[Sample], tmp_path: Path) -> None:
    """Each average of weights is put on a stream of its own, half of its length earlier."""
    document = json.loads(gzip.decompress(REAL[0].read_bytes()))
    moved = [e for e in document["traceEvents"] if "lerp_scalar_kernel" in e["name"]]
    for event in moved:
        event["args"]["stream"] = event["tid"] = 99
        event["ts"] = round(event["ts"] - event["dur"] / 2, 3)
    path = tmp_path / "moved.json"
    path.write_text(json.dumps({**document, "trace_id": "moved"}))
    diff = compare(real[:1], [thence.open(path).sample()])
    found = diff.moved_streams
    assert found is not None
    assert {"lerp" in name for name in found.rows["name"]} == {True}
    assert found.partly.is_empty()
    assert found.overlap_gained_ns == pytest.approx(overlapped_ns_of_a_step(document), rel=0.02)
    assert found.contention_ns == pytest.approx(0, abs=2)


@pytest.fixture(scope="module")
def of_xla() -> list[thence.Trace]:
    """On one stream, and with work on a second one."""
    return [thence.open(DATA / "jax" / f"streams_{name}.xplane.pb") for name in ("default", "moved")]


def test_work_that_xla_compiled_anew_is_recognized_by_its_function_and_not_judged(of_xla: list[thence.Trace]) -> None:
    """One GEMM of two concatenated ones before, and two, one of them on a second stream, after."""
    before, after = (trace.sample() for trace in of_xla)
    found = compare([before], [after]).moved_streams
    assert found is not None
    assert found.streams == (1, 3)
    assert found.rows.is_empty()
    assert set(found.partly["name"]) == {"GEMM"}
    assert found.partly["moved_share"].to_list() == pytest.approx([0.5] * found.partly.height)
    assert found.partly["before_placement"].to_list() == ["own stream"] * found.partly.height
    assert found.partly["after_placement"].to_list() == ["own stream and stream 1"] * found.partly.height
    assert "of a step (in HLO: own stream -> own stream and stream 1): overlap" in found.text
    assert found.verdict == "unknown"
    assert found.text.endswith("whether it paid is not known: the work changed, too")


def test_work_that_hlo_alone_places_elsewhere_did_not_move(of_xla: list[thence.Trace]) -> None:
    """The recording with work on a second stream, as if all of it had run on one stream."""
    default, moved = of_xla
    stream = moved.tables.gpu["stream"].dtype
    gpu = moved.tables.gpu.with_columns(pl.lit(14, stream).alias("stream"))
    placed = Trace(dataclasses.replace(moved.recorded, gpu=gpu))
    one, other = default.sample(), placed.sample()
    found = compare([one], [other]).moved_streams
    assert found is not None
    assert (found.rows.height, found.partly.height, found.streams) == (0, 0, (1, 1))
    assert set(found.placed_only["name"]) == {"GEMM"}
    assert found.placed_only["after_placement"].to_list() == ["own stream and stream 1"] * found.placed_only.height
    assert found.verdict == "not_moved"
    assert found.text == (
        "HLO places GEMM elsewhere (in HLO: own stream -> own stream and stream 1), "
        "but at run time it is on the same stream: nothing moved"
    )
    assert compare([other], [other]).moved_streams is None


def test_a_step_that_is_slower_because_of_idle_time_says_so(tmp_path: Path) -> None:
    """The main stream waits for what moved."""
    after = (("a", 7, 0, 40), ("side", 9, 50, 70), ("b", 7, 80, 120))
    found = diff_of(tmp_path, BEFORE, after, (100, 120)).moved_streams
    assert found is not None
    assert "hardly any overlap" in found.text
    assert found.text.endswith("because of idle time, which includes waits at the joins")
