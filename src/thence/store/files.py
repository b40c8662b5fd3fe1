"""Reads and writes the files of a store. A store may come from an untrusted source, so its files are checked.

A Parquet file of a few bytes can claim billions of rows, and opening a FIFO blocks forever: both are refused before
anything is read.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import polars as pl

from thence.errors import DamagedInput, InputError
from thence.parquet_files import held_tables
from thence.readers.expansion import DEFAULT, decoded_bytes
from thence.readers.source import check_regular

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from thence.units import Bytes

_MAX_NESTED = 3
"""Most levels of lists within lists in a column; with hundreds of levels, each takes a megabyte to read."""


@contextmanager
def reading(where: Path) -> Iterator[None]:
    """Converts errors that reading tables raises to `DamagedInput`.

    Args:
        where: for messages: the file, part or store whose tables the block reads.

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
    """Whether there is a file at this path.

    Raises:
        DamagedInput: there is a special file, such as a FIFO, or the path cannot be accessed.
    """
    return state_of(path) is not None


def state_of(path: Path) -> os.stat_result | None:
    """Size, inode and times of the file at this path; None if there is none.

    Raises:
        DamagedInput: there is a special file, such as a FIFO, or the path cannot be accessed.
    """
    try:
        return check_regular(str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedInput(str(path), f"cannot be read ({error.strerror or error})") from error
    except InputError as error:
        raise DamagedInput(str(path), "is a special file, not a file of a store") from error


def content_of(path: Path, most: Bytes) -> bytes:
    """The bytes of a file.

    Raises:
        DamagedInput: it is missing, is not a regular file, cannot be read, or is larger than ``most``.
    """
    state = state_of(path)
    if state is None:
        raise DamagedInput(str(path), "is missing")
    if state.st_size > most:
        raise DamagedInput(str(path), f"is larger than {most:,} bytes, the limit for such a file")
    with reading(path):
        return path.read_bytes()


def tables_within(paths: Sequence[Path], where: Path) -> pl.LazyFrame:
    """Parquet files as one lazy table, of which only the footers have been read.

    Raises:
        DamagedInput: they are not Parquet files, or claim many times more rows than they can store.
    """
    with reading(where):
        plan = held_tables(path for path in paths if is_there(path))
        return rows_within(plan, paths, where)


def rows_within(plan: pl.LazyFrame, paths: Sequence[Path], where: Path) -> pl.LazyFrame:
    """Returns a plan over some files if its number of rows is possible for the size of the files.

    Raises:
        DamagedInput: they claim many times more rows than they can store, or nest lists too deeply.
    """
    with reading(where):
        schema = plan.collect_schema()
        if any(_depth(dtype) > _MAX_NESTED for dtype in schema.values()):
            raise DamagedInput(str(where), f"holds columns with more than {_MAX_NESTED} levels of nested lists")
        claimed = decoded_bytes(plan.select(pl.len()).collect().item(), schema)
        stored = sum(path.stat().st_size for path in paths)
    if claimed > DEFAULT.most(stored):
        raise DamagedInput(str(where), "claims many times more rows than its size allows")
    return plan


def _depth(dtype: object) -> int:
    """The levels of lists and arrays around the values of a type."""
    depth = 0
    while isinstance(dtype, pl.List | pl.Array):
        dtype, depth = dtype.inner, depth + 1
    return depth
