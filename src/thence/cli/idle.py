"""``thence idle``: why the GPU was idle; every idle nanosecond has one cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from thence.cli.inputs import Inputs, trace_options
from thence.cli.output import (
    Result,
    choice_option,
    console,
    document_of,
    notes_of,
    print_notes,
    print_table,
    result_options,
)
from thence.model.questions import IDLE_BY

if TYPE_CHECKING:
    import polars as pl

_EXAMPLES = """\b
Examples:
  thence idle trace.json.gz
  thence idle recording/ --by line --top 20
  thence idle traces/ --by step --format json

Every idle nanosecond between the first and the last activity of a device has one cause:

\b
  launch      from the beginning of the launch to that of its kernel
  queued      between two kernels that were both queued, up to 5 us
  event_wait  queued, but behind an event of another stream, or a host function
  sync        a call that waits returned: item(), synchronize()
  allocation  memory was allocated, freed or pinned
  loader      the host loaded data (a DataLoader, or ranges and functions so named)
  first_use   kernels or libraries were loaded
  compile     the host compiled
  operator    the host was inside a framework's operator
  python      the host ran Python, as samples or recorded frames show
  host        the host ran C code, of a framework or another, or nothing shows what it ran
  lock        the host waited for a lock, a queue or the GIL
  sleep       the host slept
  gc          the host collected garbage
  unknown     the trace does not show the cause; the reasons are listed below

Another table lists the calls that waited and emptied the queue (not a cause: without them the GPU may
be idle all the same). If there are several ranks, one more lists the time in which kernels of
collectives waited for the last rank; this is busy time and in none of the rows above.
"""

_CAUSES = {"cause": "cause", "total_ns": "idle", "share": "share", "count": "pieces", "meaning": ""}
_ROWS = {"cause": "cause", "by": "by", "name": "name", "total_ns": "idle", "share": "share", "count": "pieces"}
_WAITS = {
    "name": "last call that waited",
    "place": "called at",
    "total_ns": "idle after it",
    "share": "share",
    "count": "calls",
}
_LATE = {"rank": "rank", "device": "GPU", "wait_ns": "waited in collectives (busy time)"}
_ROWS_SHOWN = 15


@click.command("idle", epilog=_EXAMPLES)
@trace_options("rank", "device", "steps", "window", "program", "own", "hlo")
@choice_option(
    "--by",
    choices=IDLE_BY,
    meaning="What each cause is divided by; place is the first of line, label, module, op and call.",
)
@result_options(without=f"{_ROWS_SHOWN}")
def command(inputs: Inputs, by: str, result: Result) -> None:
    """Why the GPU was idle: every nanosecond by cause and line, module, op, label or step."""
    trace = inputs.open()
    found = trace.idle(by)
    notes = notes_of(trace, found.notes)
    if result.form != "table":
        idle_is = trace.soundness.idle_is(unknown=found.idle_ns is None)
        document = {**found.to_json(), "idle_is": idle_is}
        result.emit(document_of(trace, document), found.rows, {}, notes)
        return
    from rich.text import Text

    output = console()
    devices = found.found.select("rank", "device").n_unique()
    over = f", summed over {devices:,} GPUs" if devices > 1 else ""
    print_table(output, Text(f"idle: {found.total}{over}", "bold"))
    result.table(found.causes, _CAUSES)
    print_table(output, "")
    Result(result.form, None, result.top or _ROWS_SHOWN).table(_short_kernels(found.shown_rows), _ROWS)
    for rows, headings in ((found.waits, _WAITS), (found.late, _LATE)):
        if not rows.is_empty():
            print_table(output, "")
            Result(result.form, None, result.top or _ROWS_SHOWN).table(rows, headings)
    print_notes(output, notes)


def _short_kernels(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows with short names of kernels."""
    from thence.model.kernel_names import short_names

    of_kernel = rows["by"] == "kernel"
    if not of_kernel.any():
        return rows
    short = rows["name"].replace(short_names(rows["name"].filter(of_kernel).drop_nulls().to_list()))
    return rows.with_columns(name=short.zip_with(of_kernel, rows["name"]))
