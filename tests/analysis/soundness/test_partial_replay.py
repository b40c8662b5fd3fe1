"""Launches of CUDA graphs whose work is there in part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from faults import changed
from helpers import DATA, event, kernel, opened
from thence.analysis.soundness.check import check
from thence.readers.registry import read

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "path",
    [DATA / "nsight" / "torch_graph.sqlite.gz", DATA / "jax" / "recording"],
    ids=["Nsight Systems", "thence record"],
)
def test_a_cut_replay_is_found_with_its_graph(path: Path) -> None:
    tables = read([path])
    gpu = tables.gpu.with_row_index()
    replays = gpu.filter(pl.col("graph").is_not_null()).group_by("graph", "correlation").len()
    replays = replays.filter(pl.col("len") == pl.col("len").max()).sort("correlation")
    graph, correlation, size = replays.row(1)
    lost = gpu.filter(pl.col("correlation") == correlation)["index"][:7]
    kept = tables.gpu.filter(~gpu["index"].is_in(lost.implode()))
    (finding,) = check(changed(tables, gpu=kept)).findings
    assert (finding.code, finding.count, finding.rank) == ("partial_replay", 1, 0)
    assert f"CUDA graph {graph} ran {size - 7} of the {size} activities" in finding.text


def replay(correlation: int, start: int, kernels: list[str], **rest: Any) -> list[dict[str, Any]]:
    arguments = {"correlation": correlation}
    events = [event("cuda_runtime", "cudaGraphLaunch", start, 2, args=arguments)]
    for i, name in enumerate(kernels):
        arguments = {"grid": [i + 1, 1, 1], "block": [32, 1, 1], **rest}
        events.append(kernel(correlation, start + 5 + 6 * i, name=name, args=arguments))
    return events


LAYERS = [f"k{i}" for i in range(6)]


def test_of_graphs_without_ids_a_part_that_recurs_may_be_another_graph(tmp_path: Path) -> None:
    """As the last layer of a model is, captured in pieces."""
    events = [x for i in range(6) for x in replay(i + 1, 100 * i, LAYERS if i % 3 else LAYERS[:3])]
    soundness = opened(tmp_path, events).check()
    assert soundness.sound
    assert [(note.code, note.count) for note in soundness.notes] == [("partial_replay", 2)]


def test_of_graphs_without_ids_another_graph_is_no_part(tmp_path: Path) -> None:
    other = ["embedding", *LAYERS[:3]]
    events = [x for i in range(6) for x in replay(i + 1, 100 * i, LAYERS if i else other)]
    soundness = opened(tmp_path, events).check()
    assert soundness.sound
    assert soundness.notes == ()


def test_of_graphs_without_ids_a_single_part_is_found(tmp_path: Path) -> None:
    events = [x for i in range(6) for x in replay(i + 1, 100 * i, LAYERS[2:] if i == 3 else LAYERS)]
    events = [e for e in events if e["name"] != "k0" or e["args"]["correlation"] != 4]
    for e in events:  # the grid tells kernels apart
        if e["args"]["correlation"] == 4 and e["cat"] == "kernel":
            e["args"]["grid"] = [int(e["name"][1]) + 1, 1, 1]
    (finding,) = opened(tmp_path, events).check().findings
    assert (finding.code, finding.count) == ("partial_replay", 1)


def lossy(lost: list[list[str]], **rest: Any) -> list[dict[str, Any]]:
    """Launches of one graph of 20 kernels, each without the kernels with these names."""
    every = [f"k{i}" for i in range(20)]
    events = [x for i in range(len(lost)) for x in replay(i + 1, 1000 * i, every, **rest)]
    if rest:  # the ids of nodes
        for one in events:
            if one["cat"] == "kernel":
                node = (4 << 32) + int(one["name"][1:])
                one["args"] = one["args"] | {"graph id": 4, "graph node id": node}
    return [e for e in events if not (e["cat"] == "kernel" and e["name"] in lost[e["args"]["correlation"] - 1])]


@pytest.mark.parametrize("rest", [{}, {"graph id": 4}], ids=["without ids", "with ids"])
@pytest.mark.parametrize("whole", [1, 0])
def test_what_all_launches_ran_together_is_the_graph(tmp_path: Path, rest: dict[str, Any], whole: int) -> None:
    """Four or five of five launches lost other kernels: no launch, or only one, is whole."""
    lost = [["k3"], ["k7", "k8"], ["k11"], ["k2", "k15"], ["k19"]]
    if whole:
        lost[2] = []
    wait = event("cuda_runtime", "cudaDeviceSynchronize", 4200, 60, args={"correlation": 90})
    (finding,) = opened(tmp_path, [*lossy(lost, **rest), wait]).check().findings
    assert (finding.code, finding.count) == ("partial_replay", 5 - whole)
    assert f"{5 - whole} of 5 launches" in finding.text
    assert "ran 18 to 19 of the 20 activities of the graph" in finding.text


def test_graphs_for_other_batch_sizes_are_no_parts_of_each_other(tmp_path: Path) -> None:
    """Six graphs without ids, each launched once: half of their kernels have grids that follow the batch."""
    events = []
    for batch in range(1, 7):
        launches = replay(batch, 1000 * batch, [f"k{i}" for i in range(12)])
        for one in launches:
            if one["cat"] == "kernel" and int(one["name"][1:]) % 2:
                one["args"] = one["args"] | {"grid": [batch, 7, 1]}
        events += launches[: len(launches) - batch % 3]  # some of them need one or two kernels less
    soundness = opened(tmp_path, events).check()
    assert soundness.sound
    assert soundness.notes == ()


def test_a_recording_may_end_within_the_last_replay(tmp_path: Path) -> None:
    events = [x for i in range(5) for x in replay(i + 1, 100 * i, LAYERS[:4] if i == 4 else LAYERS)]
    soundness = opened(tmp_path, events).check()
    assert soundness.sound
    assert [note.code for note in soundness.notes] == ["partial_replay"]
    wait = event("cuda_runtime", "cudaDeviceSynchronize", 410, 60, args={"correlation": 90})
    (finding,) = opened(tmp_path, [*events, wait]).check().findings
    assert (finding.code, finding.count) == ("partial_replay", 1)


@pytest.mark.parametrize("launched", [True, False])
def test_a_recording_may_begin_within_the_first_replay(tmp_path: Path, *, launched: bool) -> None:
    """Then it does not hold the launch."""
    graph = {"graph id": 4}
    events = [x for i in range(4) for x in replay(i + 1, 100 * i + 10, LAYERS, **graph)]
    lost = [e for e in events if e["name"] in ("k0", "k1") and e["args"]["correlation"] == 1]
    if not launched:
        lost.append(events[0])
    soundness = opened(tmp_path, [e for e in events if e not in lost]).check()
    assert soundness.sound is not launched
    found = soundness.findings or soundness.notes
    assert [(entry.code, entry.count) for entry in found] == [("partial_replay", 1)]


def test_branches_of_conditional_nodes_are_no_fault() -> None:
    """Bodies that the device starts have correlation id 0; launches of their graph may differ."""
    tables = read([DATA / "jax" / "recording"])
    gpu = tables.gpu.with_row_index()
    inside = gpu.filter(pl.col("graph").is_not_null())
    correlation = inside["correlation"].unique().sort()[3]
    lost = inside.filter(pl.col("correlation") == correlation)["index"][:5]
    body = inside.filter(pl.col("correlation") == inside["correlation"].unique().sort()[5])["index"][0]
    changed_gpu = gpu.filter(~pl.col("index").is_in(lost.implode())).with_columns(
        correlation=pl.when(pl.col("index") == body).then(0).otherwise("correlation")
    )
    soundness = check(changed(tables, gpu=changed_gpu.drop("index")))
    assert soundness.sound
    assert {note.code for note in soundness.notes} == {"partial_replay"}
