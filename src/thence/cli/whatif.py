"""``thence whatif``: predicts the gain of a change by simulating the recorded program with the change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from thence.cli.inputs import Inputs, trace_options
from thence.cli.output import Result, result_options
from thence.cli.verb import VerbCommand

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


_EXAMPLES = """\b
Examples:
  thence whatif traces/                                the ten changes with the largest gain
  thence whatif trace.json.gz --free label:attention
  thence whatif trace.json.gz --scale 'kernel:gemm=0.5' --no-wait item
  thence whatif traces/ --free collective:all-gather --on-time rank:3
  thence whatif trace.json.gz --at-roofline 'module:mlp=0.8'

Each change is predicted by itself. --free and --scale take KIND:REGEX: label, module, op, source and
other places, or kernel, collective, or cause (of "thence idle").
A label, module, op or source is predicted twice: for its kernels alone, and with what the host did for
them. So is a collective: without its waiting for late ranks (only moving data is free), and with it.

The prediction is a simulation of the recorded program over threads, streams, events, waits and ranks; the
simulation of what was recorded is exact. It holds for the profiled program, whose host code is slower; where
a recording by thence tells how long a step is without being recorded, it holds for that program.
Gains within the interval count as noise. Nothing is predicted where activities began later than the
trace explains by more than 5 % of the time, inside CUDA graphs whose edges are unknown, or for other numbers of GPUs.
The critical path shows what every moment waited for last; a long time on it does not mean a large gain.
"""


def _repeated(name: str, meaning: str, metavar: str) -> Callable[[Any], Any]:
    return click.option(f"--{name}", multiple=True, metavar=metavar, help=f"{meaning} Repeatable.")


@click.command("whatif", cls=VerbCommand, epilog=_EXAMPLES)
@trace_options("own", "hlo")
@_repeated("free", "This work takes no time.", "KIND:REGEX")
@_repeated("scale", "This work takes its time multiplied by FACTOR.", "KIND:REGEX=FACTOR")
@_repeated(
    "at-roofline",
    "This work takes as long as the GPU allows (thence roofline), or that divided by SHARE.",
    "KIND:REGEX[=SHARE]",
)
@_repeated("no-wait", "Calls that wait return at once: item, all, a kind (stream, event, device) or a place.", "WHAT")
@_repeated("on-time", "No rank waits for this one in collectives.", "rank:N")
@result_options(without="all changes and 8 rows of the critical path")
def command(inputs: Inputs, result: Result, **asked: tuple[str, ...]) -> None:
    """What a change would gain: the recorded program simulated with it."""
    from thence.analysis.whatif.changes import parse_change

    for action, texts in asked.items():
        for text in texts:
            # Raises before anything is read if a change cannot be parsed.
            parse_change(action.replace("_", "-"), text)
    result.show(inputs.open().whatif(**asked))
