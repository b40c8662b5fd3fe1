"""Builds the tables of a trace from the joined columns of a Kineto file."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.model.collective_columns import described
from thence.model.reasons import REASONS, RULES
from thence.model.tables import COLLECTIVES, GPU, GRAPH_PLACES, HOST, HOST_CATEGORIES, KINDS, THREADS
from thence.model.waiting import Calls, kind_of_call, said_of_calls
from thence.parallel import in_threads
from thence.readers.categories import positions_of_functions, shown_name
from thence.readers.kineto.annotations import Written, annotated_places
from thence.readers.kineto.events import MISSING
from thence.readers.kineto.forward_backward import forward_rows
from thence.readers.nesting import IS_API_CALL, host_parents, parent_column

if TYPE_CHECKING:
    from thence.model.arrays import Array
    from thence.readers.kineto.ranks import Lanes

_SELDOM = ("kernel", "metadata")
"""Text columns that are empty in most files."""
_LAST = np.iinfo(np.int64).max
"""Sorts after all rows."""
_GRAPH_REASONS = [code for code in REASONS if code.startswith("graph")]
Arrays = dict[str, Any]


def gpu_frame(gpu: Arrays, order: Array, names: pl.Series) -> pl.DataFrame:
    """Rows of `GPU` in the given order."""
    sorted_gpu = dict(zip(gpu, in_threads(lambda key: gpu[key][order], gpu, len(order)), strict=True))
    # Kineto writes graph 0 and node 0 for activities outside of graphs. Other exporters leave the graph out
    # of the node's id, so the first node of a graph is 0 as well.
    graph, node, device = (sorted_gpu[name] for name in ("graph", "node", "device"))
    columns = {
        "rank": sorted_gpu["rank"],
        "device": np.where(_between(device, 0, (1 << 31) - 1), device, 0),
        "stream": sorted_gpu["stream"],
        "kind": _chosen(KINDS, sorted_gpu["kind"]),
        "name": _gathered(names.cast(pl.Categorical()), sorted_gpu["name"]),
        "start": sorted_gpu["start"],
        "duration": sorted_gpu["duration"],
        "correlation": _integers(sorted_gpu["correlation"]),
        "external": _integers(sorted_gpu["external"]),
        "graph": _without(graph, graph == 0),
        "node": _without(node, (node == 0) & (graph == 0)),
        "grid": _triples(sorted_gpu["grid"]),
        "block": _triples(sorted_gpu["block"]),
        "registers": _integers(sorted_gpu["registers"], 0, (1 << 31) - 1),
        "shared_memory": _integers(sorted_gpu["shared_memory"], 0),
        "bytes": _integers(sorted_gpu["bytes"], 0),
    }
    return GPU.frame(columns)


def _integers(values: Array, low: int = MISSING + 1, high: int = (1 << 63) - 1) -> pl.Series:
    """The values, with null for values that are missing or outside the possible range."""
    return _without(values, ~_between(values, low, high))


def _between(values: Array, low: int, high: int) -> Array:
    known: Array = values >= low
    if high < np.iinfo(values.dtype).max:
        known &= values <= high
    return known


def _without(values: Array, missing: Array) -> pl.Series:
    """The values, with null where a value is missing."""
    if not missing.any():
        return pl.Series(values)
    if missing.all():
        return pl.Series([None], dtype=pl.Int64).new_from_index(0, len(values))
    return pl.Series(values).set(pl.Series(missing), None)


def _chosen(values: tuple[str, ...], numbers: Array) -> pl.Series:
    return _gathered(_enumerated(values), numbers)


@functools.cache
def _enumerated(values: tuple[str, ...]) -> pl.Series:
    return pl.Series(values, dtype=pl.Enum(values))


def _gathered(values: pl.Series, numbers: Array) -> pl.Series:
    """The value at each index (0 or more).

    The indices are converted to uint32, the type of Polars' own row numbers; Polars would convert others to int64.
    """
    return values[pl.Series(numbers.astype(np.uint32))]


def _triples(values: Array) -> pl.Series:
    valid = np.all((values >= 0) & (values < 1 << 32), axis=1, keepdims=True)
    array = pl.Series(np.where(valid, values, 0).astype(np.uint32), dtype=pl.Array(pl.UInt32, 3))
    if valid.all():
        return array
    return pl.select(pl.when(pl.lit(pl.Series(valid[:, 0]))).then(pl.lit(array))).to_series()


def host_frame(host: Arrays, order: Array, lanes: Lanes, names: pl.Series, flows: Arrays) -> pl.DataFrame:
    """Rows of `HOST` in the given order; empties ``host``, so that each column is freed after use."""

    def sort(key: str) -> None:
        if key not in _SELDOM or (host[key] >= 0).any():
            host[key] = host[key][order]

    in_threads(sort, list(host), len(order))
    lane = host["lane"]
    rank = np.where(lanes.rank < 0, max(0, int(lanes.rank.min(initial=0))), lanes.rank).astype(np.int32)
    track = np.cumsum(np.concatenate([[0], lane[1:] != lane[:-1]])) if len(lane) else lane
    parent = host_parents(track, host["category"], host["start"], host["duration"])
    ops, arrows = _numbered_ops(host, rank, track), _placed_flows(flows, rank, lane, track)
    forward = forward_rows(ops, arrows, parent).astype(np.int32)
    del host["forward_thread"], host["lane"]
    shown = pl.Series([shown_name(name) for name in names], dtype=pl.String)
    columns = {
        "rank": rank[lane],
        "process": lanes.process[lane],
        "thread": lanes.thread[lane],
        "category": _chosen(HOST_CATEGORIES, host.pop("category")),
        "name": _gathered(shown.cast(pl.Categorical()), host.pop("name")),
        **{key: _texts(names, host.pop(key)) for key in ("kernel", "metadata")},
        "start": host.pop("start"),
        "duration": host.pop("duration"),
        "correlation": _integers(host.pop("correlation")),
        "external": _integers(host.pop("external")),
        "sequence": _integers(host.pop("sequence"), 0),
        "parent": parent_column(parent),
        "forward": _integers(forward, 0),
    }
    return HOST.frame(columns | {"position": positions_of_functions(columns["category"])})


def _texts(names: pl.Series, number: Array) -> pl.Series:
    """Texts by their numbers, null for -1."""
    if (number < 0).all():
        return pl.Series([None], dtype=pl.Categorical()).new_from_index(0, len(number))
    rows = pl.Series(number)
    return names.cast(pl.Categorical()).gather(rows.set(rows < 0, None).cast(pl.UInt32))


def _numbered_ops(host: Arrays, rank: Array, track: Array) -> Arrays:
    rows = np.flatnonzero(host["sequence"] >= 0)
    columns = {key: host[key][rows] for key in ("start", "sequence", "forward_thread")}
    return {"row": rows, "rank": rank[host["lane"][rows]], "track": track[rows], **columns}


def _placed_flows(flows: Arrays, rank: Array, lane: Array, track: Array) -> Arrays:
    """The arrows, with rank and track instead of lane."""
    track_of = np.full(len(rank), -1, np.int64)
    track_of[lane] = track
    return {**flows, "rank": rank[flows["lane"]], "track": track_of[flows["lane"]]}


def collective_frame(moved: Arrays, gpu_order: Array, host_order: Array) -> pl.DataFrame:
    """Rows of `COLLECTIVES` from the arguments of kernels, or of the host ops that launched them."""
    if not len(moved["gpu"]):
        return COLLECTIVES.empty()
    rows = {"gpu": _places_after(moved["gpu"], gpu_order), "host": _places_after(moved["host"], host_order)}
    order = np.lexsort([np.where(rows[name] < 0, _LAST, rows[name]) for name in ("host", "gpu")])
    columns = described(moved).to_dict() | {name: _integers(rows[name], 0) for name in rows}
    frame = COLLECTIVES.frame(columns)
    return frame[order] if (np.diff(order) != 1).any() else frame


def _places_after(file_rows: Array, order: Array) -> Array:
    """Rows of the sorted table for rows in file order; negative for negative rows."""
    position = np.empty(len(order) + 1, np.int64)
    position[order] = np.arange(len(order))
    position[-1] = MISSING  # the place of negative rows
    places: Array = position[np.where(file_rows >= 0, file_rows, -1)]
    return places


def _row_after(file_rows: Array, order: Array) -> pl.Series:
    """As `_places_after`, null for negative rows."""
    return _integers(_places_after(file_rows, order), 0)


def waiting_calls(host: Arrays, order: Array, names: list[str]) -> Calls:
    """The calls that wait or are about CUDA events, as rows in the given order."""
    kinds = {number: kind for number, name in enumerate(names) if (kind := kind_of_call(name))}
    if not kinds:
        return Calls(np.empty(0, np.int64), np.empty(0, np.object_))
    rows = np.flatnonzero(np.isin(host["name"], list(kinds)) & IS_API_CALL[host["category"]])
    found = [kinds[number] for number in host["name"][rows].tolist()]
    return Calls(_places_after(rows, order), np.array(found, np.object_))


def said_of_waiting(waiting: Arrays, ranks: list[int]) -> pl.DataFrame:
    """What the file records about calls that wait and about CUDA events, as `thence.model.waiting.SAID`.

    Empty if the file holds several ranks, because their correlation ids collide.

    Args:
        waiting: columns ``waiting.*`` of `thence.readers.kineto.events.decode`.
        ranks: the ranks that used a device.
    """
    if len(ranks) != 1 or not len(waiting["correlation"]):
        return said_of_calls()

    def known(name: str) -> pl.Series:
        return _integers(waiting[name], 0)

    event = pl.select(pl.coalesce(known("event_id"), known("wait_on_event"))).to_series()
    columns = {
        "correlation": known("correlation"),
        "rank": pl.Series(ranks, dtype=pl.Int32).new_from_index(0, len(event)),
        "device": _integers(waiting["device"], 0, (1 << 31) - 1),
        "stream": known("stream"),
        "event": event,
        "recorded_by": known("wait_on_record"),
        "recorded_on": known("wait_on_stream"),
    }
    return said_of_calls(columns)


def threads_frame(threads: Arrays, on_host: Array, lanes: Lanes) -> pl.DataFrame:
    """The last name of each host thread: Kineto writes the process name first and the thread's own name later."""
    lane = threads["lane"][on_host]
    keys = np.maximum(lanes.rank[lane], 0), lanes.process[lane], lanes.thread[lane]
    places = {key: row for row, key in enumerate(zip(*(key.tolist() for key in keys), strict=True))}
    last = np.sort(np.fromiter(places.values(), np.int64, len(places)))
    names = [threads["name"][row] for row in np.flatnonzero(on_host)[last].tolist()]
    return THREADS.frame({
        **{name: key[last] for name, key in zip(("rank", "process", "thread"), keys, strict=True)},
        "name": pl.Series(names, dtype=pl.String),
    })  # fmt: skip


def graph_places(joined: Arrays, annotated: Written, gpu_order: Array) -> tuple[pl.DataFrame, list[str]]:
    """Labels of graphed activities in the file (written by thence, or else by PyTorch), and warnings."""
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
    # Rules that this version does not know, or that contradict the presence or absence of a label.
    unknown = ~rule.is_in(list(RULES)).zip_with(labelled, rule.is_in(_GRAPH_REASONS))
    in_trace = pl.Series(["in_trace"]).new_from_index(0, len(rule))
    reason = pl.Series(["graph_not_joined"]).new_from_index(0, len(rule))
    columns["rule"] = in_trace.zip_with(labelled, reason).zip_with(unknown, rule)
    columns["detail"] = rule.zip_with(unknown & ~labelled, columns["detail"])
    frame = GRAPH_PLACES.frame({**columns, "gpu": rows, "confidence": confidence})
    return frame.sort("gpu"), []
