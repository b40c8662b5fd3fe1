"""``thence compile``: where XLA's compile time went."""

from __future__ import annotations

import click

from thence.cli.inputs import Inputs, trace_options
from thence.cli.output import Result, choice_option, result_options
from thence.cli.verb import VerbCommand

_EXAMPLES = """\b
Examples:
  thence compile rank0.zip
  thence compile rank0.zip --autotuning detail --format json
  thence compile rank*.zip                   time of all ranks, of the fastest and the slowest

Compile threads that work at the same time share the wall time, so that the parts add up to the
whole. The table ends at 99 % of it; --top shows more.
"""


@click.command("compile", cls=VerbCommand, epilog=_EXAMPLES)
@trace_options("rank")
@choice_option("--autotuning", choices=("block", "detail"), meaning="Autotuning as one block, or phase by phase.")
@result_options(without="as many as hold 99 % of the time")
def command(inputs: Inputs, autotuning: str, result: Result) -> None:
    """Compilation: wall time by phase, parallel threads accounted for."""
    result.show(inputs.open().compile(autotuning))
