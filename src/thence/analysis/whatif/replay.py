"""Longest paths through a graph of chains: when everything happens, given what it waits for.

A node happens after the one before it in its chain (a thread, a stream), and after others that edges name:

    time = max(time of the previous in the chain + weight, time of each source + weight of its edge) + delay

Along a chain that is a prefix maximum of ``x - cumsum(weight + delay)``, so that no node is visited by itself.
Nodes are in an order in which every edge leads forward, and are done in blocks of that order: within a block chains
are solved and edges are followed in turns, until nothing changes, which takes as many turns as paths inside
the block change their chain. Graphs that differ in weights and delays alone are replayed together, as the rows of
two-dimensional arrays: a block is small, and what an operation costs beside its numbers is shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from thence.model.intervals import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Int64 = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

__all__ = ["BEFORE_ALL", "TOGETHER", "Graph", "Order", "replayed", "replayed_together"]

BEFORE_ALL = -(1 << 44)
"""A time before all others, in ns; what is no constraint has it. Times are less than 4 hours from 0."""
_APART = 1 << 46
_BLOCK = 512
TOGETHER = 8
"""Graphs that are replayed at once at most: each has a copy of all weights then."""


@dataclass(frozen=True)
class _Into:
    """Edges into nodes of a block.

    Attributes:
        edge: which of the edges by target.
        source: node that each comes from; of edges inside of the block its place in the block.
        first: the first of the edges of each target.
        target: place in the block of each target.
    """

    edge: Int64
    source: Int64
    first: Int64
    target: Int64

    @classmethod
    def of(cls, edge: Int64, source: Int64, target: Int64) -> _Into:
        """Of edges in order of their targets' nodes."""
        first = np.flatnonzero(np.append(True, target[1:] != target[:-1])[: len(target)])
        return cls(edge, source, first, target[first])

    def raised(self, least: Int64, offered: Int64) -> bool:
        """Raises the least times of the targets to what their edges offer; whether any was less."""
        best = np.maximum.reduceat(offered, self.first, axis=1)
        before = least[:, self.target]
        if (best <= before).all():
            return False
        least[:, self.target] = np.maximum(before, best)
        return True


@dataclass(frozen=True)
class _Block:
    """Some nodes that follow each other, in order of their chains.

    Attributes:
        nodes: which of the nodes by chain.
        rows: these nodes.
        group: number of the chain of each, from 1, times `_APART`: what keeps chains apart.
        begins, lengths: where each chain begins in the block, and how many nodes it has there.
        carried, carried_from: places of the nodes whose previous one is in an earlier block, and that one.
        outer, inner: edges from earlier blocks, and those inside.
    """

    nodes: slice
    rows: Int64
    group: Int64
    begins: Int64
    lengths: Int64
    carried: Int64
    carried_from: Int64
    outer: _Into
    inner: _Into


@dataclass(frozen=True)
class Order:
    """The nodes of a graph by block and chain, and its edges by target: what all replays of it share.

    Attributes:
        by_chain: nodes by block, chain and order.
        by_target: edges by target.
        alone: nodes without any constraint.
        blocks: in order.
    """

    by_chain: Int64
    by_target: Int64
    alone: Mask
    blocks: tuple[_Block, ...]


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
        by_target = np.argsort(self.target, kind="stable")
        alone = self.previous == NO_ROW
        alone[self.target] = False
        borders = np.minimum(np.arange(0, count + _BLOCK, _BLOCK), count)
        edges = np.searchsorted(self.target[by_target], borders)
        blocks = tuple(
            self._block(slice(*nodes), by_chain[slice(*nodes)], by_target[slice(*into)], into[0])
            for nodes, into in zip(
                pairwise(borders.tolist()), pairwise(edges.tolist()), strict=True
            )
        )
        return Order(by_chain, by_target, alone, blocks)

    def _block(self, nodes: slice, rows: Int64, into: Int64, edge: int) -> _Block:
        """One block.

        Args:
            nodes: which of the nodes by chain.
            rows: these nodes.
            into: the edges into them, by target.
            edge: number of the first of these among all by target.
        """
        place = np.empty(len(rows), np.int64)
        place[rows - nodes.start] = np.arange(len(rows))
        chain = self.chain[rows]
        first = np.append(True, chain[1:] != chain[:-1])[: len(rows)]
        begins = np.flatnonzero(first)
        carried = begins[self.previous[rows[begins]] != NO_ROW]
        source, target = self.source[into], place[self.target[into] - nodes.start]
        number = np.arange(edge, edge + len(into))
        inner = source >= nodes.start
        outer = ~inner
        return _Block(
            nodes, rows, np.cumsum(first) * _APART, begins, np.diff(np.append(begins, len(rows))),
            carried, self.previous[rows[carried]],
            _Into.of(number[outer], source[outer], target[outer]),
            _Into.of(number[inner], place[source[inner] - nodes.start], target[inner]),
        )  # fmt: skip

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


def replayed(graph: Graph) -> Int64:
    """The time of every node; of nodes without constraints the recorded one."""
    times: Int64 = replayed_together([graph])[0]
    return times


def replayed_together(graphs: Sequence[Graph]) -> list[Int64]:
    """As `replayed`, of each of several graphs that differ in weights and delays alone."""
    return [
        times
        for low in range(0, len(graphs), TOGETHER)
        for times in _replayed(graphs[low : low + TOGETHER])
    ]


def _replayed(graphs: Sequence[Graph]) -> Int64:
    """The time of every node, in a row for each graph."""
    first, order = graphs[0], graphs[0].order
    weight = np.stack([graph.weight[order.by_chain] for graph in graphs])
    delay = np.stack([graph.delay[order.by_chain] for graph in graphs])
    edge_weight = np.stack([graph.edge_weight[order.by_target] for graph in graphs])
    fixed = np.where(order.alone, first.time, BEFORE_ALL)
    result = np.empty((len(graphs), len(first.time)), np.int64)
    for block in order.blocks:
        part = block.nodes
        least = np.repeat(fixed[block.rows][None], len(graphs), axis=0)
        _fill(block, weight[:, part], delay[:, part], edge_weight, least, result)
    return result


def _fill(
    block: _Block, weight: Int64, delay: Int64, edge_weight: Int64, least: Int64, result: Int64
) -> None:
    """Fills in the times of one block.

    Args:
        block: whose times are wanted.
        weight: of its nodes, by chain.
        delay: of the same.
        edge_weight: of all edges, by target.
        least: recorded times of its nodes without constraints, `BEFORE_ALL` for others.
        result: times of all nodes; those of earlier blocks are known.
    """
    total = np.cumsum(weight + delay, axis=1)
    total -= np.repeat(total[:, block.begins], block.lengths, axis=1)
    lifted = block.group - total
    carried, outer, inner = block.carried, block.outer, block.inner
    if len(carried):
        least[:, carried] = np.maximum(
            least[:, carried], result[:, block.carried_from] + weight[:, carried]
        )
    if len(outer.edge):
        outer.raised(least, result[:, outer.source] + edge_weight[:, outer.edge])
    delayed = delay + lifted
    times = np.maximum.accumulate(least + delayed, axis=1) - lifted
    if len(inner.edge):
        lag = edge_weight[:, inner.edge]
        while inner.raised(least, times[:, inner.source] + lag):
            times = np.maximum.accumulate(least + delayed, axis=1) - lifted
    result[:, block.rows] = times
