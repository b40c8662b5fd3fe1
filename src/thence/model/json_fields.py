"""Types of the fields of JSON that thence reads, with their ranges, and the one way to decode it.

JSON may come from anybody, and its integers have any size. So every document is decoded into a msgspec Struct whose
integers have a range: what a column of the tables can hold, or less. `tests/style/test_json.py` checks that no field
lacks one. Structs ignore fields that they do not name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

_Kind = TypeVar("_Kind")

JsonInt64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""What a column of Int64 holds: times, ids, numbers of any kind."""
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A number of things, a size or a Unix time."""
JsonUInt32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
"""What CUDA numbers with 32 bits: graphs and their nodes."""
Index = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
"""A position in a list; -1 is none."""
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""A rank, or a device: the tables hold them as Int32."""


class NotAsWritten(ValueError):
    """A text is no JSON, or not of the expected structure; the message says where and why."""


def decoded(content: bytes | str, kind: type[_Kind]) -> _Kind:
    """The JSON document of this kind.

    Args:
        kind: a Struct, or any other type that msgspec decodes; its integers have ranges.

    Raises:
        NotAsWritten: the text is cut, is not JSON, or has a field of another type or out of its range.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except RecursionError as error:
        raise NotAsWritten("it is nested too deeply") from error
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise NotAsWritten(str(error)) from error


def field(values: Mapping[str, Any], name: str, kind: Any) -> Any:
    """A field of a JSON object whose other fields are kept if this one is damaged.

    Returns:
        The value; None if it is missing, of another type or out of its range.
    """
    try:
        return msgspec.convert(values.get(name), kind)
    except msgspec.ValidationError:
        return None
