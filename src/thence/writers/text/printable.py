"""Makes text from a trace safe to print on a terminal."""

from __future__ import annotations

import re

# The last two ranges are bidirectional controls: they reorder the text after them, so that one name could
# look like another.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_ASCII = dict.fromkeys(range(0x2580, 0x2590), "#") | str.maketrans("─━│┃…", "--||.")
"""Bars and lines of tables, for terminals whose encoding lacks them."""
_BUT_LINES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Replaces control characters, so that names in a trace cannot send escape codes to the terminal."""
    return _CONTROL.sub("\ufffd", text)


def printable_lines(text: str) -> str:
    """Like `printable`, for text with several lines: keeps line feeds and tabs."""
    return _BUT_LINES.sub("\ufffd", text)


def encodable(text: str, encoding: str) -> str:
    """Text that an encoding can represent: bars and lines become ASCII, other characters their escapes."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text
