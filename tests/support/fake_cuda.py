"""A CUDA driver and a CUPTI made of Python, for captures without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

from thence.capture.cuda.driver import KernelNode


@dataclass
class Graph:
    """A graph: its nodes as (type, kernel name or child graph)."""

    id: int
    nodes: list[tuple[str, object]] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)


class FakeCuda:
    """Plays the driver, CUPTI and the current stream. Handles: graph id, and id << 32 | node."""

    def __init__(self) -> None:
        self.graphs: dict[int, Graph] = {}
        self.capturing: dict[int, int] = {}  # stream: graph
        self.stream = 1
        self.asked = 0

    def begin(self, stream: int = 1) -> Graph:
        graph = Graph(len(self.graphs) + 1)
        self.graphs[graph.id] = graph
        self.capturing[stream] = graph.id
        return graph

    def launch(self, name: str, kind: str = "kernel", *, stream: int | None = None) -> None:
        graph = self.graphs[self.capturing[self.stream if stream is None else stream]]
        graph.nodes.append((kind, name))
        if len(graph.nodes) > 1:
            graph.edges.append((len(graph.nodes) - 2, len(graph.nodes) - 1))

    def add_child(self, child: Graph) -> None:
        self.graphs[self.capturing[self.stream]].nodes.append(("graph", child.id))

    # Streams
    def current(self) -> int:
        return self.stream

    def device(self) -> int:
        return 3

    # the driver
    def captured_graph(self, stream: int) -> int | None:
        return self.capturing.get(stream)

    def node_count(self, graph: int) -> int:
        self.asked += 1
        return len(self.graphs[graph].nodes)

    def nodes(self, graph: int) -> list[int]:
        handles = [graph << 32 | n for n in range(len(self.graphs[graph].nodes))]
        return handles[::-1]  # no order is promised

    def edges(self, graph: int) -> list[tuple[int, int]]:
        return [(graph << 32 | a, graph << 32 | b) for a, b in self.graphs[graph].edges]

    def _node(self, node: int) -> tuple[str, object]:
        return self.graphs[node >> 32].nodes[node & 0xFFFFFFFF]

    def node_type(self, node: int) -> str:
        return self._node(node)[0]

    def kernel(self, node: int) -> KernelNode:
        name = self._node(node)[1]
        return KernelNode(None if name == "?" else str(name), (node & 0xFF, 1, 1), (32, 1, 1), 16)

    def child_graph(self, node: int) -> int:
        found = self._node(node)[1]
        assert isinstance(found, int)
        return found

    # CUPTI
    def graph_node_id(self, node: int) -> int:
        return node

    def graph_id(self, graph: int) -> int:
        return graph

    def graph_exec_id(self, graph_exec: int) -> int:
        return graph_exec
