"""Units, and how times, sizes, shares and counts are shown to people.

Inside thence a time is an ``int`` of nanoseconds and a size an ``int`` of bytes. Tables, figures and
pages show them rounded, in the unit that fits; messages give exact numbers of ns or bytes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Ns = int
"""A time or duration in nanoseconds."""
Bytes = int
"""A size in bytes."""

LATEST_NS = 4 * 10**18
"""Furthest time from the zero of a clock, in either direction, ns. With the epoch 1970 it is in the year 2096. Sums and
differences of two times within these two bounds fit int64."""
LONGEST_NS = 100 * 86_400 * 10**9
"""Longest that one device activity or host range can last, ns: 100 days."""

_TIME_STEPS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"))
_SIZE_STEPS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def format_ns(nanoseconds: float) -> str:
    """A duration with four significant digits, such as ``12.35 ms``; whole nanoseconds below 1 us."""
    for size, unit in _TIME_STEPS:
        if abs(nanoseconds) >= size:
            return f"{_four_digits(nanoseconds / size)} {unit}"
    return f"{nanoseconds:.0f} ns"


def format_range_ns(low: float, high: float) -> str:
    """Two durations, such as ``12.35 to 14.01 ms``; the unit stands once where it is the same."""
    first, last = format_ns(low), format_ns(high)
    number, unit = first.split()
    return f"{number if last.endswith(f' {unit}') else first} to {last}"


def format_bytes(size: float) -> str:
    """A size in decimal units (1 kB = 1000 bytes) with four significant digits."""
    for step, unit in _SIZE_STEPS:
        if abs(size) >= step:
            return f"{_four_digits(size / step)} {unit}"
    return f"{size:.0f} B"


_ROUNDING = 1e-9
"""Rounding error of a sum of shares, in per cent."""


def format_share(part: float, whole: float) -> str:
    """``part`` of ``whole`` in per cent; a dash if ``whole`` is 0.

    A small share is shown as ``<0.1 %`` instead of 0, and one close to the whole as ``>99.9 %`` instead of 100.
    """
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 0.05:
        return "<0.1 %"
    if 99.95 <= percent < 100 - _ROUNDING:
        return ">99.9 %"
    return f"{percent:.1f} %"


def signed_share(share: float) -> str:
    """A relative difference with its sign, such as ``+7.4 %``."""
    return f"{100 * share:+.1f} %"


def format_count(count: int) -> str:
    """A whole number with thousands separated."""
    return f"{count:,}"


def listed(items: Sequence[object], most: int = 8) -> str:
    """Items for a sentence: ``a, b`` or, of more than ``most``, the first of them and ``and 3 more``."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def format_ranges(ranges: Sequence[range]) -> str:
    """Ranges of whole numbers for a sentence, as `listed` shows them: ``2, 5-7``."""
    return listed([str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in ranges], 8)


def ranges_of(numbers: Sequence[int]) -> list[range]:
    """Ascending whole numbers as ranges without gaps."""
    edges = [number for number in range(1, len(numbers)) if numbers[number] != numbers[number - 1] + 1]
    cuts = [0, *edges, len(numbers)] if numbers else []
    return [range(numbers[low], numbers[high - 1] + 1) for low, high in pairwise(cuts)]


def several(count: int, what: str, many: str | None = None) -> str:
    """A number with its noun: ``1 trace``, ``1,200 traces``, ``3 activities``.

    Args:
        what: the noun in the singular.
        many: its plural; None: by the usual spelling.
    """
    if many is None:
        if what.endswith(("s", "x", "ch", "sh")):
            many = what + "es"
        elif what.endswith("y") and what[-2:-1] not in "aeiou":
            many = what[:-1] + "ies"
        else:
            many = what + "s"
    return f"{count:,} {what if count == 1 else many}"


def format_cell(column: str, value: object) -> str:
    """A value of a table as text, in the unit that the name of its column implies; a dash for null.

    Args:
        column: name, which tells the unit of a number by `_UNITS`.
        value: of a frame; a value that is not a number is converted with ``str``.
    """
    if value is None:
        return "-"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    for mark, show in _UNITS.items():
        if mark in column:
            return show(value)
    return f"{value:,.2f}" if isinstance(value, float) else format_count(value)


_UNITS: dict[str, Callable[[float], str]] = {
    "_ns": format_ns,
    "duration": format_ns,
    "_ms": lambda value: format_ns(value * 1e6),
    "bytes": format_bytes,
    "shared_memory": format_bytes,
    "share": lambda value: format_share(value, 1),
    "_cycles": lambda value: format_count(round(value)),
}
"""How a number is shown, by a substring of the name of its column; the first substring that occurs decides."""


def _four_digits(value: float) -> str:
    decimals = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    return f"{value:.{decimals}f}"
