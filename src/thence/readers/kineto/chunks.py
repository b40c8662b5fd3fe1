"""Cutting the events of a Kineto file into pieces of whole events.

The exporters write one layout throughout a file, so what stands between the first two events is
what stands between any two, and a plain byte search finds the cuts at the speed of memory. In a
file of any other layout the brackets are followed instead (`boundaries`), about ten times slower.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Boundaries", "boundaries", "find_separator", "split_events"]

_BETWEEN_EVENTS = re.compile(rb"(\s*)\}(\s*),(\s*)\{(\s*)(\"\w+\")")
_EVENT_START = re.compile(rb"\}\s*,\s*(?=\{\s*\"(?:ph|cat|name|args|ts|pid|id|bp)\"\s*:)")

# Of the C++ and of the Python exporter: tried where the first event is not valid JSON.
_EXPORTERS_SEPARATORS = (b"\n  },\n  {", b"},\n{")


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Where the events in a buffer end.

    Attributes:
        ends: offset just after each whole event, ascending.
        array_end: offset of the bracket that closes the array of events; -1 where it is not in the buffer.
    """

    ends: npt.NDArray[np.int64]
    array_end: int


def boundaries(buffer: bytes) -> Boundaries:
    """Follows quotes and brackets from the beginning of an event, or of the gap before it.

    Args:
        buffer: valid JSON from there on; what follows the end of the array does not matter.
    """
    text = np.frombuffer(buffer, np.uint8)
    quotes = np.flatnonzero(text == ord('"'))
    quotes = quotes[~_escaped(text, quotes)]
    opening = (text == ord("{")) | (text == ord("["))
    closing = (text == ord("}")) | (text == ord("]"))
    brackets = np.flatnonzero(opening | closing)
    outside = np.searchsorted(quotes, brackets) % 2 == 0
    brackets = brackets[outside]
    depth = np.cumsum(np.where(opening[brackets], 1, -1))
    below = np.flatnonzero(depth < 0)
    array_end = int(brackets[below[0]]) if len(below) else -1
    if len(below):
        brackets, depth = brackets[: below[0]], depth[: below[0]]
    return Boundaries(brackets[(depth == 0) & closing[brackets]] + 1, array_end)


def _escaped(text: npt.NDArray[np.uint8], quotes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which quotes follow an odd number of backslashes."""
    escaped = np.zeros(len(quotes), np.bool_)
    suspects = np.flatnonzero((quotes > 0) & (text[quotes - 1] == ord("\\")))
    distance = 1
    while len(suspects):
        escaped[suspects] ^= True
        distance += 1
        at = quotes[suspects] - distance
        suspects = suspects[(at >= 0) & (text[at] == ord("\\"))]
    return escaped


def find_separator(buffer: bytes) -> bytes | None:
    r"""The bytes from the end of one event into the beginning of the next, if they are the same throughout.

    Args:
        buffer: begins with the first event.

    Returns:
        such as ``\\n  },\\n  {``: a closing brace and an opening one with what is around them. A
        line break in it makes it safe, since no JSON string holds one; a layout without line
        breaks needs the first key in it as well: ``}, {"ph"``. None: the layout is not regular.
    """
    match = _first_gap(buffer)
    if match is None:
        return next((known for known in _EXPORTERS_SEPARATORS if buffer.count(known) > 1), None)
    before, after_close, before_open, indent, key = match.groups()
    before = before[max(before.rfind(b"\n"), 0) :]  # some events have blank lines before the brace
    separator = before + b"}" + after_close + b"," + before_open + b"{"
    # A brace at the margin of its own line, or a whole event on each line.
    if b"\n" in before_open or b"\n" in after_close:
        return bytes(separator)
    return bytes(separator + indent + key)


def _first_gap(buffer: bytes) -> re.Match[bytes] | None:
    """The match of _BETWEEN_EVENTS that ends the first event."""
    found = boundaries(buffer).ends
    if len(found) == 0:
        return None
    end = int(found[0])
    begin = end - 1
    while begin > 0 and buffer[begin - 1 : begin].isspace():
        begin -= 1
    return _BETWEEN_EVENTS.match(buffer, begin)


def split_events(piece: bytes) -> list[bytes]:
    """The events of a piece one by one, also where some are not valid JSON.

    Args:
        piece: an array of events, with its brackets.
    """
    inner = piece.strip()[1:-1]
    parts = _EVENT_START.split(inner)
    return [part + b"}" for part in parts[:-1]] + ([parts[-1]] if parts[-1].strip() else [])
