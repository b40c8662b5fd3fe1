"""Sizes and habits that keep the package readable."""

from __future__ import annotations

import ast
from pathlib import Path

import thence
from source_trees import nodes, tree

PACKAGE = Path(thence.__file__).parent
GENERATED = PACKAGE / "readers" / "jax" / "protos"
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if GENERATED not in path.parents]

MAX_MODULE_LINES = 900
LONGER = {"trace.py": 1200}
"""A class with a method for each verb and each chart is one subject, however many there are."""
MAX_FUNCTION_LINES = 60

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def public(scope: ast.Module | ast.ClassDef) -> list[Function | ast.ClassDef]:
    """What a module or a class defines for others."""
    definitions = [node for node in scope.body if isinstance(node, Function | ast.ClassDef)]
    return [node for node in definitions if not node.name.startswith("_")]


def test_a_module_fits_into_one_head() -> None:
    lines = {name(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: n for name, n in lines.items() if n > LONGER.get(name, MAX_MODULE_LINES)} == {}


def test_a_function_fits_on_a_screen() -> None:
    lines = {
        (name(path), node.name): (node.end_lineno or 0) - node.lineno + 1
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, Function)
    }
    assert {where: n for where, n in lines.items() if n > MAX_FUNCTION_LINES} == {}


def test_only_the_command_line_prints() -> None:
    calls = [
        (name(path), node.lineno)
        for path in MODULES
        if "cli" not in path.relative_to(PACKAGE).parts
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert calls == []


def test_everything_public_is_documented() -> None:
    assert [name(path) for path in MODULES if not ast.get_docstring(tree(path))] == []
    undocumented = [
        (name(path), node.name)
        for path in MODULES
        for scope in (tree(path), *(n for n in public(tree(path)) if isinstance(n, ast.ClassDef)))
        for node in public(scope)
        if not ast.get_docstring(node)
    ]
    assert undocumented == []


def test_only_what_users_import_lists_its_names() -> None:
    """A leading underscore says of all other modules what is private, so a second list would say it again."""
    listing = {
        name(path)
        for path in MODULES
        for node in tree(path).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    }
    assert listing == {
        "__init__.py",
        "errors.py",
        "inside/__init__.py",
        "integrations/__init__.py",
        "jax.py",
        "capture/marks/__init__.py",
        "torch.py",
    }
