"""Draws charts as SVG.

A drawing has the width of its place, without a script: all positions along x are per cent of the width of the plot,
those along y are px. Names of rows are above their bars, so that a narrow place has room for both.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.model.kernel_names import clip
from thence.units import format_bytes, format_count, format_ns, format_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from thence.writers.charts.description import Axis, Series, Unit

FONT = "system-ui, Segoe UI, Roboto, Liberation Sans, sans-serif"
FRAME_ROW = 18
"""Height of a frame in px."""

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that XML 1.0 (section 2.2) excludes, those that it discourages, and those that reorder text."""
_ROW, _BAR, _SPAN = 30, 9, 13  # px
_PLOT = 240  # height of a plot, px
_LEGEND_ROW, _TITLE, _TICKS = 18, 18, 20  # px
_LEFT, _RIGHT = 52, 10
"""Margins of a plot in px, for the labels of its y axis and half of the last label of its x axis."""
_MAX_LABEL = 42
"""Characters of the name of a row: more do not fit beside its value on a screen of 400 px."""
_TICK_COUNT, _FEW_DECADES, _ONE_DECADE = 5, 1.7, 1.0
_DOT, _LARGEST_DOT = 2.6, 11.0  # radii, px
_INK_OF_FRAMES = "#1c2128"
_STEPS = {
    "ns": ((1e9, " s"), (1e6, " ms"), (1e3, " us"), (1, " ns")),
    "bytes": ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB"), (1, " B")),
    "share": ((0.01, " %"),),
    "GB/s": ((1, ""),),
}
_COUNT_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))
_SHAPES = (
    '<circle r="4.5"/>', '<rect x="-4" y="-4" width="8" height="8"/>', '<path d="M-5 4h10L0 -5z"/>',
    '<path d="M0 -5.5L5.5 0L0 5.5L-5.5 0z"/>',
)  # fmt: skip
"""Marks of the points of lines, so that lines differ by more than their colour."""


@dataclass(frozen=True)
class Drawing:
    """A drawn chart.

    Attributes:
        body: SVG elements; x is in per cent of the width of the plot, y in px.
        height: px.
        left, right: margins in px, into which labels reach.
    """

    body: str
    height: int
    left: int = 0
    right: int = 0


@dataclass(frozen=True)
class Scale:
    """From values to parts of the length of an axis.

    Attributes:
        low, high: values at both ends; logarithms to base 10 if log.
        unit: of the values.
        log: whether the axis is logarithmic.
    """

    low: float
    high: float
    unit: Unit
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value is: 0 at the low and 1 at the high end."""
        number = math.log10(value) if self.log else value
        return (number - self.low) / (self.high - self.low or 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Place and label of each tick; all labels of a linear axis have one unit."""
        if self.log:
            return self._log_ticks()
        step = _round_step((self.high - self.low) / _TICK_COUNT)
        if self.unit == "count":
            step = max(step, 1.0)
        # An end that only rounding moved keeps its tick.
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [number * step for number in range(first, last + 1)]
        size, name = _step(max(map(abs, values), default=0.0), self.unit)
        return [(self.place(value), f"{value / size:.6g}{name}" if value else "0") for value in values]

    def _log_ticks(self) -> list[tuple[float, str]]:
        decades = self.high - self.low
        factors = (1,) if decades > _FEW_DECADES else (1, 2, 5) if decades > _ONE_DECADE else (1, 1.5, 2, 3, 4, 5, 7)
        powers = range(math.floor(self.low), math.floor(self.high) + 1)
        every = -(-len(powers) // 6) if len(factors) == 1 else 1
        values = (factor * 10.0**power for power in powers[::every] for factor in factors)
        shown = (value for value in values if self.low - 1e-9 <= math.log10(value) <= self.high + 1e-9)
        return [(self.place(value), _label(value, self.unit)) for value in shown]


def drawn(series: Sequence[Series], x: Axis, y: Axis, rows: Mapping[str, str]) -> Drawing:
    """A chart as SVG elements; rows as in `thence.writers.charts.chart.Chart`."""
    if any(each.mark == "frame" for each in series):
        return _frames(series, x, y)
    if y.scale == "rows":
        return _rows(series, x, y, rows)
    return _plane(series, x, y)


def escaped(text: str) -> str:
    """A text for SVG."""
    return escape(_NOT_IN_XML.sub("\ufffd", text))


# ---- Charts of rows: bars, boxes and spans


def _rows(series: Sequence[Series], x: Axis, y: Axis, given: Mapping[str, str]) -> Drawing:
    names = list(given or dict.fromkeys(name for each in series for name in each.data[y.column]))
    scale = _row_scale(series, x, y)
    legend, top = _legend(series)
    tops = {name: top + _ROW * number for number, name in enumerate(names)}
    bottom = top + _ROW * len(names) + 4
    parts = [legend, _x_axis(scale, x, top, bottom)]
    stacked = dict.fromkeys(names, 0.0)
    for each in series:
        marks = {"bar": _bars, "box": _boxes, "span": _spans}[each.mark](each, x, y, scale, tops, stacked)
        parts.append(f'<g fill="{each.colour}">{"".join(marks)}</g>')
    for name, row_top in tops.items():
        value = given.get(name, value_text(stacked[name], x.unit))
        parts.append(f'<text x="0" y="{row_top + 11}">{escaped(clip(name, _MAX_LABEL))}</text>')
        parts.append(f'<text x="100%" y="{row_top + 11}" text-anchor="end">{escaped(value)}</text>')
    return Drawing("".join(parts), bottom + _TICKS + _TITLE * bool(x.title))


def _row_scale(series: Sequence[Series], x: Axis, y: Axis) -> Scale:
    totals: dict[str, float] = {}
    for each in series:
        ends = {"bar": x.column, "box": "high", "span": "end"}[each.mark]
        for name, value in each.data.select(y.column, ends).iter_rows():
            totals[name] = totals.get(name, 0.0) + (value or 0) if each.mark == "bar" else max(
                totals.get(name, 0.0), value or 0
            )  # fmt: skip
    return Scale(0.0, max([*totals.values(), 0.0]) or 1.0, x.unit)


def _bars(
    series: Series, x: Axis, y: Axis, scale: Scale, tops: Mapping[str, int], stacked: dict[str, float]
) -> Iterator[str]:
    """Bars from the end of those of the series before."""
    for name, value, note in series.data.select(y.column, x.column, _note(series)).iter_rows():
        if not value or name not in tops:
            continue
        begin = stacked[name]
        stacked[name] += value
        tip = _tip(name, f"{series.name}: {value_text(value, x.unit)}", note)
        yield _rectangle(scale.place(begin), scale.place(begin + value), tops[name] + 16, _BAR, tip)


def _boxes(
    series: Series, x: Axis, y: Axis, scale: Scale, tops: Mapping[str, int], _stacked: dict[str, float]
) -> Iterator[str]:
    """A line from the least to the largest value, a box between the quartiles, and a line at the median."""
    columns = ("low", "q1", "median", "q3", "high")
    for name, note, *values in series.data.select(y.column, _note(series), *columns).iter_rows():
        low, first, median, third, high = (scale.place(value) for value in values)
        middle, stroke = tops[name] + 20, f'stroke="{series.colour}"'
        shown = (f"{column}: {value_text(value, x.unit)}" for column, value in zip(columns, values, strict=True))
        tip = _tip(name, *shown, note)
        yield (
            f'<line x1="{_percent(low)}" x2="{_percent(high)}" y1="{middle}" y2="{middle}" {stroke}/>'
            f"{_rectangle(first, third, middle - 6, 12, tip)}"
            f'<line x1="{_percent(median)}" x2="{_percent(median)}" y1="{middle - 8}" y2="{middle + 8}" '
            'stroke="currentColor" stroke-width="2"/>'
        )


def _spans(
    series: Series, x: Axis, y: Axis, scale: Scale, tops: Mapping[str, int], _stacked: dict[str, float]
) -> Iterator[str]:
    busy = pl.col("busy") if "busy" in series.data.columns else pl.lit(1.0).alias("busy")
    for name, start, end, part, note in series.data.select(y.column, x.column, "end", busy, _note(series)).iter_rows():
        tip = _tip(f"{series.name}, {value_text(end - start, x.unit)}", note)
        opacity = "" if part >= 1 else f' fill-opacity="{0.3 + 0.7 * part:.1f}"'
        yield _rectangle(scale.place(start), scale.place(end), tops[name] + 14, _SPAN, tip, opacity)


# ---- Charts with two axes of numbers


def _plane(series: Sequence[Series], x: Axis, y: Axis) -> Drawing:
    series = [_drawable(each, x, y) for each in series]
    x_scale, y_scale = _plane_scales(series, x, y)
    legend, top = _legend(series)
    top += _TITLE * bool(y.title) + 6
    bottom = top + _PLOT
    title = f'<text x="-{_LEFT}" y="{top - 10}">{escaped(y.title)}</text>' if y.title else ""
    legend = f'<g transform="translate(-{_LEFT} 0)">{legend}</g>' if legend else ""
    parts = [legend, title, _x_axis(x_scale, x, top, bottom), _y_axis(y_scale, top)]
    stacked: dict[float, float] = {}
    shapes = _shapes(series)
    for each in series:
        shape = shapes.get(each.name, _SHAPES[0])
        marks = {"dot": _dots, "line": _line, "area": _area, "column": _columns}[each.mark]
        inside = "".join(marks(each, x, y, (x_scale, y_scale, top), stacked, shape))
        parts.append(f'<g fill="{each.colour}">{inside}</g>')
    return Drawing("".join(parts), bottom + _TICKS + _TITLE * bool(x.title), _LEFT, _RIGHT)


_Place = tuple[Scale, Scale, int]
"""The scales of x and y, and px above the plot."""


def _drawable(series: Series, x: Axis, y: Axis) -> Series:
    """The series without values that have no place on the axes."""
    kept = [pl.col(axis.column).is_not_null() for axis in (x, y)]
    # A histogram's first column may begin at 0, which on a logarithmic axis is the left end.
    kept += [pl.col(axis.column) > 0 for axis in (x, y) if axis.scale == "log" and series.mark != "column"]
    return type(series)(series.name, series.mark, series.data.filter(*kept), series.colour)


def _plane_scales(series: Sequence[Series], x: Axis, y: Axis) -> tuple[Scale, Scale]:
    xs = _numbers(each.data[x.column] for each in series)
    ends = _numbers(each.data["end"] for each in series if each.mark == "column")
    ys = _numbers(each.data[y.column] for each in series if each.mark in ("dot", "line"))
    totals: dict[float, float] = {}
    for each in series:
        if each.mark in ("area", "column"):
            for position, value in each.data.select(x.column, y.column).iter_rows():
                totals[position] = totals.get(position, 0.0) + value
    margin = 0.0 if ends.size or totals else 0.03
    y_values = np.concatenate([ys, np.array([*totals.values()], np.float64)])
    return _scale(np.concatenate([xs, ends]), x, margin), _scale(y_values, y, 0.05)


def _scale(values: np.ndarray[Any, np.dtype[np.float64]], axis: Axis, margin: float) -> Scale:
    """A scale with a part of the range free at its ends; a linear y axis begins at 0."""
    if axis.scale == "log":
        positive = np.log10(values[values > 0])
        low, high = (float(positive.min()), float(positive.max())) if positive.size else (0.0, 1.0)
        beside = margin * (high - low) or (0.5 if high == low else 0.0)
        return Scale(low - beside, high + beside, axis.unit, log=True)
    low, high = (min(0.0, float(values.min())), float(values.max())) if values.size else (0.0, 1.0)
    return Scale(low, high + margin * (high - low) or 1.0, axis.unit)


def _dots(series: Series, x: Axis, y: Axis, place: _Place, _stacked: dict[float, float], _shape: str) -> Iterator[str]:
    area = pl.col("area") if "area" in series.data.columns else pl.lit(0.0).alias("area")
    for position, value, part, note in series.data.select(x.column, y.column, area, _note(series)).iter_rows():
        tip = _tip(series.name, _values(position, value, x, y), note)
        radius = _DOT + (_LARGEST_DOT - _DOT) * math.sqrt(part)
        across, down = _point(position, value, place)
        yield (
            f'<circle cx="{_percent(across)}" cy="{down:.1f}" r="{radius:.1f}" fill-opacity=".5">{tip}</circle>'
        )  # fmt: skip


def _line(series: Series, x: Axis, y: Axis, place: _Place, _stacked: dict[float, float], shape: str) -> Iterator[str]:
    """A line, and over it a mark for each point."""
    points = [_point(position, value, place) for position, value in series.data.select(x.column, y.column).iter_rows()]
    path = " ".join(f"{1000 * across:.1f},{down:.1f}" for across, down in points)
    stroke = f'fill="none" stroke="{series.colour}" stroke-width="2" vector-effect="non-scaling-stroke"'
    yield _stretched(f'<polyline points="{path}" {stroke}/>', place[2] + _PLOT)
    rows = series.data.select(x.column, y.column, _note(series)).iter_rows()
    for (across, down), (x_value, y_value, note) in zip(points, rows, strict=True):
        tip = _tip(series.name, _values(x_value, y_value, x, y), note)
        yield f'<svg x="{_percent(across)}" y="{down:.1f}" overflow="visible">{_with_tip(shape, tip)}</svg>'


def _area(series: Series, x: Axis, y: Axis, place: _Place, stacked: dict[float, float], _shape: str) -> Iterator[str]:
    """The area between the sum of the series before and that with this one."""
    above, below = [], []
    for position, value in series.data.select(x.column, y.column).iter_rows():
        begin = stacked.get(position, 0.0)
        stacked[position] = begin + value
        below.append(_point(position, begin, place))
        above.append(_point(position, begin + value, place))
    path = " ".join(f"{1000 * across:.1f},{down:.1f}" for across, down in [*above, *reversed(below)])
    largest = series.data[y.column].max() or 0
    tip = _tip(series.name, f"at most {value_text(float(largest), y.unit)}")  # type: ignore[arg-type] # numbers
    yield _stretched(f'<polygon points="{path}" fill-opacity=".85">{tip}</polygon>', place[2] + _PLOT)


def _columns(
    series: Series, x: Axis, y: Axis, place: _Place, stacked: dict[float, float], _shape: str
) -> Iterator[str]:
    x_scale, y_scale, top = place
    for begin, end, value, note in series.data.select(x.column, "end", y.column, _note(series)).iter_rows():
        base = stacked.get(begin, 0.0)
        stacked[begin] = base + value
        if not value:
            continue
        left = x_scale.place(begin) if begin > 0 or not x_scale.log else 0.0
        right = x_scale.place(end) if end is not None else 1.0
        upper, lower = (top + _PLOT * (1 - y_scale.place(part)) for part in (base + value, base))
        limits = f"{value_text(begin, x.unit)} to {value_text(end, x.unit) if end is not None else 'more'}"
        tip = _tip(series.name, f"{limits}: {value_text(value, y.unit)}", note)
        gap = 0.04 * (right - left)
        yield _rectangle(left + gap, right - gap, upper, lower - upper, tip)


def _point(x: float, y: float, place: _Place) -> tuple[float, float]:
    """Part of the width from the left, and px from above."""
    x_scale, y_scale, top = place
    return x_scale.place(x), top + _PLOT * (1 - y_scale.place(y))


def _stretched(content: str, height: int) -> str:
    """Shapes whose x is in thousandths of the width."""
    return (
        f'<svg x="0" y="0" width="100%" height="{height}" viewBox="0 0 1000 {height}" '
        f'preserveAspectRatio="none" overflow="visible">{content}</svg>'
    )


# ---- Flame graphs


def _frames(series: Sequence[Series], x: Axis, y: Axis) -> Drawing:
    ends = _numbers(each.data["end"] for each in series)
    depths = _numbers(each.data[y.column] for each in series)
    scale = Scale(0.0, float(ends.max(initial=1.0)), x.unit)
    parts = []
    for each in series:
        inside = []
        columns = each.data.select("name", x.column, "end", y.column, _note(each))
        for name, start, end, depth, note in columns.iter_rows():
            tip = _tip(name, value_text(end - start, x.unit), note)
            left, right = scale.place(start), scale.place(end)
            top = FRAME_ROW * depth
            # A frame of its own clips the name to the width that it has.
            label = (
                f'<svg x="{_percent(left)}" y="{top}" width="{_percent(right - left)}" height="{FRAME_ROW - 1}">'
                f'<text x="4" y="13" fill="{_INK_OF_FRAMES}" pointer-events="none">{escaped(name)}</text></svg>'
                if right - left > 0.02
                else ""
            )
            inside.append(_rectangle(left, right, top, FRAME_ROW - 1, tip, ' stroke="#fff" stroke-width=".4"') + label)
        parts.append(f'<g fill="{each.colour}">{"".join(inside)}</g>')
    return Drawing("".join(parts), int(depths.max(initial=0) + 1) * FRAME_ROW)


# ---- Legend, axes, texts


def _legend(series: Sequence[Series]) -> tuple[str, int]:
    """The names of several series, and the height of the legend in px."""
    names = {each.name: each.colour for each in series if each.mark != "box"}  # the rows of boxes have their names
    if len(names) < 2:
        return "", 0
    longest = max(map(len, names))
    in_row = 3 if longest <= 16 else 2 if longest <= 27 else 1
    shapes = _shapes(series)
    parts = []
    for number, (name, colour) in enumerate(names.items()):
        row, column = divmod(number, in_row)
        shape = shapes.get(name, '<rect x="-5" y="-5" width="10" height="10" rx="2"/>')
        parts.append(
            f'<svg x="{_percent(column / in_row)}" y="{_LEGEND_ROW * row + 8}" overflow="visible">'
            f'<g transform="translate(6 0)" fill="{colour}">{shape}</g>'
            f'<text x="17" y="4">{escaped(clip(name, _MAX_LABEL))}{_full(name)}</text></svg>'
        )
    return "".join(parts), _LEGEND_ROW * -(-len(names) // in_row) + 4


def _full(name: str) -> str:
    """The whole of a name that is clipped, for hovering."""
    return f"<title>{escaped(name)}</title>" if len(name) > _MAX_LABEL else ""


def _shapes(series: Sequence[Series]) -> dict[str, str]:
    """The marks of lines by their names."""
    lines = dict.fromkeys(each.name for each in series if each.mark == "line")
    return {name: _SHAPES[number % len(_SHAPES)] for number, name in enumerate(lines)}


def _x_axis(scale: Scale, axis: Axis, top: float, bottom: float) -> str:
    """Lines over the plot with labels below them, and the title."""
    parts = []
    for place, label in scale.ticks():
        anchor = "start" if place < 0.03 else "end" if place > 0.95 else "middle"
        x = _percent(place)
        parts.append(
            f'<line x1="{x}" x2="{x}" y1="{top:.0f}" y2="{bottom:.0f}" stroke="currentColor" stroke-opacity=".15"/>'
            f'<text x="{x}" y="{bottom + 14:.0f}" text-anchor="{anchor}">{escaped(label)}</text>'
        )
    title = f'<text x="100%" y="{bottom + 31:.0f}" text-anchor="end">{escaped(axis.title)}</text>' if axis.title else ""
    return "".join(parts) + title


def _y_axis(scale: Scale, top: float) -> str:
    parts = []
    for place, label in scale.ticks():
        y = top + _PLOT * (1 - place)
        parts.append(
            f'<line x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" stroke-opacity=".15"/>'
            f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{escaped(label)}</text>'
        )
    return "".join(parts)


def _rectangle(left: float, right: float, top: float, height: float, tip: str, more: str = "") -> str:
    """A rectangle from one to another part of the width; the narrowest is visible."""
    width = max(right - left, 0.0008)
    return (
        f'<rect x="{_percent(left)}" y="{top:.4g}" width="{_percent(width)}" height="{height:.4g}"{more}>{tip}</rect>'
    )


def _with_tip(shape: str, tip: str) -> str:
    tag = shape[1 : shape.index(" ")]
    return f"{shape[:-2]}>{tip}</{tag}>"


def _tip(*lines: str | None) -> str:
    return f"<title>{escaped(chr(10).join(line for line in lines if line))}</title>"


def _note(series: Series) -> pl.Expr:
    return pl.col("note") if "note" in series.data.columns else pl.lit(None, pl.String).alias("note")


def _values(x: float, y: float, x_axis: Axis, y_axis: Axis) -> str:
    return f"{value_text(x, x_axis.unit)}: {value_text(y, y_axis.unit)}"


def value_text(value: float, unit: Unit) -> str:
    """A value with its unit, as text."""
    if unit == "ns":
        return format_ns(value)
    if unit == "bytes":
        return format_bytes(value)
    if unit == "share":
        return format_share(value, 1)
    if unit == "GB/s":
        return f"{value:.4g} GB/s"
    return format_count(int(value)) if float(value).is_integer() else f"{value:.4g}"


def _label(value: float, unit: Unit) -> str:
    size, name = _step(value, unit)
    return f"{value / size:.6g}{name}"


def _step(value: float, unit: Unit) -> tuple[float, str]:
    """The size and the name of the multiple of a unit in which a value is shown."""
    steps = _STEPS.get(unit, _COUNT_STEPS)
    return next((step for step in steps if abs(value) >= step[0]), steps[-1])


def _round_step(least: float) -> float:
    """The smallest number not below ``least`` that is 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _percent(part: float) -> str:
    return f"{100 * part:.2f}".rstrip("0").rstrip(".") + "%"


def _numbers(columns: Iterable[pl.Series]) -> np.ndarray[Any, np.dtype[np.float64]]:
    arrays = [column.drop_nulls().cast(pl.Float64).to_numpy() for column in columns]
    return np.concatenate(arrays) if arrays else np.empty(0, np.float64)
