"""Prints text on standard output and standard error, and reports unexpected errors."""

from __future__ import annotations

import sys
from pathlib import Path

from thence.credentials import without_credentials
from thence.units import format_bytes
from thence.writers.text.printable import printable_lines

_MAX_CHARACTERS = 200
"""Characters of an unexpected error's own message that are printed."""


def say(text: str) -> None:
    """Prints text on standard error; control characters other than line feeds and tabs are replaced.

    Every message is printed by this function, because names of files, members and GPUs may hold escape sequences,
    and URLs may hold credentials. If standard error is closed, nothing is printed.
    """
    if sys.stderr is None:
        return
    sys.stderr.write(printable_lines(without_credentials(text)) + "\n")


def put(text: str) -> None:
    """Prints a document on standard output.

    A pipe or a file gets the text as it is; for a terminal, control characters other than line feeds and tabs are
    replaced.
    """
    if sys.stdout.isatty():
        text = printable_lines(text)
    sys.stdout.write(text)
    sys.stdout.flush()


def wrote(path: str, what: str = "") -> None:
    """Prints on standard error what a verb wrote: where, what, and how large it is.

    Args:
        path: a file, or a folder of files.
        what: its contents; empty if the name of the file says it.
    """
    written = Path(path)
    files = written.rglob("*") if written.is_dir() else (written,)
    size = format_bytes(sum(file.stat().st_size for file in files if file.is_file()))
    say(f"wrote {path}: {', '.join(filter(None, (what, size)))}")


def unexpected(error: BaseException) -> str:
    """The sentence about an exception that is caused by a defect of thence.

    Args:
        error: the exception; its traceback is written to a file, which the sentence names.
    """
    import traceback

    what = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_CHARACTERS]
    where = _kept("".join(traceback.format_exception(error)))
    return f"an error that should not happen ({what}); please report it{where}"


def _kept(text: str) -> str:
    import tempfile

    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="thence-error-", suffix=".txt", encoding="utf-8",
            errors="backslashreplace", delete=False,
        ) as file:  # fmt: skip
            file.write(without_credentials(text))
    except OSError:
        return ""
    return f" with the traceback in {file.name}"
