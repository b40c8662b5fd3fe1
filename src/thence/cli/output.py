"""Output options that subcommands share (-o, --format, --top), and printing of results."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from thence.atomic_files import atomic_open_text
from thence.cli.json_pieces import json_pieces
from thence.cli.json_rows import with_most_rows
from thence.cli.messages import put, say, wrote
from thence.errors import UsageError
from thence.model.answer import TableView
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import polars as pl
    from rich.console import Console, RenderableType

    from thence.model.answer import Answer, Lines

SCHEMAS: Mapping[str, int] = {
    "explain": 1,
    "report": 3,
    "programs": 1,
    "collectives": 1,
    "ranks": 2,
    "streams": 1,
    "compile": 1,
    "idle": 2,
    "roofline": 1,
    "memory": 1,
    "steps": 2,
    "whatif": 2,
    "check": 1,
    "diff": 2,
    "history": 1,
    "ingest": 1,
    "label": 1,
    "inside": 2,
    "doctor": 1,
    "top": 1,
}
"""By verb, the number that its JSON documents state as ``schema``. It is raised when a key is removed or renamed, or
when the meaning, unit or type of its values changes, and the changelog says what changed; new keys do not raise it.
Answers of ``thence sql`` are lists of rows with the columns of the query, and state none."""

_Command = TypeVar("_Command", bound="Callable[..., Any] | click.Command")
_ENDINGS = {".json": "json", ".csv": "csv"}
_UNBOUNDED_WIDTH = 10_000
"""Width of the output in characters if no terminal limits it."""


def choice_option(*names: str, choices: Sequence[str], meaning: str) -> Callable[[_Command], _Command]:
    """An option with a fixed set of values; the default is the first.

    Args:
        names: the option, such as ``--format``, and the name of its parameter if that differs.
        choices: the allowed values.
        meaning: for ``--help``.
    """
    return click.option(*names, type=click.Choice(choices), default=choices[0], show_default=True, help=meaning)


def output_option(meaning: str, **more: Any) -> Callable[[_Command], _Command]:
    """``-o``, ``--output``: where the result goes.

    Args:
        meaning: for ``--help``.
        more: as `click.option` takes it.
    """
    return click.option("-o", "--output", help=meaning, **more)


force_option = click.option("--force", is_flag=True, help="Replace the output if it exists.")


def gate_options(meaning: str) -> Callable[[_Command], _Command]:
    """``--fail-on``, as the parameter ``bounds``, and ``--strict``.

    Args:
        meaning: of ``--fail-on``, for ``--help``.
    """

    def decorated(command: _Command) -> _Command:
        strict = click.option(
            "--strict",
            is_flag=True,
            help="With --fail-on: also exit with 1 if the bound may be exceeded by what did not become faster.",
        )
        return click.option("--fail-on", "bounds", multiple=True, metavar="BOUND", help=meaning)(strict(command))

    return decorated


_MAX_ROWS = 1 << 40
"""More rows than any table has: Polars counts them with 64 bits."""


class _RowCount(click.IntRange):
    """A number of rows, 1 or more. A number that Polars could not take means all rows."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return min(super().convert(value, param, ctx), _MAX_ROWS)


top_rows = _RowCount(min=1)
"""Type of ``--top``."""
format_option = choice_option(
    "--format",
    "form",
    choices=("table", "json", "csv"),
    meaning="json (without --top) and csv hold every row and column, with full names.",
)


def check_output(output: str, *, force: bool) -> None:
    """Checks the output path before anything is read, because reading may take long.

    Raises:
        UsageError: the path is invalid, exists already, or is in a folder that does not exist.
    """
    if "\0" in output:
        raise UsageError(f"{output}: is not a valid file name")
    target = Path(output)
    if target.is_symlink() and not target.exists() and not force:
        raise UsageError(
            f"{output}: is a symbolic link to {target.readlink()}, which does not exist; --force replaces the link"
        )
    if os.path.lexists(output) and not force:
        raise UsageError(f"{output}: exists already; --force replaces it")
    if not Path(output).absolute().parent.is_dir():
        raise UsageError(f"{output}: there is no folder {Path(output).parent} to write it to")


@dataclass(frozen=True)
class Result:
    """Where a result goes.

    Attributes:
        form: table, json, csv, or another form that the ending of the output's name selects.
        path: the file; None for standard output.
        top: rows that a table shows at most; None for all.
        most: rows that a table of a JSON document has at most; None for all, as without ``--top``.
    """

    form: str
    path: str | None = None
    top: int | None = None
    most: int | None = None

    def text(self, text: str) -> None:
        """Writes a whole document."""
        if self.path is None:
            put(text)
            return
        with atomic_open_text(Path(self.path)) as stream:
            stream.write(text)
        wrote(self.path)

    def json(self, document: Any) -> None:
        """Writes a document as JSON with its schema; tables in it become lists of rows."""
        if self.most is not None:
            document = with_most_rows(document, self.most)
        document = _with_schema(document)
        if self.path is None:
            _put_json(document)
            return
        with atomic_open_text(Path(self.path)) as stream:
            stream.writelines(json_pieces(document))
        wrote(self.path)

    def show(self, answer: Answer, more: Mapping[str, Any] | None = None) -> None:
        """Shows an answer in the form that was asked for; notes go below the tables, into the JSON, or to stderr.

        Args:
            more: further keys of the JSON document.
        """
        if self.form == "json":
            self.json({**answer.document(), **(more or {})})
        elif self.form == "csv":
            self.csv(answer.to_frame(), answer.all_notes())
        else:
            print_notes(console(), answer.caveats.left_out)
            self.views(answer.views(), answer.notes_below())

    def csv(self, rows: pl.DataFrame, notes: Iterable[str]) -> None:
        """Writes a table as CSV, and notes on standard error."""
        from thence.writers.text.csv import csv_text
        from thence.writers.text.merged_sentences import merged

        self.text(csv_text(rows))
        for note in merged(notes):
            say(note)

    def views(self, views: Iterable[TableView | Lines], notes: Iterable[str] = ()) -> None:
        """Prints tables and lines on the terminal, with notes below them."""
        from thence.writers.text.answer import lines_of, table_of

        output = console()
        for number, view in enumerate(views):
            if number and (isinstance(view, TableView) or view.apart):
                print_table(output, "")
            parts = (
                table_of(view, self.top, output.width)
                if isinstance(view, TableView)
                else lines_of(view, self.top, output)
            )
            for part in parts:
                print_table(output, part)
        print_notes(output, notes)


def result_options(
    endings: Mapping[str, str] = _ENDINGS,
    meaning: str = "File ending in .json or .csv, instead of standard output.",
    top: int | None = None,
    forms: Callable[[_Command], _Command] = format_option,
    without: str = "2,000",
    hint: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``-o``, ``--force``, ``--format`` and ``--top``, as one parameter ``result``.

    Args:
        endings: endings of the files that the verb writes, and the form that each selects.
        meaning: of ``-o``, for ``--help``.
        top: rows that a table shows without ``--top``; None: the verb decides.
        forms: the option ``--format``, if a verb has other formats.
        without: if ``top`` is None, how many rows are shown without ``--top``, in words for ``--help``.
        hint: what the error about another ending adds.
    """

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def called(output: str | None, **given: Any) -> Any:
            force, form, rows = given.pop("force"), given.pop("form"), given.pop("top")
            if output is not None:
                form = _form(output, endings, hint)
                check_output(output, force=force)
            source = click.get_current_context().get_parameter_source("top")
            most = rows if source is ParameterSource.COMMANDLINE else None
            return command(result=Result(form, output, rows, most), **given)

        wrapped: Callable[..., Any] = called
        options = (
            click.option(
                "--top",
                type=top_rows,
                default=top,
                show_default=top is not None,
                help="Rows of the table to show."
                + ("" if top else f" Without it, {without}.")
                + " In json, where all rows are shown without it, one more sums up the rest.",
            ),
            forms,
            output_option(meaning, type=click.Path(dir_okay=False), metavar="OUT"),
            force_option,
        )
        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped

    return decorated


def _form(output: str, endings: Mapping[str, str], hint: str) -> str:
    form = endings.get(Path(output).suffix.lower())
    if form is None:
        raise UsageError(f"{output}: the name must end in one of {', '.join(endings)}{hint}")
    return form


def console() -> Console:
    """A console on standard output for tables; a pipe or file gets every column, unless COLUMNS sets a width.

    Rich respects NO_COLOR.
    """
    from thence.cli.safe_console import SafeConsole

    width = _UNBOUNDED_WIDTH if _unbounded() else None
    return SafeConsole(highlight=False, soft_wrap=False, width=width)


def terminal_width() -> int | None:
    """Width of the terminal that standard output is, or that COLUMNS states; None for a pipe or file."""
    return None if _unbounded() else shutil.get_terminal_size().columns


def _unbounded() -> bool:
    return not sys.stdout.isatty() and not os.environ.get("COLUMNS")


def error_console() -> Console:
    """A console on standard error, for progress bars."""
    from thence.cli.safe_console import SafeConsole

    return SafeConsole(stderr=True)


def print_table(output: Console, table: RenderableType) -> None:
    """Prints a table on standard output."""
    output.print(table)


def print_notes(output: Console, notes: Iterable[str]) -> None:
    """Prints sentences below a table; sentences that say the same of several inputs are merged into one."""
    from rich.text import Text

    from thence.writers.text.merged_sentences import merged

    for note in merged(notes):
        print_table(output, Text(printable(note), "dim"))


def print_command(output: Console, command: RenderableType) -> None:
    """Prints a command line on standard output without line breaks, so that it can be copied from the terminal."""
    output.print(command, soft_wrap=True)


def flat_cells(rows: pl.DataFrame) -> pl.DataFrame:
    """A table with cells that fit in a line of text: nested values as JSON, bytes as base64, durations as ISO 8601."""
    import polars as pl

    nested = [name for name, dtype in rows.schema.items() if dtype.is_nested()]
    texts = {name: [_compact(cell) for cell in rows[name].to_list()] for name in nested}
    return rows.with_columns(
        pl.col(pl.Binary).bin.encode("base64"),
        pl.col(pl.Duration).dt.to_string("iso"),
        *(pl.Series(name, cells, pl.String) for name, cells in texts.items()),
    )


def _compact(cell: Any) -> str | None:
    import msgspec

    return None if cell is None else msgspec.json.encode(cell).decode()


def print_json(value: Any) -> None:
    """Prints one JSON document with its schema on standard output; see `json_pieces`."""
    _put_json(_with_schema(value))


def _put_json(document: Any) -> None:
    for piece in json_pieces(document):
        put(piece)


def _with_schema(document: Any) -> Any:
    """A document with the schema of the verb that runs; a list of rows as it is."""
    if not isinstance(document, dict):
        return document
    verb = click.get_current_context().command.name
    return {"schema": SCHEMAS[str(verb)], **document}
