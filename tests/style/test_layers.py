"""Imports go one way: what is below knows nothing of what is above."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import thence

PACKAGE = Path(thence.__file__).parent

# From the bottom to the top; a module imports from its own layer and from those below.
LAYERS = (
    {"beside", "errors", "units"},
    {"model"},
    {"readers", "recorder"},
    {"marks"},
    {"attribution", "frameworks", "inside"},
    {"analysis"},
    {"writers"},
    {"trace"},
    {"recording"},
    {"cli", "__init__", "__main__"},
)

# Imports inside a function that go upwards: an object is asked for its HTML, its analysis, its file.
UPWARDS = {
    ("analysis/summary.py", "_repr_html_", "thence.writers.html_table"),
    ("inside/opened.py", "_repr_html_", "thence.writers.inside_table"),
    ("inside/opened.py", "summary", "thence.analysis.inside"),
    ("inside/opened.py", "write", "thence.analysis.inside_timeline"),
    ("inside/opened.py", "write", "thence.writers.files"),
}

MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def layer(module: str) -> int:
    """Height of the layer that a dotted module name belongs to."""
    first = module.removeprefix("thence").lstrip(".").split(".")[0] or "__init__"
    return next((i for i, names in enumerate(LAYERS) if first in names), -1)


def imports(path: Path) -> list[tuple[str, str]]:
    """(function around it or "", module) of every import from thence that runs."""
    found = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return  # types only: nothing is imported
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Import):
            found.extend((function, a.name) for a in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # ``from thence.readers import hlo`` imports the module thence.readers.hlo.
            found.extend((function, f"{node.module}.{alias.name}") for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(path.read_text()), "")
    return [(f, m) for f, m in found if m.split(".")[0] == "thence" and m != "thence.__version__"]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_belongs_to_a_layer(module: Path) -> None:
    assert layer(module.with_suffix("").as_posix().replace("/", ".")) >= 0


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_go_down_only(module: Path) -> None:
    own = layer(module.with_suffix("").as_posix().replace("/", "."))
    for function, imported in imports(PACKAGE / module):
        allowed = any(
            module.as_posix() == name and function == where and imported.startswith(what)
            for name, where, what in UPWARDS
        )
        assert allowed or layer(imported) <= own, (
            f"{module} imports {imported} ({function or 'top'})"
        )


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_what_answers_questions_knows_no_file_format(module: Path) -> None:
    if module.parts[0] in ("attribution", "analysis"):
        of_reader = [m for _, m in imports(PACKAGE / module) if m.startswith("thence.readers")]
        assert not of_reader, f"{module} imports {', '.join(of_reader)}"


def test_every_exception_is_still_needed() -> None:
    for name, where, what in UPWARDS:
        assert any(f == where and m.startswith(what) for f, m in imports(PACKAGE / name))
