"""HLO modules given beside a trace, joined to the programs of the trace that lack theirs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import polars as pl

from thence.model.tables import COLLECTIVES, Tables
from thence.readers.xla.collectives import collectives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.model.hlo import HloModule

__all__ = ["attach_hlo"]


def attach_hlo(tables: Tables, modules: Sequence[HloModule]) -> Tables:
    """The tables with HLO for the programs that have none, and their collectives.

    A module is a program's when name and number agree (``jit_step.12``); where no number does, when
    no other module of the dump has its name. A module's fingerprint then becomes the identity of the
    program, as it is equal on all ranks.

    Args:
        tables: of any reader.
        modules: for instance of `thence.readers.xla.hlo_files.hlo_dump_modules`.
    """
    before = len(tables.hlo)
    programs = tables.programs.join(
        _matches(tables.programs, modules), on=["program", "name"], how="left", nulls_equal=True,
        maintain_order="left",
    )  # fmt: skip
    lacking = programs["hlo"].is_null()
    changed = programs.with_columns(
        hlo=pl.coalesce("hlo", (pl.col("module") + before).cast(pl.Int32)),
        program=pl.when(lacking & pl.col("fingerprint").is_not_null())
        .then("fingerprint")
        .otherwise("program"),
    )
    attached = Tables(
        gpu=tables.gpu,
        host=tables.host,
        collectives=tables.collectives,
        threads=tables.threads,
        programs=changed.select(tables.programs.columns).cast(tables.programs.schema),
        hlo=(*tables.hlo, *modules),
        meta=tables.meta,
    )
    found = _collectives(attached, before)
    warnings = _warnings(programs, modules)
    merged = pl.concat([tables.collectives, found]).sort("gpu", "host", nulls_last=True)
    return dataclasses.replace(attached, collectives=merged).with_warnings(warnings)


def _matches(programs: pl.DataFrame, modules: Sequence[HloModule]) -> pl.DataFrame:
    """Module and its fingerprint, for pairs of program and name that lack one."""
    by_number = {f"{m.name}.{m.id}": place for place, m in enumerate(modules)}
    names = [m.name for m in modules]
    rows = []
    wanted = programs.filter(pl.col("hlo").is_null()).select("program", "name").unique()
    for program, name in wanted.rows():
        # Programs without a number are those that the autotuner times: no dump holds their HLO.
        place = by_number.get(program or "")
        if place is None and program is not None and names.count(name) == 1:
            place = names.index(name)
        if place is not None:
            rows.append((program, name, place, modules[place].fingerprint))
    schema = {"program": pl.Categorical(), "name": pl.Categorical(), "module": pl.Int64(),
              "fingerprint": pl.Categorical()}  # fmt: skip
    return pl.DataFrame(rows, schema=schema, orient="row")


def _collectives(tables: Tables, first: int) -> pl.DataFrame:
    """Collectives of the modules from ``first`` on: one row each, that of its longest activity."""
    described = [
        collectives(module).select(
            pl.lit(first + place, pl.Int32).alias("module"),
            pl.col("name").cast(pl.Categorical()).alias("hlo"),
            "collective",
            pl.col("message_bytes").alias("bytes"),
            "group_size",
        )
        for place, module in enumerate(tables.hlo[first:])
    ]
    if not described:
        return COLLECTIVES.empty()
    of_program = tables.programs.select(
        pl.int_range(pl.len(), dtype=pl.Int32).alias("program"), pl.col("hlo").alias("module")
    )
    known = tables.collectives["gpu"].drop_nulls().implode()
    ran = (
        tables.gpu.select(
            pl.int_range(pl.len(), dtype=pl.Int32).alias("gpu"),
            "kind",
            "program",
            "hlo",
            "iteration",
            "duration",
        )
        .filter(pl.col("kind").is_in(["kernel", "thunk"]), ~pl.col("gpu").is_in(known))
        .join(of_program, on="program")
        .join(pl.concat(described).unique(["module", "hlo"], keep="first"), on=["module", "hlo"])
        .sort("duration", "gpu", descending=[True, False])
        .unique(["program", "hlo", "iteration"], keep="first", maintain_order=True)
    )
    return COLLECTIVES.frame(ran.select("gpu", "collective", "bytes", "group_size").to_dict())


def _warnings(programs: pl.DataFrame, modules: Sequence[HloModule]) -> list[str]:
    used = programs.filter(pl.col("hlo").is_null())["module"].drop_nulls().n_unique()
    missing = programs.filter(
        pl.col("hlo").is_null() & pl.col("module").is_null() & pl.col("program").is_not_null()
    )["name"].cast(pl.String).unique().sort()  # fmt: skip
    warnings = []
    if not used:
        warnings.append(
            f"none of the {len(modules)} HLO modules given belongs to a program of the trace"
        )
    elif len(missing):
        warnings.append(f"no HLO was given for the programs {', '.join(missing)}")
    return warnings
