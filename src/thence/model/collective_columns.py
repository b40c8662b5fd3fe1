"""Converts descriptions of collectives to typed columns of the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from thence.model.collectives import NUMBERS, TEXTS
from thence.model.tables import COLLECTIVES, DESCRIBED, GRAPH_PLACES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thence.model.collectives import Collective

__all__ = ["described", "described_structs"]

_INT32 = ("group_size", "source_rank", "destination_rank")
_MOST_ELEMENTS = 1 << 50
# Bytes per element, by the names that c10::ScalarType prints (c10/core/ScalarType.h).
_ELEMENT_BYTES = {
    "Byte": 1, "Char": 1, "Short": 2, "Int": 4, "Long": 8, "Half": 2, "Float": 4, "Double": 8,
    "ComplexHalf": 4, "ComplexFloat": 8, "ComplexDouble": 16, "Bool": 1, "BFloat16": 2,
    "Float8_e5m2": 1, "Float8_e4m3fn": 1, "Float8_e5m2fnuz": 1, "Float8_e4m3fnuz": 1,
    "Float8_e8m0fnu": 1, "Float4_e2m1fn_x2": 1, "UInt16": 2, "UInt32": 4, "UInt64": 8,
    "QInt8": 1, "QUInt8": 1, "QInt32": 4,
    # The same types by the names that torch.dtype prints, which annotations of CUDA graphs hold.
    "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16, "bool": 1, "bfloat16": 2, "uint16": 2, "uint32": 4,
    "uint64": 8, "float8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2fnuz": 1, "float8_e4m3fnuz": 1,
    "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
}  # fmt: skip


def described(raw: Mapping[str, Any]) -> pl.DataFrame:
    """The columns of `thence.model.tables.COLLECTIVES` that describe a collective, including ``bytes``.

    ``bytes`` is the message size: the size of one rank's input, or of its output for a reduce-scatter.

    Args:
        raw: the columns `TEXTS` and `NUMBERS` by name, each a sequence with one value per row. Empty text, negative
            numbers and impossibly large numbers become null.
    """
    frame = pl.DataFrame(
        [pl.Series(name, raw[name], pl.String) for name in TEXTS]
        + [pl.Series(name, raw[name]).cast(pl.Int64) for name in NUMBERS]
    )
    elements = ("in_elements", "out_elements")
    frame = frame.with_columns(
        pl.col(*TEXTS).replace("", None), *(_known_number(name) for name in NUMBERS)
    ).with_columns(pl.col(*elements).clip(None, _MOST_ELEMENTS))
    sizes = (
        pl.col("element_type")
        .str.strip_prefix("torch.")
        .replace_strict(_ELEMENT_BYTES, default=None, return_dtype=pl.Int64)
    )
    scatters = pl.col("collective").str.contains("reduce_scatter", literal=True)
    moved = pl.when(scatters).then("out_elements").otherwise("in_elements")
    frame = frame.with_columns(bytes=moved * sizes)
    return frame.select(pl.col(name).cast(COLLECTIVES.schema[name]) for name in DESCRIBED)


def _known_number(name: str) -> pl.Expr:
    most = 1 << 31 if name in _INT32 else 1 << 62
    return pl.when(pl.col(name).is_between(0, most, closed="left")).then(pl.col(name))


def described_structs(collectives: Sequence[Collective | None]) -> pl.Series:
    """Descriptions as one struct column of `thence.model.tables.GRAPH_PLACES`; None becomes null."""
    descriptions = [collective for collective in collectives if collective is not None]
    columns = {
        name: pl.Series([getattr(collective, name) for collective in descriptions], dtype=dtype)
        for names, dtype in ((TEXTS, pl.String), (NUMBERS, pl.Int64))
        for name in names
    }
    structs = described(columns).to_struct().cast(GRAPH_PLACES.schema["collective"])
    number = iter(range(len(descriptions)))
    rows = [None if collective is None else next(number) for collective in collectives]
    return structs.gather(pl.Series(rows, dtype=pl.UInt32))
