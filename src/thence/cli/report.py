"""``thence report``: totals, and GPU time by anything."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thence.cli.common import (
    choice_option,
    console,
    force_option,
    hlo_option,
    inputs_argument,
    json_text,
    open_with_progress,
    output_option,
    print_json,
    print_table,
)
from thence.errors import UsageError

if TYPE_CHECKING:
    from thence.analysis.summary import Summary
    from thence.trace import Trace

__all__ = ["command", "show"]

# Listed here and not taken from the analysis, so that --help and completion need not import it;
# a test holds the two lists together.
BY = (
    "kernel", "label", "module", "op", "ops", "source", "stack", "phase", "step",
    "program", "hlo", "opcode", "op_name", "collective", "kind", "rank", "device", "stream",
)  # fmt: skip

_EXAMPLES = """\b
Examples:
  thence report trace.json.gz
  thence report trace.json.gz --by label
  thence report traces/ --by rank                  all ranks of a job
  thence report trace.json --by kernel --format json | jq '.rows[0]'
  zcat trace.json.gz | thence report -
  thence report traces/ -o report.html             one page with everything, offline
"""

_ENDINGS = {".html": "html", ".htm": "html", ".json": "json", ".csv": "csv"}


@click.command("report", epilog=_EXAMPLES)
@inputs_argument
@choice_option("--by", choices=BY, meaning="What the rows are.")
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Rows of the table to show.",
)
@choice_option(
    "--format",
    "form",
    choices=("table", "json", "csv"),
    meaning="json and csv hold every row, with full kernel names.",
)
@output_option(
    ".html (one page with everything, needs Plotly), .json or .csv.",
    type=click.Path(dir_okay=False),
)
@hlo_option
@force_option
def command(output: str | None, force: bool, **options: Any) -> None:  # noqa: FBT001 - a click flag
    """Where the GPU time of a trace went."""
    inputs, hlo = options.pop("inputs"), options.pop("hlo")
    if output is None:
        show(open_with_progress(inputs, hlo), **options)
        return
    form = _format(output)
    if Path(output).exists() and not force:
        raise UsageError(f"{output} exists; --force overwrites it")
    _write(Path(output), _document(open_with_progress(inputs, hlo), options["by"], form))


def show(trace: Trace, by: str, top: int, form: str) -> None:
    """Prints the summary of a trace."""
    from thence.writers.table import summary_table

    summary = trace.summary(by)
    if form == "json":
        print_json(summary.to_json())
    elif form == "csv":
        click.echo(summary.rows.write_csv(), nl=False)
        _warn(summary)
    else:
        output = console()
        print_table(output, summary_table(summary, top, output.width))
    sys.stdout.flush()


def _format(output: str) -> str:
    form = _ENDINGS.get(Path(output).suffix.lower())
    if form is None:
        raise UsageError(f"{output}: the name must end in one of {', '.join(_ENDINGS)}")
    return form


def _document(trace: Trace, by: str, form: str) -> str:
    if form == "html":
        return trace.report_html()
    summary = trace.summary(by)
    if form == "json":
        return json_text(summary.to_json())
    _warn(summary)
    return summary.rows.write_csv()


def _warn(summary: Summary) -> None:
    for warning in summary.meta.warnings:
        click.echo(f"warning: {warning}", err=True)


def _write(path: Path, text: str) -> None:
    """The file appears under its name only when it is complete."""
    from thence.beside import text_beside

    with text_beside(path) as stream:
        stream.write(text)
