"""What takes long says what it does, on a terminal alone, and what does not shows nothing."""

from __future__ import annotations

import io
import sys
import time
from typing import TYPE_CHECKING

from thence.cli import ingest, progress
from thence.cli.messages import wrote

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def made_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error as a terminal; called in a test, because pytest sets the stream anew before it."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm-256color")
    return shown


def test_what_is_done_at_once_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = made_terminal(monkeypatch)
    with progress.working("attributing"):
        pass
    assert terminal.getvalue() == ""


def test_what_takes_long_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = made_terminal(monkeypatch)
    monkeypatch.setattr(progress, "_QUIET_S", 0.01)
    with progress.working("attributing"):
        time.sleep(0.3)
    assert "attributing" in terminal.getvalue()


def test_reading_and_writing_say_their_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = made_terminal(monkeypatch)
    monkeypatch.setattr(progress, "_QUIET_S", 0.01)
    with progress.bytes_read() as read:
        for part in range(1, 4):
            read("folder/trace.json", part * 1_000_000, 10_000_000)
            time.sleep(0.1)
    assert "trace.json" in terminal.getvalue()
    assert "MB/s" in terminal.getvalue()
    with progress.rows_written() as written:
        for part in range(1, 4):
            written(part * 1000, 10_000)
            time.sleep(0.1)
    assert "rows/s" in terminal.getvalue()


def test_a_pipe_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    with progress.working("attributing"), progress.bytes_read() as read:
        read("trace.json", 5, 10)
        time.sleep(0.05)
    assert shown.getvalue() == ""


def test_a_folder_is_as_large_as_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1500)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(b"x" * 500)
    wrote(f"{tmp_path}/", "tables")
    assert capsys.readouterr().err == f"wrote {tmp_path}/: tables, 2.000 kB\n"


def test_an_ingest_in_a_pipe_says_now_and_then_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    moments = iter([0.0, 4.0, 12.0, 12.0, 15.0, 30.0, 30.0])
    show = ingest._lines(lambda: next(moments))
    for done in (1, 2, 3, 300):
        show(done, 300)
    assert capsys.readouterr().err == "2 of 300 inputs read\n"
