"""One piece of a Kineto file as columns: what an event means.

A piece is a JSON array of whole events. The compiled scanner reads its fields (`thence.readers.kineto.scanner`). A
piece that it refuses, and every piece where it was not built, is decoded by msgspec, each event into a typed struct.
Both are `thence.readers.kineto.rows.Rows`, of which the functions here make NumPy columns.

Some facts about a kernel are recorded only with its launch: the kernel's name by AMD's profiler, and the source of
a Triton kernel by Inductor. An annotation belongs to a node of a CUDA graph, so it is decoded once for each node and
piece of the file; `thence.readers.kineto.tables` joins them. This module runs in the decoding processes, which start
without Polars.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from thence.model.collectives import KINETO_KEYS, TEXTS
from thence.model.places import GRAPH_LABELS
from thence.readers.kineto.event_structs import NO_TEXT, Args, Event
from thence.readers.kineto.repair import decode_leniently
from thence.readers.kineto.rows import INPUTS, DecodedRows
from thence.readers.kineto.scanner import scanned
from thence.readers.kineto.times import NO_TIME_NS, possible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from thence.model.arrays import Array
    from thence.readers.kineto.rows import Rows

_SHORT = 1024
"""Bytes of an operator's inputs up to which they are remembered."""
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
Columns = dict[str, Any]
"""Column name to array, list of strings, or number; see `decode`."""
_ANNOTATION_FIELDS = (
    "label", "module", "collective", "annotated_stream", "autograd_phase", "module_fqn", "annotation",
    "annotation_text",
)  # fmt: skip
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
_INSTANT = "cpu_instant_event"
_COUNTERS = "hardware_counters"
MEMORY_EVENTS = ("[memory]", "[OutOfMemory]")
"""Names of events about memory: a change of what an allocator handed out, and an allocation that failed."""
_MEMORY_FIELDS = ("memory_bytes", "address", "allocated", "reserved", "device_type", "device_id")
_FORWARD_BACKWARD = ("fwdbwd", "forward_backward", "fwd_bwd")
# Numbers of categories: kinds of device activities first, then host categories.
_FIRST_HOST, _FLOW, _WAITS, _INSTANTS, _OTHER = 8, 100, 101, 102, 103
_CATEGORY_NUMBERS = (
    _GPU
    | {name: _FIRST_HOST + RECORDED_CATEGORIES.index(category) for name, category in _HOST.items()}
    | dict.fromkeys(_FORWARD_BACKWARD, _FLOW)
    | dict.fromkeys(_WAITING, _WAITS)
    | {_INSTANT: _INSTANTS}
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


def _launch_facts(host: Rows, codes: Mapping[Any, int]) -> Columns:
    """Columns ``kernel``, ``metadata`` and ``inputs`` (JSON objects) of host events: numbers of texts, -1 for none.

    Args:
        codes: maps each text to its number.
    """
    columns = {name: np.full(len(host), -1, np.int32) for name in ("kernel", "metadata", "inputs")}
    for row, event in _events_with(host, "kernel"):
        if isinstance(event.args.kernel, str) and event.args.kernel:
            columns["kernel"][row] = codes[event.args.kernel]
    for row, event in _events_with(host, "kernel_file"):
        if (facts := _source_facts(event.args)) is not None:
            columns["metadata"][row] = codes[facts]
    rows = host.given("dims")
    number, distinct = host.chosen(rows).coded(*INPUTS)
    columns["inputs"][rows] = _coded(number, map(_inputs, distinct), codes.__getitem__)
    return columns


def _events_with(rows: Rows, field: str) -> Iterable[tuple[int, Event]]:
    """Index and struct of each event that has a field."""
    having = rows.given(field)
    return zip(having.tolist(), rows.chosen(having).events(), strict=True)


def _inputs(texts: tuple[bytes, ...]) -> str:
    """The inputs of an operator as a JSON object."""
    return _known_inputs(texts) if sum(map(len, texts)) < _SHORT else _inputs_object(texts)


def _inputs_object(texts: tuple[bytes, ...]) -> str:
    members = (f'"{name}":{_compact(text or b"[]")}' for name, text in zip(INPUTS, texts, strict=True))
    return f"{{{','.join(members)}}}"


_known_inputs = lru_cache(maxsize=4096)(_inputs_object)
"""Most inputs of a piece are in the pieces before it, too."""


def _compact(text: bytes) -> str:
    """JSON without blanks between its tokens; Kineto writes a blank after each comma."""
    return msgspec.json.format(text, indent=-1).decode()


def _coded(number: Array, values: Iterable[Any], code: Callable[[Any], int]) -> Array:
    """The code (int32) of the value of each row.

    Args:
        number: of each row's value, in the order of their first appearance.
        code: gives the code of a value.
    """
    codes: Array = np.fromiter(map(code, values), np.int32)
    return codes.take(number)  # faster than an index of int32


def _source_facts(args: Any) -> str | None:
    """The facts about a Triton kernel's source in the arguments of its launch, as JSON; None if there are none."""
    facts = {name: getattr(args, name) for name in _SOURCE_FACTS}
    told = {name: value for name, value in facts.items() if isinstance(value, str | int | float)}
    return msgspec.json.encode(told).decode() if told else None


class _Annotated(msgspec.Struct, gc=False):
    args: dict[str, Any] = {}


_annotated = msgspec.json.Decoder(_Annotated)


def annotations_of_piece(
    texts_of: Callable[[Array], list[bytes]], lane: Array, graph: Array, node: Array
) -> tuple[Array, list[str]]:
    """The annotations of the device activities of a piece.

    Args:
        texts_of: the JSON of activities, by their indices.
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
    texts: dict[str, int] = {}
    numbers = []
    for text in texts_of(graphed[first]):
        annotation = _annotation_text(text)
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


_turn = threading.Lock()
"""Of the threads that decode pieces, one makes columns while the others scan. Several at once would only take the GIL
from each other, some hundred times a piece: sixteen of them are slower than two."""
_strict = msgspec.json.Decoder(list[Event])


_lax = msgspec.json.Decoder(list[Event], strict=False)
"""Also accepts numbers written as text; about one sixth slower than `_strict`."""


class _Codes(dict[Any, int]):
    """Numbers values in the order of their first appearance."""

    def __missing__(self, key: object) -> int:
        code = self[key] = len(self)
        return code


def decode(piece: bytes | memoryview, *, annotated: bool = False) -> Columns:
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
        ``memory.*``: changes of allocated memory, and allocations that failed (``kind``: index in `MEMORY_EVENTS`).
        ``counter.*``: values of hardware counters, with the ``device`` and the ``start`` of their sample.
        ``thread.*``: named threads. ``categories``: the categories that occur.
        A table without rows may have no columns.
        ``events``, ``damaged``, ``timeless``, ``unpaired``: number of all events, and of events that are
        left out because they could not be read, had no start, or were begin/end events.
    """
    with suppress(*_NO_COLUMNS):
        if (rows := scanned(piece)) is not None:
            with _turn:
                return _columns(rows(), 0, annotated=annotated)
    for decoder in (_strict, _lax):
        with suppress(*_NO_COLUMNS):
            return _columns(DecodedRows(decoder.decode(piece), piece), 0, annotated=annotated)
    return _readable(*decode_leniently(bytes(piece), Event, Args), annotated=annotated)


def _readable(events: list[Event], texts: list[bytes], damaged: int, *, annotated: bool) -> Columns:
    """The columns of the events that can become columns; the others are found by bisection and count as damaged."""
    waiting = [(0, len(events))]
    kept: list[int] = []
    while waiting:
        begin, end = waiting.pop()
        try:
            columns = _columns(DecodedRows(events[begin:end], texts[begin:end]), 0, annotated=annotated)
        except _NO_COLUMNS:
            middle = (begin + end) // 2
            waiting += [(middle, end), (begin, middle)] if end - begin > 1 else []
            continue
        if end - begin == len(events):
            return columns | {"events": len(events) + damaged, "damaged": damaged}
        kept += range(begin, end)
    lost = damaged + len(events) - len(kept)
    rows = DecodedRows([events[row] for row in kept], [texts[row] for row in kept])
    return _columns(rows, lost, annotated=annotated)


def _columns(rows: Rows, damaged: int, *, annotated: bool) -> Columns:
    """The columns of the events of a piece.

    Args:
        damaged: number of events that could not be decoded.
        annotated: as in `decode`.
    """
    category, categories = rows.coded("cat")
    numbers = np.array([_CATEGORY_NUMBERS.get(name, _OTHER) for name in categories], np.uint8).take(category)
    gpu = _Complete.of(rows, np.flatnonzero(numbers < _FIRST_HOST), numbers)
    host = _Complete.of(rows, np.flatnonzero((numbers >= _FIRST_HOST) & (numbers < _FLOW)), numbers)
    others = rows.chosen(np.flatnonzero(numbers == _OTHER))
    names, lanes = _Codes(), _Codes()
    counters, timeless = _counters(others, names)
    columns: Columns = {
        "events": len(rows) + damaged,
        "damaged": damaged,
        "timeless": gpu.timeless + host.timeless + timeless,
        "unpaired": gpu.unpaired + host.unpaired + _unpaired(others),
    }
    columns |= _prefixed("gpu", _common(gpu, names, lanes) | _gpu(gpu))
    columns["gpu.annotation"], columns["annotations"] = np.full(len(gpu.rows), -1, np.int32), []
    if annotated or _has_annotation(gpu.rows.chosen(np.flatnonzero(columns["gpu.node"]))):
        columns["gpu.annotation"], columns["annotations"] = annotations_of_piece(
            gpu.rows.texts, *(columns[f"gpu.{name}"] for name in ("lane", "graph", "node"))
        )
    columns |= _prefixed("host", _common(host, names, lanes) | _host(host, names))
    if len(flows := rows.chosen(np.flatnonzero(numbers == _FLOW))):
        columns |= _prefixed("flow", _flows(flows, lanes))
    if len(waits := rows.chosen(np.flatnonzero(numbers == _WAITS))):
        columns |= _prefixed("waiting", _waiting(waits))
    if len(instants := rows.chosen(np.flatnonzero(numbers == _INSTANTS))):
        columns |= _prefixed("memory", _memory(instants, lanes))
    columns |= _prefixed("counter", counters)
    columns |= _prefixed("thread", _threads(others, lanes))
    columns |= _prefixed("collective", _collectives({"gpu": gpu.rows, "host": host.rows}))
    columns |= _prefixed("joined", _graph_label_columns(gpu.rows))
    columns["names"] = list(names)
    columns["lanes"] = list(lanes)
    columns["categories"] = list(dict.fromkeys(categories))
    return columns


def _has_annotation(graphed: Rows) -> bool:
    """Whether the arguments of any graphed activity show an annotation."""
    return any(len(graphed.given(field)) for field in _ANNOTATION_FIELDS)


def _unpaired(rows: Rows) -> int:
    number, phases = rows.coded("ph")
    return int(np.array([phase in _UNPAIRED for phase in phases], np.bool_)[number].sum())


@dataclass(frozen=True, slots=True)
class _Complete:
    """Complete events (phase X) with their times, and counts of the events left out.

    Attributes:
        rows: the complete events.
        number: category number of each complete event.
        start, duration: ns; the duration may be `NO_TIME_NS`.
        timeless: number of complete events without a start time.
        unpaired: number of begin and end events; torch.profiler writes no such events.
    """

    rows: Rows
    number: Array
    start: Array
    duration: Array
    timeless: int
    unpaired: int

    @classmethod
    def of(cls, piece: Rows, chosen: Array, numbers: Array) -> _Complete:
        """The complete ones of some events of a piece.

        Args:
            chosen: indices of the events.
            numbers: category number of every event of the piece.
        """
        rows, number = piece.chosen(chosen), numbers[chosen]
        start, duration = possible(rows.times("ts")), possible(rows.times("dur"))
        wrong = (start == NO_TIME_NS) | (duration == NO_TIME_NS)
        if not wrong.any():
            return cls(rows, number, start, duration, 0, 0)
        # Only events without a time can be of another phase; the phase of the others need not be checked.
        incomplete = rows.chosen(np.flatnonzero(wrong))
        phase, phases = incomplete.coded("ph")
        is_complete = np.ones(len(rows), np.bool_)
        is_complete[wrong] = np.array([text == "X" for text in phases], np.bool_)[phase]
        timeless = int((is_complete & (start == NO_TIME_NS)).sum())
        kept = np.flatnonzero(is_complete & (start != NO_TIME_NS))
        return cls(rows.chosen(kept), number[kept], start[kept], duration[kept], timeless, _unpaired(incomplete))


def _prefixed(prefix: str, columns: Columns) -> Columns:
    return {f"{prefix}.{name}": values for name, values in columns.items()}


def _integers(rows: Rows, *fields: str) -> Columns:
    return {name: rows.integers(name) for name in fields}


def _lane(rows: Rows, lanes: _Codes) -> Array:
    return _coded(*rows.coded("pid", "tid"), lanes.__getitem__)


def _common(complete: _Complete, names: _Codes, lanes: _Codes) -> Columns:
    return {
        "name": _coded(*complete.rows.coded("name"), names.__getitem__),
        "lane": _lane(complete.rows, lanes),
        "start": complete.start,
        "duration": complete.duration,
    }


def _gpu(complete: _Complete) -> Columns:
    numbers = _integers(
        complete.rows, "external", "correlation", "device", "stream", "original_stream", "bytes",
        "registers", "shared_memory", "from_device", "graph", "node",
    )  # fmt: skip
    return numbers | {
        "kind": complete.number,
        "grid": complete.rows.triples("grid"),
        "block": complete.rows.triples("block"),
    }


def _host(complete: _Complete, names: _Codes) -> Columns:
    numbers = _integers(complete.rows, "external", "correlation", "sequence", "forward_thread")
    is_kernel = np.zeros(len(complete.rows), np.bool_)
    is_kernel[complete.rows.given("kernel_backend")] = True  # Inductor's launch of a kernel
    facts = _launch_facts(complete.rows, names)
    return numbers | facts | {"category": complete.number - np.uint8(_FIRST_HOST), "is_kernel": is_kernel}


def _flows(rows: Rows, lanes: _Codes) -> Columns:
    phase, phases = rows.coded("ph")
    return {
        "is_start": np.array([text == "s" for text in phases], np.bool_)[phase],
        "id": rows.identifiers(),
        "lane": _lane(rows, lanes),
        "time": rows.times("ts"),
    }


def _waiting(rows: Rows) -> Columns:
    return _integers(
        rows, *("correlation", "device", "stream", "event_id"), *("wait_on_stream", "wait_on_record", "wait_on_event")
    )


def _memory(instants: Rows, lanes: _Codes) -> Columns:
    """Events about memory among the instant events of a host."""
    name, names = instants.coded("name")
    kind = np.array([MEMORY_EVENTS.index(text) if text in MEMORY_EVENTS else -1 for text in names], np.int8)[name]
    rows = instants.chosen(np.flatnonzero(kind >= 0))
    start = possible(rows.times("ts"))
    columns = {"kind": kind[kind >= 0], "lane": _lane(rows, lanes), "start": start, **_integers(rows, *_MEMORY_FIELDS)}
    timed = start != NO_TIME_NS
    return {key: values[timed] for key, values in columns.items()}


def _counters(others: Rows, names: _Codes) -> tuple[Columns, int]:
    """Values of hardware counters, and how many samples have no time.

    Kineto writes an event for each sample, with a category and the device as process. Cuspy writes one for each
    sample and counter, whose process is a text that names the device.
    """
    phase, phases = others.coded("ph")
    if "C" not in phases:
        return {}, 0
    rows = others.chosen(np.flatnonzero(phase == phases.index("C")))
    process, processes = rows.coded("pid")
    category, categories = rows.coded("cat")
    named = np.array([isinstance(pid, str) for pid in processes], np.bool_)[process]
    device = np.array([_counted_device(pid) for pid in processes], np.int32)[process]
    known = named | np.array([text == _COUNTERS for text in categories], np.bool_)[category]
    chosen = np.flatnonzero(known & (device >= 0))
    rows, device = rows.chosen(chosen), device[chosen]
    start = possible(rows.times("ts"))
    timed = np.flatnonzero(start != NO_TIME_NS)
    row, name, value = array("q"), array("i"), array("d")  # a file may hold a million of them
    for number, sample in zip(timed.tolist(), _decoded_samples(rows.texts(timed)), strict=True):
        for counter, counted in sample.args.items():
            if type(counted) in (int, float) and abs(counted) < _MAX_VALUE:
                row.append(number)
                name.append(names[counter or sample.name])
                value.append(counted)
    of_sample = np.array(row, np.int64)
    columns = {"device": device[of_sample], "start": start[of_sample], "name": np.array(name, np.int32)}
    return columns | {"value": np.array(value, np.float64)}, len(rows) - len(timed)


def _decoded_samples(texts: list[bytes]) -> list[_Sample]:
    """Samples of counters; an empty one for each that had to be repaired."""
    try:
        return _samples.decode(b"[" + b",".join(texts) + b"]")
    except _NO_COLUMNS:
        return [_decoded_samples([text])[0] if len(texts) > 1 else _Sample() for text in texts]


def _counted_device(process: int | str) -> int:
    """The device of a process of counters; -1 if there is none."""
    if isinstance(process, str):
        named = _COUNTED.fullmatch(process)
        return int(named[1]) if named else -1
    return process if 0 <= process < _MAX_DEVICE else -1


def _threads(others: Rows, lanes: _Codes) -> Columns:
    labelled = others.chosen(others.given("label"))
    if not len(labelled):
        return {}
    is_name = [e.ph == "M" and e.name == "thread_name" and isinstance(e.args.label, str) for e in labelled.events()]
    named = labelled.chosen(np.flatnonzero(is_name))
    return {"lane": _lane(named, lanes), "name": [str(event.args.label) for event in named.events()]}


def _collectives(tables: dict[str, Rows]) -> Columns:
    columns: dict[str, list[Any]] = defaultdict(list)
    described: list[Args] = []
    for table, events in tables.items():
        rows = events.given("collective")
        described += [event.args for event in events.chosen(rows).events()]
        for other in tables:
            columns[other] += rows.tolist() if other == table else [-1] * len(rows)
    if not described:
        return {}
    result: Columns = {name: np.array(rows, np.int64) for name, rows in columns.items()}
    for name, field in _COLLECTIVE_FIELDS.items():
        values = map(attrgetter(field), described)
        if name in TEXTS:
            result[name] = [v if isinstance(v, str) else str(v) for v in values]
        else:
            result[name] = np.fromiter(values, np.int64, len(described))
    return result


def _graph_label_columns(gpu: Rows) -> Columns:
    """Labels of graphed activities from a file that thence wrote."""
    labelled = [(row, event.args) for row, event in _events_with(gpu, "label_rule")]
    if not labelled:
        return {}
    rows = [row for row, arg in labelled if type(arg.label_rule) is str]
    args = [arg for _, arg in labelled if type(arg.label_rule) is str]
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


class _Sample(msgspec.Struct, gc=False):
    """The fields of a sample of hardware counters."""

    name: str = ""
    args: dict[str, Any] = {}


_samples = msgspec.json.Decoder(list[_Sample])
_COUNTED = re.compile(r"GPU (\d{1,4}) Counters")
_MAX_DEVICE, _MAX_VALUE = 10_000, 1e30


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
