"""``thence report``: totals, and GPU time by one kind of place."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from thence.cli.inputs import SELECTING, Inputs, trace_options
from thence.cli.messages import say
from thence.cli.output import (
    Result,
    choice_option,
    console,
    json_text,
    print_table,
    result_options,
)
from thence.model.places import BY, STEP_KIND

if TYPE_CHECKING:
    from thence.trace import Trace

__all__ = ["command"]

_EXAMPLES = """\b
Examples:
  thence report trace.json.gz
  thence report trace.json.gz --by label
  thence report traces/ --by rank                  all ranks of a job
  thence report logs/ --run 2026_01_02_09_00_00    of a folder with several runs, not the newest
  thence report profile_dir/ --by hlo --warm-up heuristic   JAX: without warm-up and the autotuner
  thence report trace.json --steps 3:6 --only attention
  thence report server.json.gz --by step-kind      of vLLM or SGLang: time per step by batch size, layer, kernel
  thence report trace.json --by kernel --format json | jq '.rows[0]'
  zcat trace.json.gz | thence report -
  thence report traces/ -o report.html             one page with everything, offline
"""

_STEP_HEADINGS = {
    "step_kind": "kind of step", "steps": "steps", "total_ns": "total", "per_step_ns": "per step",
}  # fmt: skip
_PART_HEADINGS = {
    "step_kind": "kind of step", "layer": "layer", "kernel": "kernel", "count": "count", "total_ns": "total",
    "per_step_ns": "per step",
}  # fmt: skip
_ENDINGS = {".html": "html", ".htm": "html", ".json": "json", ".csv": "csv"}


@click.command("report", epilog=_EXAMPLES)
@trace_options(*SELECTING, "own", "hlo")
@choice_option("--by", choices=BY, meaning="What the rows are.")
@click.option(
    "--details",
    is_flag=True,
    help="Also list the CUDA graphs that could not be matched to labels, with the reason.",
)
@result_options(_ENDINGS, ".html (one page with everything), .json or .csv.", top=20)
def command(inputs: Inputs, by: str, details: bool, result: Result) -> None:  # noqa: FBT001 - a click flag
    """Where the GPU time of a trace went."""
    trace = inputs.open()
    if result.form == "html":
        result.text(trace.report_html())
    else:
        _show(trace, by, result, details=details)


def _show(trace: Trace, by: str, result: Result, *, details: bool) -> None:
    summary = trace.summary(by)
    steps = trace.step_kinds() if by == STEP_KIND else None
    if result.form == "json":
        more = steps.to_json() if steps else {}
        result.text(json_text(summary.to_json() | more) + "\n")
    elif result.form == "csv":
        result.text(summary.rows.write_csv())
        for line in summary.soundness.lines:
            say(line)
        for warning in summary.meta.warnings:
            say(f"warning: {warning}")
    else:
        from thence.writers.text.summary import details_table, summary_table

        output = console()
        print_table(output, summary_table(summary, result.top or summary.rows.height, output.width))
        if details:
            print_table(output, details_table(summary, output.width))
        if steps:
            result.table(steps.rows, _STEP_HEADINGS)
            result.table(steps.parts, _PART_HEADINGS)
        sys.stdout.flush()
