"""XLA in a recording: programs, HLO instructions and compile phases, from XLA's own NVTX ranges.

The ranges are those that nsys records, and `thence.readers.nsight.xla` reads them. What belongs to a CUDA
graph of XLA's own keeps its program but has no instruction here: that follows from the order of the graph's
nodes (`thence.attribution.command_buffers`) and the HLO modules beside the recording.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW
from thence.model.launches import IDENTIFIED, matched_rows
from thence.readers.nsight.nvtx import XLA
from thence.readers.nsight.xla import with_compilation, with_programs
from thence.readers.recording.compiled import compiled_modules, numbered
from thence.readers.xla.attach import attach_hlo

if TYPE_CHECKING:
    from pathlib import Path

    from thence.model.tables import Tables

__all__ = ["compile_phases", "with_xla"]

_NO_RANGES = (
    "it ran XLA programs, but holds no NVTX ranges of XLA, so which kernel is part of which program is not "
    "known: record with thence record -- COMMAND, or begin before JAX is imported, and leave NVTX on"
)


def compile_phases(ranges: pl.DataFrame, name: str) -> pl.Series:
    """The categories of NVTX ranges, those of XLA's compilation being compile.

    Args:
        ranges: thread, name, domain, category (String), start and end (ns), in any order.
        name: of the recording, for messages.
    """
    shaped = ranges.select(
        pl.lit(0, pl.Int64).alias("process"),
        "thread",
        "start",
        (pl.max_horizontal("start", "end") - pl.col("start")).alias("duration"),
        pl.col("name").cast(pl.Categorical()),
        "domain",
        "category",
    )
    return with_compilation(shaped, name)["category"]


def with_xla(tables: Tables, domain: pl.Series, folder: Path) -> tuple[Tables, list[str]]:
    """The tables of one process with XLA's programs, their HLO and their collectives; and warnings.

    Args:
        tables: gpu, host and meta of one process.
        domain: NVTX domain of each host row.
        folder: of the recording.
    """
    has_ranges = bool((domain == XLA).any())
    compiled, warnings = compiled_modules(folder)
    if not has_ranges:
        return tables, [*warnings, *([_NO_RANGES] if compiled else [])]
    nowhere = np.full(tables.gpu.height, NO_ROW, np.int64)
    launches = matched_rows(tables.gpu, tables.host, "correlation", IDENTIFIED)
    tables, more = with_programs(tables, domain, launches, nowhere)
    warnings += more
    if not compiled:
        return tables, warnings
    modules, more = numbered(compiled, tables, domain)
    attached = attach_hlo(tables, modules)
    own = attached.meta.warnings[len(tables.meta.warnings) :]
    return dataclasses.replace(attached, meta=tables.meta), [*warnings, *more, *own]
