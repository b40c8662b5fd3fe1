"""Imports go one way: what is below knows nothing of what is above, and nothing goes in a circle."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import thence
from source_trees import import_statements

PACKAGE = Path(thence.__file__).parent

# From the bottom to the top; a module imports from its own layer and from those below.
LAYERS = (
    {
        "atomic_files",
        "child_python",
        "credentials",
        "errors",
        "importing",
        "memory_limits",
        "parallel",
        "parquet_files",
        "units",
        "version",
    },
    {"capture.__init__", "capture.cuda", "model"},
    {"capture.boundaries", "capture.recorder", "readers"},
    {"capture.marks"},
    {"attribution", "capture.jax", "capture.torch", "inside"},
    {"analysis", "inside.launch_matching", "inside.summary", "inside.timeline"},
    {"writers"},
    {"inside.profile", "trace"},
    {"store"},
    {"folding", "opening"},
    {"timing"},
    {"capture.session"},
    {"capture.launcher", "watch"},
    {"doctor"},
    # The packages that users import give names of all layers, and nothing below imports them.
    {"cli", "__init__", "__main__", "inside.__init__", "integrations", "jax", "torch"},
)

MODULES = {
    ".".join(("thence", *path.relative_to(PACKAGE).with_suffix("").parts)): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def layer(module: str) -> int:
    """Height of the layer that a module belongs to."""
    parts = module.split(".")[1:]
    for name in (".".join(parts), ".".join(parts[:2]), parts[0]):
        for height, names in enumerate(LAYERS):
            if name in names:
                return height
    return -1


def target(name: str) -> str | None:
    """The module that a dotted name is, or that the name is taken from; None outside of thence."""
    if name.split(".", maxsplit=1)[0] != "thence":
        return None
    while name:
        for module in (name, f"{name}.__init__"):
            if module in MODULES:
                return module
        name = name.rpartition(".")[0]
    raise AssertionError(name)


def imports(path: Path) -> set[str]:
    """Modules of thence that a file imports anywhere: for types only and in functions, too."""
    names = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # ``from thence.readers import hlo`` imports the module thence.readers.hlo.
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {module for module in map(target, names) if module is not None}


@functools.cache
def graph_of_imports() -> dict[str, set[str]]:
    return {module: imports(path) for module, path in MODULES.items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node, and nodes with an edge to themselves.

    Tarjan's algorithm.
    """
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        path.append(node)
        for other in sorted(graph[node]):
            if other not in number:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in path:
                lowest[node] = min(lowest[node], number[other])
        if lowest[node] == number[node]:
            at = path.index(node)
            component = path[at:]
            del path[at:]
            if len(component) > 1 or node in graph[node]:
                found.append(sorted(component))

    for node in graph:
        if node not in number:
            visit(node)
    return found


def test_what_answers_questions_knows_no_file_format() -> None:
    known = [
        (module, other)
        for module, others in graph_of_imports().items()
        if module.startswith(("thence.attribution", "thence.analysis"))
        for other in others
        if other.startswith("thence.readers")
    ]
    assert known == []


def test_a_module_belongs_to_a_layer() -> None:
    assert [module for module in MODULES if layer(module) < 0] == []


def test_imports_go_down_only() -> None:
    upwards = [
        (module, other)
        for module, others in graph_of_imports().items()
        for other in others
        if layer(other) > layer(module)
    ]
    assert upwards == []


def test_nothing_is_imported_in_a_circle() -> None:
    assert circles(graph_of_imports()) == []


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set(), "f": {"f"}}
    assert circles(graph) == [["a", "b", "c"], ["f"]]
    graph["c"] = {"d"}
    assert circles(graph) == [["f"]]


def test_names_are_of_the_module_that_has_them() -> None:
    assert target("thence.open") == "thence.__init__"
    assert target("thence.inside.open") == "thence.inside.__init__"
    assert target("thence.inside.files.load") == "thence.inside.files"
    assert target("thence.readers.label_files") == "thence.readers.label_files"
    assert target("numpy.ndarray") is None
