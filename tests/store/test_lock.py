"""One ingest at a time writes a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forking
import stores
import thence
from helpers import PAIR, output, written
from stores import InProcess, stored
from thence.errors import UsageError
from thence.store.ingest import locked
from thence.store.layout import LOCK

HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write('{"process": 4711, "host": "node-7\\\\u001b[31m"}')
file.flush()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return written(tmp_path / "rank0.json", PAIR, distributedInfo={"rank": 0})


def test_a_store_that_another_process_writes_is_refused_and_not_touched(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "s"
    stored(store, [trace])
    unfinished = store / "ranks" / ".rank-00001-aaaaaaaaaaaa.1234"
    unfinished.mkdir()  # of the one that writes
    command = [sys.executable, "-c", HOLDS, str(store / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        _, told = output(capsys, "ingest", trace, "-o", store, "--workers", "1", code=2)
        assert "is being written by another thence ingest (process 4711 on node-731m)" in told
        assert unfinished.is_dir()
        other.kill()  # a lock goes with its process
    assert stored(store, [trace]).kept == 1
    assert not unfinished.exists()


def test_the_lock_of_a_store_is_empty_when_nobody_writes(trace: Path, tmp_path: Path) -> None:
    store = tmp_path / "s"
    stored(store, [trace])
    assert (store / LOCK).read_bytes() == b""
    with locked(store):
        assert str(os.getpid()).encode() in (store / LOCK).read_bytes()
        with pytest.raises(UsageError, match=f"process {os.getpid()} on"):
            stored(store, [trace], InProcess())
    assert (store / LOCK).read_bytes() == b""


def test_no_lock_is_left_in_a_folder_that_is_no_store(trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "ranks_of_others"
    (other / "ranks").mkdir(parents=True)
    (other / "ranks" / ".hidden").mkdir()
    with pytest.raises(UsageError, match="holds other files"):
        stored(other, [trace])
    assert [path.name for path in other.rglob("*")] == ["ranks", ".hidden"]


def test_a_link_is_no_lock(trace: Path, tmp_path: Path) -> None:
    store, precious = tmp_path / "s", tmp_path / "precious.txt"
    precious.write_text("precious")
    store.mkdir()
    (store / LOCK).symlink_to(precious)
    with pytest.raises(UsageError, match="cannot be written to"):
        stored(store, [trace])
    assert precious.read_text() == "precious"


PROCESSES = """
import os, sys
store, out, trace, support = sys.argv[1:]
sys.path.append(support)
from stores import InProcess
from thence.cli import main
from thence.store import workers
workers.LocalWorkers = lambda _processes: InProcess()  # no further processes
def run(number):
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{out}/{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
    writing = ["ingest", trace, "-o", store, "--workers", "1"]
    main(writing if number % 2 else ["report", "--by", "rank", "--format", "json", store])
children = []
for number in range(8):
    children.append(os.fork())
    if children[-1] == 0:
        run(number)
print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_eight_processes_on_one_store_get_a_right_answer_or_a_sentence(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four of them write it, because its source looks changed, and four read it meanwhile."""
    store, out = tmp_path / "s", tmp_path / "out"
    stored(store, [trace])
    out.mkdir()
    os.utime(trace, ns=(10**18, 10**18))
    arguments = ["-c", PROCESSES, str(store), str(out), str(trace), str(Path(stores.__file__).parent)]
    done = forking.run(arguments, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    codes = [int(code) for code in done.stdout.split()]
    answers = [(out / f"{number}.out").read_text() for number in range(8)]
    errors = [(out / f"{number}.err").read_text() for number in range(8)]
    refused = [errors[number] for number in range(8) if codes[number] != 0]
    assert all("another thence ingest" in text or "written to while it was read" in text for text in refused)
    assert all(text.count("\n") == 1 for text in refused)
    assert set(codes) <= {0, 2}
    assert 0 in codes[1::2]
    # On a slow machine, writers may refuse all who read meanwhile.
    rows = json.loads(output(capsys, "report", "--by", "rank", "--format", "json", store)[0])["rows"]
    assert [row["total_ns"] for row in rows] == [5125 + 5000]
    assert all(json.loads(answers[i])["rows"] == rows for i in range(0, 8, 2) if codes[i] == 0)
    assert [path.name for path in (store / "ranks").iterdir() if path.name.startswith(".")] == []
    assert thence.open(store).tables.gpu.height == 2
