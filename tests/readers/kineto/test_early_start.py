"""Decoding that begins before its file is asked for: who goes on with it, and what ends it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from helpers import assert_same_tables, recording, unzipped
from thence.__main__ import reading_ahead
from thence.readers import registry
from thence.readers.kineto import decoding, early_start, envelope, processes
from thence.readers.kineto.processes import Processes
from thence.readers.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file for which decoding processes start, however small it is."""
    monkeypatch.setenv("THENCE_SCANNER", "python")
    path = tmp_path / "rank0.json"
    path.write_bytes(unzipped(recording("torch_eager_rank0")))
    for module in (early_start, decoding):
        monkeypatch.setattr(module, "BYTES_BEFORE_PROCESSES", 1)
    monkeypatch.setattr(processes, "PIECE_BYTES", 100_000)
    monkeypatch.setattr(processes, "_usable_cores", lambda: 2)
    yield path
    early_start.forget()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Processes]:
    """The decoding processes that have been started."""
    found: list[Processes] = []
    start = Processes.start

    def noted(count: int) -> Processes:
        found.append(start(count))
        return found[-1]

    monkeypatch.setattr(Processes, "start", noted)
    return found


def test_the_reader_goes_on_with_what_has_begun(trace: Path, started: list[Processes]) -> None:
    expected = registry.read([trace], cores=1)
    early_start.begin(str(trace))
    assert len(started) == 1
    assert_same_tables(registry.read([trace]), expected)
    assert len(started) == 1
    assert_same_tables(registry.read([trace]), expected)  # what has begun is read once
    assert len(started) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux opens a file again after it was replaced")
@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_a_file_that_is_replaced_or_deleted_while_it_is_read_is_read_as_it_was(
    trace: Path, started: list[Processes], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pieces were read from whatever had its name by then, and mixed without a word."""
    expected = registry.read([trace], cores=1)
    content = trace.read_bytes()
    for name, size in (("PIECE_BYTES", 100_000), ("_WINDOW_BYTES", 50_000), ("_READ_BYTES", 25_000)):
        monkeypatch.setattr(envelope, name, size)

    def changed(*_progress: object) -> None:
        trace.unlink(missing_ok=True)
        if change == "replaced":
            trace.write_bytes(content.replace(b'"dur": ', b'"dur": 1'))

    with Source.open(str(trace)) as source:
        begun = early_start.Begun.of(source)
        changed()
        assert Path(source.path).read_bytes() == content
        pieces = list(begun.columns)
    assert len(pieces) > 10
    assert sum(piece["damaged"] for piece in pieces) == 0
    trace.write_bytes(content)
    started.clear()
    whole = registry.read([trace], changed)
    assert started
    assert_same_tables(whole, expected)


def test_a_file_that_changed_meanwhile_is_read_as_it_is_now(trace: Path, started: list[Processes]) -> None:
    whole = registry.read([trace], cores=1)
    early_start.begin(str(trace))
    text = trace.read_text().replace('"cat": "kernel"', '"cat": "no"', 1)
    trace.write_text(text)
    assert registry.read([trace]).gpu.height == whole.gpu.height - 1
    assert len(started) == 2


def test_other_settings_read_the_file_themselves(trace: Path, started: list[Processes]) -> None:
    early_start.begin(str(trace))
    registry.read([trace], cores=1)
    assert len(started) == 1
    assert started[0].first.poll() is None


def test_what_nobody_asks_for_ends(trace: Path, started: list[Processes]) -> None:
    early_start.begin(str(trace))
    assert started[0].first.poll() is None
    early_start.forget()
    assert started[0].first.poll() is not None


@pytest.mark.parametrize("content", [b"", b"no trace", b'{"traceEvents": ['])
def test_what_is_wrong_with_a_file_is_left_for_its_reader(
    content: bytes, trace: Path, started: list[Processes]
) -> None:
    trace.write_bytes(content)
    early_start.begin(str(trace))
    early_start.begin(str(trace.with_name("absent.json")))
    early_start.forget()
    assert all(one.first.poll() is not None for one in started)


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        (["report", "large.json"], True),
        (["large.json", "--by", "module"], True),
        (["convert", "large.json", "-o", "new.json"], True),
        (["report", "large.json", "-o", "small.json"], True),
        (["report", "./large.json"], True),
        (["report", "large.json", "second.json"], False),
        (["report", "small.json"], False),
        (["report", "absent.json"], False),
        (["report", f"{'long' * 2000}.json"], False),
        (["record", "python", "train.py", "large.json"], False),
        (["ingest", "large.json", "-o", "store"], False),
        (["report", "large.txt"], False),
        ([], False),
    ],
)
def test_command_lines_that_read_one_large_trace_begin_with_it(
    arguments: list[str], begins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("large.json", "second.json", "large.txt"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(64 << 20)
    (tmp_path / "small.json").write_bytes(b"{}")
    monkeypatch.chdir(tmp_path)
    begun: list[str] = []
    monkeypatch.setattr(early_start, "begin", begun.append)
    with reading_ahead(arguments):
        assert begun == [name for name in arguments if begins and name.endswith("large.json")]


def test_decoding_begins_without_polars() -> None:
    code = (
        "import sys, thence.__main__, thence.readers.kineto.early_start\n"
        "print('polars' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.split() == ["False", "False"]
