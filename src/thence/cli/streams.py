"""``thence streams``: kernels by stream, concurrency, and checks of expectations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from thence.cli.inputs import SELECTING, Inputs, trace_options
from thence.cli.messages import put, say
from thence.cli.output import Result, console, document_of, notes_of, print_notes, print_table, result_options
from thence.errors import UsageError
from thence.units import format_ns, format_share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.analysis.expectations import Check
    from thence.analysis.streams import Concurrency, Streams

_EXAMPLES = """\b
Examples:
  thence streams trace.json.gz
  thence streams profile_dir/ --expect 'GEMM>=2'               on two streams of a device, or more
  thence streams traces/ --expect 'communication!=GEMM'        never on the same stream
  thence streams trace.json --group 'rope=rotary|_rope_' --expect 'rope==1'

Groups: GEMM, attention, communication, elementwise, reduction, copy, other. A --group takes precedence
over them, and is matched against kernel names and the names, opcodes and op_names of HLO instructions;
a --group with one of these names extends that group. --expect takes >=, ==, <= and a number of streams,
or != and a group. The exit code is 1 if a condition fails, and 2 if one cannot be judged, such as one on
a group without kernels.
"""

_ROWS = {
    "rank": "rank",
    "device": "GPU",
    "stream": "stream",
    "group": "group",
    "count": "count",
    "total_ns": "total",
    "share": "share",
}
_LANES = {"rank": "rank", "device": "GPU", "stream": "stream", "busy_ns": "busy", "concurrent_ns": "while another ran"}
_PAIRS = 5
"""Most pairs of groups whose overlap the terminal shows."""


@click.command("streams", epilog=_EXAMPLES)
@trace_options(*SELECTING, "hlo")
@click.option("--group", "groups", multiple=True, metavar="NAME=REGEX", help="A group of kernels of your own.")
@click.option(
    "--expect",
    "expectations",
    multiple=True,
    metavar="EXPECTATION",
    help="Condition to check, such as GEMM>=2; exit code 1 if it fails. Repeatable.",
)
@result_options()
def command(inputs: Inputs, groups: tuple[str, ...], expectations: tuple[str, ...], result: Result) -> int:
    """Streams: kernels by group, what ran at the same time, and tests of where kernels run."""
    from thence.analysis.expectations import judge, parse_expectation
    from thence.analysis.kernel_groups import Patterns

    # Parse groups and expectations first, so that mistakes are reported before a large trace is read.
    patterns = Patterns(tuple(map(_pair, groups)))
    parsed = [parse_expectation(text, patterns.names) for text in expectations]
    trace = inputs.open()
    streams = trace.streams(patterns)
    checks = [judge(expectation, streams.rows) for expectation in parsed]
    notes = notes_of(trace, streams.notes)
    if result.form == "table":
        result.table(streams.rows, _ROWS)
        _show(streams, notes, result)
    else:
        result.emit(document_of(trace, streams.to_json(checks)), streams.rows, _ROWS, notes)
    _show_checks(checks, result.form)
    verdicts = {check.ok for check in checks}
    return 1 if False in verdicts else 2 if None in verdicts else 0


def _pair(text: str) -> tuple[str, str]:
    name, equals, expression = text.partition("=")
    if not (name.strip() and equals and expression):
        raise UsageError(f"--group {text}: write NAME=REGEX, such as 'rope=rotary|_rope_'")
    return name.strip(), expression


def _show(streams: Streams, notes: tuple[str, ...], result: Result) -> None:
    """Prints concurrency and notes below the table of groups."""
    from rich.text import Text

    from thence.writers.text.printable import printable

    output = console()
    print_table(output, "")
    result.table(streams.streams, _LANES)
    print_table(output, "")
    for device in streams.concurrency[: result.most_devices]:
        for line in _lines(device):
            print_table(output, Text(printable(line)))
    devices = len(streams.concurrency)
    if devices > result.most_devices:
        more = f"... {devices - result.most_devices:,} more devices; --top {devices} shows all"
        print_table(output, Text(more, "dim"))
    print_notes(output, notes)


def _lines(of: Concurrency) -> Iterator[str]:
    """Lines about the concurrency on one device."""
    one, two, *more = (*of.busy_streams_ns, 0, 0)
    times = (("1 stream", one), ("2 streams", two), ("3 or more", sum(more)))
    shares = [f"{name} {format_ns(ns)} ({format_share(ns, of.busy_ns)})" for name, ns in times if ns]
    where = f"rank {of.rank} GPU {of.device}"
    yield f"{where}: busy {format_ns(of.busy_ns)}{': ' if shares else ''}{', '.join(shares)}"
    pairs = [(ns, a, b) for a, row in of.overlap_ns.items() for b, ns in row.items() if a <= b]
    pairs.sort(reverse=True)
    if pairs:
        named = [f"{a} and {b} {format_ns(ns)}" for ns, a, b in pairs[:_PAIRS]]
        rest = f"; {len(pairs) - _PAIRS} more pairs" if len(pairs) > _PAIRS else ""
        yield f"  at the same time: {', '.join(named)}{rest}"
    if of.communication_ns:
        share = format_share(of.hidden_ns, of.communication_ns)
        exposed = format_ns(of.communication_ns - of.hidden_ns)
        yield (
            f"  communication: {format_ns(of.communication_ns)}, {share} of it hidden behind other"
            f" kernels, {exposed} exposed"
        )


def _show_checks(checks: list[Check], form: str) -> None:
    """One line per expectation: below a table, else on standard error."""
    from thence.writers.text.printable import printable

    for check in checks:
        if form == "table":
            put(f"{printable(str(check))}\n")
        else:
            say(str(check))
