"""Descriptions of collectives: the columns, and Kineto's key for each of them.

Event arguments, metadata of marks and labels of captured graphs use Kineto's keys. Readers convert
the descriptions once to typed columns (`thence.model.collective_columns`). This module imports only the standard
library, because recorded processes import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

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
"""Columns of `thence.model.tables.COLLECTIVES`, and Kineto's key for each."""
TEXTS = (
    *("collective", "element_type", "group_name", "group_description", "group_ranks"),
    *("in_splits", "out_splits"),
)
"""Columns that are text."""
NUMBERS = tuple(name for name in KINETO_KEYS if name not in TEXTS)
"""Columns that are non-negative integers."""

_SIZES = ("in_elements", "out_elements")
_GROUPS = ("group_size", "group_name", "group_description", "group_ranks")
_COLUMN_OF = {key: name for name, key in KINETO_KEYS.items()}


@dataclass(frozen=True, slots=True)
class Collective:
    """Description of one collective, in the columns of `thence.model.tables.COLLECTIVES`; None for unknown values."""

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
    """Metadata of a mark around one call of a collective, under Kineto's keys.

    Attributes:
        shared: the same metadata without the sequence number of the call; all calls that differ only in the number
            share one dict.
    """

    __slots__ = ("shared",)

    def __init__(self, shared: dict[str, object]) -> None:
        super().__init__(shared)
        self.shared = shared


def split(metadata: Mapping[str, Any], label: str | None = None) -> tuple[Collective | None, Mapping[str, Any]]:
    """Splits metadata into the collective that they describe, or None, and the remaining members.

    Metadata without the name of a collective describe none, because keys such as dtype may then mean anything.
    There is one exception: PyTorch's tutorial gives message sizes and process group in the metadata, and names the
    collective in the label. So if the metadata hold both, but not the name, the label becomes the name.

    Args:
        metadata: members under any keys, including `KINETO_KEYS`.
        label: innermost name of the label that has the metadata.
    """
    named = metadata.get(KINETO_KEYS["collective"])
    if not isinstance(named, str):
        if label is None or not (_has(metadata, _SIZES) and _has(metadata, _GROUPS)):
            return None, metadata
        named = label
    described: dict[str, Any] = {"collective": named}
    rest: dict[str, Any] = {}
    for key, value in metadata.items():
        name = _COLUMN_OF.get(key)
        if name is None:
            rest[key] = value
        elif name in TEXTS[1:]:
            described[name] = None if value is None else str(value)
        elif name in NUMBERS and (number := whole_number(value)) is not None:
            described[name] = number
    return Collective(**described), rest


def _has(metadata: Mapping[str, Any], columns: tuple[str, ...]) -> bool:
    return any(metadata.get(KINETO_KEYS[name]) is not None for name in columns)


def whole_number(value: object) -> int | None:
    """A value as a non-negative integer below 2^62, else None. Traces hold some numbers as text."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:  # fewer digits than 2^63 has
        value = int(value)
    return value if type(value) is int and 0 <= value < 1 << 62 else None
