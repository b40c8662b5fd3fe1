"""The tables of one process's recording, read from those of its part files that are intact.

`thence.model.formats` says what a recording is. A process that was killed leaves fewer parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from thence.model.formats import DESCRIPTION, LACKING, PART, RECORDING, RECORDING_VERSION, TABLES

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SCHEMAS", "Description", "Folder"]

_VERSIONS = range(1, RECORDING_VERSION + 1)


SCHEMAS: dict[str, dict[str, Any]] = {
    table: {name: getattr(pl, dtype)() for name, dtype in columns.items()}
    for table, columns in TABLES.items()
}


"""Columns that are read of each table, and the types they are given."""


class _Device(msgspec.Struct):
    device: int
    name: str | None = None
    memory_bytes: int | None = None
    multiprocessors: int | None = None
    compute_capability: str | None = None


class Description(msgspec.Struct):
    """`DESCRIPTION`, as far as it is read.

    Attributes:
        format, version: of the recording.
        rank, pid, host: which process.
        began_ns, stopped_ns: Unix time in ns.
        finished: whether the process came to the end of its recording.
        counts, lost: rows on disk, and rows that could not be written, by table.
        dropped: records that CUPTI had no room for.
        unknown_kinds: records passed over, by CUPTI's number of their kind.
        warnings: what went wrong while recording.
        devices: GPUs of the process.
        threads: names of its threads by their ids.
    """

    format: str = RECORDING
    version: int = RECORDING_VERSION
    rank: int | None = None
    pid: int = 0
    host: str | None = None
    program: str | None = None
    began_ns: int | None = None
    stopped_ns: int | None = None
    finished: bool = False
    counts: dict[str, int] = {}
    lost: dict[str, int] = {}
    dropped: int = 0
    unknown_kinds: dict[str, int] = {}
    warnings: list[str] = []
    devices: list[_Device] = []
    thence: str | None = None
    python: str | None = None
    driver_cuda: str | None = None
    threads: dict[str, str] = {}
    versions: dict[str, str] = {}
    xla_flags: str | None = None


class Folder:
    """One process's recording.

    Attributes:
        path: of the folder.
        description: of the process; a bare one where the file cannot be read.
        warnings: what could not be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []
        self.description = self._description()
        self._parts: dict[str, list[Path]] = {}
        for file in sorted(path.iterdir(), key=lambda p: (len(p.name), p.name)):
            match = PART.fullmatch(file.name)
            if match and match[1] in SCHEMAS and file.is_file():
                self._parts.setdefault(match[1], []).append(file)

    @property
    def bytes(self) -> int:
        """Size of all parts."""
        return sum(file.stat().st_size for parts in self._parts.values() for file in parts)

    def table(self, name: str) -> pl.DataFrame:
        """All rows of a table that can be read, in the order of recording."""
        schema = SCHEMAS[name]
        optional = LACKING.get(name, frozenset())
        frames = [self._part(file, schema, optional) for file in self._parts.get(name, ())]
        whole = [frame for frame in frames if frame is not None]
        lost = len(frames) - len(whole)
        if lost:
            self.warnings.append(
                f"{lost} of {len(frames)} parts of the {name} are damaged and left out"
            )
        return pl.concat(whole) if whole else pl.DataFrame(schema=schema)

    def _part(
        self, file: Path, schema: dict[str, Any], optional: frozenset[str]
    ) -> pl.DataFrame | None:
        try:
            lacking = optional - pl.read_ipc_schema(file).keys() if optional else optional
            frame = pl.read_ipc(file, columns=[name for name in schema if name not in lacking])
            frame = frame.with_columns(pl.lit(None).alias(name) for name in sorted(lacking))
            return frame.select(pl.col(c).cast(dtype, strict=False) for c, dtype in schema.items())
        except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException):
            return None

    def _description(self) -> Description:
        try:
            content = (self.path / DESCRIPTION).read_bytes()
            description = msgspec.json.decode(content, type=Description)
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            self.warnings.append(
                f"{DESCRIPTION} cannot be read ({error}): rank and facts are unknown"
            )
            return Description()
        if description.format != RECORDING or description.version not in _VERSIONS:
            self.warnings.append(
                f"{DESCRIPTION} says {description.format!r} version {description.version}; {RECORDING} versions "
                f"{_VERSIONS[0]} to {_VERSIONS[-1]} are what this thence reads: update thence if something is missing"
            )
        return description
