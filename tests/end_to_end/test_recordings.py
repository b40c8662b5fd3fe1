"""Real recordings: every number against the slow reading of the same file, or known from the program."""

from __future__ import annotations

import collections
import functools
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import FSDP, RECORDINGS, STACK, TORCH, assert_same_tables, recording, shared, unzipped
from slow_kineto import KINDS, SlowTrace, nanoseconds, start

if TYPE_CHECKING:
    from pathlib import Path

Key = tuple[int, int, str]

EAGER = recording("torch_eager_rank0")
COMPILED = recording("torch_compile_rank0")
REPLAY_212 = recording("torch-2.12_graph_replay_rank0")


@functools.cache
def slow(path: Path) -> SlowTrace:
    return SlowTrace(path)


@functools.cache
def fast(path: Path) -> thence.Trace:
    return thence.open(path)


def key(activity: dict[str, Any]) -> Key:
    """A stream runs one activity at a time, so this tells them apart."""
    return activity["args"]["stream"], start(activity), activity["name"]


def by_key(trace: thence.Trace, column: str) -> dict[Key, Any]:
    rows = trace.activities.select("stream", "start", pl.col("name").cast(pl.String), column)
    result = {(stream, at, name): value for stream, at, name, value in rows.iter_rows()}
    assert len(result) == rows.height
    return result


def totals(path: Path, by: str) -> dict[str, int]:
    rows = fast(path).report(by).rows
    return dict(rows.filter("attributed").select("name", "total_ns").iter_rows())


def test_every_recording_is_here() -> None:
    assert len(RECORDINGS) == 10


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_every_recording_passes_its_self_check_without_warnings(path: Path) -> None:
    trace = thence.open(path)
    trace.self_check()
    assert trace.meta.warnings == ()


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_totals_are_those_of_the_events(path: Path) -> None:
    summary, expected = fast(path).report(), slow(path)
    assert summary.sum_ns == expected.sum_ns
    assert summary.busy_ns == expected.busy_ns
    assert summary.span_ns == expected.span_ns
    assert summary.idle_ns == expected.span_ns - expected.busy_ns
    kinds = collections.Counter(KINDS[a["cat"]] for a in expected.activities)
    assert {kind: n for kind, n in summary.counts.items() if n} == dict(kinds)


@pytest.mark.parametrize("path", [EAGER, FSDP[2], COMPILED, REPLAY_212], ids=lambda p: p.name)
def test_columns_of_the_activities_are_the_fields_of_the_events(path: Path) -> None:
    trace = fast(path)
    for column, field in (
        ("correlation", "correlation"),
        ("external", "External id"),
        ("bytes", "bytes"),
        ("registers", "registers per thread"),
        ("shared_memory", "shared memory"),
        ("grid", "grid"),
        ("block", "block"),
        ("device", "device"),
    ):
        expected = {key(a): a["args"].get(field) for a in slow(path).activities}
        assert by_key(trace, column) == expected, column
    assert by_key(trace, "duration") == {key(a): nanoseconds(a["dur"]) for a in slow(path).activities}


@pytest.mark.parametrize("path", [EAGER, FSDP[0], COMPILED, STACK], ids=lambda p: p.name)
def test_label_is_the_path_of_named_ranges_around_the_launch_or_its_forward_op(path: Path) -> None:
    expected = {key(a): slow(path).label(a) for a in slow(path).activities}
    assert by_key(fast(path), "label") == expected


def test_label_totals_of_the_eager_recording() -> None:
    expected: collections.Counter[str] = collections.Counter()
    for activity in slow(EAGER).activities:
        expected[str(slow(EAGER).label(activity))] += nanoseconds(activity["dur"])
    assert totals(EAGER, "label") == dict(expected)
    # The program has these ranges and no others: the labels are nested in "forward".
    assert set(expected) == {"forward/attention", "forward/mlp", "forward", "backward", "optimizer"}


@pytest.mark.slow_oracle
def test_backward_kernels_stand_under_the_label_of_their_forward_op() -> None:
    trace, expected = fast(EAGER), slow(EAGER)
    backward = [a for a in expected.activities if expected.phase(a) == "backward"]
    labels = by_key(trace, "label")
    # No user's range is open on the autograd thread, so each label comes from the forward pass.
    assert {str(labels[key(a)]).split("/")[0] for a in backward} == {"forward"}
    rows = trace.report("label").rows
    total = sum(nanoseconds(a["dur"]) for a in backward if expected.label(a) == "forward/mlp")
    assert rows.filter(pl.col("name") == "forward/mlp")["backward_ns"].item() == total > 0


@pytest.mark.slow_oracle
@pytest.mark.parametrize("path", [EAGER, STACK, FSDP[1]], ids=lambda p: p.name)
def test_phase_is_what_autograd_and_libraries_say(path: Path) -> None:
    expected = {key(a): slow(path).phase(a) for a in slow(path).activities}
    assert by_key(fast(path), "phase") == expected


@pytest.mark.parametrize("path", [EAGER, STACK, COMPILED], ids=lambda p: p.name)
def test_step_is_the_profiler_step_open_at_the_launch(path: Path) -> None:
    expected = {key(a): slow(path).step(a) for a in slow(path).activities}
    assert by_key(fast(path), "step") == expected
    assert "ProfilerStep#1" in expected.values()


def test_modules_are_the_calls_around_the_launch_or_its_forward_op() -> None:
    expected = {key(a): slow(STACK).module(a) for a in slow(STACK).activities}
    assert by_key(fast(STACK), "module") == expected


def test_backward_kernels_of_each_block_stand_under_its_modules() -> None:
    trace, expected = fast(STACK), slow(STACK)
    backward: collections.Counter[tuple[str, str]] = collections.Counter()
    for activity in expected.activities:
        if expected.phase(activity) == "backward":
            place = expected.module(activity), expected.label(activity)
            backward[str(place[0]), str(place[1])] += nanoseconds(activity["dur"])
    # The program: two blocks, each of two norms, an attention of two linears and an MLP of two.
    for path, label in (
        ("GPT_0/Block_0/Attention_0/Linear_0", "forward/attention"),
        ("GPT_0/Block_0/MLP_0/Linear_3", "forward/mlp"),
        ("GPT_0/Block_1/LayerNorm_2", "forward/attention"),
        ("GPT_0/Block_1/MLP_1/Linear_6", "forward/mlp"),
        ("GPT_0/Linear_8", "forward"),
    ):
        rows = trace.activities.filter(
            (pl.col("module").cast(pl.String) == path)
            & (pl.col("label").cast(pl.String) == label)
            & (pl.col("phase").cast(pl.String) == "backward")
        )
        assert rows["duration"].sum() == backward[path, label] > 0, path


def test_stacks_are_the_frames_around_the_launch() -> None:
    expected = {key(a): "/".join(slow(STACK).stack(a)) or None for a in slow(STACK).activities}
    assert by_key(fast(STACK), "stack") == expected


FUNCTIONS = {
    "19": "Attention.forward",
    "24": "MLP.forward",
    "27": "Block.forward",
    "32": "GPT.forward",
    "45": "step",
    "57": "<module>",
}
"""The ``def`` lines of the program torch_gpt.py, read in its text; on line 57 it starts the profiler."""


def test_source_is_the_innermost_frame_of_the_program_itself() -> None:
    expected = {}
    for activity in slow(STACK).activities:
        # Everything but torch_gpt.py is torch or the standard library.
        own = [f for f in slow(STACK).stack(activity) if f.startswith("torch_gpt.py(")]
        line = own[-1].removeprefix("torch_gpt.py(").split(")")[0] if own else None
        expected[key(activity)] = f"torch_gpt.py:{line} {FUNCTIONS[line]}" if line else None
    found = by_key(fast(STACK), "source")
    assert {k: v for k, v in found.items() if expected[k]} == {k: v for k, v in expected.items() if v}
    assert sum(1 for v in expected.values() if v) > len(expected) // 2


def test_op_is_the_innermost_operator_around_the_launch() -> None:
    expected = {}
    for activity in slow(EAGER).activities:
        call = slow(EAGER).launch(activity)
        assert call is not None
        around = slow(EAGER)._open(slow(EAGER).complete("cpu_op"), call["tid"], start(call))
        expected[key(activity)] = around[-1]["name"]
    assert by_key(fast(EAGER), "op") == expected


def test_four_ranks_at_once_keep_their_numbers_apart() -> None:
    trace = shared(*FSDP)
    trace.self_check()
    assert trace.meta.warnings == ()
    assert trace.tables.gpu["rank"].unique().sort().to_list() == [0, 1, 2, 3]
    for rank, path in enumerate(FSDP):
        expected, alone = slow(path), fast(path).report()
        assert alone.busy_ns == expected.busy_ns
        rows = trace.tables.gpu.filter(pl.col("rank") == rank)
        assert rows["duration"].sum() == expected.sum_ns
        assert set(rows["device"]) == {a["args"]["device"] for a in expected.activities}
    summary = trace.report("rank")
    assert summary.busy_ns == sum(slow(path).busy_ns for path in FSDP)
    assert summary.span_ns == sum(slow(path).span_ns for path in FSDP)
    assert dict(summary.rows.select("name", "total_ns").iter_rows()) == {
        f"rank {rank}": slow(path).sum_ns for rank, path in enumerate(FSDP)
    }


def test_ranks_of_a_directory_are_those_of_its_files() -> None:
    trace = thence.open(str(TORCH / "torch_fsdp_rank*.json.gz"))
    assert trace.meta.inputs == tuple(str(path) for path in FSDP)
    assert trace.tables.gpu["rank"].unique().sort().to_list() == [0, 1, 2, 3]


@pytest.mark.parametrize("path", FSDP, ids=lambda p: p.name)
def test_collectives_say_what_nccl_said(path: Path) -> None:
    trace = fast(path)
    fields = {
        "collective": "Collective name",
        "in_elements": "In msg nelems",
        "out_elements": "Out msg nelems",
        "group_size": "Group size",
        "element_type": "dtype",
        "group_name": "Process Group Name",
        "group_description": "Process Group Description",
        "group_ranks": "Process Group Ranks",
    }
    expected = {}
    for activity in slow(path).activities:
        args = activity["args"]
        if "Collective name" in args:
            scatters = "reduce_scatter" in args["Collective name"]
            elements = args["Out msg nelems" if scatters else "In msg nelems"]
            size = {"Float": 4, "BFloat16": 2}[args["dtype"]]
            values = [args[field] for field in fields.values()]
            expected[key(activity)] = [*values, elements * size]
    rows = trace.tables.collectives.with_columns(pl.col(pl.Categorical).cast(pl.String))
    gpu = trace.tables.gpu[rows["gpu"]].select("stream", "start", pl.col("name").cast(pl.String))
    columns = rows.select(*fields, "bytes")
    found = {keys: list(values) for keys, values in zip(gpu.rows(), columns.iter_rows(), strict=True)}
    assert found == expected
    # Two steps of 4 blocks and the root: each gathered forward, blocks again backward, each scattered.
    names = collections.Counter(values[0] for values in found.values())
    assert names == {"_allgather_base": 18, "_reduce_scatter_base": 10}


def test_library_ranges_and_steps_are_no_labels_of_the_user() -> None:
    for path in (EAGER, COMPILED, STACK):
        found = totals(path, "label")
        assert not [n for n in found if "ProfilerStep" in n or "Optimizer." in n or "##" in n]


def test_compiled_kernels_keep_their_labels() -> None:
    found = totals(COMPILED, "label")
    expected: collections.Counter[str] = collections.Counter()
    for activity in slow(COMPILED).activities:
        expected[str(slow(COMPILED).label(activity))] += nanoseconds(activity["dur"])
    assert found == dict(expected)
    assert {"forward", "optimizer"} <= set(found)


def test_graph_and_node_ids_are_exact_in_64_bits() -> None:
    ids = {key(a): (a["args"]["graph id"], a["args"]["graph node id"]) for a in slow(REPLAY_212).activities}
    trace = fast(REPLAY_212)
    assert by_key(trace, "graph") == {k: graph for k, (graph, _) in ids.items()}
    assert by_key(trace, "node") == {k: node for k, (_, node) in ids.items()}
    assert trace.tables.gpu["node"].dtype == pl.UInt64
    # The graph's id fills the upper half: more than 32 bits are needed.
    assert min(node for _, node in ids.values()) >= 1 << 32


def test_what_is_launched_eagerly_has_no_graph() -> None:
    trace = fast(recording("torch-2.12_torch_eager_rank0"))
    assert trace.tables.gpu["graph"].null_count() == trace.tables.gpu["node"].null_count() == trace.tables.gpu.height


def test_kernels_inside_a_graph_are_said_to_be_unattributed() -> None:
    for path in (recording("graph_replay_rank0"), REPLAY_212):
        summary = fast(path).report("op")
        of_graphs = {code for code in fast(path).tables.places["op_rule"].unique() if "graph" in code}
        assert of_graphs == {"graph"}
        (reason,) = [reason for reason in summary.unattributed["op"] if reason.code == "graph"]
        inside = fast(path).tables.gpu.filter((fast(path).tables.places["op_rule"] == "graph").to_numpy())
        assert reason.total_ns == inside["duration"].sum() > 0.9 * summary.sum_ns


@pytest.mark.parametrize("path", [EAGER, STACK, FSDP[3]], ids=lambda p: p.name)
def test_plain_and_gzipped_files_give_equal_tables(path: Path, tmp_path: Path) -> None:
    plain = tmp_path / path.name.removesuffix(".gz")
    plain.write_bytes(unzipped(path))
    assert_same_tables(thence.open(plain).recorded, fast(path).recorded)


def test_metadata_of_a_file_is_kept() -> None:
    meta = fast(FSDP[1]).meta
    document = slow(FSDP[1]).document
    assert meta.epoch_ns == document["baseTimeNanoseconds"]
    assert meta.facts[0]["cuda_driver_version"] == document["cuda_driver_version"]
    assert meta.facts[0]["world_size"] == 4
    assert [g["ranks"] for g in meta.process_groups] == [[0, 1, 2, 3]]
    assert [(d.rank, d.device) for d in meta.devices] == [(1, 1)]


def test_host_names_stay_in_the_file() -> None:
    path = recording("torch-2.12_torch_eager_rank0")
    assert slow(path).document["host_name"] == "vm"
    assert "host_name" not in fast(path).meta.facts[0]
