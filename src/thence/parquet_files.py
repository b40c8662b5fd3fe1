"""Scans and writes Parquet files, with an error where the system did not read or write all of one.

Polars maps files that it gets as paths into memory. Where a mapped file is cut short, or a file system of a network
fails, the system ends the process (SIGBUS). Content in memory and files that Polars gets as URLs are never mapped: the
same failure is an exception.

Polars ignores what the system says when a file is closed. File systems of a network tell only then that there is no
room left, or that the server could not write. So Python closes the file.
"""

from __future__ import annotations

import io
from typing import IO, TYPE_CHECKING, Literal, cast

import polars as pl

from thence.atomic_files import os_error

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_DECODED = tuple(map(int, pl.__version__.split(".")[:2])) >= (1, 42)
"""Whether this version of Polars decodes percent signs in URLs of files."""


def held_tables(paths: Iterable[Path]) -> pl.LazyFrame:
    """Parquet files as one lazy table, which holds the whole files in memory.

    Raises:
        OSError: a file cannot be read.
    """
    return pl.scan_parquet([path.read_bytes() for path in paths], glob=False)


def scanned_tables(paths: Iterable[Path]) -> pl.LazyFrame:
    """Parquet files as one lazy table, for more files than fit into memory; characters of a glob are taken literally.

    Polars reads the columns that are needed each time the table is collected. That raises OSError, or an error of
    Polars, where a file cannot be read. Where a file was cut short, Polars also prints its stack to standard error.
    """
    return pl.scan_parquet([_url(path.absolute()) for path in paths], glob=False)


def _url(path: Path) -> str:
    return path.as_uri() if _DECODED else f"file://{path}"


def write_table(frame: pl.DataFrame, path: Path, compression: Literal["lz4", "zstd"] = "lz4") -> None:
    """Writes a table as Parquet.

    Args:
        compression: lz4 is read and written faster, zstd is smaller.

    Raises:
        OSError: it cannot be written there.
    """
    try:
        with path.open("wb") as file:
            target = _NoDescriptor(file)
            try:
                frame.write_parquet(cast("IO[bytes]", target), compression=compression)
            except pl.exceptions.ComputeError as error:
                raise target.error or os_error(error, path) from error
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


class _NoDescriptor(io.RawIOBase):
    """A file without a descriptor, which Polars would copy and close itself.

    Attributes:
        error: what the system said of the first write that failed; Polars keeps at most its text.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, content: bytes) -> int:  # type: ignore[override]
        try:
            return self._file.write(content)
        except OSError as error:
            self.error = self.error or error
            raise
