"""Folded stacks: a line ``outer;inner;innermost 1234`` for each stack, the input of flamegraph.pl and inferno.

The value is whole nanoseconds. Characters that have a meaning in the format are replaced in names:

    ;                          by U+FF1B, the full-width semicolon
    # at the start of a line   by U+FF03, the full-width number sign: readers skip such a line as a comment
    control characters         by a space, newlines included
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import polars as pl

from thence.model.shortened_names import narrowed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.analysis.flame.answer import Flame

MAX_TEXT, MAX_TEXT_PER_STACK = 64_000_000, 5_000
"""Characters of a file, and more for each stack; those of real programs have some hundred frames of 40 characters."""
_WIDTHS = (1000, 100, 40)
"""Characters of the longest name that are tried, in this order."""
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def folded_lines(flame: Flame) -> Iterator[str]:
    """Yields every line with its newline; stacks without self time are left out.

    The size of a file is proportional to the number of stacks: `Flame.stacks` shortens very deep stacks, and if the
    lines exceed `MAX_TEXT`, long names are shortened.
    """
    names = flame.nodes["name"].unique(maintain_order=True)
    shown = {name: _frame(name) for name in names.to_list()}
    for width in _WIDTHS:
        if _fits(flame, shown):
            break
        narrow = narrowed(pl.Series(list(shown.values())), width).to_list()
        shown = dict(zip(shown, narrow, strict=True))
    for frames, self_ns in flame.stacks():
        line = ";".join([shown.get(name, name) for name in frames])
        line = f"\uff03{line[1:]}" if line.startswith("#") else line
        yield f"{line} {self_ns}\n"


def _fits(flame: Flame, shown: dict[str, str]) -> bool:
    """Whether the lines are not too long for their number."""
    width = {name: len(text) + 1 for name, text in shown.items()}
    nodes = flame.nodes
    stacks = int((nodes["self_ns"] > 0).sum())
    most = MAX_TEXT + MAX_TEXT_PER_STACK * stacks
    longest = max(width.values(), default=0) * int(nodes["depth"].to_numpy().max(initial=0))
    if longest * stacks <= most:
        return True
    return sum(sum([width.get(name, 0) for name in frames]) for frames, _ in flame.stacks()) <= most


def _frame(name: str) -> str:
    return _CONTROL.sub(" ", name).replace(";", "\uff1b").strip() or "(no name)"
