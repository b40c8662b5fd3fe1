"""Sizes and habits that keep the package readable."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import thence

PACKAGE = Path(thence.__file__).parent
GENERATED = PACKAGE / "readers" / "protos"
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if GENERATED not in path.parents]

MOST_MODULE_LINES = 500
MOST_FUNCTION_LINES = 60

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> list[Function]:
    return [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, Function)]


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_module_fits_into_one_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_MODULE_LINES


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_function_fits_on_a_screen(path: Path) -> None:
    for function in functions(path):
        assert function.end_lineno is not None
        lines = function.end_lineno - function.lineno + 1
        assert lines <= MOST_FUNCTION_LINES, f"{function.name}: {lines} lines"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_only_the_command_line_prints(path: Path) -> None:
    if "cli" in path.relative_to(PACKAGE).parts:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"line {node.lineno}"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_everything_public_is_documented(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module"
    scopes = [
        tree,
        *(n for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")),
    ]
    for scope in scopes:
        for node in scope.body:
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), node.name


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_what_a_module_offers_is_listed_and_there(path: Path) -> None:
    tree = ast.parse(path.read_text())
    lists = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    public = {
        node.name
        for node in tree.body
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")
    }
    if public:
        assert lists, "no __all__"
        assert public <= set(lists[0])
