"""Memory of XLA programs by instruction, as their compiler planned it (`thence.model.hlo.BUFFERS`).

When an allocator's events are known, each execution's allocations are found again in its program's plan by their sizes:
the executor makes one allocation for each of the plan that is no argument and no constant. A piece of scratch memory
then is what the plan has in it when the program needs most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.attribution.xla.hlo_places import module_places
from thence.model.attributed import once_per_trace
from thence.model.own_code import OwnCode

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

_PLACES = ("kind", "source", "label", "phase", "op")
"""What the plan says of a buffer, in columns of `thence.model.tables.MEMORY`."""


@once_per_trace
def planned_buffers(trace: Attributed) -> pl.DataFrame:
    """The buffers of all HLO modules: number (row in ``hlo``), allocation, kind, bytes, and their places.

    Places are those of the instructions that make them.
    """
    own = OwnCode.of(trace.own, trace.installed)
    parts = []
    for number, module in enumerate(trace.hlo):
        if module.buffers.is_empty():
            continue
        named = module.instructions.select(instruction="id", hlo="name").unique("instruction", keep="first")
        buffers = module.buffers.join(named, on="instruction", how="left", maintain_order="left")
        buffers = buffers.with_columns(hlo=pl.coalesce("hlo", "name")).join(
            module_places(module, own), on="hlo", how="left", maintain_order="left"
        )
        nowhere = {name: pl.lit(None, pl.String) for name in ("module", "step")}
        columns = ("allocation", "kind", "bytes", "source", "label", "phase")
        parts.append(buffers.select(pl.lit(number, pl.Int32).alias("number"), *columns, op="hlo", **nowhere))
    return pl.concat(parts)


def has_plans(trace: Attributed) -> bool:
    """Whether the plan of any XLA program is known."""
    return any(module.buffers.height for module in trace.hlo)


def with_planned_buffers(trace: Attributed, memory: pl.DataFrame) -> pl.DataFrame:
    """Allocations, of which those that a plan describes are split into its buffers.

    Args:
        memory: as `thence.model.tables.MEMORY`, with further columns, which each piece of an allocation has, too.

    Returns:
        the same columns in the same order; kind, source, label, phase and op of the pieces are the plan's, and a piece
        of what was rounded up has none. The pieces of an allocation add up to its bytes.
    """
    if memory.is_empty() or not has_plans(trace):
        return memory
    table = memory.with_row_index("row").cast({"row": pl.Int64})
    planned = planned_buffers(trace)
    allocations = _allocations_of_plans(_executions(trace, table), planned)
    plan = ["number", "allocation"]
    buffers = planned.select(*plan, pl.col("bytes").alias("planned"), *_PLACES)
    parts = allocations.join(buffers, on=plan, maintain_order="left_right").with_columns(asked="planned")
    sizes = buffers.group_by(plan).agg(pl.col("planned").sum())
    rounding = allocations.join(sizes, on=plan).select(
        "row", planned=pl.col("bytes") - pl.col("planned"), asked=pl.lit(0, pl.Int64)
    )
    parts = pl.concat([parts, rounding.filter(pl.col("planned") > 0)], how="diagonal")
    split = table.drop(_PLACES).join(parts.drop("bytes", *plan), on="row", maintain_order="left_right")
    split = split.with_columns(bytes="planned", requested="asked").select(table.columns)
    whole = table.filter(~pl.col("row").is_in(allocations["row"].implode()))
    return pl.concat([whole, split.cast(table.schema)]).sort("row", maintain_order=True).drop("row")


def _executions(trace: Attributed, table: pl.DataFrame) -> pl.DataFrame:
    """Allocations with the execution that they were made for: row, bytes, requested, execution, number (of the module).

    An executor allocates, and then launches the program; what is allocated while it launches is not for it.
    """
    keys = ["rank", "device"]
    executions = (
        trace.programs.drop_nulls(["launch", "hlo"])
        .select(*keys, "launch", end=pl.col("launch") + pl.col("launch_duration"), number="hlo")
        .with_row_index("execution")
        .sort("launch")
    )
    asked = table.drop_nulls("start").select("row", *keys, "start", "bytes", "requested").sort("start")
    following = asked.join_asof(
        executions.drop("end"), left_on="start", right_on="launch", by=keys, strategy="forward", check_sortedness=False
    )
    before = asked.join_asof(
        executions.select(*keys, "launch", "end"), left_on="start", right_on="launch", by=keys, check_sortedness=False
    )
    launching = pl.Series(before["end"] > before["start"]).fill_null(value=False)
    return following.filter(~launching, pl.col("execution").is_not_null()).sort("row")


def _allocations_of_plans(made: pl.DataFrame, planned: pl.DataFrame) -> pl.DataFrame:
    """The allocation of the plan that each allocation is: row, bytes, number and allocation, where sizes agree."""
    plan = (
        planned.group_by("number", "allocation", maintain_order=True)
        .agg(requested=pl.col("bytes").sum(), kind=pl.col("kind").cast(pl.String).drop_nulls().first())
        .filter(pl.col("kind").is_in(["output", "temporary"]))
        .sort("number", "allocation")
        .with_columns(position=pl.int_range(pl.len()).over("number", "requested"))
    )
    numbered = made.with_columns(position=pl.int_range(pl.len()).over("execution", "requested"))
    return numbered.join(
        plan.select("number", "allocation", "requested", "position"), on=["number", "requested", "position"],
        maintain_order="left",
    ).select("row", "bytes", "number", "allocation")  # fmt: skip
