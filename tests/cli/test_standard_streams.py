"""What does not reach standard output, standard error or a disk is one sentence and exit code 2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import forking
from helpers import STACK, kernel, launch, written
from thence import opening
from thence.cli import main

ENVIRONMENT = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}


def thence(*arguments: Any, env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """``python -m thence``, as `forking.run` runs it; what it printed is text."""
    done = forking.run(["-m", "thence", *map(str, arguments)], env=ENVIRONMENT | (env or {}), **options)
    texts = [None if text is None else text.decode() for text in (done.stdout, done.stderr)]
    return subprocess.CompletedProcess(done.args, done.returncode, *texts)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace for what does not depend on how much is written."""
    return written(tmp_path_factory.mktemp("small") / "t.json", [launch(1, 10), kernel(1, 20)])


def one_sentence(text: str) -> str:
    assert text.startswith("thence: "), text
    assert text.count("\n") == 1, text
    return text


SMALL = "SMALL"


@pytest.mark.parametrize(
    "arguments",
    [
        # More than a buffer holds: a write in the midst of the output fails.
        ("report", STACK, "--format", "json"),
        ("convert", STACK, "-o", "-", "--to", "json"),
        ("convert", STACK, "-o", "-", "--to", "pftrace"),
        ("flame", STACK, "-o", "-"),
        # Less: what fails is the last write.
        ("report", SMALL),
        ("sql", SMALL, "select count(*) from gpu"),
        ("demo",),
        ("--help",),
    ],
    ids=lambda arguments: " ".join(str(a) for a in arguments if a not in (STACK, SMALL)),
)
def test_a_full_device_is_one_sentence(arguments: tuple[Any, ...], small: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = thence(*(small if word == SMALL else word for word in arguments), stdout=full)
    assert done.returncode == 2
    assert "standard output cannot be written: No space left on device" in one_sentence(done.stderr)


def test_closed_standard_output_is_one_sentence(small: Path, tmp_path: Path) -> None:
    done = thence("report", small, closed=[1])
    assert done.returncode == 2
    assert "standard output cannot be written: it is closed" in one_sentence(done.stderr)
    to_file = thence("report", small, "-o", tmp_path / "r.json", closed=[1])
    assert to_file.returncode == 0
    assert to_file.stderr.startswith("wrote ")
    assert to_file.stderr.count("\n") == 1


def test_closed_standard_error_loses_messages_only(small: Path) -> None:
    assert thence("report", small, closed=[2]).returncode == 0
    assert thence("report", "nothing-here.json", closed=[2]).returncode == 2


def test_both_closed_still_end_with_exit_code_2(small: Path) -> None:
    assert thence("report", small, closed=[0, 1, 2]).returncode == 2


def test_a_full_standard_error_is_exit_code_2() -> None:
    with Path("/dev/full").open("wb") as full:
        assert thence("report", "nothing-here.json", stderr=full).returncode == 2


def test_a_character_that_the_encoding_lacks_is_one_sentence(tmp_path: Path) -> None:
    trace = written(tmp_path / "t.json", [launch(1, 10), kernel(1, 20, name="größe")])
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    done = thence("report", trace, "--format", "csv", env=ascii_only)
    assert done.returncode == 2
    assert r"ascii, cannot represent '\xf6'" in one_sentence(done.stderr)
    # A table shows the number of the character, and bars of ASCII.
    table = thence("report", trace, "--by", "kernel", env=ascii_only)
    assert table.returncode == 0
    assert re.search(r"gr\\xf6\\xdfe .*100.0 %  #+\n", table.stdout)
    # What a message lacks is shown by its number.
    missing = thence("report", tmp_path / "größe", env=ascii_only)
    assert r"gr\xf6\xdfe: no such file" in one_sentence(missing.stderr)


@pytest.mark.parametrize(("form", "unbuffered"), [("json", ""), ("json", "1"), ("csv", "1"), ("table", "1")])
def test_output_that_a_disk_takes_in_part_is_an_error(tmp_path: Path, unbuffered: str, form: str) -> None:
    """The system writes what fits and says so; only the next write fails."""
    with (tmp_path / "out").open("wb") as file:
        done = thence(
            "report", STACK, "--by", "kernel", "--format", form, cwd=tmp_path,
            stdout=file, file_limit=512, env={"PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert (tmp_path / "out").stat().st_size == 512
    assert done.returncode == 2
    assert "standard output cannot be written: File too large" in one_sentence(done.stderr)


@pytest.mark.parametrize("name", ["t.parquet", "t.json", "t.json.gz", "t.pftrace"])
def test_a_timeline_on_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    done = thence("convert", STACK, "-o", tmp_path / name, file_limit=512)
    assert done.returncode == 2
    sentence = rf"{name}: cannot be written: .*File too large; nothing is left there"
    assert re.search(sentence, one_sentence(done.stderr))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["table", "json", "csv"])
def test_a_reader_that_has_seen_enough_is_no_error(form: str, small: Path) -> None:
    # The pipe is closed before anything is written.
    read, write = os.pipe()
    os.close(read)
    done = thence("report", small, "--format", form, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


class _Panic(BaseException):
    """As Polars' panics, which are no `Exception`."""


@pytest.mark.parametrize("kind", [KeyError, _Panic, RecursionError])
def test_an_error_that_nobody_expected_is_one_sentence_and_a_file(
    kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_arguments: object, **_options: object) -> None:
        raise kind("first line\nsecond line")

    monkeypatch.setattr(opening, "open_trace", broken)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(STACK)])
    assert stopped.value.code == 2
    said = one_sentence(capsys.readouterr().err)
    (kept,) = tmp_path.iterdir()
    assert "please report it" in said
    assert said.endswith(f"{kept}\n")
    assert "in broken" in kept.read_text()


BLOCKED = """
import signal, subprocess
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
import forking
raise SystemExit(forking.run(["-c", "raise SystemExit(7)"], imported=(), stdout=2, stderr=2).returncode)
"""


def test_the_end_of_a_fork_is_noticed_where_the_signal_of_it_is_blocked() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", BLOCKED], env=environment, timeout=60, check=False).returncode == 7
