"""``thence check``: whether the figures of a trace can be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from thence.cli.inputs import Inputs, trace_options
from thence.cli.output import Result, console, print_table, result_options
from thence.units import format_share

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from thence.analysis.soundness.findings import Finding, Soundness

_EXAMPLES = """\b
Examples:
  thence check trace.json.gz
  thence check traces/                             all ranks of a job
  thence check trace.json.gz --format json | jq '.findings[] | .text'
  thence check rank*.json.gz && thence report rank*.json.gz

Exit code: 0 if nothing wrong was found, even if something could not be checked,
1 if the trace is not sound, 2 if it could not be read.
"""


@click.command("check", epilog=_EXAMPLES)
@trace_options()
@result_options(without="all")
def command(inputs: Inputs, result: Result) -> int:
    """Whether the figures of a trace can be trusted: lost work, impossible times, ranks recorded apart."""
    trace = inputs.whole()
    soundness = trace.soundness
    if result.form == "json":
        result.emit(soundness.to_json(), soundness.frame(), {}, trace.meta.warnings)
    elif result.form == "csv":
        result.text(soundness.frame().write_csv())
    else:
        _show(soundness, result.top)
    return 0 if soundness.sound else 1


def _show(soundness: Soundness, top: int | None) -> None:
    """One line for each finding, note and rule that was not checked; at most ``top`` of each."""
    from rich.text import Text

    from thence.writers.text.printable import printable

    output = console()

    def line(text: str, style: str = "") -> None:
        print_table(output, Text(printable(text), style))

    line(soundness.verdict, "bold green" if soundness.sound else "bold red")
    for text in _texts(soundness.findings, top):
        line(f"  {text}", "red")
    if soundness.notes:
        line("notes:", "bold")
    for text in _texts(soundness.notes, top):
        line(f"  {text}")
    if soundness.not_checked:
        line("not checked:", "bold")
    for text, codes in soundness.not_checked_reasons().items():
        line(f"  {', '.join(codes)}: {text}", "dim")


def _texts(findings: Sequence[Finding], top: int | None) -> Iterator[str]:
    for finding in findings[:top]:
        share = f" ({format_share(finding.span_share, 1)} of the span)" if finding.span_ns else ""
        yield f"{finding.code}: {finding.text}{share}"
    if top is not None and len(findings) > top:
        yield f"... {len(findings) - top:,} more; --top {len(findings)} shows all"
