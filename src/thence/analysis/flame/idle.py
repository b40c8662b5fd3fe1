"""The frames of idle time in a flame graph: causes and places, in the words of ``thence idle``.

If XLA programs ran, the outermost frames show inside or before which program the device was idle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from thence.analysis.flame.tree import PHASE_SUMS, Groups
from thence.analysis.idle.answer import in_words
from thence.analysis.idle.gaps import program_gaps
from thence.analysis.programs.warmup import WarmUp, phases
from thence.model.selection import SEPARATE

if TYPE_CHECKING:
    from thence.analysis.flame.tree import Entry
    from thence.analysis.idle.answer import IdleTime
    from thence.model.attributed import Attributed

IDLE = "GPU idle"
"""Name of the frame of all idle time."""

_OF_GAPS = ["where", "program", "early"]
_KEYS = [*_OF_GAPS, "cause", "name"]


def idle_sums(trace: Attributed, explained: IdleTime | None) -> pl.DataFrame:
    """Idle time by the columns that name its frames.

    Args:
        trace: attributed.
        explained: idle time of the trace by place; None to show it without causes.

    Returns:
        columns where and program, as in `thence.analysis.idle.gaps.program_gaps`; early: whether the time is before the
        first execution of a program, or inside an execution that does not count; cause and name, as ``thence idle``
        shows them, null if there is none; total_ns and count (pieces).
    """
    gaps = _gaps(trace)
    if explained is None:
        nothing = pl.lit(None, pl.String)
        return _summed(gaps.with_columns(cause=nothing, name=nothing), _KEYS)
    pieces = explained.unnamed.select("rank", "device", "start", "duration", "cause").with_columns(
        number=pl.Series(explained.names.number)
    )
    sums = _summed(_with_gaps(pieces, gaps), [*_OF_GAPS, "cause", "number"])
    named = sums.drop("number").hstack(explained.names.columns_of(sums["number"].to_numpy()))
    return _summed(in_words(named), _KEYS, "total_ns", pl.col("count").sum())


def idle_frames(sums: pl.DataFrame) -> Groups:
    """The frames of idle time.

    Args:
        sums: as `idle_sums` returns it.
    """
    frames = [_path(row) for row in sums.select(_KEYS).iter_rows(named=True)]
    zero = pl.lit(0, pl.Int64)
    times = sums.select(pl.col("total_ns").alias("self_ns"), "count")
    return Groups.of_paths(frames, times.with_columns(**dict.fromkeys(PHASE_SUMS, zero)))


def _path(of: dict[str, Any]) -> list[Entry]:
    """The frames of a row of `idle_sums`, outermost first."""
    around = ["inside and before first executions"] if of["early"] else []
    program = of["program"]
    if of["where"] == "inside":
        around += ["inside programs", f"inside {program}"]
    elif of["where"] is not None:
        after = "after the last program"
        around += ["between programs", after if program is None else f"before {program}"]
    why = [word for word in (of["cause"], of["name"]) if word is not None]
    return [(frame, "idle", None) for frame in (IDLE, *around, *why)]


def _gaps(trace: Attributed) -> pl.DataFrame:
    """Idle gaps, and whether each is ``early``: before a first execution, or inside one that does not count."""
    gaps = program_gaps(trace)
    chosen = trace.selection.warm_up
    if trace.programs.is_empty() or chosen == WarmUp.KEEP.value:
        return gaps.with_columns(early=pl.lit(value=False))
    rule = WarmUp.HEURISTIC if chosen == SEPARATE else WarmUp(chosen)
    phase = phases(trace, rule)
    marked = pl.DataFrame({"first": phase.first, "warm": phase.first & ~phase.counted})
    marked = marked.select(pl.all().gather(gaps["execution"])).fill_null(value=False)
    separate = trace.gpu["program"].filter(trace.places["separate"].is_not_null()).drop_nulls().unique()
    of_separate = pl.col("execution").is_in(separate.cast(pl.UInt32).implode()).fill_null(value=False)
    inside = pl.col("where") == "inside"
    early = of_separate | pl.when(inside).then("warm").otherwise("first")
    return gaps.hstack(marked).with_columns(early=early).drop("first", "warm")


def _with_gaps(pieces: pl.DataFrame, gaps: pl.DataFrame) -> pl.DataFrame:
    """The pieces with the columns `_OF_GAPS` of the gap that contains each."""
    if gaps["where"].null_count() == gaps.height:  # no XLA programs: equal columns for all gaps
        same = gaps.schema
        return pieces.with_columns(
            pl.lit(None, same["where"]).alias("where"),
            pl.lit(None, same["program"]).alias("program"),
            early=pl.lit(value=False),
        )
    return pieces.sort("start").join_asof(
        gaps.select("rank", "device", "start", *_OF_GAPS).sort("start"),
        on="start",
        by=["rank", "device"],
        check_sortedness=False,  # Polars cannot check it within groups
    )


def _summed(rows: pl.DataFrame, keys: list[str], time: str = "duration", count: pl.Expr | None = None) -> pl.DataFrame:
    """Merges rows with equal keys into one row, with total_ns and count."""
    counted = pl.len() if count is None else count
    return rows.group_by(keys, maintain_order=True).agg(total_ns=pl.col(time).sum(), count=counted.cast(pl.Int64))
