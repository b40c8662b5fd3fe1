"""``thence help``: the help of a verb, the options that select a part of a trace, and the terms of tables."""

from __future__ import annotations

import click

from thence.cli.messages import put
from thence.cli.verb import VerbCommand, shared_options
from thence.cli.verbs import VERBS, command_of, group
from thence.errors import UsageError
from thence.model.words import WORDS

_EXAMPLES = """\b
Examples:
  thence help idle          as thence idle --help
  thence help selection     options that choose a part of a trace, and how inputs are read
  thence help words         every term that tables and pages use
  thence help exposed       one term
"""


@click.command("help", cls=VerbCommand, epilog=_EXAMPLES)
@click.argument("topic", nargs=-1, metavar="[VERB|selection|words|TERM]")
def command(topic: tuple[str, ...]) -> None:
    """Explain a verb, the selection of a part of a trace, or a term."""
    program = click.Context(group, info_name="thence", **group.context_settings)
    asked = " ".join(topic)
    terms = {term: meaning for term, meaning in WORDS.items() if asked == "words" or term.lower() == asked.lower()}
    if not asked:
        put(group.get_help(program) + "\n")
    elif asked in VERBS:
        put(command_of(asked).get_help(click.Context(command_of(asked), program, asked)) + "\n")
    elif asked == "selection":
        put(_definitions(program, "Options of verbs that read traces", _selection(program)))
    elif terms:
        put(_definitions(program, "Terms", list(terms.items())))
    else:
        raise UsageError(f"nothing is called {asked!r}: thence help lists verbs, thence help words lists terms")


def _selection(program: click.Context) -> list[tuple[str, str]]:
    """Every shared option and its meaning; the report has all of them."""
    report = command_of("report")
    return shared_options(report, click.Context(report, program, "report"))


def _definitions(context: click.Context, heading: str, rows: list[tuple[str, str]]) -> str:
    formatter = context.make_formatter()
    with formatter.section(heading):
        formatter.write_dl(rows)
    return formatter.getvalue()
