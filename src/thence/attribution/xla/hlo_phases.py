"""The phase of every HLO instruction: forward, backward, recompute, optimizer, other or mixed.

The op_name shows the phase: JAX writes into it the transformations and scopes that were open while tracing.

backward   inside ``transpose(...)``, which reverse differentiation writes around the operations that it creates
recompute  inside ``rematted_computation``: the forward pass of ``jax.checkpoint``, run again
forward    inside ``jvp(...)`` or ``linearize(...)``, and neither of these
optimizer  outside of all of them, where the source stack goes through a library's optimizer (optax and
           others), or a scope is named like one
other      outside of all of them: inference, metrics, and an update of the parameters that no name identifies

An instruction that does the work of several, such as a fusion, has the phase of the instructions inside it; one
whose op_name XLA merged from several has the phase of these. Arguments of the program among them are ignored. If
there are several phases, the instruction is ``mixed``, with one exception: a kernel with a backward instruction cannot
run before the backward pass has begun, so forward and recomputed instructions that XLA fused into it are evaluated
(again) as part of the backward pass, and the kernel is backward. Likewise, a kernel with forward and recomputed
instructions is recomputed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.attribution.optimizers import is_optimizer_scope
from thence.attribution.xla.op_names import is_traced, parts_of, scopes_of, segments_of
from thence.attribution.xla.origins import frames_in_optimizers
from thence.model.phases import Phase

if TYPE_CHECKING:
    from thence.model.hlo import HloModule

_REMATERIALIZED = "rematted_computation"
_DIFFERENTIATING = ("jvp(", "linearize(")
_LATENESS = {Phase.FORWARD.value: 1, Phase.RECOMPUTE.value: 2, Phase.BACKWARD.value: 3}
_LATEST = 3
"""The phases in `_LATENESS` give way to the latest of them in the same kernel. All other phases are kept."""
_RULES = {
    Phase.BACKWARD: "transposed",
    Phase.RECOMPUTE: "rematerialized",
    Phase.FORWARD: "not_transposed",
    Phase.OPTIMIZER: "optimizer_scope",
    Phase.OTHER: "not_differentiated",
    Phase.MIXED: "merged_phases",
}


def instruction_phases(module: HloModule, origin: pl.DataFrame, parts: pl.DataFrame) -> pl.DataFrame:
    """The phase of every instruction of a module, in its order.

    Args:
        origin: op_name and frame of each, as `thence.attribution.xla.origins` returns them.
        parts: the constituents of each, as `thence.attribution.xla.constituents` returns them.

    Returns:
        columns phase (null where op_name does not show it) and phase_rule: how it was found, or why not.
    """
    known = origin.select("op_name", optimizer=_in_optimizer(module, origin["frame"]))
    distinct = known.unique(maintain_order=True)
    phases_of_names = pl.DataFrame(
        [
            {"op_name": name, "optimizer": inside, "phase": phase.value, "phase_rule": rule}
            for name, inside in distinct.iter_rows()
            if name is not None
            for phase, rule in phases_of(name, in_optimizer=inside)
        ],
        schema={"op_name": pl.String, "optimizer": pl.Boolean, "phase": pl.String, "phase_rule": pl.String},
    )
    rows = known.with_row_index("constituent").join(phases_of_names, on=["op_name", "optimizer"])
    rows = rows.select(pl.col("constituent").cast(pl.Int64), "phase", "phase_rule")
    inside = parts.select(pl.col("instruction", "constituent").cast(pl.Int64)).join(rows, on="constituent")
    alone = rows.with_columns(instruction="constituent").join(inside, on="instruction", how="anti")
    phases_inside = pl.concat([inside, alone.select(inside.columns)])
    decided = (
        phases_inside.with_columns(later=pl.col("phase").replace_strict(_LATENESS, default=0).max().over("instruction"))
        .filter(pl.col("phase").replace_strict(_LATENESS, default=_LATEST) >= pl.col("later"))
        .group_by("instruction")
        .agg(pl.col("phase").unique(), pl.col("phase_rule").sort().first())
    )
    several = pl.col("phase").list.len() > 1
    decided = decided.select(
        "instruction",
        phase=pl.when(several).then(pl.lit(Phase.MIXED.value)).otherwise(pl.col("phase").list.first()),
        phase_rule=pl.when(several).then(pl.lit(_RULES[Phase.MIXED])).otherwise("phase_rule"),
    )
    reason = pl.when(pl.col("op_name").is_null()).then(pl.lit("no_op_name")).otherwise(pl.lit("argument"))
    return (
        known.with_row_index("instruction")
        .with_columns(pl.col("instruction").cast(pl.Int64))
        .join(decided, on="instruction", how="left", maintain_order="left")
        .select("phase", phase_rule=pl.coalesce("phase_rule", reason))
    )


def phases_of(op_name: str, *, in_optimizer: bool = False) -> set[tuple[Phase, str]]:
    """The phases of the operations that were merged into an op_name, each with the code of its rule.

    Args:
        op_name: of the instruction.
        in_optimizer: whether its source stack goes through a library's optimizer.
    """
    return {_phase_of(path, in_optimizer) for path in parts_of(op_name) if is_traced(path)}


def _phase_of(path: str, in_optimizer: bool) -> tuple[Phase, str]:  # noqa: FBT001 - a fact of the path
    segments = segments_of(path)
    if _REMATERIALIZED in segments:
        phase = Phase.RECOMPUTE
    elif any(segment.startswith("transpose(") for segment in segments):
        phase = Phase.BACKWARD
    elif any(segment.startswith(_DIFFERENTIATING) for segment in segments):
        phase = Phase.FORWARD
    elif in_optimizer:
        return Phase.OPTIMIZER, "optimizer_frame"
    elif any(is_optimizer_scope(scope) for scope in scopes_of(path)):
        phase = Phase.OPTIMIZER
    else:
        phase = Phase.OTHER
    return phase, _RULES[phase]


def _in_optimizer(module: HloModule, frame: pl.Series) -> pl.Series:
    inside = pl.Series(frames_in_optimizers(module), dtype=pl.Boolean)
    return inside.gather(frame.cast(pl.UInt32)).fill_null(value=False)  # no stack: not in a library
