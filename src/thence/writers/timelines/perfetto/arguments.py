"""Arguments of slices: the columns of a trace that are written as arguments, with their names and types."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.annotations import ANNOTATED, annotation_table
from thence.model.columns import values_or
from thence.model.places import PLACES
from thence.writers.timelines.perfetto.packets import Argument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.model.timeline import Timeline
    from thence.writers.timelines.perfetto.packets import Interned

_GPU = {
    "stream": "stream",
    "correlation": "correlation",
    "external": "external id",
    "graph": "graph id",
    "node": "graph node id",
    "grid": "grid",
    "block": "block",
    "registers": "registers per thread",
    "shared_memory": "shared memory bytes",
    "bytes": "bytes",
    "iteration": "iteration",
}
_COLLECTIVE = {
    "collective": "collective",
    "bytes": "message bytes",
    "in_elements": "elements in",
    "out_elements": "elements out",
    "element_type": "element type",
    "group_size": "group size",
    "group_name": "process group",
    "group_description": "process group description",
    "group_ranks": "process group ranks",
    "sequence": "sequence in group",
    "source_rank": "source rank",
    "destination_rank": "destination rank",
}
_HOST = {"correlation": "correlation", "external": "external id", "sequence": "sequence number", "state": "state"}
_INSIDE = {"net_ns": "net ns", "block": "block", "index": "index in block", "sm": "SM"}


def gpu_arguments(timeline: Timeline, interned: Interned) -> tuple[Argument, ...]:
    """Launch parameters, places, metadata of marks, and collectives of each device activity, in table order."""
    gpu = timeline.trace.gpu
    rows = pl.DataFrame({"gpu": pl.int_range(gpu.height, dtype=pl.Int32, eager=True)})
    described = timeline.trace.collectives.unique("gpu", keep="first", maintain_order=True)
    arguments = (*columns_as_arguments(gpu, _GPU, interned),)
    arguments += columns_as_arguments(timeline.trace.places, dict(zip(PLACES, PLACES, strict=True)), interned)
    if described.height:
        of_gpu = rows.join(described, on="gpu", how="left", maintain_order="left")
        arguments += columns_as_arguments(of_gpu, _COLLECTIVE, interned)
    said = annotation_table(timeline.trace)
    if said.height:
        fields = {name: _free(name) for name in said.columns if name not in ANNOTATED}
        of_gpu = rows.join(said.select("gpu", *fields), on="gpu", how="left", maintain_order="left")
        arguments += columns_as_arguments(of_gpu, fields, interned)
    return arguments


def _free(name: str) -> str:
    """The argument for a field of the user's annotations; prefixed if thence writes another argument of that name."""
    taken = {*_GPU.values(), *_COLLECTIVE.values(), *PLACES}
    return f"annotated_{name}" if name in taken else name


def host_arguments(timeline: Timeline, interned: Interned) -> tuple[Argument, ...]:
    """Ids of each host range, in the order of the table."""
    return columns_as_arguments(timeline.trace.host, _HOST, interned)


def inside_arguments(ranges: pl.DataFrame, interned: Interned) -> tuple[Argument, ...]:
    """Net time and place of each in-kernel range, in the order of the table."""
    unclosed = pl.when(~pl.col("closed")).then(pl.lit("entered, never left"))
    marked = ranges.with_columns(state=unclosed)
    return columns_as_arguments(marked, {**_INSIDE, "state": "state"}, interned)


def columns_as_arguments(frame: pl.DataFrame, names: Mapping[str, str], interned: Interned) -> tuple[Argument, ...]:
    """The named columns of a frame as arguments of its rows; missing columns and columns of nulls are left out.

    Args:
        names: maps a column to the name of its argument.
    """
    return tuple(
        _argument(frame[column], name, interned)
        for column, name in names.items()
        if column in frame.columns and frame[column].null_count() < frame.height
    )


def _argument(values: pl.Series, name: str, interned: Interned) -> Argument:
    key = interned.keys.of(name)
    present = values.is_not_null().to_numpy()
    if isinstance(values.dtype, pl.Array):
        places = (values.arr.get(i).fill_null(0).to_numpy() for i in range(values.dtype.size))
        numbers = np.stack([*places], axis=1)
        return Argument(key, "uint", numbers, present)
    if values.dtype.is_unsigned_integer():
        return Argument(key, "uint", values_or(values, 0), present)
    if values.dtype.is_integer():
        return Argument(key, "int", values_or(values, 0), present)
    if values.dtype.is_float():
        return Argument(key, "double", np.asarray(values_or(values, 0.0)), present)
    return Argument(key, "text", interned.texts.column(values), present)
