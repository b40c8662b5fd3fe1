"""How much the durations of the same computation vary, to find noise and uneven ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.grouping.kernel_groups import communicates, computes
from thence.analysis.programs.warmup import Phases, WarmUp, phases

if TYPE_CHECKING:
    from thence.model.attributed import Attributed


def duration_spread(trace: Attributed, warm_up: WarmUp | Phases = WarmUp.HEURISTIC) -> pl.DataFrame:
    """How much the durations of the same computation vary, to find noise and uneven ranks.

    Returns:
        By program (name; null outside programs) and operation (HLO instruction, else kernel name):
        program, operation, count, mean_ns, std_ns (population), spread (std / mean; null if the mean is 0);
        ascending by mean. Communication, and executions of programs that are not steady (`Phases.steady`), are
        left out.
    """
    phase = phases(trace, warm_up) if isinstance(warm_up, WarmUp) else warm_up
    programs = pl.DataFrame(
        {
            "program": pl.int_range(trace.programs.height, dtype=pl.Int32, eager=True),
            "program_name": trace.programs["name"].cast(pl.String),
            "steady": phase.steady,
        }
    )
    operation = pl.coalesce(pl.col("hlo").cast(pl.String), pl.col("name").cast(pl.String))
    return (
        trace.gpu.filter(computes(trace, communicates(trace)))
        .select("program", "duration", operation=operation)
        .join(programs, on="program", how="left")
        .filter(pl.col("steady").fill_null(value=True))
        .group_by(pl.col("program_name").alias("program"), "operation")
        .agg(count=pl.len(), mean_ns=pl.col("duration").sum() / pl.len(), std_ns=pl.col("duration").std(ddof=0))
        .with_columns(spread=pl.col("std_ns") / pl.when(pl.col("mean_ns") > 0).then("mean_ns"))
        .sort("mean_ns", "operation", "program")
    )
