"""Places of the activities of a trace with XLA programs: those from the HLO, merged with those from the launches.

For an activity with an HLO instruction, the HLO takes precedence.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import polars as pl

from thence.attribution.xla.autotuning import autotuned
from thence.attribution.xla.hlo_places import hlo_places, hlo_rows, instructions, source_shares
from thence.model.attributed import RULE
from thence.model.phases import Position
from thence.model.places import HLO

if TYPE_CHECKING:
    from thence.model.own_code import OwnCode
    from thence.model.tables import Tables

_BOTH = tuple(kind.name for kind in HLO if kind.origin == "both")
_FROM_HLO = tuple(kind.name for kind in HLO if kind.origin == "hlo")


def with_hlo(tables: Tables, of_launch: pl.DataFrame, own: OwnCode) -> tuple[Tables, pl.DataFrame, pl.DataFrame | None]:
    """Merges the places from the HLO of a trace with those from its launches.

    Args:
        tables: of the trace.
        of_launch: the places of every activity by its launch, as `launch_places` returns them.
        own: which files are the user's own code.

    Returns:
        The tables, ``gpu`` with the HLO instruction of every activity; the merged places; and the shares of an
        instruction's time among source lines, None without any HLO.
    """
    trying = autotuned(tables)
    columns = instructions(tables, trying)
    tables = dataclasses.replace(tables, gpu=tables.gpu.with_columns(columns["hlo"]))
    rows = hlo_rows(tables, columns["hlo_rule"], trying, own)
    of_hlo = hlo_places(rows).with_columns(*_programs(tables, trying), columns["hlo"], columns["hlo_rule"])
    places = of_launch.with_columns(
        *(column for kind in _BOTH for column in _merged(of_launch, of_hlo, kind)),
        *(of_hlo[name] for kind in _FROM_HLO for name in (kind, f"{kind}_rule")),
        _position(of_launch, of_hlo),
    )
    return tables, places, source_shares(rows) if tables.hlo else None


def _programs(tables: Tables, trying: pl.Series) -> tuple[pl.Series, pl.Series]:
    """The name of the XLA program that each activity is part of, and the rule."""
    name = tables.programs["name"].gather(tables.gpu["program"].cast(pl.UInt32))
    codes = pl.Series(["hlo_recorded", "no_program", "autotuning"], dtype=RULE)
    rule = codes.gather(name.is_null().cast(pl.UInt32) * (1 + trying.cast(pl.UInt32)))
    return name.alias("program"), rule.alias("program_rule")


def _position(of_launch: pl.DataFrame, of_hlo: pl.DataFrame) -> pl.Series:
    """The `Position` of the merged sources: those from the HLO are lines."""
    by_hlo = ~_by_launch(of_launch, of_hlo, "source") & of_hlo["source"].is_not_null()
    line = pl.Series([Position.LINE.value], dtype=of_launch["position"].dtype)
    return line.new_from_index(0, len(by_hlo)).zip_with(by_hlo, of_launch["position"]).alias("position")


def _merged(of_launch: pl.DataFrame, of_hlo: pl.DataFrame, kind: str) -> tuple[pl.Series, pl.Series]:
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

    A phase found by the rule ``outside_autograd`` is not used: PyTorch's autograd has no part in XLA programs.
    """
    trying = (of_hlo[f"{kind}_rule"] == "autotuning").fill_null(value=False)
    no_program = of_hlo["program"].is_null() & ~trying
    found = of_launch[kind].is_not_null() & (of_launch[f"{kind}_rule"] != "outside_autograd")
    return of_hlo[kind].is_null() & found | no_program
