"""The single tables of a trace, from the joined columns of a Kineto file.

**The forward op of each backward op.** Kineto records this link in two ways: as a flow arrow between the two ops,
which is exact, and as the autograd sequence number of both ops together with the thread that ran the forward op.
Traces written without flows have only the latter.

**Annotations of CUDA graphs.** Three writers add the fields of an annotation (see `thence.readers.torch_annotations`)
to the arguments of graphed activities:

- torch 2.15, ``export_chrome_trace(cuda_graph_annotations=...)``: values are text; the lane is in
  ``annotated_stream``, or the event was moved to the lane and ``original_stream`` is the stream on which it
  ran. The file has the key ``cudaGraphInlineAnnotated``.
- torch 2.12 to 2.14, ``torch.cuda._annotate_cuda_graph_trace``: values are text; every graphed event was
  moved to its lane, or to the default lane (7; events that would overlap there to 8), and the stream on
  which it ran is lost.
- torch.profiler's CUPTI exporter (Cuspy): values keep their type; a field ``stream`` replaces the argument
  of that name, but the event stays in the viewer's row of its stream.

`thence.readers.kineto.events` finds the annotations in the events.
"""

from __future__ import annotations

import functools
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import polars as pl

from thence.model.collective_columns import described, described_structs
from thence.model.collectives import KINETO_KEYS
from thence.model.columns import nullable
from thence.model.graph_labels import MODULE_KEYS
from thence.model.intervals import NO_ROW
from thence.model.json_fields import JsonInt64, NotAsWritten, decoded
from thence.model.reasons import REASONS, RULES
from thence.model.tables import COLLECTIVES, GPU, GRAPH_PLACES, HOST, HOST_CATEGORIES, KINDS, THREADS
from thence.model.waiting import Calls, call_facts, kind_of_call
from thence.parallel import in_threads
from thence.readers.host_ranges import IS_API_CALL, host_parents, parent_column, positions_of_functions, shown_name
from thence.readers.kineto.event_structs import MISSING
from thence.readers.torch_annotations import label_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from thence.model.arrays import Array, Int64, Mask
    from thence.model.graph_labels import Label
    from thence.readers.kineto.ranks import Lanes

_LANE_KEY = "annotated_stream"
_DEFAULT_LANES = (7, 8)
_PHASE = "autograd_phase"
_STREAM_LOST = (
    "PyTorch's tool for annotated CUDA graphs moved their activities to lanes and shifted some by up to 1 us; the "
    "file does not hold the streams on which they ran"
)
_ANNOTATION_KEYS = frozenset((*MODULE_KEYS, "name", "str", "annotation", _LANE_KEY, _PHASE, KINETO_KEYS["collective"]))
_INTEGER, _REAL = (re.compile(r"-?(?:0|[1-9][0-9]{0,17})"), re.compile(r"-?[0-9]+\.[0-9]+(?:e-?[0-9]+)?"))
_CONSTANTS = {"True": True, "False": False, "None": None}
_RARE_COLUMNS = ("kernel", "metadata", "inputs")
"""Text columns that are empty in most files."""
_LARGEST = np.iinfo(np.int64).max
"""The largest int64; as a row number it sorts after all rows."""
_GRAPH_REASONS = [code for code in REASONS if code.startswith("graph")]
Arrays = dict[str, Any]


def forward_rows(ops: dict[str, Any], flows: dict[str, Any], parent: npt.NDArray[Any]) -> Int64:
    """Host row of the forward op, for the rows of backward ops.

    Args:
        ops: columns of the host rows with a sequence number, in their order: row, rank, track (number
            of the thread in the order of the host table), start, sequence, forward_thread (0 for a
            forward op, else the autograd engine's number of the thread that ran it).
        flows: columns of the ends of forward-backward arrows: id, rank, track (-1 for a thread without host
            rows), time, is_start.
        parent: parent row of every host row, `NO_ROW` for outermost rows.

    Returns:
        int64 array with a value for each host row, `NO_ROW` if it has no forward op.
    """
    forward = np.full(len(parent), NO_ROW, np.int64)
    begins, ends = _by_flow(ops, flows)
    forward[ends] = begins
    # An arrow ends at the backward op itself; the autograd engine's range around it has the same sequence
    # number and gets the same forward op.
    sequence = np.full(len(parent), NO_ROW, np.int64)
    sequence[ops["row"]] = ops["sequence"]
    around = parent[ends]
    same = (around != NO_ROW) & (sequence[around] == sequence[ends]) & (forward[around] == NO_ROW)
    forward[around[same]] = begins[same]
    without = (ops["forward_thread"] != 0) & (forward[ops["row"]] == NO_ROW)
    # All 5,144 arrows in our recordings, of torch 2.11 and 2.12, name their ops. Other exporters may repeat ids.
    if without.any():
        pairs = _by_sequence(pl.DataFrame(ops), pl.Series(without))
        forward[pairs["row"].to_numpy()] = pairs["forward"].to_numpy()
    return forward


def _by_flow(ops: dict[str, Any], flows: dict[str, Any]) -> tuple[Int64, Int64]:
    """The rows at which arrows begin, and the rows at which they end.

    Each end of an arrow is matched to the op that begins at the same time on the same thread, the
    innermost op if there are several.
    """
    if not flows or not len(ops["row"]):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    op_key, flow_key = _sequence_keys(ops, flows)
    op_before = np.searchsorted(op_key, flow_key, side="right") - 1
    tied = (op_before >= 0) & (op_key[op_before] == flow_key)
    row = ops["row"][op_before]
    _, identity = np.unique(flows["id"], return_inverse=True)
    arrow = flows["rank"].astype(np.int64) * (int(identity.max()) + 1) + identity
    begin_ids, begin_rows = _unique_keys(arrow[tied & flows["is_start"]], row[tied & flows["is_start"]])
    end_ids, end_rows = _unique_keys(arrow[tied & ~flows["is_start"]], row[tied & ~flows["is_start"]])
    _, begins, ends = np.intersect1d(begin_ids, end_ids, assume_unique=True, return_indices=True)
    return begin_rows[begins], end_rows[ends]


def _sequence_keys(ops: dict[str, Any], flows: dict[str, Any]) -> tuple[Int64, Int64]:
    """(track, time) as one number, for ops and flows; ascending for ops, which are sorted by track and start."""
    first = min(int(ops["start"].min()), int(flows["time"].min()))
    span = max(int(ops["start"].max()), int(flows["time"].max())) - first + 1
    start, time = ops["start"] - first, flows["time"] - first
    if (int(ops["track"].max()) + 2) * span >= 1 << 63:  # times that far apart are rare: number them
        _, moment = np.unique(np.concatenate([start, time]), return_inverse=True)
        start, time = moment[: len(start)], moment[len(start) :]
        span = len(moment)
    return ops["track"] * span + start, flows["track"] * span + time


def _unique_keys(keys: Int64, rows: Int64) -> tuple[Int64, Int64]:
    """Keys that occur exactly once, and their rows; other keys do not identify an arrow with certainty."""
    distinct, first, counts = np.unique(keys, return_index=True, return_counts=True)
    return distinct[counts == 1], rows[first[counts == 1]]


def _by_sequence(ops: pl.DataFrame, wanted: pl.Series) -> pl.DataFrame:
    """The last forward op with the same sequence number before each wanted backward op.

    Each forward thread has its own sequence numbers. The file does not state which thread the autograd engine's
    number stands for: the thread that has most of the wanted sequence numbers is taken.
    """
    backward = ops.filter(wanted).sort("start")
    forward = ops.filter(pl.col("forward_thread") == 0).sort("start")
    threads = (
        backward.select("rank", "sequence", "forward_thread")
        .unique()
        .join(forward.select("rank", "sequence", "track").unique(), on=["rank", "sequence"])
        .group_by("rank", "forward_thread", forward_track="track")
        .len()
        .sort("len", "forward_track", descending=[True, False])
        .unique(["rank", "forward_thread"], keep="first", maintain_order=True)
        .select("rank", "forward_thread", "forward_track")
    )
    return (
        backward.join(threads, on=["rank", "forward_thread"])
        .sort("start")
        .join_asof(
            forward.select("sequence", "start", forward_track="track", forward="row"),
            on="start",
            by=["sequence", "forward_track"],
            strategy="backward",
            check_sortedness=False,
        )
        .drop_nulls("forward")
        .select("row", "forward")
    )


@dataclass(frozen=True)
class Written:
    """Annotations and streams of the device activities as written in the file, before the activities are sorted.

    Attributes:
        number: index in ``texts`` of the annotation of each activity, -1 for none.
        texts: the distinct annotations, as `thence.readers.kineto.events` returns them.
        node: id of the graph node; 0 outside of graphs.
        stream: argument of that name; ``missing`` if the event has none.
        original_stream: stream on which the activity ran, if it was moved; ``missing`` otherwise.
        row_stream: stream number of the viewer's row that the activity is in.
        missing: value that stands for an absent number.
        inline: whether the file states that torch 2.15 annotated it.
    """

    number: Array
    texts: Sequence[str]
    node: Array
    stream: Array
    original_stream: Array
    row_stream: Array
    missing: int
    inline: bool

    @property
    def recorded_stream(self) -> Array:
        """The stream argument of each activity, or its viewer row if an annotation may have replaced the argument."""
        replaced = (self.number >= 0) & (self.original_stream == self.missing)
        return np.where(replaced, self.row_stream, self.stream)


def annotated_places(written: Written, row_after: Callable[[Array], pl.Series]) -> tuple[pl.DataFrame, list[str]]:
    """The annotations as rows of `GRAPH_PLACES`, for all graphed activities if any of them is annotated.

    Args:
        written: annotations and streams as written in the file.
        row_after: maps rows in file order to rows of the sorted table.

    Returns:
        The rows, and warnings.
    """
    fields = [_typed(text) for text in written.texts]
    if not written.inline and not any(_ANNOTATION_KEYS & annotation.keys() for annotation in fields):
        return GRAPH_PLACES.empty(), []  # the extra arguments may be those of a newer Kineto
    graphed = np.flatnonzero(written.node)
    lanes, lost = _lanes(written)
    number, lane = written.number[graphed], lanes[graphed]
    distinct, of_row = np.unique(np.stack([number, lane]), axis=1, return_inverse=True)
    of_row = of_row.reshape(-1)
    labels = [
        label_of(_with_lane(fields[said] if said >= 0 else {}, to, written.missing)) for said, to in distinct.T.tolist()
    ]
    columns = _columns(labels)
    rows = {name: values.gather(pl.Series(of_row)) for name, values in columns.items()}
    frame = GRAPH_PLACES.frame({**rows, "gpu": row_after(graphed)}).sort("gpu")
    return frame, [_STREAM_LOST] if lost else []


def _with_lane(fields: dict[str, Any], lane: int, missing: int) -> dict[str, Any]:
    rest = {key: value for key, value in fields.items() if key != _LANE_KEY}
    return rest if lane == missing else rest | {"stream": lane}


def _lanes(written: Written) -> tuple[Array, bool]:
    """The lane that an annotation gives each activity, ``missing`` for none; whether the real streams are lost."""
    missing, stream = written.missing, written.stream
    asked = np.array([_annotated_stream(text, missing) for text in written.texts], np.int64)
    lane = np.where(written.number >= 0, np.append(asked, missing)[written.number], missing)
    moved, replaced = written.original_stream != missing, stream != written.row_stream
    plain = moved & (written.number < 0)
    default = np.array([*_DEFAULT_LANES[:1], *np.unique(stream[plain]).tolist()])
    replaced &= (stream != missing) & (written.number >= 0) & (written.node != 0)
    to = moved | replaced
    lane = np.where((lane == missing) & to & ~np.isin(stream, default), stream, lane)
    if written.inline or moved.any() or replaced.any() or (asked != missing).any():
        return lane, False
    # torch 2.12 to 2.14 moved every graphed event without marking the move.
    by_tool = (written.number >= 0) & (written.node > np.uint64((1 << 32) - 1))
    lane = np.where(by_tool & ~np.isin(stream, _DEFAULT_LANES), stream, missing)
    return lane, bool((lane != missing).any())


def _annotated_stream(text: str, missing: int) -> int:
    value = _typed(text).get(_LANE_KEY)
    return value if type(value) is int and abs(value) < 1 << 62 else missing


def _typed(text: str) -> dict[str, Any]:
    """An annotation, with values that PyTorch wrote as text converted back to their types."""
    return {key: _value(value) for key, value in decoded(text, dict[str, Any]).items()}


def _value(value: object) -> object:
    if not isinstance(value, str):
        return value
    result: object = _CONSTANTS.get(value, value)
    if _INTEGER.fullmatch(value):
        result = int(value)
    elif _REAL.fullmatch(value):
        result = float(value)
    elif value[:1] == "[" and value[-1:] == "]":
        with suppress(NotAsWritten):
            result = decoded(value, list[JsonInt64])
    return result


def _columns(labels: Sequence[Label]) -> dict[str, pl.Series]:
    """Columns of `GRAPH_PLACES`, one row for each label."""

    def texts(values: list[str | None]) -> pl.Series:
        return pl.Series(values, dtype=pl.String).cast(pl.Categorical())

    return {
        "label": texts(["/".join(label.path) or None for label in labels]),
        "module": texts([label.module for label in labels]),
        "stack": texts([None if label.place is None else label.place.stack_text for label in labels]),
        "phase": texts([label.phase for label in labels]),
        "lane": texts([label.lane for label in labels]),
        "metadata": texts(
            [msgspec.json.encode(label.metadata).decode() if label.metadata else None for label in labels]
        ),
        "collective": described_structs([label.collective for label in labels]),
        "rule": pl.Series(["in_trace" if label.path or label.place else "graph_no_label" for label in labels]),
    }


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
        "graph": nullable(graph, graph == 0),
        "node": nullable(node, (node == 0) & (graph == 0)),
        "grid": _triples(sorted_gpu["grid"]),
        "block": _triples(sorted_gpu["block"]),
        "registers": _integers(sorted_gpu["registers"], 0, (1 << 31) - 1),
        "shared_memory": _integers(sorted_gpu["shared_memory"], 0),
        "bytes": _integers(sorted_gpu["bytes"], 0),
    }
    return GPU.frame(columns)


def _integers(values: Array, low: int = MISSING + 1, high: int = _LARGEST) -> pl.Series:
    """The values, with null for values that are missing or outside the possible range."""
    return nullable(values, ~_between(values, low, high))


def _between(values: Array, low: int, high: int) -> Mask:
    known: Mask = values >= low
    if high < _LARGEST:
        known &= values <= high
    return known


@functools.cache
def _null(dtype: type[pl.DataType]) -> pl.Series:
    """A column of one null."""
    return pl.Series([None], dtype=dtype)


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
    """Three numbers of each row, null where one of them is not a uint32."""
    impossible = ((values < 0) | (values >= 1 << 32)).any(axis=1)
    triples = pl.Series(values.astype(np.uint32))
    if not impossible.any():
        return triples
    return triples.clear(1).new_from_index(0, len(triples)).zip_with(pl.Series(impossible), triples)


def host_frame(host: Arrays, order: Array, lanes: Lanes, names: pl.Series, flows: Arrays) -> pl.DataFrame:
    """Rows of `HOST` in the given order; empties ``host``, so that each column is freed after use."""

    def sort(key: str) -> None:
        if key not in _RARE_COLUMNS or (host[key] >= 0).any():
            host[key] = host[key][order]

    in_threads(sort, list(host), len(order))
    lane = host["lane"]
    rank = np.where(lanes.rank < 0, max(0, int(lanes.rank.min(initial=0))), lanes.rank).astype(np.int32)
    track = np.cumsum(np.concatenate([[0], lane[1:] != lane[:-1]])) if len(lane) else lane
    parent = host_parents(track, host["category"], host["start"], host["duration"])
    ops, arrows = _numbered_ops(host, rank, track), _placed_flows(flows, rank, lane, track)
    forward = forward_rows(ops, arrows, parent).astype(np.int32)
    position = positions_of_functions(host["category"] == HOST_CATEGORIES.index("python"))
    del host["forward_thread"], host["lane"]
    shown = pl.Series([shown_name(name) for name in names], dtype=pl.String)
    columns = {
        "rank": rank.take(lane),
        "process": lanes.process.take(lane),
        "thread": lanes.thread.take(lane),
        "category": _chosen(HOST_CATEGORIES, host.pop("category")),
        "name": _gathered(shown.cast(pl.Categorical()), host.pop("name")),
        **{key: _texts(names, host.pop(key)) for key in _RARE_COLUMNS},
        "start": host.pop("start"),
        "duration": host.pop("duration"),
        "correlation": _integers(host.pop("correlation")),
        "external": _integers(host.pop("external")),
        "sequence": _integers(host.pop("sequence"), 0),
        "parent": parent_column(parent),
        "forward": _integers(forward, 0),
        "position": position,
    }
    return HOST.frame(columns)


def _texts(names: pl.Series, number: Array) -> pl.Series:
    """Texts by their numbers, null for -1."""
    if (number < 0).all():
        return _null(pl.Categorical).new_from_index(0, len(number))
    rows = pl.Series(number)
    return names.cast(pl.Categorical()).gather(rows.set(rows < 0, None).cast(pl.UInt32))


def _numbered_ops(host: Arrays, rank: Array, track: Array) -> Arrays:
    rows = np.flatnonzero(host["sequence"] >= 0)
    columns = {key: host[key][rows] for key in ("start", "sequence", "forward_thread")}
    return {"row": rows, "rank": rank[host["lane"][rows]], "track": track[rows], **columns}


def _placed_flows(flows: Arrays, rank: Array, lane: Array, track: Array) -> Arrays:
    """The arrows, with rank and track instead of lane."""
    if not flows:
        return {}
    track_of = np.full(len(rank), -1, np.int64)
    track_of[lane] = track
    return {**flows, "rank": rank[flows["lane"]], "track": track_of[flows["lane"]]}


def collective_frame(moved: Arrays, gpu_order: Array, host_order: Array) -> pl.DataFrame:
    """Rows of `COLLECTIVES` from the arguments of kernels, or of the host ops that launched them."""
    if not moved:
        return COLLECTIVES.empty()
    rows = {"gpu": _places_after(moved["gpu"], gpu_order), "host": _places_after(moved["host"], host_order)}
    order = np.lexsort([np.where(rows[name] < 0, _LARGEST, rows[name]) for name in ("host", "gpu")])
    columns = described(moved) | {name: _integers(rows[name], 0) for name in rows}
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
    is_kind = np.zeros(len(names), np.bool_)
    is_kind[list(kinds)] = True
    rows = np.flatnonzero(is_kind.take(host["name"]) & IS_API_CALL.take(host["category"]))
    calls = [kinds[number] for number in host["name"][rows].tolist()]
    return Calls(_places_after(rows, order), np.array(calls, np.object_))


def waiting_facts(waiting: Arrays, ranks: list[int]) -> pl.DataFrame:
    """What the file records about calls that wait and about CUDA events, as `thence.model.waiting.CALL_FACTS`.

    Empty if the file holds several ranks, because their correlation ids collide.

    Args:
        waiting: columns ``waiting.*`` of `thence.readers.kineto.events.decode`.
        ranks: the ranks that used a device.
    """
    if len(ranks) != 1 or not waiting:
        return call_facts()

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
    return call_facts(columns)


def threads_frame(threads: Arrays, on_host: Array, lanes: Lanes) -> pl.DataFrame:
    """The last name of each host thread: Kineto writes the process name first and the thread's own name later.

    Args:
        threads: columns ``thread.*`` of `thence.readers.kineto.events.decode`.
        on_host: whether each lane has host ranges.
    """
    if not threads:
        return THREADS.empty()
    named = np.flatnonzero(on_host.take(threads["lane"]))
    lane = threads["lane"][named]
    keys = np.maximum(lanes.rank[lane], 0), lanes.process[lane], lanes.thread[lane]
    places = {key: row for row, key in enumerate(zip(*(key.tolist() for key in keys), strict=True))}
    last = np.sort(np.fromiter(places.values(), np.int64, len(places)))
    names = [threads["name"][row] for row in named[last].tolist()]
    return THREADS.frame({
        **{name: key[last] for name, key in zip(("rank", "process", "thread"), keys, strict=True)},
        "name": pl.Series(names, dtype=pl.String),
    })  # fmt: skip


def graph_places(joined: Arrays, annotated: Written, gpu_order: Array) -> tuple[pl.DataFrame, list[str]]:
    """Labels of graphed activities in the file (written by thence, or else by PyTorch), and warnings."""
    if not joined or not len(joined["gpu"]):
        return annotated_places(annotated, lambda rows: _row_after(rows, gpu_order))
    columns = {
        name: pl.Series(values, dtype=pl.String).replace("", None)
        for name, values in joined.items()
        if isinstance(values, list)
    }
    confidence = pl.Series(joined["confidence"]).fill_nan(None)
    columns["lane"] = columns.pop("shown_in")
    columns |= {name: _integers(joined[name], 0) for name in ("node", "nodes")}
    rows = _row_after(joined["gpu"], gpu_order)
    labelled, rule = columns["label"].is_not_null(), columns["rule"]
    # Rules that this version does not know, and reasons why there is no label where there is one.
    unknown = ~(rule.is_in(list(RULES)) | (rule.is_in(_GRAPH_REASONS) & ~labelled))
    in_trace = pl.Series(["in_trace"]).new_from_index(0, len(rule))
    reason = pl.Series(["graph_not_joined"]).new_from_index(0, len(rule))
    columns["rule"] = in_trace.zip_with(labelled, reason).zip_with(unknown, rule)
    columns["detail"] = rule.zip_with(unknown & ~labelled, columns["detail"])
    frame = GRAPH_PLACES.frame({**columns, "gpu": rows, "confidence": confidence})
    return frame.sort("gpu"), []
