"""Aligns the activities of a graph replay to the nodes of the captured graph by their times.

The replay has activities with kernel name and shape; the captured graph has nodes with the same data, and
edges. Stream ids are useless, because the driver assigns the nodes of a replay to arbitrary streams.
But a node never starts before its predecessors have ended, and that nearly always suffices:

- Nodes of equal kernels that depend on each other, as in repeated layers, ran in topological order.
- Nodes on parallel branches are distinguished by what must have run before and after them. Each
  activity keeps a set of possible nodes; constraint propagation narrows these sets until nothing
  changes: a node that only one activity can be, or an activity that can only be one node, is final.

Only impossible nodes are ruled out, nothing is guessed: an activity gets a label only if all nodes that
remain possible for it have the same label.

The edges of a graph give a partial order of its nodes (`Topology`). Reachability uses a chain decomposition: the
nodes are divided into paths of the graph, and for each path a node stores the last position that is an ancestor. A
captured graph consists of about as many paths as streams were captured, so this takes little memory, and a query is
one comparison.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thence.model.arrays import Int64, Mask
    from thence.model.graph_labels import CapturedGraph


TOLERANCE_NS = 1000
"""By how much consecutive activities may seem to overlap in a replay (clock of the device)."""
UNDECIDED = -2
"""Stands for a label where several nodes with different labels are possible."""
FOREIGN = -4
"""Stands for a label where no node corresponds to the activity."""
CONTRADICTED = -5
"""Stands for a label about which label files contradict each other."""

_MAX_CELLS = 32_000_000  # of one table of possibilities, of a byte each: more replays are aligned in parts
_ROUNDS = 50  # of narrowing; what is possible after them stays open
# A quarter of the range, so that tolerances can be added without overflow.
_NEVER, _ALWAYS = np.iinfo(np.int64).max // 4, np.iinfo(np.int64).min // 4


@dataclass(frozen=True)
class Pattern:
    """The data of a captured graph that alignment needs.

    Attributes:
        topology: of all its nodes.
        rows: rows of those nodes that leave an activity in a trace.
        signature: for each of these, a number that equal kernels of equal shape share.
        label: for each of these, the number of its label, -1 for none.
    """

    topology: Topology
    rows: Int64
    signature: Int64
    label: Int64


@dataclass(frozen=True)
class Aligned:
    """The result of alignment; arrays of shape (replays, activities).

    Attributes:
        node: index in ``Pattern.rows``, -1 where several nodes are possible.
        label: number of the label, -1 where the node has none, `UNDECIDED` where several are possible.
        contradicts: for each replay, whether its times contradict the edges, so that no label may be used.
        first: for each replay that contradicts, indices in ``Pattern.rows`` of two nodes of which the
            second began too early; -1 where no pair shows it.
    """

    node: Int64
    label: Int64
    contradicts: Mask
    first: Int64


def align(pattern: Pattern, signature: Int64, start: Int64, end: Int64) -> Aligned:
    """Aligns replays to a graph.

    Args:
        signature: int64 (replays, activities): each replay has the signatures of the pattern, in any order.
        start: int64 of the same shape: ns, ascending in each replay.
        end: int64 of the same shape: ns.
    """
    slots = _Slots.of(pattern)
    largest = max((members.size for members in slots.classes if not members.ordered), default=0)
    at_once = max(1, _MAX_CELLS // max(largest**2, pattern.topology.order.size, 1))
    parts = []
    for low in range(0, max(len(start), 1), at_once):
        chosen = slice(low, low + at_once)
        work = _Work.of(slots, signature[chosen], start[chosen], end[chosen])
        work.settle_chains()
        work.verify()
        work.narrow()
        parts.append(work.result())
    return Aligned(*(np.concatenate(column) for column in zip(*parts, strict=True)))


@dataclass(frozen=True)
class _Class:
    """Nodes of one signature, in an order that their edges allow.

    Attributes:
        low, high: range of their slots, which are also the positions of their activities sorted by signature.
        ordered: whether every node waits for the one before it.
        alike: whether all have the same label.
    """

    low: int
    high: int
    ordered: bool
    alike: bool

    @property
    def size(self) -> int:
        """The number of nodes."""
        return self.high - self.low

    @property
    def slots(self) -> slice:
        """The slots of the nodes."""
        return slice(self.low, self.high)


@dataclass(frozen=True)
class _Slots:
    """The nodes of a pattern sorted by signature and topological order; a slot is a position in that order.

    Attributes:
        pattern: the pattern.
        node: index in ``pattern.rows`` of the node at each slot.
        row: row of that node.
        label: number of its label.
        classes: the runs of nodes with one signature.
    """

    pattern: Pattern
    node: Int64
    row: Int64
    label: Int64
    classes: tuple[_Class, ...]

    @classmethod
    def of(cls, pattern: Pattern) -> _Slots:
        topology = pattern.topology
        place = np.empty(len(topology.order), np.int64)
        place[topology.order] = np.arange(len(place))
        node = np.lexsort((place[pattern.rows], pattern.signature))
        row, label, signature = pattern.rows[node], pattern.label[node], pattern.signature[node]
        follows = topology.before(row[:-1], row[1:])
        differs = label[:-1] != label[1:]
        bounds = [0, *(np.flatnonzero(np.diff(signature)) + 1).tolist(), len(node)]
        classes = tuple(
            _Class(low, high, bool(follows[low : high - 1].all()), not differs[low : high - 1].any())
            for low, high in pairwise(bounds)
            if high > low
        )
        return cls(pattern, node, row, label, classes)


@dataclass
class _Work:
    """The state while aligning some replays of one pattern."""

    slots: _Slots
    activity: Int64  # (replays, slots): activity of that signature, by start
    start: Int64  # (replays, slots)
    end: Int64
    label: Int64  # (replays, slots), result
    node: Int64  # (replays, slots), result
    node_start: Int64  # (all nodes, replays); only where known
    node_end: Int64
    known: Mask  # (all nodes, replays): whether the node's activity is known
    contradicts: Mask
    first: Int64
    overlapping: bool = False  # activities overlap predecessors, so only starts are ordered
    possible: dict[_Class, Mask] = field(default_factory=dict)
    """(replays, activities, nodes) of the classes in which several nodes are possible."""

    @classmethod
    def of(cls, slots: _Slots, signature: Int64, start: Int64, end: Int64) -> _Work:
        replays, nodes = len(start), len(slots.pattern.topology.order)
        activity = np.argsort(signature, axis=1, kind="stable")
        return cls(
            slots=slots,
            activity=activity,
            start=np.take_along_axis(start, activity, 1),
            end=np.take_along_axis(end, activity, 1),
            label=np.full(start.shape, UNDECIDED, np.int64),
            node=np.full(start.shape, -1, np.int64),
            node_start=np.zeros((nodes, replays), np.int64),
            node_end=np.zeros((nodes, replays), np.int64),
            known=np.zeros((nodes, replays), np.bool_),
            contradicts=np.zeros(replays, np.bool_),
            first=np.full((replays, 2), -1),
        )

    def settle_chains(self) -> None:
        """Assigns nodes of one signature that depend on each other in topological order."""
        ordered = np.zeros(len(self.slots.node), np.bool_)
        for members in self.slots.classes:
            ordered[members.slots] = members.ordered
            if members.alike:
                self.label[:, members.slots] = self.slots.label[members.low]
        self.label[:, ordered] = self.slots.label[ordered]
        self.node[:, ordered] = self.slots.node[ordered]
        rows = self.slots.row[ordered]
        self.node_start[rows] = self.start[:, ordered].T
        self.node_end[rows] = self.end[:, ordered].T
        self.known[rows] = True
        self._untie()

    def _untie(self) -> None:
        """Makes activities of one class that started at the same time undecided: they have no order."""
        together = self.start[:, 1:] == self.start[:, :-1]
        for members in self.slots.classes:
            together[:, members.low - 1 : members.low] = False  # neighbours with two signatures
        if not together.any():
            return
        tied = np.zeros(self.start.shape, np.bool_)
        tied[:, 1:] |= together
        tied[:, :-1] |= together
        for members in self.slots.classes:
            tied_members = tied[:, members.slots] & members.ordered
            self.node[:, members.slots][tied_members] = -1
            self.known[self.slots.row[members.slots]] &= ~tied_members.T
            if not members.alike:
                self.label[:, members.slots][tied_members] = UNDECIDED

    def verify(self) -> None:
        """Checks the edges: no node may start before a predecessor.

        Also notes whether any node started before a predecessor ended.
        """
        edges = self.slots.pattern.topology.edges
        for chunk in np.array_split(edges, 1 + len(edges) * len(self.start) // _MAX_CELLS):
            first, second = chunk.T
            both = self.known[first] & self.known[second]
            began = self.node_start[second] + TOLERANCE_NS
            self.overlapping |= bool((both & (began < self.node_end[first])).any())
            self._contradict(both & (began < self.node_start[first]), first, second)
        if self.known.all() or not len(edges):
            return
        # Check paths through nodes that leave no activity, or whose activity is not known yet.
        began, nodes = self.node_start + TOLERANCE_NS, np.arange(len(self.known))
        lower, _ = self._bounds()
        if not self.overlapping and (self.known & (began < lower)).any():
            self.overlapping = True
            lower, _ = self._bounds()
        if self.overlapping:
            self._contradict(self.known & (began < lower), np.full(len(nodes), -1), nodes)

    def _contradict(self, early: Mask, first: Int64, second: Int64) -> None:
        contradicted = early.any(axis=0) & ~self.contradicts
        if not contradicted.any():
            return
        index = np.full(self.known.shape[0] + 1, -1)
        rows = self.slots.pattern.rows
        index[rows] = np.arange(len(rows))
        when = np.where(early, self.node_start[second], _NEVER)
        worst = when.argmin(axis=0)[contradicted]
        self.first[contradicted] = np.stack([index[first[worst]], index[second[worst]]], axis=1)
        self.contradicts |= contradicted

    def _bounds(self) -> tuple[Int64, Int64]:
        """Time bounds of each node, shape (all nodes, replays).

        The lower bound is the time before which it cannot have started, the upper bound the time by which
        it must have ended (or started, if activities overlap their predecessors).
        """
        topology = self.slots.pattern.topology
        ended = self.node_start if self.overlapping else self.node_end
        lower = np.full(self.known.shape, _ALWAYS, np.int64)
        upper = np.full(self.known.shape, _NEVER, np.int64)
        before, after = _grouped(topology.edges, 1), _grouped(topology.edges, 0)
        for node in topology.order.tolist():
            for other in before.get(node, ()):
                reached = np.maximum(np.where(self.known[other], ended[other], _ALWAYS), lower[other])
                np.maximum(lower[node], reached, out=lower[node])
        for node in topology.order[::-1].tolist():
            for other in after.get(node, ()):
                began = np.where(self.known[other], self.node_start[other], _NEVER)
                np.minimum(upper[node], np.minimum(began, upper[other]), out=upper[node])
        return lower, upper

    def narrow(self) -> None:
        """Rules out nodes for activities of the classes that are not ordered, until nothing changes."""
        for members in self.slots.classes:
            if not members.ordered and members.size**2 * len(self.start) <= _MAX_CELLS:
                self.possible[members] = self._by_counts(members)
        if all(members.alike for members in self.possible):
            return
        for _ in range(_ROUNDS):
            lower, upper = self._bounds()
            narrowed = [self._narrowed(members, lower, upper) for members in self.possible]
            if not any(narrowed):
                break
        for members in self.possible:
            self._conclude(members)

    def _ends(self, members: _Class) -> Int64:
        ends: Int64 = (self.start if self.overlapping else self.end)[:, members.slots]
        return ends

    def _by_counts(self, members: _Class) -> Mask:
        """Possible nodes by counting the activities of the same signature before and after each activity.

        At least as many must have ended before it as a node of the class has predecessors in the class, and at least
        as many must begin after it as the node has successors.
        """
        rows = self.slots.row[members.slots]
        waits = self.slots.pattern.topology.before(rows[:, None], rows[None, :])
        earlier, later = waits.sum(axis=0), waits.sum(axis=1)
        start, end = self.start[:, members.slots], self._ends(members)
        ended, began = np.empty_like(start), np.empty_like(start)
        for replay in range(len(start)):
            own_start, own_end = start[replay], end[replay]
            ended[replay] = np.searchsorted(np.sort(own_end), own_start + TOLERANCE_NS, "right")
            began[replay] = members.size - np.searchsorted(own_start, own_end - TOLERANCE_NS)
        possible: Mask = (ended[:, :, None] >= earlier) & (began[:, :, None] >= later)
        return possible

    def _narrowed(self, members: _Class, lower: Int64, upper: Int64) -> bool:
        """Rules out impossible nodes; returns whether any were ruled out."""
        possible = self.possible[members]
        count = int(possible.sum())
        rows = self.slots.row[members.slots]
        start, end = self.start[:, members.slots, None], self._ends(members)[:, :, None]
        possible &= start + TOLERANCE_NS >= lower[rows].T[:, None, :]
        possible &= end <= upper[rows].T[:, None, :] + TOLERANCE_NS
        for _ in range(_ROUNDS):
            left = int(possible.sum())
            only = possible.sum(axis=2, keepdims=True) == 1  # the activity can be one node
            possible &= only | ~(possible & only).any(axis=1, keepdims=True)
            alone = possible.sum(axis=1, keepdims=True) == 1  # the node can be one activity
            possible &= alone | ~(possible & alone).any(axis=2, keepdims=True)
            if int(possible.sum()) == left:
                break
        taken = np.asarray(possible.any(axis=1), np.bool_)
        placed = np.asarray(possible.any(axis=2), np.bool_)
        self.contradicts |= ~(taken.all(axis=1) & placed.all(axis=1))
        replay, activity = np.nonzero(possible.sum(axis=2) == 1)
        row = rows[possible[replay, activity].argmax(axis=1)]
        self.node_start[row, replay] = self.start[replay, members.low + activity]
        self.node_end[row, replay] = self.end[replay, members.low + activity]
        self.known[row, replay] = True
        return int(possible.sum()) < count

    def _conclude(self, members: _Class) -> None:
        possible = self.possible[members]
        labels = self.slots.label[members.slots]
        low = np.where(possible, labels, _NEVER).min(axis=2)
        high = np.where(possible, labels, _ALWAYS).max(axis=2)
        self.label[:, members.slots] = np.where(low == high, low, UNDECIDED)
        chosen = self.slots.node[members.slots][possible.argmax(axis=2)]
        self.node[:, members.slots] = np.where(possible.sum(axis=2) == 1, chosen, -1)

    def result(self) -> tuple[Int64, Int64, Mask, Int64]:
        """Node, label, contradicts and first of `Aligned`, in the order of the activities."""
        node, label = np.empty_like(self.node), np.empty_like(self.label)
        np.put_along_axis(node, self.activity, self.node, 1)
        np.put_along_axis(label, self.activity, self.label, 1)
        return node, label, self.contradicts, self.first


def _grouped(edges: Int64, by: int) -> dict[int, list[int]]:
    """Neighbours of each node that has any."""
    result: dict[int, list[int]] = {}
    for pair in edges.tolist():
        result.setdefault(pair[by], []).append(pair[1 - by])
    return result


# ---- The partial order of the nodes


_MAX_ANCESTOR_CELLS = 60_000_000  # of the table of ancestors: 240 MB


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

    order: Int64
    edges: Int64
    chain: Int64
    position: Int64
    reach: NDArray[np.int32]

    @classmethod
    def of(cls, count: int, edges: Int64) -> Topology:
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
        if count * chains > _MAX_ANCESTOR_CELLS:
            raise NotOrdered(f"{count:,} nodes on {chains:,} branches are too many to be ordered")
        reach = np.full((count, chains), -1, np.int32)
        for node in order.tolist():
            last_ancestors = reach[node]
            for earlier in before[node]:
                np.maximum(last_ancestors, reach[earlier], out=last_ancestors)
                last_ancestors[chain[earlier]] = max(last_ancestors[chain[earlier]], position[earlier])
        return cls(order, edges, chain, position, reach)

    def before(self, first: Int64, second: Int64) -> Mask:
        """Whether each first node is an ancestor of the second node at the same index."""
        is_ancestor: Mask = self.position[first] <= self.reach[second, self.chain[first]]
        return is_ancestor


def edges_of(graph: CapturedGraph) -> tuple[int, Int64]:
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


def _neighbours(count: int, nodes: Int64, neighbours: Int64) -> list[list[int]]:
    result: list[list[int]] = [[] for _ in range(count)]
    for node, neighbour in zip(nodes.tolist(), neighbours.tolist(), strict=True):
        result[node].append(neighbour)
    return result


def _order(count: int, edges: Int64) -> Int64:
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


def _chains(order: Int64, before: list[list[int]]) -> tuple[Int64, Int64, int]:
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
