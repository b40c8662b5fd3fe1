"""The partial order of a graph's nodes, with reachability queries.

Reachability uses a chain decomposition: the nodes are divided into paths of the graph, and for each path
a node stores the last position that is an ancestor. A captured graph consists of about as many paths
as streams were captured, so this takes little memory, and a query is one comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thence.model.graph_labels import CapturedGraph

_MOST_CELLS = 60_000_000  # of the table of ancestors: 240 MB


class NotOrdered(ValueError):
    """The edges give no usable order; the message says why."""


@dataclass(frozen=True)
class Topology:
    """The order of the nodes of one graph. Nodes are numbered by their row.

    Attributes:
        order: the nodes in topological order: each comes after all nodes that it waits for.
        edges: int64 array of shape (n, 2): row of a node, and row of a node that waits for it.
        chain: number of the path that each node is on.
        position: position of each node in its path.
        reach: for each node and path, the position of the last ancestor there, -1 for none.
    """

    order: NDArray[np.int64]
    edges: NDArray[np.int64]
    chain: NDArray[np.int64]
    position: NDArray[np.int64]
    reach: NDArray[np.int32]

    @classmethod
    def of(cls, count: int, edges: NDArray[np.int64]) -> Topology:
        """The order that edges give to ``count`` nodes.

        Raises:
            NotOrdered: the edges contain a cycle, or there are far too many parallel branches.
        """
        edges = np.unique(edges.reshape(-1, 2), axis=0)
        before = _neighbours(count, edges[:, 1], edges[:, 0])
        order = _order(count, edges)
        if len(order) < count:
            raise NotOrdered("the edges of the graph contain a cycle")
        chain, position, chains = _chains(order, before)
        if count * chains > _MOST_CELLS:
            raise NotOrdered(f"{count:,} nodes on {chains:,} branches are too many to be ordered")
        reach = np.full((count, chains), -1, np.int32)
        for node in order.tolist():
            last_ancestors = reach[node]
            for earlier in before[node]:
                np.maximum(last_ancestors, reach[earlier], out=last_ancestors)
                last_ancestors[chain[earlier]] = max(last_ancestors[chain[earlier]], position[earlier])
        return cls(order, edges, chain, position, reach)

    def before(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each first node is an ancestor of the second node at the same index."""
        is_ancestor: NDArray[np.bool_] = self.position[first] <= self.reach[second, self.chain[first]]
        return is_ancestor


def edges_of(graph: CapturedGraph) -> tuple[int, NDArray[np.int64]]:
    """The number of nodes to be ordered, and the edges between their rows.

    A node with a child graph starts before the nodes in it; its successors wait for the end of all of
    them. That end becomes an extra node, numbered after the rows of the graph's own nodes.
    """
    assert graph.edges is not None
    numbers = graph.nodes["number"].to_numpy()
    rows = np.argsort(numbers)
    edges = rows[np.searchsorted(numbers, graph.edges, sorter=rows)].reshape(-1, 2)
    parents = graph.nodes["parent"]
    count = graph.nodes.height
    if parents.null_count() == count:
        return count, edges
    inside = np.flatnonzero(parents.is_not_null().to_numpy())
    holder = rows[np.searchsorted(numbers, parents.drop_nulls().to_numpy(), sorter=rows)]
    holders = np.unique(holder)
    end = np.arange(count)
    end[holders] = count + np.arange(len(holders))  # the end node of a holder; other nodes are their own end
    behind = np.stack([end[edges[:, 0]], edges[:, 1]], axis=1)
    begins = np.stack([holder, inside], axis=1)
    ends = np.stack([end[inside], end[holder]], axis=1)
    return count + len(holders), np.concatenate([behind, begins, ends])


def _neighbours(count: int, of: NDArray[np.int64], other: NDArray[np.int64]) -> list[list[int]]:
    result: list[list[int]] = [[] for _ in range(count)]
    for node, neighbour in zip(of.tolist(), other.tolist(), strict=True):
        result[node].append(neighbour)
    return result


def _order(count: int, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """A topological order of the rows; captured nodes are usually in such an order already."""
    if (edges[:, 0] < edges[:, 1]).all():
        return np.arange(count)
    after = _neighbours(count, edges[:, 0], edges[:, 1])
    waits = np.bincount(edges[:, 1], minlength=count).tolist()
    ready = [node for node in range(count) if not waits[node]]
    order = []
    while ready:
        node = ready.pop()
        order.append(node)
        for later in after[node]:
            waits[later] -= 1
            if not waits[later]:
                ready.append(later)
    return np.array(order, np.int64)


def _chains(order: NDArray[np.int64], before: list[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Greedy chain decomposition: a node extends the path of a predecessor that nothing extended yet."""
    count = len(order)
    chain, position = np.zeros(count, np.int64), np.zeros(count, np.int64)
    last: list[int] = []  # node at the end of each path
    path_of, place_of = [0] * count, [0] * count
    for node in order.tolist():
        for earlier in before[node]:
            path = path_of[earlier]
            if last[path] == earlier:
                last[path] = node
                path_of[node], place_of[node] = path, place_of[earlier] + 1
                break
        else:
            path_of[node] = len(last)
            last.append(node)
    chain[:], position[:] = path_of, place_of
    return chain, position, max(len(last), 1)
