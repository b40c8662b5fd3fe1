"""``thence idle``: why the GPU was idle; every idle nanosecond has one cause."""

from __future__ import annotations

import click

from thence.cli.inputs import Inputs, trace_options
from thence.cli.output import Result, choice_option, result_options
from thence.cli.verb import VerbCommand
from thence.model.places import IDLE_BY

_EXAMPLES = """\b
Examples:
  thence idle trace.json.gz
  thence idle recording/ --by source --top 20
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


@click.command(
    "idle",
    cls=VerbCommand,
    epilog=_EXAMPLES,
    context_settings={"token_normalize_func": lambda word: "source" if word == "line" else word},
)
@trace_options("rank", "device", "steps", "window", "program", "own", "hlo")
@choice_option(
    "--by",
    choices=IDLE_BY,
    meaning="What each cause is divided by; place is the first of source, label, module, op and call.",
)
@result_options(without="15")
def command(inputs: Inputs, by: str, result: Result) -> None:
    """Why the GPU was idle: every nanosecond by cause and line, module, op, label or step."""
    result.show(inputs.open().idle(by))
