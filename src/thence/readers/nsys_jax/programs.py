"""Thunks and program executions of one rank as rows of the tables gpu and programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.model.tables import GPU, PROGRAMS, Tables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.model.hlo import HloModule
    from thence.readers.nsys_jax.devices import Launchers
    from thence.readers.nsys_jax.projection import Projection

__all__ = ["device_tables"]


def device_tables(
    ran: Projection, known: Launchers, modules: Mapping[int, HloModule]
) -> tuple[Tables, list[str]]:
    """The tables gpu and programs of one rank, and warnings.

    A program is identified by its fingerprint (equal on all ranks that compiled the same), else by
    name and number, ``jit_step.12``. Programs without a number are those that the autotuner times:
    their identity is null. ``execution`` counts by identity, ``iteration`` by instruction within
    one execution.

    Args:
        ran: what the GPU did.
        known: which thread launches on which device.
        modules: HLO modules by XLA's module number.
    """
    warnings = _warnings(ran, known, modules)
    programs = _programs(_on_devices(ran.modules, known).with_row_index("old"), modules, known.rank)
    thunks = _thunks(_on_devices(ran.thunks, known), programs, known.rank)
    return Tables(
        gpu=GPU.frame(thunks.select(c for c in thunks.columns if c in GPU.schema).to_dict()),
        programs=PROGRAMS.frame(
            programs.select(c for c in programs.columns if c in PROGRAMS.schema).to_dict()
        ),
    ), warnings


def _on_devices(rows: pl.DataFrame, known: Launchers) -> pl.DataFrame:
    """Adds the device; a thread that no name maps drives the first one, as in single-device launches."""
    places = pl.DataFrame(
        [(process, thread, device) for (process, thread), device in known.devices.items()],
        schema={"process": pl.Int64, "thread": pl.Int64, "device": pl.Int32},
        orient="row",
    )
    joined = rows.join(places, on=["process", "thread"], how="left", maintain_order="left")
    return joined.with_columns(pl.col("device").fill_null(known.first))


def _programs(rows: pl.DataFrame, modules: Mapping[int, HloModule], rank: int) -> pl.DataFrame:
    identities = pl.DataFrame(
        [
            (number, module.fingerprint, place)
            for place, (number, module) in enumerate(modules.items())
        ],
        schema={"id": pl.Int64, "fingerprint": pl.String, "hlo": pl.Int32},
        orient="row",
    )
    named = pl.when(pl.col("id").is_not_null()).then(pl.format("{}.{}", "name", "id"))
    order = pl.int_range(pl.len(), dtype=pl.Int32)
    return (
        rows.sort("device", "start", maintain_order=True)
        .join(identities, on="id", how="left", maintain_order="left")
        .with_columns(program=pl.coalesce("fingerprint", named), rank=pl.lit(rank, pl.Int32))
        .with_columns(
            # Without an identity the name has to do.
            execution=order.over(
                "device", "program", pl.when(pl.col("program").is_null()).then("name")
            )
        )
        .with_row_index("row")
    )


def _thunks(rows: pl.DataFrame, programs: pl.DataFrame, rank: int) -> pl.DataFrame:
    numbers = programs.select(
        pl.col("old").cast(pl.Int64).alias("module"), pl.col("row").alias("program")
    )
    order = pl.int_range(pl.len(), dtype=pl.Int32)
    return (
        rows.join(numbers, on="module", how="left", maintain_order="left")
        .sort("device", "start", maintain_order=True)
        .with_columns(
            rank=pl.lit(rank, pl.Int32),
            stream=pl.lit(0, pl.Int64),
            kind=pl.lit("thunk"),
            name=pl.col("hlo"),
            iteration=order.over("device", "program", "hlo"),
        )
        .with_row_index("row")
    )


def _warnings(ran: Projection, known: Launchers, modules: Mapping[int, HloModule]) -> list[str]:
    warnings = []
    if ran.unreadable:
        warnings.append(
            f"{ran.unreadable:,} ranges of thunks or programs have no times and were left out"
        )
    if outside := ran.thunks["module"].null_count():
        warnings.append(
            f"{outside:,} thunks belong to no program: recording began while one was running"
        )
    missing = ran.modules.filter(
        pl.col("id").is_not_null()
        & ~pl.col("id").is_in(pl.Series(list(modules), dtype=pl.Int64).implode())
    )
    if modules and missing.height:
        names = ", ".join(
            sorted(missing.select(pl.format("{}.{}", "name", "id")).to_series().unique())
        )
        warnings.append(f"no HLO for the programs {names}: their collectives are not known")
    threads = ran.modules.select("process", "thread").unique()
    unmapped = sum(pair not in known.devices for pair in threads.rows())
    if unmapped > 1 or (unmapped and len(set(known.devices.values())) > 1):
        warnings.append(
            f"{unmapped} launching threads are not named after a device; what they launched is shown "
            f"on device {known.first}"
        )
    return warnings
