"""Encodes JSON documents as text in pieces, so that a document of many rows is never in memory as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_ROWS = 1000
"""Rows that are converted to text at a time."""
_MIN_CHARACTERS = 1 << 20
"""Fewest characters of a piece, except for the last one. So a value in a short document that cannot be encoded as JSON
is found before the document is written."""


def json_pieces(document: Any) -> Iterator[str]:
    """The text of a document, indented by one space per level, with a line feed at its end.

    Args:
        document: a value that msgspec encodes, a table or a mapping of tables; tables become lists of rows.
    """
    gathered: list[str] = []
    size = 0
    for piece in _parts(document):
        gathered.append(piece)
        size += len(piece)
        if size >= _MIN_CHARACTERS:
            yield "".join(gathered)
            gathered, size = [], 0
    yield "".join((*gathered, "\n"))


def _parts(document: Any) -> Iterator[str]:
    if not isinstance(document, Mapping) or not document:
        yield from _rows(document, 0)
        return
    before = "{"
    for key, value in document.items():
        name = _text({key: None}).removeprefix("{\n ").removesuffix("null\n}")
        yield f"{before}\n {name}"
        yield from _rows(value, 1)
        before = ","
    yield "\n}"


def _rows(value: Any, depth: int) -> Iterator[str]:
    """The text of a value at nesting depth ``depth``; lists and tables are converted some rows at a time."""
    import polars as pl

    line = "\n" + " " * depth  # JSON has line feeds only between values
    if not isinstance(value, pl.DataFrame | list | tuple) or not len(value):
        whole = [] if isinstance(value, pl.DataFrame) else value
        yield _text(whole).replace("\n", line)
        return
    before = "["
    for first in range(0, len(value), _ROWS):
        some = value[first : first + _ROWS]
        rows = some.to_dicts() if isinstance(some, pl.DataFrame) else some
        yield before + _text(rows)[1:-2].replace("\n", line)
        before = ","
    yield line + "]"


def _text(value: Any) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()
