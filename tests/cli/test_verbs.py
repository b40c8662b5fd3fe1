"""Verbs are imported when they are used, and none is forgotten in the table of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import polars as pl
import pytest
from click.shell_completion import BashComplete

import thence.cli
from helpers import recording
from thence.cli.verbs import VERBS, commands, group

_RUN = (
    "import sys\nfrom thence.cli import main\n"
    "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    "print(*sys.modules, file=sys.stderr)"
)


def loaded(*arguments: str) -> set[str]:
    """Modules that are imported after a run of the command line."""
    run = subprocess.run([sys.executable, "-c", _RUN, *arguments], capture_output=True, text=True, check=True)
    return set(run.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("arguments", "used"),
    [
        (("--help",), set()),
        (("no-such-verb",), set()),
        (("whatif", "--help"), {"whatif"}),
        (("report", "--no-such-option"), {"report"}),
    ],
)
def test_only_the_verb_that_is_used_is_imported(arguments: tuple[str, ...], used: set[str]) -> None:
    modules = loaded(*arguments)
    assert {name for name in VERBS if f"thence.cli.{name}" in modules} == used
    assert not {"polars", "numpy", "rich"} & modules


def test_the_table_has_every_module_with_a_command() -> None:
    modules = Path(thence.cli.__file__).parent.glob("*.py")
    with_command = {path.stem for path in modules if "\ndef command(" in path.read_text()}
    assert with_command == set(VERBS)
    assert [command.name for command in commands()] == list(VERBS)


def test_lines_of_help_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        thence.cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name, text in VERBS.items():
        assert any(line.split() == [name, *text.split()] for line in lines)
    assert max(map(len, lines)) < 80


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.name)
def test_sentences_of_help_fit_80_columns(command: click.Command) -> None:
    """Examples and choices stay whole, and stand further to the right than sentences."""
    context = click.Context(command, info_name=f"thence {command.name}", terminal_width=80)
    lines = command.get_help(context).splitlines()
    sentences = [line for line in lines if not line.startswith(("    ", "  --"))]
    assert max(map(len, sentences)) <= 80


def test_completion_of_a_verb_and_of_its_choices() -> None:
    completion = BashComplete(group, {}, "thence", "_THENCE_COMPLETE")
    assert [item.value for item in completion.get_completions([], "re")] == ["report", "record"]
    assert completion.get_completions([], "--v")[0].value == "--version"
    assert {"module", "op"} <= {item.value for item in completion.get_completions(["report", "--by"], "")}


@pytest.mark.parametrize(("verb", "query"), [("idle", ()), ("sql", ("select name from gpu",))])
def test_help_says_how_many_rows_there_are_without_top(
    verb: str, query: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Below a table that ends early stand the rows that are left out, and the number of all."""
    with pytest.raises(SystemExit):
        thence.cli.main([verb, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    (stated,) = re.findall(r"Rows of the table to show\. Without it, \D*(\d+)", text)
    with pytest.raises(SystemExit):
        thence.cli.main([verb, str(recording("torch_eager_rank0")), *query])
    found = re.findall(r"\.\.\. (\d+) more[^;]*; --top (\d+) shows all", capsys.readouterr().out)
    assert [int(every) - int(more) for more, every in found][-1] == int(stated)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        # What the thread pool of Polars 2.1 says under ``ulimit -v``.
        pl.exceptions.PanicException(
            'called `Result::unwrap()` on an `Err` value: Os { code: 11, kind: WouldBlock, message: "Resource '
            'temporarily unavailable" }'
        ),
    ],
)
def test_a_refused_thread_is_no_defect(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(group, "main", refused)
    with pytest.raises(SystemExit) as ended:
        thence.cli.main([])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "allows this process no further thread" in told
    assert "report it" not in told


def test_a_package_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'google.protobuf'", name="google.protobuf")

    monkeypatch.setattr(group, "main", lacking)
    with pytest.raises(SystemExit) as ended:
        thence.cli.main([])
    assert ended.value.code == 2
    assert "has no package google, which thence needs: pip install thence" in capsys.readouterr().err
