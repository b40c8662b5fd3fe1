"""NVTX ranges of an export: push/pop and start/end ranges with their names and domains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from thence.readers.kineto.categories import category_of
from thence.readers.nsight.store import process_of, thread_of
from thence.readers.nsight.times import lasting

if TYPE_CHECKING:
    from thence.readers.nsight.store import Store

__all__ = ["LIBRARIES", "NCCL", "XLA", "Nvtx", "nvtx"]

NCCL = "NCCL"
XLA = "TSL"
"""Domains of ranges that NCCL and XLA open (nccl/src/include/nvtx.h, tsl/profiler/lib/nvtx_utils)."""

LIBRARIES = r"(?i)^(?:NCCL|TSL|XLA|CCCL|NVSHMEM|cu(?:BLAS|DNN|SPARSE|SOLVER|FFT|RAND|TENSOR|DF|ML).*|libcu.*|RAPIDS.*)$"
"""Domains that libraries open for ranges of their own."""

# ENUM_NSYS_EVENT_TYPE of the exporter schema reference.
_THREAD_NAME, _PUSH_POP, _START_END, _DOMAIN = 39, 59, 60, 75
_OPERATOR = r"^(?:aten|c10d|prims|torchvision|autograd)::"  # torch.autograd.profiler.emit_nvtx
_COLUMNS = (
    *("start", "end", "eventType", "globalTid", "endGlobalTid"),
    *("textId", "domainId", "rangeId"),
)


@dataclass(frozen=True)
class Nvtx:
    """What a program said through NVTX.

    Attributes:
        ranges: start, duration (ns), process, thread, name, domain (name; null is the default one),
            category and row (in NVTX_EVENTS, from 0).
        threads: names of threads: process, thread, name.
        warnings: what had to be assumed.
    """

    ranges: pl.DataFrame
    threads: pl.DataFrame
    warnings: tuple[str, ...]


def nvtx(store: Store) -> Nvtx:
    """The NVTX ranges of an export.

    Ranges that were open when recording ended last until the last time that any range has.

    Raises:
        DamagedInput: the table cannot be read.
    """
    events = _named(store).with_columns(
        process=process_of(pl.col("globalTid")), thread=thread_of(pl.col("globalTid"))
    )
    kinds = events["eventType"]
    threads = events.filter(kinds == _THREAD_NAME).select(
        "process", "thread", pl.col("name").cast(pl.String)
    )
    domains = (
        events.filter(kinds == _DOMAIN)
        .select("process", "domainId", pl.col("name").alias("domain"))
        .unique(["process", "domainId"], keep="last", maintain_order=True)
    )
    ranges = events.filter(kinds.is_in([_PUSH_POP, _START_END])).join(
        domains, on=["process", "domainId"], how="left", maintain_order="left"
    )
    ranges, warnings = _closed(ranges)
    timed, more = lasting(ranges, "NVTX ranges")
    return Nvtx(
        timed.select(
            *("start", "duration", "process", "thread", "name", "domain", "row"),
            _categories(timed),
        ),
        threads.drop_nulls("name"),
        (*warnings, *more),
    )


def _named(store: Store) -> pl.DataFrame:
    """Events with row and name: their own text, or the registered string."""
    events = store.frame("NVTX_EVENTS", _COLUMNS, ("text",)).with_row_index("row")
    # Exports write the id 0 as null: the domain 0 is the default one, the string 0 a string like any.
    domain = pl.col("domainId").fill_null(0)
    texts = store.strings(events["textId"])
    joined = events.with_columns(domain, pl.col("row").cast(pl.Int64)).join(
        texts, left_on="textId", right_on="id", how="left", maintain_order="left"
    )
    unnamed = pl.lit("(unnamed)").cast(pl.Categorical())
    return joined.with_columns(name=pl.coalesce("text", "value", unnamed)).drop("text", "value")


def _closed(ranges: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    ranges = ranges.filter(pl.col("globalTid").is_not_null())
    still_open = ranges["end"].null_count()
    if not still_open:
        return ranges, []
    last = ranges.select(pl.max_horizontal(pl.col("start").max(), pl.col("end").max())).item()
    sentence = f"{still_open:,} NVTX ranges were open when recording ended and are shown until then"
    return ranges.with_columns(pl.col("end").fill_null(last)), [sentence]


def _categories(ranges: pl.DataFrame) -> pl.Expr:
    """Category of each range: libraries' domains, operators that torch emits, else by name."""
    names = ranges["name"].unique()
    told = pl.DataFrame(
        {"name": names, "told": [category_of("range", str(name)) for name in names]},
        schema={"name": pl.Categorical(), "told": pl.String},
    )
    by_name = ranges.select("name").join(told, on="name", how="left", maintain_order="left")["told"]
    return (
        pl.when(pl.col("domain").cast(pl.String).str.contains(LIBRARIES).fill_null(value=False))
        .then(pl.lit("framework"))
        .when(pl.col("name").cast(pl.String).str.contains(_OPERATOR))
        .then(pl.lit("op"))
        .otherwise(pl.lit(by_name))
        .alias("category")
    )
