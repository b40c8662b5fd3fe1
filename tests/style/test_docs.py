"""Documents name files that there are."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import thence
from thence.integrations import SCALARS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(thence.__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md")))
OF_EXAMPLES = {
    *("readers/kernel_list.py", "analysis/longest.py", "cli/longest.py"),
    *("writers/timelines/lines.py", "traces/"),
}
"""Files that the worked examples of docs/architecture.md make, and names that stand for a user's own."""
_SHOWN = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
"""What commands print: names of modules of a model look like paths there."""
_NO_PROSE = re.compile(r"^```.*?^```$|<!--.*?-->|^(?:\||#|!\[| {4}).*?$", re.DOTALL | re.MULTILINE)
"""Code, what commands print, tables, headings and pictures."""
_ITEMS = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )")
_SENTENCES = re.compile(r"""(?<=[.!?])[)"'*_]*\s+(?=["'(*_\[A-Z0-9`]|thence|torch|jax)""")
_MOST_WORDS = 30
_PATH = re.compile(r"`((?:\w+/)+\w*(?:\.\w+)?|\w+\.py)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_documents_exist(page: Path) -> None:
    text = _SHOWN.sub("", page.read_text(encoding="utf-8"))
    for name in set(_PATH.findall(text)) - OF_EXAMPLES - set(SCALARS):
        here = (page.parent / name, ROOT / name, ROOT / "src" / "thence" / name)
        anywhere = (ROOT / "src" / "thence").rglob(name)
        assert any(path.exists() for path in here) or any(True for _ in anywhere), name


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page; a piece of code is one word, and of a link its text counts."""
    prose = re.sub(r"\]\([^)]*\)", "]", _NO_PROSE.sub("\n", text))
    for item in _ITEMS.split(re.sub(r"`[^`]*`", "`code`", prose)):
        yield from _SENTENCES.split(" ".join(item.split()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [one for one in sentences(text) if len(one.split()) > _MOST_WORDS] == []


def test_what_counts_as_a_sentence() -> None:
    page = "# A title. Of two\n\nOne [word](a/b.md). `a b c` too: (yes.) Three\n- item\n\n| a. B |\n```sh\nx. Y\n```\n"
    assert [one for one in sentences(page) if one] == ["One [word].", "`code` too: (yes.", "Three", "- item"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_documents_lead_somewhere(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of docs/reference are made when the site is built, which checks their links."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    made = {ROOT / "docs" / name for name in importlib.import_module("make_reference").names()}
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
        path = Path(os.path.normpath(page.parent / target))
        assert "://" in target or path.exists() or path in made, target


def test_the_index_of_benchmarks_is_complete() -> None:
    index = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for script in sorted((ROOT / "benchmarks").glob("*.py")):
        assert f"`{script.name}`" in index


def test_every_promise_about_security_names_tests_that_there_are() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    promises = [row for row in text.splitlines() if row.startswith("| ") and "held by" not in row]
    assert len(promises) > 20
    assert [row for row in promises if "::test_" not in row] == []
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text):
        assert f"\ndef {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"
