"""``thence programs``: the executions of XLA programs."""

from __future__ import annotations

import click

from thence.cli.inputs import Inputs, trace_options, warm_up_option
from thence.cli.output import Result, result_options
from thence.cli.verb import VerbCommand

_EXAMPLES = """\b
Examples:
  thence programs profile_dir/
  thence programs rank0.zip rank1.zip --warm-up keep
  thence programs profile_dir/ --top 40            also programs below 1 % of the time
  thence programs host.xplane.pb --format csv > programs.csv
"""


@click.command("programs", cls=VerbCommand, epilog=_EXAMPLES)
@trace_options("rank", "device", "program", "hlo")
@warm_up_option
@result_options(without="those of at least 1 % of the time")
def command(inputs: Inputs, warm_up: str, result: Result) -> None:
    """XLA programs: executions, span and busy time, idle time inside and between, launch latency.

    Shares are of the summed spans of all programs; programs below 1 % are one row, unless --top is given.
    +- is the standard deviation over the executions. The span of an execution includes the idle time inside
    it. Between is the gap since the previous execution on the same device, less other work in it.
    """
    result.show(inputs.open().programs(warm_up))
