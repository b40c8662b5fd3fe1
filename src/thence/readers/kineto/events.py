"""One piece of a Kineto file as columns.

A piece is a JSON array of whole events. Each event is decoded by msgspec into a typed struct (no
dict per event), and the few fields that thence reads become NumPy columns at once. Category names
and argument keys: pytorch/kineto, libkineto/src/output_json.cpp.

Some facts about a kernel are recorded only with its launch: the kernel's name by AMD's profiler, and the source of
a Triton kernel by Inductor. An annotation belongs to a node of a CUDA graph, so it is decoded once for each node and
piece of the file; `thence.readers.kineto.tables` joins them. This module runs in the decoding processes, which start
without Polars.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from thence.model.collectives import KINETO_KEYS, TEXTS
from thence.model.places import GRAPH_LABELS
from thence.readers.kineto.repair import decode_leniently
from thence.readers.kineto.times import NO_TIME_NS, nanoseconds, possible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from thence.model.arrays import Array

_INPUTS = ("dims", "types", "strides", "values")
_SOURCE_FACTS = ("kernel_file", "kernel_hash", "kernel_kwargs")
# Arguments that Kineto, its Python exporter and the CUPTI exporter write themselves.
_OF_KINETO = frozenset(
    (
        "External id", "queued", "device", "context", "stream", "correlation", "registers per thread",
        "shared memory", "blocks per SM", "warps per SM", "grid", "block", "cluster",
        "est. achieved occupancy %", "occupancy", "graph id", "graph node id", "priority", "channel",
        "channel_type", "bytes", "memory bandwidth (GB/s)", "fromDevice", "inDevice", "toDevice",
        "fromContext", "inContext", "toContext", "copy kind", "src kind", "dst kind", "memory kind",
        "flags", "cuda event", "host fn", "host fn addr", "value", "Comms Id", "Rank",
        "Input Tensors start", "Output Tensors start", "Global rank start", "Global rank stride",
        "Is asynchronized op", "original_stream",
    )
)  # fmt: skip
_NUMERIC_METADATA = frozenset(("grid", "block", "bytes", "device", "context", "queued", "cluster"))
"""Arguments of Kineto that are never text: a text under such a key is an annotation that replaced Kineto's value."""
_BY_THENCE = "label_rule"
_raw_events = msgspec.json.Decoder(list[msgspec.Raw])
MISSING = int(np.iinfo(np.int64).min)
"""Value (int64) in integer columns for an event that lacks the field."""
Columns = dict[str, Any]
"""Column name to array, list of strings, or number; see `decode`."""
NO_TEXT = msgspec.Raw(b"")
_annotation_fields = attrgetter(
    "label", "module", "collective", "annotated_stream", "autograd_phase", "module_fqn", "annotation",
    "annotation_text",
)  # fmt: skip
_NO_ANNOTATION = (None,) * 8
# Kinds of device activities and host categories, by the category of the event. Lower-case names are of torch 1.12
# and newer, the others are older.
_GPU = {"kernel": 0, "gpu_memcpy": 1, "gpu_memset": 2, "Kernel": 0, "Memcpy": 1, "Memset": 2}
_HOST = {
    "cpu_op": "op",
    "Operator": "op",
    "user_annotation": "range",
    "python_function": "python",
    "cuda_runtime": "runtime",
    "hip_runtime": "runtime",
    "xpu_runtime": "runtime",
    "mtia_runtime": "runtime",
    "privateuse1_runtime": "runtime",
    "Runtime": "runtime",
    "cuda_driver": "driver",
    "xpu_driver": "driver",
    "privateuse1_driver": "driver",
    "overhead": "overhead",
}
RECORDED_CATEGORIES = tuple(dict.fromkeys(_HOST.values()))
"""Category names, by their index in ``host.category``."""
_UNPAIRED = ("B", "E")
_WAITING = ("cuda_sync", "cuda_event")
_FORWARD_BACKWARD = ("fwdbwd", "forward_backward", "fwd_bwd")
# Numbers of categories: kinds of device activities first, then host categories.
_FIRST_HOST, _FLOW, _WAITS, _OTHER = 8, 100, 101, 102
_CATEGORY_NUMBERS = (
    _GPU
    | {name: _FIRST_HOST + RECORDED_CATEGORIES.index(category) for name, category in _HOST.items()}
    | dict.fromkeys(_FORWARD_BACKWARD, _FLOW)
    | dict.fromkeys(_WAITING, _WAITS)
)
_NO_COLUMNS = (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError)
"""Errors of events that cannot become columns; an int beyond 64 bits is found only when the columns are made."""
_COLLECTIVE_FIELDS = {name: name for name in KINETO_KEYS} | {"sequence": "collective_sequence"}
"""Columns that describe a collective, and the field of `Args` for each."""
_LABEL_FIELDS = {
    "rule": "label_rule",
    "label": "graph_label",
    "shown_in": "lane",  # the label's lane; the column "lane" is the event's (pid, tid)
    "detail": "label_detail",
    "operator": "operator",
    "inputs": "operator_inputs",
    **{name: name for name in GRAPH_LABELS if name != "label"},
}


def launch_facts(args: Sequence[Any], codes: Mapping[Any, int]) -> dict[str, Any]:
    """Columns ``kernel``, ``metadata`` and ``inputs`` (JSON objects) of host events: numbers of texts, -1 for none.

    Args:
        args: arguments of each host event, as `thence.readers.kineto.events.Args`.
        codes: maps each text to its number.
    """
    columns = {name: np.full(len(args), -1, np.int32) for name in ("kernel", "metadata", "inputs")}
    for row in given(args, "kernel"):
        if isinstance(args[row].kernel, str) and args[row].kernel:
            columns["kernel"][row] = codes[args[row].kernel]
    for row in given(args, "kernel_file"):
        if (facts := _source_facts(args[row])) is not None:
            columns["metadata"][row] = codes[facts]
    inputs: dict[tuple[bytes, ...], int] = {}
    for row, dims in enumerate(map(attrgetter("dims"), args)):
        if dims is NO_TEXT:
            continue
        given_inputs = tuple(bytes(text) or b"[]" for text in map(args[row].__getattribute__, _INPUTS))
        code = inputs.get(given_inputs)
        if code is None:
            texts = (f'"{name}":{_compact(text)}' for name, text in zip(_INPUTS, given_inputs, strict=True))
            code = inputs[given_inputs] = codes[f"{{{','.join(texts)}}}"]
        columns["inputs"][row] = code
    return columns


def _compact(text: bytes) -> str:
    """JSON without blanks between its tokens; Kineto writes a blank after each comma."""
    return msgspec.json.format(text, indent=-1).decode()


def given(rows: Sequence[Any], field: str) -> list[int]:
    """Numbers of the rows whose field is not None; fast if it is None in every row, as most fields are.

    Args:
        rows: events or their arguments.
        field: name of an attribute; a dotted name for an attribute of an attribute.
    """
    values = list(map(attrgetter(field), rows))
    if values.count(None) == len(values):
        return []
    return [row for row, value in enumerate(values) if value is not None]


def coded(values: Iterable[Any], code: Callable[[Any], int], count: int) -> np.ndarray[Any, Any]:
    """Array of the number (int32) of each value."""
    return np.fromiter(map(code, values), np.int32, count)


def triples(values: Iterable[tuple[int, int, int] | None], count: int) -> np.ndarray[Any, Any]:
    """The values as an int64 array of shape (count, 3), with -1 for None."""
    flat = chain.from_iterable(value or (-1, -1, -1) for value in values)
    return np.fromiter(flat, np.int64, 3 * count).reshape(count, 3)


def _source_facts(args: Any) -> str | None:
    """The facts about a Triton kernel's source in the arguments of its launch, as JSON; None if there are none."""
    facts = {name: getattr(args, name) for name in _SOURCE_FACTS}
    told = {name: value for name, value in facts.items() if isinstance(value, str | int | float)}
    return msgspec.json.encode(told).decode() if told else None


class _Annotated(msgspec.Struct, gc=False):
    args: dict[str, Any] = {}


_annotated = msgspec.json.Decoder(_Annotated)


def annotations_of_piece(
    piece: bytes | bytearray | list[bytes], row: Array, lane: Array, graph: Array, node: Array
) -> tuple[Array, list[str]]:
    """The annotations of the device activities of a piece.

    Args:
        piece: the JSON of the events, as one array or one text for each event.
        row: index in the piece of each activity's event.
        lane: number of the viewer's row of each activity.
        graph: graph id of each activity.
        node: node id of each activity, 0 outside of graphs.

    Returns:
        The index of each activity's annotation, -1 for none, and the distinct annotations: JSON objects of all
        arguments that are not Kineto's own.
    """
    number = np.full(len(node), -1, np.int32)
    graphed = np.flatnonzero(node)
    if not len(graphed):
        return number, []
    first, of_key = _distinct_keys(lane[graphed], graph[graphed], node[graphed])
    try:
        events = piece if isinstance(piece, list) else _raw_events.decode(bytes(piece))
    except (msgspec.MsgspecError, RecursionError):
        return number, []
    texts: dict[str, int] = {}
    numbers = []
    for event in row[graphed[first]].tolist():
        annotation = _annotation_text(bytes(events[event]))
        numbers.append(texts.setdefault(annotation, len(texts)) if annotation else -1)
    number[graphed] = np.array(numbers, np.int32)[of_key]
    return number, list(texts)


def _distinct_keys(*columns: Array) -> tuple[Array, Array]:
    """The first row of each distinct combination of values, in ascending order, and each row's combination number."""
    combination = np.zeros(len(columns[0]), np.int64)
    for values in columns:
        different, number = np.unique(values, return_inverse=True)
        combination = combination * len(different) + number
    _, first, of_row = np.unique(combination, return_index=True, return_inverse=True)
    return first, of_row


def _annotation_text(event: bytes) -> str | None:
    """The annotation in an event as JSON; None if there is none, or if thence wrote a label instead."""
    try:
        args = _annotated.decode(event).args
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if _BY_THENCE in args:
        return None
    fields = {
        key: value
        for key, value in args.items()
        if key not in _OF_KINETO or (key in _NUMERIC_METADATA and isinstance(value, str))
    }
    return msgspec.json.encode(fields).decode() if fields else None


class Args(msgspec.Struct, frozen=True, gc=False):
    """The arguments of an event that thence reads; everything else is skipped by the decoder."""

    external: int = msgspec.field(default=MISSING, name="External id")
    correlation: int = MISSING
    device: int = MISSING
    stream: int = MISSING
    original_stream: int = MISSING
    bytes: int = MISSING
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    registers: int = msgspec.field(default=MISSING, name="registers per thread")
    shared_memory: int = msgspec.field(default=MISSING, name="shared memory")
    graph: int = msgspec.field(default=0, name="graph id")
    node: int = msgspec.field(default=0, name="graph node id")
    from_device: int = msgspec.field(default=MISSING, name="fromDevice")
    sequence: int = msgspec.field(default=MISSING, name="Sequence number")
    forward_thread: int = msgspec.field(default=0, name="Fwd thread id")
    # Fields of cuda_sync and cuda_event (waits on and records of CUDA events): -1 if Kineto does not know.
    wait_on_stream: int = MISSING
    wait_on_record: int = msgspec.field(default=MISSING, name="wait_on_cuda_event_record_corr_id")
    wait_on_event: int = msgspec.field(default=MISSING, name="wait_on_cuda_event_id")
    event_id: int = MISSING
    kernel_backend: Any = None
    kernel_file: Any = None
    kernel_hash: Any = None
    kernel_kwargs: Any = None
    kernel: Any = None  # of a launch on AMD's GPUs
    # Inputs of an operator. They stay text, because many operators have the same, and each is parsed once.
    dims: msgspec.Raw = msgspec.field(default=NO_TEXT, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=NO_TEXT, name="Input type")
    strides: msgspec.Raw = msgspec.field(default=NO_TEXT, name="Input Strides")
    values: msgspec.Raw = msgspec.field(default=NO_TEXT, name="Concrete Inputs")
    label: str | int | None = msgspec.field(default=None, name="name")
    collective: str | None = msgspec.field(default=None, name=KINETO_KEYS["collective"])
    in_elements: int = msgspec.field(default=MISSING, name=KINETO_KEYS["in_elements"])
    out_elements: int = msgspec.field(default=MISSING, name=KINETO_KEYS["out_elements"])
    group_size: int = msgspec.field(default=MISSING, name=KINETO_KEYS["group_size"])
    element_type: str = msgspec.field(default="", name=KINETO_KEYS["element_type"])
    group_name: str = msgspec.field(default="", name=KINETO_KEYS["group_name"])
    group_description: str = msgspec.field(default="", name=KINETO_KEYS["group_description"])
    group_ranks: str | list[int] = msgspec.field(default="", name=KINETO_KEYS["group_ranks"])
    in_splits: str | list[int] = msgspec.field(default="", name=KINETO_KEYS["in_splits"])
    out_splits: str | list[int] = msgspec.field(default="", name=KINETO_KEYS["out_splits"])
    collective_sequence: int = msgspec.field(default=MISSING, name=KINETO_KEYS["sequence"])
    source_rank: int = msgspec.field(default=MISSING, name=KINETO_KEYS["source_rank"])
    destination_rank: int = msgspec.field(default=MISSING, name=KINETO_KEYS["destination_rank"])
    # Labels of graphed activities, as thence writes them. Any type: other tools may use the same keys for anything.
    label_rule: Any = None
    label_confidence: Any = None
    label_detail: Any = None
    operator: Any = None
    operator_inputs: Any = None
    operator_node: Any = None
    operator_nodes: Any = None
    graph_label: Any = msgspec.field(default=None, name="label")
    module: Any = None
    op: Any = None
    ops: Any = None
    source: Any = None
    stack: Any = None
    phase: Any = None
    lane: Any = None
    annotations: Any = None
    # Arguments that show, like name, module and collective, that PyTorch or its tools annotated a graphed activity.
    annotated_stream: Any = None
    autograd_phase: Any = None
    module_fqn: Any = None
    annotation: Any = None
    annotation_text: Any = msgspec.field(default=None, name="str")


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """One event. Times stay text (`msgspec.Raw`) so that they never pass through a float."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: msgspec.Raw = NO_TEXT
    dur: msgspec.Raw = NO_TEXT
    id: int | str = MISSING
    args: Args = NO_ARGS


_strict = msgspec.json.Decoder(list[Event])


_lax = msgspec.json.Decoder(list[Event], strict=False)
"""Also accepts numbers written as text; about one sixth slower than `_strict`."""


class _Codes(dict[Any, int]):
    """Numbers values in the order of their first appearance."""

    def __missing__(self, key: object) -> int:
        code = self[key] = len(self)
        return code


class _CategoryNumbers(dict[str, int]):
    """Category -> its number in `_CATEGORY_NUMBERS`; its keys are the categories looked up so far."""

    def __missing__(self, category: str) -> int:
        number = self[category] = _CATEGORY_NUMBERS.get(category, _OTHER)
        return number


def decode(piece: bytes | bytearray, *, annotated: bool = False) -> Columns:
    """The columns of one piece.

    Args:
        piece: a JSON array of events.
        annotated: whether the file states that graphed activities are annotated; if not, annotations are
            looked for only if the arguments of a graphed activity show one.

    Returns:
        ``names``, ``lanes`` and ``annotations``: the distinct names, (pid, tid) pairs, and annotations
        of graphed activities, to which other columns refer by index.
        ``gpu.*``, ``host.*``, ``flow.*``: columns of the device, host and forward-backward flow rows.
        ``collective.*``: columns that describe collectives, with the ``gpu`` or ``host`` row.
        ``joined.*``: labels of graphed activities that thence wrote, with their ``gpu`` row.
        ``waiting.*``: facts about calls that wait, and about CUDA events that are recorded or waited for.
        ``thread.*``: named threads. ``categories``: the categories that occur.
        ``events``, ``damaged``, ``timeless``, ``unpaired``: number of all events, and of events that are
        left out because they could not be read, had no start, or were begin/end events.
    """
    for decoder in (_strict, _lax):
        with suppress(*_NO_COLUMNS):
            return _columns(decoder.decode(piece), piece, 0, annotated=annotated)
    return _readable(*decode_leniently(bytes(piece), Event, Args), annotated=annotated)


def _readable(events: list[Event], texts: list[bytes], damaged: int, *, annotated: bool) -> Columns:
    """The columns of the events that can become columns; the others are found by bisection and count as damaged."""
    waiting = [(0, len(events))]
    kept: list[int] = []
    while waiting:
        begin, end = waiting.pop()
        try:
            columns = _columns(events[begin:end], texts[begin:end], 0, annotated=annotated)
        except _NO_COLUMNS:
            middle = (begin + end) // 2
            waiting += [(middle, end), (begin, middle)] if end - begin > 1 else []
            continue
        if end - begin == len(events):
            return columns | {"events": len(events) + damaged, "damaged": damaged}
        kept += range(begin, end)
    lost = damaged + len(events) - len(kept)
    return _columns([events[row] for row in kept], [texts[row] for row in kept], lost, annotated=annotated)


def _columns(
    events: Sequence[Event], texts: bytes | bytearray | list[bytes], damaged: int, *, annotated: bool
) -> Columns:
    """The columns of decoded events.

    Args:
        events: decoded events.
        texts: their JSON, as one array or one text for each event.
        damaged: number of events that could not be decoded.
        annotated: as in `decode`.
    """
    categories = _CategoryNumbers()
    numbers = np.fromiter(map(categories.__getitem__, map(attrgetter("cat"), events)), np.uint8, len(events))

    def chosen(mask: np.ndarray[Any, Any]) -> list[Event]:
        return list(compress(events, mask.tolist()))

    gpu_mask, host_mask = numbers < _FIRST_HOST, (numbers >= _FIRST_HOST) & (numbers < _FLOW)
    gpu = _Complete.of(chosen(gpu_mask), numbers[gpu_mask])
    host = _Complete.of(chosen(host_mask), numbers[host_mask])
    others = chosen(numbers == _OTHER)
    names, lanes = _Codes(), _Codes()
    columns: Columns = {
        "events": len(events) + damaged,
        "damaged": damaged,
        "timeless": gpu.timeless + host.timeless,
        "unpaired": gpu.unpaired + host.unpaired + sum(e.ph in _UNPAIRED for e in others),
    }
    columns |= _prefixed("gpu", _common(gpu, names, lanes) | _gpu(gpu))
    columns["gpu.annotation"], columns["annotations"] = np.full(len(gpu.events), -1, np.int32), []
    if annotated or _has_annotation(gpu.events, columns["gpu.node"]):
        row = np.flatnonzero(gpu_mask)[gpu.row]
        columns["gpu.annotation"], columns["annotations"] = annotations_of_piece(
            texts, row, *(columns[f"gpu.{name}"] for name in ("lane", "graph", "node"))
        )
    columns |= _prefixed("host", _common(host, names, lanes) | _host(host, names))
    columns |= _prefixed("flow", _flows(chosen(numbers == _FLOW), lanes))
    columns |= _prefixed("waiting", _waiting(chosen(numbers == _WAITS)))
    columns |= _prefixed("thread", _threads(others, lanes))
    columns |= _prefixed("collective", _collectives({"gpu": gpu.events, "host": host.events}))
    columns |= _prefixed("joined", _graph_label_columns(gpu.events))
    columns["names"] = list(names)
    columns["lanes"] = list(lanes)
    columns["categories"] = list(categories)
    return columns


def _has_annotation(events: Sequence[Event], node: np.ndarray[Any, Any]) -> bool:
    """Whether the arguments of any graphed activity show an annotation."""
    graphed = compress(events, node.astype(np.bool_).tolist())
    args = (event.args for event in graphed)
    return any(fields != _NO_ANNOTATION for fields in map(_annotation_fields, args))


@dataclass(frozen=True, slots=True)
class _Complete:
    """Complete events (phase X) with their times, and counts of the events left out.

    Attributes:
        events: the complete events.
        row: index of each complete event among all events.
        number: category number of each complete event.
        start, duration: ns; the duration may be `NO_TIME_NS`.
        timeless: number of complete events without a start time.
        unpaired: number of begin and end events; torch.profiler writes no such events.
    """

    events: list[Event]
    row: np.ndarray[Any, Any]
    number: np.ndarray[Any, Any]
    start: np.ndarray[Any, Any]
    duration: np.ndarray[Any, Any]
    timeless: int
    unpaired: int

    @classmethod
    def of(cls, events: list[Event], number: np.ndarray[Any, Any]) -> _Complete:
        start = possible(nanoseconds(list(map(attrgetter("ts"), events))))
        duration = possible(nanoseconds(list(map(attrgetter("dur"), events))))
        wrong = (start == NO_TIME_NS) | (duration == NO_TIME_NS)
        if not wrong.any():
            return cls(events, np.arange(len(events)), number, start, duration, 0, 0)
        # Only events without a time can be of another phase; the phase of the others need not be checked.
        phases = {row: events[row].ph for row in np.flatnonzero(wrong).tolist()}
        kept = np.array([phases.get(row, "X") == "X" for row in range(len(events))], np.bool_)
        timeless = int((kept & (start == NO_TIME_NS)).sum())
        kept &= start != NO_TIME_NS
        unpaired = sum(phase in _UNPAIRED for phase in phases.values())
        complete = list(compress(events, kept.tolist()))
        row = np.flatnonzero(kept)
        return cls(complete, row, number[kept], start[kept], duration[kept], timeless, unpaired)


def _prefixed(prefix: str, columns: Columns) -> Columns:
    return {f"{prefix}.{name}": values for name, values in columns.items()}


def _numbers(events: Sequence[Any], *fields: str) -> Columns:
    return {name: np.fromiter(map(attrgetter(name), events), np.int64, len(events)) for name in fields}


def _common(rows: _Complete, names: _Codes, lanes: _Codes) -> Columns:
    count = len(rows.events)
    return {
        "name": coded(map(attrgetter("name"), rows.events), names.__getitem__, count),
        "lane": coded(map(attrgetter("pid", "tid"), rows.events), lanes.__getitem__, count),
        "start": rows.start,
        "duration": rows.duration,
    }


def _gpu(rows: _Complete) -> Columns:
    args = list(map(attrgetter("args"), rows.events))
    sizes = _numbers(
        args, "external", "correlation", "device", "stream", "original_stream", "bytes",
        "registers", "shared_memory", "from_device",
    )  # fmt: skip
    count = len(args)
    return sizes | {
        "kind": rows.number,
        # Node ids use all 64 bits: executable graph id << 32 | node id.
        "graph": np.fromiter(map(attrgetter("graph"), args), np.uint64, count),
        "node": np.fromiter(map(attrgetter("node"), args), np.uint64, count),
        "grid": triples(map(attrgetter("grid"), args), count),
        "block": triples(map(attrgetter("block"), args), count),
    }


def _host(rows: _Complete, names: _Codes) -> Columns:
    args = list(map(attrgetter("args"), rows.events))
    numbers = _numbers(args, "external", "correlation", "sequence", "forward_thread")
    is_kernel = np.zeros(len(args), np.bool_)
    is_kernel[given(args, "kernel_backend")] = True  # Inductor's launch of a kernel
    return (
        numbers | launch_facts(args, names) | {"category": rows.number - np.uint8(_FIRST_HOST), "is_kernel": is_kernel}
    )


def _flows(events: Sequence[Event], lanes: _Codes) -> Columns:
    starts = [event.ph == "s" for event in events]
    return {
        "is_start": np.array(starts, np.bool_),
        "id": _coded_ids(events),
        "lane": coded(map(attrgetter("pid", "tid"), events), lanes.__getitem__, len(events)),
        "time": nanoseconds([event.ts for event in events]),
    }


def _waiting(events: Sequence[Event]) -> Columns:
    return _numbers(
        [event.args for event in events],
        *("correlation", "device", "stream", "event_id"),
        *("wait_on_stream", "wait_on_record", "wait_on_event"),
    )


def _coded_ids(events: Sequence[Event]) -> np.ndarray[Any, Any]:
    """Ids as numbers; a text id, which other writers may use, becomes its checksum."""
    ids = (e.id if isinstance(e.id, int) else zlib.crc32(e.id.encode()) for e in events)
    return np.fromiter(ids, np.int64, len(events))


def _threads(events: Sequence[Event], lanes: _Codes) -> Columns:
    named = [e for e in events if e.ph == "M" and e.name == "thread_name" and isinstance(e.args.label, str)]
    return {
        "lane": coded(((e.pid, e.tid) for e in named), lanes.__getitem__, len(named)),
        "name": [str(e.args.label) for e in named],
    }


def _collectives(tables: dict[str, Sequence[Event]]) -> Columns:
    columns: dict[str, list[Any]] = defaultdict(list)
    described: list[Args] = []
    for table, events in tables.items():
        rows = given(events, "args.collective")
        described += [events[row].args for row in rows]
        for other in tables:
            columns[other] += rows if other == table else [-1] * len(rows)
    result: Columns = {name: np.array(rows, np.int64) for name, rows in columns.items()}
    for name, field in _COLLECTIVE_FIELDS.items():
        values = map(attrgetter(field), described)
        if name in TEXTS:
            result[name] = [v if isinstance(v, str) else str(v) for v in values]
        else:
            result[name] = np.fromiter(values, np.int64, len(described))
    return result


def _graph_label_columns(events: Sequence[Event]) -> Columns:
    """Labels of graphed activities from a file that thence wrote."""
    labelled = given(events, "args.label_rule")
    rows = [row for row in labelled if type(events[row].args.label_rule) is str]
    args = [events[row].args for row in rows]
    result: Columns = {name: [_text_or_empty(getattr(arg, key)) for arg in args] for name, key in _LABEL_FIELDS.items()}
    result["metadata"] = [
        msgspec.json.encode(arg.annotations).decode() if isinstance(arg.annotations, dict) else "" for arg in args
    ]
    confidence = (arg.label_confidence for arg in args)
    values = (float(c) if isinstance(c, int | float) else float("nan") for c in confidence)
    result |= {name: np.array([_number(getattr(arg, f"operator_{name}")) for arg in args], np.int64) for name in _PARTS}
    return result | {"gpu": np.array(rows, np.int64), "confidence": np.fromiter(values, np.float64, len(args))}


_PARTS = ("node", "nodes")
_MAX_PART = 1 << 31


def _number(value: object) -> int:
    """A position or a number of nodes; -1 for anything else."""
    return value if type(value) is int and 0 <= value < _MAX_PART else -1


def _text_or_empty(value: object) -> str:
    return value if isinstance(value, str) else ""


class DeviceArgs(msgspec.Struct, frozen=True, gc=False):
    """The arguments that identify a device activity."""

    correlation: int = -1
    device: int | None = None
    stream: int | None = None
    original_stream: int | None = None
    from_device: int | None = msgspec.field(default=None, name="fromDevice")


class DeviceEvent(msgspec.Struct, gc=False):
    """The fields that identify a device activity."""

    ts: msgspec.Raw = NO_TEXT
    dur: msgspec.Raw = NO_TEXT
    pid: int | str = 0
    tid: int | str = 0
    args: DeviceArgs = DeviceArgs()

    def key(self, start: int, duration: int) -> tuple[int, ...]:
        """Device, stream, start, duration and correlation as in the gpu table, with -1 for a null correlation.

        Args:
            start: ns.
            duration: ns.
        """
        args = self.args
        device = next((d for d in (args.device, args.from_device, self.pid) if isinstance(d, int)), 0)
        stream = next((s for s in (args.original_stream, args.stream, self.tid) if isinstance(s, int)), 0)
        return device, stream, start, duration, args.correlation
