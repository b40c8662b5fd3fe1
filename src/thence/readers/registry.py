"""Which reader an input goes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thence.errors import InputError, UnknownFormat
from thence.model.tables import Tables, concat
from thence.readers.files import STANDARD_INPUT, Source, expand
from thence.readers.kineto import read as kineto

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

__all__ = ["FORMATS", "Format", "read"]


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of input.

    Attributes:
        name: for people.
        patterns: globs that its files match within a directory.
        sniff: whether a file may be of this format, from its first bytes (decompressed).
        read: the tables of one file.
    """

    name: str
    patterns: tuple[str, ...]
    sniff: Callable[[bytes], bool]
    read: Callable[[Source, Callable[[int], None]], Tables]


FORMATS = (Format(kineto.NAME, kineto.PATTERNS, kineto.sniff, kineto.read),)


def read(
    inputs: Iterable[str | os.PathLike[str]],
    progress: Callable[[str, int, int], None] = lambda _name, _done, _size: None,
) -> Tables:
    """Everything behind the inputs, as one set of tables.

    Args:
        inputs: files, directories, globs, or ``-`` for standard input; one of each rank, for instance.
        progress: called with the file at hand, the bytes of it consumed, and its size (0 if unknown).

    Raises:
        InputError: an input does not exist or cannot be opened.
        UnknownFormat: its content is nothing that thence reads.
        DamagedInput: nothing of its content could be read.
    """
    patterns = tuple(dict.fromkeys(pattern for known in FORMATS for pattern in known.patterns))
    names = [str(name) for name in inputs]
    given = {name for name in names if name != STANDARD_INPUT}
    parts, skipped = [], []
    for name in expand(names, patterns):
        try:
            parts.append(_read_one(name, progress))
        except UnknownFormat:
            if name in given or name == STANDARD_INPUT:
                raise
            skipped.append(name)  # a directory or a glob may hold other files too
    if not parts:
        raise InputError(", ".join(names), f"holds no trace; expected one of: {_expected()}")
    tables = concat(parts)
    return tables.with_warnings(f"{name}: not a trace, skipped" for name in skipped)


def _read_one(name: str, progress: Callable[[str, int, int], None]) -> Tables:
    with Source.open(name) as source:
        head = source.head()
        for known in FORMATS:
            if known.sniff(head):
                return known.read(source, lambda done: progress(name, done, source.stored_bytes))
    if not head:
        raise UnknownFormat(name, source.damage or "is empty")
    raise UnknownFormat(name, f"is no trace that thence reads; expected one of: {_expected()}")


def _expected() -> str:
    return ", ".join(known.name for known in FORMATS)
