"""``thence compile``: where XLA's compile time went."""

from __future__ import annotations

import click

from thence.cli.inputs import Inputs, trace_options
from thence.cli.output import Result, choice_option, result_options

__all__ = ["command"]

_EXAMPLES = """\b
Examples:
  thence compile rank0.zip
  thence compile rank0.zip --autotuning detail --format json
Compile threads that work at the same time share the wall time that they take, so
the parts add up to the whole.
"""

_HEADINGS = {"name": "phase", "count": "count", "self_ns": "time", "share": "share"}


@click.command("compile", epilog=_EXAMPLES)
@trace_options("rank")
@choice_option(
    "--autotuning",
    choices=("block", "detail"),
    meaning="Autotuning as one block, or phase by phase.",
)
@result_options()
def command(inputs: Inputs, autotuning: str, result: Result) -> None:
    """Compilation: wall time by phase, parallel threads accounted for."""
    trace = inputs.open()
    times = trace.compile_times(autotuning)
    document = times.to_json() | {"soundness": trace.soundness.findings_json()}
    notes = (*trace.soundness.lines, *trace.meta.warnings)
    result.emit(document, times.phases, _HEADINGS, notes)
