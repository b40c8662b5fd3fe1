"""The parts of one process's recording, whichever of them can be read.

A recording is a folder with ``recording.json`` and, for each table, parts ``<table>-NNNNNN.arrow`` that
are each complete (Arrow IPC files). A process that was killed leaves fewer of them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DESCRIPTION", "FORMAT", "SCHEMAS", "Description", "Folder"]

DESCRIPTION = "recording.json"
FORMAT = "thence.recording"
_VERSION = 1
_PART = re.compile(r"([a-z]+)-(\d{6,})\.arrow")

_INT = pl.Int64()
_ACTIVITY = {
    **dict.fromkeys(("start", "end", "device", "stream", "correlation"), _INT),
    "node": pl.UInt64(),
    "graph": _INT,
}
_SIZES = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")
SCHEMAS: dict[str, dict[str, Any]] = {
    "names": {"number": _INT, "name": pl.String(), "demangled": pl.String()},
    "kernels": {
        **_ACTIVITY,
        **dict.fromkeys(("name", "registers", *_SIZES, "static_shared", "dynamic_shared"), _INT),
    },
    "copies": {
        **_ACTIVITY,
        **dict.fromkeys(("bytes", "copy_kind", "source_memory", "destination_memory"), _INT),
    },
    "sets": {**_ACTIVITY, **dict.fromkeys(("bytes", "memory"), _INT)},
    "calls": dict.fromkeys(("start", "end", "thread", "correlation", "function", "api"), _INT),
    "ranges": dict.fromkeys(("flags", "time", "id", "thread", "name", "domain"), _INT),
    "overheads": dict.fromkeys(("overhead_kind", "object_kind", "thread", "start", "end"), _INT),
    "marks": dict.fromkeys(
        ("what", "serial", "forward", "time", "thread", "name", "lane", "metadata"), _INT
    ),
    "collectives": dict.fromkeys(("serial", "sequence"), _INT),
}
"""Columns that are read of each table, and the types they are given. Times are Unix time in ns; name,
function, domain, lane and metadata are numbers of names, 0 for none."""


class _Device(msgspec.Struct):
    device: int
    name: str | None = None
    memory_bytes: int | None = None
    multiprocessors: int | None = None
    compute_capability: str | None = None


class Description(msgspec.Struct):
    """``recording.json``, as far as it is read.

    Attributes:
        format, version: "thence.recording", 1.
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

    format: str = FORMAT
    version: int = _VERSION
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
            match = _PART.fullmatch(file.name)
            if match and match[1] in SCHEMAS and file.is_file():
                self._parts.setdefault(match[1], []).append(file)

    @property
    def bytes(self) -> int:
        """Size of all parts."""
        return sum(file.stat().st_size for parts in self._parts.values() for file in parts)

    def table(self, name: str) -> pl.DataFrame:
        """All rows of a table that can be read, in the order of recording."""
        schema = SCHEMAS[name]
        frames = [self._part(file, schema) for file in self._parts.get(name, ())]
        whole = [frame for frame in frames if frame is not None]
        lost = len(frames) - len(whole)
        if lost:
            self.warnings.append(
                f"{lost} of {len(frames)} parts of the {name} are damaged and left out"
            )
        return pl.concat(whole) if whole else pl.DataFrame(schema=schema)

    def _part(self, file: Path, schema: dict[str, Any]) -> pl.DataFrame | None:
        try:
            frame = pl.read_ipc(file, columns=list(schema))
            return frame.select(pl.col(c).cast(dtype, strict=False) for c, dtype in schema.items())
        except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException):
            return None

    def _description(self) -> Description:
        try:
            content = (self.path / DESCRIPTION).read_bytes()
            found = msgspec.json.decode(content, type=Description)
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            self.warnings.append(
                f"{DESCRIPTION} cannot be read ({error}): rank and facts are unknown"
            )
            return Description()
        if (found.format, found.version) != (FORMAT, _VERSION):
            self.warnings.append(
                f"{DESCRIPTION} says {found.format!r} version {found.version}; {FORMAT} version {_VERSION} "
                "is what this thence reads: update thence if something is missing"
            )
        return found
