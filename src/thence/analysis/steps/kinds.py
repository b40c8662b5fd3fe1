"""Time per step of an inference server, by what the step computes, and by layer and kernel inside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.attribution.host_rows import row_numbers
from thence.attribution.serving import server_passes
from thence.errors import MissingData
from thence.model.answer import Answer, TableView
from thence.model.intervals import chain_to
from thence.model.kernel_names import short_names
from thence.model.layers import folded_names
from thence.model.reasons import REASONS
from thence.units import several

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

_STEP_HEADINGS = {
    "step_kind": "kind of step", "steps": "steps", "total_ns": "total", "per_step_ns": "per step",
}  # fmt: skip
_PART_HEADINGS = {
    "step_kind": "kind of step", "layer": "layer", "layers": "layers", "kernel": "kernel", "count": "count",
    "total_ns": "total", "per_step_ns": "per step",
}  # fmt: skip
_LAYERS = ("module", "label", "op")
"""Kinds of places that name the layer: the first one that is known counts."""


@dataclass(frozen=True)
class StepKinds(Answer):
    """Steps of a server by kind. Times are ns: plain sums of durations of activities launched in the steps.

    Attributes:
        rows: ``step_kind``, ``serving``, ``batch_size``, ``tokens`` (each null if the step's name does not contain
            it), ``steps`` (number of passes of all ranks that launched something), ``total_ns``, ``per_step_ns``; the
            most time first.
        parts: the same time by ``step_kind``, ``layer`` (module, else label, else operator; null if none is known)
            and ``kernel``: ``count``, ``total_ns``, ``per_step_ns``; the most time first in each kind.
    """

    rows: pl.DataFrame
    parts: pl.DataFrame

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return f"{several(int(self.rows['steps'].sum()), 'step')} of a server", "time of what was launched in them"

    def views(self, *, each: bool = False) -> tuple[TableView, ...]:
        """The kinds of steps, and the layers and kernels of each; with ``each``, without folding equal layers."""
        parts = self.parts if each else self.folded_parts
        kernels = short_names(parts["kernel"].drop_nulls().unique().to_list())
        headings = {name: text for name, text in _PART_HEADINGS.items() if name in parts.columns}
        return (
            TableView(self.rows, _STEP_HEADINGS, bar="total_ns"),
            TableView(parts.with_columns(pl.col("kernel").replace(kernels)), headings),
        )

    @property
    def folded_parts(self) -> pl.DataFrame:
        """The parts with equal layers of the model as one row, for tables: with ``layers``, how many are in the row."""
        names = folded_names(self.parts["layer"].drop_nulls().unique(maintain_order=True))
        held = self.parts.join(
            names.rename({"layer": "index"}), left_on="layer", right_on="name", how="left", maintain_order="left"
        )
        group = ["step_kind", "folded", "kernel"]
        return (
            held.group_by(group, maintain_order=True)
            .agg(
                pl.col("count", "total_ns", "per_step_ns").sum(),
                layer=pl.when(pl.len() > 1).then(pl.col("folded").first()).otherwise(pl.col("layer").first()),
                layers=pl.when(pl.len() > 1).then(pl.col("index").n_unique()),
            )
            .with_columns(order=pl.col("step_kind").rle_id())
            .sort("order", "total_ns", descending=[False, True], maintain_order=True)
            .select("step_kind", "layer", "layers", "kernel", "count", "total_ns", "per_step_ns")
        )

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {"step_kinds": self.rows.to_dicts(), "step_kind_parts": self.parts.to_dicts()}


def step_kinds(trace: Attributed) -> StepKinds:
    """Divides the time of an inference server's steps by kind, layer and kernel.

    Raises:
        MissingData: the trace holds no steps of an inference server.
    """
    parent = row_numbers(trace.host["parent"])
    top, said = server_passes(trace.host, parent)
    if not said:
        raise MissingData(f"{', '.join(trace.meta.inputs)}: {REASONS['no_server_steps']}")
    known = pl.DataFrame(
        {
            "step": pl.Series(list(said), dtype=pl.Int64),
            "step_kind": [str(step) for step in said.values()],
            "serving": [step.serving and step.serving.value for step in said.values()],
            "batch_size": pl.Series([step.requests for step in said.values()], dtype=pl.Int64),
            "tokens": pl.Series([step.tokens for step in said.values()], dtype=pl.Int64),
        },
        schema_overrides={"serving": pl.String},
    )
    of_launch = chain_to(parent, row_numbers(trace.places["launch"]), top)
    launched = pl.DataFrame(
        {
            "step": of_launch,
            "layer": pl.select(pl.coalesce(trace.places[kind].cast(pl.String) for kind in _LAYERS)).to_series(),
            "kernel": trace.gpu["name"].cast(pl.String),
            "duration": trace.gpu["duration"],
        }
    ).join(known, on="step")
    facts = [pl.col(name).first() for name in ("serving", "batch_size", "tokens")]
    rows = (
        launched.group_by("step_kind")
        .agg(*facts, steps=pl.col("step").n_unique(), total_ns=pl.col("duration").sum())
        .with_columns(per_step_ns=pl.col("total_ns") / pl.col("steps"))
        .sort("total_ns", "step_kind", descending=[True, False])
    )
    order = rows.select("step_kind", "steps").with_row_index("order")
    parts = (
        launched.group_by("step_kind", "layer", "kernel")
        .agg(count=pl.len(), total_ns=pl.col("duration").sum())
        .join(order, on="step_kind")
        .with_columns(per_step_ns=pl.col("total_ns") / pl.col("steps"))
        .sort("order", "total_ns", "layer", "kernel", descending=[False, True, False, False])
        .drop("order", "steps")
    )
    return StepKinds(rows, parts)
