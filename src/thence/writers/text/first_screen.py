"""The first answers about a trace as text for a terminal of 80 columns or more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from thence.writers.text.merged_sentences import merged
from thence.writers.text.printable import printable
from thence.writers.text.summary import attribution_table, flowed, heading, row_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from thence.analysis.glance import Glance

__all__ = ["first_screen", "next_line", "why_next"]


def first_screen(
    glance: Glance, top: int, width: int, depth: int | None = None, *, each: bool = False
) -> RenderableType:
    """The part of the output of ``thence report`` above the suggested command.

    Args:
        glance: the overview to show.
        top: most rows of the table.
        width: width of the terminal in characters.
        depth: levels of a tree, as `row_table` takes them.
        each: whether every layer of a model has a row of its own.
    """
    summary = glance.summary
    return Group(
        heading(summary),
        "",
        row_table(summary, top, width, depth, each=each),
        "",
        _answer_table(glance, width),
        "",
        attribution_table(summary, width),
        *(Text(printable(line), "bold red") for line in summary.soundness.lines),
        *(Text(printable(note), "dim") for note in merged(summary.notes)),
        *(Text(f"warning: {printable(text)}", "yellow") for text in merged(summary.meta.warnings)),
    )


def next_line(glance: Glance, inputs: str) -> Text:
    """The line with the suggested next command.

    Args:
        glance: the overview that determines the suggestion.
        inputs: the inputs as they are written on a command line.
    """
    step = glance.next_step
    command = printable(" ".join(("thence", step.verb, inputs, *step.options)))
    return Text.assemble(("\nnext  ", "bold"), (command, "green"))


def why_next(glance: Glance) -> RenderableType:
    """The reason for the suggested command, printed below it."""
    return Padding(Text(glance.next_step.why, "dim"), (0, 0, 0, 6), expand=False)


def _answer_table(glance: Glance, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    rows = glance.answers
    indent = max(len(question) for question, _ in rows) + 2
    for question, parts in rows:
        table.add_row(question, Text(flowed(map(printable, parts), width - indent)))
    return table
