"""`thence record -- COMMAND`: what it starts, what it leaves, what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from fake_cupti import HERE, library_path
from recorder_programs import fake_libraries
from thence.errors import UsageError
from thence.launcher.launch import claimed_directory

if TYPE_CHECKING:
    from pathlib import Path

USES_GPU = f"""
import os, sys, time, signal
sys.path.insert(0, {str(HERE)!r})
import fake_cupti
fake = fake_cupti.Fake(os.environ["THENCE_LIBCUPTI"])
import cupy
now = time.time_ns()
fake.emit(*[fake.record("CONCURRENT_KERNEL", start=now, end=now + 5, name=fake.text("k"))] * 100)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a package that stands for one that uses the GPU."""
    (tmp_path / "modules" / "cupy").mkdir(parents=True)
    (tmp_path / "modules" / "cupy" / "__init__.py").write_text("")
    return tmp_path


def environment(place: Path, **more: str) -> dict[str, str]:
    """Of the command."""
    return {
        **os.environ, **fake_libraries(), "PYTHONPATH": str(place / "modules"), **more,
    }  # fmt: skip


def record(place: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run ``thence record`` in the folder."""
    return subprocess.run(
        [sys.executable, "-m", "thence", "record", *command],
        check=False, capture_output=True, text=True, timeout=60, cwd=place, env=environment(place, **more),
    )  # fmt: skip


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_the_programs_and_one_line_says_what_there_is(
    place: Path, code: int
) -> None:
    program = USES_GPU + f"print('its own output'); sys.exit({code})"
    done = record(place, "-o", "out", "--", sys.executable, "-c", program)
    assert done.returncode == code
    assert done.stdout == "its own output\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("thence: recorded 100 kernels and 0 copies and sets of 1 process (")
    assert line.endswith("See it: thence report out")
    assert thence.open(place / "out").gpu.height == 100


def test_every_process_below_has_a_part_with_its_rank(place: Path) -> None:
    (place / "program.py").write_text(USES_GPU)
    script = f'for r in 0 1 2; do RANK=$r "{sys.executable}" program.py & done; wait'
    done = record(place, "--", "bash", "-c", script)
    assert done.returncode == 0, done.stderr
    trace = thence.open(place / "thence-recording")
    assert trace.gpu.group_by("rank").len().sort("rank").rows() == [(0, 100), (1, 100), (2, 100)]


def test_processes_that_use_no_gpu_leave_nothing_and_load_nothing(place: Path) -> None:
    program = "import sys; print(sorted({'polars', 'numpy', 'thence.recorder.session'} & set(sys.modules)))"
    done = record(place, "--", sys.executable, "-c", program)
    assert done.stdout == "[]\n"
    assert done.returncode == 2
    assert "nothing was recorded" in done.stderr
    assert not (place / "thence-recording").exists()


def test_the_programs_own_sitecustomize_runs_too(place: Path) -> None:
    (place / "modules" / "sitecustomize.py").write_text("MINE = 5")
    program = "import sitecustomize; print(sitecustomize.MINE)"
    done = record(place, "--", sys.executable, "-c", program)
    assert done.stdout == "5\n"


def test_a_directory_is_never_written_over(place: Path) -> None:
    names = ["thence-recording", "thence-recording-2", "thence-recording-3"]
    for name in names:
        done = record(place, "--", sys.executable, "-c", USES_GPU)
        assert done.stderr.endswith(f"thence report {name}\n")
    done = record(place, "-o", names[0], "--", sys.executable, "-c", "print('not run')")
    assert (done.returncode, done.stdout) == (2, "")
    assert "exists and is not an empty directory" in done.stderr


def test_where_a_recording_cannot_go(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for wanted in ("file", "file/below"):
        with pytest.raises(UsageError, match=r"cannot be written there|not an empty directory"):
            claimed_directory(str(tmp_path / wanted))


def test_a_command_that_there_is_not(place: Path) -> None:
    done = record(place, "-o", "out", "--", "no-such-command")
    assert (done.returncode, done.stderr) == (
        2,
        "thence: no-such-command: there is no such command\n",
    )
    assert not (place / "out").exists()


def test_options_of_the_command_are_its_own(place: Path) -> None:
    done = record(place, "-o", "out", "echo", "-o", "--with", "that")
    assert done.stdout == "-o --with that\n"


def test_what_cannot_be_recorded_runs_on(place: Path) -> None:
    program = USES_GPU.replace("import cupy", "fake.fail('cuptiSubscribe', 39)\nimport cupy")
    done = record(place, "--", sys.executable, "-c", program + "sys.exit(7)")
    assert done.returncode == 7
    first, second = done.stderr.splitlines()
    assert "is not recorded" in first
    assert "(error 39)" in first
    assert "nothing was recorded" in second


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_program(place: Path, number: signal.Signals) -> None:
    program = USES_GPU + (
        "def stop(n, f): sys.exit(40 + n)\n"
        "signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGINT, stop)\n"
        # Short sleeps: a signal that arrives just before a sleep begins does not end it.
        "print('ready', flush=True)\n"
        "for _ in range(300): time.sleep(0.1)"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "thence", "record", "-o", "out", "--", sys.executable, "-c", program],
        stdout=subprocess.PIPE, text=True, cwd=place, env=environment(place), start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        # A terminal sends Ctrl-C to the whole group; other signals come to the launcher alone.
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait(30) == 40 + number
    assert json.loads(next(place.glob("out/*/recording.json")).read_text())["finished"]


def test_a_program_that_is_killed(place: Path) -> None:
    program = USES_GPU + "time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)"
    done = record(place, "-o", "out", "--flush", "0.2", "--", sys.executable, "-c", program)
    assert done.returncode == 128 + signal.SIGKILL
    assert "recorded 100 kernels" in done.stderr
    assert "ended before they could finish" in done.stderr
    assert thence.open(place / "out").gpu.height == 100


def test_pytorch_is_recorded_from_the_moment_at_which_it_initialises_cuda(place: Path) -> None:
    package = place / "modules" / "torch"
    (package / "cuda").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "cuda" / "__init__.py").write_text(
        "calls = []\ndef _lazy_call(f): calls.append(f)\n"
    )
    program = USES_GPU.replace(
        "import cupy",
        "import torch.cuda\nassert not fake.library.fake_subscribed()\n"
        "for call in torch.cuda.calls: call()\nassert fake.library.fake_subscribed()",
    )
    done = record(place, "-o", "out", "--", sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert thence.open(place / "out").gpu["name"].cast(pl.String).unique().to_list() == ["k"]


def test_what_pytorch_imports_for_itself_is_no_use_of_a_gpu(place: Path) -> None:
    modules = place / "modules"
    for package in ("torch", "torch/cuda", "cuda", "cuda/bindings"):
        (modules / package).mkdir(parents=True)
        (modules / package / "__init__.py").write_text("")
    (modules / "torch" / "__init__.py").write_text("import torch.cuda\n")
    (modules / "torch" / "cuda" / "__init__.py").write_text(
        "import cuda.bindings\ndef _lazy_call(f): pass\n"
    )
    program = USES_GPU.replace("import cupy", "{}\nprint(fake.library.fake_subscribed())")
    done = record(place, "--", sys.executable, "-c", program.format("import torch"))
    assert done.stdout == "0\n"
    done = record(place, "--", sys.executable, "-c", program.format("import cuda.bindings"))
    assert done.stdout == "1\n"


def test_options_reach_the_recorder(place: Path) -> None:
    program = (
        USES_GPU
        + "print(fake.library.fake_enabled(5), fake.library.fake_enabled(12), fake.library.fake_enabled(17))"
    )
    done = record(
        place, "--with", "launches", "--with", "overhead", "--", sys.executable, "-c", program
    )
    assert done.stdout == "1 1 1\n"
    done = record(place, "--without", "nvtx", "--", sys.executable, "-c", program)
    assert done.stdout == "0 0 0\n"


def test_nvtx_is_told_of_the_same_libcupti_unless_another_is_named(place: Path) -> None:
    program = "import os, cupy; print(os.environ.get('NVTX_INJECTION64_PATH'))"
    assert record(place, "--", sys.executable, "-c", program).stdout.strip() == library_path()
    other = record(place, "--", sys.executable, "-c", program, NVTX_INJECTION64_PATH="/mine.so")
    assert other.stdout == "/mine.so\n"
    none = record(place, "--without", "nvtx", "--", sys.executable, "-c", program)
    assert none.stdout == "None\n"


def test_launches_of_jax_are_recorded_and_not_said_to_be_a_defect(place: Path) -> None:
    plugin = place / "modules" / "jax_cuda13_plugin"
    plugin.mkdir()
    (plugin / "__init__.py").write_text("")
    program = USES_GPU.replace("import cupy", "fake.fail('cuptiEnableCallback', 15)\nimport {}")
    found = {}
    for name in ("cupy", plugin.name):
        done = record(place, "-o", name, "--", sys.executable, "-c", program.format(name))
        (about,) = [
            json.loads(path.read_bytes()) for path in place.glob(f"{name}/*/recording.json")
        ]
        said = "launches cannot be counted here" in done.stderr
        found[name] = about["launches"], len(about["warnings"]), said
    assert found == {"cupy": (True, 1, True), plugin.name: (True, 0, False)}


PLANTED = (
    "import sys\n"
    "sys.stderr.write(f'executed {__name__}\\n')\n"
    "if __name__ == 'queue': MINE = 5\n"
)


def planted(place: Path, script: str) -> Path:
    """A script beside files with the names of all modules of the standard library that Python's start leaves out."""
    code = "import sys; print(*sorted(sys.modules))"
    started = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    (place / "program").mkdir()
    for name in sys.stdlib_module_names - {*started.stdout.split(), "sitecustomize", "usercustomize"}:
        (place / "program" / f"{name}.py").write_text(PLANTED)
    file = place / "program" / "script.py"
    # What the program needs for itself comes from the standard library.
    file.write_text(f"import sys\nhere = sys.path.pop(0)\n{script}")
    return file


def test_modules_beside_the_script_are_not_executed_by_the_recorder(place: Path) -> None:
    program = USES_GPU.replace("import cupy", "sys.path.insert(0, here)\nimport cupy")
    program += "import thence\nwith thence.mark('m'): time.sleep(0.3)\n"
    script = planted(place, program)
    done = record(place, "-o", "out", "--", sys.executable, str(script))
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("executed")] == []
    assert "recorded 100 kernels" in done.stderr


def test_the_program_imports_its_own_modules_although_the_recorder_has_imported_others(
    place: Path,
) -> None:
    program = USES_GPU.replace("import cupy", "sys.path.insert(0, here)\nimport cupy")
    script = planted(place, program + "import queue, secrets\nprint(queue.MINE, secrets.__file__)")
    done = record(place, "-o", "out", "--", sys.executable, str(script))
    assert done.stdout == f"5 {script.parent / 'secrets.py'}\n", done.stderr
    assert "recorded 100 kernels" in done.stderr


def test_a_module_that_the_program_imported_first_is_not_used_by_the_recorder(place: Path) -> None:
    imports = "sys.path.insert(0, here)\nimport queue\nimport cupy"
    script = planted(place, USES_GPU.replace("import cupy", imports) + "print(sys.modules['queue'].MINE)")
    done = record(place, "-o", "out", "--", sys.executable, str(script))
    assert done.stdout == "5\n", done.stderr
    assert "recorded 100 kernels" in done.stderr


def test_modules_of_pythonpath_are_not_executed_by_the_recorder(place: Path) -> None:
    (place / "program").mkdir()
    (place / "program" / "json.py").write_text(PLANTED)
    command = f'PYTHONPATH=program:$PYTHONPATH "{sys.executable}" -c "import re{{}}"'
    done = record(place, "--", "bash", "-c", command.format(""))
    assert "executed json" not in done.stderr
    done = record(place, "--", "bash", "-c", command.format(", json; print(json.__file__)"))
    assert done.stdout == f"{place / 'program' / 'json.py'}\n"
