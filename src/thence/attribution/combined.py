"""Everything that is known about where the device time of a trace came from.

PyTorch work is traced through its launches (`places`), XLA work through its HLO (`hlo`). A trace
may hold both; where an activity has an HLO instruction, what that says comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from thence.attribution import hlo, places
from thence.attribution.autotuning import AUTOTUNING, autotuned
from thence.attribution.collectives import described_collectives

if TYPE_CHECKING:
    from thence.model.tables import Tables

__all__ = ["KINDS_OF_PLACES", "Attribution", "attribution_of"]

_FROM_HLO = ("program", "hlo", "opcode", "op_name")
KINDS_OF_PLACES = (*places.PLACES, *_FROM_HLO)
"""Kinds of places, each a column of `Attribution.places` beside its ``_rule``."""

NO_XLA = "no XLA programs in this trace"


@dataclass(frozen=True)
class Attribution:
    """Where the device time came from.

    Attributes:
        places: one row per row of gpu, in its order: ``launch`` (host row) and, for each of
            `KINDS_OF_PLACES`, the place and ``<kind>_rule``, how it was found or why there is none;
            ``lane`` and ``metadata``, what marks said beside their names.
        shares: how the time of each activity divides among source lines: gpu (row), place, weight,
            rule; None where every activity has one line at most, that of ``places``.
        collectives: the `collectives` table, every row with its device activity.
    """

    places: pl.DataFrame
    shares: pl.DataFrame | None
    collectives: pl.DataFrame


def attribution_of(tables: Tables) -> Attribution:
    """All of it, for a whole trace."""
    found = places.attribute(tables)
    collectives = described_collectives(tables, found["launch"])
    if tables.programs.is_empty():
        return Attribution(
            found.with_columns(_nothing_from_hlo(tables.gpu.height)), None, collectives
        )
    ran = hlo.instructions(tables)
    of_hlo = hlo.attribute_hlo(tables, ran).with_columns(_named(tables, ran))
    both = [kind for kind in hlo.PLACES if kind in found.columns]
    merged = found.with_columns(x for kind in both for x in _merged(found, of_hlo, kind))
    extra = [column for kind in _FROM_HLO for column in (kind, f"{kind}_rule")]
    shares = hlo.source_shares(tables, ran) if tables.hlo else None
    return Attribution(merged.with_columns(of_hlo.select(extra)), shares, collectives)


def _nothing_from_hlo(rows: int) -> list[pl.Series]:
    reason = pl.Series([NO_XLA], dtype=pl.Categorical()).new_from_index(0, rows)
    null = pl.Series([None], dtype=pl.Categorical()).new_from_index(0, rows)
    return [x for kind in _FROM_HLO for x in (null.alias(kind), reason.alias(f"{kind}_rule"))]


def _named(tables: Tables, ran: pl.DataFrame) -> list[pl.Series]:
    """Program and HLO instruction of each activity."""
    program = tables.programs["name"].gather(tables.gpu["program"].cast(pl.UInt32))
    texts = pl.Series([hlo.RECORDED, hlo.NO_PROGRAM, AUTOTUNING], dtype=pl.Categorical())
    trying = autotuned(tables).cast(pl.UInt32)
    rule = texts.gather(program.is_null().cast(pl.UInt32) * (1 + trying))
    return [program.alias("program"), rule.alias("program_rule"), *ran.get_columns()]


def _merged(found: pl.DataFrame, of_hlo: pl.DataFrame, kind: str) -> tuple[pl.Series, pl.Series]:
    """What the HLO says of an activity of an XLA program; what the launch says of any other.

    What the autotuner ran is part of no program, and no range, frame or step would tell more of it.
    """
    rule = f"{kind}_rule"
    no_program = of_hlo["program"].is_null() & (of_hlo[rule] != AUTOTUNING).fill_null(value=True)
    of_launch = of_hlo[kind].is_null() & found[kind].is_not_null() | no_program
    return (
        found[kind].zip_with(of_launch, of_hlo[kind]).alias(kind),
        found[rule].zip_with(of_launch, of_hlo[rule]).alias(rule),
    )
