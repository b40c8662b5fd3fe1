"""``thence ingest``: reads the ranks of a job into a store."""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from thence.cli.inputs import Inputs, trace_options
from thence.cli.messages import put, say
from thence.cli.output import choice_option, error_console, print_json
from thence.cli.verb import VerbCommand
from thence.errors import UsageError
from thence.units import format_bytes, format_count
from thence.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from thence.store.ingest import Ingested
    from thence.store.workers import Workers

_EXAMPLES = """Every rank is read once, by a process of its own; a store then answers without reading it again:
report --by rank and ranks from summaries alone, report and sql rank by rank, other verbs
from the tables of the ranks that --rank chooses.
After an interruption the same command continues where it stopped. A file that changed, or a recording
that grew, is read again; what cannot be read is left out, with the reason, and the exit code is 1.

\b
Examples:
  thence ingest traces/ -o job.store
  thence ingest s3://bucket/run -o job.store              pip install 'thence[remote]' s3fs
  thence ingest recording/ -o job.store --host            host ranges, for idle, steps, whatif
  thence ingest /shared/run -o /shared/job.store --ray auto    on the Ray cluster of this machine
  thence report job.store --by rank
  thence ranks job.store
  thence idle job.store --rank 37
"""


@click.command("ingest", cls=VerbCommand, epilog=_EXAMPLES)
@trace_options("own", "hlo")
@click.option(
    "-o",
    "--output",
    "store",
    required=True,
    metavar="STORE",
    type=click.Path(file_okay=False),
    help="Folder to write or to update. With --ray, all machines must have access to it.",
)
@click.option("--host", is_flag=True, help="Also store host ranges: several times the size.")
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Processes of this machine. Default: one per core."
)
@click.option(
    "--ray",
    "address",
    metavar="ADDRESS",
    help="Work on this Ray cluster: HOST:PORT, auto (the one that this machine is part of), or local.",
)
@choice_option("--format", "form", choices=("table", "json"), meaning="json also lists every rank with its source.")
def command(
    inputs: Inputs,
    store: str,
    host: bool,  # noqa: FBT001 - a click flag
    workers: int | None,
    address: str | None,
    form: str,
) -> int:
    """Read the ranks of a job, once, into a store of Parquet files."""
    from thence.store.ingest import ingest, sources_of
    from thence.store.layout import BAD, Settings

    settings = Settings(
        own=inputs.own, hlo=inputs.hlo, host=host, max_expansion=inputs.max_expansion, thence=__version__
    )
    with _progress() as progress:
        done = ingest(
            sources_of(inputs.paths, inputs.run, add=inputs.add),
            store,
            settings,
            workers=_workers(workers, address),
            progress=progress,
        )
    if form == "json":
        print_json(done.to_json())
    else:
        _show(done, store)
    return 1 if any(rejected.why in BAD for rejected in done.manifest.left) else 0


def _workers(processes: int | None, address: str | None) -> Workers:
    from thence.store.workers import LocalWorkers, RayWorkers

    if address is None:
        return LocalWorkers(processes)
    if processes is not None:
        raise UsageError("--workers is for this machine; a Ray cluster has as many as it has CPUs")
    return RayWorkers(address)


def _show(done: Ingested, store: str) -> None:
    manifest = done.manifest
    ranks = sum(len(entry.ranks) for entry in manifest.entries)
    most = max((entry.peak_bytes for entry in manifest.entries), default=0)
    put(
        f"{store}: {format_count(ranks)} ranks; read now {format_count(done.written)}, unchanged "
        f"{format_count(done.kept)}, left out {format_count(len(manifest.left))}; most memory of a worker "
        f"{format_bytes(most)}\nnext  thence ranks {shlex.quote(store)}\n"
    )
    from thence.writers.text.merged_sentences import merged

    for warning in merged((*(left.reason for left in manifest.left), *manifest.warnings)):
        say(f"warning: {warning}")
    for note in manifest.notes:
        say(note)


_LINE_S = 10.0
"""Seconds between two lines of progress."""


def _lines(clock: Callable[[], float]) -> Callable[[int, int], None]:
    """A function that says how many inputs are read, not more often than each `_LINE_S`."""
    said = clock()

    def show(done: int, count: int) -> None:
        nonlocal said
        if clock() - said >= _LINE_S and done < count:
            said = clock()
            say(f"{format_count(done)} of {format_count(count)} inputs read")

    return show


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error; a line now and then if that is no terminal."""
    if not sys.stderr.isatty():
        yield _lines(time.monotonic)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("ranks"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=error_console(), transient=True) as bar:
        task = bar.add_task("ranks", total=None)
        yield lambda done, count: bar.update(task, completed=done, total=count)
