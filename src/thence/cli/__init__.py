"""The command line. Each subcommand is a module with one click command; only `main` prints errors."""

from __future__ import annotations

import contextlib
import io
import os
import sys

import click

from thence.cli import (
    check,
    collectives,
    convert,
    demo,
    diff,
    doctor,
    flame,
    idle,
    ingest,
    inside,
    label,
    programs,
    ranks,
    record,
    report,
    sql,
    steps,
    streams,
    whatif,
)
from thence.cli import compile as compile_verb
from thence.cli.inputs import names_inputs
from thence.cli.messages import put, say, unexpected
from thence.cli.standard_streams import ReaderGone, Unwritable, checked_streams
from thence.errors import ThenceError

__all__ = ["COMMANDS", "group", "main"]

COMMANDS: tuple[click.Command, ...] = (
    report.command,
    convert.command,
    flame.command,
    programs.command,
    collectives.command,
    ranks.command,
    streams.command,
    compile_verb.command,
    idle.command,
    steps.command,
    whatif.command,
    check.command,
    diff.command,
    ingest.command,
    label.command,
    inside.command,
    record.command,
    sql.command,
    doctor.command,
    demo.command,
)
"""Every verb, in the order of ``thence --help``."""


class _InOrder(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb and its arguments; what is no verb but names inputs is reported on.

        A verb's name wins over a file's: ``./report`` names the file.
        """
        name = args[0]
        if name not in self.commands and names_inputs(name):
            return report.command.name, report.command, args
        return super().resolve_command(ctx, args)


def _show_version(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:  # noqa: FBT001 - click's
    if asked:
        from thence.doctor.versions import versions

        for name, version in versions().items():
            put(f"{name} {version}\n")
        ctx.exit()


group = _InOrder(
    "thence",
    help=(
        "Where did the GPU time come from?\n\n"
        "Every verb takes files, directories and globs, several ranks at once, or - for standard input. "
        "thence TRACE alone is thence report TRACE; a verb's name wins over a file's, and ./report names the file."
    ),
    epilog='Shell completion: eval "$(_THENCE_COMPLETE=bash_source thence)" (or zsh_source, fish_source).',
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_version,
            help="Show the versions of thence and of what it works with.",
        )
    ],
)
"""The command line itself, for what describes it (`thence.cli.manual`)."""
for _command in COMMANDS:
    group.add_command(_command)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits: 0 for success, 1 for a failed check, 2 for an error."""
    try:
        with checked_streams():
            code = _run(arguments)
    except ReaderGone:
        code = 0  # whoever read our output has seen enough
    except Unwritable as error:
        code = _told(str(error), error.exit_code)
    sys.exit(code)


def _run(arguments: list[str] | None) -> int:
    """Runs the command line and says what went wrong.

    Returns:
        the exit code.

    Raises:
        Unwritable: the output does not take what is written.
        ReaderGone: nobody reads the output.
    """
    try:
        code = group.main(arguments, prog_name="thence", standalone_mode=False)
    except (Unwritable, ReaderGone, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is told; Polars' panics are no Exception
        return _told(*_explained(error))
    return code if isinstance(code, int) else 0


def _explained(error: BaseException) -> tuple[str, int]:
    """The sentence about an error, and the exit code."""
    if isinstance(error, click.exceptions.Abort | KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, click.ClickException):
        return _usage(error), 2
    if isinstance(error, ThenceError):
        return str(error), error.exit_code
    if isinstance(error, MemoryError):
        return "not enough memory for this input", 2
    if isinstance(error, UnicodeEncodeError | OSError):
        return _refused_by_the_system(error), 2
    return unexpected(error), 2


def _refused_by_the_system(error: UnicodeEncodeError | OSError) -> str:
    if isinstance(error, UnicodeEncodeError):
        # Tables, documents and other programs hold texts; only the system's own calls take other names.
        given = str(error.object).encode("utf-8", "backslashreplace").decode()[:200]
        return f"{given!r}: is not UTF-8, as names and options must be here"
    where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    return f"{where}{error.strerror or error}"


def _usage(error: click.ClickException) -> str:
    """What click would print: how the verb is used, and what is wrong."""
    shown = io.StringIO()
    error.show(shown)
    return shown.getvalue().rstrip("\n")


def _told(message: str, code: int) -> int:
    from thence.writers.text.printable import printable

    # Where standard error is the stream that takes nothing, the exit code alone tells.
    with contextlib.suppress(Unwritable, ReaderGone, OSError):
        # A name with line feeds could pose as a message of its own: what is no usage is one line.
        say(message if message.startswith("Usage:") else printable(f"thence: {message}"))
    return code
