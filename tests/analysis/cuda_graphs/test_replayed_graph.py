"""A captured graph with the times of its replays: numbers counted from raw events, and graphs made by hand."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

import thence
from graph_data import truth_document
from helpers import TORCH, event, kernel, opened, recording, unzipped
from thence.errors import DamagedInput, MissingData, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

WITH_IDS, WITHOUT_IDS = recording("torch-2.12_graph_replay_rank0"), recording("graph_replay_rank0")
ANNOTATED = TORCH / "graphs" / "annotated"
GRAPH_DATA = ANNOTATED / "graph_data_torch-2.15.pkl"
EXECUTABLE = 9


def written(folder: Path, edges: Iterable[tuple[int, int]], nodes: int, name: str = "graph.pkl") -> Path:
    """A file as torch.cuda.export_graph_data writes it."""
    path = folder / name
    listed = [{"node_id": i, "node_type": "kernel", "kernel_name": f"k{i}"} for i in range(nodes)]
    pairs = [{"from": a, "to": b, "from_port": 0, "to_port": 0, "type": 0} for a, b in edges]
    path.write_bytes(pickle.dumps({"exec_graph_id": EXECUTABLE, "nodes": listed, "edges": pairs}))
    return path


def replays(folder: Path, *launches: dict[int, tuple[int, int]]) -> thence.Trace:
    """Launches of a graph: of each node its start, us from the launch, and its duration."""
    events: list[dict[str, Any]] = []
    for number, spans in enumerate(launches, 1):
        begin = 150 * number
        arguments = {"correlation": number}
        events.append(event("cuda_runtime", "cudaGraphLaunch", begin, 5, args=arguments))
        for node, (start, took) in spans.items():
            about = {"graph id": EXECUTABLE, "graph node id": (EXECUTABLE << 32) + node, "stream": 7 + node}
            events.append(kernel(number, begin + start, took, name=f"k{node}", args=about))
    return opened(folder, events)


def test_times_and_path_of_a_graph_made_by_hand(tmp_path: Path) -> None:
    # 0 leads to 1 and 2, both lead to 3. 2 takes longer in one replay, 1 on average: 20 and 40 us against 35 and 15.
    trace = replays(
        tmp_path,
        {0: (10, 10), 1: (22, 20), 2: (21, 35), 3: (60, 8)},
        {0: (10, 12), 1: (24, 40), 2: (25, 15), 3: (70, 10)},
    ).label(written(tmp_path, [(0, 1), (0, 2), (1, 3), (2, 3)], 4))
    graph = trace.replayed_graph()
    assert graph.nodes["number"].to_list() == [0, 1, 2, 3]
    assert graph.nodes["duration_ns"].to_list() == [11_000, 30_000, 25_000, 9_000]
    assert graph.nodes["start_ns"].to_list() == [0, 13_000, 13_000, 55_000]
    assert graph.nodes["total_ns"].to_list() == [22_000, 60_000, 50_000, 18_000]
    assert graph.nodes["critical"].to_list() == [True, True, False, True]
    assert graph.path_ns == 11_000 + 30_000 + 9_000
    assert graph.replay_ns == ((68 - 10) + (80 - 10)) / 2 * 1000
    assert graph.busy_ns == ((10 + 35 + 8) + (12 + 40 + 10)) / 2 * 1000
    assert graph.edges.tolist() == [[0, 1], [0, 2], [1, 3], [2, 3]]
    assert (graph.replays, graph.incomplete) == (2, 0)
    assert "critical path: 50.00 us in 3 of 4 nodes, 78.1 % of a replay" in graph.sentences[1]
    assert "in the remaining 14.00 us no node of the path runs" in graph.sentences[1]


def test_a_replay_that_lacks_a_node_is_left_out_and_counted(tmp_path: Path) -> None:
    trace = replays(tmp_path, {0: (10, 10), 1: (30, 10)}, {0: (10, 90)})
    graph = trace.label(written(tmp_path, [(0, 1)], 2)).replayed_graph()
    assert (graph.replays, graph.incomplete, graph.path_ns) == (1, 1, 20_000)
    assert "1 replay without activities of some nodes: left out" in graph.sentences


def test_edges_lead_past_nodes_without_activities(tmp_path: Path) -> None:
    trace = replays(tmp_path, {0: (10, 10), 2: (30, 10)})
    graph = trace.label(written(tmp_path, [(0, 1), (1, 2)], 3)).replayed_graph()
    assert graph.edges.tolist() == [[0, 1]]
    assert graph.nodes["number"].to_list() == [0, 2]
    assert graph.silent == 1


def test_nodes_that_begin_before_those_they_wait_for_have_ended_are_named(tmp_path: Path) -> None:
    trace = replays(tmp_path, {0: (10, 20), 1: (15, 20)})
    graph = trace.label(written(tmp_path, [(0, 1)], 2)).replayed_graph()
    assert (graph.path_ns, graph.replay_ns) == (40_000, 25_000)
    assert "more than a replay takes" in graph.sentences[1]


def longest(edges: list[tuple[int, int]], took: dict[int, float]) -> float:
    """The longest path by trying each node's predecessors, from the raw edges."""
    before = defaultdict(list)
    for a, b in edges:
        before[b].append(a)
    ends: dict[int, float] = {}

    def end(node: int) -> float:
        if node not in ends:
            ends[node] = took[node] + max((end(a) for a in before[node]), default=0)
        return ends[node]

    return max(map(end, took))


def raw(path: Path) -> list[dict[str, Any]]:
    events = json.loads(unzipped(path))["traceEvents"]
    return [e for e in events if e.get("cat") == "kernel"]


def test_the_graph_of_a_recording_has_the_edges_and_times_of_the_raw_events() -> None:
    truth = json.loads((TORCH / "graphs" / "graph_truth_rank0.json").read_text())
    edges = sorted((a & 0xFFFFFFFF, b & 0xFFFFFFFF) for a, b in truth["edges"])
    took = defaultdict(list)
    for e in raw(WITH_IDS):
        took[e["args"]["graph node id"] & 0xFFFFFFFF].append(e["dur"] * 1000)
    means = {node: sum(times) / len(times) for node, times in took.items()}
    graph = thence.open(WITH_IDS).label(GRAPH_DATA).replayed_graph()
    document = graph.to_json()
    assert sorted(map(tuple, document["edges"])) == edges
    assert {n["number"]: round(n["duration_ns"]) for n in document["nodes"]} == {
        node: round(mean) for node, mean in means.items()
    }
    assert graph.path_ns == pytest.approx(longest(edges, means))
    path = document["path"]
    assert all(pair in edges for pair in pairwise(path))
    assert sum(means[node] for node in path) == pytest.approx(graph.path_ns)
    assert graph.path_ns < graph.replay_ns


def test_a_trace_without_node_ids_is_aligned_and_gives_the_same_graph(tmp_path: Path) -> None:
    pid = next(e["pid"] for e in json.loads(unzipped(WITHOUT_IDS))["traceEvents"] if e.get("cat") == "cuda_runtime")
    document = truth_document(TORCH / "graphs" / "graph_truth_rank0.json", WITH_IDS, pid)
    (tmp_path / "labels.json").write_text(json.dumps(document))
    aligned = thence.open(WITHOUT_IDS).label(tmp_path / "labels.json").replayed_graph()
    by_id = thence.open(WITH_IDS).label(GRAPH_DATA).replayed_graph()
    assert sorted(aligned.to_json()["edges"]) == sorted(by_id.to_json()["edges"])
    assert aligned.executables == ()
    assert by_id.executables == (2,)
    # The two versions of torch differ in the template arguments of a kernel.
    names = [
        {n["number"]: n["name"].split("softmax_warp_forward")[0] for n in graph.to_json()["nodes"]}
        for graph in (aligned, by_id)
    ]
    assert names[0] == names[1]
    assert sum(aligned.nodes["total_ns"]) == round(sum(e["dur"] for e in raw(WITHOUT_IDS)) * 1000)


def test_labels_found_beside_the_trace_and_given_again_are_one_graph() -> None:
    folder = TORCH / "graphs"
    trace = thence.open(folder / "compiled_replay.json.gz")
    given = trace.label(folder / "compiled_labels.json").replayed_graph()
    stored = json.loads((folder / "compiled_labels.json").read_text())["graphs"]
    sizes = {graph["id"]: len(graph["nodes"]["number"]) for graph in stored}
    assert given.nodes.height == sizes[given.id]
    assert given.others["graph"].to_list() == [i for i in sizes if i != given.id]
    assert given.unknown_ns == 0
    other = int(given.others["graph"][0])
    assert trace.replayed_graph(other).nodes.height == sizes[other]
    assert given.others["total_ns"][0] == trace.replayed_graph(other).nodes["total_ns"].sum()
    with pytest.raises(UsageError, match=r"no graph with known edges has the id 5; there are: 20, 17"):
        trace.replayed_graph(5)


def test_graphs_of_several_ranks_are_named_with_their_rank() -> None:
    folder = TORCH / "graphs"
    trace = thence.open(*(folder / f"comm_replay_rank{rank}.json.gz" for rank in (0, 1)))
    graph = trace.replayed_graph()
    assert graph.title == f"graph 1 of rank {graph.rank}"
    assert graph.others.select("rank", "graph").rows() == [(1 - graph.rank, 1)]
    assert any("give its trace alone" in text for text in graph.sentences)


def test_labels_of_pytorch_without_edges_say_where_edges_are() -> None:
    trace = thence.open(WITH_IDS).label(ANNOTATED / "kernel_annotations_rank0_block.pkl")
    with pytest.raises(MissingData, match=r"annotation files never do\).*export_graph_data"):
        trace.replayed_graph()
    with pytest.raises(MissingData, match="nothing in it ran in a CUDA graph"):
        thence.open(recording("torch_eager_rank0")).replayed_graph()
    jax = TORCH.parent / "jax" / "recording"
    with pytest.raises(MissingData, match="command buffers of XLA, whose edges no input has"):
        thence.open(jax).replayed_graph()


def test_edges_of_another_program_are_not_used(tmp_path: Path) -> None:
    document = pickle.loads(GRAPH_DATA.read_bytes())
    document["nodes"][0]["kernel_name"] = "another_kernel"
    path = tmp_path / "graph.pkl"
    path.write_bytes(pickle.dumps(document))
    with pytest.raises(MissingData, match="are not those that ran"):
        thence.open(WITH_IDS, path).replayed_graph()


def test_a_cycle_is_damage(tmp_path: Path) -> None:
    trace = replays(tmp_path, {0: (10, 10), 1: (30, 10)})
    with pytest.raises(DamagedInput, match="edges of graph 9 contain a cycle"):
        trace.label(written(tmp_path, [(0, 1), (1, 0)], 2)).replayed_graph()


def test_what_if_follows_the_edges_of_export_graph_data(tmp_path: Path) -> None:
    """The long branch determines the end: without it the last node follows the short one."""
    spans = {0: (10, 10), 1: (22, 40), 2: (22, 10), 3: (64, 10)}
    trace = replays(tmp_path, spans, spans)
    for number, gained in (("1", True), ("2", False)):
        (alone,) = trace.whatif(free=[f"kernel:^k{number}$"]).rows.rows(named=True)
        assert alone["verdict"] == "refused"
        known = trace.label(written(tmp_path, [(0, 1), (0, 2), (1, 3), (2, 3)], 4))
        (row,) = known.whatif(free=[f"kernel:^k{number}$"]).rows.rows(named=True)
        assert (row["verdict"] == "gain") == gained, row
