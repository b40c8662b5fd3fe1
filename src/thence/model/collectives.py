"""What describes a collective: its columns, and Kineto's name for each of them.

A description travels under Kineto's names where the format says so: as arguments of events, as metadata of
marks, in labels of captured graphs. Readers make typed columns of it, once. Recorded processes import this
module: it needs no table library until columns are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

__all__ = [
    "KINETO_KEYS",
    "NUMBERS",
    "TEXTS",
    "CallFacts",
    "Collective",
    "described",
    "described_structs",
    "split",
]

KINETO_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "collective": "Collective name",
        "element_type": "dtype",
        "group_name": "Process Group Name",
        "group_description": "Process Group Description",
        "group_ranks": "Process Group Ranks",
        "in_splits": "In split size",
        "out_splits": "Out split size",
        "in_elements": "In msg nelems",
        "out_elements": "Out msg nelems",
        "group_size": "Group size",
        "sequence": "Seq",
        "source_rank": "Src Rank",
        "destination_rank": "Dst Rank",
    }
)
"""Columns of `thence.model.tables.COLLECTIVES`, and Kineto's name for each."""
TEXTS = (
    *("collective", "element_type", "group_name", "group_description", "group_ranks"),
    *("in_splits", "out_splits"),
)
"""Columns that are text."""
NUMBERS = tuple(name for name in KINETO_KEYS if name not in TEXTS)
"""Columns that are whole numbers, none of them negative."""

_COLUMN_OF = {key: name for name, key in KINETO_KEYS.items()}
_INT32 = ("group_size", "source_rank", "destination_rank")
_MOST_ELEMENTS = 1 << 50
# Bytes per element of c10::ScalarType, as it prints itself (c10/core/ScalarType.h).
_ELEMENT_BYTES = {
    "Byte": 1, "Char": 1, "Short": 2, "Int": 4, "Long": 8, "Half": 2, "Float": 4, "Double": 8,
    "ComplexHalf": 4, "ComplexFloat": 8, "ComplexDouble": 16, "Bool": 1, "BFloat16": 2,
    "Float8_e5m2": 1, "Float8_e4m3fn": 1, "Float8_e5m2fnuz": 1, "Float8_e4m3fnuz": 1,
    "Float8_e8m0fnu": 1, "Float4_e2m1fn_x2": 1, "UInt16": 2, "UInt32": 4, "UInt64": 8,
    "QInt8": 1, "QUInt8": 1, "QInt32": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Collective:
    """One description, as columns of `thence.model.tables.COLLECTIVES`; None for what is not known."""

    collective: str
    element_type: str | None = None
    group_name: str | None = None
    group_description: str | None = None
    group_ranks: str | None = None
    in_splits: str | None = None
    out_splits: str | None = None
    in_elements: int | None = None
    out_elements: int | None = None
    group_size: int | None = None
    sequence: int | None = None
    source_rank: int | None = None
    destination_rank: int | None = None


class CallFacts(dict[str, object]):
    """Metadata of a mark around one call of a collective, under Kineto's names.

    Attributes:
        shared: the same facts but for the number of the call: one dict for all calls like it.
    """

    __slots__ = ("shared",)

    def __init__(self, shared: dict[str, object]) -> None:
        super().__init__(shared)
        self.shared = shared


def split(metadata: Mapping[str, Any]) -> tuple[Collective | None, Mapping[str, Any]]:
    """The collective that metadata describe, and the metadata without it.

    Without the name of a collective there is none, and its words, such as dtype, may mean anything.
    """
    if not isinstance(metadata.get(KINETO_KEYS["collective"]), str):
        return None, metadata
    known: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in metadata.items():
        name = _COLUMN_OF.get(key)
        if name is None:
            rest[key] = value
        elif name in TEXTS:
            known[name] = None if value is None else str(value)
        elif type(value) is int and 0 <= value < 1 << 62:
            known[name] = value
    return Collective(**known), rest


def described(raw: Mapping[str, Any]) -> pl.DataFrame:
    """The columns of `thence.model.tables.COLLECTIVES` that describe a collective, `bytes` among them.

    The message size is what one rank puts in, of a reduce-scatter what it gets.

    Args:
        raw: `TEXTS` and `NUMBERS` by their names, each a sequence of one value a row. Empty text, negative
            numbers and numbers that cannot be true stand for nothing.
    """
    import polars as pl

    from thence.model.tables import COLLECTIVES, DESCRIBED

    frame = pl.DataFrame(
        [pl.Series(name, raw[name], pl.String) for name in TEXTS]
        + [pl.Series(name, raw[name]).cast(pl.Int64) for name in NUMBERS]
    )
    elements = ("in_elements", "out_elements")
    frame = frame.with_columns(
        pl.col(*TEXTS).replace("", None), *(_known_number(name) for name in NUMBERS)
    ).with_columns(pl.col(*elements).clip(None, _MOST_ELEMENTS))
    sizes = pl.col("element_type").replace_strict(
        _ELEMENT_BYTES, default=None, return_dtype=pl.Int64
    )
    scatters = pl.col("collective").str.contains("reduce_scatter", literal=True)
    moved = pl.when(scatters).then("out_elements").otherwise("in_elements")
    frame = frame.with_columns(bytes=moved * sizes)
    return frame.select(pl.col(name).cast(COLLECTIVES.schema[name]) for name in DESCRIBED)


def _known_number(name: str) -> pl.Expr:
    import polars as pl

    most = 1 << 31 if name in _INT32 else 1 << 62
    return pl.when(pl.col(name).is_between(0, most, closed="left")).then(pl.col(name))


def described_structs(collectives: Sequence[Collective | None]) -> pl.Series:
    """Descriptions as one column, as `thence.model.tables.GRAPH_PLACES` has it; None gives null."""
    import polars as pl

    from thence.model.tables import GRAPH_PLACES

    known = [one for one in collectives if one is not None]
    columns = {
        name: pl.Series([getattr(one, name) for one in known], dtype=dtype)
        for names, dtype in ((TEXTS, pl.String), (NUMBERS, pl.Int64))
        for name in names
    }
    structs = described(columns).to_struct().cast(GRAPH_PLACES.schema["collective"])
    number = iter(range(len(known)))
    rows = [None if one is None else next(number) for one in collectives]
    return structs.gather(pl.Series(rows, dtype=pl.UInt32))
