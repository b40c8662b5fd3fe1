"""``thence report``: totals, and GPU time by anything."""

from __future__ import annotations

import sys

import click

from thence.cli.common import console, inputs_argument, open_with_progress, print_json, print_table

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
"""


@click.command("report", epilog=_EXAMPLES)
@inputs_argument
@click.option(
    "--by", type=click.Choice(BY), default="kernel", show_default=True, help="What the rows are."
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Rows of the table to show.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(("table", "json", "csv")),
    default="table",
    show_default=True,
    help="json and csv hold every row, with full kernel names.",
)
def command(inputs: tuple[str, ...], by: str, top: int, form: str) -> None:
    """Where the GPU time of a trace went."""
    show(inputs, by, top, form)


def show(inputs: tuple[str, ...], by: str, top: int, form: str) -> None:
    """Reads the inputs and prints their summary."""
    from thence.writers.table import summary_table

    summary = open_with_progress(inputs).summary(by)
    if form == "json":
        print_json(summary.to_json())
    elif form == "csv":
        click.echo(summary.rows.write_csv(), nl=False)
        for warning in summary.meta.warnings:
            click.echo(f"warning: {warning}", err=True)
    else:
        output = console()
        print_table(output, summary_table(summary, top, output.width))
    sys.stdout.flush()
