"""Reads the nodes of a CUDA graph while it is still being captured, because it may not exist afterwards.

CUPTI numbers a graph's nodes as they are created, and returns the number of a node without a subscriber
(cuptiGetGraphNodeId, since CUDA 11.1). Instantiation keeps these numbers, so a profiler reports them for
every replay, in the low 32 bits of the graph node id.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.capture.cuda.driver import GraphDriver

_NUMBER = 0xFFFFFFFF  # the low word of an id is the number, the high word the graph's id
_MAX_DEMANGLED = 1024
"""Kineto shows longer names as they are (libkineto/src/Demangle.cpp, kMaxSymbolSize)."""


class NodeIds(Protocol):
    """The queries of CUPTI that are needed here."""

    def graph_node_id(self, node: int) -> int:
        """Id of a node: graph id in the high 32 bits, node number in the low ones."""

    def graph_id(self, graph: int) -> int:
        """Id of a graph."""

    def graph_exec_id(self, graph_exec: int) -> int:
        """Id of an executable graph."""


@dataclass
class Nodes:
    """Columns of a graph's nodes, in the order of their creation, nested ones after all others.

    Attributes:
        number: low 32 bits of the id that CUPTI gives the node in a replay.
        type: kernel, memcpy, memset, host, graph, ...
        label: index of the label, -1 without one.
        place: index of the place in the program, -1 without one.
        kernel: index of the kernel's name, -1 without one.
        grid: blocks in x, y, z of a kernel.
        block: threads in x, y, z of a kernel.
        shared_memory: dynamic shared memory of a kernel per block, bytes.
        parent: number of the child-graph node that holds the node, -1 at the top.
    """

    number: list[int] = field(default_factory=list)
    type: list[str] = field(default_factory=list)
    label: list[int] = field(default_factory=list)
    place: list[int] = field(default_factory=list)
    kernel: list[int] = field(default_factory=list)
    grid: list[tuple[int, int, int] | None] = field(default_factory=list)
    block: list[tuple[int, int, int] | None] = field(default_factory=list)
    shared_memory: list[int | None] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)


@dataclass
class CapturedGraph:
    """A graph as it was captured.

    Attributes:
        id: CUPTI's id of the captured graph.
        device: index of the CUDA device.
        nodes: its nodes.
        edges: number of a node, and number of a node that depends on it.
        executables: ids of the executable graphs instantiated from it.
    """

    id: int
    device: int
    nodes: Nodes
    edges: list[tuple[int, int]]
    executables: list[int] = field(default_factory=list)


class KernelNames:
    """The distinct kernel names.

    Attributes:
        names: mangled names, as the driver returns them.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._index: dict[str, int] = {}

    def index(self, name: str) -> int:
        """The index of a name in `names`, to which it is added if it is new."""
        index = self._index.get(name)
        if index is None:
            index = self._index[name] = len(self.names)
            self.names.append(name)
        return index

    def columns(self) -> list[dict[str, str | None]]:
        """The names as the driver returns them, and as Kineto shows them (None: not known)."""
        from thence.capture.recorder.names import demangled  # imports NumPy: not at a program's start

        def shown(name: str) -> str | None:
            plain = len(name) > _MAX_DEMANGLED or not name.startswith("_Z")
            return name if plain else demangled(name.encode())

        return [{"name": name, "demangled": shown(name)} for name in self.names]


class Named(NamedTuple):
    """The index of a node's label and that of its place, -1 for none."""

    label: int = -1
    place: int = -1


@dataclass
class _Reading:
    """One graph being read."""

    driver: GraphDriver
    ids: NodeIds
    kernels: KernelNames
    nodes: Nodes = field(default_factory=Nodes)
    edges: list[tuple[int, int]] = field(default_factory=list)

    def level(self, graph: int, named: Sequence[Named] | Named, parent: int, first: int | None) -> None:
        """Add the nodes of a graph, then those of its child graphs.

        Args:
            named: label and place of each of its nodes, in the order of their creation, or of all nodes.
            parent: number of the child-graph node that holds the graph; -1 for none.
            first: number that its first node will have in a replay; None: the numbers from CUPTI hold.
        """
        by_number = sorted((self.ids.graph_node_id(node) & _NUMBER, node) for node in self.driver.nodes(graph))
        numbers: dict[int, int] = {}
        inside: list[tuple[int, int, Named]] = []
        for rank, (number, node) in enumerate(by_number):
            numbers[node] = number if first is None else first + rank
            own = named if isinstance(named, Named) else named[rank]
            kind = self.driver.node_type(node)
            self._add(node, numbers[node], kind, own, parent)
            if kind == "graph":
                inside.append((node, numbers[node], own))
        self.edges += [(numbers[a], numbers[b]) for a, b in self.driver.edges(graph)]
        for node, number, own in inside:
            self.level(self.driver.child_graph(node), own, number, max(self.nodes.number) + 1)

    def _add(self, node: int, number: int, kind: str, named: Named, parent: int) -> None:
        nodes = self.nodes
        nodes.number.append(number)
        nodes.type.append(kind)
        nodes.label.append(named.label)
        nodes.place.append(named.place)
        nodes.parent.append(parent)
        kernel = self.driver.kernel(node) if kind == "kernel" else None
        name = None if kernel is None else kernel.name
        nodes.kernel.append(-1 if name is None else self.kernels.index(name))
        nodes.grid.append(kernel.grid if kernel else None)
        nodes.block.append(kernel.block if kernel else None)
        nodes.shared_memory.append(kernel.shared_memory if kernel else None)


def read_graph(
    driver: GraphDriver,
    ids: NodeIds,
    graph: int,
    labels: Sequence[tuple[int, int]],
    places: Sequence[tuple[int, int]],
    kernels: KernelNames,
) -> tuple[int, Nodes, list[tuple[int, int]]]:
    """A graph's id, nodes and edges.

    Args:
        driver: used to query the graph.
        ids: used to query the ids of its nodes.
        labels: for each label, the number of nodes from which on it holds, ascending, and the label's index.
        places: the same for places.
        kernels: takes the names of its kernels.

    Raises:
        MissingRequirement: a call of the driver or of CUPTI fails.
    """
    handles = driver.nodes(graph)
    columns = [_of_nodes(starts, len(handles)) for starts in (labels, places)]
    reading = _Reading(driver, ids, kernels)
    reading.level(graph, list(map(Named, *columns)), -1, None)
    return ids.graph_id(graph), reading.nodes, reading.edges


def _of_nodes(starts: Sequence[tuple[int, int]], count: int) -> list[int]:
    """The index of the label or place of each node, in the order of their creation."""
    counts = [start for start, _ in starts]
    indices = [-1, *(index for _, index in starts)]
    return [indices[bisect_right(counts, rank)] for rank in range(count)]
