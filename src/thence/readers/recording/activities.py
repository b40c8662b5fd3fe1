"""Kernels, copies and memsets of a recording, named as PyTorch's profiler names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.model.names import UNNAMED
from thence.model.tables import GPU, KINDS
from thence.units import several

if TYPE_CHECKING:
    from thence.readers.recording.parts import Folder

# CUpti_ActivityMemcpyKind and CUpti_ActivityMemoryKind of cupti_activity.h, in their order.
_DIRECTIONS = (*("Unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"),)
_MEMORIES = (*("Unknown", "Pageable", "Pinned", "Device", "Array", "Managed"), *("Device Static", "Managed Static"))
_UNENDED = "without an end, because the recording ended first"
_UNTIMED = (
    "without start and end, because CUPTI could not record the times; this happens to work in conditional nodes of "
    "CUDA graphs that were created before the recording began"
)


def activities(folder: Folder, names: pl.DataFrame, zero_ns: int, rank: int) -> tuple[pl.DataFrame, pl.Series]:
    """Rows of `GPU`, sorted by device and start, and when the host queued each (Unix ns; 0 or null: unknown).

    Args:
        folder: the recording.
        names: number and text (Categorical).
        zero_ns: Unix time at which the trace's clock reads 0.
        rank: of the process.
    """
    parts = [_kernels(folder, names), _copies(folder), _sets(folder)]
    shaped = [_as_gpu_rows(part, zero_ns, rank) for part in parts]
    whole = pl.concat(shaped)
    has_times = pl.col("start").is_not_null() & (pl.col("duration") >= 0) & pl.col("device").is_not_null()
    timed, rest = whole.filter(has_times), whole.filter(~has_times.fill_null(value=False))
    # cupti_activity.h: 0 for both means that timestamp information could not be collected.
    untimed = rest.filter(pl.col("start").is_null() & (pl.col("duration") == 0)).height
    _lose(folder, untimed, _UNTIMED)
    _lose(folder, rest.height - untimed, _UNENDED)
    timed = timed.sort("device", "start", "stream", maintain_order=True)
    return timed.drop("queued"), timed["queued"]


def _lose(folder: Folder, count: int, why: str) -> None:
    """Notes a loss for activities that are left out because they have no times, if there are any."""
    if count:
        folder.lose("no_times", count, f"left out: {several(count, 'activity')} {why}")


def _kernels(folder: Folder, names: pl.DataFrame) -> pl.DataFrame:
    frame = folder.table("kernels")
    named = frame.select(pl.col("name").alias("number")).join(names, on="number", how="left", maintain_order="left")
    return frame.with_columns(
        named.select(pl.col("text").fill_null(pl.lit(UNNAMED).cast(pl.Categorical())).alias("name")).to_series(),
        _sizes("grid").alias("grid"),
        _sizes("block").alias("block"),
        kind=pl.lit("kernel"),
        shared_memory=pl.col("static_shared") + pl.col("dynamic_shared"),
    )


def _sizes(name: str) -> pl.Expr:
    columns = [pl.col(f"{name}_{axis}").cast(pl.UInt32, strict=False) for axis in "xyz"]
    return pl.concat_arr(columns)


def _copies(folder: Folder) -> pl.DataFrame:
    text = pl.format(
        "Memcpy {} ({} -> {})",
        _enum_text("copy_kind", _DIRECTIONS),
        _enum_text("source_memory", _MEMORIES),
        _enum_text("destination_memory", _MEMORIES),
    )
    return folder.table("copies").with_columns(name=text, kind=pl.lit("memcpy"))


def _sets(folder: Folder) -> pl.DataFrame:
    text = pl.format("Memset ({})", _enum_text("memory", _MEMORIES))
    return folder.table("sets").with_columns(name=text, kind=pl.lit("memset"))


def _enum_text(column: str, words: tuple[str, ...]) -> pl.Expr:
    return pl.col(column).replace_strict(dict(enumerate(words)), default="Unknown", return_dtype=pl.String)


def _as_gpu_rows(frame: pl.DataFrame, zero_ns: int, rank: int) -> pl.DataFrame:
    inside = pl.col("graph") != 0
    frame = frame.select(
        pl.lit(rank, pl.Int32()).alias("rank"),
        "device",
        "stream",
        pl.col("kind").cast(pl.Enum(KINDS)),
        pl.col("name").cast(pl.Categorical()),
        pl.when(pl.col("start") > 0).then(pl.col("start") - zero_ns).alias("start"),
        (pl.col("end") - pl.col("start")).alias("duration"),
        "correlation",
        pl.when(inside).then(pl.col("graph")).alias("graph"),
        pl.when(inside).then(pl.col("node")).alias("node"),
        *(c for c in ("grid", "block", "registers", "shared_memory", "bytes", "queued") if c in frame.columns),
    )
    return frame.select(
        pl.col(c).cast(dtype, strict=False) if c in frame.columns else pl.lit(None, dtype).alias(c)
        for c, dtype in (GPU.schema | {"queued": pl.Int64()}).items()
    )
