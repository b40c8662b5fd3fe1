"""HTML fragments by which results display themselves in notebooks. Imported by analyses."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from thence.units import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["MOST_ROWS", "table_html"]

MOST_ROWS = 20
"""Rows of a result that a notebook shows."""


def table_html(
    head: tuple[str, str],
    headings: Sequence[str],
    rows: Iterable[tuple[str, Sequence[str]]],
    hidden: int,
    notes: Iterable[str] = (),
) -> str:
    """A heading and a table as an HTML fragment; every text is escaped.

    Args:
        head: what is shown, and a line about all of it.
        headings: of the columns.
        rows: the whole name, shown where the mouse rests, and the text of each column.
        hidden: how many further rows there are.
        notes: sentences below the table.
    """
    above, below = map(escape, head)
    titles = "".join(f"<th>{escape(text)}</th>" for text in headings)
    body = "".join(
        f'<tr><td title="{escape(name)}" style="text-align:left">{escape(first)}</td>'
        + "".join(f"<td>{escape(text)}</td>" for text in others)
        + "</tr>"
        for name, (first, *others) in rows
    )
    more = (
        f"<p>... {format_count(hidden)} more rows in <code>.rows</code></p>" if hidden > 0 else ""
    )
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in notes)
    return (
        f"<div><p><b>{above}</b><br>{below}</p><table><thead><tr>{titles}</tr></thead>"
        f"<tbody>{body}</tbody></table>{more}{paragraphs}</div>"
    )
