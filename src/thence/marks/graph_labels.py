"""The labels file: what the nodes of captured CUDA graphs were made for; see `thence.model.formats`."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from thence.atomic_files import atomic_write
from thence.errors import MissingData, UsageError
from thence.marks.graph_nodes import CapturedGraph, KernelNames, read_graph
from thence.model.formats import GRAPH_LABELS, GRAPH_LABELS_VERSION
from thence.recorder.process_identity import process_identity

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from thence.cuda.driver import GraphDriver
    from thence.marks.graph_nodes import NodeIds

__all__ = [
    "CapturedNodes",
    "Label",
    "LabelledGraphs",
    "NodePlace",
    "as_text",
    "metadata_text",
    "write_whole",
]

_Named = TypeVar("_Named")

_ACTIVITIES = ("kernel", "memcpy", "memset")


class Label(NamedTuple):
    """What was open when a node was made.

    Attributes:
        path: names of the marks, outermost first.
        phase: forward or backward.
        lane: extra lane that shows it.
        metadata: further facts, as JSON.
    """

    path: tuple[str, ...]
    phase: str = "forward"
    lane: str | None = None
    metadata: str = "{}"


class NodePlace(NamedTuple):
    """Where in the program a node was made, beside its label.

    Attributes:
        module: path of the nn.Module.
        stack: lines, ``file:line function``, outermost first; line 0 where only the function is certain.
        phase: forward, backward, recompute ...
        op: the operator, or in compiled code its main one.
        parts: of a kernel that is made of several parts: module, innermost line, operator, phase and
            estimated share of each.
    """

    module: str | None = None
    stack: tuple[str, ...] = ()
    phase: str | None = None
    op: str | None = None
    parts: tuple[tuple[str | None, str | None, str, str, float], ...] = ()


class CapturedNodes(NamedTuple):
    """How much of what was captured has a label.

    Attributes:
        graphs: captured so far.
        nodes: kernels, copies and sets in them.
        labelled: how many of these nodes have a label.
    """

    graphs: int
    nodes: int
    labelled: int

    def __str__(self) -> str:
        return f"{self.labelled:,} of {self.nodes:,} nodes in {self.graphs:,} captured graphs have a label"


class LabelledGraphs:
    """Every graph that this process captured, with the labels of its nodes.

    Attributes:
        notes: what could not be labelled and why; each sentence once.
    """

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}
        self._graphs: list[CapturedGraph] = []
        self._kernels = KernelNames()
        self._labels: dict[Label, int] = {}
        self._places: dict[NodePlace, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._graphs)

    def add(
        self,
        driver: GraphDriver,
        ids: NodeIds,
        graph: int,
        device: int,
        labels: Iterable[tuple[int, Label | None]],
        places: Iterable[tuple[int, NodePlace | None]] = (),
    ) -> CapturedGraph:
        """Reads a graph that is still in capture.

        Args:
            driver: that knows the graph.
            ids: of its nodes.
            graph: handle of the CUgraph.
            device: index of the CUDA device.
            labels: how many nodes there were when a label (None: no label) began to hold.
            places: the same of places.

        Raises:
            MissingRequirement: the driver or CUPTI refuses.
        """
        with self._lock:
            named = [(count, _index(self._labels, label)) for count, label in labels]
            placed = [(count, _index(self._places, place)) for count, place in places]
            number, nodes, edges = read_graph(driver, ids, graph, named, placed, self._kernels)
            captured = CapturedGraph(number, device, nodes, edges)
            self._graphs.append(captured)
        if "conditional" in nodes.type:
            self.note("the bodies of conditional nodes are not labelled: the driver names no nodes")
        return captured

    def remove(self, captured: CapturedGraph) -> None:
        """The graph was never to be: its capture failed."""
        with self._lock:
            self._graphs = [graph for graph in self._graphs if graph is not captured]

    def count(self) -> CapturedNodes:
        """How many nodes there are, and have a label."""
        with self._lock:
            nodes = [
                label >= 0
                for graph in self._graphs
                for kind, label in zip(graph.nodes.type, graph.nodes.label, strict=True)
                if kind in _ACTIVITIES
            ]
            return CapturedNodes(len(self._graphs), len(nodes), sum(nodes))

    def note(self, sentence: str) -> None:
        """Something that could not be labelled."""
        self.notes[sentence] = None

    def document(self) -> dict[str, Any]:
        """What the labels file holds.

        Raises:
            MissingData: no graph was captured; the message holds the notes.
        """
        if not self._graphs:
            why = " ".join(f"{note[0].upper()}{note[1:]}." for note in self.notes)
            raise MissingData(
                "no CUDA graph was captured in this process while thence watched, so there are no "
                "labels to save. `import thence` and use thence.mark before the capture begins; "
                f"captures through torch.cuda.CUDAGraph are seen. {why}".strip()
            )
        with self._lock:
            return {
                "format": GRAPH_LABELS,
                "version": GRAPH_LABELS_VERSION,
                "process": process_identity(),
                "labels": [
                    {**label._asdict(), "metadata": json.loads(label.metadata)}
                    for label in self._labels
                ],
                "places": [place._asdict() for place in self._places],
                "kernels": self._kernels.columns(),
                "graphs": [asdict(graph) for graph in self._graphs],
                "notes": list(self.notes),
            }


def _index(known: dict[_Named, int], value: _Named | None) -> int:
    """The number of a label or place among the distinct ones."""
    return -1 if value is None else known.setdefault(value, len(known))


def metadata_text(metadata: Mapping[str, object]) -> str:
    """Metadata of a mark as JSON; what JSON cannot say, such as infinity, becomes text."""
    if not metadata:
        return "{}"
    try:
        return _as_json(metadata)
    except (
        ValueError,
        TypeError,
        RecursionError,
    ):  # one value of them: the others stay as they are
        return _as_json({key: _said(value) for key, value in metadata.items()})


def _said(value: object) -> object:
    try:
        _as_json(value)
    except (ValueError, TypeError, RecursionError):
        return as_text(value)
    return value


def as_text(value: object) -> str:
    """A value of metadata as text; of one that cannot say what it is, its type."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - whatever the program's own __str__ raises
        return f"<{type(value).__name__}>"


def _as_json(value: object) -> str:
    return json.dumps(value, default=as_text, sort_keys=True, allow_nan=False)


def write_whole(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Writes JSON; the file appears only when it is complete.

    Raises:
        UsageError: the file cannot be written there.
    """
    target = Path(path)
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    try:
        atomic_write(target, text.encode(errors="replace"))  # half a surrogate pair is no text
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error
