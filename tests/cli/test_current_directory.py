"""A folder of traces from someone else may hold json.py or polars.py: no verb runs it, in no process that it starts."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import thence
from helpers import FSDP, recording, unzipped

PLANTED = 'with open({marker!r}, "a") as stream: stream.write(__name__ + " ")\nraise SystemExit(9)\n'
COMMANDS = """
import sys
from pathlib import Path
from thence.cli import main
from thence.readers.kineto import decoding, processes
decoding.BYTES_BEFORE_PROCESSES = 0
processes._usable_cores = lambda: 2
def run(*arguments):
    try:
        main(list(arguments))
    except SystemExit as end:
        if end.code:
            sys.exit(f"{arguments}: {end.code}")
run("report", "large.json")
run("sql", "rank0.json.gz", "select count(*) from gpu")
run("ingest", "rank0.json.gz", "rank1.json.gz", "-o", "job.store")
# A store is read by a child process only if it is not known in the cache, where the ingest noted it.
for file in Path("job.store").rglob("*.parquet"):
    file.touch()
run("report", "job.store")
"""
"""Verbs that start processes: to decode a large file, to answer a query, to read ranks, and to try Parquet files."""
SOURCES = Path(thence.__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two ranks, and with a file named as each module of Python and of the installed libraries."""
    path = tmp_path_factory.mktemp("theirs")
    for number, source in enumerate(FSDP[:2]):
        shutil.copy(source, path / f"rank{number}.json.gz")
    (path / "large.json").write_bytes(unzipped(recording("torch_eager_rank0")))
    text = PLANTED.format(marker=str(path / "ran"))
    modules = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions(), "thence"}
    for name in modules:
        if name.isidentifier():
            (path / f"{name}.py").write_text(text)
    return path


def finished(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as it is run in a folder; its script puts the script's folder into ``sys.path``, as ``-P`` does not.

    It fails if a module of the folder was imported.
    """
    done = subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    ran = folder / "ran"
    assert not ran.exists(), f"ran {ran.read_text()}"
    return done


def test_modules_planted_are_what_python_would_import_there(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", "import json"], cwd=folder, check=False)
    ran = folder / "ran"
    assert ran.exists()  # json itself, or what this Python imports for -c: linecache in 3.14
    ran.unlink()


def test_verbs_that_start_processes(folder: Path) -> None:
    done = finished(folder, "-c", COMMANDS)
    assert done.returncode == 0, done.stderr


def test_doctor(folder: Path) -> None:
    done = finished(folder, "-m", "thence", "doctor")
    assert re.search(r"^(yes|no) +driver", done.stdout, re.MULTILINE), done.stdout
