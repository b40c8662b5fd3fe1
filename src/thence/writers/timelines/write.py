"""Writes a timeline to a file or folder, with the format from the name's ending; writes are atomic."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import polars as pl

from thence.atomic_files import atomic_open, temporary_path
from thence.errors import ThenceError, UsageError
from thence.writers.timelines.chrome import write_chrome
from thence.writers.timelines.parquet import FILES, write_parquet
from thence.writers.timelines.perfetto.write import write_perfetto

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from thence.model.timeline import Timeline

__all__ = ["PERFETTO", "ending_of", "write_timeline", "write_timeline_to"]

PERFETTO = (".pftrace", ".perfetto-trace")
"""Endings of Perfetto traces."""
_ENDINGS = (*PERFETTO, ".json", ".json.gz", ".parquet")
"""What the name of an output can end with."""

_GZIP_LEVEL = 2


def ending_of(path: str | os.PathLike[str]) -> str:
    """Which of `_ENDINGS` a path has.

    Raises:
        UsageError: none of them.
    """
    name = os.fspath(path).rstrip("/")
    for ending in _ENDINGS:
        if name.lower().endswith(ending):
            return ending
    endings = ", ".join(_ENDINGS)
    raise UsageError(
        f"{name}: the ending says no format that can be written; choose one of {endings}"
    )


def write_timeline(
    timeline: Timeline,
    path: str | os.PathLike[str],
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> None:
    """Writes a timeline in the format that the path's ending says.

    It is written beside the target and renamed when it is complete, so that a failure leaves what
    was there before.

    Args:
        timeline: to be written.
        path: with one of `_ENDINGS`; replaced if it exists.
        progress: called with how many rows are written, and how many there are.

    Raises:
        UsageError: the ending says no format, or a file stands where a folder is wanted.
        ThenceError: it cannot be written there.
    """
    target = Path(os.fspath(path).rstrip("/"))
    ending = ending_of(path)
    try:
        if ending == ".parquet":
            with _atomic_folder(target) as folder:
                write_parquet(timeline, folder)
        else:
            with atomic_open(target) as stream:
                write_timeline_to(timeline, stream, ending, progress)
    except OSError as error:
        raise ThenceError(f"{target}: cannot be written: {error.strerror or error}") from error
    except pl.exceptions.ComputeError as error:  # Polars' word for what the system refused
        raise ThenceError(f"{target}: cannot be written: {error}") from error


def write_timeline_to(
    timeline: Timeline,
    stream: IO[bytes],
    ending: str,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> None:
    """Writes a timeline to a stream.

    Args:
        timeline: to be written.
        stream: binary; not closed.
        ending: of `_ENDINGS`, but no folder's.
        progress: called with how many rows are written, and how many there are.
    """
    if ending == ".json.gz":
        from isal import igzip

        compressed: Any = igzip.IGzipFile  # isal comes without types
        zipped = compressed(fileobj=stream, mode="wb", compresslevel=_GZIP_LEVEL)
        with zipped:
            write_chrome(timeline, zipped, progress)
    elif ending == ".json":
        write_chrome(timeline, stream, progress)
    elif ending in PERFETTO:
        write_perfetto(timeline, stream, progress)
    else:
        raise UsageError(f"{ending}: no format that goes to a stream")


@contextmanager
def _atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that replaces the target on success."""
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: is a file; Parquet output is a folder of files")
    if target.exists() and {path.name for path in target.iterdir()} - {*FILES}:
        raise UsageError(f"{target}: holds other files, which are not deleted; choose another name")
    unfinished = temporary_path(target)
    unfinished.mkdir()
    try:
        yield unfinished
        if target.exists():
            shutil.rmtree(target)
        unfinished.replace(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
