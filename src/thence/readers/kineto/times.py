"""Exact conversion of decimal microseconds, as text, to integer nanoseconds."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.units import LATEST_NS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

_WIDEST = 19
"""Maximum characters of a number with a decimal point whose digits fit int64, whatever they are."""

NO_TIME_NS = int(np.iinfo(np.int64).min)
"""Value (int64) for a time that is absent or not a number."""


def nanoseconds(texts: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Converts microseconds in decimal notation, such as ``4338138103542.675``, to whole nanoseconds.

    No float is involved: at 4e12 us a double still resolves a nanosecond, but at the 1.7e15 us of traces
    from before torch 2.4 its resolution is 250 ns. Digits after the third decimal, which only other
    writers than Kineto produce, are rounded half to even.

    Args:
        texts: bytes-like objects, one per number.

    Returns:
        int64 array; `NO_TIME_NS` for a text that is not a finite number in the range of int64.
    """
    if not texts:
        return np.empty(0, np.int64)
    joined = b"\n".join(texts)
    if not joined.translate(None, b"0123456789.\n"):
        characters = np.frombuffer(joined + b"\n", np.uint8)
        ends = np.flatnonzero(characters == ord("\n"))
        widths = np.diff(ends, prepend=-1) - 1
        points = np.flatnonzero(characters == ord("."))
        # Kineto writes exactly three decimals, so the digits without the point are nanoseconds, or, before
        # torch 2.0, no decimals. NumPy parses all such numbers in one call.
        if widths.min() > 0 and widths.max() <= _WIDEST:
            if len(points) == len(texts) and bool((ends - points == 4).all()):
                return _parsed(joined.replace(b".", b""))
            if len(points) == 0 and widths.max() <= _WIDEST - 4:
                return _parsed(joined) * 1000
    return _one_by_one([bytes(text) for text in texts])


def _parsed(digits: bytes) -> npt.NDArray[np.int64]:
    return np.fromstring(digits, np.int64, sep="\n")


def _one_by_one(texts: Sequence[bytes]) -> npt.NDArray[np.int64]:
    value_of: dict[bytes, int] = {}
    values = np.empty(len(texts), np.int64)
    for i, key in enumerate(texts):
        if key not in value_of:
            value_of[key] = _exact(key)
        values[i] = value_of[key]
    return values


def _exact(text: bytes) -> int:
    """A text in microseconds as ns, rounded half to even; `NO_TIME_NS` if it is not a finite number in range."""
    try:
        value = Decimal(text.decode("ascii", "replace").strip('"'))
    except InvalidOperation:
        return NO_TIME_NS
    # The exponent is checked before any arithmetic: 1e999999999 must not become an integer.
    if not value.is_finite() or value.adjusted() > 15:
        return NO_TIME_NS
    rounded = int((value * 1000).to_integral_value())
    return rounded if abs(rounded) < 1 << 63 else NO_TIME_NS


def possible(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The times, with `NO_TIME_NS` for times that no clock shows: see `LATEST_NS`."""
    impossible = (values > LATEST_NS) | (values < -LATEST_NS)
    return np.where(impossible, NO_TIME_NS, values) if impossible.any() else values
