"""Where the device time of XLA programs came from, by the HLO instruction behind each activity.

    op_name  what the framework wrote on the instruction: ``jit(step)/jvp(layer1)/mlp/dot_general``
    opcode   of the instruction, such as fusion
    source   ``file.py:12``, the innermost line of the instruction's own stack
    stack    all frames of it, ``file.py(12): function``, outermost first, between ``;``
    label    path of named scopes in op_name: ``layer1/mlp``
    phase    backward where op_name holds a transposition, else forward

Every kind has a second column, ``<kind>_rule``: how the place was found or, where it is null, why not.
A fusion does the work of many source lines; `source_shares` divides its time among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.attribution.autotuning import AUTOTUNING, autotuned
from thence.attribution.command_buffers import IN_GRAPH, derived_instructions
from thence.attribution.constituents import constituents_by_cost
from thence.attribution.op_names import labels, phase_of
from thence.attribution.origins import OWN, origins

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.model.hlo import HloModule
    from thence.model.tables import Tables

__all__ = [
    "CLAIMS",
    "PLACES",
    "attribute_hlo",
    "frame_names",
    "instructions",
    "source_shares",
    "stack_shares",
]

PLACES = ("op_name", "opcode", "source", "stack", "label", "phase")
"""Kinds of places, each a column of `attribute_hlo` beside its ``_rule``."""

CLAIMS: dict[str, pl.DataType] = {
    "gpu": pl.Int32(),  # row in Tables.gpu
    "place": pl.Categorical(),  # file.py:12; null: this part of the time has no source line
    "weight": pl.Float64(),  # share of the activity's time, from 0 to 1
    "rule": pl.Categorical(),  # how it was found, or why it was not
}
"""Schema of `source_shares`."""

RECORDED = "recorded by the profiler"
NO_PROGRAM = "part of no XLA program"
NO_HLO_OP = "the profiler recorded no HLO op"
NO_MODULE = "the HLO of its program is not in the trace"
NO_INSTRUCTION = "the HLO of its program has no such instruction"
OF_FUSION = "line of the fusion: the instruction inside has none"
NO_OP_NAME = "no op_name"

_KEY = ["module", "hlo"]


def instructions(tables: Tables) -> pl.DataFrame:
    """The HLO instruction of every row of ``tables.gpu``, in its order.

    Returns:
        columns hlo (Categorical), the op that the profiler recorded or, inside a command buffer, the
        instruction whose command the node is; and hlo_rule, which of both, or why there is none.
    """
    trying = autotuned(tables)
    derived = derived_instructions(tables)
    recorded = tables.gpu["hlo"].cast(pl.String)
    reason = pl.when("in_graph").then(pl.lit(IN_GRAPH)).otherwise(pl.lit(NO_HLO_OP))
    return (
        derived.rename({"hlo": "derived"})
        .with_columns(
            recorded=recorded,
            trying=trying,
            in_graph=tables.gpu["graph"].is_not_null() & tables.gpu["program"].is_not_null(),
        )
        .select(
            hlo=pl.coalesce("recorded", "derived"),
            hlo_rule=pl.when(pl.col("recorded").is_not_null())
            .then(pl.lit(RECORDED))
            .otherwise(pl.coalesce("rule", pl.when("trying").then(pl.lit(AUTOTUNING)), reason)),
        )
        .cast(pl.Categorical())
    )


def attribute_hlo(tables: Tables, ran: pl.DataFrame) -> pl.DataFrame:
    """The places of every row of ``tables.gpu``, in its order.

    Args:
        tables: of the trace.
        ran: what `instructions` found for them.

    Returns:
        For each kind of `PLACES` a Categorical column and its rule.
    """
    keys = _keys(tables, ran)
    known = _module_places(tables, keys)
    rows = keys.join(known, on=_KEY, how="left", maintain_order="left")
    columns = []
    for kind in PLACES:
        rule = pl.coalesce("reason", f"{kind}_rule", pl.lit(NO_INSTRUCTION))
        columns += [
            pl.col(kind).cast(pl.Categorical()),
            rule.cast(pl.Categorical()).alias(f"{kind}_rule"),
        ]
    return rows.select(columns)


def source_shares(
    tables: Tables,
    ran: pl.DataFrame,
    weighting: Callable[[HloModule], pl.DataFrame] = constituents_by_cost,
) -> pl.DataFrame:
    """The time of every row of ``tables.gpu``, divided among the source lines that it came from.

    Args:
        tables: of the trace.
        ran: what `instructions` found for them.
        weighting: how to divide an instruction among those it is made of: `constituents_by_cost`, or
            `constituents_by_place`, the equal parts of nsys-jax's notebook.

    Returns:
        Claims in the columns of `CLAIMS`, sorted by gpu. The weights of one activity sum to 1; what
        has no source line is a claim of the null place, whose rule is the reason.
    """
    keys = _keys(tables, ran)
    parts = [_shares(module, weighting(module), i, keys) for i, module in _used(tables, keys)]
    empty = pl.DataFrame(
        schema={
            "module": pl.Int32,
            "hlo": pl.String,
            "place": pl.String,
            "weight": pl.Float64,
            "rule": pl.String,
        }
    )
    claims = keys.with_row_index("gpu").join(
        pl.concat([empty, *parts]), on=_KEY, how="left", maintain_order="left"
    )
    rule = pl.coalesce("reason", "rule", pl.lit(NO_INSTRUCTION))
    return claims.select("gpu", "place", pl.col("weight").fill_null(1.0), rule.alias("rule")).cast(
        pl.Schema(CLAIMS)
    )


def stack_shares(tables: Tables, ran: pl.DataFrame) -> pl.DataFrame:
    """The same division with whole source stacks in place of their innermost lines.

    Args:
        tables: of the trace.
        ran: what `instructions` found for them.

    Returns:
        columns gpu, module (row in ``tables.hlo``), frame (number in its frames, null where there
        is no stack), weight and rule; weights as in `source_shares`.
    """
    keys = _keys(tables, ran)
    columns = ["module", "hlo", "frame", "weight", "rule"]
    parts = [
        _constituents(module, constituents_by_cost(module), keys, i)
        .with_columns(pl.lit(i, pl.Int32).alias("module"))
        .group_by("module", "hlo", "frame", "rule", maintain_order=True)
        .agg(pl.col("weight").sum())
        .select(columns)
        for i, module in _used(tables, keys)
    ]
    types = (pl.Int32, pl.String, pl.Int32, pl.Float64, pl.String)
    empty = pl.DataFrame(schema=dict(zip(columns, types, strict=True)))
    rule = pl.coalesce("reason", "rule", pl.lit(NO_INSTRUCTION))
    return (
        keys.with_row_index("gpu")
        .join(pl.concat([empty, *parts]), on=_KEY, how="left", maintain_order="left")
        .select("gpu", "module", "frame", pl.col("weight").fill_null(1.0), rule.alias("rule"))
    )


def frame_names(module: HloModule, frame: int) -> tuple[str, ...]:
    """The stack that ends in a frame as ``file.py(12): function``, outermost first."""
    return tuple(f"{f.file}({f.line}): {f.function}" for f in module.stack(frame))


def _keys(tables: Tables, ran: pl.DataFrame) -> pl.DataFrame:
    """For every gpu row: module, hlo, and the reason why there is no instruction, or null."""
    modules = tables.programs.select(
        pl.int_range(pl.len(), dtype=pl.Int32).alias("program"), pl.col("hlo").alias("module")
    )
    return (
        tables.gpu.select("program")
        .hstack(ran.select(pl.col("hlo", "hlo_rule").cast(pl.String)))
        .hstack([autotuned(tables)])
        .join(modules, on="program", how="left", maintain_order="left")
        .with_columns(
            reason=pl.when(pl.col("module").is_null() & pl.col("autotuned")).then(pl.lit(AUTOTUNING))
            .when(pl.col("program").is_null()).then(pl.lit(NO_PROGRAM))
            .when(pl.col("hlo").is_null()).then("hlo_rule")
            .when(pl.col("module").is_null()).then(pl.lit(NO_MODULE))
        )
        .select("module", "hlo", "reason")
    )  # fmt: skip


def _used(tables: Tables, keys: pl.DataFrame) -> list[tuple[int, HloModule]]:
    """Modules that activities refer to, with their position."""
    return [(i, tables.hlo[i]) for i in sorted(keys["module"].drop_nulls().unique())]


def _module_places(tables: Tables, keys: pl.DataFrame) -> pl.DataFrame:
    """The places of every instruction that ran: one row per module and name."""
    schema = dict.fromkeys(("hlo", *(f"{k}{s}" for k in PLACES for s in ("", "_rule"))), pl.String)
    parts = [pl.DataFrame(schema={"module": pl.Int32, **schema})]
    for number, module in _used(tables, keys):
        names = keys.filter((pl.col("module") == number) & pl.col("hlo").is_not_null())
        ran = (
            module.instructions.with_row_index("row")
            .join(names.select(pl.col("hlo").alias("name")).unique(), on="name", how="semi")
            .unique("name", keep="first", maintain_order=True)
        )
        parts.append(_places(module, ran).select(pl.lit(number, pl.Int32).alias("module"), *schema))
    return pl.concat(parts)


def _places(module: HloModule, ran: pl.DataFrame) -> pl.DataFrame:
    """The places of the instructions that ran; columns hlo, and each of `PLACES` with its rule."""
    origin = origins(module)[ran["row"]]
    names = labels([name for name in origin["op_name"].to_list() if name is not None])
    frames = origin["frame"].to_list()
    stacks = {frame: ";".join(frame_names(module, frame)) for frame in set(frames)}
    op_names = origin["op_name"].to_list()
    lacking = (None, NO_OP_NAME)
    label = [names[name] if name else lacking for name in op_names]
    phase = [phase_of(name) if name else lacking for name in op_names]
    text = pl.String()
    return ran.select(pl.col("name").alias("hlo"), "opcode", opcode_rule=pl.lit(OWN)).with_columns(
        op_name=origin["op_name"],
        op_name_rule=origin["op_name_rule"],
        source=origin["source"],
        source_rule=origin["source_rule"],
        stack=pl.Series([stacks[frame] or None for frame in frames], dtype=text),
        stack_rule=origin["source_rule"],
        label=pl.Series([path for path, _ in label], dtype=text),
        label_rule=pl.Series([rule for _, rule in label], dtype=text),
        phase=pl.Series([place for place, _ in phase], dtype=text),
        phase_rule=pl.Series([rule for _, rule in phase], dtype=text),
    )


def _shares(
    module: HloModule, parts: pl.DataFrame, number: int, keys: pl.DataFrame
) -> pl.DataFrame:
    """Shares of the source lines in every instruction that ran: module, hlo, place, weight, rule."""
    return (
        _constituents(module, parts, keys, number)
        .group_by("hlo", "place", "rule", maintain_order=True)
        .agg(pl.col("weight").sum())
        .sort("hlo", "weight", descending=[False, True], maintain_order=True)
        .select(pl.lit(number, pl.Int32).alias("module"), "hlo", "place", "weight", "rule")
    )


def _constituents(
    module: HloModule, parts: pl.DataFrame, keys: pl.DataFrame, number: int
) -> pl.DataFrame:
    """What every instruction that ran is made of: hlo, weight, place, frame (null: none), rule."""
    ran = keys.filter((pl.col("module") == number) & pl.col("hlo").is_not_null())
    rows = module.instructions.select(pl.col("name").alias("hlo")).with_row_index("instruction")
    chosen = rows.join(ran.select("hlo").unique(), on="hlo", how="semi").unique("hlo", keep="first")
    columns = ("source", "source_rule", "frame")
    origin = origins(module).select(columns).with_row_index("constituent")
    own = origin.rename(
        {
            "constituent": "instruction",
            "source": "own",
            "source_rule": "own_rule",
            "frame": "own_frame",
        }
    )
    whole = chosen.join(parts, on="instruction", how="anti").with_columns(
        constituent=pl.col("instruction"), weight=pl.lit(1.0)
    )  # an instruction that the weighting does not know is made of itself
    return (
        pl.concat(
            [
                chosen.join(parts, on="instruction"),
                whole.select("instruction", "hlo", "constituent", "weight"),
            ]
        )
        .join(origin, on="constituent", how="left")
        .join(own, on="instruction", how="left")
        .select(
            "hlo",
            "weight",
            place=pl.coalesce("source", "own"),
            frame=pl.when(pl.col("source").is_not_null())
            .then("frame")
            .when(pl.col("own").is_not_null())
            .then("own_frame"),
            rule=pl.when(pl.col("source").is_not_null() | pl.col("own").is_null())
            .then("source_rule")
            .when(pl.col("own_rule") == OWN)
            .then(pl.lit(OF_FUSION))
            .otherwise("own_rule"),
        )
    )
