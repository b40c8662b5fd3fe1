"""Reader of ``.nsys-rep`` reports: ``nsys`` exports each report to SQLite once, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from thence.errors import DamagedInput, InputError, MissingRequirement
from thence.readers.expansion import DEFAULT, Expansion

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.model.tables import Tables

NAME = "Nsight Systems report (.nsys-rep)"
PATTERNS = ("*.nsys-rep", "*.qdrep")
"""Globs of reports; if a directory also holds the export of a report, the export is read instead."""

_POLL_S = 0.2


def sniff_archive(path: str) -> bool:
    """Whether a file is a report, judged by its name alone: only nsys can read the content."""
    return path.endswith((".nsys-rep", ".qdrep")) and Path(path).is_file()


def read(
    name: str,
    progress: Callable[[int], None],
    expansion: Expansion = DEFAULT,  # noqa: ARG001 - nsys unpacks its own reports
) -> Tables:
    """The tables of one report.

    Args:
        progress: called with the bytes that nsys has written to the export so far.
        expansion: unused.

    Raises:
        InputError: the report cannot be opened.
        MissingRequirement: nsys is not installed or cannot be started, or the cache cannot be written.
        DamagedInput: nsys cannot export it.
    """
    from thence.readers.nsight import sqlite
    from thence.readers.nsight.tables import tables_of

    exported = cache_file(name)
    if not exported.is_file():
        _export(name, exported, progress)
    with sqlite.opened(str(exported), name) as database:
        return tables_of(database)


def cache_file(name: str) -> Path:
    """Path of the export of a report in the user's cache, which depends on the report's path, size and mtime.

    Raises:
        InputError: the report cannot be opened.
        MissingRequirement: there is no folder for caches.
    """
    try:
        path = Path(name).resolve(strict=True)
        state = path.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: circular links, before Python 3.13
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(name, f"cannot be opened ({reason})") from error
    identity = f"{path}\0{state.st_size}\0{state.st_mtime_ns}"
    # A report that was changed has another size or time, and so another export.
    digest = hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:32]
    return cache_folder() / "nsys" / f"{digest}.sqlite"


def cache_folder() -> Path:
    """The user's folder for files that thence can recreate; it need not exist.

    Raises:
        MissingRequirement: the user has no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # By the XDG specification, a relative path is ignored.
    if Path(base).is_absolute():
        return Path(base) / "thence"
    try:
        return Path.home() / ".cache" / "thence"
    except RuntimeError as error:
        raise MissingRequirement(
            "there is no folder for caches, because this user has no home directory; set XDG_CACHE_HOME to a folder"
        ) from error


def _export(name: str, exported: Path, progress: Callable[[int], None]) -> None:
    command = ["nsys", "export", "--type", "sqlite", "--force-overwrite", "true", "--output"]
    nsys = shutil.which("nsys")
    if nsys is None:
        suggested = Path(name).with_suffix(".sqlite")
        raise MissingRequirement(
            f"{name}: only nsys can read a report, and nsys is not on PATH. Where it is installed, run "
            f"`{' '.join(command)} {suggested} {name}` and give the result to thence"
        )
    # An export holds the environment variables of the program: only the user may read the folder.
    try:
        exported.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(dir=exported.parent, prefix="export-")
    except OSError as error:
        raise MissingRequirement(
            f"{name}: its export is cached in {exported.parent}, which cannot be created or written "
            f"({error.strerror or error}); set XDG_CACHE_HOME to another folder"
        ) from error
    with made as folder:
        output_path = Path(folder) / "export.sqlite"
        _run([nsys, *command[1:], str(output_path), str(Path(name).resolve())], name, output_path, progress)
        output_path.replace(exported)


def _run(command: list[str], name: str, output_path: Path, progress: Callable[[int], None]) -> None:
    with tempfile.TemporaryFile() as output:
        try:
            child = subprocess.Popen(  # noqa: S603 - no shell, and the path is absolute
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise MissingRequirement(f"{command[0]}: cannot be started ({error})") from error
        try:
            while child.poll() is None:
                time.sleep(_POLL_S)
                progress(output_path.stat().st_size if output_path.is_file() else 0)
        finally:
            child.kill()  # does nothing if it has ended
            child.wait()
        output.seek(0)
        lines = output.read(1 << 16).decode("utf-8", "replace").strip().splitlines()
    if child.returncode or not output_path.is_file():
        last_line = f": {lines[-1].strip()}" if lines else ""
        raise DamagedInput(name, f"nsys cannot export it (exit code {child.returncode}{last_line})")
