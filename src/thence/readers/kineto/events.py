"""One piece of a Kineto file as columns.

A piece is a JSON array of whole events. Each event is decoded by msgspec into a typed struct (no
dict per event), and the few fields that thence reads become NumPy columns at once. Category names
and argument keys: pytorch/kineto, libkineto/src/output_json.cpp.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from itertools import chain, compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from thence.readers.kineto.repair import decode_leniently
from thence.readers.kineto.times import NO_TIME_NS, nanoseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["MISSING", "RECORDED_CATEGORIES", "Args", "Columns", "Event", "decode"]

MISSING = int(np.iinfo(np.int64).min)
"""What an integer column holds where the event lacks the field."""

Columns = dict[str, Any]
"""Column name to array, list of strings, or number; see `decode`."""

NO_TIME = msgspec.Raw(b"")


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
    label: str | int | None = msgspec.field(default=None, name="name")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    in_elements: int = msgspec.field(default=MISSING, name="In msg nelems")
    out_elements: int = msgspec.field(default=MISSING, name="Out msg nelems")
    group_size: int = msgspec.field(default=MISSING, name="Group size")
    element_type: str = msgspec.field(default="", name="dtype")
    group_name: str = msgspec.field(default="", name="Process Group Name")
    group_description: str = msgspec.field(default="", name="Process Group Description")
    group_ranks: str | list[int] = msgspec.field(default="", name="Process Group Ranks")
    in_splits: str | list[int] = msgspec.field(default="", name="In split size")
    out_splits: str | list[int] = msgspec.field(default="", name="Out split size")
    collective_sequence: int = msgspec.field(default=MISSING, name="Seq")
    source_rank: int = msgspec.field(default=MISSING, name="Src Rank")
    destination_rank: int = msgspec.field(default=MISSING, name="Dst Rank")


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """One event. Times stay text (`msgspec.Raw`) so that they never pass through a float."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: msgspec.Raw = NO_TIME
    dur: msgspec.Raw = NO_TIME
    id: int | str = MISSING
    args: Args = NO_ARGS


# Which table an event goes to. Lower-case names are of torch 1.12 and newer, the others older.
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
"""What the numbers in ``host.category`` stand for."""
_HOST_NUMBER = {name: RECORDED_CATEGORIES.index(category) for name, category in _HOST.items()}
_FORWARD_BACKWARD = {"fwdbwd", "forward_backward", "fwd_bwd"}
_SKIPPED, _GPU_ROW, _HOST_ROW, _FLOW, _THREAD_NAME, _LOST = range(6)

_strict = msgspec.json.Decoder(list[Event], strict=False)


class _Codes(dict[Any, int]):
    """Numbers values in the order of their first appearance."""

    def __missing__(self, key: object) -> int:
        code = self[key] = len(self)
        return code


class _Targets(dict[tuple[str, str], int]):
    """(phase, category) -> where such an event goes."""

    def __missing__(self, key: tuple[str, str]) -> int:
        phase, category = key
        if phase == "X":
            target = _GPU_ROW if category in _GPU else _HOST_ROW if category in _HOST else _SKIPPED
        elif phase in ("s", "f") and category in _FORWARD_BACKWARD:
            target = _FLOW
        elif phase == "M":
            target = _THREAD_NAME
        else:
            # Begin/end pairs come from other tracers; what they hold would be lost without a word.
            target = _LOST if phase in ("B", "E") else _SKIPPED
        self[key] = target
        return target


def decode(piece: bytes) -> Columns:
    """The columns of one piece.

    Args:
        piece: a JSON array of events.

    Returns:
        ``names`` and ``lanes``: the distinct names, and (pid, tid) pairs, that other columns number.
        ``gpu.*``, ``host.*``, ``flow.*``: columns of the device, host and forward-backward flow rows.
        ``collective.*``: columns of what describes a collective, with the ``gpu`` or ``host`` row.
        ``thread.*``: named threads. ``events``, ``damaged``, ``timeless``, ``unpaired``: how many
        events there were, how many of them could not be read, had no start, or were begin/end
        events, all of which are left out.
    """
    damaged = 0
    try:
        events = _strict.decode(piece)
        return _columns(events, damaged)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, ValueError):
        events, damaged = decode_leniently(piece, Event, Args)
        return _columns(events, damaged)


def _columns(events: Sequence[Event], damaged: int) -> Columns:
    targets = np.fromiter(
        map(_Targets().__getitem__, map(attrgetter("ph", "cat"), events)), np.int8, len(events)
    )

    def chosen(target: int) -> list[Event]:
        return list(compress(events, (targets == target).tolist()))

    names, lanes = _Codes(), _Codes()
    columns: Columns = {
        "events": len(events),
        "damaged": damaged,
        "unpaired": int((targets == _LOST).sum()),
    }
    gpu, gpu_start = _with_start(chosen(_GPU_ROW))
    host, host_start = _with_start(chosen(_HOST_ROW))
    columns["timeless"] = int(np.isin(targets, (_GPU_ROW, _HOST_ROW)).sum()) - len(gpu) - len(host)
    columns |= _prefixed("gpu", _common(gpu, names, lanes) | {"start": gpu_start} | _gpu(gpu))
    columns |= _prefixed("host", _common(host, names, lanes) | {"start": host_start} | _host(host))
    columns |= _prefixed("flow", _flows(chosen(_FLOW), lanes))
    columns |= _prefixed("thread", _threads(chosen(_THREAD_NAME), lanes))
    columns |= _prefixed("collective", _collectives({"gpu": gpu, "host": host}))
    columns["names"] = list(names)
    columns["lanes"] = list(lanes)
    return columns


def _prefixed(prefix: str, columns: Columns) -> Columns:
    return {f"{prefix}.{name}": values for name, values in columns.items()}


def _numbers(events: Sequence[Any], *fields: str) -> Columns:
    return {
        name: np.fromiter(map(attrgetter(name), events), np.int64, len(events)) for name in fields
    }


def _coded(values: Iterable[Any], code: Callable[[Any], int], count: int) -> np.ndarray[Any, Any]:
    return np.fromiter(map(code, values), np.int32, count)


def _with_start(events: list[Event]) -> tuple[list[Event], np.ndarray[Any, Any]]:
    """The events that say when they began, and when that was."""
    start = nanoseconds(list(map(attrgetter("ts"), events)))
    known = start != NO_TIME_NS
    if known.all():
        return events, start
    return list(compress(events, known.tolist())), start[known]


def _common(events: Sequence[Event], names: _Codes, lanes: _Codes) -> Columns:
    count = len(events)
    return {
        "name": _coded(map(attrgetter("name"), events), names.__getitem__, count),
        "lane": _coded(map(attrgetter("pid", "tid"), events), lanes.__getitem__, count),
        "duration": nanoseconds(list(map(attrgetter("dur"), events))),
    }


def _gpu(events: Sequence[Event]) -> Columns:
    args = list(map(attrgetter("args"), events))
    sizes = _numbers(
        args, "external", "correlation", "device", "stream", "original_stream", "bytes",
        "registers", "shared_memory", "from_device",
    )  # fmt: skip
    count = len(events)
    return sizes | {
        "kind": _coded(map(attrgetter("cat"), events), _GPU.__getitem__, count).astype(np.uint8),
        # Node ids use all 64 bits: executable graph id << 32 | node id.
        "graph": np.fromiter(map(attrgetter("graph"), args), np.uint64, count),
        "node": np.fromiter(map(attrgetter("node"), args), np.uint64, count),
        "grid": _triples(map(attrgetter("grid"), args), count),
        "block": _triples(map(attrgetter("block"), args), count),
    }


def _triples(values: Iterable[tuple[int, int, int] | None], count: int) -> np.ndarray[Any, Any]:
    """Shape (count, 3), -1 where there is none."""
    flat = chain.from_iterable(value or (-1, -1, -1) for value in values)
    return np.fromiter(flat, np.int64, 3 * count).reshape(count, 3)


def _host(events: Sequence[Event]) -> Columns:
    args = list(map(attrgetter("args"), events))
    categories = _coded(map(attrgetter("cat"), events), _HOST_NUMBER.__getitem__, len(events))
    return _numbers(args, "external", "correlation", "sequence", "forward_thread") | {
        "category": categories.astype(np.uint8)
    }


def _flows(events: Sequence[Event], lanes: _Codes) -> Columns:
    starts = [event.ph == "s" for event in events]
    return {
        "is_start": np.array(starts, np.bool_),
        "id": _coded_ids(events),
        "lane": _coded(map(attrgetter("pid", "tid"), events), lanes.__getitem__, len(events)),
        "time": nanoseconds([event.ts for event in events]),
    }


def _coded_ids(events: Sequence[Event]) -> np.ndarray[Any, Any]:
    """Ids as numbers; text, which other writers may use, by its checksum."""
    ids = (e.id if isinstance(e.id, int) else zlib.crc32(e.id.encode()) for e in events)
    return np.fromiter(ids, np.int64, len(events))


def _threads(events: Sequence[Event], lanes: _Codes) -> Columns:
    named = [e for e in events if e.name == "thread_name" and isinstance(e.args.label, str)]
    return {
        "lane": _coded(((e.pid, e.tid) for e in named), lanes.__getitem__, len(named)),
        "name": [str(e.args.label) for e in named],
    }


_COLLECTIVE_NUMBERS = (
    "in_elements", "out_elements", "group_size", "collective_sequence", "source_rank", "destination_rank",
)  # fmt: skip
_COLLECTIVE_TEXTS = (
    "collective", "element_type", "group_name", "group_description", "group_ranks", "in_splits", "out_splits",
)  # fmt: skip


def _collectives(tables: dict[str, Sequence[Event]]) -> Columns:
    columns: dict[str, list[Any]] = defaultdict(list)
    described: list[Args] = []
    for table, events in tables.items():
        rows = [row for row, event in enumerate(events) if event.args.collective is not None]
        described += [events[row].args for row in rows]
        for other in tables:
            columns[other] += rows if other == table else [-1] * len(rows)
    result: Columns = {name: np.array(rows, np.int64) for name, rows in columns.items()}
    result |= _numbers(described, *_COLLECTIVE_NUMBERS)
    for name in _COLLECTIVE_TEXTS:
        values = [getattr(args, name) for args in described]
        result[name] = [v if isinstance(v, str) else str(v) for v in values]
    return result
