"""FLOP and bytes that the program states of its own work: ``thence.mark("attention", flop=..., bytes=...)``.

``dtype=`` states the data type of the FLOP, one of `thence.model.peaks.DTYPES` or a short name such as bf16, for
kernels whose names and inputs do not tell it.

The statement is about all kernels that are launched while the mark is open once. Of nested marks the innermost that
states something counts. In a CUDA graph it is about the kernels of one replay that were launched while the mark was
open at capture, whose labels name it (``work_of``). Kernels of the backward pass are not among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl

from thence.model.columns import row_numbers
from thence.model.intervals import NO_ROW, chain_to
from thence.model.json_fields import NotAsWritten, decoded
from thence.model.peaks import DTYPES, SHORT_NAMES

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

_NUMBERS = r'"(?:flop|bytes)"\s*:\s*[0-9]'
_WORK_OF = r'"work_of"\s*:\s*([0-9]+)'
MAX_COUNT = 1e30
"""FLOP and bytes of an activity beyond any machine."""
_SCHEMA = {
    "index": pl.UInt32(), "call": pl.UInt32(), "flop": pl.Float64(), "traffic": pl.Float64(), "type": pl.String()
}  # fmt: skip


class _Stated(msgspec.Struct):
    flop: float | None = None
    bytes: float | None = None
    dtype: str | None = None


def said_work(trace: Attributed) -> pl.DataFrame:
    """The work of marks that state theirs: index of an activity, call (the mark), flop, traffic and type."""
    parts = [_of_ranges(trace), _in_graphs(trace)]
    said = pl.concat(part for part in parts if part is not None) if any(p is not None for p in parts) else None
    if said is None or said.is_empty():
        return pl.DataFrame(schema=_SCHEMA)
    texts = said["metadata"].unique()
    stated = [_numbers(text) for text in texts]
    columns = {"flop": pl.Float64(), "traffic": pl.Float64(), "type": pl.String()}
    read = pl.DataFrame(stated, columns, orient="row").with_columns(metadata=texts)
    return (
        said.with_columns(call=pl.col("mark").rank("dense"))
        .join(read, on="metadata")
        .select("index", "call", "flop", "traffic", "type")
        .cast(_SCHEMA)  # type: ignore[arg-type]
    )


def _of_ranges(trace: Attributed) -> pl.DataFrame | None:
    """Index of an activity, and the mark around its launch: a row of host; None if no mark states anything."""
    metadata = trace.host["metadata"]
    if metadata.null_count() == len(metadata):
        return None
    texts = metadata.unique().drop_nulls()
    stating = texts.filter(texts.cast(pl.String).str.contains(_NUMBERS))
    if stating.is_empty():
        return None
    states = metadata.is_in(stating.implode()).fill_null(value=False).to_numpy()
    parent, launch = (row_numbers(column) for column in (trace.host["parent"], trace.places["launch"]))
    mark = chain_to(parent, launch, states)
    index = np.flatnonzero(mark != NO_ROW)
    return pl.DataFrame({"index": index, "mark": mark[index].astype(str)}).with_columns(
        metadata=metadata.gather(mark[index]).cast(pl.String)
    )


def _in_graphs(trace: Attributed) -> pl.DataFrame | None:
    """Index of an activity of a CUDA graph, and the mark of its launch; None if no label states anything."""
    if trace.graph_places["metadata"].null_count() == trace.graph_places.height:
        return None
    metadata = pl.col("metadata").cast(pl.String)
    places = (
        trace.graph_places.select("gpu", metadata=metadata, of=metadata.str.extract(_WORK_OF))
        .filter(pl.col("metadata").str.contains(_NUMBERS))
        .drop_nulls()
    )
    if places.is_empty():
        return None
    launched = trace.gpu[places["gpu"].cast(pl.UInt32)].select("rank", "correlation", "graph")
    mark = pl.format("graph {} {} {} {}", "rank", "correlation", "graph", "of")
    return places.hstack(launched).select(index=pl.col("gpu").cast(pl.Int64), mark=mark, metadata="metadata")


def _numbers(text: str) -> tuple[float | None, float | None, str | None]:
    """FLOP, bytes and data type in the metadata of a mark; None where they are not stated, or make no sense."""
    try:
        stated = decoded(text, _Stated)
    except NotAsWritten:
        return None, None, None
    flop, moved = (n if n is not None and 0 <= n < MAX_COUNT else None for n in (stated.flop, stated.bytes))
    dtype = SHORT_NAMES.get(stated.dtype or "", stated.dtype)
    return flop, moved, dtype if dtype in DTYPES else None
