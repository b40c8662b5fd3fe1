"""Folded stacks: a line ``outer;inner;innermost 1234`` for each stack, the input of flamegraph.pl and inferno.

The value is whole nanoseconds. Characters that have a meaning in the format are replaced in names:

    ;                          by U+FF1B, the full-width semicolon
    # at the start of a line   by U+FF03, the full-width number sign: readers skip such a line as a comment
    control characters         by a space, newlines included
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.analysis.flame.flame import Flame

__all__ = ["folded_lines"]

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def folded_lines(flame: Flame) -> Iterator[str]:
    """Yields every line with its newline; stacks without self time are left out.

    `Flame.stacks` shortens very deep stacks, so that the size of a file is proportional to the number of stacks.
    """
    shown = {name: _frame(name) for name in flame.nodes["name"].unique().to_list()}
    for frames, self_ns in flame.stacks():
        line = ";".join([shown.get(name, name) for name in frames])
        line = f"\uff03{line[1:]}" if line.startswith("#") else line
        yield f"{line} {self_ns}\n"


def _frame(name: str) -> str:
    return _CONTROL.sub(" ", name).replace(";", "\uff1b").strip() or "(no name)"
