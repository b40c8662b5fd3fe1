"""Text for SQL on the terminal: columns of the tables, and result rows as lists if a table is too wide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from thence.analysis.sql import described
from thence.writers.text.frame_table import cells_of

if TYPE_CHECKING:
    import polars as pl
    from rich.console import RenderableType

    from thence.model.tables import Table as Shape


def records(frame: pl.DataFrame) -> RenderableType:
    """The rows as lists, with one line for each column; long texts continue on the next line.

    Args:
        frame: the rows; the names of the columns determine the units, as in `thence.writers.text.frame_table`.
    """
    columns = {name: cells_of(frame, name) for name in frame.columns}
    parts: list[RenderableType] = []
    for row in range(frame.height):
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, cells in columns.items():
            table.add_row(Text(name), Text(cells[row]))
        parts += [Text(f"row {row + 1:,}", "dim"), table]
    return Group(*parts)


def columns_of(shape: Shape) -> RenderableType:
    """The columns of a table with type, unit and meaning."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim", show_edge=False)
    for heading in ("column", "type", "unit"):
        table.add_column(heading, no_wrap=True)
    table.add_column("", overflow="fold")
    for name, kind, unit, meaning in described(shape).rows():
        table.add_row(name, kind, unit or "", Text(meaning))
    return Group(Text.assemble((shape.name, "bold"), f": {shape.meaning}"), table)
