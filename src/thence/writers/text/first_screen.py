"""The first answers about a trace as text for a terminal of 80 columns or more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from thence.analysis.report.summary import Totals, overlap_text
from thence.units import several
from thence.writers.text.merged_sentences import merged
from thence.writers.text.printable import printable
from thence.writers.text.summary import activity_counts, attribution_table, flowed, row_table, title, totals_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from thence.analysis.report.first_screen import FirstScreen


def first_screen(
    screen: FirstScreen, top: int, width: int, depth: int | None = None, *, each: bool = False, work: bool = False
) -> RenderableType:
    """The part of the output of ``thence report`` above the suggested command.

    Args:
        top: most rows of the table.
        width: width of the terminal in characters.
        depth: levels of a tree, as `row_table` takes them.
        each: whether every layer of a model has a row of its own.
        work: whether the table shows headroom and FLOP/s, as `row_table` takes it.
    """
    summary = screen.summary
    return Group(
        heading(screen),
        "",
        row_table(summary, top, width, depth, each=each, work=work),
        "",
        _answer_table(screen, width),
        "",
        attribution_table(summary, width),
        *(Text(printable(line), "bold red") for line in summary.soundness.lines),
        *(Text(printable(note), "dim") for note in merged(summary.notes)),
        *(Text(f"warning: {printable(text)}", "yellow") for text in merged(summary.meta.warnings)),
    )


def heading(screen: FirstScreen) -> RenderableType:
    """The inputs, the typical step, the verdict, and the totals of the whole recording."""
    return Group(title(screen.summary, screen.whole), *_headline(screen))


def _headline(screen: FirstScreen) -> Iterator[RenderableType]:
    summary, headline = screen.summary, screen.headline
    if headline.steps is not None:
        basis = (f" ({printable(headline.steps.basis)})", "dim")
        yield Text.assemble((headline.steps.text, "bold"), basis)
    yield Text(printable(headline.verdict.text), "bold")
    for line in (headline.rest, headline.plain_text, headline.late):
        if line:
            yield Text(printable(line))
    if summary.idle_unknown:
        yield Text(f"idle time is unknown: {summary.idle_unknown}", "yellow")
    whole = screen.whole or summary
    part = ["whole recording"] if screen.whole else ["selected"] if summary.selection else []
    if summary.devices > 1:
        part.append(f"summed over {several(summary.devices, 'GPU')}")
        yield Text(f"{', '.join(part)}:", "dim")
        part = []
    yield Text.assemble(("".join(f"{text}  " for text in part), "dim"), totals_line(whole, summary))
    yield Text(activity_counts(whole))
    if isinstance(whole, Totals) and (said := overlap_text(whole)):
        yield Text(said, "dim")


def next_lines(screen: FirstScreen, inputs: str) -> Iterator[tuple[Text, RenderableType]]:
    """The suggested commands with the reason for each, and what other recordings would show.

    Args:
        screen: the first screen that determines the suggestions.
        inputs: the inputs as they are written on a command line.
    """
    for number, step in enumerate(screen.next_steps):
        command = printable(" ".join(("thence", step.verb, inputs, *step.options)))
        lead = "      " if number else "\nnext  "
        why = Padding(Text(step.why, "dim"), (0, 0, 0, 6), expand=False)
        yield Text.assemble((lead, "bold"), (command, "green")), why
    for text in screen.advice:
        yield Text("hint", style="bold"), Padding(Text(printable(text)), (0, 0, 0, 6), expand=False)


def _answer_table(screen: FirstScreen, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    rows = screen.answers
    indent = max(len(question) for question, _ in rows) + 2
    for question, parts in rows:
        table.add_row(question, Text(flowed(map(printable, parts), width - indent)))
    return table
