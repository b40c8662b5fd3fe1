"""Folded stacks: a line ``outer;inner;innermost 1234`` for each stack, as flamegraph.pl and inferno read.

The value is whole nanoseconds. What a frame must not hold is replaced:

    ;                      U+FF1B, the full-width semicolon
    # at the beginning     U+FF03, the full-width number sign: readers take the line for a comment
    control characters     a space, newlines among them
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
    """Every line, with its newline; stacks that took no time are left out.

    Very deep stacks are shortened as `Flame.stacks` says, so that a file grows with the number of stacks.
    """
    shown = {name: _frame(name) for name in flame.nodes["name"].unique().to_list()}
    for frames, self_ns in flame.stacks():
        line = ";".join([shown.get(name, name) for name in frames])
        line = f"\uff03{line[1:]}" if line.startswith("#") else line
        yield f"{line} {self_ns}\n"


def _frame(name: str) -> str:
    return _CONTROL.sub(" ", name).replace(";", "\uff1b").strip() or "(no name)"
