"""Decoding processes: how many there are, what becomes of them, and what is said when one is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import deque
from itertools import islice, repeat
from pathlib import Path

import pytest

from thence.errors import ThenceError
from thence.readers.compiled import SCANNER
from thence.readers.kineto import decoding
from thence.readers.kineto.envelope import Piece
from thence.readers.kineto.processes import PIECE_BYTES, fitting


@pytest.fixture(autouse=True)
def no_scanner(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the scanner, threads decode: see test_scanner.py."""
    monkeypatch.setenv(SCANNER.variable, "python")


LARGE = 1 << 40
"""Bytes of a file for which processes start at once."""


def piece(name: str) -> Piece:
    event = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": 1, "dur": 2}
    text = json.dumps(event).encode()
    return Piece(0, len(text), text)


def test_columns_come_in_the_order_of_the_pieces() -> None:
    names = [f"kernel {number}" for number in range(40)]
    found = decoding.decoded(map(piece, names), "no file", LARGE, 3)
    assert [columns["names"] for columns in found] == [[name] for name in names]


@pytest.mark.parametrize(("cores", "pieces", "processes"), [(16, 12.5, 13), (4, 12.5, 4), (64, 1e6, 16), (3, 0, 3)])
def test_there_are_no_more_processes_than_pieces(cores: int, pieces: float, processes: int) -> None:
    assert fitting(int(pieces * PIECE_BYTES), cores) == processes


def children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (entry / "stat").exists():
            said = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(said[1]) == parent and said[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_process_is_told_and_the_others_end() -> None:
    before = set(children(os.getpid()))
    found = decoding.decoded(map(piece, repeat("k")), "no file", LARGE, 2)
    next(found)
    (first,) = set(children(os.getpid())) - before
    workers = children(first)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    with pytest.raises(ThenceError, match="a process that decodes the trace was killed"):
        deque(islice(found, 1000))
    assert set(children(os.getpid())) <= before
    end = time.monotonic() + 10
    while Path(f"/proc/{workers[1]}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{workers[1]}").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_whoever_stops_asking_ends_the_processes() -> None:
    before = set(children(os.getpid()))
    found = decoding.decoded(map(piece, repeat("k")), "no file", LARGE, 2)
    next(found)
    assert len(set(children(os.getpid())) - before) == 1
    found.close()  # type: ignore[attr-defined]
    assert set(children(os.getpid())) <= before
