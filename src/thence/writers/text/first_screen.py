"""The first answers about a trace as text for a terminal of 80 columns or more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from thence.analysis.soundness.findings import RULES
from thence.model.fitted_names import fitted
from thence.units import format_count, format_ns, format_share
from thence.writers.text.printable import printable
from thence.writers.text.summary import attribution_table, flowed, heading, row_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType

    from thence.analysis.glance import Glance

__all__ = ["answers", "first_screen", "next_line", "why_next"]

_MOST_CAUSES = 4
_MOST_PLACES = 3
_PLACE = 44
_LEAST_SHARE = 0.005


def first_screen(glance: Glance, top: int, width: int) -> RenderableType:
    """What ``thence report`` shows above the question to ask next.

    Args:
        glance: to be shown.
        top: how many rows at most.
        width: columns of the terminal.
    """
    summary = glance.summary
    return Group(
        heading(summary),
        "",
        row_table(summary, top, width),
        "",
        _answer_table(glance, width),
        "",
        attribution_table(summary, width),
        *(Text(printable(line), "bold red") for line in summary.soundness.lines),
        *(Text(printable(note), "dim") for note in summary.notes),
        *(Text(f"warning: {printable(text)}", "yellow") for text in summary.meta.warnings),
    )


def next_line(glance: Glance, inputs: str) -> Text:
    """The command line that asks the next question.

    Args:
        glance: that suggests it.
        inputs: as a command line names them.
    """
    step = glance.next_step
    command = printable(" ".join(("thence", step.verb, inputs, *step.options)))
    return Text.assemble(("\nnext  ", "bold"), (command, "green"))


def why_next(glance: Glance) -> RenderableType:
    """What suggests it, below the command line."""
    return Padding(Text(glance.next_step.why, "dim"), (0, 0, 0, 6))


def answers(glance: Glance) -> Iterator[tuple[str, list[str]]]:
    """What is answered, and the parts of the answer, one after the other."""
    summary = glance.summary
    known = glance.phases.filter(pl.col("phase").is_not_null())
    if not known.is_empty():
        yield (
            "phases",
            [
                f"{phase} {format_share(ns, summary.sum_ns)}"
                for phase, ns in known.rows()
                if ns >= _LEAST_SHARE * summary.sum_ns
            ],
        )
    if glance.communication_ns:
        share = format_share(glance.communication_ns, summary.busy_ns)
        exposed = format_ns(glance.exposed_ns)
        yield (
            "communication",
            [
                f"{format_ns(glance.communication_ns)} ({share} of busy)",
                f"{exposed} of it with nothing computed beside it",
            ],
        )
    yield from _idle(glance)
    yield "sound", _sound(glance)


def _idle(glance: Glance) -> Iterator[tuple[str, list[str]]]:
    idle = glance.idle.result
    if idle is None or not idle.idle_ns:
        if glance.idle.reason:
            yield "idle because of", [glance.idle.reason]
        return
    causes = idle.causes.filter(pl.col("share") >= _LEAST_SHARE).head(_MOST_CAUSES)
    yield "idle because of", _shares(causes["cause"].to_list(), causes["share"])
    places = (
        idle.rows.filter(pl.col("name").is_not_null(), pl.col("by") != "reason")
        .group_by("name")
        .agg(pl.col("share").sum())
        .sort("share", "name", descending=[True, False])
        .filter(pl.col("share") >= _LEAST_SHARE)
        .head(_MOST_PLACES)
    )
    if not places.is_empty():
        yield "idle at", _shares(fitted(places["name"].to_list(), _PLACE), places["share"])


def _shares(names: Iterable[str], shares: pl.Series) -> list[str]:
    return [f"{name} {format_share(share, 1)}" for name, share in zip(names, shares, strict=True)]


def _sound(glance: Glance) -> list[str]:
    soundness = glance.summary.soundness
    if not soundness.sound:
        found = len(soundness.findings)
        return [f"no: {format_count(found)} finding{'s' if found > 1 else ''} (thence check)"]
    unchecked = len({entry.code for entry in soundness.not_checked})
    rest = [f"{unchecked} of them could not be checked in full"] if unchecked else []
    return [f"yes: {len(RULES)} rules found nothing wrong", *rest]


def _answer_table(glance: Glance, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    rows = list(answers(glance))
    indent = max(len(question) for question, _ in rows) + 2
    for question, parts in rows:
        table.add_row(question, Text(flowed(map(printable, parts), width - indent)))
    return table
