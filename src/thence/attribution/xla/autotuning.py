"""Activities that XLA launched while it compiled, to measure kernels and choose between them (autotuning).

Candidates run as programs without a number. Compiling threads also launch kernels and copies outside of any program,
to fill, compare and copy buffers.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from thence.model.intervals import NEVER, longest_begun
from thence.model.tables import Tables  # noqa: TC001 - named in a signature

_COMPILE = r"^XlaCompile(?::#|$)"
_THREAD = ["rank", "process", "thread"]


def autotuned(tables: Tables) -> pl.Series:
    """Whether each row of ``tables.gpu`` ran as part of a compilation, if the trace shows it."""
    count = tables.gpu.height
    compiling = tables.host.filter(pl.col("category") == "compile")
    if compiling.is_empty():
        return pl.Series("autotuned", [False]).new_from_index(0, count)
    unnumbered = tables.programs["program"].is_null()
    of_program = tables.gpu["program"]
    candidate = unnumbered.gather(of_program.cast(pl.UInt32)).fill_null(value=False)
    calls = (
        tables.gpu.with_row_index("row")
        .filter(pl.col("program").is_null() & (pl.col("correlation") != 0))
        .select("row", "rank", "correlation")
        .join(
            tables.host.filter(pl.col("correlation").is_not_null())
            .unique(["rank", "correlation"], keep="none")
            .select(*_THREAD, "correlation", pl.col("start").alias("launched")),
            on=["rank", "correlation"],
        )
        .join(compiling.select(_THREAD).unique(), on=_THREAD, how="semi")
    )
    mask = candidate.to_numpy().copy()
    for (rank,), part in calls.group_by("rank"):
        ranges = compiling.filter((pl.col("rank") == rank) & pl.col("name").cast(pl.String).str.contains(_COMPILE))
        end = (ranges["start"] + ranges["duration"]).to_numpy()
        launched = part["launched"].to_numpy()
        around = longest_begun(ranges["start"].to_numpy(), end, launched)
        ends = np.append(end, NEVER)[around]  # the last entry is for `NO_ROW`
        mask[part["row"].to_numpy()] = launched <= ends
    return pl.Series("autotuned", mask)
