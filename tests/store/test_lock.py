"""One ingest at a time writes a store."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from helpers import PAIR, output, written
from stores import InProcess, stored
from thence.errors import UsageError
from thence.store.ingest import locked
from thence.store.layout import LOCK

if TYPE_CHECKING:
    from pathlib import Path

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
