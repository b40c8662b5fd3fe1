"""The labels file: labels and places of the nodes of captured CUDA graphs; see `thence.model.formats`."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from thence.atomic_files import atomic_write, not_written
from thence.capture.marks.graph_nodes import CapturedGraph, KernelNames, read_graph
from thence.capture.recorder.process_identity import process_identity
from thence.errors import MissingData, UsageError
from thence.model.formats import GRAPH_LABELS, GRAPH_LABELS_VERSION

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from thence.capture.cuda.driver import GraphDriver
    from thence.capture.marks.graph_nodes import NodeIds

_Named = TypeVar("_Named")

_ACTIVITIES = ("kernel", "memcpy", "memset")


class Label(NamedTuple):
    """The marks that were open when a node was made.

    Attributes:
        path: names of the marks, outermost first.
        phase: forward or backward.
        lane: extra lane that shows the node; None for none.
        metadata: metadata of the marks, as JSON.
    """

    path: tuple[str, ...]
    phase: str = "forward"
    lane: str | None = None
    metadata: str = "{}"


class NodeCall(NamedTuple):
    """The call of the operator that made a node.

    Attributes:
        name: of the operator, or of the kernel that Inductor generated.
        inputs: their shapes, types, strides and values as JSON (``HOST.inputs``).
        node: position of the node among those of the call, from 0.
        nodes: number of the nodes that the call made.
    """

    name: str
    inputs: str
    node: int
    nodes: int


class NodePlace(NamedTuple):
    """The place in the program in which a node was made.

    Attributes:
        module: path of the nn.Module.
        stack: lines, ``file:line function``, outermost first; line 0 if only the function is certain.
        phase: forward, backward, recompute ...
        op: in compiled code, the operator of the main part of the launch; None in eager code.
        parts: for a kernel with several parts, the module, innermost line, operator, phase and estimated
            share of each part.
        call: of the operator that made the node.
    """

    module: str | None = None
    stack: tuple[str, ...] = ()
    phase: str | None = None
    op: str | None = None
    parts: tuple[tuple[str | None, str | None, str, str, float], ...] = ()
    call: NodeCall | None = None


class CapturedNodes(NamedTuple):
    """How many nodes of captured graphs have a label.

    Attributes:
        graphs: number of graphs captured so far.
        nodes: number of kernels, memcpys and memsets in them.
        labelled: number of these nodes that have a label.
    """

    graphs: int
    nodes: int
    labelled: int

    def __str__(self) -> str:
        return f"{self.labelled:,} of {self.nodes:,} nodes in {self.graphs:,} captured graphs have a label"


class LabelledGraphs:
    """Every graph that this process captured, with the labels of its nodes.

    Attributes:
        notes: sentences about what could not be labelled and why, each once.
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
        """Read a graph that is still being captured.

        Args:
            driver: used to query the graph.
            ids: used to query the ids of its nodes.
            device: index of the CUDA device.
            labels: for each label (None: no label), the number of nodes from which on it holds, and the label.
            places: the same for places.

        Raises:
            MissingRequirement: a call of the driver or of CUPTI fails.
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
        """Discard a graph whose capture failed."""
        with self._lock:
            self._graphs = [graph for graph in self._graphs if graph is not captured]

    def count(self) -> CapturedNodes:
        """Count the nodes, and those that have a label."""
        with self._lock:
            nodes = [
                label >= 0
                for graph in self._graphs
                for kind, label in zip(graph.nodes.type, graph.nodes.label, strict=True)
                if kind in _ACTIVITIES
            ]
            return CapturedNodes(len(self._graphs), len(nodes), sum(nodes))

    def note(self, sentence: str) -> None:
        """Add a sentence to `notes`."""
        self.notes[sentence] = None

    def document(self) -> dict[str, Any]:
        """The content of the labels file.

        Raises:
            MissingData: no graph was captured; the message contains the notes.
        """
        if not self._graphs:
            why = " ".join(f"{note[0].upper()}{note[1:]}." for note in self.notes)
            raise MissingData(
                "no CUDA graph was captured in this process while thence watched, so there are no "
                "labels to save. `import thence` and use thence.mark before the capture begins; "
                f"captures through torch.cuda.CUDAGraph are seen. {why}".strip()
            )
        with self._lock:
            inputs: dict[str, int] = {}
            places = [{**place._asdict(), "call": _stored(place.call, inputs)} for place in self._places]
            return {
                "format": GRAPH_LABELS,
                "version": GRAPH_LABELS_VERSION,
                "process": process_identity(),
                "labels": [{**label._asdict(), "metadata": json.loads(label.metadata)} for label in self._labels],
                "places": places,
                "inputs": list(inputs),
                "kernels": self._kernels.columns(),
                "graphs": [asdict(graph) for graph in self._graphs],
                "notes": list(self.notes),
            }


def _stored(call: NodeCall | None, inputs: dict[str, int]) -> tuple[str, int, int, int] | None:
    """A call with the index of its inputs in place of their text, which many calls share."""
    return None if call is None else (call.name, _index(inputs, call.inputs), call.node, call.nodes)


def _index(known: dict[_Named, int], value: _Named | None) -> int:
    """The index of a label or place among the distinct ones, to which it is added if it is new; -1 for None."""
    return -1 if value is None else known.setdefault(value, len(known))


def metadata_text(metadata: Mapping[str, object]) -> str:
    """Metadata of a mark as JSON; values that JSON does not have, such as infinity, become text."""
    if not metadata:
        return "{}"
    try:
        return _as_json(metadata)
    except (ValueError, TypeError, RecursionError):  # only the values that fail become text
        return _as_json({key: _encodable(value) for key, value in metadata.items()})


def _encodable(value: object) -> object:
    try:
        _as_json(value)
    except (ValueError, TypeError, RecursionError):
        return as_text(value)
    return value


def as_text(value: object) -> str:
    """A value of metadata as text; its type if ``str`` fails."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - whatever the program's own __str__ raises
        return f"<{type(value).__name__}>"


def _as_json(value: object) -> str:
    return json.dumps(value, default=as_text, sort_keys=True, allow_nan=False)


def write_whole(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Write a JSON file atomically.

    Raises:
        UsageError: the file cannot be written there.
    """
    target = Path(path)
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    try:
        atomic_write(target, text.encode(errors="replace"))  # a lone surrogate cannot be encoded
    except OSError as error:
        raise UsageError(not_written(target, error)) from error
