"""A console that prints only its own escape sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.segment import Segment

from thence.writers.text.printable import encodable, printable_lines

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import ConsoleOptions, RenderableType


class SafeConsole(Console):
    """Replaces control characters in whatever is printed, just before colours are added.

    Names in a trace may hold escape sequences, which could rewrite the screen or do worse. Rich itself removes only
    a few control characters. Where the encoding of the output lacks a character, its escape is printed, and bars
    become ASCII.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of something to print, safe and in the encoding of the output."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(encodable(printable_lines(segment.text), self.encoding), segment.style)
