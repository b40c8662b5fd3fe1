"""``thence collectives``: last arrivals, sizes, bandwidths, and exposed time of communication."""

from __future__ import annotations

import click

from thence.cli.inputs import Inputs, trace_options, warm_up_option
from thence.cli.output import Result, result_options
from thence.cli.verb import VerbCommand

_EXAMPLES = """\b
Examples:
  thence collectives traces/                      every rank of a torch.profiler job
  thence collectives rank*.zip --format json
  thence collectives traces/ -o collectives.csv   column "table": last_arrivals (devices), sizes

The first table lists the devices that arrived last in collectives, and how long the others waited
then, counted from the arrival of the median device. This does not tell which rank is late: some
device is always last, and its host may be as fast as the others. `thence ranks` decides that, and its
answer is repeated below. Rows without a device are waits that no device is known to have caused:
before the median device arrived, because the hosts of the waiting ranks had launched ahead, or in
collectives of which the trace lacks a participant, which may have arrived last: of these, the whole
kernels count, and waits are at most as long.
A wait lasts from a device's own start until the last device that it needs has started; the transfer
lasts from there to the end. The second table has one row per collective and message size. It counts
kernels, one per device and collective; each collective has a longest wait, of which the table shows
the mean and the longest. A message
is what one rank puts in (of reduce-scatter, what one rank gets). Bandwidths are bus bandwidths as in
nccl-tests, in decimal GB/s: best, median and standard deviation of the transfers, and the mean of
whole kernels, which contain the wait. Of send-recv (PyTorch's batches of sends and receives) each
kernel counts by itself: its message is what it sends and receives together, and its wait is that for
the last of the ranks at the other ends.
The link of a row is network if the ranks of its group are on several machines, node if they are on one
(NVLink or PCIe: traces do not tell them apart), else unknown; the reason stands below the tables.
Exposed is the time in which a device communicates and computes nothing; hidden, in which it
computes too; overlapped, in which an earlier collective counts as exposed. With --warm-up keep,
first calls of communicators and warm-up executions of XLA programs count, too.
"""


@click.command("collectives", cls=VerbCommand, epilog=_EXAMPLES)
@trace_options("rank", "device", "steps", "window", "program", "only", "hlo")
@warm_up_option
@result_options()
def command(inputs: Inputs, warm_up: str, result: Result) -> None:
    """Collectives: waits, last arrivals, message size, bandwidth, exposed and hidden time."""
    result.show(inputs.open().collectives(warm_up))
