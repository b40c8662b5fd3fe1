"""``thence steps``: how long every step took, and how its time divides."""

from __future__ import annotations

from pathlib import Path

import click

from thence.cli.inputs import Inputs, trace_options
from thence.cli.output import Result, result_options
from thence.cli.verb import VerbCommand
from thence.errors import UsageError
from thence.model.selection import Selection

_EXAMPLES = """\b
Examples:
  thence steps traces/                       every rank of a job
  thence steps trace.json.gz --rank 0 --format csv
  thence steps run/*/summaries.jsonl         days of a recording that thence record --always made

A step begins on a GPU when the host has begun it and the work of earlier steps has ended; it ends
when the host has ended it and its own work has finished. Its time is busy or idle; exposed is the part
of the busy time in which it communicates and computes nothing. The causes of idle time are those of
"thence idle" and add up to it. A step stands out if it takes 10 % and 8 robust standard deviations
longer than the median of its GPU; the part that grew most is shown next to it. Steps that nothing
marks are found by what repeats: the passes of a server, the executions of the main XLA program, the
steps of an optimizer, launches of CUDA graphs, or calls of the outermost module; the first line says
which. The statistics of a GPU are of its typical steps: without the first, warm-up and outliers.
"""


@click.command("steps", cls=VerbCommand, epilog=_EXAMPLES)
@trace_options("rank", "device", "steps", "program")
@result_options()
def command(inputs: Inputs, result: Result) -> None:
    """Steps in order of time: duration, busy, exposed communication, idle time by cause; outliers."""
    summaries = [path for path in inputs.paths if Path(path).suffix == ".jsonl"]
    if len(summaries) < len(inputs.paths):
        result.show(inputs.open().steps())
        return
    from thence.watch.periods import steps_by_period

    if inputs.selection != Selection():
        raise UsageError("summaries.jsonl holds no single steps: leave out --rank, --device, --steps and --program")
    result.show(steps_by_period([Path(path) for path in summaries]))
