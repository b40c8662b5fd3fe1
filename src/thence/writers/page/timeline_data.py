"""Encodes a timeline for the page: columns of integers and the texts, deflated, as base64.

The bytes before deflation are::

    4 bytes     little-endian: length of the JSON document
    JSON        texts, lanes, and a list of the columns: table, name, rows, bytes of a number
    columns     one after the other, each as planes: the lowest bytes of all numbers, then the next bytes, and so on

Numbers that may be negative are encoded as unsigned (zigzag): 0, -1, 1, -2 ... become 0, 1, 2, 3. Columns of starts
hold differences. In columns with nulls, 0 is null, and other values are increased by 1.
``templates/timeline_data.js`` decodes this format.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.idle.host_causes import MEANINGS
from thence.analysis.timelines.overview import CLASSES
from thence.model.columns import values_or
from thence.writers.charts.results import stream_name
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from thence.analysis.timelines.activity_timeline import ActivityTimeline
    from thence.model.arrays import Int64


MAX_ROWS = 1_000_000
"""Most rows of activities, and most parts of gaps, in a page; with more, short neighbours are merged."""
MAX_BYTES = 8_000_000
"""Most bytes of a timeline in a page."""
_MIN_ROWS = 1_000


def timeline_data(timeline: ActivityTimeline) -> tuple[str, ActivityTimeline]:
    """The encoded timeline, and the timeline that it holds, which is coarser if it would exceed `MAX_BYTES`."""
    rows = MAX_ROWS
    while True:
        shown = timeline.coarser(rows)
        text = base64.b64encode(zlib.compress(_bytes(shown), 6)).decode("ascii")
        if len(text) <= MAX_BYTES or rows <= _MIN_ROWS:
            return text, shown
        rows = min(rows // 2, rows * MAX_BYTES // len(text))


def _bytes(timeline: ActivityTimeline) -> bytes:
    columns = {"rows": _row_columns(timeline), "gaps": _gap_columns(timeline)}
    columns["use"] = _use_columns(timeline)
    columns["parts"] = {"cause": _or_none(timeline.parts["cause"]), "ns": timeline.parts["ns"].to_numpy()}
    encoded = [
        (table, name, *_planes(values)) for table, of_table in columns.items() for name, values in of_table.items()
    ]
    head = _texts(timeline) | {
        "columns": [(table, name, len(columns[table][name]), size) for table, name, size, _ in encoded]
    }
    document = json.dumps(head, separators=(",", ":")).encode()
    return b"".join((len(document).to_bytes(4, "little"), document, *(planes for *_, planes in encoded)))


def _row_columns(timeline: ActivityTimeline) -> dict[str, Int64]:
    rows = timeline.rows
    duration = rows["duration"].to_numpy()
    return {
        "start": _folded(_differences(rows["start"])),
        "duration": duration,
        "covered": duration - rows["busy_ns"].to_numpy(),
        "more": rows["count"].to_numpy() - 1,
        "class": rows["class"].to_numpy(),
        "name": rows["name"].to_numpy(),
        "place": rows["place"].to_numpy(),
        "step": _or_none(rows["step"]),
        "iteration": _or_none(rows["iteration"]),
        "call": _or_none(rows["call"]),
        "lead": _folded(values_or(rows["lead_ns"], 0)),
        "took": values_or(rows["call_ns"], 0),
    }


def _gap_columns(timeline: ActivityTimeline) -> dict[str, Int64]:
    gaps = timeline.gaps
    return {
        "start": _folded(_differences(gaps["start"])),
        "busy": (gaps["duration"] - gaps["idle_ns"]).to_numpy(),
        "parts": gaps["parts"].to_numpy(),
    }


def _use_columns(timeline: ActivityTimeline) -> dict[str, Int64]:
    use = timeline.use
    return {
        "start": _folded(_differences(use["start"])),
        "duration": use["duration"].to_numpy(),
        "busy": use["used_ns"].to_numpy(),
    }


def _differences(starts: pl.Series) -> Int64:
    return np.diff(starts.to_numpy(), prepend=0)


def _folded(values: Int64) -> Int64:
    return np.where(values < 0, -2 * values - 1, 2 * values)


def _or_none(column: pl.Series) -> Int64:
    return (column.cast(pl.Int64) + 1).fill_null(0).to_numpy()


def _planes(values: Int64) -> tuple[int, bytes]:
    """Number of bytes of each number, and the numbers plane by plane."""
    largest = int(values.max(initial=0))
    size = (largest.bit_length() + 7) // 8
    split = np.ascontiguousarray(values, "<i8").view(np.uint8).reshape(len(values), 8)
    return size, np.ascontiguousarray(split[:, :size].T).tobytes()


def _texts(timeline: ActivityTimeline) -> dict[str, Any]:
    """The JSON document, without the list of columns."""
    details = timeline.details
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(printable(text), len(texts))

    places = [
        [number(text) if text is not None else -1 - number(why or "") for text, why in place]
        for place in details.places
    ]
    return {
        "span": timeline.span_ns,
        "lanes": _lanes(timeline),
        "devices": _devices(timeline),
        "counters": timeline.use.group_by("rank", "device", "counter", maintain_order=True)
        .agg(rows=pl.len())
        .to_dicts(),
        "classes": CLASSES,
        "names": [[printable(short), None if full is None else printable(full)] for short, full in details.names],
        "kinds": details.kinds,
        "places": places,
        "steps": [printable(text) for text in details.steps],
        "calls": [printable(text) for text in details.calls],
        "causes": [[cause, by, None if name is None else printable(name)] for cause, by, name in timeline.causes],
        "meanings": MEANINGS,
        "texts": list(texts),
    }


def _lanes(timeline: ActivityTimeline) -> list[dict[str, Any]]:
    count = np.bincount(timeline.rows["lane"].to_numpy(), minlength=timeline.lanes.height)
    keys = timeline.lanes.select("rank", "device", "stream", "count").rows()
    return [
        {
            "rank": rank,
            "device": device,
            "name": stream_name(rank, device, stream).partition(": ")[2],
            "count": activities,
            "rows": int(rows),
        }
        for (rank, device, stream, activities), rows in zip(keys, count, strict=True)
    ]


def _devices(timeline: ActivityTimeline) -> list[dict[str, int]]:
    """Devices with gaps, in the order of the gaps."""
    counted = timeline.gaps.group_by("rank", "device", maintain_order=True).agg(gaps=pl.len())
    return counted.to_dicts()
