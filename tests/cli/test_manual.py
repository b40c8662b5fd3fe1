"""The manual: nothing of a verb's help is missing, and man takes it."""

from __future__ import annotations

import shutil
import subprocess

import click
import pytest

from thence.cli.manual import man_pages, program, verbs
from thence.cli.verbs import VERBS, commands

COMMANDS = {command.name: command for command in commands()}
PAGES = man_pages()


@pytest.mark.parametrize("verb", verbs(), ids=lambda verb: verb.name)
def test_everything_that_help_says_is_in_the_manual(verb) -> None:
    command = COMMANDS[verb.name]
    said = click.Context(command, info_name=f"thence {verb.name}", max_content_width=100)
    parts = [verb.usage, verb.summary]
    parts += [text for block in verb.blocks for text in (block.heading, block.text)]
    parts += [text for option in verb.options for text in (option.written, option.meaning)]
    left = "".join(command.get_help(said).split())  # lines are broken elsewhere
    for part in sorted(parts, key=len, reverse=True):
        squeezed = "".join(part.split())
        assert squeezed in left
        left = left.replace(squeezed, "", 1)
    assert left.replace(":", "") in (f"Usagethence{verb.name}Options", f"Usagethence{verb.name}[Options]Options")


def test_there_is_a_page_for_the_program_and_each_verb() -> None:
    assert set(PAGES) == {"thence.1", *(f"thence-{name}.1" for name in VERBS)}
    assert [verb.name for verb in verbs()] == list(VERBS)
    assert "--version" in {option.written for option in program().options}


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_man_shows_examples_as_they_are_typed() -> None:
    page = PAGES["thence-report.1"]
    shown = subprocess.run(
        ["groff", "-man", "-T", "ascii", "-P", "-cbou"],
        input=page, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stderr == ""
    for example in verbs()[0].examples:
        assert example in shown.stdout


def test_no_line_of_a_text_is_taken_for_a_request() -> None:
    requests = {".TH", ".SH", ".TP", ".PP", ".nh", ".ad", ".B", ".BR", ".nf", ".fi"}
    for page in PAGES.values():
        for line in page.splitlines():
            assert not line.startswith("'")
            assert not line.startswith(".") or line.split()[0] in requests


def test_examples_are_told_from_what_is_said_of_them() -> None:
    examples = {verb.name: verb.examples for verb in verbs()}
    assert "thence report traces/ --by rank" in examples["report"]
    assert "zcat trace.json.gz | thence report -" in examples["report"]
    assert "thence record -- python train.py" in examples["record"]
