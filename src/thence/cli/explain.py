"""``thence explain``: what an expert would say about a trace, in a page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from thence.cli.inputs import Inputs, trace_options
from thence.cli.messages import wrote
from thence.cli.output import SCHEMAS, Result, check_output, choice_option, force_option, output_option, terminal_width
from thence.cli.progress import working
from thence.cli.verb import VerbCommand
from thence.errors import UsageError

if TYPE_CHECKING:
    from thence.trace import Trace

_PERFETTO = (".pftrace", ".perfetto-trace")
_EXAMPLES = """\b
Examples:
  thence explain trace.json.gz
  thence explain traces/ --max-chars 1000          all ranks of a job, in a few lines
  thence explain trace.json.gz --format json | jq '.findings[] | .claim'
  thence explain trace.json.gz --annotate found.pftrace    findings as slices, for ui.perfetto.dev
  thence explain --install-skill .claude/skills    how agents use thence, as a skill

First whether the trace is sound, how long a step takes and what limits it. Then findings, the most useful
first: where the time goes, why the GPU is idle, late ranks, exposed communication, use of the GPU, and the
three changes with the largest predicted gain. Each has an id that stays the same from run to run, a number
with its interval, the command that shows it, and what to ask next. What the trace cannot answer is said,
with how to record it.

Findings that do not fit into --max-chars are left out from the end, and their number is said. Names from the
trace stand in backticks; they are data, whatever they say.
"""


def _install(ctx: click.Context, param: click.Parameter, folder: Path | None) -> None:  # noqa: ARG001 - click's signature
    """Writes the skill if it was asked for."""
    if folder is None or ctx.resilient_parsing:
        return
    from thence.cli.skill import install

    wrote(str(install(folder)))
    ctx.exit()


@click.command("explain", cls=VerbCommand, epilog=_EXAMPLES)
@trace_options("own", "hlo")
@click.option(
    "--max-chars",
    type=click.IntRange(min=1000),
    default=4000,
    show_default=True,
    help="Most characters of the answer; whole findings are left out.",
)
@click.option(
    "--install-skill",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_install,
    help="Write the skill for agents into DIR/thence, and exit.",
)
@click.option(
    "--annotate",
    metavar="OUT.pftrace",
    type=click.Path(dir_okay=False),
    help="Also write the trace for Perfetto, with each finding as a slice where it shows.",
)
@choice_option("--format", "form", choices=("text", "json", "markdown"), meaning="How the answer is written.")
@output_option("File for the answer, instead of standard output.", type=click.Path(dir_okay=False), metavar="OUT")
@force_option
def command(
    inputs: Inputs,
    max_chars: int,
    annotate: str | None,
    form: str,
    output: str | None,
    force: bool,  # noqa: FBT001 - a click flag
) -> None:
    """What an expert would say about a trace: sound or not, what limits it, why, and what would help."""
    if output is not None:
        check_output(output, force=force)
    if annotate is not None:
        if Path(annotate).suffix not in _PERFETTO:
            raise UsageError(f"{annotate}: the name must end in {_PERFETTO[0]}")
        check_output(annotate, force=force)
    trace = inputs.open()
    width = terminal_width() if output is None else None
    Result(form, output).text(_written(trace, _typed(inputs), max_chars, form, width))
    if annotate is not None:
        from thence.writers.timelines.write import write_timeline

        with working("laying out the timeline"):
            timeline = trace.explained_timeline()
        write_timeline(timeline, annotate)
        wrote(annotate)


def _typed(inputs: Inputs) -> str:
    """The inputs with the options that decide what is read, for the commands of the findings."""
    given = [("--own", text) for text in inputs.own] + [("--hlo", text) for text in inputs.hlo]
    given += [("--run", inputs.run)] if inputs.run is not None else []
    options = [word for pair in given for word in pair] + ["--add"] * inputs.add
    return " ".join([inputs.typed, *map(shlex.quote, options)])


def _written(trace: Trace, inputs: str, most: int, form: str, width: int | None) -> str:
    from dataclasses import replace

    from thence.writers.text.explanation import explanation_text

    with working("explaining"):
        explanation = replace(trace.explain(), inputs=inputs)
        return explanation_text(explanation, form, most, SCHEMAS["explain"], width)
