"""Programs with a libcupti that calls the recorder as the real one does, each in a process of its own.

A recorder takes CUPTI for the whole process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

import forking
import thence
from fake_cupti import library_path

if TYPE_CHECKING:
    from typing import Self

HERE = Path(__file__).parent
RECORDER = ("fake_cupti", "thence.capture.session")
"""What a fork that is recorded has imported."""
PREAMBLE = f"""
import os, sys, time, threading
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
import fake_cupti
fake = fake_cupti.Fake(os.environ["THENCE_LIBCUPTI"])
import thence
OUT = Path(sys.argv[1])

def kernel(name="_Z3addPfi", start=1000, end=1500, **more):
    return fake.record("CONCURRENT_KERNEL", start=start, end=end, name=fake.text(name), **more)

def launch(name, _number=None, thread=None):
    number = fake.launch()
    now = time.time_ns()
    call = fake.record("RUNTIME", start=now, end=now + 1, cbid=2, correlationId=number,
                       threadId=thread or threading.get_native_id())
    fake.emit(call, kernel(name, now, now + 5, correlationId=number, queued=now))
"""

USES_GPU = f"""
import os, sys, time, signal
sys.path.insert(0, {str(HERE)!r})
import fake_cupti
fake = fake_cupti.Fake(os.environ["THENCE_LIBCUPTI"])
import cupy
now = time.time_ns()
fake.emit(*[fake.record("CONCURRENT_KERNEL", start=now, end=now + 5, name=fake.text("k"))] * 100)
"""
"""A program that is recorded from the import of CuPy on, for which any package may stand; it launches 100 kernels."""


def fake_libraries() -> dict[str, str]:
    """Environment variables that name the fake libcupti, which is a libcudart too."""
    return {"THENCE_LIBCUPTI": library_path(), "THENCE_LIBCUDART": library_path()}


def program(
    body: str, out: Path, *, code: int = 0, env: dict[str, str] | None = None, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a program with the fake libcupti; it must end with `code`.

    Args:
        body: what follows `PREAMBLE`.
        out: OUT in the program.
        code: negative where a signal ends it.
        env: beside the variables of this process.
        fresh: Python is started for it. Else it is a fork, in which the recorder is imported already.
    """
    arguments = ["-c", PREAMBLE + textwrap.dedent(body), str(out)]
    variables = {**os.environ, **fake_libraries(), **(env or {})}
    if fresh:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, check=False, capture_output=True, timeout=60, env=variables)
    else:
        done = forking.run(arguments, timeout=60, env=variables, imported=RECORDER)
    said = subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
    assert said.returncode == code, said.stderr
    return said


_COPYING = """
import faulthandler, json, os, sys
{imports}
while line := sys.stdin.readline():
    program = json.loads(line)
    child = os.fork()
    if child == 0:  # goes on as the program, and ends as Python ends
        said = os.open(program["stderr"], os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        faulthandler.dump_traceback_later(120, exit=True)  # with the stacks of its threads
        sys.argv = ["-c", program["out"]]
        exec(compile(program["source"], "<string>", "exec"), globals())
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Copies:
    """Programs as those of `program`, each a copy of one process that has imported what takes long.

    Args:
        imports: what is imported before thence and the fake libcupti are.
        folder: for what programs write to stderr.
    """

    def __init__(self, imports: str, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COPYING.format(imports=imports)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **fake_libraries()},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def program(self, body: str, out: Path) -> str:
        """Run a program, which must end with 0; what it wrote to stdout and stderr."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._count += 1
        said = self._folder / f"stderr{self._count}"
        source = PREAMBLE + textwrap.dedent(body)
        task = {"source": source, "out": str(out), "stderr": str(said)}
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        code = self._process.stdout.readline()
        text = said.read_text() if said.exists() else ""
        assert code == "0\n", text
        return text


def only_folder(directory: Path) -> Path:
    """The one process's folder."""
    (folder,) = [path for path in directory.iterdir() if path.is_dir()]
    return folder


def description(directory: Path) -> dict[str, Any]:
    """recording.json of the one process."""
    found: dict[str, Any] = json.loads((only_folder(directory) / "recording.json").read_text())
    return found


def rows(directory: Path) -> pl.DataFrame:
    """Activities of a recording with text columns."""
    return thence.open(directory).activities.with_columns(pl.col("name", "label", "phase").cast(pl.String))
