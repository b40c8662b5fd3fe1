"""``thence --version``: what a report of a defect needs, and nothing loaded for it."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import thence
from thence.doctor.versions import driver_release, installed_version, versions, why_no_stacks

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_versions_are_those_of_what_is_installed() -> None:
    found = versions()
    assert found["thence"] == thence.__version__
    assert found["polars"] == metadata.version("polars")
    assert found["python"].startswith(sys.version.split()[0])
    assert installed_version("there-is-no-such-distribution") is None


def test_the_variable_decides_about_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THENCE_PROBE", "python")
    assert versions()["probe"] == "in Python, as set by THENCE_PROBE"


def test_the_variable_decides_about_the_scanner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THENCE_SCANNER", "python")
    assert versions()["scanner"] == "in Python, as set by THENCE_SCANNER"


def test_the_variable_decides_about_the_unpickler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THENCE_UNPICKLER", "python")
    assert versions()["unpickler"] == "in Python, as set by THENCE_UNPICKLER"


def test_why_stacks_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THENCE_LINES", "events")
    assert why_no_stacks() == "the environment variable THENCE_LINES selects events"
    monkeypatch.delenv("THENCE_LINES")
    monkeypatch.setenv("THENCE_PROBE", "python")
    assert why_no_stacks() == "the compiled probe is not in use" or sys.version_info < (3, 12)


def test_the_release_of_a_driver(tmp_path: Path) -> None:
    assert driver_release(tmp_path) is None
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    )
    assert driver_release(tmp_path) == "580.95.05"


def test_versions_and_help_load_nothing_heavy() -> None:
    program = (
        "import sys\nfrom thence.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print(sorted({'polars', 'numpy', 'torch', 'jax'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program, "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
