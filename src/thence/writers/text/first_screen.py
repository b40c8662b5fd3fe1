"""The first answers about a trace as text for a terminal of 80 columns or more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from thence.units import several
from thence.writers.text.merged_sentences import merged
from thence.writers.text.printable import printable
from thence.writers.text.summary import activity_counts, attribution_table, flowed, row_table, title, totals_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from thence.analysis.glance import Glance


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
        heading(glance),
        "",
        row_table(summary, top, width, depth, each=each),
        "",
        _answer_table(glance, width),
        "",
        attribution_table(summary, width),
        *(Text(printable(line), "bold red") for line in summary.soundness.lines),
        *(Text(printable(note), "dim") for note in merged(summary.notes)),
        *(Text(f"warning: {printable(text)}", "yellow") for text in merged(summary.meta.warnings)),
        *(Text(printable(text), "dim") for text in glance.advice),
    )


def heading(glance: Glance) -> RenderableType:
    """The inputs, the typical step, the verdict, and the totals of the whole recording."""
    return Group(title(glance.summary, glance.whole), *_headline(glance))


def _headline(glance: Glance) -> Iterator[RenderableType]:
    summary, headline = glance.summary, glance.headline
    if headline.steps is not None:
        basis = (f" ({printable(headline.steps.basis)})", "dim")
        yield Text.assemble((headline.steps.text, "bold"), basis)
    yield Text(printable(headline.verdict.text), "bold")
    for line in (headline.rest, headline.plain_text, headline.late):
        if line:
            yield Text(printable(line))
    if summary.idle_unknown:
        yield Text(f"idle time is unknown: {summary.idle_unknown}", "yellow")
    whole = glance.whole or summary
    part = ["whole recording"] if glance.whole else ["selected"] if summary.selection else []
    if summary.devices > 1:
        part.append(f"summed over {several(summary.devices, 'GPU')}")
        yield Text(f"{', '.join(part)}:", "dim")
        part = []
    yield Text.assemble(("".join(f"{text}  " for text in part), "dim"), totals_line(whole, summary))
    yield Text(activity_counts(whole))


def next_lines(glance: Glance, inputs: str) -> Iterator[tuple[Text, RenderableType]]:
    """The suggested commands, and the reason for each.

    Args:
        glance: the overview that determines the suggestions.
        inputs: the inputs as they are written on a command line.
    """
    for number, step in enumerate(glance.next_steps):
        command = printable(" ".join(("thence", step.verb, inputs, *step.options)))
        lead = "      " if number else "\nnext  "
        why = Padding(Text(step.why, "dim"), (0, 0, 0, 6), expand=False)
        yield Text.assemble((lead, "bold"), (command, "green")), why


def _answer_table(glance: Glance, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    rows = glance.answers
    indent = max(len(question) for question, _ in rows) + 2
    for question, parts in rows:
        table.add_row(question, Text(flowed(map(printable, parts), width - indent)))
    return table
