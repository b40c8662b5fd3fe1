"""``thence top``: what a program that is being recorded does, again and again."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from thence.cli.inputs import check_inputs
from thence.cli.messages import put, say
from thence.cli.output import Result, choice_option, console
from thence.cli.verb import VerbCommand
from thence.errors import MissingData, UsageError
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from thence.watch.follow import Follower
    from thence.watch.job import Watch

_EXAMPLES = """\b
Examples:
  thence record --always -o run -- python train.py
  thence top run                             in another terminal
  thence top run --once --since 86400        the last day
  thence top run --prometheus 9464
  thence top run --otlp http://127.0.0.1:4318

Shares are of the time in recorded windows, with the interval in which the share of all steps lies in
95 of 100 cases. Windows that a slow step or a user asked for do not count. A rank is late if the
others wait for it in their collectives.
"""


@click.command("top", cls=VerbCommand, epilog=_EXAMPLES)
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--once", is_flag=True, help="Show it once and end.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1, max=86_400),
    default=2.0,
    show_default=True,
    help="Time between two looks.",
)
@click.option(
    "--since",
    type=click.FloatRange(min=1, max=1e9),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Windows of so many seconds before the last one count.",
)
@click.option(
    "--prometheus",
    type=click.IntRange(0, 65_535),
    metavar="PORT",
    help="Serve metrics for Prometheus on this port of 127.0.0.1 (0: a free one) instead. POST /record asks for a "
    "window, with the token in THENCE_TOKEN.",
)
@click.option(
    "--otlp",
    metavar="URL",
    help="Send metrics to this collector of OpenTelemetry instead (OTLP over HTTP), at each look. "
    "OTEL_EXPORTER_OTLP_HEADERS and OTEL_SERVICE_NAME count.",
)
@choice_option("--format", "form", choices=("table", "json"), meaning="json needs --once.")
@click.option("--top", type=click.IntRange(min=1), default=20, show_default=True, help="Rows of a table to show.")
def command(
    directory: str,
    form: str,
    top: int,
    prometheus: int | None,
    otlp: str | None,
    *,
    once: bool,
    seconds: float,
    since: float,
) -> None:
    """Show what a program recorded with --always does: steps a second, GPU busy, idle causes, modules, late ranks."""
    if form == "json" and not once:
        raise UsageError("--format json needs --once")
    for name, given in (("--prometheus", prometheus), ("--otlp", otlp)):
        if once and given is not None:
            raise UsageError(f"{name} goes on until it is interrupted: leave out --once")
    if once:
        check_inputs((directory,))
    from thence.watch.follow import Follower

    follower = Follower(Path(directory))
    try:
        if once:
            follower.look()
            Result(form, None, top, None).show(_watch(directory, since).now(time.time_ns()))
        elif prometheus is not None or otlp is not None:
            _export(directory, prometheus, otlp, seconds, follower)
        elif sys.stdout.isatty():
            _show_in_place(_watch(directory, since), seconds, top, follower)
        else:
            _show_lines(_watch(directory, since), seconds, follower)
    except KeyboardInterrupt:
        pass
    finally:
        follower.end()


def _watch(directory: str, since: float) -> Watch:
    from thence.watch.job import Watch

    return Watch(Path(directory), round(since * 1e9))


def _export(directory: str, port: int | None, otlp: str | None, seconds: float, follower: Follower) -> None:
    """Serves metrics on a port, sends them to a collector, or both, until the user interrupts."""
    from thence.watch.metrics import Metrics, server
    from thence.watch.otlp import Exporter

    metrics = Metrics(Path(directory))
    exporter = None if otlp is None else Exporter(metrics, otlp)
    serving = None if port is None else server(metrics, port, os.environ.get("THENCE_TOKEN") or None)
    if serving is not None:
        say(f"thence: metrics of {directory} at http://127.0.0.1:{serving.server_port}/metrics")
    said: str | None = ""
    try:
        while True:
            follower.look()
            metrics.look()
            failed = said if exporter is None else exporter.send(time.time_ns())
            if failed != said:
                say(f"thence: {failed or f'metrics of {directory} go to {otlp}'}")
                said = failed
            time.sleep(seconds)
    finally:
        if serving is not None:
            serving.shutdown()


def _show_lines(watch: Watch, seconds: float, follower: Follower) -> None:
    """Prints a line each time that something is new, until the user interrupts."""
    shown = ""
    while True:
        follower.look()
        line = _line(watch)
        if line != shown:
            put(f"{line}\n")
            sys.stdout.flush()
            shown = line
        time.sleep(seconds)


def _line(watch: Watch) -> str:
    try:
        return printable(watch.now(time.time_ns()).line())
    except MissingData as error:
        return printable(str(error))


def _show_in_place(watch: Watch, seconds: float, top: int, follower: Follower) -> None:
    """Shows it on the terminal until the user interrupts."""
    from rich.live import Live

    output = console()
    with Live(_frame(watch, top, output), console=output, auto_refresh=False, screen=True) as live:
        while True:
            follower.look()
            live.update(_frame(watch, top, output), refresh=True)
            time.sleep(seconds)


def _frame(watch: Watch, top: int, output: Console) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from thence.writers.text.answer import table_of

    try:
        now = watch.now(time.time_ns())
    except MissingData as error:
        return Text(printable(str(error)))
    tables = [part for view in now.views() for part in table_of(view, top, output.width)]
    return Group(*tables, *(Text(printable(note), "dim") for note in now.remarks()))
