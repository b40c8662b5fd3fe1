"""Steps without annotation: what repeats is a step, and what does not is none; each program by hand."""

from __future__ import annotations

import json
import tarfile
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import DATA, TORCH, event, kernel, launch, opened, output, run_thence, shared
from thence.attribution.attribute import attribute
from thence.model.tables import GPU, PROGRAMS, STEP_KINDS, Tables

if TYPE_CHECKING:
    from pathlib import Path

Events = list[dict[str, Any]]


def work(number: int, start: int, duration: int = 5, call: str = "", **kernel_args: Any) -> Events:
    """A launch and its kernel, which begins 3 us later."""
    begun = launch(number, start)
    if call:
        begun["name"] = call
    return [begun, kernel(number, start + 3, duration, args=kernel_args)]


def graph(number: int, start: int, graph_id: int | None, names: str = "ab") -> Events:
    """The launch of a CUDA graph, and one kernel for each letter."""
    ids = {} if graph_id is None else {"graph id": graph_id, "graph node id": 1}
    begun = {**launch(number, start), "name": "cudaGraphLaunch"}
    kernels = [kernel(number, start + 3 + 6 * i, name=name, args=dict(ids)) for i, name in enumerate(names)]
    return [begun, *kernels]


def found(trace: thence.Trace) -> list[tuple[str, str, int]]:
    """Kind, name and number of each step."""
    return trace.tables.steps.select(pl.col("kind", "name").cast(pl.String), "number").rows()


def calls(names: str, first: int = 0) -> Events:
    """Calls of outermost modules, 100 us apart, each with two layers that launch a kernel each."""
    events: Events = []
    for i, name in enumerate(names):
        at = first + 100 * i
        events.append(event("python_function", f"nn.Module: {name}_0", at, 80))
        for layer in range(2):
            begin = at + 5 + 30 * layer
            events.append(event("python_function", f"nn.Module: Linear_{layer}", begin, 20))
            events += work(1 + 10 * i + layer + first, begin + 2)
    return events


def test_calls_of_the_outermost_module_are_the_steps_of_an_evaluation(tmp_path: Path) -> None:
    trace = opened(tmp_path, calls("NNNNN"))
    assert found(trace) == [("module", f"N_0#{i}", i) for i in range(5)]
    assert trace.steps().frame["activities"].to_list() == [2] * 5
    assert trace.steps().steps.what == "calls of N_0"


def test_a_step_of_several_models_is_their_shortest_period(tmp_path: Path) -> None:
    """A critic is called twice for each call of the generator."""
    trace = opened(tmp_path, calls("GDDGDDGDDGDD"))
    assert [name for _, name, _ in found(trace)] == [f"G_0#{i}" for i in range(4)]


@pytest.mark.parametrize("names", ["N", "NN", "ABCDEFGH", "ABAB"])
def test_calls_that_do_not_repeat_three_times_are_no_steps(tmp_path: Path, names: str) -> None:
    trace = opened(tmp_path, calls(names))
    assert found(trace) == []
    with pytest.raises(thence.MissingData, match="holds no steps: nothing marks steps"):
        trace.steps()


def test_layers_of_one_call_are_no_steps(tmp_path: Path) -> None:
    layers = [
        e
        for i in range(12)
        for e in (event("python_function", "nn.Module: Block_0", 10 + 20 * i, 15), *work(1 + i, 12 + 20 * i))
    ]
    whole = event("python_function", "nn.Module: Net_0", 0, 1000)
    assert found(opened(tmp_path, [whole, *layers])) == []


def test_each_token_of_a_generation_is_a_step_whatever_its_batch(tmp_path: Path) -> None:
    """A graph for each batch size, replayed for hundreds of tokens each."""
    ids = [7] * 40 + [8] * 60
    events = [e for i, number in enumerate(ids) for e in graph(1 + i, 100 * i, number)]
    trace = opened(tmp_path, events)
    assert found(trace) == [("graph", f"graph launch#{i}", i) for i in range(100)]


def test_a_step_of_several_graphs_begins_with_the_one_that_comes_first(tmp_path: Path) -> None:
    """Layers that are graphs of their own are no steps: one pass of six layers, then four passes."""
    one = [e for i in range(6) for e in graph(1 + i, 100 * i, 10 + i)]
    assert found(opened(tmp_path, one)) == []
    four = [e for i in range(24) for e in graph(1 + i, 100 * i, 10 + i % 6)]
    trace = opened(tmp_path, four)
    assert [number for *_, number in found(trace)] == [0, 1, 2, 3]
    assert trace.steps().frame["activities"].to_list() == [12] * 4


def test_graphs_without_ids_are_steps_only_if_all_ran_the_same(tmp_path: Path) -> None:
    """torch 2.11 writes no ids: then equal layers cannot be told from equal passes."""
    passes = [e for i in range(5) for e in graph(1 + i, 100 * i, None)]
    assert len(found(opened(tmp_path, passes))) == 5
    names = ["in", *["ab"] * 34, "out"]
    layers = [e for i, n in enumerate(names) for e in graph(1 + i, 100 * i, None, n)]
    assert found(opened(tmp_path, layers)) == []


def test_graphs_are_steps_only_if_they_are_most_of_the_work(tmp_path: Path) -> None:
    small = [e for i in range(5) for e in graph(1 + i, 100 * i, 7)]
    large = work(50, 600, 5 * 2 * 5 + 1)
    assert found(opened(tmp_path, [*small, *large])) == []


def test_a_step_of_an_optimizer_ends_where_its_call_ends(tmp_path: Path) -> None:
    events = [event("cpu_op", "aten::before", 5, 1)]
    for i in range(4):
        events += work(1 + i, 10 + 100 * i)
        events.append(event("user_annotation", "Optimizer.step#AdamW.step", 60 + 100 * i, 20))
        events += work(11 + i, 65 + 100 * i)
    trace = opened(tmp_path, events)
    steps = trace.tables.steps
    assert [kind for kind, *_ in found(trace)] == ["optimizer"] * 4
    zero = steps["start"][0]
    assert (steps["start"] - zero).to_list() == [0, 75_000, 175_000, 275_000]
    assert steps["duration"].to_list() == [75_000, 100_000, 100_000, 100_000]
    assert trace.steps().frame["activities"].to_list() == [2] * 4


def fetches(count: int, *, stops: bool = True) -> Events:
    """An evaluation recorded without stacks: each batch is fetched for 10 us, and launches work for 60 us."""
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    events: Events = []
    for i in range(count):
        events += [event("user_annotation", name, 100 * i, 10), *work(1 + 2 * i, 100 * i + 20)]
        events += work(2 + 2 * i, 100 * i + 70)
    return [*events, event("user_annotation", name, 100 * count, 3)] if stops else events


def test_an_evaluation_without_modules_has_a_step_for_each_batch(tmp_path: Path) -> None:
    trace = opened(tmp_path, fetches(5))
    assert found(trace) == [("batch", f"batch#{i}", i) for i in range(5)]
    assert trace.tables.steps["duration"].to_list() == [100_000] * 5
    assert trace.steps().frame["activities"].to_list() == [2] * 5
    assert found(opened(tmp_path, fetches(5, stops=False))) == [("batch", f"batch#{i}", i) for i in range(4)]
    assert found(opened(tmp_path, fetches(2))) == []


def test_batches_are_steps_only_where_nothing_else_repeats(tmp_path: Path) -> None:
    both = calls("NNNNN") + [e for e in fetches(5) if e["cat"] == "user_annotation"]
    assert {kind for kind, *_ in found(opened(tmp_path, both))} == {"module"}


def test_named_ranges_that_count_steps_are_steps_and_those_around_loading_are_not(tmp_path: Path) -> None:
    training = [
        e
        for i in range(3)
        for e in (event("user_annotation", f"train/iter_{7 + i}", 100 * i, 90), *work(1 + i, 100 * i + 9))
    ]  # fmt: skip
    assert found(opened(tmp_path, training)) == [("range", f"train/iter_{i}", i) for i in (7, 8, 9)]
    loading = [
        e
        for i in range(3)
        for e in (
            event("user_annotation", f"load batch {i}", 100 * i, 20),
            *work(1 + i, 100 * i + 9, 1),
            *work(11 + i, 100 * i + 30, 9),
        )
    ]
    assert found(opened(tmp_path, loading)) == []


def test_the_main_program_is_that_of_most_time_which_repeats() -> None:
    """Ran once: init, 60 of 100; ran often: a helper of 1 percent; ran three times: the step."""
    executions = [("init", 0, 60), *(("step", 100 + 50 * i, 13) for i in range(3)),
                  *(("helper", 120 + 50 * i, 0) for i in range(3))]  # fmt: skip
    executions.sort(key=lambda row: row[1])
    count = len(executions)
    shared_columns = {"rank": [0] * count, "device": [0] * count}
    times = {"start": [s for _, s, _ in executions], "duration": [d for *_, d in executions]}
    names = [name for name, *_ in executions]
    programs = PROGRAMS.frame(
        {**shared_columns, **times, "name": names, "program": names, "execution": [0] * count,
         "launch": [s - 5 for _, s, _ in executions]}
    )  # fmt: skip
    gpu = GPU.frame(
        {**shared_columns, **times, "kind": ["thunk"] * count, "name": ["x"] * count, "stream": [0] * count,
         "program": range(count)}
    )  # fmt: skip
    steps = attribute(Tables(gpu=gpu, programs=programs)).steps
    assert steps["kind"].cast(pl.String).to_list() == ["program"] * 3
    assert steps["name"].cast(pl.String).to_list() == ["step#0", "step#1", "step#2"]
    assert steps["start"].to_list() == [95, 145, 195]


def test_a_program_that_ran_once_is_no_step_and_rounds_of_its_loops_are_none(tmp_path: Path) -> None:
    assert shared(DATA / "jax" / "remat.xplane.pb.gz").tables.steps.is_empty()
    with tarfile.open(DATA / "jax" / "programs" / "rnn.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    trace = thence.open(tmp_path / "recording")
    assert trace.tables.programs.height == 1
    launches = trace.tables.host.filter(pl.col("name").cast(pl.String).str.contains("GraphLaunch"))
    assert launches.height > 100  # rounds of two loops
    assert trace.tables.steps.is_empty()


def passes(names: list[list[str]]) -> Events:
    """Runs of a model under nested ranges, outermost first: two kernels under each range."""
    events: Events = []
    for i, nested in enumerate(names):
        for depth, name in enumerate(nested):
            at = 1000 * i + 50 * depth
            events.append(event("user_annotation", name, at, 900 - 100 * depth))
            events += work(1 + 10 * i + depth, at + 10, 100)
    return events


def test_a_pass_of_a_server_counts_once_where_one_range_encloses_another(tmp_path: Path) -> None:
    """vLLM's range around SGLang's: two ranges of one pass were two steps of half its time."""
    nested = ["execute_context_1(7)_generation_0(0)", "step[EXTEND bs=1 toks=7]"]
    trace = opened(tmp_path, passes([nested]))
    assert found(trace) == [("pass", nested[0], 0)]
    assert trace.steps().frame.height == 1
    rows = trace.step_kinds().rows
    assert rows.select("step_kind", "steps", "total_ns", "per_step_ns").rows() == [
        ("prefill bs=1 tokens=7", 1, 200_000, 200_000.0)
    ]


def test_the_range_inside_describes_a_pass_whose_own_name_does_not(tmp_path: Path) -> None:
    trace = opened(tmp_path, passes([["execute_model", "step[DECODE bs=8]"]] * 3))
    assert [(kind, number) for kind, _, number in found(trace)] == [("pass", 0), ("pass", 1), ("pass", 2)]
    assert trace.step_kinds().rows["step_kind"].to_list() == ["decode bs=8"]
    assert trace.step_kinds().rows["steps"].to_list() == [3]
    assert set(trace.tables.places["step-kind"].cast(pl.String)) == {"decode bs=8"}


def test_one_profiler_step_around_many_passes_is_not_the_step(tmp_path: Path) -> None:
    events = [event("user_annotation", "ProfilerStep#1", -5, 5000)]
    events += passes([["step[DECODE bs=8]"]] * 4)
    assert [kind for kind, *_ in found(opened(tmp_path, events))] == ["pass"] * 4


EVERYWHERE = [
    (TORCH / "graphs" / "block_replay.json.gz", "graph", 5),
    (TORCH / "torch_eager_rank0.json.gz", "step", 3),
    (DATA / "jax" / "streams_moved.xplane.pb", "program", 20),
    (DATA / "nsight" / "jax_train.sqlite.gz", "program", 6),
    (DATA / "nsight" / "torch_ddp.sqlite.gz", "range", 2),
]


@pytest.mark.parametrize(("path", "kind", "count"), EVERYWHERE, ids=lambda x: getattr(x, "name", ""))
def test_every_verb_has_the_same_steps(path: Path, kind: str, count: int) -> None:
    """The steps of `steps`, of the rows by step, of --steps, of the headline and of SQL."""
    trace = shared(path)
    table = trace.steps()
    assert table.steps.kind == kind
    assert kind in STEP_KINDS
    of_device = table.frame.group_by("rank", "device").len()["len"].unique().to_list()
    assert of_device == [count]
    rows = trace.report("step").rows.filter("attributed")
    assert set(rows["name"]) == set(table.frame["step"])
    by_name = dict(rows.select("name", "count").rows())
    launched = table.frame.group_by("step").agg(pl.col("activities").sum())
    assert by_name == dict(launched.rows())
    for number in table.frame["number"].unique():
        part = trace.select(steps=f"{number}")
        assert part.tables.gpu.height == int(table.frame.filter(number=number)["activities"].sum())
        assert part.steps().frame.rows() == table.frame.filter(number=number).rows()
    assert trace.headline.steps is not None
    assert trace.headline.steps.count == count
    told = trace.sql("select count(*) as n from steps")["n"][0]
    assert told == trace.tables.steps.height


def test_kinds_are_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    shown = output(capsys, "steps", DATA / "nsight" / "jax_train.sqlite.gz")[0]
    assert "6 steps: executions of jit_train_step; without 2 of warm-up, the last" in shown
    document = json.loads(run_thence("steps", DATA / "nsight" / "jax_train.sqlite.gz", "--format", "json").stdout)
    assert (document["kind"], document["what"]) == ("program", "executions of jit_train_step")
    left = [row["left_out"] for row in document["steps"]]
    assert left == ["warm_up", "warm_up", None, None, None, "last"]
