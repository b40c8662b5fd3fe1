"""Graphs labelled from a trace of their capture, against what was planted: names in order, and order alone."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

import thence
from capture_data import Recorder, compiled, layers
from helpers import event, opened, written
from thence.attribution.cuda_graphs.captures import captured_calls
from thence.opening import open_runs

if TYPE_CHECKING:
    from pathlib import Path

    from capture_data import Call

SIZES = (2, 3)
TRAILING: Call = ("copy_kernel", "aten::copy_", "outside", "kernel")


def captured(amd: bool, captures: list[list[Call]], **how: Any) -> Recorder:
    """A trace of captures."""
    recorder = Recorder(amd, now=how.pop("now", 0.0))
    for calls in captures:
        recorder.capture(calls, **how)
    return recorder


def replayed(amd: bool, graphs: list[list[Call]], nodes: bool = False) -> Recorder:
    """A trace of replays, each graph twice, in another order than they were captured in."""
    recorder = Recorder(amd)
    for _ in range(2):
        for number, calls in enumerate(graphs):
            recorder.replay(calls, nodes=number + 1 if nodes else None)
    return recorder


def places(folder: Path, replay: Recorder, *captures: Recorder) -> thence.Trace:
    """The replays, labelled from captures in files of their own."""
    (folder / "replay").mkdir(exist_ok=True)
    trace = opened(folder / "replay", replay.events)
    eager = [thence.open(written(folder / f"capture{n}.json", recorder.events)) for n, recorder in enumerate(captures)]
    labelled = trace.label(eager=eager)
    labelled.self_check()
    return labelled


def planted(graphs: list[list[Call]], kind: int) -> list[str | None]:
    """The true operator (1) or label (2) of each activity of `replayed`, in the order of time."""
    return 2 * [call[kind] for calls in graphs for call in calls]


@pytest.mark.parametrize("amd", [True, False])
def test_each_graph_finds_its_capture_by_length_and_content(tmp_path: Path, amd: bool) -> None:
    graphs = [layers(count) for count in SIZES]
    labelled = places(tmp_path, replayed(amd, graphs[::-1]), captured(amd, graphs))
    assert labelled.tables.places["op"].to_list() == planted(graphs[::-1], 1)
    assert labelled.tables.places["label"].to_list() == planted(graphs[::-1], 2)
    count = 2 * sum(map(len, graphs))
    assert labelled.graph_coverage.rules == {"capture_names" if amd else "capture_order": count}
    said = [text for text in labelled.meta.warnings if "order alone" in text]
    assert len(said) == (0 if amd else 1)
    if not amd:  # all but the embedding's kernel, whose name tells nothing of its operator
        kernels = 2 * sum(sum(call[3] == "kernel" for call in calls) for calls in graphs)
        assert f"{count:,} activities, 100.0 % of the time" in said[0]
        assert f"Of {kernels:,} kernels among them, {kernels - 2 * len(graphs):,} have" in said[0]


def test_the_captures_may_be_in_files_of_their_own_and_without_bounds(tmp_path: Path) -> None:
    graphs = [layers(count) for count in SIZES]
    files = [
        captured(amd=False, captures=[calls], bounds=False, now=1e6 * number) for number, calls in enumerate(graphs)
    ]
    labelled = places(tmp_path, replayed(amd=False, graphs=graphs), *files)
    assert labelled.tables.places["label"].to_list() == planted(graphs, 2)
    (tmp_path / "captures").mkdir()
    for number, recorder in enumerate(files):
        written(tmp_path / "captures" / f"bs_{number}.json", recorder.events)
    for given in (tmp_path / "captures", f"{tmp_path}/captures/*.json", str(tmp_path / "captures" / "bs_0.json")):
        opened_runs = open_runs(given)
        assert len(opened_runs) == (1 if "bs_0" in str(given) else len(SIZES))


def test_captures_and_replays_may_be_in_one_trace(tmp_path: Path) -> None:
    graphs = [layers(count) for count in SIZES]
    recorder = captured(amd=False, captures=graphs)
    for calls in graphs:
        recorder.replay(calls)
    trace = opened(tmp_path, recorder.events)
    labelled = trace.label(eager=trace)
    assert labelled.tables.places["label"].to_list() == [call[2] for calls in graphs for call in calls]


@pytest.mark.parametrize("amd", [True, False])
def test_of_captures_that_fit_alike_only_what_they_share_is_taken(tmp_path: Path, amd: bool) -> None:
    first, second = (layers(2, f"capture_{size}_decode/") for size in (8, 16))
    labelled = places(tmp_path, replayed(amd, [first]), captured(amd, [first, second]))
    assert labelled.tables.places["op"].to_list() == planted([first], 1)
    assert labelled.tables.places["label"].null_count() == 2 * len(first)
    assert set(labelled.tables.places["label_rule"]) == {"graph_captures_differ"}
    assert labelled.graph_coverage.rules == {"capture_shared": 2 * len(first)}


def test_node_numbers_give_the_order_where_streams_hide_it(tmp_path: Path) -> None:
    calls = layers(3)
    mixed = list(range(len(calls)))
    random.Random(1).shuffle(mixed)
    for nodes in (5, None):
        recorder = Recorder(amd=False)
        recorder.replay(calls, streams=3, nodes=nodes, order=mixed)
        if nodes is None:
            with pytest.raises(thence.MissingData, match="several streams and its nodes have no numbers"):
                places(tmp_path, recorder, captured(amd=False, captures=[calls]))
            continue
        labelled = places(tmp_path, recorder, captured(amd=False, captures=[calls]))
        assert labelled.tables.places["label"].to_list() == [calls[place][2] for place in mixed]


def test_with_names_an_unknown_order_gives_what_all_calls_of_a_kernel_share(tmp_path: Path) -> None:
    calls = layers(2)
    mixed = list(range(len(calls)))
    random.Random(1).shuffle(mixed)
    recorder = Recorder(amd=True)
    recorder.replay(calls, streams=3, order=mixed)
    labelled = places(tmp_path, recorder, captured(amd=True, captures=[calls]))
    assert labelled.tables.places["op"].to_list() == [calls[place][1] for place in mixed]
    kernels = [(call[0], call[3]) for call in calls]
    once = {call[2] for call, kernel in zip(calls, kernels, strict=True) if kernels.count(kernel) == 1}
    assert once == {"embedding", "sample"}
    expected = [calls[place][2] if calls[place][2] in once else None for place in mixed]
    assert labelled.tables.places["label"].to_list() == expected


def test_one_call_too_many_costs_no_label(tmp_path: Path) -> None:
    """As in a server's capture of a compiled model: a call more than the graph has nodes."""
    graph = compiled(15)
    assert len(graph) == 152
    for calls in ([*graph, TRAILING], [TRAILING, *graph]):
        (tmp_path / str(len(list(tmp_path.iterdir())))).mkdir()
        folder = max(tmp_path.iterdir())
        labelled = places(folder, replayed(False, [graph], nodes=True), captured(False, [calls]))
        assert labelled.tables.places["label"].to_list() == planted([graph], 2)
        assert labelled.tables.places["op"].to_list() == planted([graph], 1)
        (note,) = [t for t in labelled.meta.warnings if "no certain counterpart" in t]
        assert "0 of its 152 activities and 1 of the 153 launches of capture 1 of 1" in note


def test_equal_counts_without_a_confirmed_kernel_prove_nothing(tmp_path: Path) -> None:
    calls: list[Call] = [(f"kernel{n}", f"vllm::op{n}", "layer", "kernel") for n in range(8)]
    with pytest.raises(thence.MissingData, match="no kernel has a name that confirms the order"):
        places(tmp_path, replayed(amd=False, graphs=[calls]), captured(False, captures=[calls]))


def test_equal_layers_show_that_operators_lie_one_place_further(tmp_path: Path) -> None:
    # Custom operators and kernels of which nothing is known, but for one product: the other layers tell.
    layer = [(f"kernel{n}", f"vllm::op{n}", "layer", "kernel") for n in range(8)]
    calls = 4 * [*layer, ("gemm", "aten::mm", "layer", "kernel")]
    moved = [*calls[:10], *calls[11:14], calls[10], *calls[14:]]
    labelled = places(tmp_path, replayed(amd=False, graphs=[calls]), captured(amd=False, captures=[calls]))
    assert labelled.tables.places["op"].to_list() == planted([calls], 1)
    (tmp_path / "moved").mkdir()
    labelled = places(tmp_path / "moved", replayed(False, [calls]), captured(False, [moved]))
    operators = labelled.tables.places["op"].to_list()
    right = planted([calls], 1)
    assert all(op in (None, truth) for op, truth in zip(operators, right, strict=True))
    open_ = [place for place, op in enumerate(operators[: len(calls)]) if op is None]
    assert 10 in open_
    assert set(open_) <= set(range(9, 18))  # of the second layer alone


def test_a_kernel_that_an_operator_never_launched_is_not_its_kernel(tmp_path: Path) -> None:
    known = [(f"kernel{n}", f"aten::op{n}", "decode", "kernel") for n in range(2)]
    wrong = [(known[1][0], *known[0][1:]), (known[0][0], *known[1][1:])]
    recorder = Recorder(amd=False)
    recorder.capture(known, bounds=False, run=True)  # launches with device work show which is whose
    recorder.capture(known)
    labelled = places(tmp_path, replayed(amd=False, graphs=[wrong]), recorder)
    assert set(labelled.graph_coverage.rules) == {"eager_kernel_name"}
    assert labelled.tables.places["op"].to_list() == 2 * ["aten::op1", "aten::op0"]


def test_amd_captures_with_other_kernels_are_refused(tmp_path: Path) -> None:
    calls = layers(2)
    other = [("other_kernel", *calls[0][1:]), *calls[1:]]
    labelled = places(tmp_path, replayed(True, [other]), captured(True, [calls]))
    assert labelled.tables.places["label"].to_list() == 2 * [None, *(call[2] for call in calls[1:])]
    others = [(f"other{n}", *call[1:]) for n, call in enumerate(calls[:4])] + calls[4:]
    (tmp_path / "others").mkdir()
    with pytest.raises(thence.MissingData, match="which has no kernel like activity 0, `other0`"):
        places(tmp_path / "others", replayed(True, [others[:5]]), captured(True, [calls]))


def test_a_trace_without_work_or_captures_is_refused(tmp_path: Path) -> None:
    empty = Recorder(amd=False)
    empty.capture([])
    with pytest.raises(thence.MissingData, match="no launch that was captured into a CUDA graph"):
        places(tmp_path, replayed(amd=False, graphs=[layers(1)]), empty)


def test_overlapping_captures_take_the_calls_of_their_own_thread(tmp_path: Path) -> None:
    def call(name: str, at: int, thread: int) -> dict[str, Any]:
        arguments = {"correlation": 1000 * thread + at}
        return event("cuda_runtime", name, at, 1, args=arguments) | {"tid": thread}

    bounds = ("cudaStreamBeginCapture", "cudaStreamEndCapture")
    events = [
        *(call(bounds[0], 10, 2), call(bounds[1], 50, 2), call(bounds[0], 30, 3), call(bounds[1], 70, 3)),
        *(call("cudaLaunchKernel", at, thread) for at in (20, 40, 60) for thread in (2, 3)),
        # A capture of its own time takes in other threads, such as autograd's; what ran is in none.
        *(call(bounds[0], 100, 2), call("cudaMemcpyAsync", 110, 4), call("cudaGraphLaunch", 115, 2)),
        *(call("cudaMemsetAsync", 120, 2), call(bounds[1], 130, 2), call("cuLaunchKernelEx", 140, 2)),
        event("gpu_memset", "Memset", 200, 1, args={"device": 0, "stream": 7, "correlation": 2120}),
    ]
    trace = opened(tmp_path, events)
    calls = captured_calls(trace.recorded)
    host = trace.tables.host[calls["row"]]
    start = (host["start"] - trace.tables.host["start"].min()) // 1000 + 10
    found = sorted(zip(calls["capture"], calls["kind"], start, host["thread"], strict=True))
    assert found == [
        (0, "kernel", 20, 2), (0, "kernel", 40, 2), (1, "kernel", 40, 3), (1, "kernel", 60, 3), (2, "memcpy", 110, 4),
    ]  # fmt: skip
