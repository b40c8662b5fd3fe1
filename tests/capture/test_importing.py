"""What a program imports is told to whoever waits for it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from thence.importing import before_import, import_is_complete, when_imported

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package whose import looks at itself on the way."""
    name = "waited_for"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("value = 1\nfrom waited_for import part\nvalue = 2\n")
    (folder / "part.py").write_text("import waited_for\nseen = waited_for.value\n")
    monkeypatch.syspath_prepend(tmp_path)
    for one in (name, f"{name}.part"):
        monkeypatch.delitem(sys.modules, one, raising=False)
    return name


def test_a_function_is_called_once_when_the_import_is_complete(package: str) -> None:
    found: list[object] = []
    when_imported(package, lambda module: found.append(module.value))
    assert not import_is_complete(package)
    __import__(package)
    assert found == [2]
    assert import_is_complete(package)
    sys.modules.pop(package)
    __import__(package)
    assert found == [2]


def test_what_is_there_already_is_told_at_once() -> None:
    found: list[object] = []
    when_imported("sys", found.append)
    assert found == [sys]


def test_the_beginning_of_an_import_is_told(package: str) -> None:
    found: list[bool] = []
    no_longer = before_import(package, lambda: found.append(package in sys.modules))
    __import__(package)
    assert found == [False]
    sys.modules.pop(package)
    no_longer()
    __import__(package)
    assert found == [False]


def test_an_import_that_has_begun_is_seen_to_be_complete(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever begins to wait in the midst of it is told at the next import."""
    found: list[object] = []
    before_import(f"{package}.part", lambda: when_imported(package, lambda module: found.append(module.value)))
    __import__(package)
    (tmp_path / "another_one.py").write_text("")
    monkeypatch.delitem(sys.modules, "another_one", raising=False)
    __import__("another_one")
    assert found == [2]


def test_one_that_waits_no_longer_is_not_told(package: str) -> None:
    found: list[object] = []
    no_longer = when_imported(package, found.append)
    no_longer()
    no_longer()
    __import__(package)
    assert not found
