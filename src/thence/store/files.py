"""The files of a store as they are read. A store may come from elsewhere, so nothing in it is taken on trust.

Parquet can claim billions of rows in a few bytes, and opening a FIFO waits for ever: both are refused before
anything is read.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import polars as pl

from thence.errors import DamagedInput, InputError
from thence.readers.expansion import DEFAULT, decoded_bytes
from thence.readers.source import check_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from thence.units import Bytes

__all__ = ["content_of", "is_there", "reading", "rows_within", "tables_within", "write_table"]


_MOST_NESTED = 3
"""Lists within lists in a column: of hundreds, each takes a megabyte to read."""


@contextmanager
def reading(where: Path) -> Iterator[None]:
    """Tells errors of reading tables as damage.

    Args:
        where: for messages: the file, part or store whose tables are read within.

    Raises:
        DamagedInput: a table cannot be read, or is not as thence writes it.
    """
    try:
        yield
    except (
        LookupError, OSError, TypeError, ValueError, pl.exceptions.PolarsError,
        pl.exceptions.PanicException,
    ) as error:  # fmt: skip
        reason = " ".join(str(error).split())[:300]
        raise DamagedInput(str(where), f"cannot be read ({reason})") from error


def is_there(path: Path) -> bool:
    """Whether there is a file.

    Raises:
        DamagedInput: something else is there, or may not be looked at.
    """
    try:
        check_regular(str(path))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise DamagedInput(str(path), f"cannot be read ({error.strerror or error})") from error
    except InputError as error:
        raise DamagedInput(str(path), "is a special file, no file of a store") from error
    return True


def content_of(path: Path, most: Bytes) -> bytes:
    """The bytes of a file.

    Raises:
        DamagedInput: it is not there, no file, cannot be read, or larger than ``most``.
    """
    if not is_there(path):
        raise DamagedInput(str(path), "is missing")
    with reading(path):
        if path.stat().st_size > most:
            raise DamagedInput(str(path), "is larger than any that thence writes")
        return path.read_bytes()


def tables_within(paths: Sequence[Path], where: Path) -> pl.LazyFrame:
    """Parquet files as one table, as a plan of which only the footers have been read.

    Args:
        paths: all of them are there.
        where: for messages.

    Raises:
        DamagedInput: they are no Parquet files, or claim many times more than they store.
    """
    with reading(where):
        plan = pl.scan_parquet([path for path in paths if is_there(path)], glob=False)
        return rows_within(plan, paths, where)


def rows_within(plan: pl.LazyFrame, paths: Sequence[Path], where: Path) -> pl.LazyFrame:
    """The plan over some files, if its rows are no more than what these store allows.

    Raises:
        DamagedInput: they claim many times more than they store, or hold lists within many lists.
    """
    with reading(where):
        schema = plan.collect_schema()
        if any(_depth(dtype) > _MOST_NESTED for dtype in schema.values()):
            raise DamagedInput(str(where), "holds columns nested deeper than any of a store")
        claimed = decoded_bytes(plan.select(pl.len()).collect().item(), schema)
        stored = sum(path.stat().st_size for path in paths)
    if claimed > DEFAULT.most(stored):
        raise DamagedInput(str(where), "claims many times more rows than it stores")
    return plan


def _depth(dtype: object) -> int:
    """How many lists and arrays are around the values of a type."""
    depth = 0
    while isinstance(dtype, pl.List | pl.Array):
        dtype, depth = dtype.inner, depth + 1
    return depth


_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def write_table(frame: pl.DataFrame, path: Path) -> None:
    """Writes a table as Parquet.

    Raises:
        OSError: it cannot be written there; Polars tells it as an error of its own.
    """
    try:
        frame.write_parquet(path, compression="lz4")
    except pl.exceptions.ComputeError as error:
        told = _OS_ERROR.search(str(error))
        number = int(told[1]) if told else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error
