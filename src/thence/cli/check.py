"""``thence check``: whether the figures of a trace can be trusted."""

from __future__ import annotations

import click

from thence.cli.inputs import Inputs, trace_options
from thence.cli.output import Result, result_options
from thence.cli.verb import VerbCommand

_EXAMPLES = """\b
Examples:
  thence check trace.json.gz
  thence check traces/                             all ranks of a job
  thence check trace.json.gz --format json | jq '.findings[] | .text'
  thence check rank*.json.gz && thence report rank*.json.gz

Exit code: 0 if nothing wrong was found, even if something could not be checked,
1 if the trace is not sound, 2 if it could not be read.
"""


@click.command("check", cls=VerbCommand, epilog=_EXAMPLES)
@trace_options()
@result_options(without="all")
def command(inputs: Inputs, result: Result) -> int:
    """Whether the figures of a trace can be trusted: lost work, impossible times, ranks recorded apart."""
    soundness = inputs.whole().check()
    result.show(soundness)
    return 0 if soundness.sound else 1
