"""Reads HLO modules from dump files (``--xla_dump_to``) and joins them to programs of a trace without HLO."""

from __future__ import annotations

import dataclasses
import glob
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from thence.errors import DamagedInput, InputError
from thence.readers.expansion import DEFAULT, Expansion
from thence.readers.jax.hlo import decode_hlo
from thence.readers.source import check_regular, matching
from thence.units import listed, several

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.model.hlo import HloModule
    from thence.model.tables import Tables

PATTERNS = ("*.hlo.pb", "*.hlo.pb.xz")
"""Files of a directory that hold an HLO module. A dump folder holds each module before and after
optimization; where it does, only the optimized modules count."""


def hlo_dump_modules(path: str, expansion: Expansion = DEFAULT) -> tuple[HloModule, ...]:
    """The optimized HLO modules in a file, in a directory (not in its subdirectories), or in files matching a glob.

    Args:
        path: as the user named it; in a directory, files that match `PATTERNS` count.
        expansion: how much larger than its stored size the content of an xz file may be.

    Raises:
        InputError: a file cannot be read, or nothing is there.
        DamagedInput: a file holds no HLO module.
    """
    modules = []
    for file in _files(path):
        try:
            check_regular(str(file))
            data = file.read_bytes()
        except (OSError, ValueError) as error:
            raise InputError(str(file), f"cannot be opened ({error})") from error
        try:
            modules.append(decode_hlo(data, str(file), expansion))
        except (ValueError, OverflowError) as error:
            raise DamagedInput(str(file), f"its HLO module cannot be read ({error})") from error
    return tuple(modules)


def _files(path: str) -> list[Path]:
    """The files that a path or glob names; only the optimized modules if there are any."""
    place = Path(path)
    if place.is_dir():
        files = sorted({f for pattern in PATTERNS for f in place.glob(pattern) if f.is_file()})
    elif place.exists() or not glob.has_magic(path):
        return [place]
    else:
        files = sorted(file for file in map(Path, matching(path)) if file.is_file())
    if not files:
        raise InputError(path, f"holds no HLO module (looked for {', '.join(PATTERNS)})")
    optimized = [f for f in files if "before_optimizations" not in f.name]
    return optimized or files


def attach_hlo(tables: Tables, modules: Sequence[HloModule]) -> Tables:
    """The tables with HLO for the programs that have none.

    A module belongs to a program if name and number agree (``jit_step.12``), or, where no module has
    that name and number, if it is the only module given that has the program's name. The module's
    fingerprint, which is equal on all ranks, then becomes the identity of the program.
    """
    before = len(tables.hlo)
    programs = tables.programs.join(
        _matches(tables.programs, modules), on=["program", "name"], how="left", nulls_equal=True,
        maintain_order="left",
    )  # fmt: skip
    lacking = programs["hlo"].is_null()
    changed = programs.with_columns(
        hlo=pl.coalesce("hlo", (pl.col("module") + before).cast(pl.Int32)),
        program=pl.when(lacking & pl.col("fingerprint").is_not_null()).then("fingerprint").otherwise("program"),
    )
    return dataclasses.replace(
        tables,
        programs=changed.select(tables.programs.columns).cast(tables.programs.schema),
        hlo=(*tables.hlo, *modules),
    ).with_warnings(_warnings(programs, modules))


def _matches(programs: pl.DataFrame, modules: Sequence[HloModule]) -> pl.DataFrame:
    """Position and fingerprint of the module of each pair of program and name that has no HLO yet."""
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


def _warnings(programs: pl.DataFrame, modules: Sequence[HloModule]) -> list[str]:
    used = programs.filter(pl.col("hlo").is_null())["module"].drop_nulls().n_unique()
    missing = programs.filter(
        pl.col("hlo").is_null() & pl.col("module").is_null() & pl.col("program").is_not_null()
    )["name"].cast(pl.String).unique().sort()  # fmt: skip
    warnings = []
    if not used:
        warnings.append(f"no program of the trace matches the {several(len(modules), 'HLO module')} given")
    elif len(missing):
        warnings.append(f"no HLO was given for {listed(missing.to_list())}")
    return warnings
