"""What several verbs share: opening inputs with a progress bar, and printing."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, RenderableType

    from thence.trace import Trace

__all__ = ["console", "inputs_argument", "open_with_progress", "print_json", "print_table"]

_BYTES_WITH_PROGRESS = 50_000_000

inputs_argument = click.argument(
    "inputs", nargs=-1, required=True, metavar="INPUT...", type=click.Path(allow_dash=True)
)


def open_with_progress(inputs: Sequence[str]) -> Trace:
    """The trace behind the inputs; a bar on standard error while a large one is read, if that is a terminal."""
    from thence.trace import open_trace

    with _progress() as progress:
        return open_trace(*inputs, progress=progress)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    if not sys.stderr.isatty():
        yield lambda _name, _done, _size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(name: str, done: int, size: int) -> None:
            if size < _BYTES_WITH_PROGRESS:
                return
            if name not in tasks:
                tasks[name] = bar.add_task(os.path.basename(name), total=size)  # noqa: PTH119 - a label
            bar.update(tasks[name], completed=done)

        yield show


def console() -> Console:
    """Standard output for tables. Rich minds NO_COLOR; a pipe gets 80 columns unless COLUMNS says otherwise."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def print_table(output: Console, table: RenderableType) -> None:
    """A table on standard output."""
    output.print(table)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=1))
