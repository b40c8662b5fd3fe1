"""Writes Parquet files, with an error where the system did not write all of one.

Polars ignores what the system says when a file is closed. File systems of a network tell only then that there is no
room left, or that the server could not write. So Python closes the file.
"""

from __future__ import annotations

import io
from typing import IO, TYPE_CHECKING, Literal, cast

import polars as pl

from thence.atomic_files import os_error

if TYPE_CHECKING:
    from pathlib import Path


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
