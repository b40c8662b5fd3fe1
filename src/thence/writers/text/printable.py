"""Text of a trace as it may go to a terminal."""

from __future__ import annotations

import re

__all__ = ["printable"]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """The text with a mark for each control character: no name in a trace gives the terminal orders."""
    return _CONTROL.sub("\ufffd", text)
