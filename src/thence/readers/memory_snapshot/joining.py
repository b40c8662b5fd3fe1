"""Joins the memory of a process to what else is known of it: a recording, or a trace that is given beside a snapshot.

The snapshot has every allocation and its true line; the trace has the modules, operators, phases and steps of the
launches that they were made for.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import polars as pl

from thence.readers.allocations import with_threads
from thence.readers.memory_snapshot.sniffing import NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.model.tables import Tables
    from thence.readers.runs import Read
    from thence.units import Ns

_SAME_NS = 100_000
"""Between an event of torch.profiler about an allocation and that of the history, whose clock has microseconds."""


def joined(tables: Tables, snapshot: Tables, zero_ns: Ns, rank: int) -> Tables:
    """The tables of one process, with the memory of its snapshot.

    Args:
        snapshot: as `thence.readers.memory_snapshot.read.read` returns it.
        zero_ns: Unix time at which the process's clock reads 0.
        rank: of the process.
    """
    shift = (snapshot.meta.epoch_ns or zero_ns) - zero_ns
    time = [pl.col("start") + shift]
    of_rank = pl.lit(rank, pl.Int32()).alias("rank")
    memory = with_threads(snapshot.memory.with_columns(of_rank, *time, pl.col("end") + shift), tables)
    notes = (*tables.meta.notes, *snapshot.meta.notes)
    losses = (*tables.meta.losses, *snapshot.meta.losses)
    return dataclasses.replace(
        tables,
        memory=_as_noted(memory, tables.memory),
        memory_totals=snapshot.memory_totals.with_columns(of_rank, *time),
        memory_failures=snapshot.memory_failures.with_columns(of_rank, *time),
        meta=dataclasses.replace(tables.meta, notes=notes, losses=losses),
    ).with_warnings(snapshot.meta.warnings)


def _as_noted(memory: pl.DataFrame, noted: pl.DataFrame) -> pl.DataFrame:
    """Allocations with process, thread and time of the events of the trace about them, where it has such events."""
    if noted.is_empty():
        return memory
    calls = noted.select("device", "address", "start", "process", "thread", launch="start").drop_nulls().sort("start")
    asked = memory.select("device", "address", "start").with_row_index("row").drop_nulls().sort("start")
    joined = asked.join_asof(
        calls,
        on="start",
        by=["device", "address"],
        strategy="nearest",
        tolerance=_SAME_NS,
        check_sortedness=False,  # both are sorted above; Polars cannot see it in groups
    )
    columns = ("process", "thread", "launch")
    rows = memory.with_row_index("row").join(
        joined.select("row", *columns), on="row", how="left", suffix="_noted", maintain_order="left"
    )
    known = (pl.coalesce(f"{name}_noted", name).alias(name) for name in columns)
    return rows.with_columns(known).select(memory.columns)


def with_snapshots(parts: Sequence[Read]) -> list[Read]:
    """The inputs, where snapshots are joined to the traces of their processes.

    A snapshot belongs to the trace of its rank that ran at the same time; without a rank in its name, to the only
    trace that is given. Where there is none, or several, it stays an input of its own.
    """
    of_memory = {part.file: part.tables.meta.formats == (NAME,) for part in parts}
    others = {part.file: part for part in parts if not of_memory[part.file]}
    alone = []
    for snapshot in (part for part in parts if of_memory[part.file]):
        files = [file for file, part in others.items() if _is_same_process(part, snapshot)]
        if len(files) == 1:
            part = others[files[0]]
            others[files[0]] = dataclasses.replace(part, tables=_with_snapshot(part.tables, snapshot.tables))
        else:
            alone.append(snapshot)
    return [*others.values(), *alone]


def _is_same_process(part: Read, snapshot: Read) -> bool:
    trace, memory = part.tables, snapshot.tables
    zero, begin = trace.meta.epoch_ns, memory.meta.epoch_ns
    if trace.gpu.is_empty() or zero is None or begin is None or len(trace.ranks) != 1:
        return False
    if memory.meta.ranks_stated and trace.ranks != memory.ranks:
        return False
    called = trace.gpu["start"] if trace.host.is_empty() else trace.host["start"]
    last = memory.memory_totals["start"].max()
    overlaps = begin + last >= zero + called.min() and begin <= zero + called.max()  # type: ignore[operator]
    return bool(overlaps)


def _with_snapshot(trace: Tables, snapshot: Tables) -> Tables:
    memory = joined(trace, snapshot, trace.meta.epoch_ns or 0, trace.ranks[0])
    meta = memory.meta
    (name,) = snapshot.meta.inputs
    instead = " instead of the trace's own" if trace.memory_totals.height else ""
    note = f"{name}: its memory is joined to {meta.named}{instead}"
    meta = dataclasses.replace(meta, inputs=(*meta.inputs, name), formats=(*meta.formats, NAME))
    return dataclasses.replace(memory, meta=dataclasses.replace(meta, notes=(*meta.notes, note)))
