"""PyTorch's annotations of CUDA graph nodes, from its annotation files and its annotated traces, and its graph data.

An annotation file holds a dict of node id (executable graph << 32 | number) to a list of dicts, either pickled or
as JSON; node ids are texts in JSON. The file names neither the process nor kernels; the rank is in the file's name,
such as ``kernel_annotations_rank0_fwd.pkl``, by which PyTorch's own tools find the file. `mark_kernels` merges
nested scopes into one dict, in which the keys ``name``, ``stream`` (the lane to show the node on) and
``autograd_phase`` have a meaning; all other keys are the user's.

torch 2.15 also writes the Python stack of each node's launch (``dump_kernel_py_stacks``): JSON of node id to the lines
``file:line:function``, innermost first. Such a text is the stack of its node and not a name, wherever it stands.

Annotations do not hold the edges of a graph. The hook ``torch.cuda.export_graph_data(path)`` of torch 2.15 pickles
them: the id of the executable graph, its nodes (type, kernel, launch shape) and its edges, without labels.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import polars as pl

from thence.errors import DamagedInput, UnknownFormat
from thence.model.collectives import KINETO_KEYS, split
from thence.model.graph_labels import NODES, CapturedGraph, CapturedPlace, GraphLabels, Kernel, Label, Process
from thence.model.json_fields import JsonUInt32, NotAsWritten, decoded
from thence.readers.plain_pickle import PickleRefused, load_plain
from thence.readers.source import file_name

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    from thence.readers.source import NumberedFiles


_MAX_NODES = 20_000_000
_MEMORY_SNAPSHOT = {"segments", "device_traces"}
"""Keys of what ``torch.cuda.memory._dump_snapshot`` pickles."""
_IS_SNAPSHOT = "is a snapshot of PyTorch's memory allocator (torch.cuda.memory), which holds no labels of CUDA graphs"
_MAX_TEXT, _MAX_TEXT_PER_BYTE = 20_000_000, 20
"""Characters of annotations that are compared: of a file of any size, and more for each of its bytes."""
_FIELD = 30  # characters that looking at a field costs as much time as
_LARGE = 1000  # characters of a value whose key is kept
_LOW, _HIGH = (1 << 32) - 1, 32
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_JSON = re.compile(rb'\s*\{\s*"[0-9]{1,20}"\s*:')
_NAME = re.compile(r"kernel_annotations_rank(\d{1,9})(?:[_.].*)?\.(?:pkl|json)")
_NAMES = ("name", "str", "annotation")
"""Keys under which PyTorch and its tools store the name: in 2.13 and newer, in 2.12, and for annotations that
are not dicts."""
_FRAME = re.compile(r"(?P<file>.+):(?P<line>[1-9][0-9]{0,8}):(?P<function>[^\s:]+)")
_PYTHON = (".py", ">")
"""Ends of the files of Python frames: of a stack, at least one frame has such a file, or ``<string>`` and the like."""
_VIEWS = (b"_AnnotationsView", b"_PyStacksView")
"""Classes of torch 2.15 that pickle as nothing but their names."""
_GRAPH_DATA = {"exec_graph_id", "nodes", "edges"}
"""Keys of what ``torch.cuda.CUDAGraph.get_graph_data`` returns and ``export_graph_data`` pickles."""
_NODE_TYPES = {"child_graph": "graph", "wait_event": "event_wait"}
"""Types of nodes that PyTorch names otherwise than `NODES`."""
_GROUP = (KINETO_KEYS["group_name"], KINETO_KEYS["group_description"])


def sniff(head: bytes) -> bool:
    """Whether a file that begins like this may be an annotation file."""
    return _PICKLE.match(head) is not None or _JSON.match(head) is not None


def is_pickle(content: bytes) -> bool:
    """Whether an annotation file is pickled; it is JSON otherwise."""
    return _PICKLE.match(content) is not None


def is_annotation_name(path: str) -> bool:
    """Whether a file has the name that PyTorch's tools expect of an annotation file."""
    return _NAME.fullmatch(file_name(path)) is not None


def annotation_files(folder: Path, ranks: list[int], files: NumberedFiles) -> list[Path]:
    """The annotation files of some ranks in a folder and its parent, found by their names."""
    return [path for place in (folder, folder.resolve().parent) for path in files.of(place, _NAME, ranks)]


def read_annotations(content: bytes, name: str) -> GraphLabels:
    """The labels in an annotation file, or the graph in a file of ``export_graph_data``.

    Every graph id of annotations becomes a graph of its own, since the file does not distinguish ids of captured
    graphs from ids of executable graphs.

    Args:
        content: the whole file.
        name: of the file; it may hold the rank.

    Raises:
        DamagedInput: the file is cut, wrong, or a pickle of anything but plain values.
        UnknownFormat: the file holds anything but a dict, or a snapshot of PyTorch's memory.
    """
    annotations = _loaded(content, name)
    match = _NAME.fullmatch(Path(name).name)
    process = Process(rank=int(match[1]) if match else None)
    if isinstance(annotations, dict) and annotations.keys() >= _GRAPH_DATA:
        graph, kernels = _graph_of_data(annotations, name)
        return GraphLabels(name, process, kernels=kernels, graphs=(graph,))
    if not isinstance(annotations, dict) or len(annotations) > _MAX_NODES:
        raise UnknownFormat(name, "holds no annotations: expected a dict with node ids as keys")
    if annotations.keys() >= _MEMORY_SNAPSHOT:
        raise UnknownFormat(name, _IS_SNAPSHOT)
    distinct = _DistinctLabels(name, len(content))
    ids = np.zeros(len(annotations), np.uint64)
    numbers = np.zeros(len(annotations), np.int32)
    for i, (node, value) in enumerate(annotations.items()):
        ids[i], numbers[i] = _node_id(node, name), distinct.number(value)
    return GraphLabels(name, process, tuple(distinct.labels), graphs=_graphs(ids, numbers))


class _GraphNode(msgspec.Struct):
    """A node in the files of ``export_graph_data``; its other fields are not needed."""

    node_id: JsonUInt32
    node_type: str
    kernel_name: str | None = None
    grid_dim: tuple[JsonUInt32, JsonUInt32, JsonUInt32] | None = None
    block_dim: tuple[JsonUInt32, JsonUInt32, JsonUInt32] | None = None
    shared_mem_bytes: JsonUInt32 | None = None


class _GraphEdge(msgspec.Struct, rename={"source": "from", "target": "to"}):
    """An edge in the files of ``export_graph_data``: positions of two nodes in the list of nodes."""

    source: JsonUInt32
    target: JsonUInt32


class _GraphData(msgspec.Struct):
    """What ``export_graph_data`` pickles."""

    exec_graph_id: JsonUInt32
    nodes: list[_GraphNode]
    edges: list[_GraphEdge]


def _graph_of_data(stored: dict[Any, Any], name: str) -> tuple[CapturedGraph, tuple[Kernel, ...]]:
    """The graph in a file of ``export_graph_data``, and the kernels of its nodes."""
    try:
        data = msgspec.convert(stored, _GraphData)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DamagedInput(name, f"does not hold a graph as torch.cuda.export_graph_data writes it: {error}") from error
    nodes, ids = data.nodes, np.array([node.node_id for node in data.nodes], np.int64)
    ends = np.array([(edge.source, edge.target) for edge in data.edges], np.int64).reshape(-1, 2)
    if len(nodes) > _MAX_NODES or len(np.unique(ids)) < len(ids) or ends.max(initial=-1) >= len(ids):
        raise DamagedInput(name, "lists nodes that occur twice, or edges of nodes that do not exist")
    names = dict.fromkeys(node.kernel_name for node in nodes if node.kernel_name is not None)
    number = {text: i for i, text in enumerate(names)}
    columns: dict[str, Any] = {
        "number": ids,
        "type": [_NODE_TYPES.get(node.node_type, node.node_type) for node in nodes],
        "kernel": [None if node.kernel_name is None else number[node.kernel_name] for node in nodes],
        "grid": [node.grid_dim for node in nodes],
        "block": [node.block_dim for node in nodes],
        "shared_memory": [node.shared_mem_bytes for node in nodes],
    }
    frame = pl.DataFrame(
        {column: pl.Series(column, columns.get(column, [None] * len(nodes)), dtype) for column, dtype in NODES.items()}
    )
    graph = CapturedGraph(data.exec_graph_id, (data.exec_graph_id,), None, frame, ids[ends])
    return graph, tuple(Kernel(text) for text in names)


def _loaded(content: bytes, name: str) -> object:
    if is_pickle(content):
        try:
            return load_plain(content)
        except PickleRefused as error:
            if any(name_of_view in content[:4096] for name_of_view in _VIEWS):
                raise UnknownFormat(
                    name,
                    "holds no annotations, only the name of PyTorch's view of them; save them with "
                    "pickle.dump(dict(get_kernel_annotations()), file)",
                ) from error
            raise DamagedInput(name, f"{error}; expected a pickled annotation file of PyTorch") from error
    try:
        return decoded(content, object)
    except NotAsWritten as error:
        raise DamagedInput(name, f"is cut or not valid JSON ({error})") from error


class _DistinctLabels:
    """The distinct labels among those of all nodes.

    A pickle may refer to one object from many annotations, as PyTorch's do, and hostile ones so often that what
    they describe is a million times the file. So a large object is looked into once, and the work on annotations
    and the text of the distinct ones are limited.

    Attributes:
        labels: the distinct labels so far.
    """

    def __init__(self, file: str, file_bytes: int) -> None:
        self.labels: list[Label] = []
        self._file = file
        self._left = _MAX_TEXT + _MAX_TEXT_PER_BYTE * file_bytes
        self._numbers: dict[Hashable, int] = {}
        self._large: dict[int, Hashable] = {}

    def number(self, value: object) -> int:
        """The number of the label of a node with these annotations; they must live as long as this object."""
        key = self._key(value, 0)
        if key not in self._numbers:
            self._charge(len(repr(value)))
            self._numbers[key] = len(self.labels)
            self.labels.append(_checked_label(value, self._file))
        return self._numbers[key]

    def _key(self, value: object, level: int) -> Hashable:
        """A key that is equal for equal values; level 0: annotations, 1: one of them, 2: a field of it."""
        if isinstance(value, str):
            return value
        key = self._large.get(id(value))
        if key is not None:
            return key
        if level == 0 and isinstance(value, list | tuple):
            key, size = tuple([self._key(x, 1) for x in value]), _FIELD * len(value)
        elif level < 2 and isinstance(value, dict):
            key = tuple([(str(name), self._key(field, 2)) for name, field in value.items()])
            size = _FIELD * len(value)
        else:
            key = (repr(value),)
            size = len(key[0])
        self._charge(size)
        if size > _LARGE:
            self._large[id(value)] = key
        return key

    def _charge(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise DamagedInput(self._file, "repeats its values so often that its annotations are too long")


def _node_id(node: object, name: str) -> int:
    """The node id in a key of the dict: an integer, or a text in JSON."""
    number = int(node) if isinstance(node, str) and re.fullmatch("[0-9]{1,20}", node) else node
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 64:
        raise DamagedInput(name, f"a key of the annotations is not a node id: {node!r:.60}")
    return number


def _checked_label(annotations: object, name: str) -> Label:
    """The label of a node from its annotations: dicts (merged, the last value of a key wins) or names as text."""
    merged: dict[str, Any] = {}
    for annotation in annotations if isinstance(annotations, list | tuple) else [annotations]:
        if isinstance(annotation, dict):
            merged |= {str(key): value for key, value in annotation.items()}
        elif isinstance(annotation, str):
            merged["name"] = annotation
        elif annotation is not None:
            raise DamagedInput(name, f"an annotation is neither a dict nor a string: {annotation!r:.60}")
    return label_of(merged)


def label_of(annotation: dict[str, Any]) -> Label:
    """The label for one dict of annotations.

    If the annotations give a lane and a process group, the lane is the process group: its name and description,
    because two groups may share either of them.
    """
    fields = dict(annotation)
    key = next((key for key in _NAMES if fields.get(key) is not None), None)
    name = None if key is None else str(fields.pop(key))
    stack = _stack(name or "")
    path = () if name is None or stack else (name,)
    phase, stream = fields.pop("autograd_phase", None), fields.pop("stream", None)
    collective, rest = split(fields, path[-1] if path else None)
    group, description = (None if fields.get(key) is None else str(fields[key]) for key in _GROUP)
    lane = None if stream is None else str(stream)
    if group is not None and description is not None and lane is not None:
        lane = f"{group} ({description})"
    elif (group or description) and lane is not None:
        lane = group or description
    place = CapturedPlace(stack=stack) if stack else None
    return Label(path, None if phase is None else str(phase), lane, rest, collective, place)


def _stack(text: str) -> tuple[str, ...]:
    """The frames of a stack as `CapturedPlace.stack` has them; empty if the text is not one."""
    frames = [_FRAME.fullmatch(line) for line in text.split("\n")]
    if None in frames or not any(frame and frame["file"].endswith(_PYTHON) for frame in frames):
        return ()
    return tuple(f"{frame['file']}:{frame['line']} {frame['function']}" for frame in reversed(frames) if frame)


def _graphs(ids: NDArray[np.uint64], labels: NDArray[np.int32]) -> tuple[CapturedGraph, ...]:
    """The graphs in ascending order of their ids, each with its nodes in ascending order of their numbers."""
    order = np.argsort(ids)
    known: dict[str, Any] = {
        "number": (ids[order] & np.uint64(_LOW)).astype(np.int64),
        "label": labels[order],
        "type": ["unknown"] * len(ids),
    }
    nodes = pl.DataFrame(
        {name: pl.Series(name, known.get(name, [None] * len(ids)), dtype) for name, dtype in NODES.items()}
    )
    graph_ids, first, count = np.unique(ids[order] >> np.uint64(_HIGH), return_index=True, return_counts=True)
    return tuple(
        CapturedGraph(graph, (graph,), None, nodes.slice(begin, rows), None)
        for graph, begin, rows in zip(graph_ids.tolist(), first.tolist(), count.tolist(), strict=True)
    )
