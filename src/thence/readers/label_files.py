"""Labels of captured CUDA graphs: the JSON of `thence.save_labels()`, and PyTorch's annotation files.

Label files are read as inputs of their own (`read`), by path (`read_labels`), or found next to other inputs:
labels in the same folder (`with_labels_beside`), PyTorch's annotation files in the same folder or its parent
(`with_annotations_beside`).

The JSON holds columns. The type, length and references of every field are checked, because files may
come from other machines. PyTorch's files hold a dict of node id to annotations
(`thence.readers.torch_annotations`); pickles are read without executing anything.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import polars as pl

from thence.errors import DamagedInput, InputError, UnknownFormat
from thence.model.collectives import split
from thence.model.formats import GRAPH_LABELS, GRAPH_LABELS_VERSION
from thence.model.graph_labels import (
    NODES,
    CapturedCall,
    CapturedGraph,
    CapturedPlace,
    GraphLabels,
    Kernel,
    Label,
    Process,
)
from thence.model.json_fields import Count, Index, JsonInt64, JsonUInt32, NotAsWritten, Rank, decoded
from thence.model.tables import Meta, Tables
from thence.readers import torch_annotations
from thence.readers.expansion import DEFAULT, Expansion
from thence.readers.source import NumberedFiles, Source

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence

_MAX_FILES = 1000  # label files that are added to one set of tables
NAME = "labels of CUDA graphs (thence.save_labels)"
PATTERNS = ("*labels*.json", "*labels*.json.gz")
"""Globs of the files of a directory that may be labels."""
_FORMAT_KEY = re.compile(rf'"format"\s*:\s*"{re.escape(GRAPH_LABELS)}"'.encode())
_MAX_BYTES = 1 << 30
_MAX_NODES = 20_000_000
_ALLOWED_OBJECTS = 100_000
_MIN_BYTES = 20  # that a file must have for each object beyond _ALLOWED_OBJECTS
_HOW = "call thence.save_labels() at the end of the program to write the file again"
_Triple = tuple[JsonUInt32, JsonUInt32, JsonUInt32]
_Parent = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 32)]  # the number of a node; -1: none
_Share = Annotated[float, msgspec.Meta(ge=0, lt=1.001)]  # rounded


def sniff(head: bytes) -> bool:
    """Whether a file that begins like this may hold labels of CUDA graphs."""
    return torch_annotations.sniff(head) or (head.lstrip()[:1] == b"{" and _FORMAT_KEY.search(head[:4096]) is not None)


def read(source: Source, progress: Callable[[int], None]) -> Tables:
    """Tables that hold only the labels of one label file, which was given as an input of a trace.

    Args:
        progress: called with the number of stored bytes consumed so far.

    Raises:
        DamagedInput: the file is cut or wrong.
        UnknownFormat: the file holds no labels, or its format version is unknown.
    """
    labels = _labels(source)
    progress(source.consumed)
    meta = Meta(inputs=(source.name,), formats=(NAME,))
    return Tables(graph_labels=(labels,), meta=meta)


def _parsed(content: bytes, source: Source) -> GraphLabels:
    name = source.name
    if source.damage:
        raise DamagedInput(name, f"{source.damage}; {_HOW}")
    try:
        head = decoded(content, _Head)
    except NotAsWritten as error:
        if sniff(content[:4096]):
            raise DamagedInput(name, f"is cut or not valid JSON ({error}); {_HOW}") from error
        raise UnknownFormat(name, _not_labels("is not JSON")) from error
    if head.format != GRAPH_LABELS:
        raise UnknownFormat(name, _not_labels("is JSON of another format"))
    if not 1 <= head.version <= GRAPH_LABELS_VERSION:
        raise UnknownFormat(
            name,
            f"has version {head.version}, but this thence reads versions 1 to {GRAPH_LABELS_VERSION}: update thence",
        )
    try:
        file = decoded(content, _File)
        if sum(len(graph.nodes.number) for graph in file.graphs) > _MAX_NODES:
            raise DamagedInput(name, f"lists more than {_MAX_NODES:,} nodes, the limit for one file")
        labels = _Labels(file)
        graphs = tuple(_graph(graph, file, labels) for graph in file.graphs)
        return GraphLabels(
            name,
            Process(**msgspec.structs.asdict(file.process)),
            tuple(labels.found),
            tuple(Kernel(x.name, x.demangled) for x in file.kernels),
            graphs,
            file.notes,
        )
    except ValueError as error:
        raise DamagedInput(name, f"does not hold labels as thence writes them: {error}; {_HOW}") from error


class _Head(msgspec.Struct):
    format: str = ""
    version: JsonInt64 = 0


def _not_labels(what: str) -> str:
    return f"{what}; expected labels of CUDA graphs that thence.save_labels() wrote, or annotations of PyTorch"


class _Process(msgspec.Struct):
    pid: Count | None = None
    rank: Rank | None = None
    boot: str | None = None
    started_ns: Count | None = None


class _File(msgspec.Struct):
    format: str
    version: JsonInt64
    process: _Process = msgspec.field(default_factory=_Process)
    labels: tuple[_Label, ...] = ()
    places: tuple[_Place, ...] = ()
    inputs: tuple[str, ...] = ()
    kernels: tuple[_Kernel, ...] = ()
    graphs: tuple[_Graph, ...] = ()
    notes: tuple[str, ...] = ()


class _Label(msgspec.Struct):
    path: tuple[str, ...]
    phase: str | None = None
    lane: str | JsonInt64 | None = None
    metadata: dict[str, Any] = {}


class _Place(msgspec.Struct):
    module: str | None = None
    stack: tuple[str, ...] = ()
    phase: str | None = None
    op: str | None = None
    parts: tuple[tuple[str | None, str | None, str, str, _Share], ...] = ()
    call: tuple[str, Count, Count, Count] | None = None


class _Kernel(msgspec.Struct):
    name: str
    demangled: str | None = None


class _Graph(msgspec.Struct):
    id: JsonUInt32
    nodes: _Nodes
    executables: tuple[JsonUInt32, ...] = ()
    device: Rank | None = None
    edges: list[tuple[JsonUInt32, JsonUInt32]] | None = None


class _Nodes(msgspec.Struct):
    number: list[JsonUInt32]
    type: list[str]
    label: list[Index]
    place: list[Index] | None = None
    kernel: list[Index] | None = None
    grid: list[_Triple | None] | None = None
    block: list[_Triple | None] | None = None
    shared_memory: list[JsonUInt32 | None] | None = None
    parent: list[_Parent] | None = None


def _label(stored: _Label) -> Label:
    """A label from the file; Kineto's keys in its metadata, if any, become the description of a collective."""
    collective, rest = split(stored.metadata, stored.path[-1] if stored.path else None)
    lane = None if stored.lane is None else str(stored.lane)
    return Label(stored.path, stored.phase, lane, rest, collective)


def _place(stored: _Place, inputs: Sequence[str]) -> CapturedPlace:
    """A place from the file.

    Raises:
        ValueError: its call has inputs outside the file's list, or is of a node that it does not have.
    """
    call = None
    if stored.call is not None:
        name, index, node, nodes = stored.call
        if index >= len(inputs) or node >= nodes:
            raise ValueError(f"place: the call of {name} has inputs {index} and node {node} of {nodes}")
        call = CapturedCall(name, inputs[index], node, nodes)
    return CapturedPlace(stored.module, stored.stack, stored.phase, stored.op, stored.parts, call)


class _Labels:
    """Labels of nodes: the labels of the file, and new labels for nodes that have a place in addition.

    Attributes:
        found: the labels so far.
    """

    def __init__(self, file: _File) -> None:
        self.found = [_label(label) for label in file.labels]
        self._places = [_place(place, file.inputs) for place in file.places]
        self._known: dict[tuple[int | None, int], int] = {}

    def with_places(
        self, labels: Sequence[int | None] | None, places: Sequence[int] | None, where: str
    ) -> list[int | None] | None:
        """Index in `found` of the label of each node; the label includes the node's place.

        Raises:
            ValueError: a place is not an index into the file's list of places.
        """
        placed = _references(places, len(self._places), f"{where}: place")
        if labels is None or placed is None or len(labels) != len(placed):
            return None if labels is None else list(labels)
        return [
            label if place is None else self._joined(label, place) for label, place in zip(labels, placed, strict=True)
        ]

    def _joined(self, label: int | None, place: int) -> int:
        number = self._known.get((label, place))
        if number is None:
            number = self._known[label, place] = len(self.found)
            marks = Label(()) if label is None else self.found[label]
            self.found.append(dataclasses.replace(marks, place=self._places[place]))
        return number


def _graph(graph: _Graph, file: _File, labels: _Labels) -> CapturedGraph:
    """A graph, after checking that its columns have one length and its references are valid.

    Raises:
        ValueError: a check failed; the message says which.
    """
    nodes, where = graph.nodes, f"graph {graph.id}"
    count = len(nodes.number)
    columns: dict[str, Sequence[Any] | None] = {
        "number": nodes.number,
        "type": nodes.type,
        "label": labels.with_places(_references(nodes.label, len(file.labels), f"{where}: label"), nodes.place, where),
        "kernel": _references(nodes.kernel, len(file.kernels), f"{where}: kernel"),
        "grid": nodes.grid,
        "block": nodes.block,
        "shared_memory": nodes.shared_memory,
        "parent": None if nodes.parent is None else [None if p == -1 else p for p in nodes.parent],
    }
    for name, values in (*columns.items(), ("place", nodes.place)):
        if values is not None and len(values) != count:
            raise ValueError(f"{where}: {len(values)} values of {name} for {count} nodes")
    numbers = np.array(nodes.number, np.int64)
    if len(np.unique(numbers)) != count:
        raise ValueError(f"{where}: node numbers occur twice")
    parents = np.array([p for p in columns["parent"] or () if p is not None], np.int64)
    edges = None if graph.edges is None else np.array(graph.edges, np.int64).reshape(-1, 2)
    for what, named in (("parent", parents), ("edge", edges)):
        if named is not None and not np.isin(named, numbers).all():
            raise ValueError(f"{where}: a {what} refers to a node that does not exist")
    return CapturedGraph(graph.id, graph.executables, graph.device, _frame(columns, count), edges)


def _references(values: Sequence[int] | None, count: int, what: str) -> list[int | None] | None:
    if values is None:
        return None
    if values and max(values) >= count:
        raise ValueError(f"{what} has an index outside the list of {count}")
    return [None if value == -1 else value for value in values]


def _frame(columns: Mapping[str, Sequence[Any] | None], count: int) -> pl.DataFrame:
    nothing = [None] * count
    return pl.DataFrame(
        {
            name: pl.Series(name, nothing if columns.get(name) is None else columns[name], dtype)
            for name, dtype in NODES.items()
        }
    )


def _check_objects(content: bytes, name: str) -> None:
    """Refuses JSON in which most objects are empty or nearly so: each object takes some 200 bytes in memory.

    Raises:
        DamagedInput: the JSON has too many objects for its size.
    """
    objects = content.count(b"{")
    if objects > _ALLOWED_OBJECTS + len(content) // _MIN_BYTES:
        raise DamagedInput(name, f"holds {objects:,} JSON objects, most of them empty or nearly so")


def _content(source: Source) -> bytes:
    content = source.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise DamagedInput(source.name, "is larger than 1 GB, the limit for labels of CUDA graphs")
    if not content.strip():
        raise UnknownFormat(source.name, source.damage or "is empty; expected labels of CUDA graphs")
    return content


def read_labels(path: str | os.PathLike[str], expansion: Expansion = DEFAULT) -> GraphLabels:
    """The labels in a file: JSON (plain or gzipped), or an annotation file of PyTorch.

    Args:
        expansion: how much larger than its stored size its content may be.

    Raises:
        InputError: the file cannot be opened.
        UnknownFormat: it holds no labels, or its format version is unknown.
        DamagedInput: it is cut, wrong, or a pickle of anything but plain values.
    """
    with Source.open(str(path), expansion) as source:
        return _labels(source)


def _labels(source: Source) -> GraphLabels:
    head = source.head()
    content = _content(source)
    if not torch_annotations.sniff(head):
        _check_objects(content, source.name)
        return _parsed(content, source)
    if not torch_annotations.is_pickle(content):
        _check_objects(content, source.name)
    if source.damage:
        raise DamagedInput(source.name, source.damage)
    return torch_annotations.read_annotations(content, source.name)


def with_labels_beside(tables: Tables, files: NumberedFiles, expansion: Expansion = DEFAULT) -> Tables:
    """The tables, with labels added from the label files in the folders of their inputs.

    A label file that cannot be read becomes a warning, not an error.
    """
    folders = files.folders(tables.meta.inputs)
    paths = sorted({path for folder in folders for pattern in PATTERNS for path in folder.glob(pattern)})
    if not paths:
        return tables
    already_read = {Path(name).resolve() for name in tables.meta.inputs}
    already_read |= {Path(graph_labels.source).resolve() for graph_labels in tables.graph_labels}
    added, warnings = [], []
    for path in paths[:_MAX_FILES]:
        if path.resolve() in already_read:
            continue
        try:
            with Source.open(str(path), expansion) as source:
                is_labels = sniff(source.head())
            if is_labels:
                added.append(read_labels(path, expansion))
        except InputError as error:
            warnings.append(f"{error}; its labels are not used")
    return _with_more(tables, added, warnings)


def with_annotations_beside(tables: Tables, files: NumberedFiles, expansion: Expansion = DEFAULT) -> Tables:
    """The tables of one input, with labels added from PyTorch's annotation files of its ranks.

    The files are found by name in the folder of the input and in its parent. A file that cannot be read
    becomes a warning.
    """
    if tables.gpu["node"].null_count() == tables.gpu.height:
        return tables  # annotations are matched by node id only
    paths = {
        path.resolve(): path
        for folder in files.folders(tables.meta.inputs)
        for path in torch_annotations.annotation_files(folder, tables.ranks, files)
    }
    added, warnings = [], []
    for path in list(paths.values())[:_MAX_FILES]:
        try:
            added.append(read_labels(path, expansion))
        except InputError as error:
            warnings.append(f"{error}; its labels are not used")
    return _with_more(tables, added, warnings)


def _with_more(tables: Tables, labels: Iterable[GraphLabels], warnings: Iterable[str]) -> Tables:
    all_labels = (*tables.graph_labels, *labels)
    return dataclasses.replace(tables, graph_labels=all_labels).with_warnings(warnings)
