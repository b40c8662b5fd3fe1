"""Damaged pages of a store are met by a child process first, once for every file that has changed."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from helpers import FSDP, output
from stores import kept
from thence.errors import DamagedInput, MissingRequirement
from thence.parquet_files import write_table
from thence.readers import parquet_probe
from thence.store import parquet_check

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def sound() -> Path:
    return kept(FSDP[:2], host=True)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The processes that try tables, as they are started."""
    started: list[object] = []
    start = parquet_probe._started

    def told(*given: object) -> object:
        child = start(*given)  # type: ignore[arg-type]
        started.append(child)
        return child

    monkeypatch.setattr(parquet_probe, "_started", told)
    return started


def asked(store: Path) -> None:
    """Reads summaries and tables."""
    trace = thence.open(store)
    assert trace.report().sum_ns > 0
    assert trace.tables.gpu.height > 0


def spoil(store: Path) -> None:
    """Makes a page of every table claim more values than it holds, at which Polars 2.1 ends the process.

    In Thrift's compact protocol, field 5 of the header of a page (0x2c, the header of a data page) begins with the
    number of values (0x15), of 7 bits a byte.
    """
    table = pl.DataFrame({"rank": [0] * 200, "name": pl.Series(["x", "y", None, "z"] * 50, dtype=pl.Categorical)})
    for file in store.rglob("*.parquet"):
        write_table(table, file)
        content = bytearray(file.read_bytes())
        at = content.rindex(b"\x2c\x15")
        assert content[at + 2 : at + 4] == b"\x90\x03"  # 400 is the zigzag form of 200
        content[at + 2] = 0xFF
        file.write_bytes(content)


@pytest.mark.parametrize("verb", ["report", "ranks", "streams"])
def test_a_page_that_ends_its_reader_is_one_sentence(
    sound: Path, tmp_path: Path, verb: str, capfd: pytest.CaptureFixture[str]
) -> None:
    store = shutil.copytree(sound, tmp_path / "job.store")
    spoil(store)
    told = output(capfd, verb, store, code=2)[1]
    assert len(told.splitlines()) == 1, told
    assert re.search(r"job\.store/.*\.parquet: ", told)


def test_what_an_ingest_wrote_and_what_was_tried_is_not_tried_again_until_it_changes(
    sound: Path, tmp_path: Path, children: list[object]
) -> None:
    asked(sound)
    assert children == []
    store = shutil.copytree(sound, tmp_path / "job.store")
    asked(store)
    assert len(children) == 2  # summaries, tables
    asked(store)
    assert len(children) == 2
    file = min(store.glob("ranks/*/activities.parquet"))
    state = file.stat()
    pl.read_parquet(file).write_parquet(file)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))  # time of change says so all the same
    asked(store)
    assert len(children) == 3


def test_without_a_cache_every_call_tries(
    sound: Path, tmp_path: Path, children: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    asked(sound)
    assert len(children) == 2


def test_what_no_process_could_try_is_refused_and_tried_the_next_time(
    sound: Path, tmp_path: Path, children: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = shutil.copytree(sound, tmp_path / "job.store")
    for refused in (refusal_of_the_system, ends_before_it_reads):
        with monkeypatch.context() as patched:
            expected = refused(patched)
            with pytest.raises(MissingRequirement, match=expected):
                asked(store)
    before = len(children)
    asked(store)
    assert len(children) == before + 2  # summaries, tables


def refusal_of_the_system(monkeypatch: pytest.MonkeyPatch) -> str:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refused)
    return os.strerror(errno.EAGAIN)


def ends_before_it_reads(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(parquet_probe, "_CHILD", "raise SystemExit(7)")
    return "ended with code 7 while it imported Polars"


def test_the_cache_keeps_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(parquet_check, "_MAX_CACHE_BYTES", 330)
    names = [f"{number:032}" for number in range(25)]
    for name in names:
        parquet_check._remember([name])
    kept = parquet_check._remembered()
    assert set(names[-5:]) <= kept <= set(names)
    assert (tmp_path / "thence" / "tried-tables").stat().st_size <= 330


def test_a_query_in_this_process_reads_tried_tables(sound: Path, tmp_path: Path) -> None:
    store = shutil.copytree(sound, tmp_path / "job.store")
    spoil(store)
    with pytest.raises(DamagedInput, match=r"\.parquet"):
        thence.open(store).sql("select sum(duration) from gpu")
