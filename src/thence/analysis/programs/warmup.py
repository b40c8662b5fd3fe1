"""Classifies executions of XLA programs as warm-up or steady state.

The first executions of a program are slow for reasons that later ones do not have (library loading,
other ranks still compiling). The rules are those of nsys-jax; every result that uses a rule names it.

Executions are numbered here by XLA module (name and number), not by fingerprint as nsys-jax does
since 2025: of two modules with the same fingerprint, each has its own first execution.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from thence.model.attributed import RULE
from thence.units import format_count, format_ns

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

_PHASES = ("init", "steady", "only", "incomplete", "autotuning")
"""Phases of executions. init: warm-up. only: warm-up by the rule, but the program has no steady execution.
incomplete: recording seems to have ended while it ran. autotuning: run by XLA's autotuner to time a kernel
(a program without an identity)."""

_SEPARATE = {"init": "warm_up", "incomplete": "incomplete", "autotuning": "autotuning"}
"""Maps a phase to the code of `thence.model.reasons` under which tables list it separately."""
_LEFT_OUT = {"init": "warm-up", "incomplete": "incomplete", "autotuning": "autotuning"}
"""Maps each phase that does not count to its name in statements."""
_NAMED = 2  # programs that the statement names for each phase

_COMPILE_NAME = r"^XlaCompile(?:Backend)?:#(?:.*,)?module=([^#,]+),program_id=(\d+)#"


class WarmUp(enum.Enum):
    """Which executions count as warm-up."""

    KEEP = "keep"
    """None."""
    FIRST_COMPILED = "first-compiled"
    """Execution 0 of modules whose compilation was recorded: nsys-jax in 2024
    (``warmup_removal_heuristics``)."""
    HEURISTIC = "heuristic"
    """Executions whose number, from 0, is below a threshold: 1 if the module's compilation was recorded,
    plus 1 if the trace has collectives. This is the rule of later nsys-jax (``apply_warmup_heuristics``). If
    it leaves no execution of any program, all count as steady state."""


@dataclass(frozen=True)
class Phases:
    """The phase of every program execution.

    Attributes:
        rule: the rule that was applied.
        phase: one of `_PHASES` for every row of ``Tables.programs``.
        left_out: executions that `counted` leaves out, by phase and program, the most time first: phase, name (of
            the program), executions (their number) and span_ns_total (sum of their durations).
        statement: which executions `steady` leaves out, as one sentence for people.
        counted_statement: the same for `counted`.
    """

    rule: WarmUp
    phase: pl.Series
    left_out: pl.DataFrame
    statement: str
    counted_statement: str

    @property
    def steady(self) -> pl.Series:
        """Whether a row of ``Tables.programs`` is steady state, so that measurements of speed may use it."""
        return self.phase == "steady"

    @property
    def first(self) -> pl.Series:
        """Whether a row is warm-up by the rule, including the phase "only"."""
        return self.phase.is_in(["init", "only"])

    @property
    def counted(self) -> pl.Series:
        """Whether a row counts: steady state, or warm-up of a program that never reached steady state."""
        return self.phase.is_in(["steady", "only"])


def phases(trace: Attributed, rule: WarmUp = WarmUp.HEURISTIC) -> Phases:
    """The phase of every program execution.

    The last execution of a module on a device is incomplete if it ran fewer thunks than the mean number of
    thunks of the executions before, less their standard deviation (nsys-jax tests the same on GPU operations).

    Args:
        trace: its programs, gpu, collectives, hlo and the compile ranges of host are used.
        rule: which executions count as warm-up.
    """
    module = ("rank", "device", "key")
    rows = (
        trace.programs.select("rank", "device", "program", "start")
        .with_columns(key=module_keys(trace), thunks=_thunk_counts(trace))
        .with_row_index("row")
        .sort("start", maintain_order=True)
        .with_columns(number=pl.int_range(pl.len()).over(module))
        .with_columns(threshold=_threshold(trace, rule), last=_is_last(module), few=_has_few(module))
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
    phased = rows.with_columns(phase=phase)
    nothing_left = rule is WarmUp.HEURISTIC and "steady" not in phased["phase"]
    kept = pl.lit("steady") if nothing_left else pl.lit("only")
    alone = ~(pl.col("phase") == "steady").any().over("key")
    phase_of_row = phased.select(
        "row", phase=pl.when((pl.col("phase") == "init") & alone).then(kept).otherwise("phase")
    ).sort("row")["phase"]
    left_out = _left_out(trace, phase_of_row)
    return Phases(
        rule,
        phase_of_row.cast(pl.Enum(_PHASES)),
        left_out,
        *_statements(rule, phase_of_row, left_out, nothing_left=nothing_left),
    )


def separate_work(trace: Attributed) -> pl.Series:
    """Why tables list a row of ``gpu`` separately, as a code of `thence.model.reasons`; null for rows that count.

    Listed separately are warm-up and incomplete executions by `WarmUp.HEURISTIC`, and the work of XLA's autotuner.
    """
    phase = phases(trace).phase.cast(pl.String)
    code = phase.replace_strict(_SEPARATE, default=None, return_dtype=pl.String)
    of_program = code.gather(trace.gpu["program"].cast(pl.UInt32))
    trying = trace.places["program_rule"].cast(pl.String) == "autotuning"
    tuned = pl.select(pl.when(trying).then(pl.lit("autotuning"))).to_series()
    return tuned.zip_with(of_program.is_null(), of_program).cast(RULE).alias("separate")


def module_keys(trace: Attributed) -> pl.Series:
    """A key for the XLA module of every row of ``Tables.programs``: ``name.number``.

    If the HLO is missing, the key is the program's identity or else its name.
    """
    module_names = pl.DataFrame(
        {"hlo": range(len(trace.hlo)), "known": [f"{module.name}.{module.id}" for module in trace.hlo]},
        schema={"hlo": pl.Int32, "known": pl.String},
    )
    rows = trace.programs.select("hlo", pl.col("program", "name").cast(pl.String)).join(
        module_names, on="hlo", how="left", maintain_order="left"
    )
    return rows.select(key=pl.coalesce("known", "program", "name"))["key"]


def compiled_modules(trace: Attributed) -> pl.DataFrame:
    """Modules whose compilation was recorded: columns rank and key, as in `module_keys`."""
    names = trace.host.filter(pl.col("category") == "compile").select("rank", pl.col("name").cast(pl.String))
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
    """How many executions of the row's module count as warm-up."""
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


def _left_out(trace: Attributed, phase: pl.Series) -> pl.DataFrame:
    """`Phases.left_out`."""
    return (
        trace.programs.select(phase=phase, name=pl.col("name").cast(pl.String), duration=pl.col("duration"))
        .filter(pl.col("phase").is_in([*_LEFT_OUT]))
        .group_by("phase", "name", maintain_order=True)
        .agg(executions=pl.len().cast(pl.Int64), span_ns_total=pl.col("duration").sum())
        .sort("span_ns_total", "name", descending=[True, False])
    )


def _statements(rule: WarmUp, phase: pl.Series, left_out: pl.DataFrame, *, nothing_left: bool) -> tuple[str, str]:
    """`Phases.statement` and `Phases.counted_statement`."""
    if phase.is_empty():
        nothing = "no XLA programs in this trace, so nothing is left out as warm-up"
        return nothing, nothing
    if rule is WarmUp.KEEP:
        text = "warm-up executions are included"
    elif nothing_left:
        text = "every execution would have been warm-up, so all are included"
    else:
        text = {
            WarmUp.FIRST_COMPILED: "warm-up: the first execution of each program that was compiled while recording",
            WarmUp.HEURISTIC: "warm-up: for each program, one execution if it was compiled while recording, "
            "and one more if the trace has collectives",
        }[rule]
    parts = [_left_out_text(left_out.filter(pl.col("phase") == name), name) for name in _LEFT_OUT]
    listed = [part for part in parts if part]
    only = int((phase == "only").sum())
    if not only:
        return (_stated(text, listed),) * 2
    alone = f"{_executions(only)} of programs without a steady-state execution"
    return _stated(text, [*listed, alone]), _stated(f"{text}; {alone} {'is' if only == 1 else 'are'} included", listed)


def _stated(text: str, left_out: list[str]) -> str:
    return f"{text}; left out: {', '.join(left_out)}" if left_out else f"{text}; nothing is left out"


def _left_out_text(rows: pl.DataFrame, phase: str) -> str:
    """The executions of one phase as text: their number, time and largest programs; empty if there are none."""
    if rows.is_empty():
        return ""
    count, ns = int(rows["executions"].sum()), int(rows["span_ns_total"].sum())
    names = [
        f"{name} {format_ns(time)}" for name, time in rows.head(_NAMED).select("name", "span_ns_total").iter_rows()
    ]
    more = f" and {rows.height - _NAMED:,} more" if rows.height > _NAMED else ""
    return (
        f"{format_count(count)} {_LEFT_OUT[phase]} execution{'' if count == 1 else 's'}, "
        f"{format_ns(ns)} ({', '.join(names)}{more})"
    )


def _executions(count: int) -> str:
    return f"{format_count(count)} execution{'' if count == 1 else 's'}"
