"""Longest paths through a graph of chains: computes the time of every node from the nodes that it waits for.

A node happens after the previous node of its chain (a thread or a stream), and after the sources of its edges:

    time = max(time of the previous in the chain + weight, time of each source + weight of its edge) + delay

Along a chain, this is a prefix maximum of ``x - cumsum(weight + delay)``, so no loop over single nodes is needed. Nodes
are in an order in which every edge leads forward, and are processed in blocks of that order. Within a block, solving
the chains and following the edges alternate until nothing changes, which takes as many rounds as a path inside the
block changes chains. Graphs that differ only in weights and delays are simulated together, as rows of two-dimensional
arrays: a block is small, so most of the cost of an array operation does not depend on the number of rows. A block whose
path changes chains at every few nodes, as in the replay of a CUDA graph with branches, is computed node by node.
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

    from thence.model.arrays import Int64, Mask


BEFORE_ALL = -(1 << 44)
"""A time before all others, in ns, which stands for no constraint. Times are less than 4 hours from 0."""
_CHAIN_OFFSET = 1 << 46
"""More than any two times in a block differ by, in ns; 512 of them fit int64."""
_BLOCK_NODES = 512
"""Nodes of a block: its arrays stay in the cache, and a path inside it changes chains few times."""
_MAX_ROUNDS = 16
"""Rounds of a block after which its nodes are computed one by one, which costs about as much as these rounds."""
MAX_TOGETHER = 8
"""Maximum number of graphs that are simulated at once: each then has a copy of all weights."""


@dataclass(frozen=True)
class _Into:
    """Edges into nodes of a block.

    Attributes:
        edge: numbers of the edges in the order of `Order.by_target`.
        source: source node of each edge; if it is inside the block, the node's place in the block.
        first: position of the first edge of each target.
        target: place of each target in the block.
    """

    edge: Int64
    source: Int64
    first: Int64
    target: Int64

    @classmethod
    def of(cls, edge: Int64, source: Int64, target: Int64) -> _Into:
        """From edges in order of their target nodes."""
        first = np.flatnonzero(np.append(True, target[1:] != target[:-1])[: len(target)])
        return cls(edge, source, first, target[first])

    def raised(self, lowest: Int64, offered: Int64) -> bool:
        """Raises the least times of the targets to the times from their edges; returns whether any changed."""
        best = np.maximum.reduceat(offered, self.first, axis=1)
        before = lowest[:, self.target]
        if (best <= before).all():
            return False
        lowest[:, self.target] = np.maximum(before, best)
        return True


@dataclass(frozen=True)
class _Block:
    """A block of successive nodes, sorted by chain.

    Attributes:
        nodes: the block's slice of `Order.by_chain`.
        rows: the nodes in that slice.
        group: for each node, the number of its chain in the block, from 1, times `_CHAIN_OFFSET`, so that one prefix
            maximum over the block does not carry values from one chain to the next.
        begins, lengths: place in the block where each chain begins, and its number of nodes in the block.
        carried, carried_from: places of the nodes whose previous node is in an earlier block, and these previous nodes.
        outer, inner: edges from earlier blocks, and edges inside the block.
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
    """The order in which simulations of a graph process its nodes and edges; graphs of the same shape share it.

    Attributes:
        by_chain: nodes sorted by block, chain and order.
        by_target: edges sorted by target.
        alone: mask of the nodes without any constraint.
        blocks: the blocks in order.
    """

    by_chain: Int64
    by_target: Int64
    alone: Mask
    blocks: tuple[_Block, ...]


@dataclass(frozen=True)
class Graph:
    """Nodes and edges. Times and weights are ns, int64.

    Attributes:
        time: recorded time of each node, from 0; nodes are sorted by it.
        previous: the previous node in the chain of each node, or `NO_ROW` for the first.
        chain: number of the chain of each node.
        weight: least time of each node after the previous node of its chain.
        delay: time added to the latest of a node's constraints: the part that nothing explains.
        source, target: nodes of each edge; target > source.
        edge_weight: least time of each edge's target after its source.
        shared: the order of another graph with the same nodes and edges; None to compute it.
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
        """The order in which simulations process its nodes and edges."""
        if self.shared is not None:
            return self.shared
        count = len(self.time)
        block = np.arange(count) // _BLOCK_NODES
        by_chain = np.lexsort((np.arange(count), self.chain, block))
        by_target = np.argsort(self.target, kind="stable")
        alone = self.previous == NO_ROW
        alone[self.target] = False
        borders = np.minimum(np.arange(0, count + _BLOCK_NODES, _BLOCK_NODES), count)
        edges = np.searchsorted(self.target[by_target], borders)
        blocks = tuple(
            self._block(slice(*nodes), by_chain[slice(*nodes)], by_target[slice(*into)], into[0])
            for nodes, into in zip(pairwise(borders.tolist()), pairwise(edges.tolist()), strict=True)
        )
        return Order(by_chain, by_target, alone, blocks)

    def _block(self, nodes: slice, rows: Int64, incoming: Int64, edge: int) -> _Block:
        """One block.

        Args:
            nodes: the block's slice of the nodes by chain.
            rows: the nodes in that slice.
            incoming: the edges into these nodes, by target.
            edge: number of the first of these edges among all edges by target.
        """
        place = np.empty(len(rows), np.int64)
        place[rows - nodes.start] = np.arange(len(rows))
        chain = self.chain[rows]
        first = np.append(True, chain[1:] != chain[:-1])[: len(rows)]
        begins = np.flatnonzero(first)
        carried = begins[self.previous[rows[begins]] != NO_ROW]
        source, target = self.source[incoming], place[self.target[incoming] - nodes.start]
        number = np.arange(edge, edge + len(incoming))
        inner = source >= nodes.start
        outer = ~inner
        return _Block(
            nodes, rows, np.cumsum(first) * _CHAIN_OFFSET, begins, np.diff(np.append(begins, len(rows))),
            carried, self.previous[rows[carried]],
            _Into.of(number[outer], source[outer], target[outer]),
            _Into.of(number[inner], place[source[inner] - nodes.start], target[inner]),
        )  # fmt: skip

    def explained(self) -> Int64:
        """The time of each node without its delay, from the recorded times of the other nodes.

        It is `BEFORE_ALL` for nodes without any constraint.
        """
        result = np.where(self.previous == NO_ROW, BEFORE_ALL, self.time[self.previous] + self.weight)
        np.maximum.at(result, self.target, self.time[self.source] + self.edge_weight)
        return result

    def exact(self) -> Graph:
        """The same graph with delays such that its simulation gives the recorded times.

        Nodes without any constraint keep their recorded times.
        """
        explained = self.explained()
        alone = explained == BEFORE_ALL
        delay = np.where(alone, 0, self.time - explained)
        return replace(self, delay=delay, shared=self.order)


def simulated(graph: Graph) -> Int64:
    """The time of every node; nodes without constraints keep their recorded time."""
    times: Int64 = simulated_together([graph])[0]
    return times


def simulated_together(graphs: Sequence[Graph]) -> list[Int64]:
    """The result of `simulated` for each of several graphs, which differ only in weights and delays."""
    return [
        times for low in range(0, len(graphs), MAX_TOGETHER) for times in _simulated(graphs[low : low + MAX_TOGETHER])
    ]


def _simulated(graphs: Sequence[Graph]) -> Int64:
    """The time of every node, with one row for each graph."""
    first, order = graphs[0], graphs[0].order
    weight = np.stack([graph.weight[order.by_chain] for graph in graphs])
    delay = np.stack([graph.delay[order.by_chain] for graph in graphs])
    edge_weight = np.stack([graph.edge_weight[order.by_target] for graph in graphs])
    fixed = np.where(order.alone, first.time, BEFORE_ALL)
    result = np.empty((len(graphs), len(first.time)), np.int64)
    for block in order.blocks:
        part = block.nodes
        lowest = np.repeat(fixed[block.rows][None], len(graphs), axis=0)
        _fill(block, weight[:, part], delay[:, part], edge_weight, lowest, result)
    return result


def _fill(block: _Block, weight: Int64, delay: Int64, edge_weight: Int64, lowest: Int64, result: Int64) -> None:
    """Computes the times of one block, and writes them to ``result``.

    Args:
        weight: weights of its nodes, by chain.
        delay: delays of its nodes, by chain.
        edge_weight: weights of all edges, by target.
        lowest: recorded times of its nodes without constraints, `BEFORE_ALL` for other nodes; it is overwritten.
        result: times of all nodes; those of earlier blocks are known.
    """
    total = np.cumsum(weight + delay, axis=1)
    total -= np.repeat(total[:, block.begins], block.lengths, axis=1)
    lifted = block.group - total
    carried, outer, inner = block.carried, block.outer, block.inner
    if len(carried):
        lowest[:, carried] = np.maximum(lowest[:, carried], result[:, block.carried_from] + weight[:, carried])
    if len(outer.edge):
        outer.raised(lowest, result[:, outer.source] + edge_weight[:, outer.edge])
    delayed = delay + lifted
    times = np.maximum.accumulate(lowest + delayed, axis=1) - lifted
    if len(inner.edge):
        lag = edge_weight[:, inner.edge]
        rounds = 0
        while inner.raised(lowest, times[:, inner.source] + lag):
            if (rounds := rounds + 1) > _MAX_ROUNDS:
                times = _walked(block, weight, delay, lag, lowest)
                break
            times = np.maximum.accumulate(lowest + delayed, axis=1) - lifted
    result[:, block.rows] = times


def _walked(block: _Block, weight: Int64, delay: Int64, lag: Int64, lowest: Int64) -> Int64:
    """The times of one block, computed node by node; arguments as in `_fill`, ``lag`` for the block's inner edges."""
    inner = block.inner
    order = np.argsort(block.rows).tolist()
    previous = np.arange(-1, len(order) - 1)
    previous[block.begins] = NO_ROW
    before, sources = previous.tolist(), inner.source.tolist()
    into: list[Sequence[int]] = [()] * len(order)
    for target, edges in zip(inner.target.tolist(), pairwise([*inner.first.tolist(), len(sources)]), strict=True):
        into[target] = range(*edges)
    rows = []
    for least, step, late, lags in zip(lowest.tolist(), weight.tolist(), delay.tolist(), lag.tolist(), strict=True):
        times = [0] * len(order)
        for node in order:
            time = least[node]
            if before[node] != NO_ROW and times[before[node]] + step[node] > time:
                time = times[before[node]] + step[node]
            for edge in into[node]:
                time = max(time, times[sources[edge]] + lags[edge])
            times[node] = time + late[node]
        rows.append(times)
    return np.array(rows)
