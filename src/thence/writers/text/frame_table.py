"""Any result frame as a table for people: the unit in a column's name decides how it is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from thence.units import format_bytes, format_count, format_ns, format_share
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import polars as pl
    from rich.console import RenderableType

__all__ = ["frame_table", "not_shown"]

_TEXT_WIDTH = 40
"""Most columns that a text takes; longer ones continue on the next line."""

_UNITS: dict[str, Callable[[float], str]] = {
    "_ns": format_ns,
    "duration": format_ns,
    "_ms": lambda value: format_ns(value * 1e6),
    "bytes": format_bytes,
    "shared_memory": format_bytes,
    "share": lambda value: format_share(value, 1),
}
"""How a number is shown, by what the name of its column contains."""


def frame_table(frame: pl.DataFrame, headings: Mapping[str, str], width: int) -> RenderableType:
    """One line per row; numbers to the right, times, sizes and shares in readable units.

    Args:
        frame: columns with ``_ns`` in the name or called ``duration`` are ns, ``_ms`` ms, ``bytes``
            bytes, ``share`` a fraction.
        headings: the columns that may be shown, the most important first, with their headings.
        width: columns of the terminal; what does not fit is left out, from the end, and named below.
    """
    cells = {column: [_shown(column, value) for value in frame[column]] for column in headings}
    needed = {
        column: max(map(len, [heading, *cells[column]])) for column, heading in headings.items()
    }
    folds = sum(columns + 2 for columns in needed.values()) > width
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", show_edge=False)
    shown: list[str] = []
    left = width
    for column, heading in headings.items():
        columns = needed[column]
        numeric = frame.schema[column].is_numeric()
        if numeric and columns > left:
            break
        if numeric:
            table.add_column(escape(heading), justify="right", no_wrap=True)
        else:
            if folds:
                columns = min(columns, max(_TEXT_WIDTH, len(heading)))
            table.add_column(escape(heading), width=columns, overflow="fold")
        shown.append(column)
        left -= columns + 2
    for row in zip(*(cells[column] for column in shown), strict=True):
        table.add_row(*map(Text, row))
    hidden = [heading for column, heading in headings.items() if column not in shown]
    return Group(table, Text(not_shown(hidden), "dim")) if hidden else table


def not_shown(headings: Sequence[str]) -> str:
    """The line that names columns that did not fit."""
    return (
        f"no room for: {', '.join(headings)}; a wider terminal, a pipe or --format csv shows them"
    )


def _shown(column: str, value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return printable(str(value))
    for mark, show in _UNITS.items():
        if mark in column:
            return show(value)
    return f"{value:,.2f}" if isinstance(value, float) else format_count(value)
