"""Result frames as tables for the terminal: the unit in a column's name decides how values are shown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from thence.model.shortened_names import fitted
from thence.units import format_cell
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl
    from rich.console import RenderableType

_TEXT_WIDTH = 40
"""Width in characters up to which a text column grows; longer texts continue on the next line."""

_ELASTIC_TEXT = 20
"""Width in characters to which long texts, such as names, are narrowed first."""

_SHORT_TEXT = 24
"""Width of the longest value up to which a text is short, such as a verdict or a change: it keeps its width as long
as that costs no column of numbers."""

_MIN_TEXT = 12
"""Width to which texts are narrowed before a column of numbers is left out: they go on in further lines, and names
are shortened, before any figure is lost."""

_MAX_LINES = 3
"""Most lines of a text that is wider than its column; longer texts are shortened."""

_NUMBER = r"[-+<]?\d[\d,.]*"
_FIGURES = re.compile(rf"{_NUMBER}(?: (?:{_NUMBER}|to|->|%|[num]?s|[kMGT]?B|\({_NUMBER} %\)))*")
"""A text that is figures, such as a change or an interval."""
_NO_FIGURES = ("", "-", "not known")

_GAP = 2
"""Spaces between two columns of a table."""


def frame_table(
    frame: pl.DataFrame, headings: Mapping[str, str], width: int, ranked: Sequence[str] = ()
) -> RenderableType:
    """A table with one line per row; numbers are right-aligned; times, sizes and shares have readable units.

    Args:
        frame: the table; the names of its columns determine the units: `thence.units.format_cell`.
        headings: the columns that may be shown, in that order, with their headings.
        width: width of the terminal in characters; columns that do not fit are left out and named below.
        ranked: columns that get room before the others, the most important first; the others follow in
            the order of ``headings``.
    """
    by_rank = [*ranked, *(column for column in headings if column not in ranked)]
    cells = {column: cells_of(frame, column) for column in headings}
    needed = {column: max(map(len, [headings[column], *cells[column]])) for column in by_rank}
    numeric = {column for column in headings if frame.schema[column].is_numeric()}
    figures = numeric | {column for column, texts in cells.items() if _are_figures(texts)}
    words = {
        column: max(len(word) for text in ("", headings[column], *texts) for word in text.split(" "))
        for column, texts in cells.items()
    }
    widths = _widths(needed, numeric, figures, words, width)
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", show_edge=False)
    shown = [column for column in headings if column in widths]
    for column in shown:
        columns = widths[column]
        if column in numeric:
            table.add_column(escape(headings[column]), justify="right", no_wrap=True)
        elif column in figures:
            table.add_column(escape(headings[column]), no_wrap=True)
        else:
            table.add_column(escape(headings[column]), width=columns, overflow="fold")
            if columns < needed[column]:
                whole = needed[column] > _SHORT_TEXT or columns >= words[column]
                cells[column] = fitted(cells[column], columns, _MAX_LINES if whole else 1)
    for row in zip(*(cells[column] for column in shown), strict=True):
        table.add_row(*map(Text, row))
    hidden = [heading for column, heading in headings.items() if column not in widths]
    return Group(table, Text(not_shown(hidden), "dim")) if hidden else table


def _are_figures(texts: Sequence[str]) -> bool:
    """Whether a column of texts holds figures, and nothing else but that there are none."""
    given = [text for text in texts if text not in _NO_FIGURES]
    return bool(given) and all(map(_FIGURES.fullmatch, given))


def _widths(
    needed: Mapping[str, int], numeric: set[str], figures: set[str], words: Mapping[str, int], width: int
) -> dict[str, int]:
    """The columns that are shown, with the width of each.

    Columns of figures keep their full width or are left out. If the columns are too wide, the widest text
    columns are made narrower; if that is not enough, the last columns are left out, those of figures only when all
    texts are as narrow as `_MIN_TEXT`.

    Args:
        needed: width of the longest value of each column, the most important column first.
        numeric: columns of numbers.
        figures: columns of numbers, and of texts that are figures.
        words: width of the longest word of each column, its heading included.
        width: width of the terminal.
    """
    if sum(columns + _GAP for columns in needed.values()) <= width:
        return dict(needed)
    wanted = {column: columns if column in figures else min(columns, _TEXT_WIDTH) for column, columns in needed.items()}
    while True:
        long = {c: _ELASTIC_TEXT for c in wanted if c not in figures and needed[c] > _SHORT_TEXT}
        short = {c: max(_MIN_TEXT, words[c]) for c in wanted if c not in figures and c not in long}
        steps = [long]
        last = next(reversed(wanted))
        if last in figures or numeric.isdisjoint(wanted):
            narrow = dict.fromkeys(long, _MIN_TEXT)
            steps += [narrow, narrow | short, dict.fromkeys((*long, *short), _MIN_TEXT)]
        widths = wanted
        for least in steps:
            widths = _narrowed(widths, least, width)
        if len(widths) == 1 or _total(widths) <= width:
            return dict(widths)
        wanted.popitem()


def _narrowed(wanted: Mapping[str, int], least: Mapping[str, int], width: int) -> dict[str, int]:
    """Makes the widest of some columns narrower until all columns fit, none below its least width."""
    widths = dict(wanted)
    while _total(widths) > width:
        wide = [column for column in least if widths[column] > least[column]]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def _total(widths: Mapping[str, int]) -> int:
    return sum(columns + _GAP for columns in widths.values()) - _GAP


def cells_of(frame: pl.DataFrame, column: str) -> list[str]:
    """The values of a column, formatted by its unit."""
    return [printable(format_cell(column, value)) for value in frame[column].to_list()]


def fits(frame: pl.DataFrame, width: int) -> bool:
    """Whether all columns of a frame fit into a table when long texts are folded."""
    needed = (
        (max(map(len, [column, *cells_of(frame, column)])), frame.schema[column].is_numeric())
        for column in frame.columns
    )
    return sum((n if numeric else min(n, _TEXT_WIDTH)) + 2 for n, numeric in needed) <= width


def not_shown(headings: Sequence[str]) -> str:
    """The line that names the columns that did not fit."""
    return f"columns left out: {', '.join(headings)}; a wider terminal, a pipe or --format csv shows all"
