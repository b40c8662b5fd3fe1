"""Writes a timeline atomically to a file or folder; the ending of the name determines the format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import polars as pl

from thence.atomic_files import atomic_folder, atomic_open, not_written
from thence.errors import ThenceError, UsageError
from thence.writers.timelines.chrome import write_chrome
from thence.writers.timelines.parquet import FILES, write_parquet
from thence.writers.timelines.perfetto.write import write_perfetto

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.model.timeline import Timeline

PERFETTO = (".pftrace", ".perfetto-trace")
"""Endings of Perfetto traces."""
_ENDINGS = (*PERFETTO, ".json", ".json.gz", ".parquet")
"""Allowed endings of an output's name."""

_GZIP_LEVEL = 2  # of isal, whose levels end at 3


def gzipped(stream: IO[bytes]) -> Any:
    """A stream that compresses into another one; equal contents give equal bytes: no time and no name."""
    from isal import igzip

    made: Any = igzip.IGzipFile  # isal comes without types
    return made("", fileobj=stream, mode="wb", compresslevel=_GZIP_LEVEL, mtime=0)


def ending_of(path: str | os.PathLike[str]) -> str:
    """The ending of a path, one of `_ENDINGS`.

    Raises:
        UsageError: the path has none of them.
    """
    name = os.fspath(path).rstrip("/")
    for ending in _ENDINGS:
        if name.lower().endswith(ending):
            return ending
    endings = ", ".join(_ENDINGS)
    raise UsageError(f"{name}: unknown file ending; choose one of {endings}")


def write_timeline(
    timeline: Timeline, path: str | os.PathLike[str], progress: Callable[[int, int], None] = lambda _done, _all: None
) -> None:
    """Writes a timeline in the format of the path's ending.

    The output is written under a temporary name next to the target, and renamed when it is complete. If
    writing fails, an existing target stays unchanged.

    Args:
        path: a path with one of `_ENDINGS`; replaced if it exists.
        progress: called with the number of rows written so far, and the number of all rows.

    Raises:
        UsageError: the ending is not one of `_ENDINGS`; or the output is a folder, and the target is a file or
            a folder with other files.
        ThenceError: the target cannot be written.
    """
    target = Path(os.fspath(path).rstrip("/"))
    ending = ending_of(path)
    try:
        if ending == ".parquet":
            _check_replaceable(target)
            with atomic_folder(target) as folder:
                write_parquet(timeline, folder)
        else:
            with atomic_open(target) as stream:
                write_timeline_to(timeline, stream, ending, progress)
    except (OSError, pl.exceptions.ComputeError) as error:  # Polars' error for a failed system call
        raise ThenceError(not_written(target, error)) from error


def write_timeline_to(
    timeline: Timeline, stream: IO[bytes], ending: str, progress: Callable[[int, int], None] = lambda _done, _all: None
) -> None:
    """Writes a timeline to a stream.

    Args:
        stream: binary stream; not closed.
        ending: one of `_ENDINGS` except ".parquet", whose output is a folder.
        progress: called with the number of rows written so far, and the number of all rows.

    Raises:
        UsageError: a stream cannot hold the format of ``ending``.
    """
    if ending == ".json.gz":
        with gzipped(stream) as zipped:
            write_chrome(timeline, zipped, progress)
    elif ending == ".json":
        write_chrome(timeline, stream, progress)
    elif ending in PERFETTO:
        write_perfetto(timeline, stream, progress)
    else:
        raise UsageError(f"{ending}: this format cannot be written to a stream")


def _check_replaceable(target: Path) -> None:
    """Refuses to replace what Parquet output did not write.

    Raises:
        UsageError: the target is a file, or a folder with other files.
    """
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: is a file; Parquet output is a folder of files")
    if target.exists() and {path.name for path in target.iterdir()} - {*FILES}:
        raise UsageError(f"{target}: holds other files, which are not deleted; choose another name")
