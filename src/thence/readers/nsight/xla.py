"""Program and HLO instruction of each activity, and compile ranges, from XLA's NVTX ranges.

The rules are those of the nsys-jax reader: the innermost of nested thunks launched the work, and the
work belongs to the innermost program (XlaModule) around the thunk.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import polars as pl

from thence.model.columns import row_numbers
from thence.model.intervals import NO_ROW, chain_to
from thence.model.tables import PROGRAMS, Tables
from thence.readers.nsight.ranges import XLA
from thence.readers.nsys_jax.programs import (
    MODULE,
    PROGRAM_ID,
    THUNK,
    Launchers,
    Projection,
    compile_ranges,
    device_tables,
)

if TYPE_CHECKING:
    from thence.model.arrays import Int64

_COMMAND_BUFFER = r"^command_buffer(?:_\d+)?$"
"""HLO op of a thunk that launches a CUDA graph made by XLA (a command buffer); it is not an HLO instruction."""


def with_compilation(ranges: pl.DataFrame, path: str) -> pl.DataFrame:
    """The NVTX ranges, with the category of XLA's compilation ranges set to compile."""
    xla_ranges = ranges.filter(pl.col("domain") == XLA)
    if xla_ranges.is_empty():
        return ranges
    compiled = compile_ranges(
        xla_ranges.select(
            Name=pl.col("name").cast(pl.String), Start="start",
            End=pl.col("start") + pl.col("duration"), PID="process", TID="thread",
        ),
        path,
    )  # fmt: skip
    keys = ["process", "thread", "start", "duration", "name"]
    compile_keys = compiled.select(keys).with_columns(pl.col("name").cast(pl.Categorical())).unique()
    joined = ranges.join(
        compile_keys.with_columns(compiles=pl.lit(value=True)), on=keys, how="left", maintain_order="left"
    )
    compiles = pl.col("compiles").fill_null(value=False) & (pl.col("domain") == XLA)
    category = pl.when(compiles).then(pl.lit("compile")).otherwise(pl.col("category"))
    return joined.with_columns(category.alias("category")).drop("compiles")


def with_programs(tables: Tables, domain: pl.Series, launch: Int64, created: Int64) -> tuple[Tables, list[str]]:
    """The tables with programs, and each activity's program, HLO instruction and iteration.

    One thunk launches everything that XLA put into a CUDA graph (a command buffer). The instruction of
    such an activity is the instruction of the thunk that was open when the activity's graph node was created.

    Args:
        tables: with gpu and host.
        domain: NVTX domain of each host row.
        launch: host row that launched each activity, `NO_ROW` if unknown.
        created: host row around the creation of each activity's graph node, `NO_ROW` if there is none.

    Returns:
        The tables, unchanged if no host range is a thunk or program of XLA; and warnings.
    """
    host = tables.host
    names = _names(host["name"], domain)
    is_thunk, is_module = (names[c].is_not_null().to_numpy() for c in ("hlo", "module"))
    if not (is_thunk.any() or is_module.any()):
        return tables, []
    parent = row_numbers(host["parent"])
    activities = tables.gpu.select(
        *("rank", "device", "start"),
        end=pl.col("start") + pl.col("duration"),
        thunk=chain_to(parent, launch, is_thunk),
        module=chain_to(parent, launch, is_module),
        recorded=chain_to(parent, created, is_thunk),
    )
    placed = _ActivitiesByThunk.of(activities)
    parts, programs, warnings = [], [PROGRAMS.empty()], []
    for rank in sorted(placed.thunks["rank"].unique()):
        projected, launchers = placed.projection(rank, names, host)
        device_part, more = device_tables(projected, launchers, {})
        before = sum(part.height for part in programs)
        rows = pl.col("correlation").alias("group")
        parts.append(device_part.gpu.select(rows, pl.col("program") + before, "hlo", "iteration"))
        programs.append(device_part.programs)
        warnings += more
    if not parts:
        return tables, []
    joined = placed.group.to_frame("group").join(pl.concat(parts), on="group", how="left", maintain_order="left")
    gpu = tables.gpu.with_columns(joined["program"], joined["hlo"], joined["iteration"])
    return dataclasses.replace(tables, gpu=gpu, programs=pl.concat(programs)), warnings


def _names(name: pl.Series, domain: pl.Series) -> pl.DataFrame:
    """Columns hlo, module and id of each host row, null for rows that are not ranges of XLA."""
    is_xla = domain == XLA
    text = pl.col("name").cast(pl.String)
    hlo = text.str.extract(THUNK)
    names_by_text = name.filter(is_xla).unique().to_frame("name").with_columns(
        # A command buffer runs many instructions: "" marks a thunk without an instruction of its own.
        hlo=pl.when(hlo.str.contains(_COMMAND_BUFFER)).then(pl.lit("")).otherwise(hlo),
        module=text.str.extract(MODULE),
        id=text.str.extract(PROGRAM_ID).cast(pl.Int64),
    )  # fmt: skip
    return (
        pl.DataFrame({"name": name.set(~is_xla.fill_null(value=False), None)})
        .join(names_by_text, on="name", how="left", maintain_order="left")
        .drop("name")
    )


@dataclasses.dataclass(frozen=True)
class _ActivitiesByThunk:
    """Activities grouped by the thunk and program that launched them.

    Attributes:
        thunks: one row per thunk, program and device: rank, device, thunk, recorded, module (host rows),
            start, end and group (the number of the row).
        modules: one row per program and device: rank, device, module, start, end.
        group: group in ``thunks`` of each activity; null outside XLA's programs.
    """

    thunks: pl.DataFrame
    modules: pl.DataFrame
    group: pl.Series

    @classmethod
    def of(cls, activities: pl.DataFrame) -> _ActivitiesByThunk:
        inside = activities.filter((pl.col("thunk") != NO_ROW) | (pl.col("module") != NO_ROW))
        spans = (pl.col("start").min(), pl.col("end").max())
        keys = ["rank", "device", "thunk", "recorded", "module"]
        thunks = inside.group_by(keys, maintain_order=True).agg(spans)
        thunks = thunks.with_row_index("group").with_columns(pl.col("group").cast(pl.Int64))
        modules = inside.filter(pl.col("module") != NO_ROW)
        modules = modules.group_by("rank", "device", "module", maintain_order=True).agg(spans)
        group = activities.join(thunks.select("group", *keys), on=keys, how="left", maintain_order="left")
        return cls(thunks, modules, group["group"])

    def projection(self, rank: int, names: pl.DataFrame, host: pl.DataFrame) -> tuple[Projection, Launchers]:
        """One rank's thunks and programs in the tables of the nsys-jax reader.

        That reader derives the device from the launching thread. Here the device is known, so the column
        thread holds the device number.
        """
        lasting = (pl.col("end") - pl.col("start")).alias("duration")
        place = (pl.lit(0, pl.Int64).alias("process"), pl.col("device").cast(pl.Int64).alias("thread"))
        modules = self.modules.filter(pl.col("rank") == rank).with_row_index("number")
        thunks = self.thunks.filter(pl.col("rank") == rank).join(
            modules.select("device", "module", "number"), on=["device", "module"], how="left",
            maintain_order="left",
        )  # fmt: skip
        rows = thunks["recorded"].zip_with(thunks["recorded"] != NO_ROW, thunks["thunk"])
        hlo = names["hlo"].gather(rows.set(rows == NO_ROW, None).cast(pl.UInt32))
        launched = host.select("start", "duration")[modules["module"].cast(pl.UInt32)]
        of_modules = names.select("module", "id")[modules["module"].cast(pl.UInt32)]
        projected = Projection(
            thunks=thunks.select(
                hlo.replace("", None).alias("hlo"), "start", lasting, *place,
                pl.col("number").cast(pl.Int64).alias("module"), correlation="group",
            ),
            modules=modules.select(
                of_modules["module"].alias("name"), of_modules["id"], "start", lasting, *place,
                launched["start"].alias("launch"), launched["duration"].alias("launch_duration"),
            ),
            unreadable=0,
        )  # fmt: skip
        used = thunks["device"].unique().to_list()
        return projected, Launchers(rank, 0, {(0, device): device for device in used})
