"""Help of a verb: its own options first, then those that all verbs share, in a line each."""

from __future__ import annotations

from typing import Any

import click


class SharedOption(click.Option):
    """An option that many verbs have: its help is a line with an example, and ``thence help selection`` says all."""

    def __init__(self, *arguments: Any, brief: str, **more: Any) -> None:
        """As `click.Option`.

        Args:
            arguments: names of the option.
            brief: meaning with an example, at most 60 characters.
            more: as `click.Option` takes it.
        """
        super().__init__(*arguments, **more)
        self.brief = brief


class VerbCommand(click.Command):
    """A verb whose help lists shared options under a heading of their own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the verb's own options, and below them those that all verbs share."""
        own = [p for p in self.get_params(ctx) if isinstance(p, click.Option) and not isinstance(p, SharedOption)]
        with formatter.section("Options"):
            formatter.write_dl([record for option in own if (record := help_record(option, ctx))])
        shared = [(record[0].split(" [")[0], p.brief) for p, record in _shared(self, ctx)]
        if shared:
            with formatter.section("Selection and input (more: thence help selection)"):
                formatter.write_dl(shared)


_MAX_CHOICES = 60
"""Most characters of an option with its choices in the left column; longer ones go into the text beside it."""


def help_record(option: click.Option, ctx: click.Context) -> tuple[str, str] | None:
    """How an option is written, and its meaning, with many choices in the meaning, which is wrapped; None if hidden."""
    record = option.get_help_record(ctx)
    if record is None or len(record[0]) <= _MAX_CHOICES or "[" not in record[0]:
        return record
    name, _, choices = record[0].partition("[")
    return f"{name}NAME", f"{record[1]} NAME is one of {', '.join(choices.removesuffix(']').split('|'))}."


def shared_options(command: click.Command, ctx: click.Context) -> list[tuple[str, str]]:
    """How each shared option of a verb is written, and its whole meaning."""
    return [record for _, record in _shared(command, ctx)]


def _shared(command: click.Command, ctx: click.Context) -> list[tuple[SharedOption, tuple[str, str]]]:
    options = (p for p in command.get_params(ctx) if isinstance(p, SharedOption))
    return [(option, record) for option in options if (record := option.get_help_record(ctx))]
