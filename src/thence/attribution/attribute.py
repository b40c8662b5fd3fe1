"""Attributes every device activity of a trace: `Tables` -> `Attributed`.

PyTorch work is attributed through its launches (`launch_places`), XLA work through its HLO
(`hlo_places`). A trace may hold both; for an activity with an HLO instruction, the HLO takes precedence.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import polars as pl

from thence.attribution.collectives import complete_collectives
from thence.attribution.host_rows import row_numbers
from thence.attribution.launch_places import launch_places
from thence.attribution.sources import file_of_frame
from thence.attribution.waiting import completed_waiting
from thence.attribution.xla.autotuning import autotuned
from thence.attribution.xla.hlo_places import PLACES as OF_INSTRUCTION
from thence.attribution.xla.hlo_places import (
    hlo_places,
    hlo_rows,
    instructions,
    source_shares,
)
from thence.model.attributed import RULE, Attributed
from thence.model.own_code import OwnCode, packages_shown
from thence.model.phases import Position
from thence.model.places import HLO, LAUNCH
from thence.model.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["attribute"]

_BOTH = tuple(kind.name for kind in LAUNCH if kind.name in OF_INSTRUCTION)
_FROM_HLO = tuple(kind.name for kind in HLO if kind.name not in _BOTH)


def attribute(tables: Tables, own: Sequence[str] = ()) -> Attributed:
    """Attributes every device activity of a trace.

    Args:
        tables: as the readers returned them, labels of CUDA graphs joined (`graphs.labelling`).
        own: what else counts as the user's own code, as `thence.model.own_code` takes it.
    """
    installed = packages_shown(_files(tables))
    own_code = OwnCode.of(own, installed)
    of_launch = launch_places(tables, own_code)
    shares = None
    if tables.programs.is_empty():
        places = of_launch.with_columns(_nothing_from_hlo(tables.gpu.height))
    else:
        trying = autotuned(tables)
        instruction_columns = instructions(tables, trying)
        tables = dataclasses.replace(
            tables, gpu=tables.gpu.with_columns(instruction_columns["hlo"])
        )
        rows = hlo_rows(tables, instruction_columns["hlo_rule"], trying, own_code)
        of_hlo = hlo_places(rows).with_columns(
            *_programs(tables, trying), instruction_columns["hlo"], instruction_columns["hlo_rule"]
        )
        places = of_launch.with_columns(
            *(column for kind in _BOTH for column in _merged(of_launch, of_hlo, kind)),
            *(of_hlo[name] for kind in _FROM_HLO for name in (kind, f"{kind}_rule")),
            _position(of_launch, of_hlo),
            detail=of_launch["detail"].zip_with(
                instruction_columns["detail"].is_null(), instruction_columns["detail"]
            ),
        )
        shares = source_shares(rows) if tables.hlo else None
    collectives, parts = complete_collectives(tables, of_launch["launch"])
    events, waits = completed_waiting(tables, row_numbers(of_launch["launch"]))
    columns = {field.name: getattr(tables, field.name) for field in dataclasses.fields(Tables)}
    columns |= {
        "collectives": collectives,
        "events": events,
        "waits": waits,
        "collective_parts": parts,
        "host_collectives": tables.collectives.filter(pl.col("gpu").is_null()),
        "graph_labels": (),
    }
    places = places.with_columns(pl.lit(None, RULE).alias("apart"))
    return Attributed(**columns, places=places, shares=shares, own=tuple(own), installed=installed)


def _files(tables: Tables) -> Iterator[str]:
    """The source files that the trace names, some more than once."""
    python = tables.host.filter(pl.col("category") == "python")["name"].unique().drop_nulls()
    yield from (file_of_frame(name) for name in python.cast(pl.String))
    for module in tables.hlo:
        yield from module.frames["file"].unique().drop_nulls()


def _nothing_from_hlo(rows: int) -> list[pl.Series]:
    reason = pl.Series(["no_xla"], dtype=RULE).new_from_index(0, rows)
    null = pl.Series([None], dtype=pl.Categorical()).new_from_index(0, rows)
    return [x for kind in _FROM_HLO for x in (null.alias(kind), reason.alias(f"{kind}_rule"))]


def _programs(tables: Tables, trying: pl.Series) -> tuple[pl.Series, pl.Series]:
    """The name of the XLA program that each activity is part of, and the rule."""
    name = tables.programs["name"].gather(tables.gpu["program"].cast(pl.UInt32))
    codes = pl.Series(["hlo_recorded", "no_program", "autotuning"], dtype=RULE)
    rule = codes.gather(name.is_null().cast(pl.UInt32) * (1 + trying.cast(pl.UInt32)))
    return name.alias("program"), rule.alias("program_rule")


def _position(of_launch: pl.DataFrame, of_hlo: pl.DataFrame) -> pl.Series:
    """What the line numbers of the merged sources are: the HLO holds lines."""
    by_hlo = ~_by_launch(of_launch, of_hlo, "source") & of_hlo["source"].is_not_null()
    line = pl.Series([Position.LINE.value], dtype=of_launch["position"].dtype)
    return (
        line.new_from_index(0, len(by_hlo))
        .zip_with(by_hlo, of_launch["position"])
        .alias("position")
    )


def _merged(
    of_launch: pl.DataFrame, of_hlo: pl.DataFrame, kind: str
) -> tuple[pl.Series, pl.Series]:
    """Merges the places of HLO and launch: HLO for activities of XLA programs, launch for all others.

    An activity without a place in the HLO gets that of its launch, if there is one. Activities of the
    autotuner belong to no program; without a place they keep the reason "autotuning", not the launch's.
    """
    rule = f"{kind}_rule"
    by_launch = _by_launch(of_launch, of_hlo, kind)
    return (
        of_launch[kind].zip_with(by_launch, of_hlo[kind]).alias(kind),
        of_launch[rule].zip_with(by_launch, of_hlo[rule]).alias(rule),
    )


def _by_launch(of_launch: pl.DataFrame, of_hlo: pl.DataFrame, kind: str) -> pl.Series:
    """Which activities have the place of their launch.

    That autograd has no part in a launch says nothing of the XLA program that it launches.
    """
    trying = (of_hlo[f"{kind}_rule"] == "autotuning").fill_null(value=False)
    no_program = of_hlo["program"].is_null() & ~trying
    found = of_launch[kind].is_not_null() & (of_launch[f"{kind}_rule"] != "outside_autograd")
    return of_hlo[kind].is_null() & found | no_program
