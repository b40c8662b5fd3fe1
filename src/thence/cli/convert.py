"""``thence convert``: writes a trace in another format."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from thence.cli.inputs import SELECTING, Inputs, trace_options
from thence.cli.messages import put, say, wrote
from thence.cli.output import check_output, choice_option, force_option, output_option
from thence.cli.progress import rows_written, working
from thence.cli.verb import VerbCommand
from thence.errors import UsageError
from thence.model.places import LANES

if TYPE_CHECKING:
    from thence.model.timeline import Timeline

_TO_STDOUT = {"pftrace": ".pftrace", "json": ".json", "json.gz": ".json.gz"}

_EXAMPLES = """\b
Examples:
  thence convert trace.json.gz -o trace.pftrace          open it at ui.perfetto.dev
  thence convert traces/ -o all_ranks.pftrace            all ranks on one clock
  thence convert traces/ -o job.pftrace --fold always    who is late in full, the others in rows
  thence convert traces/ -o two.pftrace --rank 0 --rank 2    these two in full
  thence convert trace.json -o t.pftrace --lanes label --lanes collective
  thence convert trace.json -o t.pftrace --gpu-views     for Perfetto's compute tabs, too
  thence convert profile.xplane.pb -o trace.json.gz      for chrome://tracing
  thence convert trace.json -o tables.parquet/
  thence convert trace.json -o - --to json | jq .
"""


@click.command("convert", cls=VerbCommand, epilog=_EXAMPLES)
@trace_options(*SELECTING, "own", "hlo")
@output_option(
    "File ending in .pftrace, .json or .json.gz, folder ending in .parquet, or - for standard output.",
    required=True,
    metavar="OUT",
)
@click.option(
    "--lanes",
    type=click.Choice(LANES),
    multiple=True,
    help="Also show kernels on rows by this kind, next to the streams (Perfetto). Repeatable.",
)
@choice_option(
    "--clocks",
    choices=("aligned", "recorded"),
    meaning="aligned: shift each of several ranks as a whole by one offset, so that their collectives end at the same "
    "time; offsets are printed and written to the file. recorded: shift nothing. Durations never change.",
)
@choice_option(
    "--fold",
    choices=("auto", "always", "never"),
    meaning="Perfetto traces of many ranks can show two ranks in full (the one that makes the others wait most, and "
    "the one it is compared with) and a row with a span per step for every other. auto: do so for more than 8 "
    "ranks without --rank. always: also for fewer, and for those that --rank selects. never: all ranks in full.",
)
@choice_option("--to", choices=tuple(_TO_STDOUT), meaning="Format on standard output.")
@click.option(
    "--gpu-views",
    is_flag=True,
    help="Also write GPU activities in the form that Perfetto's own GPU views (lists of compute kernels) read. "
    "Queries that add up all slices of the file then count them twice.",
)
@force_option
def command(
    inputs: Inputs,
    output: str,
    to: str,
    force: bool,  # noqa: FBT001 - click passes it by name
    **shown: Any,
) -> None:
    """Write a trace for Perfetto, Chrome, or as Parquet tables."""
    if output == "-":
        _to_stdout(inputs, _TO_STDOUT[to], shown)
        return
    from thence.writers.text.merged_sentences import merged
    from thence.writers.timelines.write import ending_of, write_timeline

    ending = ending_of(output)  # before anything is read
    check_output(output, force=force)
    timeline = _timeline(inputs, ending, **shown)
    with rows_written() as progress:
        write_timeline(timeline, output, progress)
    for note in timeline.notes:
        say(note)
    for warning in merged(timeline.trace.meta.warnings):
        say(f"warning: {warning}")
    tables = timeline.trace
    wrote(output, f"{tables.gpu.height:,} device activities, {tables.host.height:,} host ranges")


def _timeline(
    inputs: Inputs, ending: str, *, lanes: tuple[str, ...], clocks: str, gpu_views: bool, fold: str
) -> Timeline:
    from thence.folding import folded_timeline, has_many_ranks
    from thence.writers.timelines.write import PERFETTO

    if fold == "always" and ending not in PERFETTO:
        raise UsageError(f"only {' and '.join(PERFETTO)} have rows for ranks that are folded, not {ending}")
    trace = inputs.open()
    with working("laying out the timeline"):
        if fold == "always" or (fold == "auto" and ending in PERFETTO and has_many_ranks(trace)):
            made = folded_timeline(trace, lanes, clocks)
        else:
            made = trace.timeline(lanes, clocks)
        return replace(made, gpu_views=gpu_views)


def _to_stdout(inputs: Inputs, ending: str, shown: dict[str, Any]) -> None:
    if sys.stdout.isatty() and ending != ".json":
        raise UsageError("binary output is not written to a terminal; send it to a file or a pipe")
    from thence.writers.timelines.write import write_timeline_to

    timeline = _timeline(inputs, ending, **shown)
    if sys.stdout.isatty():
        whole = io.BytesIO()
        write_timeline_to(timeline, whole, ending)
        put(whole.getvalue().decode())
    else:
        write_timeline_to(timeline, sys.stdout.buffer, ending)
        sys.stdout.flush()
    for note in timeline.notes:
        say(note)
