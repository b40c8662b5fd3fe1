"""A Kineto file as the tables of a trace: columns of all pieces are joined, repaired, sorted and nested.

A lane is one (pid, tid) pair of the file; a track is a host thread in the order of the host table.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.errors import DamagedInput
from thence.model.collective_columns import described
from thence.model.intervals import NO_ROW
from thence.model.reasons import REASONS, RULES
from thence.model.tables import (
    COLLECTIVES,
    GPU,
    GRAPH_PLACES,
    HOST,
    HOST_CATEGORIES,
    KINDS,
    THREADS,
    Meta,
    Tables,
)
from thence.readers.categories import category_of, ranges_among_ops, shown_name
from thence.readers.kineto import metadata as describe
from thence.readers.kineto.annotations import Written, annotated_places
from thence.readers.kineto.decoding import decoded
from thence.readers.kineto.envelope import INLINE_ANNOTATED, Envelope
from thence.readers.kineto.events import MISSING, RECORDED_CATEGORIES
from thence.readers.kineto.forward_backward import forward_rows
from thence.readers.kineto.ranks import Lanes, gpu_ranks, lanes_of
from thence.readers.nesting import IS_API_CALL, host_order, host_parents, parent_column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from thence.readers.source import Source
__all__ = ["NAME", "PATTERNS", "read", "sniff"]

_GRAPH_REASONS = [code for code in REASONS if code.startswith("graph")]
_FIRST_ROWS = 1 << 14
NAME = "torch.profiler (Kineto JSON)"
PATTERNS = ("*.json", "*.json.gz")
"""Files of a directory that may be Kineto traces."""
Array = np.ndarray[Any, Any]
Arrays = dict[str, Any]
_FIRST_KEYS = re.compile(
    rb'"(?:traceEvents|schemaVersion|deviceProperties|displayTimeUnit|ph)"\s*:'
)
# jax.profiler writes a JSON for viewers beside its xplane.pb, in which most of the facts are missing.
_OF_JAX, _OF_JAX_WITHIN = b'"highres-ticks"', 1000


def sniff(head: bytes) -> bool:
    """Whether a file that begins like this may be a Kineto trace."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start[:1] not in (b"{", b"[") or _FIRST_KEYS.search(head) is None:
        return False
    return _OF_JAX not in head[:_OF_JAX_WITHIN]


def read(source: Source, progress: Callable[[int], None]) -> Tables:
    """The tables of one Kineto file.

    Args:
        source: the opened file.
        progress: called with the number of stored bytes consumed so far.

    Raises:
        DamagedInput: nothing in it could be read.
    """
    envelope = Envelope(source)
    columns = _collected(
        decoded(envelope.pieces(), source.name, source.expected_bytes),
        lambda: progress(source.consumed),
    )
    gpu, host = _table(columns, "gpu"), _table(columns, "host")
    if columns["events"] == columns["damaged"]:
        raise DamagedInput(
            source.name, "holds no event that could be read; expected a torch.profiler trace"
        )
    metadata = envelope.metadata
    names = pl.Series("name", columns["names"], pl.String)

    annotated = _choose_device_and_stream(
        gpu, columns["lanes"], columns["said"], inline=INLINE_ANNOTATED in metadata
    )
    host["category"] = _categories(host, columns["names"])
    launches = _launches(host, gpu)
    rank = describe.rank_of(metadata, source.name) or 0
    lanes = lanes_of(columns["lanes"], np.unique(launches["lane"]).tolist(), rank)
    gpu["rank"] = gpu_ranks(lanes, gpu, launches, rank)

    warnings = [
        *envelope.warnings,
        *(f"{source.name}: {text}" for text in _warnings(columns, gpu, host, lanes)),
    ]
    gpu_order, host_order = _gpu_order(gpu), _host_order(host, lanes)
    flows, threads = _table(columns, "flow"), _table(columns, "thread")
    moved = _table(columns, "collective")
    graph_places, said = _graph_places(_table(columns, "joined"), annotated, gpu_order)
    warnings += [f"{source.name}: {text}" for text in said]
    on_host = np.isin(threads["lane"], host["lane"])
    used = set(zip(gpu["rank"].tolist(), gpu["device"].tolist(), strict=True))
    tables = Tables(
        gpu=_gpu_frame(gpu, gpu_order, names),
        host=_host_frame(host, host_order, lanes, names, flows),
        collectives=_collectives(moved, gpu_order, host_order),
        threads=_threads_frame(threads, on_host, lanes),
        graph_places=graph_places,
    )
    meta = Meta(
        inputs=(source.name,),
        formats=(NAME,),
        epoch_ns=describe.epoch_ns(metadata, _earliest(tables)),
        facts=(describe.facts(metadata),),
        devices=describe.described_devices(metadata, used),
        process_groups=describe.process_groups(metadata),
        warnings=tuple(warnings),
    )
    return dataclasses.replace(tables, meta=meta)


def _collected(pieces: Iterable[Arrays], tick: Callable[[], None]) -> Arrays:
    """The pieces' columns as one set of columns, with names and lanes numbered alike."""
    names: dict[str, int] = {}
    lanes: dict[Any, int] = {}
    said: dict[str, int] = {}
    counts = dict.fromkeys(("events", "damaged", "timeless", "unpaired"), 0)
    # Rows of the table before this piece.
    rows = {"collective.gpu": 0, "collective.host": 0, "joined.gpu": 0}
    columns: dict[str, _GrowingArray | list[Any]] = {}
    for piece in pieces:
        renamed = _numbered(piece["names"], names)
        moved = _numbered([tuple(pair) for pair in piece["lanes"]], lanes)
        annotated = np.append(_numbered(piece["annotations"], said), np.int32(-1))
        for key in counts:
            counts[key] += piece[key]
        for key, values in piece.items():
            if key.endswith(".lane"):
                columns.setdefault(key, _GrowingArray()).extend(moved[values])
            elif key in ("gpu.name", "host.name"):
                columns.setdefault(key, _GrowingArray()).extend(renamed[values])
            elif key == "gpu.annotation":  # -1 is the last
                columns.setdefault(key, _GrowingArray()).extend(annotated[values])
            elif key in rows:
                columns.setdefault(key, _GrowingArray()).extend(
                    np.where(values < 0, NO_ROW, values + rows[key])
                )
            elif "." in key:
                columns.setdefault(
                    key, _GrowingArray() if isinstance(values, np.ndarray) else []
                ).extend(values)
        rows["collective.gpu"] += len(piece["gpu.start"])
        rows["joined.gpu"] += len(piece["gpu.start"])
        rows["collective.host"] += len(piece["host.start"])
        tick()
    joined = {key: c.array if isinstance(c, _GrowingArray) else c for key, c in columns.items()}
    return joined | counts | {"names": list(names), "lanes": list(lanes), "said": list(said)}


def _numbered(values: Iterable[Any], numbers: dict[Any, int]) -> Array:
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], np.int32)


def _table(columns: Arrays, name: str) -> Arrays:
    """Removes and returns the columns of one table, so that each can be freed after use."""
    prefix = f"{name}."
    return {
        key.removeprefix(prefix): columns.pop(key)
        for key in list(columns)
        if key.startswith(prefix)
    }


def _choose_device_and_stream(
    gpu: Arrays, lanes: list[tuple[Any, Any]], said: list[str], *, inline: bool
) -> Written:
    """Where the arguments are silent, a lane is (device, stream); a moved one keeps its real stream aside.

    Returns:
        what the file says of graphed activities.
    """
    lane_device = np.array([_lane_number(pid) for pid, _ in lanes], np.int64)
    lane_stream = np.array([_lane_number(tid) for _, tid in lanes], np.int64)
    written = Written(
        gpu.pop("annotation"), said, gpu["node"], gpu["stream"], gpu["original_stream"],
        lane_stream[gpu["lane"]], MISSING, inline,
    )  # fmt: skip
    gpu["stream"] = written.recorded_stream
    gpu["device"] = _first_known(gpu["device"], gpu["from_device"], lane_device[gpu["lane"]])
    gpu["stream"] = _first_known(gpu["original_stream"], gpu["stream"], lane_stream[gpu["lane"]])
    return written


def _lane_number(value: int | str) -> int:
    return value if isinstance(value, int) and abs(value) < 1 << 62 else 0


def _first_known(*choices: Array) -> Array:
    result = choices[-1]
    for choice in reversed(choices[:-1]):
        result = np.where(choice == MISSING, result, choice)
    return result


def _categories(host: Arrays, names: list[str]) -> Array:
    """Index in HOST_CATEGORIES of each host row, told by category and, where it takes that, name."""
    recorded, name = host["category"], host["name"]
    numbers: Array = np.array([HOST_CATEGORIES.index(c) for c in RECORDED_CATEGORIES], np.uint8)
    result: Array = numbers[recorded]
    for category in ("range", "python"):
        rows = recorded == RECORDED_CATEGORIES.index(category)
        used = np.unique(name[rows])
        finer = np.zeros(len(names), np.uint8)
        finer[used] = [HOST_CATEGORIES.index(category_of(category, names[i])) for i in used]
        result[rows] = finer[name[rows]]
    labels = _labels_among_ops(host, names)
    if labels.any():
        rows = (recorded == RECORDED_CATEGORIES.index("op")) & labels[name]
        result[rows] = HOST_CATEGORIES.index("range")
    return result


def _labels_among_ops(host: Arrays, names: list[str]) -> Array:
    """Which names are of ranges of the user that were recorded as operators."""

    def used(rows: Array) -> list[str]:
        return [names[i] for i in np.unique(host["name"][rows]).tolist()]

    ops = host["category"] == RECORDED_CATEGORIES.index("op")
    known = ops & ((host["sequence"] != MISSING) | host.pop("is_kernel"))
    ranges = host["category"] == RECORDED_CATEGORIES.index("range")
    found = ranges_among_ops(used(ops), used(known), used(ranges))
    return np.array([text in found for text in names], np.bool_)


def _launches(host: Arrays, gpu: Arrays) -> Arrays:
    """Lane and correlation of the API calls that something on a device came from."""
    calls: Array = IS_API_CALL[host["category"]]
    correlation = host["correlation"][calls]
    launched = np.isin(correlation, gpu["correlation"]) & (correlation != MISSING)
    return {"lane": host["lane"][calls][launched], "correlation": correlation[launched]}


def _warnings(columns: Arrays, gpu: Arrays, host: Arrays, lanes: Lanes) -> list[str]:
    """Warnings about rows left out or repaired; also replaces unusable durations by 0, in place."""
    warnings = list(lanes.warnings)
    if columns["damaged"]:
        warnings.append(
            f"{columns['damaged']:,} of {columns['events']:,} events could not be read and are left out"
        )
    if columns["unpaired"]:
        warnings.append(
            f"{columns['unpaired']:,} begin/end events are left out: torch.profiler writes complete events only"
        )
    if columns["timeless"]:
        warnings.append(f"{columns['timeless']:,} events have no start time and are left out")
    for what, table in (("device activities", gpu), ("host ranges", host)):
        unusable = table["duration"] < 0
        if unusable.any():
            table["duration"] = np.where(unusable, 0, table["duration"])
            warnings.append(
                f"{int(unusable.sum()):,} {what} have no duration, or a negative one; counted as 0"
            )
    return warnings


def _gpu_order(gpu: Arrays) -> Array:
    order: Array = np.lexsort((gpu["stream"], gpu["start"], gpu["device"], gpu["rank"]))
    return order


def _host_order(host: Arrays, lanes: Lanes) -> Array:
    """By rank, process and thread, then as rows nest."""
    track = np.lexsort((lanes.thread, lanes.process, lanes.rank))
    position = np.empty(len(track), np.uint16 if len(track) <= 1 << 16 else np.int64)
    position[track] = np.arange(len(track))
    return host_order(position[host["lane"]], host["category"], host["start"], host["duration"])


def _gpu_frame(gpu: Arrays, order: Array, names: pl.Series) -> pl.DataFrame:
    """Rows of `GPU` in the given order."""
    sorted_gpu = {key: values[order] for key, values in gpu.items()}
    # Kineto writes graph and node 0 for what was launched eagerly; other exporters leave the graph out
    # of the node's id, and then the first node of a graph is 0 too.
    graph = pl.Series(sorted_gpu["graph"])
    node = pl.Series(sorted_gpu["node"])
    node = node.set((node == 0) & (graph == 0), None)
    columns = {
        "rank": sorted_gpu["rank"],
        "device": _integers(sorted_gpu["device"], 0, (1 << 31) - 1).fill_null(0),
        "stream": sorted_gpu["stream"],
        "kind": _chosen(KINDS, sorted_gpu["kind"]),
        "name": names.cast(pl.Categorical()).gather(sorted_gpu["name"]),
        "start": sorted_gpu["start"],
        "duration": sorted_gpu["duration"],
        "correlation": _integers(sorted_gpu["correlation"]),
        "external": _integers(sorted_gpu["external"]),
        "graph": graph.replace(0, None),
        "node": node,
        "grid": _triples(sorted_gpu["grid"]),
        "block": _triples(sorted_gpu["block"]),
        "registers": _integers(sorted_gpu["registers"], 0, (1 << 31) - 1),
        "shared_memory": _integers(sorted_gpu["shared_memory"], 0),
        "bytes": _integers(sorted_gpu["bytes"], 0),
    }
    return GPU.frame(columns)


def _integers(values: Array, low: int = MISSING + 1, high: int = (1 << 63) - 1) -> pl.Series:
    """With null for what is missing or cannot be true."""
    return pl.select(
        pl.when(pl.lit(pl.Series((values >= low) & (values <= high)))).then(
            pl.lit(pl.Series(values))
        )
    ).to_series()


def _chosen(values: tuple[str, ...], numbers: Array) -> pl.Series:
    return pl.Series(values, dtype=pl.Enum(values)).gather(numbers)


def _triples(values: Array) -> pl.Series:
    valid = np.all((values >= 0) & (values < 1 << 32), axis=1, keepdims=True)
    array = pl.Series(np.where(valid, values, 0).astype(np.uint32), dtype=pl.Array(pl.UInt32, 3))
    return pl.select(pl.when(pl.lit(pl.Series(valid[:, 0]))).then(pl.lit(array))).to_series()


def _host_frame(
    host: Arrays, order: Array, lanes: Lanes, names: pl.Series, flows: Arrays
) -> pl.DataFrame:
    """Rows of `HOST` in the given order; empties ``host``, so that each column is freed after use."""
    for key in list(host):
        host[key] = host[key][order]
    lane = host["lane"]
    rank = np.where(lanes.rank < 0, max(0, int(lanes.rank.min(initial=0))), lanes.rank).astype(
        np.int32
    )
    track = np.cumsum(np.concatenate([[0], lane[1:] != lane[:-1]])) if len(lane) else lane
    parent = host_parents(track, host["category"], host["start"], host["duration"])
    ops, arrows = _numbered_ops(host, rank, track), _placed_flows(flows, rank, lane, track)
    forward = forward_rows(ops, arrows, parent).astype(np.int32)
    del host["forward_thread"], host["lane"]
    shown = names.map_elements(shown_name, pl.String) if len(names) else names
    columns = {
        "rank": rank[lane],
        "process": lanes.process[lane],
        "thread": lanes.thread[lane],
        "category": _chosen(HOST_CATEGORIES, host.pop("category")),
        "name": shown.cast(pl.Categorical()).gather(host.pop("name")),
        "start": host.pop("start"),
        "duration": host.pop("duration"),
        "correlation": _integers(host.pop("correlation")),
        "external": _integers(host.pop("external")),
        "sequence": _integers(host.pop("sequence"), 0),
        "parent": parent_column(parent),
        "forward": _integers(forward, 0),
    }
    return HOST.frame(columns)


def _numbered_ops(host: Arrays, rank: Array, track: Array) -> Arrays:
    rows = np.flatnonzero(host["sequence"] >= 0)
    columns = {key: host[key][rows] for key in ("start", "sequence", "forward_thread")}
    return {"row": rows, "rank": rank[host["lane"][rows]], "track": track[rows], **columns}


def _placed_flows(flows: Arrays, rank: Array, lane: Array, track: Array) -> Arrays:
    """The arrows, with rank and track instead of lane."""
    track_of = np.full(len(rank), -1, np.int64)
    track_of[lane] = track
    return {**flows, "rank": rank[flows["lane"]], "track": track_of[flows["lane"]]}


def _collectives(moved: Arrays, gpu_order: Array, host_order: Array) -> pl.DataFrame:
    """Rows of `COLLECTIVES` from the arguments of kernels, or of the host ops that launched them."""
    rows = {
        "gpu": _row_after(moved["gpu"], gpu_order),
        "host": _row_after(moved["host"], host_order),
    }
    frame = COLLECTIVES.frame({**described(moved).to_dict(), **rows})
    return frame.sort("gpu", "host", nulls_last=True)


def _row_after(file_rows: Array, order: Array) -> pl.Series:
    """Where rows of the file stand in the sorted table."""
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    has_row = file_rows >= 0
    return pl.Series(
        np.where(has_row, position[np.where(has_row, file_rows, 0)] if len(order) else 0, MISSING)
    ).replace(MISSING, None)


def _threads_frame(threads: Arrays, on_host: Array, lanes: Lanes) -> pl.DataFrame:
    """The last name given to each host thread: Kineto gives the process name first, the thread's own later."""
    lane = threads["lane"][on_host]
    frame = THREADS.frame(
        {
            "rank": np.maximum(lanes.rank[lane], 0),
            "process": lanes.process[lane],
            "thread": lanes.thread[lane],
            "name": pl.Series(threads["name"], dtype=pl.String).filter(pl.Series(on_host)),
        }
    )
    return frame.unique(["rank", "process", "thread"], keep="last", maintain_order=True)


def _graph_places(
    joined: Arrays, annotated: Written, gpu_order: Array
) -> tuple[pl.DataFrame, list[str]]:
    """Labels of graphed activities in the file, that thence wrote or else PyTorch, and warnings."""
    if not len(joined["gpu"]):
        return annotated_places(annotated, lambda rows: _row_after(rows, gpu_order))
    columns = {
        name: pl.Series(values, dtype=pl.String).replace("", None)
        for name, values in joined.items()
        if isinstance(values, list)
    }
    confidence = pl.Series(joined["confidence"]).fill_nan(None)
    columns["lane"] = columns.pop("shown_in")
    rows = _row_after(joined["gpu"], gpu_order)
    labelled, rule = columns["label"].is_not_null(), columns["rule"]
    # Rules that this version does not know, or that do not fit whether there is a label.
    unknown = ~rule.is_in(list(RULES)).zip_with(labelled, rule.is_in(_GRAPH_REASONS))
    in_trace = pl.Series(["in_trace"]).new_from_index(0, len(rule))
    reason = pl.Series(["graph_not_joined"]).new_from_index(0, len(rule))
    columns["rule"] = in_trace.zip_with(labelled, reason).zip_with(unknown, rule)
    columns["detail"] = rule.zip_with(unknown & ~labelled, columns["detail"])
    frame = GRAPH_PLACES.frame({**columns, "gpu": rows, "confidence": confidence})
    return frame.sort("gpu"), []


def _earliest(tables: Tables) -> int | None:
    starts = (table["start"].min() for table in (tables.gpu, tables.host))
    return min((start for start in starts if isinstance(start, int)), default=None)


class _GrowingArray:
    """An array that grows at its end, piece by piece, without keeping the pieces.

    Capacity that is not used yet is never written to, so the operating system does not allocate pages
    for it.
    """

    def __init__(self) -> None:
        self._room: np.ndarray[Any, Any] | None = None
        self._used = 0

    def extend(self, values: np.ndarray[Any, Any]) -> None:
        """Adds rows of the same dtype and row shape as before."""
        if self._room is None:
            self._room = np.empty((_FIRST_ROWS, *values.shape[1:]), values.dtype)
        needed = self._used + len(values)
        if needed > len(self._room):
            larger = np.empty((2 * needed, *values.shape[1:]), values.dtype)
            larger[: self._used] = self._room[: self._used]
            self._room = larger
        self._room[self._used : needed] = values
        self._used = needed

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """The rows so far, shape (rows, ...)."""
        return np.empty(0) if self._room is None else self._room[: self._used]
