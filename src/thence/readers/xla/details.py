"""The texts in which XLA's profiler packs launch and copy parameters.

Written by cupti_collector.cc (ToXStat) as ``key:value`` pairs between blanks:

    kernel_details  regs:22 static_shared:0 dynamic_shared:0 grid:256,1,1 block:256,1,1 occ_pct:100
    memcpy_details  kind_src:device kind_dst:device size:2097152 dest:0 async:1
    Memset_details  kind:device num_bytes:4 async:1
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DETAILS", "parsed_details"]

DETAILS: dict[str, pl.DataType] = {
    "registers": pl.Int32(),  # per thread
    "static_shared": pl.Int64(),  # bytes per block
    "dynamic_shared": pl.Int64(),  # bytes per block
    "shared_memory": pl.Int64(),  # bytes per block, both
    "grid": pl.Array(pl.UInt32, 3),  # blocks
    "block": pl.Array(pl.UInt32, 3),  # threads
    "bytes": pl.Int64(),  # copied or set
    "source_kind": pl.String(),  # device, host, pinned, ...
    "destination_kind": pl.String(),  # of a set: what is set
    "destination_device": pl.Int64(),
    "is_async": pl.Boolean(),
}
"""Schema of parsed details; a text that lacks a key leaves null."""

_NUMBER = re.compile(r"\d{1,18}")
_UINT32 = 1 << 32


def parsed_details(texts: Sequence[str]) -> pl.DataFrame:
    """One row for each text; there are few different ones, however many events refer to them."""
    rows = [_row(dict(_pairs(text))) for text in texts]
    return pl.DataFrame(rows, schema=DETAILS, orient="row")


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(key, value) for key, _, value in (word.partition(":") for word in text.split())]


def _row(values: dict[str, str]) -> tuple[object, ...]:
    static, dynamic = _number(values.get("static_shared")), _number(values.get("dynamic_shared"))
    registers = _number(values.get("regs"))
    flag = values.get("async")
    return (
        registers if registers is not None and registers < 1 << 31 else None,
        static,
        dynamic,
        None if static is None and dynamic is None else (static or 0) + (dynamic or 0),
        _triple(values.get("grid")),
        _triple(values.get("block")),
        _number(values.get("size", values.get("num_bytes"))),
        values.get("kind_src"),
        values.get("kind_dst", values.get("kind")),
        _number(values.get("dest")),
        None if flag is None else flag == "1",
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None


def _triple(text: str | None) -> list[int] | None:
    numbers = [_number(part) for part in (text or "").split(",")]
    found = [n for n in numbers if n is not None and n < _UINT32]
    return found if len(found) == len(numbers) == 3 else None
