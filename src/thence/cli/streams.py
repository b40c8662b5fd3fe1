"""``thence streams``: kernels by stream, concurrency, and checks of expectations."""

from __future__ import annotations

import click

from thence.cli.inputs import SELECTING, Inputs, trace_options
from thence.cli.messages import put, say
from thence.cli.output import Result, result_options
from thence.cli.verb import VerbCommand
from thence.errors import UsageError
from thence.writers.text.printable import printable

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


@click.command("streams", cls=VerbCommand, epilog=_EXAMPLES)
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
    from thence.analysis.grouping.kernel_groups import Patterns
    from thence.analysis.streams import parse_expectation

    # Parse groups and expectations first, so that mistakes are reported before a large trace is read.
    patterns = Patterns(tuple(map(_pair, groups)))
    for text in expectations:
        parse_expectation(text, patterns.names)
    streams = inputs.open().streams(patterns, expectations)
    result.show(streams)
    for check in streams.checks:
        if result.form == "table":
            put(f"{printable(str(check))}\n")
        else:
            say(str(check))
    verdicts = {check.ok for check in streams.checks}
    return 1 if False in verdicts else 2 if None in verdicts else 0


def _pair(text: str) -> tuple[str, str]:
    name, equals, expression = text.partition("=")
    if not (name.strip() and equals and expression):
        raise UsageError(f"--group {text}: write NAME=REGEX, such as 'rope=rotary|_rope_'")
    return name.strip(), expression
