"""Axes of a figure as SVG: positions of values, and ticks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from thence.units import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_TICKS = 6
_DECADE = 10
_FEW_DECADES = 2.5
_MARGIN = 0.05
"""Fraction of the range that is left free at each end if the figure does not set a range."""


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        kind: category, linear or log.
        low, high: values at both ends; on a log axis their logarithms to base 10; on a category axis indices, where
            -0.5 is the edge of the first category.
        begin, end: pixels at both ends.
        names: names of the categories, in order.
        title: title of the axis.
    """

    kind: str
    low: float
    high: float
    begin: float
    end: float
    names: tuple[Any, ...] = ()
    title: str = ""
    _places: Mapping[Any, int] = field(default_factory=dict)

    def at(self, value: Any) -> float:
        """The pixel of a value, or of the middle of a category."""
        number = self._places[value] if self.kind == "category" else value
        if self.kind == "log":
            number = math.log10(number)
        return self.begin + (number - self.low) / (self.high - self.low or 1) * (self.end - self.begin)

    @property
    def step(self) -> float:
        """Pixels of one category."""
        return abs(self.end - self.begin) / max(len(self.names), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Pixel and label of each tick."""
        if self.kind == "category":
            return [(self.at(name), str(name)) for name in self.names]
        if self.kind == "log":
            few = self.high - self.low < _FEW_DECADES
            values = (
                factor * 10.0**power
                for power in range(math.floor(self.low), math.floor(self.high) + 1)
                for factor in ((1, 2, 5) if few else (1,))
            )
            shown = (v for v in values if self.low - 1e-9 <= math.log10(v) <= self.high + 1e-9)
            return [(self.at(value), _short(value)) for value in shown]
        step = _round_step(abs(self.high - self.low) / _TICKS)
        first, last = math.ceil(self.low / step), math.floor(self.high / step + 1e-9)
        return [(self.at(number * step), _short(number * step)) for number in range(first, last + 1)]


def axis_of(layout: Mapping[str, Any], values: Iterable[Any], pixels: tuple[float, float]) -> Axis:
    """An axis for values.

    Args:
        layout: Plotly's layout of the axis.
        values: all values on the axis; None, and on a log axis values that are not positive, are ignored.
        pixels: pixels where the axis begins and ends.
    """
    begin, end = pixels
    title = (layout.get("title") or {}).get("text") or ""
    given = [value for value in values if value is not None]
    if layout.get("type") == "category" or any(isinstance(value, str) for value in given):
        names = tuple(dict.fromkeys([*(layout.get("categoryarray") or ()), *given]))
        low, high = layout.get("range") or (-0.5, max(len(names), 1) - 0.5)
        if layout.get("autorange") == "reversed":
            low, high = high, low
        return Axis("category", low, high, begin, end, names, title, {n: i for i, n in enumerate(names)})
    if layout.get("type") == "log":
        low, high = layout.get("range") or _spread([math.log10(v) for v in given if v > 0])
        return Axis("log", low, high, begin, end, title=title)
    low, high = layout.get("range") or _spread([*given, 0] if layout.get("rangemode") == "tozero" else given)
    if layout.get("rangemode") == "tozero" and low < 0 <= min(given, default=0):
        low = 0
    return Axis("linear", low, high, begin, end, title=title)


def _spread(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    beside = _MARGIN * (high - low) or 0.5 * abs(high) or 0.5
    return low - beside, high + beside


def _round_step(least: float) -> float:
    """The smallest number not below ``least`` that is 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, _DECADE) if factor * power >= least * (1 - 1e-9))


def _short(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):g}{unit}"
    return format_count(int(value)) if float(value).is_integer() else f"{value:.4g}"
