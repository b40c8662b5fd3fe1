"""Annotations of CUDA graphs that PyTorch or its tools wrote into the arguments of graphed activities.

Three writers add the fields of an annotation (see `thence.readers.torch_annotations`) to an event's own
arguments:

- torch 2.15, ``export_chrome_trace(cuda_graph_annotations=...)``: values are text; the lane is in
  ``annotated_stream``, or the event was moved to the lane and ``original_stream`` is the stream on which it
  ran. The file has the key ``cudaGraphInlineAnnotated``.
- torch 2.12 to 2.14, ``torch.cuda._annotate_cuda_graph_trace``: values are text; every graphed event was
  moved to its lane, or to the default lane (7; events that would overlap there to 8), and the stream on
  which it ran is lost.
- torch.profiler's CUPTI exporter (Cuspy): values keep their type; a field ``stream`` replaces the argument
  of that name, but the event stays in the viewer's row of its stream.

`thence.readers.kineto.piece_annotations` finds the annotations in the events.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import polars as pl

from thence.model.collective_columns import described_structs
from thence.model.collectives import KINETO_KEYS
from thence.model.graph_labels import MODULE_KEYS
from thence.model.json_fields import JsonInt64, NotAsWritten, decoded
from thence.model.tables import GRAPH_PLACES
from thence.readers.torch_annotations import label_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from thence.model.arrays import Array
    from thence.model.graph_labels import Label


_LANE = "annotated_stream"
_DEFAULT_LANES = (7, 8)
_PHASE = "autograd_phase"
_LOST = (
    "PyTorch's tool for annotated CUDA graphs moved their activities to lanes and shifted some by up to 1 us; the "
    "file does not hold the streams on which they ran"
)
_TELLING = frozenset((*MODULE_KEYS, "name", "str", "annotation", _LANE, _PHASE, KINETO_KEYS["collective"]))
_INTEGER, _REAL = (re.compile(r"-?(?:0|[1-9][0-9]{0,17})"), re.compile(r"-?[0-9]+\.[0-9]+(?:e-?[0-9]+)?"))
_WORDS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True)
class Written:
    """Annotations and streams of the device activities as written in the file, before the activities are sorted.

    Attributes:
        number: index in ``texts`` of the annotation of each activity, -1 for none.
        texts: the distinct annotations, as `thence.readers.kineto.piece_annotations` returns them.
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
    if not written.inline and not any(_TELLING & said.keys() for said in fields):
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
    return frame, [_LOST] if lost else []


def _with_lane(fields: dict[str, Any], lane: int, missing: int) -> dict[str, Any]:
    rest = {key: value for key, value in fields.items() if key != _LANE}
    return rest if lane == missing else rest | {"stream": lane}


def _lanes(written: Written) -> tuple[Array, bool]:
    """The lane that an annotation gives each activity, ``missing`` for none; whether the real streams are lost."""
    missing, stream = written.missing, written.stream
    asked = np.array([_asked(text, missing) for text in written.texts], np.int64)
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


def _asked(text: str, missing: int) -> int:
    value = _typed(text).get(_LANE)
    return value if type(value) is int and abs(value) < 1 << 62 else missing


def _typed(text: str) -> dict[str, Any]:
    """An annotation, with values that PyTorch wrote as text converted back to their types."""
    return {key: _value(value) for key, value in decoded(text, dict[str, Any]).items()}


def _value(value: object) -> object:
    if not isinstance(value, str):
        return value
    result: object = _WORDS.get(value, value)
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
