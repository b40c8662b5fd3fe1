"""Checks the HLO instructions assigned to the nodes of a command buffer against its launches.

In one launch, either all commands of a sequence run or none, whether the sequence is the graph's own or that of a
branch. A branch runs only if its conditional does, and never together with another branch of that conditional. No
activity starts before one whose result it reads. Nodes for which the launches contradict these rules get no
instruction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.model.thresholds import CONTRADICTING_LAUNCHES_SHARE

if TYPE_CHECKING:
    from thence.attribution.xla.schedules import Schedule

LEVELS = {"graph": pl.UInt64, "level": pl.Int64, "parent": pl.Int64, "conditional": pl.Int64, "loops": pl.Boolean}
"""One row for each level of each graph, as `thence.attribution.xla.node_numbers.Level` describes it."""

_LAUNCH = ["program", "graph", "correlation"]
_LEVEL = ["graph", "level"]


def contradicted(rows: pl.DataFrame, levels: pl.DataFrame, schedule: Schedule) -> pl.DataFrame:
    """The commands of graphs that their launches contradict.

    Args:
        rows: activities that have a command: program, graph, correlation (of the launch), number, start,
            command, level and counted.
        levels: columns of `LEVELS`.
        schedule: of the program.

    Returns:
        columns graph, command, level and reason, a code; each of graph, command and level occurs once.
    """
    rows = rows.with_columns(pl.col("correlation").fill_null(-1))
    nodes = rows.select(*_LEVEL, "command", "counted").unique()
    branches = _wrong_levels(rows, levels).join(nodes, on=_LEVEL)
    early = _too_early(rows, schedule)
    uncounted = early.join(nodes.filter(~pl.col("counted")), on=["graph", "command"], how="semi")
    of_libraries = nodes.filter(~pl.col("counted")).join(uncounted, on="graph", how="semi")
    late = pl.concat([early.join(nodes, on=["graph", "command"]).select(of_libraries.columns), of_libraries])
    reasons = [
        part.select(*_LEVEL, "command", reason=pl.lit(reason))
        for part, reason in ((branches, "command_buffer_branch"), (late, "command_buffer_too_early"))
    ]
    return pl.concat(reasons).unique([*_LEVEL, "command"], keep="first", maintain_order=True)


def _wrong_levels(rows: pl.DataFrame, levels: pl.DataFrame) -> pl.DataFrame:
    """Columns graph and level: the levels for which too many launches contradict the rules for branches."""
    seen = rows.group_by(_LEVEL).agg(nodes=pl.col("number").n_unique())
    ran = rows.group_by(*_LAUNCH, "level").agg(ran=pl.col("number").n_unique(), activities=pl.len())
    facts = ran.join(seen, on=_LEVEL).join(levels.unique(_LEVEL), on=_LEVEL, how="left")
    around = ran.select(*_LAUNCH, pl.col("level").alias("parent"), again=pl.col("activities") > pl.col("ran"))
    facts = facts.join(around, on=[*_LAUNCH, "parent"], how="left")
    siblings = pl.len().over(*_LAUNCH, "parent", "conditional")
    inside = pl.col("parent") >= 0
    wrong = (
        (pl.col("ran") < pl.col("nodes"))
        | (inside & pl.col("again").is_null())
        # In a loop inside the graph a conditional can take another branch in each round.
        | (inside & ~pl.col("again").fill_null(value=True) & (siblings > 1) & ~pl.col("loops"))
    )
    return (
        facts.with_columns(wrong=wrong.fill_null(value=False))
        .group_by(_LEVEL)
        .agg(pl.col("wrong").sum(), launches=pl.len())
        .filter(pl.col("wrong") > pl.max_horizontal(1, pl.col("launches") * CONTRADICTING_LAUNCHES_SHARE))
        .select(_LEVEL)
    )


def _too_early(rows: pl.DataFrame, schedule: Schedule) -> pl.DataFrame:
    """Columns graph and command: both commands of each pair of which one started before the other, which it reads."""
    starts = rows.group_by(*_LAUNCH, "command").agg(pl.col("start").min())
    written = starts.rename({"command": "input", "start": "written"})
    early = (
        starts.join(schedule.inputs, on="command")
        .join(written, on=[*_LAUNCH, "input"])
        .filter(pl.col("start") < pl.col("written"))
    )
    ends = [early.select("graph", command=end) for end in ("command", "input")]
    return pl.concat(ends).unique()
