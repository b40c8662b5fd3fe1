"""Tables and lines of an answer, as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from thence.units import format_share
from thence.writers.text.frame_table import frame_table
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, RenderableType

    from thence.model.answer import Lines, TableView

_MAX_ROWS = 2000
"""Rows of a table without --top: the layout of a row takes a millisecond."""


def table_of(view: TableView, top: int | None, width: int) -> Iterator[RenderableType]:
    """A table with its title above and the number of rows that are not shown below.

    Args:
        top: most rows; None: as the table says.
        width: of the terminal in characters.
    """
    if view.title:
        yield Text(view.title, "bold")
    shown = view.rows.head(top or view.rows_shown or _MAX_ROWS)
    yield frame_table(shown, view.headings, width, view.ranked)
    if shown.height < view.rows.height:
        left = view.rows.slice(shown.height)
        share = f", {format_share(float(left['share'].sum()), 1)} together" if "share" in left.columns else ""
        yield Text(f"... {left.height:,} more{share}; --top {view.rows.height} shows all", "dim")


def lines_of(view: Lines, top: int | None, output: Console) -> Iterator[Text]:
    """The lines; where their number is limited, with the number of those that are not shown.

    Args:
        top: most of them, if their number is limited; None: `_MAX_ROWS`.
        output: the terminal, at whose width lines are broken.
    """
    count = len(view.lines)
    most = max(top or _MAX_ROWS, view.at_least) if view.limited else count
    for text, style in view.lines[:most]:
        for line in text.split("\n"):
            indent = " " * (len(line) - len(line.lstrip(" ")))
            for piece in Text(printable(line.strip(" "))).wrap(output, max(output.width - len(indent), 1)):
                yield Text(indent + piece.plain.rstrip(), style)
    if count > most:
        first = view.lines[0][0]
        indent = first[: len(first) - len(first.lstrip(" "))]
        yield Text(
            f"{indent}... {count - most:,} more{view.counted and f' {view.counted}'}; --top {count} shows all", "dim"
        )
