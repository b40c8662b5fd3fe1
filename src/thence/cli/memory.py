"""``thence memory``: what was live at the peak, by place."""

from __future__ import annotations

import click

from thence.cli.inputs import Inputs, trace_options
from thence.cli.output import Result, result_options
from thence.cli.verb import VerbCommand
from thence.model.places import MEMORY_BY

_EXAMPLES = """\b
Examples:
  thence memory memory.json.gz
  thence memory memory.json.gz --by source
  thence memory memory.json.gz --by kind --at 1.2s --format json

torch.profiler records the memory of PyTorch's allocator with profile_memory=True, and modules and lines
with with_stack=True. The bytes of the rows and what was allocated before the trace add up to the peak,
which is that of torch.cuda.max_memory_allocated().

\b
  parameter, gradient, optimizer_state   of the model
  activation                             made in the forward pass, returned in the backward pass
  temporary                              returned in the operator or pass that allocated it
  communication                          of collectives and FSDP
  -                                      not known, as all memory from before the trace
"""


@click.command("memory", cls=VerbCommand, epilog=_EXAMPLES)
@trace_options("rank", "device", "own", "hlo")
@click.option(
    "--by", type=click.Choice(MEMORY_BY), help="What a row is; default: module, or else source or op, as known."
)
@click.option(
    "--at",
    default="peak",
    show_default=True,
    metavar="peak|oom|TIME",
    help="The moment: oom is the first allocation that failed; a time such as 1.2s counts from the first device "
    "activity.",
)
@result_options(without="20")
def command(inputs: Inputs, by: str | None, at: str, result: Result) -> None:
    """What held GPU memory at its peak, by module, line, step or kind; what grows, and what would help."""
    result.show(inputs.open().memory(by, at))
