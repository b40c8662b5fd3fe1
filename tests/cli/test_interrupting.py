"""Ctrl-C on a terminal: one line, exit code 130, and nothing left, whatever child processes are doing."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from helpers import STACK, TORCH
from stores import stored
from thence.errors import InputError
from thence.store.store import open_store
from thence.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

READING = """
import os, sys
from thence.cli import main
from thence.readers.kineto import decoding, processes

class Workers(decoding._InProcesses):
    def __init__(self, path, processes):
        super().__init__(path, processes)
        pid = processes.first.pid
        where = "reached by Ctrl-C" if os.getpgid(pid) == os.getpgrp() else "apart"
        print("started", pid, where, file=sys.stderr, flush=True)

decoding._InProcesses = Workers
os.environ["THENCE_SCANNER"] = "python"
decoding.BYTES_BEFORE_PROCESSES = 0
processes.PIECE_BYTES = 1000
processes._usable_cores = lambda: 2
main(sys.argv[1:])
"""
ANSWERING = """
import sys, subprocess
from thence.cli import bounded_query, main

class Child(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        print("started", self.pid, file=sys.stderr, flush=True)

subprocess.Popen = Child
main(sys.argv[1:])
"""
INGESTING = """
import sys
from stores import wait_while_writing
from thence.cli import main
from thence.store import ingest
ingest.ingest_one = wait_while_writing
main(sys.argv[1:])
"""
RANKS = [TORCH / "waits" / f"group_rank{rank}.json.gz" for rank in (0, 1)]
PATIENCE = 60
"""Seconds in which something is written, and in which a process ends."""
FOR_EVER = "select count(*) from gpu a cross join host b cross join host c"


def ended(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> int:
    """Its exit code; a process that goes on and on is killed, with its children."""
    try:
        return process.wait(PATIENCE)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)


def interrupted(code: str, arguments: list[str], folder: Path, processes: int) -> tuple[int, str, list[int]]:
    """Types Ctrl-C as soon as so many children have started: exit code, what the terminal showed, the children."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n{code}", *arguments],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    content, typed = b"", False
    try:
        while select.select([ours], [], [], PATIENCE)[0] and (part := os.read(ours, 1 << 16)):
            content += part
            # Progress may be written behind the line that is waited for, before it is read here.
            if not typed and len(re.findall(rb"started \d+.*\n", content)) == processes:
                os.write(ours, b"\x03")
                typed = True
    except OSError:  # how Linux says that the other side is closed
        pass
    finally:
        os.close(ours)
        returned = ended(process)
    text = content.decode("utf-8", "replace")
    children = sorted({int(number) for number in re.findall(r"started (\d+)", text)})
    return returned, text, children


def gone(child: int) -> bool:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("code", "arguments", "processes"),
    [
        (READING, ["report", str(STACK)], 1),  # while it imports NumPy
        (ANSWERING, ["sql", str(STACK), FOR_EVER], 1),
    ],
    ids=["reading", "answering"],
)
def test_ctrl_c(code: str, arguments: list[str], processes: int, tmp_path: Path) -> None:
    returned, text, children = interrupted(code, arguments, tmp_path, processes)
    assert text.endswith("thence: interrupted\r\n")
    assert "Traceback" not in text
    assert "reached by Ctrl-C" not in text, "a child that still loads its modules would print a traceback"
    assert returned == 130
    assert len(children) == processes
    assert all(map(gone, children))
    assert list(tmp_path.iterdir()) == []


def signalled(code: str, arguments: list[str], number: int) -> tuple[int, str, list[int]]:
    """As `interrupted`, of a process without a terminal that gets a signal as soon as its first child has started."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    with process.stderr as told:
        text = ""
        while "started" not in text and (line := told.readline()):  # on a slow machine, progress is told before
            text += line
        process.send_signal(number)
        returned = ended(process)
        (child,) = re.findall(r"started (\d+)", text)
        try:
            assert gone(int(child))
        except AssertionError:
            os.kill(int(child), signal.SIGKILL)
            raise
        return returned, text + told.read(), [int(child)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_ingest_leaves_no_process_and_goes_on(number: int, tmp_path: Path) -> None:
    store = tmp_path / "a.store"
    arguments = ["ingest", *map(str, RANKS), "-o", str(store), "--workers", "1"]
    if number == signal.SIGINT:
        returned, text, children = interrupted(INGESTING, arguments, tmp_path, 1)
        assert returned == 130
        assert text.endswith("thence: interrupted\r\n")
    else:
        returned, text, children = signalled(INGESTING, arguments, number)
        # SIGTERM ends it by an exception, so that nothing of its pool is left; its exit code is that of a shell.
        assert returned == (128 + number if number == signal.SIGTERM else -number)
    assert "Traceback" not in text
    assert all(map(gone, children))
    # Rank 0 is whole; what was half written has no name, and nobody takes the store for a whole one.
    names = sorted(path.name for path in (store / "ranks").iterdir())
    assert [name[:10] for name in names] == [".rank-0000", "rank-00000"]
    with pytest.raises(InputError, match="run the same thence ingest again to resume it"):
        open_store(store)
    done = stored(store, RANKS, thence=__version__)
    assert (done.written, done.kept) == (1, 1)
    assert len(list((store / "ranks").iterdir())) == 2
