"""GPU idle time: the gaps between a device's first and last activity, or in what is selected, in which nothing ran.

Idle time is assigned to XLA programs as in `thence.analysis.programs.programs`: ``inside`` the execution that
it interrupts, or ``before`` the execution that it delays. The two modules agree to the nanosecond if
programs do not overlap and XLA's autotuner ran nothing. Here, trials of the autotuner are not programs, so the idle
time around them is ``before`` the next program. Time in which an activity outside of any program ran is not idle in
either module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.extent import cut, extent, in_parts
from thence.model.intervals import NO_ROW, gaps, last_begun, longest_begun

if TYPE_CHECKING:
    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed
    from thence.units import Ns


_SCHEMA = {
    "rank": pl.Int32,
    "device": pl.Int32,
    "start": pl.Int64,
    "duration": pl.Int64,
    "where": pl.String,
    "program": pl.String,
    "execution": pl.UInt32,
}


def idle_gaps(trace: Attributed) -> pl.DataFrame:
    """Lists every idle gap of every device, as far as it is in the windows of `thence.analysis.extent`, if known.

    Returns:
        columns rank, device, start and duration (ns), where (inside, before or after; null if the
        device ran no XLA program), program (its name; null for ``after``, the time after the last
        execution) and execution (its row in ``programs``).
    """
    names = trace.programs["name"].cast(pl.String)
    parts = [pl.DataFrame(schema=_SCHEMA)]
    for (rank, device), activities in trace.around.gpu.group_by("rank", "device", maintain_order=True):
        start = activities["start"].to_numpy()
        begin, end = gaps(start, start + activities["duration"].to_numpy())
        where, row = _programs_at(trace, (rank, device), begin)
        parts.append(
            pl.DataFrame(
                {
                    "rank": pl.Series([rank], dtype=pl.Int32).new_from_index(0, len(begin)),
                    "device": pl.Series([device], dtype=pl.Int32).new_from_index(0, len(begin)),
                    "start": begin,
                    "duration": end - begin,
                    "where": where,
                    "program": names.gather(row),
                    "execution": row,
                },
                schema=_SCHEMA,
            )
        )
    found = pl.concat(parts)
    if not in_parts(trace) or trace.selection.idle_unknown:
        return found
    found = found.sort("rank", "device", "start")
    cut_row, _, begins, ends = cut(found, extent(trace))
    return found[cut_row].with_columns(start=pl.Series(begins), duration=pl.Series(ends - begins))


def idle_inside_programs(trace: Attributed) -> Ns | None:
    """Idle time inside the executions of XLA programs, without executions that tables keep apart.

    None if no program ran, or if the activities were filtered by name (``only``), so that executions are incomplete.
    """
    if trace.programs.is_empty() or trace.selection.only is not None:
        return None
    counted = trace.gpu["program"].filter(trace.places["apart"].is_null()).drop_nulls().unique()
    chosen = pl.col("execution").is_in(counted.cast(pl.UInt32).implode())
    inside = idle_gaps(trace).filter(pl.col("where") == "inside", chosen)
    return int(inside["duration"].sum())


def _programs_at(trace: Attributed, device: tuple[object, ...], time: Int64) -> tuple[pl.Series, pl.Series]:
    """For times at which a device is idle: inside, before or after, and the row of the program execution or null."""
    executions = (
        trace.programs.with_row_index("row")
        .filter(pl.col("rank") == device[0], pl.col("device") == device[1])
        .filter(pl.col("program").is_not_null())  # the autotuner's trials are not programs
        .sort("start", maintain_order=True)
    )
    if executions.is_empty():
        nothing = pl.Series([None], dtype=pl.UInt32).new_from_index(0, len(time))
        return nothing.cast(pl.String), nothing
    row = executions["row"].to_numpy()
    begin = executions["start"].to_numpy()
    end = begin + executions["duration"].to_numpy()
    begun = last_begun(begin, time)
    around = np.where(end[begun] > time, begun, longest_begun(begin, end, time))
    inside = (begun != NO_ROW) & (end[around] > time)
    following = np.minimum(begun + 1, len(begin) - 1)
    before = ~inside & (begun + 1 < len(begin))
    where = pl.Series(["inside", "before", "after"]).gather(np.where(inside, 0, np.where(before, 1, 2)))
    program_row = pl.Series(row[np.where(inside, around, following)], dtype=pl.UInt32)
    return where, program_row.set(pl.Series(~inside & ~before), None)
