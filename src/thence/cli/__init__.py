"""The command line. Each subcommand is a module with one click command; only `main` prints errors."""

from __future__ import annotations

import sys

import click

from thence.cli import (
    check,
    collectives,
    convert,
    demo,
    doctor,
    flame,
    inside,
    label,
    programs,
    record,
    report,
    sql,
    streams,
)
from thence.cli import compile as compile_verb
from thence.errors import ThenceError
from thence.version import __version__

__all__ = ["COMMANDS", "main"]

COMMANDS: tuple[click.Command, ...] = (
    report.command,
    convert.command,
    flame.command,
    programs.command,
    collectives.command,
    streams.command,
    compile_verb.command,
    check.command,
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


_group = _InOrder(
    "thence",
    help=(
        "Where did the GPU time come from?\n\n"
        "Every verb takes files, directories and globs, several ranks at once, or - for standard input."
    ),
    epilog='Shell completion: eval "$(_THENCE_COMPLETE=bash_source thence)" (or zsh_source, fish_source).',
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
click.version_option(__version__, prog_name="thence")(_group)
for _command in COMMANDS:
    _group.add_command(_command)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits: 0 for success, 1 for a failed check, 2 for an error."""
    try:
        code = _group.main(arguments, prog_name="thence", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        _fail("interrupted", 130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except ThenceError as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # Whoever read our output has seen enough; the rest of it has nowhere to go.
        sys.stderr.close()
        sys.exit(0)
    except MemoryError:
        _fail("not enough memory for this input", 2)


def _fail(message: str, code: int) -> None:
    click.echo(f"thence: {message}", err=True)
    sys.exit(code)
