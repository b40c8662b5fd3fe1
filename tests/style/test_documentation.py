"""The documentation says what is so: commands run, outputs are those shown, everything has its place in it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import thence
from stores import InProcess
from thence.cli.verbs import VERBS
from thence.model import tables
from thence.model.places import KINDS
from thence.model.tables import Table
from thence.store import workers

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(thence.__file__).parents[2]
RUN_HERE = ("README.md", "docs/tutorials/inference.md", "docs/tutorials/ci_and_notebooks.md")
"""Pages that are quick; `make check-docs` runs all, and the examples of every --help."""


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module(name)


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("page", RUN_HERE)
def test_commands_of_a_page_do_what_it_says(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "LocalWorkers", lambda _processes: InProcess())
    report = script("check_commands", monkeypatch).check(page)
    assert report.wrong == []
    assert report.ran > 0


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        ("```console\n$ echo one\none\n```\n", 0),
        ("```console\n$ echo one\ntwo\n```\n", 1),
        ("```console\n$ printf 'a\\nb\\nc\\n'\na\n[...]\nc\n```\n", 0),
        ("```console\n$ printf 'a\\nb\\n'\na\n[...]\nc\n```\n", 1),
        ("```console\n$ thence check no_such_file\n[...]no such file[...]\n$ echo $?\n2\n```\n", 0),
        ("```sh\nthence check no_such_file  # a remark\n```\n", 1),
        ("    thence check no_such_file\n", 1),
        ("```python\nimport thence\nassert thence.__version__\n```\n", 0),
        ("```python\nraise ValueError\n```\n", 1),
        ("```pycon\n>>> 1 + 1\n3\n\n```\n", 1),
        ("<!-- not run: needs a GPU -->\n```python\nraise ValueError\n```\n", 0),
    ],
)
def test_the_check_finds_what_is_wrong(page: str, wrong: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = script("check_commands", monkeypatch)
    (tmp_path / "page.md").write_text(page, encoding="utf-8")
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    monkeypatch.setattr(commands, "stage", Path.mkdir)
    monkeypatch.setattr(commands, "clone", Path.mkdir)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    report = commands.check("page.md")
    assert len(report.wrong) == wrong
    assert len(report.left_out) == page.count("not run")


def test_what_is_not_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    report = script("check_commands", monkeypatch).Report()
    commands = importlib.import_module("check_commands")
    commands._run_plain("thence record -- python train.py", report)
    assert report.left_out == ["thence record -- python train.py  (needs a GPU)"]


def test_every_verb_column_and_kind_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = script("make_reference", monkeypatch)
    assert {f"reference/verbs/{name}.md" for name in VERBS} < set(reference.names())
    page = reference._tables_page()
    for table in (value for value in vars(tables).values() if isinstance(value, Table)):
        part = re.search(rf"^## {table.name}$(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
        assert part is not None
        rows = re.findall(r"^\| `(\w+)` \|", part[1], re.MULTILINE)
        assert rows == list(table.schema)
    kinds = reference._kinds_page()
    assert [kind.name for kind in KINDS if f"| `{kind.name}` |" not in kinds] == []


def test_texts_of_help_are_no_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = script("make_reference", monkeypatch)
    assert reference._text("a_b *c* [d] | e") == r"a\_b \*c\* \[d\] \| e"
    assert reference._text("of ``file.py(12): f_g``") == "of `file.py(12): f_g`"


def test_a_key_without_a_description_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = script("json_keys", monkeypatch)
    assert keys.meaning("report", "rows[].total_ns")
    assert keys.meaning("steps", "steps[].idle_event_wait_ns")
    assert keys.meaning("steps", "steps[].idle_nothing_ns") is None
    assert keys.meaning("report", "rows[].there_is_no_such_key") is None


def test_keys_are_those_that_a_verb_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = script("json_samples", monkeypatch)
    walked = dict(samples._walk({"a": [{"b": 1}, {"b": None}], "m": {"x": 2.5}}, "", {"m"}))
    assert walked == {"a": "list", "a[].b": "null", "m": "object", "m.*": "number"}
    assert "report" in samples.verbs_with_json()
    assert "flame" not in samples.verbs_with_json()
