"""``thence flame``: GPU time as a flame graph."""

from __future__ import annotations

import io
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from thence.atomic_files import atomic_open_text, atomic_write, not_written
from thence.cli.inputs import SELECTING, Inputs, trace_options
from thence.cli.messages import put, say, wrote
from thence.cli.output import check_output, choice_option, force_option, output_option
from thence.cli.progress import working
from thence.cli.verb import VerbCommand
from thence.errors import UsageError
from thence.model.places import FLAMES
from thence.version import __version__
from thence.writers.flame.pprof import pprof_file
from thence.writers.flame.speedscope import speedscope_document

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.analysis.flame.answer import Flame

_FORMATS = {
    ".html": "html",
    ".htm": "html",
    ".speedscope.json": "speedscope",
    ".folded": "folded",
    ".collapsed": "folded",
    ".svg": "svg",
    ".pb.gz": "pprof",
    ".otlp.pb": "otlp",
}
_EXAMPLES = """\b
Examples:
  thence flame trace.json.gz -o flame.html                    opens in any browser, offline
  thence flame profile_dir/ --by source -o flame.html         JAX: lines, shared among fusions
  thence flame traces/ --rank 3 --split phase -o flame.html   forward, backward ... apart
  thence flame trace.json.gz --by module --fold -o layers.html   all layers as one frame
  thence flame trace.json.gz --by ops -o ops.speedscope.json
  thence flame trace.json.gz --weight headroom -o headroom.html
  thence flame memory.json.gz --weight memory -o memory.html
  thence flame sampled --by module --stalls -o stalls.html    recorded with --stalls
  thence flame trace.json.gz --by stack -o gpu.pb.gz          go tool pprof -http : gpu.pb.gz
  thence flame trace.json.gz --by stack -o gpu.otlp.pb        for a collector of OpenTelemetry
  thence flame trace.json.gz -o flame.svg                     an image for a document or notebook
  thence flame trace.json.gz -o - | inferno-flamegraph > interactive.svg
"""


@click.command("flame", cls=VerbCommand, epilog=_EXAMPLES)
@trace_options(*SELECTING, "own", "hlo")
@output_option(
    ".html, .svg, .folded, .speedscope.json, .pb.gz (pprof) or .otlp.pb (OpenTelemetry); - prints folded stacks.",
    required=True,
    type=click.Path(allow_dash=True, dir_okay=False),
)
@click.option(
    "--by",
    type=click.Choice(FLAMES),
    help="What the frames are. Default: the first of op_name (JAX), module, label, source and ops that covers two "
    "thirds of the GPU time, else the one that covers most.",
)
@click.option(
    "--fold",
    is_flag=True,
    help="By module, label and op_name: make equal layers of a model one frame, such as layers.*.",
)
@choice_option(
    "--split",
    choices=("none", "phase"),
    meaning="phase: make forward, backward, optimizer and other phases the outermost frames.",
)
@choice_option(
    "--idle",
    choices=("steady", "include", "exclude"),
    meaning="Idle GPU time that is shown. steady: all except before and during the first executions of XLA programs "
    "(compilation). include: all. exclude: none.",
)
@choice_option(
    "--weight",
    choices=("time", "headroom", "memory"),
    meaning="What the width of a frame is. headroom: GPU time beyond what the GPU allows (thence roofline). memory: "
    "bytes live at the peak (thence memory).",
)
@click.option(
    "--stalls",
    is_flag=True,
    help="Of recordings with stalls: below each kernel, the lines of its source and what its warps waited for.",
)
@force_option
def command(inputs: Inputs, output: str, force: bool, **options: Any) -> None:  # noqa: FBT001 - a click flag
    """GPU time as a flame graph: a page, an image, folded stacks, speedscope, pprof or OTLP."""
    form = _format(output)
    if output != "-":
        check_output(output, force=force)
    trace = inputs.open()
    with working("building the flame graph"):
        flame = trace.flame(**options)
    if form in ("pprof", "otlp"):
        _write_bytes(_profile(flame, form), Path(output))
    else:
        with _open_output(output) as stream:
            _write(flame, form, stream)
    for note in flame.notes:
        say(note)
    if output != "-":
        wrote(output, f"{flame.nodes.height:,} frames by {flame.by}")


def _format(output: str) -> str:
    if output == "-":
        return "folded"
    for suffix, form in _FORMATS.items():
        if output.lower().endswith(suffix):
            return form
    raise UsageError(f"{output}: the name must end in one of {', '.join(_FORMATS)}")


def _write(flame: Flame, form: str, stream: TextIO) -> None:
    if form == "html":
        from thence.writers.page.flame_page import flame_html

        stream.write(flame_html(flame))
    elif form == "svg":
        from thence.writers.flame.chart import IMAGE_WIDTH, flame_chart

        stream.write(flame_chart(flame).to_svg(IMAGE_WIDTH))
    elif form == "folded":
        from thence.writers.flame.folded import folded_lines

        stream.writelines(folded_lines(flame))
    else:
        import json

        document = speedscope_document(flame, f"thence {__version__}")
        stream.write(json.dumps(document, separators=(",", ":")))  # json.dump is ten times slower


def _profile(flame: Flame, form: str) -> bytes:
    if form == "pprof":
        return pprof_file(flame)
    from thence.writers.flame.otlp import otlp_file

    return otlp_file(flame, os.environ.get("OTEL_SERVICE_NAME") or "thence")


def _write_bytes(content: bytes, target: Path) -> None:
    try:
        atomic_write(target, content)
    except OSError as error:
        raise UsageError(not_written(target, error)) from error


@contextmanager
def _open_output(output: str) -> Iterator[TextIO]:
    """Opens the output as a text stream: standard output for ``-``, else an atomic write.

    An atomic write goes to a temporary file that is renamed when it is complete.
    """
    if output == "-":
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # in any locale: names may hold any text
        whole = io.StringIO()
        yield whole
        put(whole.getvalue())
        return
    with atomic_open_text(Path(output)) as stream:
        yield stream
