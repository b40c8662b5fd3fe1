"""The phase of work of PyTorch, against recordings of two training steps and small made traces."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import TORCH, event, kernel, launch, opened
from thence.attribution.attribute import attribute
from thence.model.tables import GPU, HOST, Tables

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WITH_STACKS = TORCH / "checkpoints" / "with_stacks.json.gz"
WITHOUT = TORCH / "checkpoints" / "without_stacks.json.gz"
ENGINE = "autograd::engine::evaluate_function: "


def chains(path: Path) -> list[tuple[str, int, list[str]]]:
    """Name and duration (ns) of every device activity in order, and the names around its launch.

    From the JSON alone, by comparing times; innermost names first.
    """
    recorded = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    events = [e for e in recorded if e.get("ph") == "X"]
    around = [e for e in events if e["cat"] in ("cpu_op", "user_annotation", "python_function")]
    calls = {e["args"]["correlation"]: e for e in events if e["cat"] in ("cuda_runtime", "cuda_driver")}
    found = []
    work = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    for activity in sorted(work, key=lambda e: e["ts"]):
        call = calls[activity["args"]["correlation"]]
        chain = [e for e in around if e["tid"] == call["tid"] and e["ts"] <= call["ts"] < e["ts"] + e["dur"]]
        chain.sort(key=lambda e: (-e["ts"], e["dur"]))
        found.append((activity["name"], round(activity["dur"] * 1000), [e["name"] for e in chain]))
    return found


def phase_by_frames(name: str, chain: Sequence[str]) -> str:
    """The phase as the Python frames and the program (two steps, then the model without gradients) say it."""
    for around in chain:
        if around.startswith(ENGINE):
            return "backward"
        if around == "CheckpointFunctionBackward" or around.endswith(": recompute_fn"):
            return "recompute"
        if around.startswith("Optimizer."):
            return "optimizer"
    if not any(around.startswith("ProfilerStep#") for around in chain):
        return "without gradients"
    if "HtoD" in name:
        return "input"
    loss = {"aten::cross_entropy_loss", "aten::log_softmax", "aten::nll_loss_nd"}
    in_model = any(around.startswith("nn.Module: Net") for around in chain)
    return "forward" if in_model or loss & set(chain) else "other"


def phases(path: Path) -> list[tuple[str, str | None]]:
    trace = thence.open(path)
    rows = trace.activities.select("start", pl.col("name", "phase").cast(pl.String))
    return rows.sort("start").select("name", "phase").rows()


def test_every_activity_has_the_phase_that_frames_and_program_say() -> None:
    truth = [(name, phase_by_frames(name, chain)) for name, _, chain in chains(WITH_STACKS)]
    found = phases(WITH_STACKS)
    assert [name for name, _ in found] == [name for name, _ in truth]
    # Two blocks of each of two steps are recomputed: two products and a GELU each.
    assert Counter(phase for _, phase in truth)["recompute"] >= 2 * 2 * 3
    for (name, phase), (_, expected) in zip(found, truth, strict=True):
        if expected == "without gradients":
            assert phase in ("other", None), name
        else:
            assert phase == expected, name


def test_without_frames_the_same_program_has_the_same_phases() -> None:
    with_stacks, without = phases(WITH_STACKS), phases(WITHOUT)
    assert Counter(without) == Counter(with_stacks)


def test_times_of_the_phases_add_up_to_the_sum() -> None:
    rows = thence.open(WITH_STACKS).report("phase").rows
    truth: Counter[str] = Counter()
    for name, duration, chain in chains(WITH_STACKS):
        truth[phase_by_frames(name, chain)] += duration
    found = dict(rows.select("name", "total_ns").iter_rows())
    for phase in ("backward", "recompute", "optimizer", "input", "forward"):
        assert found[phase] == truth[phase]


def op(name: str, start: int, duration: int, sequence: int | None = None, forward: int = 0) -> Any:
    args = {} if sequence is None else {"Sequence number": sequence, "Fwd thread id": forward}
    return event("cpu_op", name, start, duration, args=args)


def launched(*starts: int) -> list[dict[str, Any]]:
    return [e for start in starts for e in (launch(start, start), kernel(start, 10_000 + start))]


def test_the_innermost_range_decides(tmp_path: Path) -> None:
    events = [
        op("aten::mm", 0, 10, 1),
        # An optimizer that steps while the backward pass runs, and a closure inside an optimizer.
        op(ENGINE + "MmBackward0", 100, 50, 1, 1),
        op("MmBackward0", 101, 20, 1, 1),
        event("user_annotation", "Optimizer.step#SGD.step", 130, 10),
        event("user_annotation", "Optimizer.step#LBFGS.step", 200, 100),
        op("aten::mm", 210, 10, 2),
        op(ENGINE + "MmBackward0", 230, 20, 2, 1),
        op("MmBackward0", 231, 10, 2, 1),
        *launched(5, 105, 135, 205, 215, 235),
    ]
    found = opened(tmp_path, events).activities["phase"].to_list()
    assert found == ["forward", "backward", "optimizer", "optimizer", "forward", "backward"]


def test_a_backward_pass_that_is_differentiated_again_recomputes_nothing(tmp_path: Path) -> None:
    events = [
        op("aten::mm", 0, 10, 1),
        op(ENGINE + "MmBackward0", 100, 50, 1, 1),
        op("MmBackward0", 101, 40, 1, 1),
        *(op("aten::t", 105, 5, 2), op("aten::mm", 115, 10, 3)),
        op(ENGINE + "MmBackward0", 200, 50, 3, 1),
        *(op("MmBackward0", 201, 40, 3, 1), op("aten::mm", 210, 10)),
        *launched(106, 116, 211),
    ]
    assert opened(tmp_path, events).activities["phase"].to_list() == ["backward"] * 3


def test_work_before_an_end_without_a_backward_pass_is_unknown(tmp_path: Path) -> None:
    events = [
        *(op("aten::mm", 0, 10, 1), op("aten::item", 20, 10, 2)),
        *(op(ENGINE + "MmBackward0", 100, 10, 1, 1), op("MmBackward0", 101, 8, 1, 1)),
        *(op("aten::mm", 200, 10, 3), op("aten::argmax", 220, 10)),
        *launched(5, 25, 205, 225),
    ]
    rows = opened(tmp_path, events).activities
    assert rows["phase"].to_list() == ["forward", "other", None, "other"]
    assert rows["phase_rule"].to_list() == [
        "autograd_sequence", "outside_autograd", "no_backward", "outside_autograd",
    ]  # fmt: skip


def test_what_libraries_run_around_a_pass_belongs_to_it(tmp_path: Path) -> None:
    names = {
        "FSDP::pre_forward (blocks.0)": "forward",
        "DistributedDataParallel.forward": "forward",
        "FSDP::pre_backward (blocks.0)": "backward",
        "FSDP::root_post_backward_callback": "backward",
        "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__": "input",
        "Optimizer.zero_grad#AdamW.zero_grad": "optimizer",
        "nccl:all_reduce": "other",
    }
    events = [op("aten::mm", 1, 1)]
    for number, name in enumerate(names):
        at = 100 * number
        events += [event("user_annotation", name, at, 50), op("aten::copy_", at + 5, 20)]
        events += launched(at + 10)
    assert opened(tmp_path, events).activities["phase"].to_list() == list(names.values())


@pytest.mark.parametrize(("in_step", "expected"), [(True, "input"), (False, "other")])
def test_a_copy_to_the_device_is_input_inside_a_step(tmp_path: Path, in_step: bool, expected: str) -> None:
    copy = kernel(5, 50, name="Memcpy HtoD (Pinned -> Device)") | {"cat": "gpu_memcpy"}
    steps = [event("user_annotation", "ProfilerStep#1", 0, 40)] if in_step else []
    rows = opened(tmp_path, [op("aten::copy_", 4, 4, 7), launch(5, 5), copy, *steps, *BACKWARD])
    assert rows.activities["phase"].to_list() == [expected]


BACKWARD = (op(ENGINE + "MmBackward0", 1000, 5, 99, 1),)


def test_a_trace_without_operators_tells_no_phase_but_that_of_ranges(tmp_path: Path) -> None:
    events = [event("user_annotation", "Optimizer.step#SGD.step", 0, 10), *launched(5, 20)]
    rows = opened(tmp_path, events).activities
    assert rows["phase"].to_list() == ["optimizer", None]
    assert rows["phase_rule"].to_list() == ["optimizer_range", "no_autograd"]


def test_a_noted_phase_is_a_range_among_others() -> None:
    """The range of an optimizer inside a noted phase, a noted phase inside the range of an optimizer."""
    ranges = [
        ("phase", "backward", 0, 100),
        ("framework", "Optimizer.step#AdamW.step", 10, 50),
        ("runtime", "cudaLaunchKernel", 20, 5),
        ("runtime", "cudaLaunchKernel", 70, 5),
        ("framework", "Optimizer.step#AdamW.step", 200, 100),
        ("phase", "gradient", 210, 50),
        ("runtime", "cudaLaunchKernel", 220, 5),
    ]
    categories, names, starts, durations = zip(*ranges, strict=True)
    calls = [row for row, range_ in enumerate(ranges) if range_[0] == "runtime"]
    host = {
        "rank": [0] * len(ranges), "process": [1] * len(ranges), "thread": [1] * len(ranges),
        "category": categories, "name": names, "start": starts, "duration": durations,
        "correlation": [row if row in calls else None for row in range(len(ranges))],
        "parent": [None, 0, 1, 0, None, 4, 5],
    }  # fmt: skip
    three = [0, 0, 0]
    gpu = {
        "rank": three, "device": three, "stream": three, "kind": ["kernel"] * 3, "name": ["k"] * 3,
        "start": [30, 80, 230], "duration": [1, 1, 1], "correlation": calls,
    }  # fmt: skip
    places = attribute(Tables(gpu=GPU.frame(gpu), host=HOST.frame(host))).places
    assert places["phase"].to_list() == ["optimizer", "backward", "gradient"]
    assert places["phase_rule"].to_list() == ["optimizer_range", "phase_noted", "phase_noted"]
