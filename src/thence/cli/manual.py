"""The manual: each verb's help as data, and as pages for ``man``.

A verb is described only once, by its click command. From it, ``setup.py`` makes man pages for the wheel, and
``docs/make_reference.py`` makes a page per verb for the documentation. This module needs only click, because nothing
else is installed when a wheel is built.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from thence.cli.verb import SharedOption, help_record
from thence.cli.verbs import commands, group
from thence.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

EXIT_CODES = {
    0: "success; also if the reader of the output closes the pipe",
    1: "a check failed: an unsound trace, a violated expectation or limit, or a missing feature",
    2: "the command could not do its work: wrong usage, an input that cannot be read, missing data or a missing "
    "library; standard error says what is wrong and how to fix it",
    130: "interrupted",
}
"""Meanings of the exit codes of all verbs except ``thence record``, which exits with the code of its command."""
_MARK = "\b\n"
"""Marks a paragraph that click must not wrap."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option: how it is written, and its meaning, including default and range."""

    written: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a verb's explanation.

    Attributes:
        text: of the part.
        verbatim: whether its lines stay as they are: examples and tables.
        heading: of the part; "" without one.
    """

    text: str
    verbatim: bool = False
    heading: str = ""


@dataclass(frozen=True, slots=True)
class Verb:
    """The help of one verb.

    Attributes:
        name: such as ``report``; "" for the program itself.
        summary: its first sentence.
        usage: without the name of the program.
        blocks: the rest of its description and what its help ends with.
        options: in the order of its help.
    """

    name: str
    summary: str
    usage: str
    blocks: tuple[Block, ...]
    options: tuple[Option, ...]

    @property
    def examples(self) -> tuple[str, ...]:
        """Commands of its help, each as it would be typed."""
        lines = (line for block in self.blocks if block.verbatim for line in block.text.splitlines())
        return tuple(command for line in lines if (command := _command(line)))


def verbs() -> tuple[Verb, ...]:
    """Every verb, in the order of ``thence --help``."""
    return tuple(_verb(command, str(command.name)) for command in commands())


def program() -> Verb:
    """The program itself."""
    return _verb(group, "")


def man_pages() -> dict[str, str]:
    """File names, such as ``thence-report.1``, and the pages in roff."""
    whole = (program(), *verbs())
    return {f"{_title(verb)}.1": "\n".join(_roff(verb, whole)) + "\n" for verb in whole}


def _verb(command: click.Command, name: str) -> Verb:
    whole = click.Context(group, info_name="thence", **group.context_settings)
    context = click.Context(command, whole, name) if name else whole
    # Newer versions of click list arguments, too, which the usage line already shows.
    options = [p for p in command.get_params(context) if isinstance(p, click.Option)]
    options.sort(key=lambda option: isinstance(option, SharedOption))
    records = (help_record(option, context) for option in options)
    description = list(_blocks(command.help or ""))
    summary = description.pop(0).text
    return Verb(
        name=name,
        summary=summary,
        usage=" ".join(command.collect_usage_pieces(context)),
        blocks=(*description, *_blocks(command.epilog or "")),
        options=tuple(Option(*record) for record in records if record is not None),
    )


def _blocks(text: str) -> Iterator[Block]:
    """The paragraphs of a help text as click separates them; those that click does not wrap are verbatim."""
    for paragraph in re.split(r"\n\s*\n", textwrap.dedent(_undented(text)).strip("\n")):
        verbatim = paragraph.startswith(_MARK)
        lines = paragraph.removeprefix(_MARK).rstrip().splitlines()
        if not verbatim and not all(line.startswith("    ") for line in lines):
            yield Block(" ".join(line.strip() for line in lines))
            continue
        heading = ""
        if lines and re.fullmatch(r"\S.*:", lines[0]) and len(lines) > 1:
            heading = lines.pop(0).removesuffix(":")
        yield Block(textwrap.dedent("\n".join(lines)), verbatim=True, heading=heading)


def _undented(text: str) -> str:
    """Removes the common indentation of all lines but the first, which has none in a docstring."""
    first, newline, rest = text.partition("\n")
    return first + newline + textwrap.dedent(rest)


def _command(line: str) -> str:
    """The command of a line of examples, without the comment after two or more spaces."""
    if not re.match(r"\s*(\w+ .*\| *)?thence ", line):
        return ""
    return re.split(r" {2,}", line.strip())[0]


def _title(verb: Verb) -> str:
    return f"thence-{verb.name}" if verb.name else "thence"


def _roff(verb: Verb, whole: tuple[Verb, ...]) -> Iterator[str]:
    title = _title(verb)
    yield f'.TH {title.upper()} 1 "" "thence {__version__}" "thence"'
    yield from (".nh", ".ad l")  # commands are neither hyphenated nor stretched
    yield from (".SH NAME", _escaped(f"{title} - {verb.summary.removesuffix('.')}"))
    usage = f"thence {verb.name} {verb.usage}".replace("  ", " ")
    yield from (".SH SYNOPSIS", f".B {_escaped(usage)}")
    yield from (".SH DESCRIPTION", _escaped(verb.summary))
    for block in verb.blocks:
        yield f".SH {_escaped(block.heading.upper())}" if block.heading else ".PP"
        yield from ((".nf", _escaped(block.text), ".fi") if block.verbatim else (_escaped(block.text),))
    if not verb.name:
        yield ".SH VERBS"
        for other in whole[1:]:
            yield from (".TP", f".BR {_escaped(_title(other))} (1)", _escaped(other.summary))
    yield ".SH OPTIONS"
    for option in verb.options:
        yield from (".TP", f".B {_escaped(option.written)}".replace("|", "|\\:"), _escaped(option.meaning))
    yield ".SH EXIT STATUS"
    if verb.name == "record":
        yield "The exit status of the command."
    else:
        for code, meaning in EXIT_CODES.items():
            yield from (".TP", f".B {code}", _escaped(meaning))
    yield ".SH SEE ALSO"
    others = [_title(other) for other in whole if other is not verb]
    yield ", ".join(f"{_escaped(other)}(1)" for other in others)


def _escaped(text: str) -> str:
    """Text escaped for roff: no line starts a request, and quotes and hyphens stay ASCII."""
    safe = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    return "\n".join(rf"\&{line}" if line.startswith((".", "\\(aq")) else line for line in safe.split("\n"))
