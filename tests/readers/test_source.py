"""What is no file is refused at once, and links in a circle end."""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

import pytest

import thence
from helpers import kernel, launch, run_thence, written
from thence.inside.files import load
from thence.readers.jax.hlo_dump import hlo_dump_modules
from thence.readers.kineto import decoding
from thence.readers.source import expand

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = pytest.mark.parametrize("read", [thence.open, load, hlo_dump_modules])
Read = "Callable[[str], object]"


def trace(path: Path) -> Path:
    return written(path, [launch(1, 10), kernel(1, 20)])


@SPECIAL
@pytest.mark.parametrize("ending", ["json", "npz", "nsys-rep", "hlo.pb"])
def test_a_fifo_is_refused_without_waiting(tmp_path: Path, read: Read, ending: str) -> None:
    fifo = tmp_path / f"x.{ending}"
    os.mkfifo(fifo)
    with pytest.raises(thence.InputError, match="is a FIFO, not a file"):
        read(str(fifo))


@SPECIAL
def test_a_device_is_refused(read: Read) -> None:
    with pytest.raises(thence.InputError, match="/dev/zero: is a device, not a file"):
        read("/dev/zero")


def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # its name may not be long
    with socket.socket(socket.AF_UNIX) as there:
        there.bind("s")
        with pytest.raises(thence.InputError, match="is a socket, not a file"):
            thence.open("s")


def test_special_files_of_a_directory_are_no_traces(tmp_path: Path) -> None:
    trace(tmp_path / "t.json")
    os.mkfifo(tmp_path / "u.json")
    assert thence.open(tmp_path).meta.inputs == (str(tmp_path / "t.json"),)


@pytest.mark.parametrize("ending", ["json", "nsys-rep", "npz"])
def test_links_in_a_circle_are_one_sentence(tmp_path: Path, ending: str) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.{ending}").symlink_to(tmp_path / f"{other}.{ending}")
    done = run_thence("report", tmp_path / f"a.{ending}")
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert b"should not happen" not in done.stderr


def test_globs_end_where_links_of_folders_lead_in_circles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two links to the folder that they are in: followed, they give 2**40 names of one file."""
    (tmp_path / "in").mkdir()
    for name in ("one", "two"):
        (tmp_path / "in" / name).symlink_to(tmp_path)
    for name in ("t.json", "in/u.json", ".hidden.json"):
        trace(tmp_path / name)
    wanted = [str(tmp_path / name) for name in ("in/u.json", "t.json")]
    assert sorted(expand([f"{tmp_path}/**/*.json"], ())) == wanted
    assert sorted(expand([f"{tmp_path}/**"], ())) == wanted
    assert sorted(expand([f"{tmp_path.parent}/{tmp_path.name[:-1]}?/**/*.json"], ())) == wanted
    monkeypatch.chdir(tmp_path)
    assert sorted(expand(["**/*.json"], ())) == ["in/u.json", "t.json"]
    assert expand(["**/.h*.json"], ()) == [".hidden.json"]


@pytest.mark.skipif(
    not os.access("/proc/self/mem", os.R_OK), reason="there is no file that cannot be read at its begin"
)
def test_a_folder_is_not_read_without_a_file_that_the_system_cannot_read(tmp_path: Path) -> None:
    trace(tmp_path / "rank0.json")
    (tmp_path / "rank1.json").symlink_to("/proc/self/mem")
    with pytest.raises(thence.InputError, match=r"rank1\.json: cannot be read \(Input/output error\)"):
        _ = thence.open(tmp_path).tables


def test_an_error_in_the_middle_of_a_read_names_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a network's file system, which names no file then."""
    path = trace(tmp_path / "a.json")

    def refuse(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(decoding, "_json", refuse)
    with pytest.raises(thence.InputError, match=r"a\.json: reading failed \(Stale file handle\)"):
        _ = thence.open(path).tables
