"""The annotations of graphed activities in one piece of a Kineto file: see `thence.readers.kineto.annotations`.

An annotation belongs to a node of a graph, so it is decoded once for each node and piece of the file. This module
runs in the decoding processes, which start without Polars.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from thence.model.arrays import Array

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
_NUMBERS = frozenset(("grid", "block", "bytes", "device", "context", "queued", "cluster"))
"""Arguments of Kineto that are never text: a text under such a key is an annotation that replaced Kineto's value."""
_BY_THENCE = "label_rule"
_raw_events = msgspec.json.Decoder(list[msgspec.Raw])


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
    first, of_key = _distinct(lane[graphed], graph[graphed], node[graphed])
    try:
        events = piece if isinstance(piece, list) else _raw_events.decode(bytes(piece))
    except (msgspec.MsgspecError, RecursionError):
        return number, []
    texts: dict[str, int] = {}
    numbers = []
    for event in row[graphed[first]].tolist():
        said = _said(bytes(events[event]))
        numbers.append(texts.setdefault(said, len(texts)) if said else -1)
    number[graphed] = np.array(numbers, np.int32)[of_key]
    return number, list(texts)


def _distinct(*columns: Array) -> tuple[Array, Array]:
    """The first row of each distinct combination of values, in ascending order, and each row's combination number."""
    combination = np.zeros(len(columns[0]), np.int64)
    for values in columns:
        different, number = np.unique(values, return_inverse=True)
        combination = combination * len(different) + number
    _, first, of_row = np.unique(combination, return_index=True, return_inverse=True)
    return first, of_row


def _said(event: bytes) -> str | None:
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
        if key not in _OF_KINETO or (key in _NUMBERS and isinstance(value, str))
    }
    return msgspec.json.encode(fields).decode() if fields else None
