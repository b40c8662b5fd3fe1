"""``thence report``: totals, and GPU time by one kind of place."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from thence.cli.inputs import SELECTING, Inputs, trace_options
from thence.cli.output import Result, console, print_command, print_table, result_options
from thence.cli.progress import working
from thence.cli.verb import VerbCommand
from thence.errors import UsageError
from thence.model.places import BY, LAYERED, STEP_KIND

if TYPE_CHECKING:
    from thence.model.places import By
    from thence.trace import Trace

_EXAMPLES = """\b
Examples:
  thence report trace.json.gz                      or thence trace.json.gz
  thence report trace.json.gz --by kernel
  thence report trace.json.gz --by module --depth 3    the model as a tree; --each: every layer
  thence report traces/ --by rank                  all ranks of a job
  thence report logs/ --run 2026_01_02_09_00_00    of a folder with several runs, not the newest
  thence report profile_dir/ --by hlo --warm-up heuristic   JAX: without warm-up and the autotuner
  thence report trace.json --steps 3:6 --only attention
  thence report profile_dir/ --program main        of the XLA program that the steps are made of
  thence report server.json.gz --by step-kind      of vLLM or SGLang: steps by batch size
  thence report trace.json --by kernel --format json | jq '.rows[0]'
  zcat trace.json.gz | thence report -
  thence report traces/ -o report.html             one page with everything, offline
"""

_ENDINGS = {".html": "html", ".htm": "html", ".json": "json", ".csv": "csv"}


@click.command("report", cls=VerbCommand, epilog=_EXAMPLES)
@trace_options(*SELECTING, "own", "hlo")
@click.option(
    "--by",
    type=click.Choice(BY),
    help="What to group by. Default: the first of source and op_name (JAX), module, label, source and op that covers "
    "two thirds of the GPU time, else the one that covers most; always kernel with --format json or csv.",
)
@click.option(
    "--each",
    is_flag=True,
    help="By module, label and op_name: list every layer of a model, instead of one row for all equal layers.",
)
@click.option(
    "--depth",
    type=click.IntRange(min=1),
    help="By module, label and op_name: show a tree of this many levels, each part of the model with the time of "
    "everything inside of it. Without --by, the first of module, label and op_name.",
)
@click.option(
    "--details", is_flag=True, help="Also list the CUDA graphs that could not be matched to labels, with the reason."
)
@result_options(_ENDINGS, ".html (one page with everything), .json or .csv.", top=12)
def command(
    inputs: Inputs,
    by: By | None,
    each: bool,  # noqa: FBT001 - a click flag
    depth: int | None,
    details: bool,  # noqa: FBT001 - a click flag
    result: Result,
) -> None:
    """Where the GPU time of a trace went, why the GPU was idle, what is unsound, and what to ask next."""
    if depth is not None and by not in (None, *LAYERED):
        raise UsageError(f"--depth makes a tree by {', '.join(LAYERED)}, not by {by}")
    trace = inputs.open()
    if depth is not None and by is None:
        by = trace.tree_kind
    if result.form == "html":
        with working("making the page"):
            page = trace.report_html()
        result.text(page)
    elif result.form == "table":
        _show(trace, by, result, inputs.typed, depth, each=each, details=details)
    else:
        _document(trace, by or "kernel", result, depth, each=each)


def _document(trace: Trace, by: By, result: Result, depth: int | None, *, each: bool) -> None:
    """Writes the summary as JSON or CSV, to a file or to standard output."""
    summary, headline = trace.report_and_headline(by) if result.form == "json" else (trace.report(by), None)
    tree = None if depth is None else summary.tree(depth, each=each)
    if headline is not None:
        steps = trace.step_kinds() if by == STEP_KIND else None
        more = steps.to_json() if steps else {}
        nodes = {} if tree is None else {"tree": tree}
        result.json(headline.to_json() | summary.to_json() | nodes | more)
        return
    warnings = (f"warning: {text}" for text in summary.meta.warnings)
    result.csv(summary.to_frame() if tree is None else tree, [*summary.soundness.lines, *warnings])


def _show(
    trace: Trace, by: By | None, result: Result, inputs: str, depth: int | None, *, each: bool, details: bool
) -> None:
    """Prints the first screen, and the further tables for which options ask."""
    from thence.writers.text.first_screen import first_screen, next_lines
    from thence.writers.text.summary import details_table

    with working("finding causes of idle time"):
        screen = trace.first_screen(by)
    output = console()
    rows = result.top or screen.summary.rows.height
    print_table(output, first_screen(screen, rows, output.width, depth, each=each, work=by is not None))
    if details:
        print_table(output, details_table(screen.summary, output.width))
    if by == STEP_KIND:
        result.views(trace.step_kinds().views(each=each))
    for line, why in next_lines(screen, inputs):
        print_command(output, line)
        print_table(output, why)
    sys.stdout.flush()
