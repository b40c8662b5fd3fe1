"""THENCE_RECORD: programs that record themselves because ``thence.pth`` is installed, without ``thence record``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import thence
from recorder_programs import USES_GPU, fake_libraries
from thence.capture.launcher.first_use import why_unseen

THREADS_AND_MODULES = (
    "import sys, threading; print(threading.active_count(), *sorted(m for m in sys.modules if 'thence' in m))"
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a package that stands for one that uses the GPU."""
    (tmp_path / "modules" / "cupy").mkdir(parents=True)
    (tmp_path / "modules" / "cupy" / "__init__.py").write_text("")
    return tmp_path


def run(place: Path, record: str | None, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the variable, None for without; the programs see the stand-in for CuPy on ``sys.path``."""
    given = {name: value for name, value in os.environ.items() if name != "THENCE_RECORD"}
    given |= {**fake_libraries(), "PYTHONPATH": str(place / "modules")}
    if record is not None:
        given["THENCE_RECORD"] = record
    arguments = [sys.executable, *command]
    return subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=60, cwd=place, env=given)


def kernels(directory: Path) -> list[int]:
    """Kernels of each process."""
    paths = sorted(path.parent for path in directory.glob("*/recording.json"))
    return [thence.open(path).tables.gpu.height for path in paths]


def test_without_the_variable_nothing_of_thence_is_imported(place: Path) -> None:
    assert run(place, None, "-c", THREADS_AND_MODULES).stdout == "1\n"
    assert run(place, "", "-c", THREADS_AND_MODULES).stdout == "1\n"
    said = run(place, "out", "-c", THREADS_AND_MODULES)
    assert said.stdout.startswith("1 _thence_startup thence thence.capture")
    assert not (place / "out").exists()


def test_the_variable_records_children_in_other_folders_to_the_same_directory(place: Path) -> None:
    (place / "other").mkdir()
    (place / "worker.py").write_text(
        USES_GPU.replace("import cupy", f"sys.path.insert(0, {str(place / 'modules')!r})\nimport cupy")
    )
    program = USES_GPU + (
        "import multiprocessing, subprocess\n"
        "subprocess.run([sys.executable, '-I', '../worker.py'], cwd='other', check=True)\n"
    )
    done = run(place, "run/", "-c", program)
    assert (done.returncode, done.stderr) == (0, "")
    assert kernels(place / "run") == [100, 100]
    assert not list(place.glob("run/.*"))


def test_workers_that_are_spawned_and_forks_are_recorded(place: Path) -> None:
    file = place / "program.py"
    work = "\n    ".join(USES_GPU.strip().splitlines())
    file.write_text(
        f"import multiprocessing, sys\ndef work():\n    {work}\nif __name__ == '__main__':\n"
        "    for kind in ('spawn', 'fork'):\n"
        "        process = multiprocessing.get_context(kind).Process(target=work)\n"
        "        process.start(); process.join(); print(process.exitcode)\n"
    )
    done = run(place, "run", str(file))
    assert (done.stdout, done.stderr) == ("0\n0\n", "")
    assert kernels(place / "run") == [100, 100]


def test_json_states_options_by_the_names_of_their_attributes(place: Path) -> None:
    settings = {"directory": "run", "options": {"nvtx": False, "sampling": {"every": 100}}}
    program = USES_GPU + "print(fake.library.fake_enabled(12), os.environ['THENCE_RECORD'])"
    done = run(place, json.dumps(settings), "-c", program)
    enabled, _, told = done.stdout.partition(" ")
    assert (enabled, json.loads(told)) == ("0", {**settings, "directory": str(place / "run")})
    (description,) = place.glob("run/*/recording.json")
    assert json.loads(description.read_text())["sampling"]["every"] == 100


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{", "THENCE_RECORD is not JSON"),
        ('{"folder": "run"}', "state a directory, or"),
        ('{"directory": "run", "options": {"steps": 3}}', "there is no option 'steps'; there are launches, "),
        ('{"directory": "run", "options": {"own": "a"}}', "the option 'own' is a list of texts, not 'a'"),
        ('{"directory": "run", "options": {"sampling": {"every": 2}}}', "every is at least twice"),
        ("modules/cupy/__init__.py", "a recording cannot be written there"),
    ],
)
def test_what_the_variable_cannot_mean_is_said_and_the_program_runs(place: Path, value: str, said: str) -> None:
    done = run(place, value, "-c", USES_GPU + "sys.exit(7)")
    assert done.returncode == 7
    (line,) = done.stderr.splitlines()
    assert "is not recorded: " in line
    assert said in line


def test_with_the_launcher_too_a_process_is_recorded_once(place: Path) -> None:
    done = run(place, "other", "-m", "thence", "record", "-o", "run", "--", sys.executable, "-c", USES_GPU)
    assert "recorded 100 kernels" in done.stderr
    assert done.stderr.count("\n") == 1
    assert kernels(place / "run") == [100]
    assert not (place / "other").exists()


def test_pythons_with_the_file_need_no_pythonpath() -> None:
    environment = {"PATH": str(Path(sys.executable).parent), "THENCE_RECORD": "run"}
    assert why_unseen([Path(sys.executable).name, "-I", "x.py"], environment) is None
    assert why_unseen([sys.executable, "x.py"], environment) is None
    assert "THENCE_RECORD" in str(why_unseen([sys.executable, "x.py"], {}))
    assert "sitecustomize" in str(why_unseen([sys.executable, "-S", "x.py"], environment))
    assert "PYTHONPATH" in str(why_unseen(["/another/python3", "x.py"], environment))
