"""``thence ranks``: which ranks made the others wait, for how long, since which step, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from thence.cli.inputs import Inputs, trace_options
from thence.cli.output import Result, console, document_of, notes_of, print_notes, print_table, result_options
from thence.errors import ThenceError
from thence.units import format_ns, format_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from thence.analysis.ranks.job import Job
    from thence.analysis.ranks.reasons import Reasons
    from thence.trace import Trace

_EXAMPLES = """\b
Examples:
  thence ranks traces/                       all ranks of a job
  thence ranks traces/ --format json
  thence ranks traces/ -o ranks.html         heat map of ranks and steps
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

_RANKS = {
    "rank": "rank",
    "device": "GPU",
    "caused_share": "caused",
    "times_last": "times last",
    "step_ns": "step",
    "compute_ns": "compute",
    "exposed_wait_ns": "waits",
    "unknown_ns": "wait or transfer",
    "idle_ns": "idle",
    "transfer_ns": "transfers",
    "copy_ns": "memcpy",
    "busy_ns": "busy",
    "steps_per_second": "steps/s",
}
_CLOCKS = {
    "rank": "rank",
    "offset_ns": "clock offset",
    "drift_ns_per_s": "drift per second",
    "residual_median_ns": "residual median",
    "residual_p90_ns": "residual p90",
    "instances": "collectives",
}
_ENDINGS = {".html": "html", ".htm": "html", ".json": "json", ".csv": "csv"}
_SHOWN = 10
_INDENT = " " * 4


@click.command("ranks", epilog=_EXAMPLES)
@trace_options("rank", "device", "program", "own", "hlo")
@click.option(
    "--what-if",
    "what_if",
    is_flag=True,
    help="Also replay the job without each straggler's delay (reads all ranks' activities).",
)
@click.option("--clocks", is_flag=True, help="Also list offset, drift and residual of each clock.")
@result_options(_ENDINGS, "File ending in .html (heat map of ranks and steps), .json or .csv.", without=f"{_SHOWN}")
def command(inputs: Inputs, what_if: bool, clocks: bool, result: Result) -> None:  # noqa: FBT001 - click flags
    """Who made the other ranks wait, how long, since which step, and why."""
    trace = inputs.open()
    job = trace.late_ranks()
    replayed = _replayed(trace, job) if what_if else []
    notes = notes_of(trace, job.notes)
    if result.form == "html":
        from thence.writers.page.ranks_page import ranks_html

        result.text(ranks_html(job, trace.meta.inputs, [*(text for _, text in replayed), *notes]))
    elif result.form == "table":
        if not (what_if or job.stragglers.is_empty()):
            notes = ("--what-if replays the steps without the delay", *notes)
        _show(job, result, [*(text for _, text in replayed), *notes], clocks=clocks)
    else:
        document = job.to_json() | {"without_delay": [row for row, _ in replayed]}
        result.emit(document_of(trace, document), job.ranks, {}, notes)


def _replayed(trace: Trace, job: Job) -> list[tuple[dict[str, object], str]]:
    """The time of a step without each straggler's delay, by the replay of `thence whatif`: JSON values, and a text."""
    found: list[tuple[dict[str, object], str]] = []
    for rank in dict.fromkeys(job.stragglers["rank"]):
        try:
            row = trace.what_if(on_time=[f"rank:{rank}"]).rows.row(0, named=True)
        except ThenceError as error:
            found.append(({"rank": rank, "refused": str(error)}, f"without rank {rank}'s delay: {error}"))
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
        found.append(({"rank": rank, **row}, text))
    return found


def _show_causes(output: Console, why: Reasons, per: str) -> None:
    """Prints a line for each cause, and below it the places of the cause; ``per`` tells what its time is for."""
    from rich.text import Text

    from thence.writers.text.ranks import reason_rows

    rows = reason_rows(why)
    width = max((len(cause) for cause in rows["cause"]), default=0)
    for cause, per_step, share, where in rows.iter_rows():
        figures = f"{format_ns(per_step)} {per}   {format_share(share, 1)}"
        print_table(output, Text(f"{cause:{width}}   {figures}", "bold"))
        lines = Text(where).wrap(output, max(output.width - len(_INDENT), 1)) if where else ()
        for line in lines:
            print_table(output, Text(_INDENT + line.plain.rstrip()))


def _show(job: Job, result: Result, notes: Sequence[str], *, clocks: bool) -> None:
    """Prints stragglers with their reasons, then the ranks, groups, stages and notes."""
    from rich.text import Text

    from thence.writers.text.printable import printable
    from thence.writers.text.ranks import GROUPS, LINKS, STAGES, not_caused, straggler_lines

    output = console()
    print_table(output, Text(printable(job.statement), "bold"))
    for (_, sentence), why in zip(straggler_lines(job), job.reasons, strict=True):
        print_table(output, "")
        print_table(output, Text(printable(sentence)))
        _show_causes(output, why, job.per)
    shown = Result(result.form, None, result.top or _SHOWN)
    ranks, groups = dict(_RANKS), dict(GROUPS)
    if not job.ranks["unknown_ns"].sum():
        del ranks["unknown_ns"]
    if (job.groups["shown"] >= job.groups["size"]).fill_null(value=True).all():
        del groups["shown"]
    tables = [(job.links, LINKS), (job.ranks, ranks), not_caused(job), (job.groups, groups), (job.stages, STAGES)]
    if clocks:
        tables.append((job.clocks.rows, _CLOCKS))
    for rows, headings in tables:
        if not rows.is_empty():
            print_table(output, "")
            shown.table(rows, headings)
    print_notes(output, notes)
