"""Labels of captured CUDA graphs: the JSON of `thence.save_labels()`, and PyTorch's annotation files.

Label files are read as inputs of their own (`read`), by path (`read_labels`), or found in the folders of
other inputs (`with_labels_beside`).

The JSON holds columns. The type, length and references of every field are checked, because files may
come from other machines. PyTorch 2.12 to 2.14 pickle a dict of node id to annotations
(torch/cuda/_graph_annotations.py): `thence.readers.plain_pickle` reads it without executing anything.
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
from thence.model.collectives import KINETO_KEYS, split
from thence.model.formats import GRAPH_LABELS, GRAPH_LABELS_VERSION
from thence.model.graph_labels import NODES, CapturedGraph, GraphLabels, Kernel, Label, Process
from thence.model.tables import Meta, Tables
from thence.readers.plain_pickle import PickleRefused, load_plain
from thence.readers.source import STANDARD_INPUT, Source

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
__all__ = ["NAME", "PATTERNS", "read", "read_labels", "sniff", "with_labels_beside"]

_MOST_FILES = 1000  # of labels in one folder
NAME = "labels of CUDA graphs (thence.save_labels)"
PATTERNS = ("*labels*.json", "*labels*.json.gz")
"""Files of a directory that may be labels."""
_FORMAT_KEY = re.compile(rf'"format"\s*:\s*"{re.escape(GRAPH_LABELS)}"'.encode())
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_MOST_BYTES = 1 << 30
_MOST_NODES = 20_000_000
_LOW, _HIGH = (1 << 32) - 1, 32
_HOW = "thence.save_labels() at the end of the program writes it anew"
_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Triple = tuple[_Size, _Size, _Size]


def sniff(head: bytes) -> bool:
    """Whether a file that begins like this may hold labels in JSON."""
    return head.lstrip()[:1] == b"{" and _FORMAT_KEY.search(head[:4096]) is not None


def read(source: Source, progress: Callable[[int], None]) -> Tables:
    """Labels among the inputs of a trace: tables with nothing but them.

    Args:
        source: the opened file.
        progress: called with the number of stored bytes consumed so far.

    Raises:
        DamagedInput: the file is cut or wrong.
        UnknownFormat: it is of a version that is not known.
    """
    labels = _parsed(_content(source), source)
    progress(source.consumed)
    meta = Meta(inputs=(source.name,), formats=(NAME,))
    return Tables(graph_labels=(labels,), meta=meta)


def _parsed(content: bytes, source: Source) -> GraphLabels:
    name = source.name
    if source.damage:
        raise DamagedInput(name, f"{source.damage}; {_HOW}")
    try:
        head = msgspec.json.decode(content, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if sniff(content[:4096]):
            raise DamagedInput(name, f"is cut or no valid JSON ({error}); {_HOW}") from error
        raise UnknownFormat(name, _not_labels("is no JSON")) from error
    if head.format != GRAPH_LABELS:
        raise UnknownFormat(name, _not_labels("names another format"))
    if head.version != GRAPH_LABELS_VERSION:
        raise UnknownFormat(
            name,
            f"is of version {head.version}, this thence reads version {GRAPH_LABELS_VERSION}; update thence",
        )
    try:
        file = msgspec.json.decode(content, type=_File)
        if sum(len(graph.nodes.number) for graph in file.graphs) > _MOST_NODES:
            raise DamagedInput(name, f"lists over {_MOST_NODES:,} nodes")
        return GraphLabels(
            name,
            Process(**msgspec.structs.asdict(file.process)),
            tuple(_label(x.path, x.phase, x.lane, x.metadata) for x in file.labels),
            tuple(Kernel(x.name, x.demangled) for x in file.kernels),
            tuple(_graph(graph, file) for graph in file.graphs),
            file.notes,
        )
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise DamagedInput(name, f"does not hold what labels hold: {error}; {_HOW}") from error
    except pl.exceptions.PolarsError as error:
        raise DamagedInput(name, f"holds a number out of range: {error}; {_HOW}") from error


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


def _not_labels(what: str) -> str:
    return f"{what}; expected labels of CUDA graphs, which thence.save_labels() or PyTorch 2.12 to 2.14 wrote"


class _Process(msgspec.Struct):
    pid: int | None = None
    rank: int | None = None
    boot: str | None = None
    started_ns: int | None = None


class _File(msgspec.Struct):
    format: str
    version: int
    process: _Process = msgspec.field(default_factory=_Process)
    labels: tuple[_Label, ...] = ()
    kernels: tuple[_Kernel, ...] = ()
    graphs: tuple[_Graph, ...] = ()
    notes: tuple[str, ...] = ()


class _Label(msgspec.Struct):
    path: tuple[str, ...]
    phase: str | None = None
    lane: str | None = None
    metadata: dict[str, Any] = {}


class _Kernel(msgspec.Struct):
    name: str
    demangled: str | None = None


class _Graph(msgspec.Struct):
    id: int
    nodes: _Nodes
    executables: tuple[int, ...] = ()
    device: int | None = None
    edges: list[tuple[int, int]] | None = None


class _Nodes(msgspec.Struct):
    number: list[int]
    type: list[str]
    label: list[int]
    kernel: list[int] | None = None
    grid: list[_Triple | None] | None = None
    block: list[_Triple | None] | None = None
    shared_memory: list[_Size | None] | None = None
    parent: list[int] | None = None


def _label(
    path: tuple[str, ...], phase: str | None, lane: str | None, metadata: Mapping[str, Any]
) -> Label:
    """A label whose metadata may describe a collective, under Kineto's names."""
    collective, rest = split(metadata)
    return Label(path, phase, lane, rest, collective)


def _graph(graph: _Graph, file: _File) -> CapturedGraph:
    """A graph, after checking that its columns have one length and its references are valid.

    Raises:
        ValueError: a check failed; the message says which.
    """
    nodes, where = graph.nodes, f"graph {graph.id}"
    count = len(nodes.number)
    columns: dict[str, Sequence[Any] | None] = {
        "number": nodes.number,
        "type": nodes.type,
        "label": _references(nodes.label, len(file.labels), f"{where}: label"),
        "kernel": _references(nodes.kernel, len(file.kernels), f"{where}: kernel"),
        "grid": nodes.grid,
        "block": nodes.block,
        "shared_memory": nodes.shared_memory,
        "parent": None if nodes.parent is None else [None if p == -1 else p for p in nodes.parent],
    }
    for name, values in columns.items():
        if values is not None and len(values) != count:
            raise ValueError(f"{where}: {len(values)} values of {name} for {count} nodes")
    numbers = np.array(nodes.number, np.int64)
    if len(np.unique(numbers)) != count or ((numbers < 0) | (numbers > _LOW)).any():
        raise ValueError(f"{where}: node numbers occur twice or are no 32-bit numbers")
    parents = np.array([p for p in columns["parent"] or () if p is not None], np.int64)
    edges = None if graph.edges is None else np.array(graph.edges, np.int64).reshape(-1, 2)
    for what, named in (("parent", parents), ("edge", edges)):
        if named is not None and not np.isin(named, numbers).all():
            raise ValueError(f"{where}: a {what} refers to a node that does not exist")
    ids = (graph.id, *graph.executables)
    if min(ids) < 0 or max(ids) > _LOW:
        raise ValueError(f"{where}: graph ids are 32-bit numbers")
    return CapturedGraph(graph.id, graph.executables, graph.device, _frame(columns, count), edges)


def _references(values: Sequence[int] | None, count: int, what: str) -> list[int | None] | None:
    if values is None:
        return None
    if values and (min(values) < -1 or max(values) >= count):
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


def _content(source: Source) -> bytes:
    content = source.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise DamagedInput(source.name, "over 1 GB, which labels of graphs never are")
    if not content.strip():
        raise UnknownFormat(
            source.name, source.damage or "is empty; expected labels of CUDA graphs"
        )
    return content


def read_labels(path: str | os.PathLike[str]) -> GraphLabels:
    """The labels in a file, JSON (plain or gzipped) or a pickled annotation file of PyTorch.

    Args:
        path: of the file.

    Raises:
        InputError: it cannot be opened.
        UnknownFormat: it holds no labels, or in a version that is not known.
        DamagedInput: it is cut, wrong, or a pickle of anything but plain values.
    """
    with Source.open(str(path)) as source:
        if _PICKLE.match(source.head()):
            return _torch_graph_labels(_content(source), source.name)
        return _parsed(_content(source), source)


def _torch_graph_labels(content: bytes, name: str) -> GraphLabels:
    """Labels from PyTorch's annotations: node id (graph << 32 | number) to a list of dicts, innermost last.

    Every graph id becomes a graph of its own, since the file does not tell ids of captured graphs from
    those of executable graphs.
    """
    try:
        annotations = load_plain(content)
    except PickleRefused as error:
        raise DamagedInput(
            name, f"{error}; expected a pickled annotation file of PyTorch"
        ) from error
    if not isinstance(annotations, dict) or len(annotations) > _MOST_NODES:
        raise UnknownFormat(name, "a pickle, but of no annotations: expected a dict of node ids")
    labels: list[Label] = []
    by_text: dict[str, int] = {}
    ids = np.zeros(len(annotations), np.uint64)
    numbers = np.zeros(len(annotations), np.int32)
    for i, (node, value) in enumerate(annotations.items()):
        if not isinstance(node, int) or isinstance(node, bool) or not 0 <= node < 1 << 64:
            raise DamagedInput(name, f"a key of the annotations is no node id: {node!r:.60}")
        text = repr(value)
        if text not in by_text:
            by_text[text] = len(labels)
            labels.append(_torch_label(value, name))
        ids[i], numbers[i] = node, by_text[text]
    graphs = tuple(_torch_graph(int(g), ids, numbers) for g in np.unique(ids >> np.uint64(_HIGH)))
    note = "PyTorch's annotation files name no process, kernels or edges: only node ids tell what belongs together"
    return GraphLabels(name, labels=tuple(labels), graphs=graphs, notes=(note,))


def _torch_label(annotations: object, name: str) -> Label:
    """One label of the annotations of a node: dicts (key-wise, later ones win), or texts."""
    merged: dict[str, Any] = {}
    for annotation in annotations if isinstance(annotations, list | tuple) else [annotations]:
        if isinstance(annotation, dict):
            merged |= {str(key): value for key, value in annotation.items()}
        elif isinstance(annotation, str):
            merged["name"] = annotation
        elif annotation is not None:
            raise DamagedInput(name, f"an annotation is neither dict nor text: {annotation!r:.60}")
    names = [merged.pop(key) for key in ("name", "str") if key in merged]
    phase = merged.pop("autograd_phase", None)
    stream = merged.pop("stream", None)
    described = merged.get(KINETO_KEYS["group_description"])
    lane = described if described and stream is not None else stream
    path = tuple(str(part) for part in names[:1])
    return _label(
        path, None if phase is None else str(phase), None if lane is None else str(lane), merged
    )


def _torch_graph(graph: int, ids: NDArray[np.uint64], labels: NDArray[np.int32]) -> CapturedGraph:
    rows = np.flatnonzero(ids >> np.uint64(_HIGH) == graph)
    number = (ids[rows] & np.uint64(_LOW)).astype(np.int64)
    order = np.argsort(number)
    columns = {
        "number": number[order].tolist(),
        "type": ["unknown"] * len(rows),  # the file does not say
        "label": labels[rows][order].tolist(),
    }
    return CapturedGraph(graph, (graph,), None, _frame(columns, len(rows)), None)


def with_labels_beside(tables: Tables) -> Tables:
    """The tables with the label files in the folders of their inputs added to the labels they have.

    A label file there that cannot be read becomes a warning, not an error.
    """
    already_read = {Path(name).resolve() for name in tables.meta.inputs}
    already_read |= {Path(graph_labels.source).resolve() for graph_labels in tables.graph_labels}
    folders = {
        Path(name).parent
        for name in tables.meta.inputs
        if name != STANDARD_INPUT and Path(name).is_file()
    }
    added, warnings = [], []
    paths = sorted(
        {path for folder in folders for pattern in PATTERNS for path in folder.glob(pattern)}
    )
    for path in paths[:_MOST_FILES]:
        if path.resolve() in already_read:
            continue
        try:
            with Source.open(str(path)) as source:
                is_labels = sniff(source.head())
            if is_labels:
                added.append(read_labels(path))
        except InputError as error:
            warnings.append(f"{error}; not joined")
    if not added and not warnings:
        return tables
    labels = (*tables.graph_labels, *added)
    return dataclasses.replace(tables, graph_labels=labels).with_warnings(warnings)
