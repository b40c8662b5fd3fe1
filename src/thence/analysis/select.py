"""Filters a trace; the result is a complete trace, so every analysis of it covers the selection only."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.programs.warmup import WarmUp, phases, set_apart
from thence.errors import MissingData, UsageError
from thence.model.places import SEARCHED
from thence.model.selection import APART
from thence.units import format_count, format_ns

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.attributed import Attributed
    from thence.model.selection import Selection

    Mask = npt.NDArray[np.bool_]

__all__ = ["select"]

_STEP_NUMBER = r"(\d{1,18})\D*$"


def select(trace: Attributed, selection: Selection) -> Attributed:
    """The selected device activities, with the rows of other tables that refer to them.

    Durations, times and places do not change. Host ranges are dropped only together with their rank, and program
    executions only together with their rank or device: a launch may lie outside of the window in which its kernel ran.

    Args:
        trace: attributed.
        selection: which activities to keep.

    Raises:
        UsageError: the trace holds no such rank or device.
        MissingData: no activity is left.
    """
    if selection.warm_up == APART and not trace.programs.is_empty():
        # Before anything is dropped: only the whole trace shows whether an execution is complete.
        places = trace.places.with_columns(set_apart(trace))
        trace = dataclasses.replace(trace, places=places)
    if not selection:
        return trace
    gpu = trace.gpu
    keep = np.ones(gpu.height, np.bool_)
    for column, wanted in (("rank", selection.ranks), ("device", selection.devices)):
        if wanted:
            _check_present(trace, column, wanted)
            keep &= gpu[column].is_in(wanted).to_numpy()
    if selection.steps is not None:
        keep &= _in_steps(trace, selection.steps)
    if selection.window_ns is not None:
        keep &= _in_window(trace, selection.window_ns)
    if selection.only is not None:
        keep &= _matching(trace, selection.only)
    if selection.warm_up not in (APART, "keep"):
        trace, after = _after_warm_up(trace, WarmUp(selection.warm_up), keep)
        keep &= after
    if gpu.height and not keep.any():
        raise MissingData(
            f"{', '.join(trace.meta.inputs)}: the selection ({selection}) leaves no device activity"
        )
    return _filtered(trace, keep, selection)


def _check_present(trace: Attributed, column: str, wanted: tuple[int, ...]) -> None:
    present = sorted(
        {*trace.gpu[column].unique(), *(trace.host[column].unique() if column == "rank" else ())}
    )
    absent = sorted(set(wanted) - set(present))
    if absent:
        raise UsageError(
            f"no {column} {', '.join(map(str, absent))}: the inputs hold {column} "
            f"{', '.join(map(str, present)) or 'none'}"
        )


def _in_steps(trace: Attributed, steps: tuple[int | None, int | None]) -> Mask:
    """Mask of the activities that were launched in a step whose number is in the range."""
    names = trace.places["step"].cast(pl.String)
    if names.null_count() == len(names):
        raise MissingData(f"{', '.join(trace.meta.inputs)}: holds no steps to select")
    number = names.str.extract(_STEP_NUMBER).cast(pl.Int64)
    first, last = steps
    inside = number.is_not_null()
    if first is not None:
        inside &= (number >= first).fill_null(value=False)
    if last is not None:
        inside &= (number < last).fill_null(value=False)
    return inside.to_numpy()


def _in_window(trace: Attributed, window: tuple[int | None, int | None]) -> Mask:
    """Mask of the activities that started in the window, whose times count from the trace's first activity."""
    start = trace.gpu["start"].to_numpy()
    begin = int(start.min()) if len(start) else 0
    first, last = window
    inside = np.ones(len(start), np.bool_)
    if first is not None:
        inside &= start >= begin + first
    if last is not None:
        inside &= start < begin + last
    return inside


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
            raise UsageError(
                f"{expression!r} is not a valid regular expression: {error}"
            ) from error
        mask |= texts.is_in(matching.implode()).fill_null(value=False).to_numpy()
    return mask


def _after_warm_up(trace: Attributed, rule: WarmUp, keep: Mask) -> tuple[Attributed, Mask]:
    """Finds the activities that belong neither to a warm-up execution of a program nor to XLA's autotuner.

    Returns:
        The trace with a note on the activities in ``keep`` that are left out, and the mask of the others.
    """
    if trace.programs.is_empty():
        return trace, np.ones(trace.gpu.height, np.bool_)
    phase = phases(trace, rule)
    of_program = phase.counted.gather(trace.gpu["program"].cast(pl.UInt32)).fill_null(value=True)
    trying = trace.places["program_rule"] == "autotuning"
    after = (of_program & ~trying).to_numpy()
    dropped = trace.gpu["duration"].filter(pl.Series(keep & ~after))
    note = (
        f"--warm-up {rule.value} left out {format_count(len(dropped))} device activities, "
        f"{format_ns(int(dropped.sum()))}, including those of XLA's autotuner outside of programs; the time "
        f"in which they ran counts as idle; {phase.counted_statement}"
    )
    meta = dataclasses.replace(trace.meta, notes=(*trace.meta.notes, note))
    return dataclasses.replace(trace, meta=meta), after


def _filtered(trace: Attributed, keep: Mask, selection: Selection) -> Attributed:
    """The activities in the mask with every row that refers to them, row references renumbered."""
    mask = pl.Series(keep)
    place = pl.Series(np.cumsum(keep) - 1, dtype=pl.Int32)

    def of_gpu(frame: pl.DataFrame) -> pl.DataFrame:
        rows = frame.filter(mask.gather(frame["gpu"]))
        return rows.with_columns(place.gather(rows["gpu"]).alias("gpu"))

    selected = dataclasses.replace(
        trace,
        gpu=trace.gpu.filter(mask),
        places=trace.places.filter(mask),
        collectives=of_gpu(trace.collectives),
        collective_parts=of_gpu(trace.collective_parts),
        graph_places=of_gpu(trace.graph_places),
        shares=None if trace.shares is None else of_gpu(trace.shares),
        selection=selection,
    )
    if selection.ranks or selection.devices:
        return _drop_other_ranks_and_devices(selected, selection)
    return selected


def _drop_other_ranks_and_devices(trace: Attributed, selection: Selection) -> Attributed:
    """Drops host ranges, threads and programs of other ranks and devices; renumbers row references."""
    ranks = selection.ranks or tuple(trace.ranks)
    host = trace.host["rank"].is_in(ranks)
    programs = trace.programs["rank"].is_in(ranks)
    if selection.devices:
        programs &= trace.programs["device"].is_in(selection.devices)
    host_at, program_at = (
        pl.Series(np.cumsum(mask.to_numpy()) - 1, dtype=pl.Int32) for mask in (host, programs)
    )

    def moved(frame: pl.DataFrame, at: pl.Series, *columns: str) -> pl.DataFrame:
        # A rank's rows refer to rows of the same rank, which are kept.
        return frame.with_columns(
            at.gather(frame[column].cast(pl.UInt32)).alias(column) for column in columns
        )

    events = trace.events["rank"].is_in(ranks)
    event_at = pl.Series(np.cumsum(events.to_numpy()) - 1, dtype=pl.Int32)

    def calls(frame: pl.DataFrame) -> pl.DataFrame:
        of_ranks = frame.filter(pl.col("rank").is_in(ranks))
        return moved(moved(of_ranks, host_at, "host"), event_at, "record")

    return dataclasses.replace(
        trace,
        events=calls(trace.events),
        waits=calls(trace.waits),
        host=moved(trace.host.filter(host), host_at, "parent", "forward"),
        threads=trace.threads.filter(pl.col("rank").is_in(ranks)),
        programs=trace.programs.filter(programs),
        gpu=moved(trace.gpu, program_at, "program"),
        places=moved(trace.places, host_at, "launch"),
        collectives=moved(trace.collectives, host_at, "host"),
        collective_parts=moved(trace.collective_parts, host_at, "host"),
        host_collectives=moved(
            trace.host_collectives.filter(host.gather(trace.host_collectives["host"])),
            host_at,
            "host",
        ),
    )
