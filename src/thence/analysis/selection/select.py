"""Filters a trace; the result is a complete trace, so every analysis of it covers the selection only."""

from __future__ import annotations

import contextlib
import dataclasses
from difflib import get_close_matches
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.programs.warmup import WarmUp, phases, separate_work
from thence.analysis.steps.windows import selected_windows, steps
from thence.errors import MissingData, UsageError
from thence.model.columns import row_numbers
from thence.model.grouped_intervals import numbered
from thence.model.intervals import NO_ROW
from thence.model.places import SEARCHED
from thence.model.selection import MAIN, SEPARATE, TYPICAL
from thence.model.thresholds import MAIN_PROGRAMS_SHARE
from thence.model.trees import ancestors
from thence.units import format_count, format_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.model.arrays import Mask
    from thence.model.attributed import Attributed
    from thence.model.selection import Selection, StepChoice


def select(trace: Attributed, selection: Selection) -> Attributed:
    """The selected device activities, with the rows of other tables that refer to them.

    Durations, times and places do not change. Host ranges are dropped only together with their rank, and program
    executions only together with their rank or device: a launch may lie outside of the window in which its kernel ran.

    Args:
        trace: attributed; of a part of a trace, ranks and devices can be selected.
        selection: which activities to keep.

    Raises:
        UsageError: the trace holds no such rank or device.
        MissingData: no activity is left.
    """
    if selection.warm_up == SEPARATE and not trace.programs.is_empty():
        # Before anything is dropped: only the whole trace shows whether an execution is complete.
        places = trace.places.with_columns(separate_work(trace))
        trace = dataclasses.replace(trace, places=places, part_of=_origin(trace))
    begin = int(str(trace.gpu["start"].min() or 0))
    leaves_out_warm_up = selection.warm_up not in (SEPARATE, "keep")
    after, statement = _after_warm_up(trace, WarmUp(selection.warm_up)) if leaves_out_warm_up else (None, "")
    of_devices = selection.of_ranks_and_devices
    before = trace
    if of_devices:
        keep = _on_devices(trace, of_devices)
        trace = _filtered(trace, _some(trace, keep, selection), of_devices)
        trace = _drop_other_ranks_and_devices(trace, of_devices)
        after = None if after is None else after[keep]
    if selection.of_ranks_and_devices_only:
        if before.unselected is None:
            return dataclasses.replace(trace, selection=selection, part_of=_origin(trace))
        # A rank or device of a part is the same part of that rank or device.
        ranks, devices = selection.ranks, selection.devices
        return dataclasses.replace(
            trace,
            selection=dataclasses.replace(before.selection, ranks=ranks, devices=devices),
            unselected=select(before.unselected, of_devices),
        )
    keep = np.ones(trace.gpu.height, np.bool_)
    if selection.steps is not None:
        keep &= _in_steps(trace, selection.steps)
    if selection.window_ns is not None:
        keep &= _in_window(trace, selection.window_ns, begin)
    if selection.program is not None:
        keep &= _of_program(trace, selection.program)
    if selection.only is not None:
        keep &= _matching(trace, selection.only)
    part = trace
    if after is not None:
        part = _with_note(trace, keep & ~after, f"--warm-up {selection.warm_up}", statement)
        keep &= after
    part = _filtered(part, _some(part, keep, selection), selection)
    return dataclasses.replace(part, unselected=trace)


def _on_devices(trace: Attributed, selection: Selection) -> Mask:
    """Mask of the activities of the selected ranks and devices.

    Raises:
        UsageError: the trace holds no such rank or device.
    """
    keep = np.ones(trace.gpu.height, np.bool_)
    for column, wanted in (("rank", selection.ranks), ("device", selection.devices)):
        if wanted:
            _check_present(trace, column, wanted)
            keep &= trace.gpu[column].is_in(wanted).to_numpy()
    return keep


def _some(trace: Attributed, keep: Mask, selection: Selection) -> Mask:
    """The mask, after a check that it leaves something of a trace that holds something."""
    if trace.gpu.height and not keep.any():
        raise MissingData(f"{', '.join(trace.meta.inputs)}: the selection ({selection}) leaves no device activity")
    return keep


def _check_present(trace: Attributed, column: str, wanted: tuple[int, ...]) -> None:
    tables = (trace.gpu, trace.memory_totals, *((trace.host,) if column == "rank" else ()))
    present = sorted({value for table in tables for value in table[column].drop_nulls().unique()})
    absent = sorted(set(wanted) - set(present))
    if absent:
        raise UsageError(
            f"no {column} {', '.join(map(str, absent))}: the inputs hold {column} "
            f"{', '.join(map(str, present)) or 'none'}"
        )


def _in_steps(trace: Attributed, chosen: StepChoice) -> Mask:
    """Mask of the activities that were launched in the chosen steps.

    Raises:
        MissingData: the trace has no steps.
    """
    windows = selected_windows(steps(trace).frame, chosen)
    device, devices = numbered(trace.gpu, "rank", "device")
    place = devices.with_row_index("place").join(windows, on=["rank", "device"], maintain_order="left")
    count = trace.steps.height
    wanted = place["place"].cast(pl.Int64).to_numpy() * count + place["row"].to_numpy()
    step = row_numbers(trace.places["step_row"])
    mask: Mask = np.isin(device * count + step, wanted) & (step != NO_ROW)
    return mask


def _in_window(trace: Attributed, window: tuple[int | None, int | None], begin: int) -> Mask:
    """Mask of the activities that started in the window, whose times count from ``begin``, ns."""
    start = trace.gpu["start"].to_numpy()
    first, last = window
    inside = np.ones(len(start), np.bool_)
    if first is not None:
        inside &= start >= begin + first
    if last is not None:
        inside &= start < begin + last
    return inside


def _of_program(trace: Attributed, name: str) -> Mask:
    """Mask of the activities of XLA programs of that name, or of the main ones.

    Raises:
        MissingData: the trace holds no XLA programs.
        UsageError: none has that name.
    """
    if trace.programs.is_empty():
        raise MissingData(f"{trace.meta.named}: holds no XLA programs, so --program selects nothing")
    present = trace.places["program"].cast(pl.String)
    names = present.drop_nulls().unique().sort().to_list()
    if name not in names and name != MAIN:
        like = get_close_matches(name, names, 3, 0.5) or names[:3]
        raise UsageError(
            f"no XLA program is named {name!r}; --program main finds the main one, and thence programs lists all, "
            f"such as {', '.join(like)}"
        )
    wanted = [name] if name in names else main_programs(trace)
    return present.is_in(wanted).fill_null(value=False).to_numpy()


def main_programs(trace: Attributed) -> list[str]:
    """The names of the main XLA programs: the fewest with `MAIN_PROGRAMS_SHARE` of the time in the typical steps.

    Without steps, those with that share of the whole trace.
    """
    frame = pl.DataFrame({"name": trace.places["program"].cast(pl.String), "ns": trace.gpu["duration"]})
    with contextlib.suppress(MissingData):  # without steps, the whole trace counts
        frame = frame.filter(pl.Series(_in_steps(trace, TYPICAL)))
    spent = frame.drop_nulls().group_by("name").agg(pl.col("ns").sum())
    ordered = spent.sort("ns", "name", descending=[True, False])
    before = ordered["ns"].cum_sum() - ordered["ns"]
    return ordered.filter(before < MAIN_PROGRAMS_SHARE * int(ordered["ns"].sum()))["name"].to_list()


def _matching(trace: Attributed, expression: str) -> Mask:
    """Mask of the activities with a name or a place that matches; each distinct text is searched once."""
    columns = [trace.gpu["name"], *(trace.places[kind] for kind in SEARCHED)]
    mask = np.zeros(trace.gpu.height, np.bool_)
    for column in columns:
        texts = column.cast(pl.String)
        distinct = texts.drop_nulls().unique()
        try:
            matching = distinct.filter(distinct.str.contains(expression))
        except pl.exceptions.ComputeError as error:
            raise UsageError(f"{expression!r} is not a valid regular expression: {error}") from error
        mask |= texts.is_in(matching.implode()).fill_null(value=False).to_numpy()
    return mask


def _after_warm_up(trace: Attributed, rule: WarmUp) -> tuple[Mask, str]:
    """Mask of the activities that belong neither to a warm-up execution of a program nor to XLA's autotuner.

    Returns:
        The mask, and a sentence on what it leaves out; empty if there are no programs.
    """
    if trace.programs.is_empty():
        return np.ones(trace.gpu.height, np.bool_), ""
    phase = phases(trace, rule)
    of_program = phase.counted.gather(trace.gpu["program"].cast(pl.UInt32)).fill_null(value=True)
    trying = trace.places["program_rule"] == "autotuning"
    return (of_program & ~trying).to_numpy(), phase.counted_statement


def _with_note(trace: Attributed, left_out: Mask, option: str, statement: str) -> Attributed:
    """The trace with a note on the activities that an option leaves out."""
    if not statement:
        return trace
    dropped = trace.gpu["duration"].filter(pl.Series(left_out))
    note = (
        f"{option} left out {format_count(len(dropped))} device activities, {format_ns(int(dropped.sum()))}, "
        f"including those of XLA's autotuner outside of programs; {statement}"
    )
    meta = dataclasses.replace(trace.meta, notes=(*trace.meta.notes, note))
    return dataclasses.replace(trace, meta=meta)


def _origin(trace: Attributed) -> tuple[Attributed, pl.Series]:
    """The whole trace, and the row in its ``gpu`` of each activity."""
    return trace.part_of or (trace, pl.int_range(trace.gpu.height, dtype=pl.UInt32, eager=True))


def _filtered(trace: Attributed, keep: Mask, selection: Selection) -> Attributed:
    """The activities in the mask with every row that refers to them, row references renumbered."""
    mask = pl.Series(keep)
    place = pl.Series(np.cumsum(keep) - 1, dtype=pl.Int32)
    whole, rows = _origin(trace)

    def of_gpu(frame: pl.DataFrame) -> pl.DataFrame:
        rows = frame.filter(mask.gather(frame["gpu"]))
        return rows.with_columns(place.gather(rows["gpu"]).alias("gpu"))

    return dataclasses.replace(
        trace,
        gpu=trace.gpu.filter(mask),
        places=trace.places.filter(mask),
        collectives=of_gpu(trace.collectives),
        collective_parts=of_gpu(trace.collective_parts),
        graph_places=of_gpu(trace.graph_places),
        shares=None if trace.shares is None else of_gpu(trace.shares),
        part_of=(whole, rows.filter(mask)),
        selection=selection,
    )


def _drop_other_ranks_and_devices(trace: Attributed, selection: Selection) -> Attributed:
    """Drops host ranges, threads, programs and steps of other ranks and devices; renumbers row references."""
    ranks = selection.ranks or tuple(trace.ranks)
    programs = trace.programs["rank"].is_in(ranks)
    in_steps = trace.steps["rank"].is_in(ranks)
    if selection.devices:
        programs &= trace.programs["device"].is_in(selection.devices)
        in_steps &= trace.steps["device"].is_in(selection.devices).fill_null(value=True)
    trace = _with_memory_and_counters_of(_with_hosts(trace, trace.host["rank"].is_in(ranks)), ranks, selection.devices)
    return dataclasses.replace(
        trace,
        threads=trace.threads.filter(pl.col("rank").is_in(ranks)),
        programs=trace.programs.filter(programs),
        gpu=_moved(trace.gpu, _numbers(programs), "program"),
        places=_moved(trace.places, _numbers(in_steps), "step_row"),
        steps=trace.steps.filter(in_steps),
        step_times=trace.step_times.filter(pl.col("rank").is_in(ranks)),
    )


def _with_memory_and_counters_of(trace: Attributed, ranks: Sequence[int], devices: Sequence[int]) -> Attributed:
    """Drops memory, counters and stalls of other ranks and devices; those of the host stay."""

    def kept(frame: pl.DataFrame) -> pl.Series:
        of_rank = frame["rank"].is_in(ranks)
        return of_rank & (frame["device"].is_null() | frame["device"].is_in(devices)) if devices else of_rank

    numbers = _numbers(kept(trace.memory_totals))

    def of_table(frame: pl.DataFrame, *references: str) -> pl.DataFrame:
        return _moved(frame.filter(kept(frame)), numbers, *references)

    return dataclasses.replace(
        trace,
        memory=of_table(trace.memory, "opened", "closed"),
        memory_totals=of_table(trace.memory_totals),
        memory_failures=of_table(trace.memory_failures, "after"),
        counters=of_table(trace.counters),
        stalls=of_table(trace.stalls),
    )


def in_time(trace: Attributed, begin: int, end: int) -> Attributed:
    """The activities that began in a time, with the host ranges that overlap it, and those around their launches.

    For answers about a part of a long trace that need not look at all of its host ranges.

    Args:
        begin: ns on the trace's clock.
        end: the first ns after.
    """
    start = trace.gpu["start"].to_numpy()
    part = _filtered(trace, (start >= begin) & (start < end), trace.selection)
    host_start = trace.host["start"].to_numpy()
    overlapping = (host_start < end) & (host_start + trace.host["duration"].to_numpy() > begin)
    launch = part.places["launch"].drop_nulls().cast(pl.Int64).to_numpy()
    rows = np.concatenate([np.flatnonzero(overlapping), launch])
    parent = row_numbers(trace.host["parent"])
    return _with_hosts(part, pl.Series(ancestors(parent, rows)))


def _with_hosts(trace: Attributed, kept: pl.Series) -> Attributed:
    """Drops host ranges that are not in the mask, with the rows about them; references to them become null."""
    host = _numbers(kept)
    of_events = kept.gather(trace.events["host"])
    event = _numbers(of_events)

    def calls(frame: pl.DataFrame, mask: pl.Series) -> pl.DataFrame:
        return _moved(_moved(frame.filter(mask), host, "host"), event, "record")

    return dataclasses.replace(
        trace,
        events=calls(trace.events, of_events),
        waits=calls(trace.waits, kept.gather(trace.waits["host"])),
        host=_moved(trace.host.filter(kept), host, "parent", "forward"),
        places=_moved(trace.places, host, "launch"),
        collectives=_moved(trace.collectives, host, "host"),
        collective_parts=_moved(trace.collective_parts, host, "host"),
        host_collectives=_moved(
            trace.host_collectives.filter(kept.gather(trace.host_collectives["host"])), host, "host"
        ),
    )


def _numbers(kept: pl.Series) -> pl.Series:
    """The number of each row among those in a mask; null for other rows."""
    numbers = pl.Series(np.cumsum(kept.to_numpy()) - 1, dtype=pl.Int32)
    return numbers.set(~kept, None)


def _moved(frame: pl.DataFrame, numbers: pl.Series, *columns: str) -> pl.DataFrame:
    """A table with new numbers in columns of row references."""
    return frame.with_columns(numbers.gather(frame[column].cast(pl.UInt32)).alias(column) for column in columns)
