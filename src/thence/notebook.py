"""Displays results in notebooks, and converts them to pandas frames. Analyses import this module.

Bars are made of characters, because sites that only show notebooks, such as GitHub, remove styles and scripts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from thence.errors import MissingRequirement
from thence.units import format_cell, format_count, format_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import polars as pl

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
        head: title of the result, and a line about the whole of it.
        headings: of the columns.
        rows: for each row its full name, which is shown on hover, and the text of each column.
        hidden: how many further rows there are.
        notes: sentences below the table.
    """
    above, below = map(escape, head)
    titles = "".join(f"<th>{escape(text)}</th>" for text in headings)
    body = "".join(
        f'<tr><td title="{escape(name)}" style="text-align:left">{escape(first)}</td>'
        + "".join(_column(text) for text in others)
        + "</tr>"
        for name, (first, *others) in rows
    )
    more = f"<p>... {format_count(hidden)} more rows in <code>.rows</code></p>" if hidden > 0 else ""
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in notes)
    return (
        f"<div><p><b>{above}</b><br>{below}</p><table><thead><tr>{titles}</tr></thead>"
        f"<tbody>{body}</tbody></table>{more}{paragraphs}</div>"
    )


def _column(text: str) -> str:
    """A cell after the first column. Notebooks align cells to the right, so bars get an explicit left alignment."""
    style = ' style="text-align:left"' if text and not text.strip("█") else ""
    return f"<td{style}>{escape(text)}</td>"


_BAR = 12
"""Characters of the longest bar."""
_GAUGE = 5
_LONGEST_CELL = 90


@dataclass(frozen=True)
class Form:
    """What a notebook shows of a result.

    Attributes:
        title: of the result.
        about: a line about the whole result, such as totals.
        rows: its main table.
        headings: columns that are shown, with their headings.
        bar: column of numbers that bars show, relative to the largest; empty for none.
        coverage: shares, from 0 to 1, of the time for which something is known, by its name.
        notes: sentences below the table: reasons, what is unsound, warnings.
        full: column with the full name of each row, which is shown on hover; empty: the first of ``headings``.
    """

    title: str
    about: str
    rows: pl.DataFrame
    headings: Mapping[str, str]
    bar: str = ""
    coverage: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()
    full: str = ""

    def html(self) -> str:
        """The form as an HTML fragment."""
        shown = self.rows.head(MOST_ROWS)
        largest = max([value for value in shown[self.bar] if value is not None], default=0) if self.bar else 0
        first = self.full or next(iter(self.headings))
        cells = (
            (
                str(row[first]),
                (
                    *(_cell(column, row[column]) for column in self.headings),
                    *((_bar(row[self.bar] or 0, largest),) if self.bar else ()),
                ),
            )
            for row in shown.iter_rows(named=True)
        )
        headings = (*self.headings.values(), *(("",) if self.bar else ()))
        known = [f"{name} {format_share(share, 1)} {_gauge(share)}" for name, share in self.coverage.items()]
        notes = (*((f"known: {', '.join(known)}",) if known else ()), *self.notes)
        return table_html((self.title, self.about), headings, cells, self.rows.height - MOST_ROWS, notes)


class Shown:
    """A result that a notebook shows as a `Form`, and whose main table can become a pandas frame."""

    def form(self) -> Form:
        """What a notebook shows of the result."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return self.form().html()

    def to_pandas(self) -> Any:
        """The main table as a ``pandas.DataFrame``.

        Raises:
            MissingRequirement: pandas or pyarrow is not installed.
        """
        try:
            return self.form().rows.to_pandas()
        except ImportError as error:
            raise MissingRequirement(
                "to_pandas needs pandas and pyarrow, which are not installed: pip install 'thence[pandas]'"
            ) from error


def _bar(value: float, largest: float) -> str:
    return "█" * (round(_BAR * min(max(value / largest, 0), 1)) if largest else 0)


def _gauge(share: float) -> str:
    """A share as filled and empty marks; only a share of 1 fills all of them."""
    filled = min(int(_GAUGE * max(share, 0) + 0.5), _GAUGE if share >= 1 else _GAUGE - 1)
    return "▮" * filled + "▯" * (_GAUGE - filled)


def _cell(column: str, value: object) -> str:
    """A value as text; a no-break space keeps a number and its unit on one line."""
    text = format_cell(column, value)
    if isinstance(value, int | float):
        return text.replace(" ", "\u00a0")
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 1]}…"
