"""The manual: nothing of a verb's help is missing, and man takes it."""

from __future__ import annotations

import shutil
import subprocess

import click
import pytest

from thence.cli.manual import man_pages, program, verbs
from thence.cli.verb import SharedOption, shared_options
from thence.cli.verbs import VERBS, commands
from thence.cli.verbs import group as main_group
from thence.model.words import WORDS

COMMANDS = {command.name: command for command in commands()}
PAGES = man_pages()


@pytest.mark.parametrize("verb", verbs(), ids=lambda verb: verb.name)
def test_everything_that_help_says_is_in_the_manual(verb) -> None:
    command = COMMANDS[verb.name]
    said = click.Context(command, info_name=f"thence {verb.name}", max_content_width=100)
    parts = [verb.usage, verb.summary]
    parts += [text for block in verb.blocks for text in (block.heading, block.text)]
    shared = {p for p in command.params if isinstance(p, SharedOption)}
    in_full = dict(shared_options(command, said))
    parts += [t for o in verb.options if o.written not in in_full for t in (o.written, o.meaning)]
    parts += [text for option in shared for text in (option.opts[0], option.brief)]
    left = "".join(command.get_help(said).split())  # lines are broken elsewhere
    for part in sorted(parts, key=len, reverse=True):
        squeezed = "".join(part.split())
        assert squeezed in left
        left = left.replace(squeezed, "", 1)
    for metavar in ("INTEGER", "INTEGER", "FIRST:LAST", "FROM:TO", "NAME", "NAME", "REGEX", "PATTERN", "PATH", "RATIO"):
        left = left.replace(metavar, "", 1) if shared else left
    left = left.replace("Selectionandinput(more:thencehelpselection):", "")
    assert left.replace(":", "") in (f"Usagethence{verb.name}Options", f"Usagethence{verb.name}[Options]Options")


def test_help_of_the_selection_says_all_that_verbs_say_in_a_line(capsys) -> None:
    main_group(["help", "selection"], standalone_mode=False)
    shown = "".join(capsys.readouterr().out.split())
    for command in COMMANDS.values():
        for written, meaning in shared_options(command, click.Context(command)):
            assert "".join(written.split()) in shown
            assert "".join(meaning.split()) in shown


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
def test_help_fits_on_a_screen_and_every_shared_option_has_a_line(command) -> None:
    shown = command.get_help(click.Context(command, info_name=f"thence {command.name}", terminal_width=100))
    assert len(shown.splitlines()) <= 60
    assert max(map(len, shown.splitlines())) <= 100
    assert all(len(p.brief) <= 60 for p in command.params if isinstance(p, SharedOption))


def test_words_are_explained_one_by_one_and_at_once(capsys) -> None:
    main_group(["help", "words"], standalone_mode=False)
    everything = "".join(capsys.readouterr().out.split())
    for word, meaning in WORDS.items():
        assert "".join((word + meaning).split()) in everything
        assert len(meaning.split()) <= 30
    main_group(["help", "launch", "latency"], standalone_mode=False)
    assert "launch latency  From the beginning of a launch" in capsys.readouterr().out


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
