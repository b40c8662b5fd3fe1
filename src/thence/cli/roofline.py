"""``thence roofline``: FLOP, bytes and headroom by place."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import click

from thence.cli.inputs import Inputs, trace_options
from thence.cli.messages import put, say
from thence.cli.output import Result, result_options
from thence.cli.verb import VerbCommand
from thence.errors import UsageError
from thence.model.peaks import DTYPES, SHORT_NAMES, Peaks
from thence.model.places import BY
from thence.timing.measured_peaks import measured_peaks

if TYPE_CHECKING:
    from thence.model.places import By

_EXAMPLES = """\b
Examples:
  thence roofline trace.json.gz --by module
  thence roofline traces/ --by kernel --steps typical --format json
  thence roofline trace.json.gz --peak bf16=989 --bandwidth 3350
  thence roofline --measure-peaks

The roofline of an activity is the shortest time that its GPU allows: FLOP divided by the peak of the
data type, or bytes divided by the bandwidth of memory, whichever is longer. Headroom is the rest of its
time; rows are sorted by it. FLOP and bytes follow from the shapes of the operator that launched the
work, which torch.profiler records with record_shapes=True; JAX's HLO states them without any setting.
What has no model counts as no headroom, and the reasons are listed with their time. Peaks are without
sparsity.

\b
  compute    FLOP decide the roofline of most of the row's time
  memory     bytes decide it
  latency    kernels of at most 5 us that take more than twice their roofline
  link       communication and copies between devices, or with the host: the link decides it
  cache      bytes that come from the cache faster than memory could deliver them
  unknown    nothing of the row has a model

MFU of a step is the time that its FLOP would take at the peaks of their data types, over its duration;
recomputed forward passes count in HFU only. --measure-peaks measures on this machine what its GPU
attains, in ten seconds with PyTorch, and prints it as --peak and --bandwidth.
"""


def _peak(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    dtype = SHORT_NAMES.get(name, name)
    try:
        tflops = float(value)
    except ValueError:
        tflops = 0.0
    if dtype not in DTYPES or not 0 < tflops < float("inf"):
        raise UsageError(
            f"--peak {text}: write a data type and its TFLOP/s, such as bf16=989; types: {', '.join(DTYPES)}"
        )
    return dtype, tflops


def _measure(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:  # noqa: FBT001 - click calls it
    """Measures and prints the peaks, and ends."""
    if not asked or ctx.resilient_parsing:
        return
    peaks = measured_peaks()
    options = [f"--peak {dtype}={tflops:.1f}" for dtype, tflops in peaks.tflops.items()]
    say(f"{peaks.device}, {peaks.source}:")
    put(" ".join([*options, f"--bandwidth {peaks.gbps:.0f}"]) + "\n")
    ctx.exit()


@click.command("roofline", cls=VerbCommand, epilog=_EXAMPLES)
@trace_options("rank", "device", "steps", "window", "only", "program", "own", "hlo")
@click.option("--by", type=click.Choice(BY), help="What a row of the table is. Default: as in thence report.")
@click.option("--peak", "peaks", multiple=True, metavar="TYPE=TFLOPS", help="Peak of a data type on all devices.")
@click.option("--bandwidth", type=click.FloatRange(min=0, min_open=True), help="GB/s of memory, with --peak.")
@click.option(
    "--measure-peaks",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_measure,
    help="Measure what this machine's GPU attains, and end.",
)
@result_options(without="20")
def command(inputs: Inputs, by: str | None, peaks: tuple[str, ...], bandwidth: float | None, result: Result) -> None:
    """How well the GPU was used: FLOP, bytes, share of the peak and headroom by module, line or kernel."""
    if bool(peaks) != (bandwidth is not None):
        raise UsageError("--peak and --bandwidth go together: both are needed for a roofline")
    given = Peaks("the devices", dict(map(_peak, peaks)), bandwidth, "given by the user") if peaks else None
    result.show(inputs.open().roofline(cast("By | None", by), given))
