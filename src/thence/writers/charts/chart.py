"""A chart: a frozen description, which shows itself in notebooks and is written as SVG or HTML.

No form of it has a script. Names come from traces and may contain any characters; in every form they are escaped text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from thence.atomic_files import atomic_open
from thence.errors import UsageError
from thence.model.kernel_names import clip
from thence.units import format_cell, format_count
from thence.writers.charts.drawing import FONT, drawn, escaped
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from thence.writers.charts.description import Axis, Series
    from thence.writers.charts.drawing import Drawing

MAX_TABLE_ROWS = 50
"""Rows of the table below a chart; `Chart.to_frame` has all of them."""
_DRAWING_ONLY = ("area", "busy", "note")
_MAX_CELL = 90
_MARGIN, _LINE = 12, 17
_CHARACTER = 6.4  # mean width in px of a character at font size 12
_STYLE = (
    "<style>svg{color:#1c2128;background:#fff}"
    "@media (prefers-color-scheme:dark){svg{color:#e4e8ed;background:#14171b}}</style>"
)


@dataclass(frozen=True)
class Chart:
    """A chart with its numbers.

    Attributes:
        title: what it shows.
        series: in the order in which they are stacked and named in the legend.
        x, y: the axes.
        caption: how to read it, a line for each sentence or group of sentences.
        rows: of an axis of rows, their order, each with the text at its right end; empty: the order of the data, with
            the sum of each row.
    """

    title: str
    series: tuple[Series, ...]
    x: Axis
    y: Axis
    caption: str = ""
    rows: Mapping[str, str] = field(default_factory=dict)

    def to_frame(self) -> pl.DataFrame:
        """The numbers of the chart: the column series with its name, then those of each series' data."""
        named = [each.data.select(pl.lit(each.name).alias("series"), pl.all()) for each in self.series]
        frame = pl.concat(named, how="diagonal_relaxed") if named else pl.DataFrame()
        return frame.drop(_DRAWING_ONLY, strict=False)

    def to_svg(self, width: int = 720) -> str:
        """The chart as an SVG document.

        Args:
            width: px; the height follows from the content.
        """
        drawing = self._drawing()
        letters = int((width - 2 * _MARGIN) / _CHARACTER)
        below = [line for text in self.caption.splitlines() for line in _wrapped(text, letters)]
        top = _MARGIN + 2 * _LINE
        height = top + drawing.height + _LINE * len(below) + _MARGIN
        inner = width - drawing.left - drawing.right - 2 * _MARGIN
        lines = "".join(
            f'<text x="{_MARGIN}" y="{top + drawing.height + _LINE * (number + 1) - 5}">{escaped(line)}</text>'
            for number, line in enumerate(below)
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" font-family="{FONT}" font-size="12" fill="currentColor">'
            f"<title>{escaped(self.title)}</title><desc>{escaped(self._description())}</desc>{_STYLE}"
            f'<text x="{_MARGIN}" y="{_MARGIN + 10}" font-size="14" font-weight="600">{escaped(self.title)}</text>'
            f'<svg x="{_MARGIN + drawing.left}" y="{top}" width="{inner}" height="{drawing.height}" '
            f'overflow="visible">{drawing.body}</svg>{lines}</svg>\n'
        )

    def to_html(self) -> str:
        """The chart as a fragment of HTML that is as wide as its place, with its numbers as a table that can be opened.

        Texts have the colour of the place, so that the chart is readable on light and dark pages.
        """
        drawing = self._drawing()
        caption = "".join(f"<p>{_text(line)}</p>" for line in self.caption.splitlines())
        style = (
            f"display:block;height:{drawing.height}px;margin:6px {drawing.right}px 0 {drawing.left}px;"
            f"width:calc(100% - {drawing.left + drawing.right}px);overflow:visible"
        )
        return (
            f'<figure class="chart" style="margin:0"><figcaption><b>{_text(self.title)}</b></figcaption>'
            f'<svg role="img" aria-label="{_text(self.title)}" style="{style}" font-family="{FONT}" font-size="12" '
            f'fill="currentColor"><desc>{escaped(self._description())}</desc>{drawing.body}</svg>'
            f"{caption}{self._table()}</figure>"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the chart, over what is there: as ``.svg``, or as a page for ``.html``.

        Raises:
            UsageError: the name has another ending, or the file cannot be written.
        """
        target = Path(path)
        if target.suffix == ".svg":
            text = self.to_svg()
        elif target.suffix in (".html", ".htm"):
            text = (
                f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(self.title)}</title>'
                '<meta name="viewport" content="width=device-width, initial-scale=1">'
                "<style>:root{color-scheme:light dark}"
                f"body{{font:13px {FONT};margin:16px;max-width:1000px}}</style>"
                f"</head><body>{self.to_html()}</body></html>\n"
            )
        else:
            raise UsageError(f"{target}: a chart is written as .svg or .html")
        with atomic_open(target) as stream:
            stream.write(text.encode())

    def _repr_html_(self) -> str:
        return self.to_html()

    def _repr_svg_(self) -> str:
        """For viewers that show no SVG within HTML, such as GitHub."""
        return self.to_svg()

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(each.name for each in self.series))
        return f"Chart({self.title!r}: {names}; {self.to_frame().height} rows)"

    def _drawing(self) -> Drawing:
        return drawn(self.series, self.x, self.y, self.rows)

    def _description(self) -> str:
        axes = [f"{axis.column}: {axis.title}" for axis in (self.x, self.y) if axis.title]
        names = ", ".join(dict.fromkeys(each.name for each in self.series))
        return ". ".join(filter(None, [self.caption, f"Series: {names}", *axes]))

    def _table(self) -> str:
        frame = self.to_frame()
        several = frame.height > 0 and frame["series"].n_unique() > 1
        shown = frame.head(MAX_TABLE_ROWS) if several else frame.head(MAX_TABLE_ROWS).drop("series", strict=False)
        head = "".join(f'<th scope="col">{_text(column.replace("_", " "))}</th>' for column in shown.columns)
        rows = (
            "".join(f"<td>{_text(_cell(*item))}</td>" for item in row.items()) for row in shown.iter_rows(named=True)
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        hidden = frame.height - shown.height
        more = f"<p>{format_count(hidden)} more rows are in the chart only</p>" if hidden else ""
        return (
            '<details class="numbers"><summary>Numbers</summary>'
            f'<div class="scroll" style="overflow-x:auto" tabindex="0" role="region" '
            f'aria-label="Numbers: {_text(self.title)}">'
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}</details>"
        )


def _text(text: str) -> str:
    return escape(printable(text))


def _cell(column: str, value: object) -> str:
    return clip(format_cell(column, value), _MAX_CELL)


def _wrapped(text: str, letters: int) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > letters:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
