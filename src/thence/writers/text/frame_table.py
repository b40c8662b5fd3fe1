"""Any result frame as a table for people: the unit in a column's name decides how it is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from thence.model.fitted_names import fitted
from thence.units import format_cell
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl
    from rich.console import RenderableType

__all__ = ["cells_of", "fits", "frame_table", "not_shown"]

_TEXT_WIDTH = 40
"""Most columns that a text takes; longer ones continue on the next line."""

_MOST_TEXT = 3 * _TEXT_WIDTH
"""Most characters of a text that continues on further lines."""


def frame_table(frame: pl.DataFrame, headings: Mapping[str, str], width: int) -> RenderableType:
    """One line per row; numbers to the right, times, sizes and shares in readable units.

    Args:
        frame: the names of its columns say their units: `thence.units.format_cell`.
        headings: the columns that may be shown, the most important first, with their headings.
        width: columns of the terminal; what does not fit is left out, from the end, and named below.
    """
    cells = {column: cells_of(frame, column) for column in headings}
    needed = {
        column: max(map(len, [heading, *cells[column]])) for column, heading in headings.items()
    }
    folds = sum(columns + 2 for columns in needed.values()) > width
    if folds:
        cells = {
            column: texts if frame.schema[column].is_numeric() else fitted(texts, _MOST_TEXT)
            for column, texts in cells.items()
        }
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


def cells_of(frame: pl.DataFrame, column: str) -> list[str]:
    """The values of a column as people read them."""
    return [printable(format_cell(column, value)) for value in frame[column].to_list()]


def fits(frame: pl.DataFrame, width: int) -> bool:
    """Whether every column of a frame has room in a table, texts folded."""
    needed = (
        (max(map(len, [column, *cells_of(frame, column)])), frame.schema[column].is_numeric())
        for column in frame.columns
    )
    return sum((n if numeric else min(n, _TEXT_WIDTH)) + 2 for n, numeric in needed) <= width


def not_shown(headings: Sequence[str]) -> str:
    """The line that names columns that did not fit."""
    return (
        f"no room for: {', '.join(headings)}; a wider terminal, a pipe or --format csv shows them"
    )
