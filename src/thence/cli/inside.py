"""``thence inside``: where the time inside a kernel goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from thence.cli.inputs import Inputs, check_inputs
from thence.cli.messages import put, say, wrote
from thence.cli.output import (
    Result,
    check_output,
    console,
    force_option,
    format_option,
    output_option,
    print_json,
    print_table,
)
from thence.cli.verb import VerbCommand
from thence.errors import MissingData, UsageError
from thence.readers.recording.sniffing import sniff_archive
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.analysis.stalls import Stalls
    from thence.inside.decoding import Decoded
    from thence.inside.summary import InsideSummary
    from thence.model.timeline import Timeline

_EXAMPLES = """\b
Examples:
  thence inside gemm.npz                                    time by range
  thence inside gemm.npz -o gemm.pftrace                    a track per SM, block and warpgroup
  thence inside gemm.npz --merge trace.json.gz -o all.pftrace   under the kernel's slice
  thence inside mosaic.npy --clock-ghz 1.755                JAX's buffer does not state its clock
  thence inside profiles/ --format json
  thence inside sampled/                                    stalls by line: thence record --stalls

A buffer is an .npz file (thence.inside.save), or an .npy file with its description in a .json beside
it. Layouts: thence, mosaic, mosaic-2024 (jax before 0.8), flashinfer, flashinfer-old, mirage, proton.
"""


@click.command("inside", cls=VerbCommand, epilog=_EXAMPLES)
@click.argument("buffers", nargs=-1, required=True, metavar="BUFFER...", type=click.Path())
@output_option("Timeline: a file ending in .pftrace, .json or .json.gz, or a folder ending in .parquet.", metavar="OUT")
@click.option(
    "--merge",
    multiple=True,
    metavar="TRACE",
    type=click.Path(),
    help="Trace or recording of the same run; the timeline then shows the ranges under its kernels.",
)
@click.option(
    "--launch",
    type=click.IntRange(min=0),
    help="Index (from 0) of the kernel's launch in the trace, if several launches match the buffer.",
)
@click.option("--clock-ghz", type=float, metavar="GHZ", help="SM clock, for layouts that do not record it.")
@format_option
@force_option
def command(
    buffers: tuple[str, ...],
    output: str | None,
    clock_ghz: float | None,
    form: str,
    force: bool,  # noqa: FBT001 - click passes it by name
    **merging: Any,
) -> None:
    """Inside a kernel: time by range, how evenly the SMs were loaded, and timelines of it."""
    merge: tuple[str, ...] = merging["merge"]
    launch: int | None = merging["launch"]
    _check_options(output, merge, launch, force=force)
    recordings = _recordings(buffers)
    others = tuple(path for path in buffers if path not in recordings)
    if recordings and (output is not None or clock_ghz is not None or (others and form == "csv")):
        raise UsageError("a recording has no timeline inside of kernels: -o, --clock-ghz and csv are for buffers alone")
    stalls = Inputs(recordings).open().stalls() if recordings else None
    parts = _decoded(others, clock_ghz) if others else []
    timeline = None if output is None else _timeline(parts, merge, launch)
    _print(parts, stalls, form)
    if output is not None and timeline is not None:
        from thence.writers.timelines.write import write_timeline

        write_timeline(timeline, output)
        printed = {text for name, decoded in parts for note in decoded.notes for text in (note, f"{name}: {note}")}
        for note in timeline.notes:
            if note not in printed:
                say(note)
        wrote(output)


def _check_options(output: str | None, merge: tuple[str, ...], launch: int | None, *, force: bool) -> None:
    """Checks the options before anything is read and raises `UsageError` or `InputError`."""
    check_inputs(merge)
    if output is None:
        if merge or launch is not None:
            raise UsageError("--merge and --launch are for timelines: name the file to write with -o")
        return
    from thence.writers.timelines.write import ending_of

    ending_of(output)
    if launch is not None and not merge:
        raise UsageError("--launch is a launch in a trace: name the trace with --merge")
    check_output(output, force=force)


def _recordings(inputs: tuple[str, ...]) -> tuple[str, ...]:
    """The inputs that are recordings, or stores of them."""
    from thence.store.layout import is_store

    return tuple(path for path in inputs if "\0" not in path and (sniff_archive(path) or is_store(path)))


def _decoded(buffers: tuple[str, ...], clock_ghz: float | None) -> list[tuple[str, Decoded]]:
    from thence.inside.decoding import decode
    from thence.inside.files import found, load

    parts = []
    for path in found(buffers):
        words, description = load(path)
        parts.append((str(path), decode(words, description, clock_ghz, str(path))))
    return parts


def _timeline(parts: Sequence[tuple[str, Decoded]], merge: tuple[str, ...], launch: int | None) -> Timeline:
    from thence.inside.timeline import merged, standalone

    if not merge:
        return standalone(parts)
    if launch is not None and len(parts) > 1:
        raise UsageError("--launch is for a single buffer; several are given")
    return merged(Inputs(merge).open().timeline(), parts, launch)


def _print(parts: Sequence[tuple[str, Decoded]], stalls: Stalls | None, form: str) -> None:
    from thence.inside.summary import summarize

    summaries: list[tuple[str, InsideSummary]] = []
    for name, decoded in parts:
        try:
            summaries.append((name, summarize(decoded)))
        except MissingData as error:
            raise MissingData(f"{name}: {error}") from error
    if form == "json":
        print_json(_document(summaries, stalls))
    elif form == "csv" and stalls is not None:
        Result("csv").show(stalls)
    elif form == "csv":
        _csv(summaries)
    else:
        _tables(summaries)
        if stalls is not None:
            if summaries:
                print_table(console(), "")
            Result("table").show(stalls)


def _document(summaries: Sequence[tuple[str, InsideSummary]], stalls: Stalls | None) -> dict[str, Any]:
    return {
        "inputs": [*(name for name, _ in summaries), *(stalls.caveats.inputs if stalls else ())],
        "kernels": [{"input": name, **summary.to_json()} for name, summary in summaries],
        **(stalls.to_json() if stalls else {"stalls": [], "stall_samples": None}),
        "notes": [note for _, summary in summaries for note in summary.notes],
        "warnings": [
            *(text for _, summary in summaries for text in summary.warnings),
            *(stalls.all_notes() if stalls else ()),
        ],
    }


def _csv(summaries: Sequence[tuple[str, InsideSummary]]) -> None:
    import polars as pl

    from thence.writers.text.csv import csv_text

    frames = [
        summary.rows.select(pl.lit(name).alias("input"), pl.lit(summary.kernel).alias("kernel"), pl.all())
        for name, summary in summaries
    ]
    put(csv_text(pl.concat(frames, how="diagonal")))
    for _, summary in summaries:
        for text in summary.remarks():
            say(text)


def _tables(summaries: Sequence[tuple[str, InsideSummary]]) -> None:
    from rich.text import Text

    from thence.inside.summary import inside_lines
    from thence.writers.text.frame_table import frame_table

    screen = console()
    for number, (name, summary) in enumerate(summaries):
        head, below = inside_lines(summary, name)
        print_table(screen, Text("\n" * (number > 0) + printable(head), "bold"))
        for view in summary.views():
            print_table(screen, frame_table(view.rows, view.headings, screen.width))
        print_table(screen, Text(below))
        for text in summary.notes:
            print_table(screen, Text(text, "dim"))
        for text in summary.warnings:
            print_table(screen, Text(f"warning: {text}", "dim"))
