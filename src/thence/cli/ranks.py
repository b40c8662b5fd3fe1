"""``thence ranks``: which ranks made the others wait, for how long, since which step, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from thence.cli.inputs import Inputs, trace_options
from thence.cli.output import Result, console, print_notes, result_options
from thence.cli.verb import VerbCommand
from thence.errors import ThenceError
from thence.model.answer import TableView
from thence.units import format_ns, format_share

if TYPE_CHECKING:
    from thence.analysis.ranks.answer import Job
    from thence.trace import Trace

_EXAMPLES = """\b
Examples:
  thence ranks traces/                       all ranks of a job
  thence ranks traces/ --format json
  thence report traces/ -o report.html       heat map of ranks and steps, on its page
  thence ranks traces/ --what-if             the step without a straggler's delay, replayed

A straggler makes others wait for more than 2 % of a step on average, and for more than random
variation explains: with 99 % confidence over all devices together, its mean over the steps is above 0.
The bound that is shown has 95 % confidence. "waits" is the time in which a device waits in collectives
and computes nothing; time that a late rank itself waited for another rank is not counted as caused by it.

The extra time of a late rank before its late arrivals, compared with the rank in the middle, by cause:

\b
  slower GPU    the same kernels of the same shapes take longer, most of them
  more work     kernels ran more often, or with other shapes
  compute       some kernels take longer
  memcpy        memcpys and memsets while nothing computed
  idle: CAUSE   the causes of `thence idle`: loader, host, operator, sync, ...
  transfers     of collectives in other groups: see slow links
  unknown       the trace does not show the cause
"""

_CLOCKS = {
    "rank": "rank",
    "offset_ns": "clock offset",
    "drift_ns_per_s": "drift per second",
    "residual_median_ns": "residual median",
    "residual_p90_ns": "residual p90",
    "instances": "collectives",
}
_PAGE = "; the ranks are on the page that thence report INPUT -o OUT.html writes"


@click.command("ranks", cls=VerbCommand, epilog=_EXAMPLES)
@trace_options("rank", "device", "program", "own", "hlo")
@click.option(
    "--what-if",
    "what_if",
    is_flag=True,
    help="Also replay the job without each straggler's delay (reads all ranks' activities).",
)
@click.option("--clocks", is_flag=True, help="Also list offset, drift and residual of each clock.")
@result_options(without="10", hint=_PAGE)
def command(inputs: Inputs, what_if: bool, clocks: bool, result: Result) -> None:  # noqa: FBT001 - click flags
    """Who made the other ranks wait, how long, since which step, and why."""
    trace = inputs.open()
    job = trace.ranks()
    replayed = _replayed(trace, job) if what_if else []
    notes = [text for _, text in replayed]
    if what_if and not replayed:
        notes.append("--what-if: no late rank is named, so there is no delay to leave out of the replay")
    if result.form == "table":
        if not (what_if or job.stragglers.is_empty()):
            notes.append("--what-if replays the steps without the delay")
        offsets = (TableView(job.clocks.rows, _CLOCKS),) if clocks and job.clocks.rows.height else ()
        print_notes(console(), job.caveats.left_out)
        result.views([*job.views(), *offsets], [*notes, *job.notes_below()])
    else:
        result.show(job, {"without_delay": [row for row, _ in replayed]})


def _replayed(trace: Trace, job: Job) -> list[tuple[dict[str, object], str]]:
    """The time of a step without each straggler's delay, by the replay of `thence whatif`: JSON values, and a text."""
    replayed: list[tuple[dict[str, object], str]] = []
    for rank in dict.fromkeys(job.stragglers["rank"]):
        try:
            row = trace.whatif(on_time=[f"rank:{rank}"]).rows.row(0, named=True)
        except ThenceError as error:
            replayed.append(({"rank": rank, "refused": str(error)}, f"without rank {rank}'s delay: {error}"))
            continue
        before, after = row["before_ns"], row["after_ns"]
        text = f"without rank {rank}'s delay: {row['verdict']}"
        if after is not None:
            less = format_share(row["gain_share"], 1)
            noise = format_share(row["high_share"] - row["gain_share"], 1)
            text = (
                f"without rank {rank}'s delay a step would take {format_ns(after)} instead of {format_ns(before)} "
                f"({less} less, +-{noise})"
            )
        replayed.append(({"rank": rank, **row}, text))
    return replayed
