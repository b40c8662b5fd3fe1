"""`thence record -- COMMAND`: what it starts, what it leaves, what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

import forking
import thence
from fake_cupti import library_path
from recorder_programs import USES_GPU, fake_libraries
from thence.capture.launcher.first_use import why_unseen
from thence.capture.launcher.launch import claimed_directory
from thence.errors import UsageError


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
    """Run ``thence record`` in the folder: a fork, which starts the command as a process of its own does."""
    arguments, variables = ["-m", "thence", "record", *command], environment(place, **more)
    done = forking.run(arguments, timeout=60, cwd=place, env=variables, imported=forking.LAUNCHER)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_the_programs_and_one_line_says_what_there_is(place: Path, code: int) -> None:
    program = USES_GPU + f"print('its own output'); sys.exit({code})"
    done = record(place, "-o", "out", "--", sys.executable, "-c", program)
    assert done.returncode == code
    assert done.stdout == "its own output\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("thence: recorded 100 kernels and 0 memcpys and memsets of 1 process (")
    assert line.endswith("See it: thence report out")
    assert thence.open(place / "out").tables.gpu.height == 100


def test_every_process_below_has_a_part_with_its_rank(place: Path) -> None:
    (place / "program.py").write_text(USES_GPU)
    script = f'for r in 0 1 2; do RANK=$r "{sys.executable}" program.py & done; wait'
    done = record(place, "--", "bash", "-c", script)
    assert done.returncode == 0, done.stderr
    trace = thence.open(place / "thence-recording")
    assert trace.tables.gpu.group_by("rank").len().sort("rank").rows() == [(0, 100), (1, 100), (2, 100)]


def test_processes_that_use_no_gpu_leave_nothing_and_load_nothing(place: Path) -> None:
    program = "import sys; print(sorted({'polars', 'numpy', 'thence.capture.recorder.recorder'} & set(sys.modules)))"
    done = record(place, "--", sys.executable, "-c", program)
    assert done.stdout == "[]\n"
    assert done.returncode == 0
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
    assert (done.returncode, done.stderr) == (2, "thence: no-such-command: there is no such command\n")
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
    assert thence.open(place / "out").tables.gpu.height == 100


def test_pytorch_is_recorded_from_the_moment_at_which_it_initialises_cuda(place: Path) -> None:
    package = place / "modules" / "torch"
    (package / "cuda").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "cuda" / "__init__.py").write_text("calls = []\ndef _lazy_call(f): calls.append(f)\n")
    program = USES_GPU.replace(
        "import cupy",
        "import torch.cuda\nassert not fake.library.fake_subscribed()\n"
        "for call in torch.cuda.calls: call()\nassert fake.library.fake_subscribed()",
    )
    done = record(place, "-o", "out", "--", sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert thence.open(place / "out").tables.gpu["name"].cast(pl.String).unique().to_list() == ["k"]


def test_what_pytorch_imports_for_itself_is_no_use_of_a_gpu(place: Path) -> None:
    modules = place / "modules"
    for package in ("torch", "torch/cuda", "cuda", "cuda/bindings"):
        (modules / package).mkdir(parents=True)
        (modules / package / "__init__.py").write_text("")
    (modules / "torch" / "__init__.py").write_text("import torch.cuda\n")
    (modules / "torch" / "cuda" / "__init__.py").write_text("import cuda.bindings\ndef _lazy_call(f): pass\n")
    program = USES_GPU.replace("import cupy", "{}\nprint(fake.library.fake_subscribed())")
    done = record(place, "--", sys.executable, "-c", program.format("import torch"))
    assert done.stdout == "0\n"
    done = record(place, "--", sys.executable, "-c", program.format("import cuda.bindings"))
    assert done.stdout == "1\n"


def test_options_reach_the_recorder(place: Path) -> None:
    program = (
        USES_GPU + "print(fake.library.fake_enabled(5), fake.library.fake_enabled(12), fake.library.fake_enabled(17))"
    )
    done = record(place, "--with", "launches", "--with", "overhead", "--", sys.executable, "-c", program)
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
        (about,) = [json.loads(path.read_bytes()) for path in place.glob(f"{name}/*/recording.json")]
        said = "launches cannot be counted here" in done.stderr
        found[name] = about["launches"], len(about["warnings"]), said
    assert found == {"cupy": (True, 1, True), plugin.name: (True, 0, False)}


PLANTED = "import sys\nsys.stderr.write(f'executed {__name__}\\n')\nif __name__ == 'queue': MINE = 5\n"


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


def test_the_program_imports_its_own_modules_although_the_recorder_has_imported_others(place: Path) -> None:
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


ENDINGS = {
    **{f"sys.exit({code})": code for code in (2, 127, 255)},
    **{f"os._exit({code})": code for code in (0, 77)},
    "raise SystemExit": 0,
    "raise KeyError(1)": 1,
    "raise KeyboardInterrupt": 128 + signal.SIGINT,
    "os.abort()": 128 + signal.SIGABRT,
    **{f"os.kill(os.getpid(), {n:d}); time.sleep(9)": 128 + n for n in (signal.SIGTERM, signal.SIGKILL)},
    "signal.signal(signal.SIGHUP, signal.SIG_DFL); os.kill(os.getpid(), 1); time.sleep(9)": 128
    + signal.SIGHUP,  # nohup leaves it ignored
    "signal.raise_signal(signal.SIGTERM); time.sleep(9)": 128 + signal.SIGTERM,
    "import threading; threading.Thread(target=os._exit, args=(5,)).start(); time.sleep(9)": 5,
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(6)); os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)": 6,
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(os.getpid(), signal.SIGTERM)": 0,
    "import atexit; atexit.register(os._exit, 8)": 8,
    "os.execv('/bin/false', ['false'])": 1,
    "os.execvp('sh', ['sh', '-c', 'exit 9'])": 9,
    "os.execl('/bin/sh', 'sh', '-c', 'kill -9 $$')": 128 + signal.SIGKILL,
    "os.execvpe('sh', ['sh', '-c', 'exit $CODE'], {'CODE': '4', 'PATH': os.environ['PATH']})": 4,
    "os.execv('/no/such/file', ['file'])": 1,
    "p = os.fork(); os._exit(4) if p == 0 else sys.exit(os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]))": 4,
    "p = os.fork(); sys.exit(5) if p == 0 else sys.exit(os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]))": 5,
    "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))": 0,
    "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); sys.exit(3)": 3,
    "os.closerange(3, 100)": 0,
    "os.chdir('/')": 0,
    "os.environ.clear()": 0,
}  # fmt: skip
LOSSES = {
    "os.abort()": "ended before",
    "os.kill(os.getpid(), 9)": "ended before",
    "os.kill(os.getpid(), 1)": "ended before",
    "RLIMIT_FSIZE": "File too large (the limit of file sizes, ulimit -f)",
}
"""Parts of endings after which not everything is recorded, and what is said then."""


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_ending_has_the_programs_exit_code_and_keeps_what_was_recorded(place: Path, ending: str) -> None:
    program = USES_GPU + "sys.stdout.flush()\n" + ending
    done = record(place, "-o", "out", "--", sys.executable, "-c", program)
    assert done.returncode == ENDINGS[ending], done.stderr
    lost = next((said for part, said in LOSSES.items() if part in ending), None)
    if lost is None:
        assert "recorded 100 kernels" in done.stderr
        assert "ended before" not in done.stderr
    else:
        assert lost in done.stderr or "before the first records" in done.stderr


@pytest.mark.parametrize(("ending", "code"), [("", 0), ("os.kill(os.getpid(), 9)", 137)])
def test_a_recording_whose_folder_the_program_removes_does_not_change_the_exit_code(
    place: Path, ending: str, code: int
) -> None:
    removal = "import shutil, json; shutil.rmtree(json.loads(os.environ['THENCE_RECORD'])['directory'])\n"
    done = record(place, "-o", "out", "--", sys.executable, "-c", USES_GPU + removal + ending)
    assert done.returncode == code, done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change its user")
def test_a_program_that_changes_its_user_keeps_its_exit_code(place: Path) -> None:
    done = record(place, "-o", "out", "--", sys.executable, "-c", USES_GPU + "os.setuid(65534)")
    assert done.returncode == 0
    assert "nothing was recorded: 1 process" in done.stderr
    assert "Permission denied (to the user as whom the process runs now)" in done.stderr


def test_standard_error_that_cannot_be_written_does_not_change_the_exit_code(place: Path) -> None:
    command = [sys.executable, "-m", "thence", "record", "--", sys.executable, "-c", "print(1)"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, stderr=full, timeout=60, cwd=place,
            env=environment(place),
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, b"1\n")


@pytest.mark.parametrize(("ending", "code"), [("", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 128 + 9)])
def test_strict_fails_only_where_the_command_succeeds(place: Path, ending: str, code: int) -> None:
    used = record(place, "--strict", "--", sys.executable, "-c", USES_GPU + ending)
    assert used.returncode == code
    unused = record(place, "--strict", "--", sys.executable, "-c", "import os, sys\n" + ending)
    assert unused.returncode == (code or 2)


@pytest.mark.parametrize(("option", "recorded"), [("-S", False), ("-XdevE -BS", False), ("-XdevE -I", True)])
def test_python_that_ignores_what_reaches_it_is_said_not_to_be_recorded(
    place: Path, option: str, recorded: bool
) -> None:
    program = f"import sys\nsys.path += [{str(place / 'modules')!r}, *{sys.path!r}]\n{USES_GPU}print('ran')"
    done = record(place, "--", sys.executable, *option.split(), "-c", program)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert ("a Python process did not record itself: python -S ignores" in done.stderr) == (not recorded)
    assert ("recorded 100 kernels" in done.stderr) == recorded


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("[sys.executable, '-c', ''], env={}", "lacks the THENCE_RECORD"),
        ("[sys.executable, '-I', '-c', '']", None),
        ("[sys.executable, '-S', '-c', '']", "python -S ignores"),
        ("[sys.executable, '-c', '']", None),
        ("[sys.executable, '-c', ''], env={**os.environ, 'A': 'b'}", None),
        ("['true'], env={}", None),
        ("'exit 0', shell=True", None),
    ],
)
def test_children_that_do_not_record_themselves_are_told_of(place: Path, arguments: str, said: str | None) -> None:
    program = USES_GPU + f"import subprocess; subprocess.run({arguments}, check=True)"
    done = record(place, "-o", "out", "--", sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert "recorded 100 kernels" in done.stderr
    assert ("did not record itself" in done.stderr) == (said is not None)
    assert said is None or said in done.stderr


@pytest.mark.parametrize(
    ("command", "letter"),
    [
        ("python -I x.py", "I"),
        ("python3.12 -u -sE -m pkg", "E"),
        ("/usr/bin/python3 -W ignore -S x.py", "S"),
        ("python -Wignore -X dev -Bc code -I", None),
        ("python -m torch.distributed.run -I", None),
        ("python x.py -I", None),
        ("python - -I", None),
        ("torchrun -I", None),
        ("python --check-hash-based-pycs always -I x.py", "I"),
    ],
)
def test_options_after_which_python_does_not_record_itself(command: str, letter: str | None) -> None:
    startup = f"{Path(thence.__file__).parent}/capture/launcher/startup"
    reason = why_unseen(command.split(), {"PYTHONPATH": startup, "THENCE_RECORD": "{}"})
    assert (reason is None) if letter is None else f"python -{letter} ignores" in str(reason)
