"""Folders that are replaced whole: the previous one is there until the new one has its name, and after every error."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import thence
from thence.atomic_files import atomic_folder, atomic_open, temporary_path

if TYPE_CHECKING:
    from collections.abc import Iterator


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "old").write_text("old")
    return folder


def test_a_new_folder_replaces_the_old_one(target: Path) -> None:
    with atomic_folder(target) as folder:
        (folder / "new").write_text("new")
        assert content(target) == {"old": "old"}
    assert content(target) == {"new": "new"}
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_a_folder_that_was_not_there(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "new").write_text("new")
    assert content(tmp_path / "out") == {"new": "new"}


def test_after_an_error_the_old_folder_is_there(target: Path) -> None:
    def written() -> None:
        with atomic_folder(target) as folder:
            (folder / "new").write_text("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        written()
    assert content(target) == {"old": "old"}
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_a_folder_that_cannot_be_renamed_leaves_the_old_one(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.replace

    def refused(path: Path, new: Path) -> Path:
        if new == target and (path / "new").exists():
            raise PermissionError(13, "Permission denied")
        return rename(path, new)

    monkeypatch.setattr(Path, "replace", refused)
    with pytest.raises(PermissionError), atomic_folder(target) as folder:
        (folder / "new").write_text("new")
    assert content(target) == {"old": "old"}
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_a_symbolic_link_keeps_pointing_to_its_folder(target: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(target)
    with atomic_folder(link) as folder:
        (folder / "new").write_text("new")
    assert link.is_symlink()
    assert content(target) == {"new": "new"}


def test_temporary_names_cannot_be_guessed_and_what_is_planted_there_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {temporary_path(tmp_path / "out.json") for _ in range(100)}
    assert len(names) == 100
    planted = tmp_path / ".out.json.planted"
    elsewhere = tmp_path / "elsewhere"
    planted.symlink_to(elsewhere)
    monkeypatch.setattr("thence.atomic_files.temporary_path", lambda _target: planted)
    with pytest.raises(FileExistsError), atomic_open(tmp_path / "out.json"):
        pass
    assert not elsewhere.exists()


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("open_umask")
def test_a_file_that_is_replaced_keeps_its_permissions_and_is_private_until_then(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    for permissions in (0o600, 0o640, 0o664):
        target.write_text("old")
        target.chmod(permissions)
        with atomic_open(target) as file:
            file.write(b"new")
            assert [mode(p) for p in tmp_path.iterdir() if p != target] == [0o600]
        assert (target.read_text(), mode(target)) == ("new", permissions)
    target.unlink()
    with atomic_open(target) as file:
        file.write(b"new")
    assert mode(target) == 0o644


@pytest.mark.usefixtures("open_umask")
def test_a_folder_that_is_replaced_keeps_its_permissions_and_is_private_until_then(target: Path) -> None:
    target.chmod(0o750)
    with atomic_folder(target) as folder:
        assert mode(folder) == 0o700
    assert mode(target) == 0o750


def test_temporary_files_are_of_their_user_alone() -> None:
    """All of them are made by tempfile, which makes them so; no module names a file in a shared folder itself."""
    package = Path(thence.__file__).parent
    texts = {path: path.read_text() for path in package.rglob("*.py")}
    assert [p.name for p, text in texts.items() if re.search(r"mktemp\(|[\"']/(?:var/)?tmp/", text)] == []
    with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryDirectory() as folder:
        modes = [stat.S_IMODE(Path(name).stat().st_mode) for name in (file.name, folder)]
    assert modes == [0o600, 0o700]


def test_a_rename_that_was_done_and_is_told_as_failed_counts_as_done(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of NFS asks twice where the first answer was lost; the second answer is that there is no such file."""
    rename = Path.replace

    def told_as_failed(path: Path, new: Path) -> Path:
        rename(path, new)
        raise FileNotFoundError(2, "No such file or directory", str(path), None, str(new))

    monkeypatch.setattr(Path, "replace", told_as_failed)
    with atomic_open(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    with atomic_folder(target) as folder:
        (folder / "new").write_text("new")
    assert content(target) == {"new": "new"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]
