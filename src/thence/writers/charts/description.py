"""The parts of a chart as data: axes with their units, and series as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import polars as pl

Unit = Literal["ns", "bytes", "share", "GB/s", "count", ""]
"""Unit of the values of an axis: ``share`` is a part of 1, which is shown in per cent."""
Mark = Literal["bar", "box", "span", "dot", "line", "area", "column", "frame"]
"""What a series is drawn as, with the columns that its data has beside those of the axes:

- bar: a horizontal bar for each row of the y axis; bars of several series are stacked.
- box: low, q1, median, q3, high in the unit of the x axis: extremes and quartiles of each row.
- span: end; from x to end on a row, and optionally busy: the part of it, from 0 to 1, that sets the opacity.
- dot: a point, and optionally area: its area relative to the largest, from 0 to 1.
- line: points with lines between them.
- area: y above the series before it, between points.
- column: end; y from x to end, stacked: a histogram.
- frame: end, name; from x to end in the row y, which is the depth in a flame graph.

All may have a column ``note``: text that is shown with the values while the pointer is over the mark.
"""

COLOURS = ("#297aa3", "#cc7f33", "#2ea1b8", "#9b4b65", "#8f7de8", "#c33d22", "#a37d75", "#8c3cdd")
"""Colours of series. Each has a contrast of 3 or more with the light and the dark page, and any two are as different
for people with protanopia, deuteranopia or tritanopia as 0.08 in Oklab (tests/writers/charts/test_colours.py)."""
NEUTRAL = "#868f99"
"""Colour of what is the rest, or idle."""


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        column: the column of the series that has its values.
        title: what the values are.
        unit: of the values. Ticks and hovered values are shown in the multiple of it that fits.
        scale: linear; log (to base 10, values that are not positive are not drawn); or rows, of texts.
    """

    column: str
    title: str = ""
    unit: Unit = ""
    scale: Literal["linear", "log", "rows"] = "linear"


@dataclass(frozen=True)
class Series:
    """Values that are drawn alike.

    Attributes:
        name: in the legend, which has a name once.
        mark: what the values are drawn as.
        data: the columns of the axes, those of the mark, and any others.
        colour: as ``#rrggbb``.
    """

    name: str
    mark: Mark
    data: pl.DataFrame
    colour: str = COLOURS[0]
