"""What Kineto says of collectives: arguments of the kernel, or of the host op that started it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.model.tables import COLLECTIVES
from thence.readers.kineto.events import MISSING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

__all__ = [
    "METADATA_KEYS",
    "NUMBER_KEYS",
    "TEXT_KEYS",
    "collective_columns",
    "described_by_metadata",
    "row_after",
]

# Bytes per element of c10::ScalarType, as it prints itself (c10/core/ScalarType.h).
_ELEMENT_BYTES = {
    "Byte": 1, "Char": 1, "Short": 2, "Int": 4, "Long": 8, "Half": 2, "Float": 4, "Double": 8,
    "ComplexHalf": 4, "ComplexFloat": 8, "ComplexDouble": 16, "Bool": 1, "BFloat16": 2,
    "Float8_e5m2": 1, "Float8_e4m3fn": 1, "Float8_e5m2fnuz": 1, "Float8_e4m3fnuz": 1,
    "Float8_e8m0fnu": 1, "Float4_e2m1fn_x2": 1, "UInt16": 2, "UInt32": 4, "UInt64": 8,
    "QInt8": 1, "QUInt8": 1, "QInt32": 4,
}  # fmt: skip


def collective_columns(
    described: dict[str, Any], gpu_order: npt.NDArray[Any], host_order: npt.NDArray[Any]
) -> dict[str, Any]:
    """Columns of the `collectives` table.

    Args:
        described: the ``collective.*`` columns, rows numbered as in the file.
        gpu_order: file row of each row of the gpu table.
        host_order: the same for the host table.
    """

    def number(name: str) -> pl.Series:
        values = described[name]
        return pl.Series(values).set(pl.Series(values < 0), None)

    def text(name: str) -> pl.Series:
        return pl.Series(described[name], dtype=pl.String).replace("", None)

    sizes = pl.Series(described["element_type"], dtype=pl.String).replace_strict(
        _ELEMENT_BYTES, default=None, return_dtype=pl.Int64
    )
    small = {name: number(name).clip(None, 1 << 50) for name in ("in_elements", "out_elements")}
    scatters = pl.Series(described["collective"], dtype=pl.String).str.contains("reduce_scatter")
    moved = pl.select(
        pl.when(scatters).then(small["out_elements"]).otherwise(small["in_elements"])
    ).to_series()
    ranks = {
        name: _int32(number(name)) for name in ("group_size", "source_rank", "destination_rank")
    }
    return {
        "gpu": row_after(described["gpu"], gpu_order),
        "host": row_after(described["host"], host_order),
        "bytes": moved * sizes,
        **small,
        **ranks,
        "sequence": number("collective_sequence"),
        **{name: text(name) for name in (
            "collective", "element_type", "group_name", "group_description", "group_ranks", "in_splits", "out_splits",
        )},
    }  # fmt: skip


TEXT_KEYS = {
    "collective": "Collective name",
    "element_type": "dtype",
    "group_name": "Process Group Name",
    "group_description": "Process Group Description",
    "group_ranks": "Process Group Ranks",
    "in_splits": "In split size",
    "out_splits": "Out split size",
}
NUMBER_KEYS = {
    "in_elements": "In msg nelems",
    "out_elements": "Out msg nelems",
    "group_size": "Group size",
    "sequence": "Seq",
    "source_rank": "Src Rank",
    "destination_rank": "Dst Rank",
}
METADATA_KEYS = frozenset((*TEXT_KEYS.values(), *NUMBER_KEYS.values()))
"""Kineto's names for what a collective moves, as arguments of kernels and of labels; `TEXT_KEYS` and
`NUMBER_KEYS` have them by column of the `collectives` table."""


def described_by_metadata(gpu: pl.Series, metadata: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    """Rows of the `collectives` table for labels that use Kineto's names for what a collective moves.

    Args:
        gpu: rows of gpu.
        metadata: of the label of each, with a "Collective name".
    """

    def number(value: object) -> int:
        usable = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
        return int(value) if usable and isinstance(value, int) else MISSING

    def text(value: object) -> str:
        return "" if value is None else str(value)

    rows = gpu.to_numpy().astype(np.int64)
    described: dict[str, Any] = {
        name: [text(one.get(key)) for one in metadata] for name, key in TEXT_KEYS.items()
    }
    described |= {
        name: np.array([number(one.get(key)) for one in metadata], np.int64)
        for name, key in NUMBER_KEYS.items()
    }
    described["collective_sequence"] = described.pop("sequence")  # as columns of events have it
    described |= {"gpu": np.arange(len(rows)), "host": np.full(len(rows), -1)}
    columns = collective_columns(described, np.arange(len(rows)), np.empty(0, np.int64))
    return COLLECTIVES.frame(columns | {"gpu": rows, "host": [None] * len(rows)})


def row_after(file_rows: npt.NDArray[Any], order: npt.NDArray[Any]) -> pl.Series:
    """Where rows of the file stand in the sorted table."""
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    known = file_rows >= 0
    return pl.Series(
        np.where(known, position[np.where(known, file_rows, 0)] if len(order) else 0, MISSING)
    ).replace(MISSING, None)


def _int32(values: pl.Series) -> pl.Series:
    return values.set(values.fill_null(0) >= 1 << 31, None)
