"""``thence demo``: the report on a recording that ships with the package."""

from __future__ import annotations

from importlib import resources

import click

from thence.cli.inputs import Inputs
from thence.cli.output import console, print_table, top_rows
from thence.cli.verb import VerbCommand

RECORDING = "torch_eager_stack_rank0.json.gz"
"""Two training steps of a small GPT on one H200, with Python stacks (torch 2.11)."""


@click.command("demo", cls=VerbCommand)
@click.option("--top", type=top_rows, default=8, show_default=True, help="Rows to show of each table.")
def command(top: int) -> None:
    """Show a report on a recording of a small GPT that ships with thence."""
    from thence.writers.text.first_screen import heading
    from thence.writers.text.summary import attribution_table, row_table

    with resources.as_file(resources.files("thence") / "data" / RECORDING) as path:
        trace = Inputs((str(path),)).open()
    output = console()
    print_table(output, heading(trace.first_screen()))
    for by in ("kernel", "label", "module", "source"):
        print_table(output, f"\n[green]$ thence report {RECORDING} --by {by}[/]")
        print_table(output, row_table(trace.typical.report(by), top, output.width))
    print_table(output, "")
    print_table(output, attribution_table(trace.typical.report(), output.width))
