"""Every fact of a file format is written down once: the others import it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import thence
from source_trees import nodes
from thence.model.collectives import KINETO_KEYS

PACKAGE = Path(thence.__file__).parent
GENERATED = PACKAGE / "readers" / "jax" / "protos"
FORMATS = (
    *("thence.recording", "recording.json", "thence.compiled", "compiled.json"),
    *("thence.graph-labels", "labels.json"),
)
# Keys of one word may mean something else elsewhere.
KEYS = tuple(key for key in KINETO_KEYS.values() if " " in key)


def texts(path: Path) -> set[str]:
    """Text of a module's code: parts of f-strings too, docstrings and text that nothing uses not."""
    unused = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
    found = (n for n in nodes(path) if isinstance(n, ast.Constant) and id(n) not in unused)
    values = (n.value.decode(errors="replace") if isinstance(n.value, bytes) else n.value for n in found)
    return {value.replace("\\", "") for value in values if isinstance(value, str)}


@functools.cache
def texts_of_modules() -> dict[str, set[str]]:
    """Of the modules whose source holds one of the texts that are looked for: few of them need to be parsed."""
    wanted = re.compile("|".join(map(re.escape, (*FORMATS, *KEYS))))
    return {
        path.relative_to(PACKAGE).as_posix(): texts(path)
        for path in sorted(PACKAGE.rglob("*.py"))
        if GENERATED not in path.parents and wanted.search(path.read_text(encoding="utf-8").replace("\\", ""))
    }


@pytest.mark.parametrize("wanted", FORMATS)
def test_names_of_formats_and_files_stand_in_one_module(wanted: str) -> None:
    said = re.compile(rf"{re.escape(wanted)}(?![\w.])")  # not thence.capture.session.record, a module
    holding = [
        module
        for module, found in texts_of_modules().items()
        if any(said.search(text) and "\n" not in text for text in found)
    ]
    assert holding == ["model/formats.py"]


@pytest.mark.parametrize("key", KEYS)
def test_names_that_kineto_gives_stand_in_one_module(key: str) -> None:
    holding = [module for module, found in texts_of_modules().items() if any(key in text for text in found)]
    assert holding == ["model/collectives.py"]
