"""Tables that abort their reader are found in a child process, wherever packages are and however memory is limited."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

SOURCES = Path(__file__).parents[2] / "src"
PACKAGES = Path(pl.__file__).parents[1]
PROGRAM = """
import sys
from pathlib import Path
from thence.errors import DamagedInput
from thence.readers.parquet_probe import probing
with probing([Path(sys.argv[1])], "input") as probe:
    try:
        probe.passed()
        print("passed")
    except DamagedInput as error:
        print(error)
"""


def aborting(folder: Path) -> Path:
    """An Arrow stream whose buffer of texts claims 2^60 bytes (Buffer.length in Message.fbs): Polars allocates them."""
    path = folder / "table.arrow"
    pl.DataFrame({"a": [letter * 1111 for letter in "xyz"]}).write_ipc_stream(path)
    content = path.read_bytes()
    length = (3 * 1111).to_bytes(8, "little")
    assert content.count(length) == 1
    path.write_bytes(content.replace(length, (1 << 60).to_bytes(8, "little")))
    return path


def result(python: str, path: Path, limit: int | None = None) -> str:
    """What the program prints that reads a table; its packages are found by PYTHONPATH alone."""

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    done = subprocess.run(
        [python, "-c", PROGRAM, str(path)],
        env={"PYTHONPATH": f"{SOURCES}:{PACKAGES}", "POLARS_MAX_THREADS": "2"},
        cwd=path.parent,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=limited,
    )
    return done.stdout.strip()


def without_packages() -> str:
    """The interpreter that made this environment, which has no packages of its own."""
    python: str = sys._base_executable  # type: ignore[attr-defined]
    if subprocess.run([python, "-I", "-c", "import polars"], check=False, capture_output=True).returncode == 0:
        pytest.skip("the base interpreter has Polars installed: no environment was made for the tests")
    return python


def test_packages_that_only_pythonpath_names(tmp_path: Path) -> None:
    path = aborting(tmp_path)
    assert "crashes the process that reads it" in result(without_packages(), path)


def test_a_module_of_the_current_directory_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "polars.py").write_text("import os; os._exit(9)")
    path = tmp_path / "table.arrow"
    pl.DataFrame({"a": range(1000)}).write_ipc_stream(path)
    assert result(sys.executable, path) == "passed"


@pytest.mark.parametrize("limit", [3 << 30, 6 << 30])
def test_memory_that_is_limited_for_good(tmp_path: Path, limit: int) -> None:
    path = aborting(tmp_path)
    assert "crashes the process that reads it" in result(sys.executable, path, limit)
    pl.DataFrame({"a": range(1000)}).write_ipc_stream(path)
    assert result(sys.executable, path, limit) == "passed"
