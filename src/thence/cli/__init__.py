"""The command line. Each verb is a module with one click command; only `main` prints errors."""

from __future__ import annotations

import contextlib
import io
import os
import sys

import click

from thence.cli.messages import say, unexpected
from thence.cli.standard_streams import ReaderGone, Unwritable, checked_streams
from thence.cli.verbs import group
from thence.errors import ThenceError
from thence.writers.text.printable import printable

_NO_THREAD = ("can't start new thread", 'kind: WouldBlock, message: "Resource temporarily unavailable"')
"""What Python, and Polars in a panic of its thread pool, say if the system refuses a thread."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits: 0 for success, 1 for a failed check, 2 for an error."""
    try:
        with checked_streams():
            code = _run(arguments)
    except ReaderGone:
        code = 0  # the reader of our output closed the pipe
    except Unwritable as error:
        code = _print_error(str(error), error.exit_code)
    sys.exit(code)


def _run(arguments: list[str] | None) -> int:
    """Runs the command line and prints errors.

    Returns:
        the exit code.

    Raises:
        Unwritable: the output cannot be written.
        ReaderGone: the reader of the output has closed it.
    """
    try:
        code = group.main(arguments, prog_name="thence", standalone_mode=False)
    except (Unwritable, ReaderGone, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - every error becomes a message; Polars' panics are no Exception
        return _print_error(*_message_of(error))
    return code if isinstance(code, int) else 0


def _message_of(error: BaseException) -> tuple[str, int]:
    """The sentence about an error, and the exit code."""
    if isinstance(error, click.exceptions.Abort | KeyboardInterrupt):
        return "interrupted", 130  # 128 + SIGINT, as shells say it
    if isinstance(error, click.ClickException):
        return _usage(error), 2
    if isinstance(error, ThenceError):
        return str(error), error.exit_code
    refused = _refused_by_the_system(error) or _lacking(error)
    if refused:
        return refused, 2
    return unexpected(error), 2


def _refused_by_the_system(error: BaseException) -> str:
    """The sentence about memory, threads, names or files that the system refuses; empty for other errors."""
    if isinstance(error, MemoryError):
        return "not enough memory for this input"
    if any(text in str(error) for text in _NO_THREAD):
        return (
            "the system allows this process no further thread: raise its limits (ulimit -u for threads, ulimit -v "
            "for their memory), or set POLARS_MAX_THREADS=1"
        )
    if isinstance(error, UnicodeEncodeError):
        # A name that is not UTF-8 works in system calls, but not in tables, documents and other programs.
        given = str(error.object).encode("utf-8", "backslashreplace").decode()[:200]
        return f"{given!r}: is not UTF-8; names and options must be UTF-8"
    if not isinstance(error, OSError):
        return ""
    where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    return f"{where}{error.strerror or error}"


def _lacking(error: BaseException) -> str:
    """The sentence about a package that is not installed beside thence; empty for other errors."""
    name = (isinstance(error, ModuleNotFoundError) and error.name) or ""
    package = name.partition(".")[0]
    if package in ("", "thence"):
        return ""
    return f"this Python has no package {package}, which thence needs: pip install thence installs what is missing"


def _usage(error: click.ClickException) -> str:
    """The text that click would print: the usage of the verb, and what is wrong."""
    shown = io.StringIO()
    error.show(shown)
    return shown.getvalue().rstrip("\n")


def _print_error(message: str, code: int) -> int:
    # If standard error itself cannot be written, only the exit code remains.
    with contextlib.suppress(Unwritable, ReaderGone, OSError):
        # A name with line feeds could look like a separate message, so all texts but usage become one line.
        say(message if message.startswith("Usage:") else printable(f"thence: {message}"))
    return code
