"""Every script in benchmarks/ and tests/gpu/ says what it is for and how it is run, without torch and jax, too."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

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
    assert len(scripts) > 35
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
