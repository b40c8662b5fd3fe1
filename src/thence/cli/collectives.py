"""``thence collectives``: last arrivals, sizes, bandwidths, and exposed time of communication."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from thence.cli.inputs import Inputs, trace_options, warm_up_option
from thence.cli.output import Result, console, document_of, notes_of, print_notes, print_table, result_options
from thence.units import format_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

    from thence.analysis.collectives.communication import Collectives
    from thence.trace import Trace

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
Exposed is the time in which a device communicates and computes nothing; hidden, in which it
computes too; overlapped, in which an earlier collective counts as exposed. With --warm-up keep,
first calls of communicators and warm-up executions of XLA programs count, too.
"""

_LAST = {
    "who": "last arrivals",
    "last": "collectives",
    "instances": "of",
    "waited_ns": "others waited",
    "waited_device_ns": "summed over GPUs",
    "late_ns_mean": "mean after first",
}
_SIZES = {
    "collective": "collective",
    "bytes": "message",
    "group_size": "ranks",
    "count": "count",
    "exposed_ns": "exposed",
    "wait_ns_mean": "mean longest wait",
    "wait_ns_max": "longest",
    "transfer_bus_gbps_max": "best bus GB/s",
    "transfer_bus_gbps_median": "median",
    "transfer_bus_gbps_std": "std",
    "bus_gbps_mean": "whole kernel GB/s",
    "transfer_ns_median": "transfer",
    "hidden_ns": "hidden",
    "overlapped_ns": "overlapped",
}


@click.command("collectives", epilog=_EXAMPLES)
@trace_options("rank", "device", "steps", "window", "program", "only", "hlo")
@warm_up_option
@result_options()
def command(inputs: Inputs, warm_up: str, result: Result) -> None:
    """Collectives: waits, last arrivals, message size, bandwidth, exposed and hidden time."""
    trace = inputs.open()
    times = trace.collective_times(warm_up)
    said = (*filter(None, (times.verdict,)), times.statement, *times.notes, *_clocks(trace, times))
    notes = notes_of(trace, said)
    if result.form == "table":
        _show(times, result, notes)
    else:
        result.emit(document_of(trace, times.to_json()), times.tables, {}, notes)


def _show(times: Collectives, result: Result, notes: Sequence[str]) -> None:
    """Prints the last arrivals, then the collectives, then totals and notes."""
    import polars as pl
    from rich.text import Text

    from thence.writers.text.ranks import with_device_names

    output = console()
    last = times.last_arrivals.filter(pl.col("waited_ns") > 0)
    if not last.is_empty():
        result.table(with_device_names(last), _LAST)
        print_table(output, "")
    elif not times.last_arrivals.is_empty():
        print_table(output, Text("no device waited for another"))
        print_table(output, "")
    named = times.by_size.with_columns(
        collective=pl.when("described")
        .then("collective")
        .otherwise(
            pl.concat_str(
                pl.col("collective").fill_null("unknown"),
                pl.lit(" (no description) "),
                pl.col("kernel").str.replace(r"\(.*", "").fill_null(""),
            )
        )
    )
    result.table(named, {c: h for c, h in _SIZES.items() if _says_something(named, c)})
    print_table(output, "")
    for text in _totals(times, result.most_devices):
        print_table(output, Text(text))
    print_notes(output, notes)


def _says_something(rows: pl.DataFrame, column: str) -> bool:
    """Whether a column has values; for overlapped time, whether collectives overlap."""
    if column == "overlapped_ns":
        return bool(rows[column].sum())
    return rows[column].null_count() < rows.height


def _totals(times: Collectives, most: int) -> list[str]:
    """Lines about the devices, at most ``most`` of them."""
    lines = [
        f"rank {rank} GPU {device}: communication {format_ns(communication)}, {format_ns(exposed)} exposed"
        for rank, device, communication, exposed in times.devices.head(most).iter_rows()
    ]
    devices = times.devices.height
    more = [f"... {devices - most:,} more devices; --top {devices} shows all"]
    summed = [f"times of the collectives above are summed over {devices:,} GPUs"] * (devices > 1)
    return [*summed, *(lines if devices <= most else lines + more)]


def _clocks(trace: Trace, times: Collectives) -> list[str]:
    """A note on the clocks of the ranks, if waits depend on them."""
    if times.clocks:
        return [times.clocks]
    if trace.gpu.select("rank", "device").n_unique() > 1:
        return ["waits are between devices of one process, which share a clock"]
    return []
