"""From the activity to the launch to what was open around it, on small hand-written traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from helpers import DATA, LABEL, OP, PAIR, assert_same_tables, event, kernel, launch, opened, shared

if TYPE_CHECKING:
    from pathlib import Path


def test_without_the_api_call_an_activity_belongs_to_its_linked_op(tmp_path: Path) -> None:
    linked = kernel(1, 40, args={"External id": 5})
    row = opened(tmp_path, [LABEL, OP, linked]).activities.select("op", "label")
    assert row.select(pl.all().cast(pl.String)).rows() == [("aten::mm", "train")]


def test_without_correlation_and_link_the_reason_is_said(tmp_path: Path) -> None:
    alone = kernel(1, 40)
    del alone["args"]["correlation"]
    row = opened(tmp_path, [LABEL, OP, alone]).activities.select("op", "op_rule")
    assert row["op"].to_list() == [None]
    assert row["op_rule"].to_list() == ["no_launch"]


def test_a_correlation_id_of_two_calls_identifies_neither(tmp_path: Path) -> None:
    trace = opened(tmp_path, [LABEL, OP, launch(1, 12), launch(1, 14), kernel(1, 40)])
    assert trace.activities["op"].to_list() == [None]


def test_a_collective_described_on_the_host_op_only_is_its_kernels(tmp_path: Path) -> None:
    args = {
        "External id": 9, "Collective name": "allreduce", "In msg nelems": 100, "Out msg nelems": 100,
        "Group size": 2, "dtype": "BFloat16", "Process Group Ranks": "[0, 1]",
    }  # fmt: skip
    op = event("cpu_op", "record_param_comms", 10, 20, args=args)
    trace = opened(tmp_path, [op, launch(1, 12), kernel(1, 40, name="ncclDevKernel"), kernel(2, 60)])
    row = trace.tables.collectives.with_columns(pl.col(pl.Categorical).cast(pl.String)).row(0, named=True)
    assert trace.tables.collectives.height == 1
    assert trace.tables.gpu["name"].cast(pl.String)[row["gpu"]] == "ncclDevKernel"
    assert (row["collective"], row["bytes"], row["group_size"]) == ("allreduce", 200, 2)
    assert row["group_ranks"] == "[0, 1]"


def backward_of_two_threads(*, flows: bool) -> list[dict[str, Any]]:
    """Two forward threads use the same sequence numbers, under labels of their own."""
    events = []
    for thread, label, numbers in ((2, "left", (7, 8)), (3, "right", (7, 8, 9))):
        events.append(event("user_annotation", label, 0, 90, tid=thread))
        for number in numbers:
            at = 10 * (number - 6)
            args = {"Sequence number": number, "Fwd thread id": 0}
            events.append(event("cpu_op", f"aten::{label}", at, 5, tid=thread, args=args))
    # The engine calls the thread with numbers 7 to 9 its 2, the other one its 1.
    for engine_thread, label, numbers in ((1, "left", (8,)), (2, "right", (7, 8, 9))):
        for number in numbers:
            at = 200 * engine_thread + 10 * number
            args = {"Sequence number": number, "Fwd thread id": engine_thread}
            events.append(event("cpu_op", "Backward0", at, 5, tid=4, args=args))
            events.append(launch(at, at + 1, tid=4))
            events.append(kernel(at, at + 2, name=label))
            if flows:
                forward = {"ts": 10 * (number - 6), "tid": 2 if label == "left" else 3}
                events.append({"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": at, "pid": 1, **forward})
                events.append(
                    {"ph": "f", "bp": "e", "cat": "fwdbwd", "name": "fwdbwd", "id": at, "pid": 1, "tid": 4, "ts": at}
                )
    return events


def test_arrows_tie_backward_ops_to_the_forward_ops_of_the_right_thread(tmp_path: Path) -> None:
    rows = opened(tmp_path, backward_of_two_threads(flows=True)).activities
    assert rows["label"].cast(pl.String).to_list() == rows["name"].cast(pl.String).to_list()
    assert set(rows["phase"].cast(pl.String)) == {"backward"}


def test_without_arrows_sequence_numbers_find_the_forward_op(tmp_path: Path) -> None:
    # Only thread 3 has the number 9. The other engine thread fits both equally well, so its label
    # may be either; but it must be one of the two, and the rule says that it was the forward op.
    rows = opened(tmp_path, backward_of_two_threads(flows=False)).activities
    labels = dict(zip(rows["start"].to_list(), rows["label"].cast(pl.String), strict=True))
    right = {start: label for start, label in labels.items() if start >= 400_000}
    assert len(right) == 3
    assert set(right.values()) == {"right"}
    assert set(labels.values()) <= {"left", "right"}
    assert set(rows["label_rule"]) == {"forward_op"}


def test_without_arrows_two_forward_threads_are_told_apart(tmp_path: Path) -> None:
    # As before, but each engine thread has a number that only one forward thread has.
    events = backward_of_two_threads(flows=False)
    for name, thread, lane, start, at in (("aten::left", 0, 2, 40, None), ("Backward0", 1, 4, 300, 300)):
        args = {"Sequence number": 20, "Fwd thread id": thread}
        events.append(event("cpu_op", name, start, 5, tid=lane, args=args))
        if at:
            events += [launch(at, at + 1, tid=4), kernel(at, at + 2, name="left")]
    rows = opened(tmp_path, events).activities
    assert rows["label"].cast(pl.String).to_list() == rows["name"].cast(pl.String).to_list()


def test_the_latest_forward_op_with_the_number_before_the_backward_op_counts(tmp_path: Path) -> None:
    events = []
    for start, label in ((0, "first"), (1000, "second")):
        op = event("cpu_op", "aten::mm", start + 10, 5, args={"Sequence number": 1, "Fwd thread id": 0})
        args = {"Sequence number": 1, "Fwd thread id": 7}
        back = event("cpu_op", "MmBackward0", start + 200, 9, tid=4, args=args)
        events += [event("user_annotation", label, start, 50), op, back]
        events += [launch(start, start + 201, tid=4), kernel(start, start + 300, name=label)]
    rows = opened(tmp_path, events).activities
    assert rows["label"].cast(pl.String).to_list() == ["first", "second"]


def test_a_label_inside_the_backward_op_itself_comes_first(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "forward", 0, 50),
        event("cpu_op", "Mine", 10, 5, args={"Sequence number": 1, "Fwd thread id": 0}),
        event("cpu_op", "MineBackward", 100, 50, tid=4, args={"Sequence number": 1, "Fwd thread id": 1}),
        event("user_annotation", "recompute", 110, 20, tid=4),
        *(launch(1, 115, tid=4), kernel(1, 200)),
        *(launch(2, 140, tid=4), kernel(2, 210)),
    ]  # fmt: skip
    rows = opened(tmp_path, events).activities
    assert rows["label"].cast(pl.String).to_list() == ["recompute", "forward"]


BACKWARD_KINDS = {
    "label": ("user_annotation", "{}", "{}"),
    "module": ("python_function", "nn.Module: {}_0", "{}_0"),
    "source": ("python_function", "{}.py(3): call", "{}.py:3 call"),
}
"""Kind of place: the category of its ranges, how their events are named, and what the place is called."""


def backward_work(tmp_path: Path, kind: str, *ranges: str) -> list[tuple[str, str]]:
    """Place and rule of two kernels, the second launched inside the range "inside", if there is one.

    ``ranges`` says what there is: a range "forward" around the forward op, one "around" around the
    backward op, one "inside" within the backward op, around the launch of the second kernel only.
    """
    category, name, _ = BACKWARD_KINDS[kind]
    where = {"forward": (0, 50, 2), "around": (90, 100, 4), "inside": (120, 20, 4)}
    events = [
        event("cpu_op", "aten::mm", 10, 5, args={"Sequence number": 1, "Fwd thread id": 0}),
        event("cpu_op", "MmBackward0", 100, 50, tid=4, args={"Sequence number": 1, "Fwd thread id": 1}),
        *(launch(1, 110, tid=4), kernel(1, 200)),
        *(launch(2, 125, tid=4), kernel(2, 210)),
    ]  # fmt: skip
    for range_ in ranges:
        start, duration, thread = where[range_]
        events.append(event(category, name.format(range_), start, duration, tid=thread))
    rows = opened(tmp_path, events).activities.select(kind, f"{kind}_rule")
    return rows.select(pl.all().cast(pl.String)).rows()


@pytest.mark.parametrize("kind", BACKWARD_KINDS)
def test_backward_work_belongs_to_what_was_open_around_the_forward_op(kind: str, tmp_path: Path) -> None:
    place = BACKWARD_KINDS[kind][2].format("forward")
    found = backward_work(tmp_path, kind, "forward", "around")
    assert found == [(place, "forward_op")] * 2


@pytest.mark.parametrize("kind", BACKWARD_KINDS)
def test_what_is_open_inside_the_backward_op_comes_before_the_forward_op(kind: str, tmp_path: Path) -> None:
    forward, inside = (BACKWARD_KINDS[kind][2].format(name) for name in ("forward", "inside"))
    found = backward_work(tmp_path, kind, "forward", "inside")
    assert found == [(forward, "forward_op"), (inside, "launch_ranges")]


@pytest.mark.parametrize("kind", BACKWARD_KINDS)
def test_what_is_open_around_the_backward_op_counts_where_the_forward_op_had_nothing(kind: str, tmp_path: Path) -> None:
    place = BACKWARD_KINDS[kind][2].format("around")
    assert backward_work(tmp_path, kind, "around") == [(place, "launch_ranges")] * 2


def test_rows_are_sorted_whatever_the_order_of_the_events(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    forwards, backwards = opened(tmp_path / "a", PAIR), opened(tmp_path / "b", PAIR[::-1])
    assert_same_tables(forwards.recorded, backwards.recorded)
    assert forwards.tables.gpu["start"].is_sorted()


def test_of_equal_ranges_the_named_one_contains_the_op(tmp_path: Path) -> None:
    events = [
        event("cpu_op", "aten::mm", 10, 20),
        event("user_annotation", "label", 10, 20),
        event("python_function", "nn.Module: Linear_0", 10, 20),
        event("python_function", "my.py(3): forward", 10, 20),
        launch(1, 10), kernel(1, 40),
    ]  # fmt: skip
    row = opened(tmp_path, events).activities.select("label", "module", "op", "source", "stack")
    assert row.select(pl.all().cast(pl.String)).row(0) == (
        "label", "Linear_0", "aten::mm", "my.py:3 Linear.forward", "my.py(3): forward",
    )  # fmt: skip


def test_a_call_that_ends_after_its_op_still_belongs_to_it(tmp_path: Path) -> None:
    # Kineto times API calls with another clock: they may seem to end after the op around them.
    call = event("cuda_runtime", "cudaLaunchKernel", 29, 5, args={"correlation": 1})
    assert opened(tmp_path, [OP, call, kernel(1, 40)]).activities["op"].to_list() == ["aten::mm"]


def test_a_step_is_found_from_any_thread_of_its_process(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "ProfilerStep#3", 0, 100),
        event("user_annotation", "ProfilerStep#4", 100, 100),
        *(launch(1, 99, tid=8), kernel(1, 150)),
        *(launch(2, 100, tid=8), kernel(2, 160)),
        *(launch(3, 200, tid=8), kernel(3, 300)),
    ]  # fmt: skip
    rows = opened(tmp_path, events).activities
    assert rows["step"].to_list() == ["ProfilerStep#3", "ProfilerStep#4", None]


def test_idle_is_span_minus_the_union_on_every_device(tmp_path: Path) -> None:
    events = [
        kernel(1, 0, 10), kernel(2, 5, 10, args={"stream": 8}), kernel(3, 20, 5),
        kernel(4, 100, 1, pid=1, args={"device": 1}),
    ]  # fmt: skip
    summary = opened(tmp_path, events).report()
    # Device 0: [0, 15) and [20, 25) of [0, 25); device 1: one microsecond.
    assert (summary.span_ns, summary.busy_ns, summary.idle_ns) == (26_000, 21_000, 5_000)
    assert summary.sum_ns == 26_000
    assert (summary.devices, summary.streams) == (2, 3)


def test_no_named_ranges_are_recorded_only_where_no_work_has_a_label(tmp_path: Path) -> None:
    """A range that a library opened is a label, so the other kernel is outside of the named ranges."""
    outside = [launch(2, 50), kernel(2, 60)]
    library = [event("user_annotation", "nccl:all_reduce", 0, 20), launch(1, 5), kernel(1, 30)]
    rules = opened(tmp_path, [*library, *outside]).tables.places["label_rule"]
    assert rules.cast(pl.String).to_list() == ["library_range", "outside_ranges"]
    without = opened(tmp_path, outside).tables.places["label_rule"]
    assert without.cast(pl.String).to_list() == ["no_ranges"]


def test_nvtx_ranges_of_xla_are_no_labels() -> None:
    trace = shared(DATA / "nsight" / "jax_train.sqlite.gz")
    assert trace.tables.places["label"].null_count() == trace.tables.gpu.height
    names = trace.tables.host.filter(pl.col("category") == "framework")["name"].cast(pl.String)
    assert names.str.contains("^(?:TSL:)?(?:XlaModule|Thunk):#").any()
