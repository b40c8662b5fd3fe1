"""What several verbs share: options, opening inputs with a progress bar, and printing."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from thence.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import polars as pl
    from rich.console import Console, RenderableType

    from thence.trace import Trace

__all__ = [
    "check_output",
    "choice_option",
    "console",
    "emit",
    "force_option",
    "format_option",
    "hlo_option",
    "inputs_argument",
    "json_text",
    "open_with_progress",
    "output_option",
    "print_json",
    "print_table",
    "warm_up_option",
]

_BYTES_WITH_PROGRESS = 50_000_000
_Command = TypeVar("_Command", bound="Callable[..., Any] | click.Command")


def choice_option(
    *names: str, choices: Sequence[str], meaning: str
) -> Callable[[_Command], _Command]:
    """An option that takes one of several words; without it, the first of them.

    Args:
        names: such as ``--format``, and that of the parameter where it is another.
        choices: the words.
        meaning: for ``--help``.
    """
    return click.option(
        *names, type=click.Choice(choices), default=choices[0], show_default=True, help=meaning
    )


def output_option(meaning: str, **more: Any) -> Callable[[_Command], _Command]:
    """``-o``, ``--output``: where the result goes.

    Args:
        meaning: for ``--help``.
        more: as `click.option` takes it.
    """
    return click.option("-o", "--output", help=meaning, **more)


inputs_argument = click.argument(
    "inputs", nargs=-1, required=True, metavar="INPUT...", type=click.Path(allow_dash=True)
)

force_option = click.option("--force", is_flag=True, help="Replace the output if it exists.")
format_option = choice_option(
    "--format",
    "form",
    choices=("table", "json", "csv"),
    meaning="json and csv hold every column.",
)
warm_up_option = choice_option(
    "--warm-up",
    choices=("heuristic", "first-compiled", "keep"),
    meaning="Which executions of XLA programs count as warm-up and are left out.",
)
hlo_option = click.option(
    "--hlo",
    multiple=True,
    metavar="PATH",
    type=click.Path(),
    help="HLO dumps (*.hlo.pb, a folder, a glob) for traces that lack them.",
)


def check_output(output: str, *, force: bool) -> None:
    """What can be wrong with where the result goes is said before anything is read.

    Raises:
        UsageError: something is there already, or there is no such folder.
    """
    if os.path.lexists(output) and not force:
        raise UsageError(f"{output}: exists already; --force replaces it")
    if not Path(output).absolute().parent.is_dir():
        raise UsageError(f"{output}: there is no folder {Path(output).parent} to write it to")


def open_with_progress(inputs: Sequence[str], hlo: Sequence[str] = ()) -> Trace:
    """The trace behind the inputs; a bar on standard error while a large one is read, if that is a terminal."""
    from thence.trace import open_trace

    with _progress() as progress:
        return open_trace(*inputs, hlo=hlo, progress=progress)


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


def json_text(value: Any) -> str:
    """A JSON document as text."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    click.echo(json_text(value))


def emit(
    document: Any,
    rows: pl.DataFrame,
    headings: Mapping[str, str],
    form: str,
    notes: Iterable[str],
) -> None:
    """A result in the wanted form; what must be said beside it goes below the table, or to standard error.

    Args:
        document: the result as JSON values.
        rows: the result's main table.
        headings: columns that the terminal shows, with their headings.
        form: table, json or csv.
        notes: sentences.
    """
    if form == "json":
        print_json({**document, "warnings": list(notes)})
    elif form == "csv":
        click.echo(rows.write_csv(), nl=False)
        for note in notes:
            click.echo(note, err=True)
    else:
        from rich.text import Text

        from thence.writers.frames import frame_table

        output = console()
        print_table(output, frame_table(rows, headings, output.width))
        for note in notes:
            print_table(output, Text(note, "dim"))
