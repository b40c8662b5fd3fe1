"""Concatenates the tables of several inputs, and adjusts row references, ranks and clocks."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import polars as pl

from thence.model.losses import Loss
from thence.model.rank_numbers import rank_numbers
from thence.model.tables import Meta, Tables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_Tables = TypeVar("_Tables", bound=Tables)
_NO_CLOCK = (
    "some inputs do not state the Unix time at which their clock starts, so times of different inputs cannot be"
    " compared"
)
_ROW_REFERENCES = {
    "gpu": {"program": "programs"},
    "host": {"parent": "host", "forward": "host"},
    "collectives": {"gpu": "gpu", "host": "host"},
    "threads": {},
    "programs": {"hlo": "hlo"},
    "events": {"host": "host", "record": "events"},
    "waits": {"host": "host", "record": "events"},
    "steps": {},
    "step_times": {},
    "memory": {"opened": "memory_totals", "closed": "memory_totals"},
    "memory_totals": {},
    "memory_failures": {"after": "memory_totals"},
    "counters": {},
    "stalls": {},
    "graph_places": {"gpu": "gpu"},
}
"""Columns that hold row numbers, by table, and the table that they point into."""
_TIMES = ("start", "launch", "end")
"""Columns that hold times."""
_MAX_CHUNKS = 16
"""Of more parts, the columns are made contiguous: each part of a column costs time in every query."""


def concat(parts: Sequence[Tables]) -> Tables:
    """Concatenates the tables of several inputs; adjusts row references, ranks and clocks.

    Ranks that two inputs hold get other numbers (`thence.model.rank_numbers`), with a warning. All times are converted
    to the clock of the first input with activities or host ranges. Times of an input that does not state its epoch
    stay as they are, with a loss.
    """
    if len(parts) == 1:
        return parts[0]
    parts, warnings = _distinct_ranks(parts)
    epochs = [part.meta.epoch_ns for part in parts]
    timed = [part.meta.epoch_ns for part in parts if part.gpu.height or part.host.height]
    epoch = timed[0] if timed else epochs[0]
    losses: tuple[Loss, ...] = ()
    if None in timed:
        losses = (Loss("no_common_clock", "", timed.count(None), _NO_CLOCK),)
        if any(e is not None for e in timed):
            warnings.append(_NO_CLOCK)
    shifts = [0 if epoch is None or e is None else e - epoch for e in epochs]
    offsets = row_offsets(parts)
    frames = {
        name: _joined(
            [getattr(part, name) for part in parts],
            shifts,
            {column: offsets[table] for column, table in references.items()},
        )
        for name, references in _ROW_REFERENCES.items()
    }
    hlo = tuple(module for part in parts for module in part.hlo)
    labels = tuple(file for part in parts for file in part.graph_labels)
    records = tuple(record for part in parts for record in part.flight_records)
    inspected = tuple(record for part in parts for record in part.inspector_records)
    metas = [part.meta for part in parts]
    meta = Meta(
        inputs=tuple(x for m in metas for x in m.inputs),
        formats=tuple(x for m in metas for x in m.formats),
        epoch_ns=epoch,
        facts=tuple(x for m in metas for x in m.facts),
        devices=tuple(x for m in metas for x in m.devices),
        process_groups=tuple(x for m in metas for x in m.process_groups),
        warnings=(*(x for m in metas for x in m.warnings), *warnings),
        left_out=tuple(x for m in metas for x in m.left_out),
        notes=tuple(x for m in metas for x in m.notes),
        losses=(*(x for m in metas for x in m.losses), *losses),
        ranks_stated=all(part.meta.ranks_stated or not part.ranks for part in parts),
    )
    return Tables(
        **frames, hlo=hlo, graph_labels=labels, flight_records=records, inspector_records=inspected, meta=meta
    )


def row_offsets(parts: Sequence[Tables]) -> dict[str, list[int]]:
    """For each table that others refer to, the row of the concatenated table at which each part begins."""
    names = ("gpu", "host", "programs", "events", "steps", "memory_totals", "hlo")
    heights = {name: [len(getattr(part, name)) for part in parts] for name in names}
    return {name: [0, *itertools.accumulate(counts)][:-1] for name, counts in heights.items()}


def _joined(
    frames: Sequence[pl.DataFrame], shifts: Sequence[int], offsets: Mapping[str, Sequence[int]]
) -> pl.DataFrame:
    """One table of all inputs; see `moved`, which would take a query for each of thousands of inputs.

    Args:
        shifts: ns that are added to the times of each input.
        offsets: number that is added to a column of row numbers, for each input.
    """
    heights = [frame.height for frame in frames]
    filled = [frame for frame in frames if frame.height] or frames[:1]
    joined = pl.concat(filled, rechunk=len(filled) > _MAX_CHUNKS)
    added = {column: np.array(values, np.int32) for column, values in offsets.items()}
    added |= {column: np.array(shifts) for column in _TIMES if column in joined.columns}
    return joined.with_columns(
        pl.col(column) + pl.Series(np.repeat(values, heights))
        for column, values in added.items()
        if values.any() and joined[column].null_count() < joined.height
    )


def moved(frame: pl.DataFrame, shift_ns: int, offsets: Mapping[str, int]) -> pl.DataFrame:
    """A table with ``shift_ns`` added to its times, and an offset added to each column of row numbers."""
    changes = [pl.col(column) + offset for column, offset in offsets.items() if offset]
    if shift_ns:
        changes += [pl.col(column) + shift_ns for column in _TIMES if column in frame.columns]
    return frame.with_columns(changes)


def _distinct_ranks(parts: Sequence[Tables]) -> tuple[list[Tables], list[str]]:
    held = [tuple(part.ranks) for part in parts]
    numbers = rank_numbers([(ranks, part.meta.ranks_stated) for ranks, part in zip(held, parts, strict=True)])
    result, warnings = [], []
    for part, old_ranks, ranks in zip(parts, held, numbers, strict=True):
        new = {old: number for old, number in zip(old_ranks, ranks, strict=True) if old != number}
        if new:
            shown = ", ".join(f"rank {old} is shown as rank {number}" for old, number in new.items())
            warnings.append(f"{part.meta.named}: rank already taken by another input; {shown}")
        result.append(renumbered(part, new) if new else part)
    return result, warnings


def renumbered(part: _Tables, new: Mapping[int, int]) -> _Tables:
    """The same tables with other numbers for the ranks that are in ``new``."""

    def frame(old: pl.DataFrame) -> pl.DataFrame:
        return old.with_columns(pl.col("rank").replace_strict(new, return_dtype=pl.Int32, default=pl.col("rank")))

    devices = tuple(dataclasses.replace(d, rank=new.get(d.rank, d.rank)) for d in part.meta.devices)
    labels = tuple(
        dataclasses.replace(file, process=dataclasses.replace(file.process, rank=_new_rank(file.process.rank, new)))
        for file in part.graph_labels
    )
    records = tuple(dataclasses.replace(record, rank=_new_rank(record.rank, new)) for record in part.flight_records)
    tables = {name: getattr(part, name) for name in _ROW_REFERENCES}
    of_ranks: dict[str, Any] = {name: frame(table) for name, table in tables.items() if "rank" in table.columns}
    return dataclasses.replace(
        part,
        **of_ranks,
        graph_labels=labels,
        flight_records=records,
        meta=dataclasses.replace(part.meta, devices=devices),
    )


def _new_rank(rank: int | None, new: Mapping[int, int]) -> int | None:
    return None if rank is None else new.get(rank, rank)
