"""Text of a trace as it may go to a terminal."""

from __future__ import annotations

import re

__all__ = ["printable"]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Replaces control characters, so that names in a trace cannot send escape codes to the terminal."""
    return _CONTROL.sub("\ufffd", text)
