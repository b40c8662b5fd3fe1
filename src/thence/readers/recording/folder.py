"""The tables of one process's recording, read from those of its part files that are intact.

`thence.model.formats` defines the format. Damaged parts are left out. For these, and for parts that are missing by
their numbers and by the counts in `DESCRIPTION`, a warning states how many rows were lost.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import polars as pl

from thence.model.column_file import DamagedPart, decode, decoded_bytes
from thence.model.formats import DESCRIPTION, LACKING, OLD_PART_ENDING, PART, RECORDING, RECORDING_VERSION, TABLES
from thence.model.json_fields import Count, JsonInt64, NotAsWritten, Rank, decoded
from thence.model.losses import Loss
from thence.readers.expansion import DEFAULT, Expansion
from thence.readers.parquet_probe import unreadable
from thence.units import listed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from thence.model.arrays import Array
    from thence.units import Bytes


_VERSIONS = range(1, RECORDING_VERSION + 1)
_MAX_PARTS = 1_000_000
"""More than a recorder ever writes; if a description claims more, missing parts are not searched for."""
_LISTED = 5
"""Most part numbers that a warning lists."""


SCHEMAS: dict[str, dict[str, Any]] = {
    table: {name: getattr(pl, dtype)() for name, dtype in columns.items()} for table, columns in TABLES.items()
}


"""Columns that are read of each table, and the types that they are cast to."""


def _frame(columns: Mapping[str, Array | list[str | None]]) -> pl.DataFrame:
    return pl.DataFrame(
        [
            pl.Series(name, values) if isinstance(values, np.ndarray) else pl.Series(name, values, pl.String)
            for name, values in columns.items()
        ]
    )


class _Device(msgspec.Struct):
    device: Rank
    name: str | None = None
    memory_bytes: Count | None = None
    multiprocessors: Count | None = None
    compute_capability: str | None = None


class _Ring(msgspec.Struct):
    """What was deleted of a recording whose steps were sampled (`thence.capture.recorder.parts`)."""

    windows: Count = 0
    asked: Count = 0
    rows: dict[str, Count] = {}
    parts: dict[str, list[Count]] = {}


class _Request(msgspec.Struct):
    """Why a window was recorded out of turn, and its first step."""

    step: Count = 0
    why: str = ""


class _Sampling(msgspec.Struct):
    """How steps were sampled (`thence.capture.session.step_plans`)."""

    every: Count = 0
    steps: Count = 0
    interval: Count = 0
    windows: Count = 0
    requests: list[_Request] = []
    requested: Count = 0
    cost_share: float | None = None


class _Clocks(msgspec.Struct):
    device: Rank
    times_ns: list[Count] = []
    mhz: list[Count] = []


class _Window(msgspec.Struct):
    """A time in which the counters of a device were sampled, ns; whether the hardware's buffer was too small."""

    device: Rank = 0
    start: Count = 0
    end: Count = 0
    samples: Count = 0
    overflow: bool = False


class _Counters(msgspec.Struct):
    interval_ns: Count | None = None
    left_out: dict[str, str] = {}
    windows: list[_Window] = []
    trouble: str | None = None


class _Stalls(msgspec.Struct):
    """Sums over the contexts of the process; `thence.capture.recorder.stalls` describes them."""

    period_cycles: Count = 0
    samples: Count = 0
    unplaced: Count = 0
    dropped: Count = 0
    overflows: Count = 0
    missed: Count = 0
    ended: Count = 0
    unseen: Count = 0
    unlooked: Count = 0
    left_out: Count = 0
    trouble: str | None = None


class _ProcessMemory(msgspec.Struct):
    device: Rank
    times_ns: list[Count] = []
    bytes: list[Count] = []


class Description(msgspec.Struct):
    """The fields of `DESCRIPTION` that are read.

    Attributes:
        format, version: of the recording.
        rank, pid, host: of the process.
        began_ns, stopped_ns: Unix time in ns.
        finished: whether the process finished its recording.
        counts, lost: rows on disk, and rows that could not be written, by table.
        parts: number of parts written, by table; empty before version 3.
        written_ns: Unix time in ns at which this description was written.
        flush_seconds: longest time between two rounds of parts when this was written; None where records are
            written only when a buffer of them is full.
        dropped: number of records that CUPTI dropped for lack of a buffer.
        unknown_kinds: number of records that were skipped, by CUPTI's number of their kind.
        warnings: warnings of the recorder.
        devices: GPUs of the process.
        threads: names of its threads by their ids.
        calls: which calls the table calls holds, with begin and end: "waits" (calls that wait and those of events) and
            "launches"; None if an older recorder wrote it, which did not say.
        plain_steps: ``trouble``, why no steps were left unrecorded, or not all that should have been; ``since_ns``, the
            start of the first step (Unix ns) of the kind of the last ones: those before do not count.
        sampling, ring: of recordings that sample steps: how, and what was deleted since; else None.
        clocks: samples of the clock of each device's multiprocessors: Unix times in ns, and MHz.
        counters: how hardware counters were sampled, which of them could not be, and why there are none; None where
            nobody asked for them.
        stalls: how many samples of program counters there are, and are missing; None where nobody asked for them.
        process_memory: samples of what the process held of each device's memory: Unix times in ns, and bytes.
    """

    format: str = RECORDING
    version: JsonInt64 = RECORDING_VERSION
    rank: Rank | None = None
    pid: Count = 0
    host: str | None = None
    program: str | None = None
    began_ns: Count | None = None
    stopped_ns: Count | None = None
    finished: bool = False
    counts: dict[str, Count] = {}
    lost: dict[str, Count] = {}
    parts: dict[str, Count] = {}
    written_ns: Count | None = None
    flush_seconds: float | None = None
    dropped: Count = 0
    unknown_kinds: dict[str, Count] = {}
    warnings: list[str] = []
    devices: list[_Device] = []
    thence: str | None = None
    python: str | None = None
    driver_cuda: str | None = None
    threads: dict[str, str] = {}
    calls: list[str] | None = None
    versions: dict[str, str] = {}
    xla_flags: str | None = None
    plain_steps: dict[str, str | Count | None] = {}
    sampling: _Sampling | None = None
    ring: _Ring | None = None
    clocks: list[_Clocks] = []
    counters: _Counters | None = None
    stalls: _Stalls | None = None
    process_memory: list[_ProcessMemory] = []


class Folder:
    """One process's recording.

    Attributes:
        path: of the folder.
        expansion: how much larger than their stored size its tables may be.
        description: of the process; a default one where the file cannot be read.
        warnings: sentences about what could not be read.
        losses: the warnings about missing data, as losses.
    """

    def __init__(self, path: Path, expansion: Expansion = DEFAULT) -> None:
        self.path = path
        self.expansion = expansion
        self.warnings: list[str] = []
        self.losses: list[Loss] = []
        self.description = self._description()
        self._parts: dict[str, dict[int, Path]] = {}
        for file in path.iterdir():
            match = PART.fullmatch(file.name)
            if match and match[1] in SCHEMAS and file.is_file():
                self._parts.setdefault(match[1], {})[int(match[2])] = file
        self._decoded: dict[Path, Bytes] = {}

    @cached_property
    def bytes(self) -> int:
        """Size of all parts."""
        size = 0
        for file in (file for parts in self._parts.values() for file in parts.values()):
            with suppress(FileNotFoundError):  # deleted meanwhile: `_part` finds that it cannot be read
                size += file.stat().st_size
        return size

    @cached_property
    def _unreadable(self) -> set[Path]:
        """The Arrow files of old recordings that would crash the process that reads them."""
        files = [file for parts in self._parts.values() for file in parts.values()]
        return unreadable([f for f in files if f.suffix == OLD_PART_ENDING], self.expansion)

    def _part(self, file: Path, table: str) -> pl.DataFrame | None:
        """The rows of one part; None if it is damaged.

        Raises:
            TooLarge: the parts read so far hold more than their size allows.
        """
        schema = SCHEMAS[table]
        lacking = LACKING.get(table, frozenset())
        try:
            frame = self._arrow(file) if file.suffix == OLD_PART_ENDING else self._columns(file)
            frame = frame.with_columns(pl.lit(None).alias(name) for name in sorted(lacking - set(frame.columns)))
            return frame.select(pl.col(c).cast(dtype, strict=False) for c, dtype in schema.items())
        except (OSError, DamagedPart, pl.exceptions.PolarsError, pl.exceptions.PanicException):
            return None

    def _arrow(self, file: Path) -> pl.DataFrame:
        if file in self._unreadable:
            raise DamagedPart("it crashes the process that reads it")
        with file.open("rb") as stream:  # given a path, Polars would expand glob patterns in it
            return pl.read_ipc(stream)

    def _columns(self, file: Path) -> pl.DataFrame:
        content = file.read_bytes()
        self._decoded[file] = decoded_bytes(content)
        self.expansion.check(str(self.path), self.bytes, sum(self._decoded.values()), file.name)
        return _frame(decode(content))

    def lose(self, code: str, count: int, text: str) -> None:
        """Adds a warning, which users see, and a loss, which the check of the trace uses.

        Args:
            code: of `thence.model.losses.LOSSES`.
            count: number of records or parts that are missing.
            text: one sentence.
        """
        self.warnings.append(text)
        self.losses.append(Loss(code, str(self.path), count, f"{self.path.name}: {text}"))

    def table(self, name: str) -> pl.DataFrame:
        """All rows of a table that can be read, in the order of recording; a number that no device has is null."""
        schema = SCHEMAS[name]
        parts = self._parts.get(name, {})
        frames = {number: self._part(parts[number], name) for number in sorted(parts)}
        intact = [frame for frame in frames.values() if frame is not None]
        table = pl.concat(intact) if intact else pl.DataFrame(schema=schema)
        self._check(name, [number for number, frame in frames.items() if frame is None], table.height)
        if "device" in schema:
            possible = pl.col("device").cast(pl.Int32(), strict=False)  # other tables have this type
            table = table.with_columns(possible.cast(schema["device"]))
        return table

    def _check(self, name: str, damaged: list[int], rows: int) -> None:
        """Notes a loss if parts of a table are damaged or missing, with the number of rows lost."""
        numbers = self._parts.get(name, {})
        written = max(self.description.parts.get(name, 0), max(numbers, default=0))
        missing = [] if written > _MAX_PARTS else self._missing(name, written)
        if not damaged and not missing:
            return
        lost = self.description.counts.get(name, 0) - rows
        what = ", ".join(
            f"part{'' if len(numbers) == 1 else 's'} {listed(numbers, _LISTED)} "
            f"{'is' if len(numbers) == 1 else 'are'} {state}"
            for numbers, state in ((damaged, "damaged"), (missing, "missing"))
            if numbers
        )
        how_many = f"; rows lost: {lost:,} of {rows + lost:,}" if lost > 0 else ""
        text = f"table {name}: {what}{how_many}"
        self.lose("unreadable", lost if lost > 0 else len(damaged) + len(missing), text)

    def _missing(self, name: str, written: int) -> list[int]:
        """Numbers of the parts of a table that are not there, though the recorder did not delete them."""
        ring = self.description.ring
        runs = [] if ring is None else ring.parts.get(name, [])
        bounds = np.clip(np.array(runs[: len(runs) // 2 * 2], np.uint64), 0, written + 1).astype(np.int64)
        change = np.zeros(written + 3, np.int64)
        np.add.at(change, bounds[::2], 1)
        np.add.at(change, bounds[1::2] + 1, -1)
        exists = np.cumsum(change) > 0
        exists[np.fromiter(self._parts.get(name, {}), np.int64)] = True
        return [int(number) for number in np.flatnonzero(~exists[: written + 1]) if number > 0]

    def _description(self) -> Description:
        try:
            content = (self.path / DESCRIPTION).read_bytes()
            description = decoded(content, Description)
        except (OSError, NotAsWritten) as error:
            self.warnings.append(f"{DESCRIPTION} cannot be read ({error}): rank and facts are unknown")
            return Description()
        if description.format != RECORDING or description.version not in _VERSIONS:
            self.warnings.append(
                f"{DESCRIPTION} states the format {description.format!r}, version {description.version}; this thence "
                f"reads {RECORDING}, versions {_VERSIONS[0]} to {_VERSIONS[-1]}: update thence if something is missing"
            )
        return description
