"""Traces that PyTorch annotated itself: labels, lanes, streams and fields come back as they were given.

The recordings in tests/data/torch/graphs/annotated were annotated by PyTorch's own functions (see ORIGIN.md).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import TORCH, opened, recording, unzipped

if TYPE_CHECKING:
    from pathlib import Path

ANNOTATED = TORCH / "graphs" / "annotated"
FILES = ("annotated_torch-2.13", "annotated_torch-2.15_none", "annotated_torch-2.15_all")
LANES = {"attention": "62", "mlp": "61"}


def alone(name: str, folder: Path) -> Path:
    """The recording without the annotation file that lies beside it."""
    path = folder / f"{name}_rank0.json.gz"
    path.write_bytes((ANNOTATED / path.name).read_bytes())
    return path


def truth(trace: thence.Trace) -> list[dict[str, Any] | None]:
    """What was annotated to each activity, by the id of its node."""
    nodes = json.loads((TORCH / "graphs" / "graph_truth_rank0.json").read_text())["nodes"]
    said: list[dict[str, Any] | None] = []
    for node in trace.tables.gpu["node"].to_list():
        number = node & 0xFFFFFFFF
        label = nodes[number]["label"]
        module = f"layers.{number // 16}.{label}"
        known = {"name": label, "layer": number // 16, "module_fqn": module}
        said.append(None if label == "side_norm" else known)
    return said


@pytest.mark.parametrize("name", FILES)
def test_an_annotated_trace_shows_what_was_annotated(name: str, tmp_path: Path) -> None:
    trace = thence.open(alone(name, tmp_path))
    trace.self_check()
    expected = truth(trace)
    labels = [None if said is None else said["name"] for said in expected]
    places = trace.tables.places.select(pl.col("label", "module", "lane", "label_rule").cast(pl.String))
    assert places["label"].to_list() == labels
    assert places["module"].to_list() == [said and said["module_fqn"] for said in expected]
    assert places["lane"].to_list() == [LANES.get(label or "") for label in labels]
    assert places["label_rule"].to_list() == ["in_trace" if label else "graph_no_label" for label in labels]
    assert trace.graph_coverage.labelled == 225


@pytest.mark.parametrize("name", FILES[1:])
def test_streams_are_those_that_it_ran_on_wherever_the_file_says_so(name: str, tmp_path: Path) -> None:
    trace = thence.open(alone(name, tmp_path))
    events = json.loads(unzipped(recording("torch-2.12_graph_replay_rank0")))["traceEvents"]
    ran = sorted((round(e["ts"] * 1000), e["args"]["stream"]) for e in events if e.get("cat") == "kernel")
    assert sorted(trace.tables.gpu.select("start", "stream").rows()) == ran
    assert trace.meta.warnings == ()


def test_where_the_streams_are_lost_a_warning_says_so(tmp_path: Path) -> None:
    trace = thence.open(alone("annotated_torch-2.13", tmp_path))
    (warning,) = trace.meta.warnings
    assert "the file does not hold the streams on which they ran" in warning


@pytest.mark.parametrize("name", FILES)
def test_fields_are_typed_columns_that_sql_can_ask_for(name: str, tmp_path: Path) -> None:
    trace = thence.open(alone(name, tmp_path))
    table = trace.annotations
    assert (table.schema["layer"], table.schema["module_fqn"]) == (pl.Int64(), pl.String())
    expected: dict[int, int] = {}
    for said, duration in zip(truth(trace), trace.tables.gpu["duration"], strict=True):
        if said:
            expected[said["layer"]] = expected.get(said["layer"], 0) + duration
    rows = trace.sql("select layer, sum(duration) as ns from annotations group by layer order by layer")
    assert dict(rows.rows()) == expected


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_advised_that_was_done(name: str, tmp_path: Path) -> None:
    summary = thence.open(alone(name, tmp_path)).report("label")
    advice = [reason.advice for reasons in summary.unattributed.values() for reason in reasons]
    assert not any(text and "thence label" in text for text in advice)


def test_the_annotation_file_beside_says_the_same(tmp_path: Path) -> None:
    beside = thence.open(ANNOTATED / "annotated_torch-2.15_none_rank0.json.gz")
    within = thence.open(alone("annotated_torch-2.15_none", tmp_path))
    for column in ("label", "module", "lane", "metadata"):
        assert (
            beside.tables.places[column].cast(pl.String).to_list()
            == within.tables.places[column].cast(pl.String).to_list()
        )


GRAPHED = {"device": 0, "stream": 7, "correlation": 9, "graph id": 2, "graph node id": (2 << 32) + 1}


def kernel(ts: int, kernel_name: str = "k", /, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X", "cat": "kernel", "name": kernel_name, "pid": 0, "tid": 7, "ts": ts, "dur": 5, "args": GRAPHED | args,
    }  # fmt: skip


COLLECTIVE = {
    "name": "all_reduce", "In msg nelems": 1048576, "Out msg nelems": 1048576, "Group size": 2, "dtype": "float32",
    "Process Group Name": "0", "Process Group Description": "default_pg", "Process Group Ranks": [0, 1],
}  # fmt: skip
AS_TEXT = {key: str(value) for key, value in COLLECTIVE.items()}


@pytest.mark.parametrize(
    ("said", "name"),
    [
        (AS_TEXT | {"annotated_stream": 60}, "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        ({**COLLECTIVE, "Process Group Ranks": "[0, 1]", "stream": 60}, "all_reduce"),
    ],
)
def test_annotated_collectives_feed_thence_collectives(said: dict[str, Any], name: str, tmp_path: Path) -> None:
    """The fields are those of PyTorch's tutorial, which names the collective by the annotation."""
    trace = opened(tmp_path, [kernel(10, name, **said)], cudaGraphInlineAnnotated=True)
    (row,) = trace.tables.collectives.rows(named=True)
    assert (row["collective"], row["bytes"], row["group_size"]) == ("all_reduce", 4 << 20, 2)
    assert (row["element_type"], row["group_name"], row["group_ranks"]) == ("float32", "0", "[0, 1]")
    (shown,) = trace.collectives().to_json()["rows"]
    assert (shown["collective"], shown["bytes"], shown["count"]) == ("all-reduce", 4 << 20, 1)
    assert trace.tables.gpu["stream"].to_list() == [7]
    assert trace.tables.places["lane"].to_list() == ["0 (default_pg)"]


def test_groups_that_share_a_description_have_lanes_of_their_own(tmp_path: Path) -> None:
    groups = [
        AS_TEXT | {"Process Group Name": number, "Process Group Description": "undefined", "annotated_stream": 60}
        for number in ("3", "4")
    ]
    trace = opened(
        tmp_path, [kernel(10 * i, **{"graph node id": (2 << 32) + i}, **group) for i, group in enumerate(groups, 1)]
    )
    assert trace.graph_lanes().lanes["lane"].to_list() == ["3 (undefined)", "4 (undefined)"]


def test_lanes_known_by_number_get_the_names_of_what_is_on_them(tmp_path: Path) -> None:
    said = [("a", 61), ("b", 61), ("c", 62), ("c", 62), ("d", 63), ("e", 63), ("f", 63), ("g", 63)]
    events = [
        {**kernel(10 * i), "args": GRAPHED | {"graph node id": (2 << 32) + i, "name": name, "annotated_stream": lane}}
        for i, (name, lane) in enumerate(said, 1)
    ]
    lanes = opened(tmp_path, events).graph_lanes().lanes
    assert dict(lanes.select("lane", "kernels").rows()) == {
        "61 (a, b)": 2, "62 (c)": 2, "63 (d, e, f, ...)": 4,
    }  # fmt: skip


def test_a_field_with_a_name_of_kinetos_costs_no_kernel(tmp_path: Path) -> None:
    """PyTorch's tool puts an annotation {"block": ...} where Kineto's block was."""
    events = [
        {**kernel(10), "args": GRAPHED | {"name": "a", "block": "layer3", "bytes": "many", "Seq": "None"}},
        {**kernel(20), "args": GRAPHED | {"graph node id": (2 << 32) + 2, "name": "b", "block": [32, 1, 1]}},
    ]
    trace = opened(tmp_path, events)
    assert trace.tables.places["label"].to_list() == ["a", "b"]
    assert trace.tables.gpu["block"].to_list() == [None, [32, 1, 1]]
    said = trace.annotations.rows(named=True)
    assert (said[0]["block"], said[0]["bytes"]) == ("layer3", "many")


def test_arguments_that_a_newer_profiler_may_write_are_no_annotations(tmp_path: Path) -> None:
    trace = opened(tmp_path, [kernel(10, **{"cluster occupancy": 3}), kernel(20)])
    assert trace.tables.places["label_rule"].cast(pl.String).unique().to_list() != ["graph_no_label"]
    assert trace.annotations.is_empty()
