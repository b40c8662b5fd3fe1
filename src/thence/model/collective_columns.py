"""Converts descriptions of collectives to typed columns of the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.model.collectives import NUMBERS, TEXTS
from thence.model.columns import nullable, values_or
from thence.model.tables import COLLECTIVES, DESCRIBED, GRAPH_PLACES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from thence.model.collectives import Collective

_INT32 = ("group_size", "source_rank", "destination_rank")
_LIMITS = np.array([[1 << 31 if name in _INT32 else 1 << 62] for name in NUMBERS])
_MAX_ELEMENTS = 1 << 50
_UNKNOWN = -1
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


def described(raw: Mapping[str, Any]) -> dict[str, pl.Series]:
    """The columns of `thence.model.tables.COLLECTIVES` that describe a collective, with ``bytes``; no empty texts.

    ``bytes`` is the message size: the size of one rank's input, or of its output for a reduce-scatter.

    Args:
        raw: the columns `TEXTS` and `NUMBERS` by name, each a sequence with one value per row. Empty text, negative
            numbers and impossibly large numbers become null.
    """
    texts = {name: [text or None for text in raw[name]] for name in TEXTS}
    numbers = np.stack([_integers(raw[name]) for name in NUMBERS])
    known = np.where((numbers >= 0) & (numbers < _LIMITS), numbers, _UNKNOWN)
    columns = dict(zip(NUMBERS, known, strict=True))
    for name in ("in_elements", "out_elements"):
        columns[name] = np.minimum(columns[name], _MAX_ELEMENTS)
    scatters = np.array(["reduce_scatter" in (text or "") for text in texts["collective"]], np.bool_)
    size = [_ELEMENT_BYTES.get((text or "").removeprefix("torch."), _UNKNOWN) for text in texts["element_type"]]
    element, moved = np.array(size, np.int64), np.where(scatters, columns["out_elements"], columns["in_elements"])
    columns["bytes"] = np.where((element < 0) | (moved < 0), _UNKNOWN, moved * element)
    given = {name: pl.Series(values, dtype=pl.String) for name, values in texts.items() if any(values)}
    return given | {name: nullable(values, values == _UNKNOWN) for name, values in columns.items()}


def _integers(values: Any) -> npt.NDArray[np.int64]:
    """The numbers of a column of `NUMBERS`, `_UNKNOWN` for those that are missing."""
    if isinstance(values, np.ndarray) and values.dtype == np.int64:
        return values
    return values_or(pl.Series(values, strict=False).cast(pl.Int64), _UNKNOWN)


def described_frame(raw: Mapping[str, Any]) -> pl.DataFrame:
    """As `described`, with all columns of `DESCRIBED`."""
    return COLLECTIVES.frame(described(raw)).select(DESCRIBED)


def described_structs(collectives: Sequence[Collective | None]) -> pl.Series:
    """Descriptions as one struct column of `thence.model.tables.GRAPH_PLACES`; None becomes null."""
    descriptions = [collective for collective in collectives if collective is not None]
    columns = {
        name: pl.Series([getattr(collective, name) for collective in descriptions], dtype=dtype)
        for names, dtype in ((TEXTS, pl.String), (NUMBERS, pl.Int64))
        for name in names
    }
    structs = described_frame(columns).to_struct().cast(GRAPH_PLACES.schema["collective"])
    number = iter(range(len(descriptions)))
    rows = [None if collective is None else next(number) for collective in collectives]
    return structs.gather(pl.Series(rows, dtype=pl.UInt32))
