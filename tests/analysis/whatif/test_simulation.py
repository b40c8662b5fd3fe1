"""Replay of graphs of chains: against visiting every node by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from thence.analysis.whatif import simulation
from thence.analysis.whatif.simulation import MAX_TOGETHER, Graph, simulated, simulated_together


def visited(graph: Graph) -> list[int]:
    """The time of every node, one by one."""
    into: dict[int, list[tuple[int, int]]] = {}
    for source, target, weight in zip(graph.source, graph.target, graph.edge_weight, strict=True):
        into.setdefault(int(target), []).append((int(source), int(weight)))
    times: list[int] = []
    for node in range(len(graph.time)):
        offers = [times[source] + weight for source, weight in into.get(node, [])]
        previous = int(graph.previous[node])
        if previous >= 0:
            offers.append(times[previous] + int(graph.weight[node]))
        times.append(max(offers, default=int(graph.time[node])) + int(graph.delay[node]))
    return times


def made(seed: int, count: int, chains: int, edges: int) -> Graph:
    random = np.random.default_rng(seed)
    chain = random.integers(0, chains, count)
    previous = np.full(count, -1)
    for number in range(chains):
        rows = np.flatnonzero(chain == number)
        previous[rows[1:]] = rows[:-1]
    source = random.integers(0, count - 1, edges)
    target = np.minimum(source + 1 + random.integers(0, 40, edges), count - 1)
    forward = source < target
    return Graph(
        np.sort(random.integers(0, 20 * count, count)), previous, chain, random.integers(0, 100, count),
        random.integers(0, 9, count), source[forward], target[forward], random.integers(-5, 200, int(forward.sum())),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("block", "rounds"), [(3, 16), (16, 16), (16, 1), (4096, 16), (4096, 0)])
def test_against_visiting_every_node(seed: int, block: int, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "_BLOCK_NODES", block)
    monkeypatch.setattr(simulation, "_MAX_ROUNDS", rounds)
    graph = made(seed, 120, 1 + seed % 5, 90)
    assert simulated(graph).tolist() == visited(graph)


@pytest.mark.parametrize("seed", range(4))
def test_the_simulation_of_what_was_recorded_is_exact(seed: int) -> None:
    graph = made(seed, 300, 4, 200)
    assert simulated(graph.exact()).tolist() == graph.time.tolist()


@pytest.mark.parametrize("count", [2, MAX_TOGETHER + 1])
def test_graphs_of_other_weights_are_simulated_together(count: int) -> None:
    graph = made(5, 200, 3, 150)
    random = np.random.default_rng(1)
    graphs = [
        replace(
            graph, weight=random.integers(0, 100, 200), delay=random.integers(0, 9, 200),
            edge_weight=random.integers(-5, 200, len(graph.source)), shared=graph.order,
        )
        for _ in range(count)
    ]  # fmt: skip
    together = [times.tolist() for times in simulated_together(graphs)]
    assert together == [visited(one) for one in graphs]
    assert len(set(map(tuple, together))) == count


def test_a_graph_of_one_node() -> None:
    one = Graph(*(np.array(values) for values in ([7], [-1], [0], [0], [0], [], [], [])))
    empty = np.empty(0, np.int64)
    one = Graph(one.time, one.previous, one.chain, one.weight, one.delay, empty, empty, empty)
    assert simulated(one).tolist() == [7]
