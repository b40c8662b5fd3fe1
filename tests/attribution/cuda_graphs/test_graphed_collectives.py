"""Collectives inside a CUDA graph on two GPUs: what the profiler lost, the labels bring back.

The truth is the same code run without a graph in the same processes, which Kineto describes itself.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import pytest

import thence
from helpers import TORCH
from thence.attribution.cuda_graphs.labelling import labelled, with_labels
from thence.readers.label_files import read_labels
from thence.readers.registry import read

GRAPHS = TORCH / "graphs"
KEYS = (
    *("Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype"),
    *("Process Group Name", "Process Group Description", "Process Group Ranks"),
)
COLUMNS = (
    *("collective", "in_elements", "out_elements", "group_size", "element_type"),
    *("group_name", "group_description", "group_ranks"),
)
"""Of the same."""
REPLAYS = 3
RANKS = (0, 1)


def eager(rank: int) -> list[tuple[object, ...]]:
    """What Kineto says of each collective kernel of the eager run, in order of time."""
    document = json.loads(gzip.decompress((GRAPHS / f"comm_eager_rank{rank}.json.gz").read_bytes()))
    kernels = [e for e in document["traceEvents"] if "Collective name" in e.get("args", {})]
    kernels = [e for e in kernels if e["cat"] == "kernel"]
    return [tuple(e["args"][key] for key in KEYS) for e in sorted(kernels, key=lambda e: e["ts"])]


@pytest.mark.parametrize("rank", RANKS)
def test_the_profiler_says_nothing_of_the_collectives_of_a_replay(rank: int) -> None:
    text = gzip.decompress((GRAPHS / f"comm_replay_rank{rank}.json.gz").read_bytes()).decode()
    assert "ncclDevKernel" in text
    assert "Collective name" not in text


@pytest.mark.parametrize("rank", RANKS)
def test_every_replay_reads_like_the_eager_run(rank: int) -> None:
    expected = eager(rank)
    assert [row[0] for row in expected] == ["allreduce", "_allgather_base", "_reduce_scatter_base"]
    trace = thence.open(GRAPHS / f"comm_replay_rank{rank}.json.gz").label(GRAPHS / f"comm_labels_rank{rank}.json")
    trace.self_check()
    placed = trace.recorded.graph_places.join(
        trace.tables.gpu.with_row_index("gpu").select("gpu", "start", "name").cast({"gpu": int}), on="gpu"
    ).sort("start")
    assert placed.unnest("collective").select(COLUMNS).rows() == expected * REPLAYS
    assert placed["label"].unique().to_list() == ["sync"]
    names = placed["name"].cast(str).to_list()
    for name, row in zip(names, expected * REPLAYS, strict=True):
        kind = {"allreduce": "AllReduce", "_allgather_base": "AllGather"}.get(str(row[0]), "ReduceScatter")
        assert kind in name


def test_the_analysis_of_collectives_works_on_graphs() -> None:
    trace = thence.open(*(GRAPHS / f"comm_replay_rank{rank}.json.gz" for rank in RANKS)).label(
        [GRAPHS / f"comm_labels_rank{rank}.json" for rank in RANKS]
    )
    rows = trace.collectives().by_size
    # bfloat16: 2 bytes an element; 1 Mi elements on each rank, twice that gathered.
    assert dict(zip(rows["collective"], rows["bytes"], strict=True)) == dict.fromkeys(
        ("all-reduce", "all-gather", "reduce-scatter"), 2 << 20
    )
    assert rows["count"].to_list() == [REPLAYS * len(RANKS)] * 3


def test_labels_of_another_process_name_both() -> None:
    """Kineto's own overhead stands under process -1, which nobody has."""
    trace = thence.open(GRAPHS / "block_replay.json.gz")
    with pytest.raises(thence.InputError, match=r"process 607 captured .* is of process \d+;"):
        trace.label(GRAPHS / "comm_labels_rank0.json")


def test_labels_beside_a_trace_are_named_and_give_way_to_those_asked_for() -> None:
    trace = thence.open(GRAPHS / "comm_replay_rank0.json.gz")
    [beside] = [text for text in trace.meta.notes if text.startswith("labels of CUDA graphs")]
    assert "comm_labels_rank0.json" in beside
    assert "block_labels.json" not in beside
    asked = trace.label(GRAPHS / "comm_labels_rank0.json")
    told = (*asked.meta.notes, *asked.meta.warnings)
    assert not [text for text in told if text.startswith("labels of CUDA graphs")]


def test_notes_of_the_reader_stay_when_labels_are_joined() -> None:
    tables = read([str(GRAPHS / "comm_replay_rank0.json.gz")])
    noted = replace(tables, meta=replace(tables.meta, notes=("the newest of two runs is read",)))
    beside = with_labels(noted)
    assert beside.meta.notes[0] == "the newest of two runs is read"
    assert beside.meta.notes[1].startswith("labels of CUDA graphs from comm_labels_rank0.json")
    asked = labelled(beside, [read_labels(GRAPHS / "comm_labels_rank0.json")])
    assert asked.meta.notes == noted.meta.notes
