"""Every script in benchmarks/ and tests/gpu/ says what it is for and how it is run, without torch and jax, too."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import thence
from source_trees import import_statements, nodes

PACKAGE = Path(thence.__file__).parent
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ON_GPUS = Path(__file__).parents[1] / "gpu"
_HELPS = """
import contextlib, io, json, runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "jax", "jaxlib", "triton", "cupy"):
            raise ModuleNotFoundError(f"{name} is imported before the options are read")

sys.meta_path.insert(0, Absent())
sys.path[:0] = sys.argv[1:3]
found = {}
for script in sys.argv[3:]:
    said, sys.argv = io.StringIO(), [script, "--help"]
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(script, run_name="__main__")
        code = "it ran"
    except SystemExit as ended:
        code = ended.code
    except Exception as error:
        code = repr(error)
    found[script] = code, said.getvalue()
print(json.dumps(found))
"""
"""Runs scripts one after the other in one process: they share what takes long to import."""


def is_run(path: Path) -> bool:
    """Whether it is a script, and not a part of others."""
    guards = [node.test for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    return any("__main__" in ast.unparse(guard) for guard in guards)


def test_every_script_answers_help_without_torch_and_jax(tmp_path: Path) -> None:
    scripts = [path for folder in (BENCHMARKS, ON_GPUS) for path in sorted(folder.glob("*.py")) if is_run(path)]
    assert len(scripts) > 30
    run = subprocess.run(
        [sys.executable, "-c", _HELPS, BENCHMARKS, ON_GPUS, *scripts],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    found = json.loads(run.stdout)
    assert {path: code for path, (code, _) in found.items() if code != 0} == {}
    for path in scripts:
        text = found[str(path)][1]
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert " ".join(doc.split()) in " ".join(text.split()), path.name
        assert "-h, --help" in text
    assert list(tmp_path.iterdir()) == []


def module_file(name: str) -> Path | None:
    """The source of a module of thence."""
    path = PACKAGE.parent.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


@functools.cache
def defined_names(file: Path) -> set[str]:
    """Names that a module binds anywhere, and the modules of a package."""
    bound = {node.name for node in nodes(file) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound |= {node.id for node in nodes(file) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {(a.asname or a.name) for statement in import_statements(file) for a in statement.names}
    return bound | ({path.stem for path in file.parent.iterdir()} if file.name == "__init__.py" else set())


def test_names_that_scripts_take_from_thence_exist() -> None:
    """Scripts for GPUs run seldom, and mypy does not read them: a renamed function would be missed only there."""
    missing = []
    for script in (path for folder in (BENCHMARKS, ON_GPUS) for path in sorted(folder.glob("*.py"))):
        modules: dict[str, Path] = {}
        for statement in import_statements(script):
            names = {a.asname or a.name: a.name for a in statement.names}
            package = f"{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
            if not package.startswith("thence.") and not any(name.startswith("thence.") for name in names.values()):
                continue
            for here, name in names.items():
                file, parent = module_file(package + name), module_file(package[:-1]) if package else None
                if file is not None:
                    modules[here] = file
                elif parent is None or (parent.stem[-4:] != "_pb2" and name not in defined_names(parent)):
                    missing.append(f"{script.name}: {package}{name}")
        for node in nodes(script):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                file = modules[node.value.id]
                if node.attr not in defined_names(file):
                    missing.append(f"{script.name}: {file.stem}.{node.attr}")
    assert missing == []
