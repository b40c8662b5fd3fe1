"""``thence compile``: where XLA's compile time went."""

from __future__ import annotations

import click

from thence.cli.common import (
    choice_option,
    emit,
    format_option,
    inputs_argument,
    open_with_progress,
)

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
@inputs_argument
@choice_option(
    "--autotuning",
    choices=("block", "detail"),
    meaning="Autotuning as one block, or phase by phase.",
)
@format_option
def command(inputs: tuple[str, ...], autotuning: str, form: str) -> None:
    """Compilation: wall time by phase, parallel threads accounted for."""
    trace = open_with_progress(inputs)
    result = trace.compile_times(autotuning)
    emit(result.to_json(), result.phases, _HEADINGS, form, trace.meta.warnings)
