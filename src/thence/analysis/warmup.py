"""Classifies executions of XLA programs as warm-up or steady state.

The first executions of a program are slow for reasons of their own (library loading, other ranks
still compiling). The rules are those of nsys-jax; every result that uses one says so.

Executions are counted here by XLA module (name and number), not by fingerprint as nsys-jax does
since 2025: two modules with one fingerprint each have a first execution of their own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

__all__ = ["Phases", "WarmUp", "compiled_modules", "module_keys", "phases"]

_PHASES = ("init", "steady", "incomplete", "autotuning")
"""Phases of executions. incomplete: recording seems to have ended while it ran. autotuning: run
by XLA's autotuner to time a kernel (a program without an identity)."""

_COMPILE_NAME = r"^XlaCompile(?:Backend)?:#(?:.*,)?module=([^#,]+),program_id=(\d+)#"


class WarmUp(enum.Enum):
    """Which executions count as warm-up."""

    KEEP = "keep"
    """None."""
    FIRST_COMPILED = "first-compiled"
    """Execution 0 of modules whose compilation was recorded: nsys-jax in 2024
    (``warmup_removal_heuristics``)."""
    HEURISTIC = "heuristic"
    """Executions below a threshold, 1 if the module's compilation was recorded, plus 1 if the trace
    has collectives: later nsys-jax (``apply_warmup_heuristics``). If that leaves nothing, all is
    steady state."""


@dataclass(frozen=True)
class Phases:
    """The phase of every program execution.

    Attributes:
        rule: the rule that was applied.
        phase: one of `_PHASES` for every row of ``Tables.programs``.
        statement: what was done, one sentence for people.
    """

    rule: WarmUp
    phase: pl.Series
    statement: str

    @property
    def steady(self) -> pl.Series:
        """Whether a row of ``Tables.programs`` is steady state."""
        return self.phase == "steady"


def phases(trace: Attributed, rule: WarmUp = WarmUp.HEURISTIC) -> Phases:
    """The phase of every program execution.

    The last execution of a module on a device is incomplete if it ran fewer thunks than the mean
    less the standard deviation of those before (nsys-jax tests the same on GPU operations).

    Args:
        trace: programs, gpu, collectives, hlo and compile ranges of host are used.
        rule: what counts as warm-up.
    """
    module = ("rank", "device", "key")
    rows = (
        trace.programs.select("rank", "device", "program", "start")
        .with_columns(key=module_keys(trace), thunks=_thunk_counts(trace))
        .with_row_index("row")
        .sort("start", maintain_order=True)
        .with_columns(number=pl.int_range(pl.len()).over(module))
        .with_columns(
            threshold=_threshold(trace, rule), last=_is_last(module), few=_has_few(module)
        )
    )
    warm = pl.col("number") < pl.col("threshold")
    phase = (
        pl.when(pl.col("program").is_null())
        .then(pl.lit("autotuning"))
        .when(pl.col("last") & pl.col("few"))
        .then(pl.lit("incomplete"))
        .when(warm)
        .then(pl.lit("init"))
        .otherwise(pl.lit("steady"))
    )
    phase_of_row = rows.select("row", phase=phase).sort("row")["phase"]
    nothing_left = rule is WarmUp.HEURISTIC and "steady" not in phase_of_row
    if nothing_left:
        phase_of_row = phase_of_row.replace("init", "steady")
    return Phases(
        rule,
        phase_of_row.cast(pl.Enum(_PHASES)),
        _statement(rule, phase_of_row, nothing_left=nothing_left),
    )


def module_keys(trace: Attributed) -> pl.Series:
    """A key for the XLA module of every row of ``Tables.programs``: ``name.number``.

    Where the HLO is missing, it is the program's identity or else its name.
    """
    module_names = pl.DataFrame(
        {
            "hlo": range(len(trace.hlo)),
            "known": [f"{module.name}.{module.id}" for module in trace.hlo],
        },
        schema={"hlo": pl.Int32, "known": pl.String},
    )
    rows = trace.programs.select("hlo", pl.col("program", "name").cast(pl.String)).join(
        module_names, on="hlo", how="left", maintain_order="left"
    )
    return rows.select(key=pl.coalesce("known", "program", "name"))["key"]


def compiled_modules(trace: Attributed) -> pl.DataFrame:
    """Modules whose compilation was recorded: columns rank and key, as in `module_keys`."""
    names = trace.host.filter(pl.col("category") == "compile").select(
        "rank", pl.col("name").cast(pl.String)
    )
    return (
        names.with_columns(pl.col("name").str.extract_groups(_COMPILE_NAME).alias("found"))
        .select("rank", key=pl.concat_str(pl.col("found").struct.unnest(), separator="."))
        .filter(pl.col("key").is_not_null())
        .unique()
    )


def _thunk_counts(trace: Attributed) -> pl.Series:
    counts = trace.gpu.group_by("program").len().with_columns(pl.col("program").cast(pl.Int64))
    rows = pl.DataFrame({"program": pl.int_range(trace.programs.height, eager=True)})
    counted = rows.join(counts, on="program", how="left", maintain_order="left")["len"]
    return counted.fill_null(0).cast(pl.Int64)


def _threshold(trace: Attributed, rule: WarmUp) -> pl.Expr:
    """How many executions of a row's module count as warm-up."""
    if rule is WarmUp.KEEP:
        return pl.lit(0)
    compiled = compiled_modules(trace).select(pl.struct("rank", "key")).to_series()
    seen = pl.struct("rank", "key").is_in(compiled.implode()).cast(pl.Int64)
    if rule is WarmUp.FIRST_COMPILED:
        return seen
    return seen + int(trace.collectives.height > 0)


def _is_last(module: tuple[str, ...]) -> pl.Expr:
    return pl.col("number") == pl.len().over(module) - 1


def _has_few(module: tuple[str, ...]) -> pl.Expr:
    """Fewer thunks than the mean less the standard deviation of all executions but the last."""
    others = pl.col("thunks").head(pl.len() - 1)
    few = pl.col("thunks") < (others.mean() - others.std(ddof=0)).over(module)
    return few.fill_null(value=False)


def _statement(rule: WarmUp, phase: pl.Series, *, nothing_left: bool) -> str:
    counts = {name: int((phase == name).sum()) for name in _PHASES}
    if phase.is_empty():
        return "no XLA programs here, so nothing is left out as warm-up"
    if rule is WarmUp.KEEP:
        text = "warm-up executions are included"
    elif nothing_left:
        text = "every execution would have been warm-up, so all are included"
    else:
        which = {
            WarmUp.FIRST_COMPILED: "the first execution of each program compiled while recording",
            WarmUp.HEURISTIC: "the first executions of each program (one if it was compiled while "
            "recording, one if there are collectives)",
        }[rule]
        text = f"warm-up left out: {which}, {counts['init']:,} in all"
    more = [f"{counts[p]:,} {p}" for p in ("incomplete", "autotuning") if counts[p]]
    return f"{text}; also left out: {' and '.join(more)} executions" if more else text
