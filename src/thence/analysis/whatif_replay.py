"""Longest paths through a graph of chains: when everything happens, given what it waits for.

A node happens after the one before it in its chain (a thread, a stream), and after others that edges name:

    time = max(time of the previous in the chain + weight, time of each source + weight of its edge) + delay

Along a chain that is a prefix maximum of ``x - cumsum(weight + delay)``, so that no node is visited by itself.
Nodes are in an order in which every edge leads forward, and are done in blocks of that order: within a block chains
are solved and edges are followed in turns, until nothing changes, which takes as many turns as paths inside
the block change their chain.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from thence.model.intervals import NO_ROW

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64 = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

__all__ = ["BEFORE_ALL", "Graph", "Order", "replayed"]

BEFORE_ALL = -(1 << 44)
"""A time before all others, in ns; what is no constraint has it. Times are less than 4 hours from 0."""
_APART = 1 << 46
_BLOCK = 4096


@dataclass(frozen=True)
class Order:
    """The nodes of a graph by block and chain, and its edges by block: what all replays of it share.

    Attributes:
        by_chain: nodes by block, chain and order.
        first: whether each of these is the first of its chain in its block.
        block_of_nodes: where each block begins among them.
        by_target: edges by target.
        block_of_edges: where each block begins among these.
    """

    by_chain: Int64
    first: Mask
    block_of_nodes: Int64
    by_target: Int64
    block_of_edges: Int64


@dataclass(frozen=True)
class Graph:
    """Nodes and edges. Times and weights are ns, int64.

    Attributes:
        time: of each node as recorded, from 0; nodes are in order of it.
        previous: node before it in its chain, `NO_ROW` for the first.
        chain: number of the chain of each node.
        weight: from the previous node of the chain.
        delay: added to what the constraints give; what nothing explains.
        source, target: nodes of each edge; target > source.
        edge_weight: of each edge.
    """

    time: Int64
    previous: Int64
    chain: Int64
    weight: Int64
    delay: Int64
    source: Int64
    target: Int64
    edge_weight: Int64
    shared: Order | None = field(default=None, repr=False)

    @cached_property
    def order(self) -> Order:
        """How its nodes and edges are visited."""
        if self.shared is not None:
            return self.shared
        count = len(self.time)
        block = np.arange(count) // _BLOCK
        by_chain = np.lexsort((np.arange(count), self.chain, block))
        key = self.chain[by_chain]
        first = np.ones(count, np.bool_)
        first[1:] = (key[1:] != key[:-1]) | (block[by_chain][1:] != block[by_chain][:-1])
        by_target = np.argsort(self.target, kind="stable")
        borders = np.arange(0, count + _BLOCK, _BLOCK)
        return Order(
            by_chain,
            first,
            np.minimum(borders, count),
            by_target,
            np.searchsorted(self.target[by_target], borders),
        )

    def explained(self) -> Int64:
        """When each node would have happened, had it not been delayed, given the recorded times of the others."""
        result = np.where(
            self.previous == NO_ROW, BEFORE_ALL, self.time[self.previous] + self.weight
        )
        np.maximum.at(result, self.target, self.time[self.source] + self.edge_weight)
        return result

    def exact(self) -> Graph:
        """The same graph with the delays of which its replay gives the recorded times.

        Nodes without any constraint happen when they did.
        """
        explained = self.explained()
        alone = explained == BEFORE_ALL
        delay = np.where(alone, 0, self.time - explained)
        return replace(self, delay=delay, shared=self.order)


def replayed(graph: Graph, start: Int64 | None = None) -> Int64:
    """The time of every node.

    Args:
        graph: whose replay is asked for.
        start: of nodes without constraints, by node; None: their recorded times.
    """
    order = graph.order
    result = np.empty(len(graph.time), np.int64)
    alone = graph.previous == NO_ROW
    alone[graph.target] = False
    fixed = np.where(alone, graph.time if start is None else start, BEFORE_ALL)
    source, target = graph.source[order.by_target], graph.target[order.by_target]
    edge_weight = graph.edge_weight[order.by_target]
    for number in range(len(order.block_of_nodes) - 1):
        low, high = order.block_of_nodes[number], order.block_of_nodes[number + 1]
        edges = slice(order.block_of_edges[number], order.block_of_edges[number + 1])
        _block(
            graph, order, slice(low, high),
            (source[edges], target[edges], edge_weight[edges]), fixed, result,
        )  # fmt: skip
    return result


def _block(
    graph: Graph,
    order: Order,
    nodes: slice,
    edges: tuple[Int64, Int64, Int64],
    fixed: Int64,
    result: Int64,
) -> None:
    """Fills in the times of one block."""
    rows, first = order.by_chain[nodes], order.first[nodes]
    place = np.empty(len(rows), np.int64)
    place[rows - nodes.start] = np.arange(len(rows))
    group = np.cumsum(first)
    step = graph.weight[rows] + graph.delay[rows]
    total = np.cumsum(step)
    begins = np.flatnonzero(first)
    total -= np.repeat(total[begins], np.diff(np.append(begins, len(rows))))
    least = fixed[rows]
    carried = graph.previous[rows[begins]]
    known = carried != NO_ROW
    least[begins[known]] = np.maximum(
        least[begins[known]], result[carried[known]] + graph.weight[rows[begins[known]]]
    )
    source, target, weight = edges
    inner = source >= nodes.start
    outer = ~inner
    np.maximum.at(least, place[target[outer] - nodes.start], result[source[outer]] + weight[outer])
    source, weight = source[inner] - nodes.start, weight[inner]
    at = place[target[inner] - nodes.start]
    source = place[source]
    delay = graph.delay[rows]
    lifted = group * _APART - total
    while True:
        times = np.maximum.accumulate(least + delay + lifted) - lifted
        offered = times[source] + weight
        late = offered > least[at]
        if not late.any():
            break
        np.maximum.at(least, at[late], offered[late])
    result[rows] = times
