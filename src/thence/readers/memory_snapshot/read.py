"""Reads snapshots of PyTorch's memory: the final state of the allocator, its history, and the stacks of both.

The pickle is read to columns (`thence.readers.memory_snapshot.tape`); nothing in it is executed. Its devices are
replayed one by one (`thence.readers.memory_snapshot.replay`). What a version of PyTorch does not write is null: real
snapshots that were read are of torch 2.11, whose events have no pool. Times are those of the host's clock, in
microseconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.errors import DamagedInput, UnknownFormat
from thence.model.losses import Loss
from thence.model.tables import MEMORY, MEMORY_FAILURES, MEMORY_TOTALS, Meta, Tables
from thence.readers.memory_snapshot.frames import labels_of, places_of
from thence.readers.memory_snapshot.replay import (
    ACTIONS,
    NEVER,
    OTHER,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    Blocks,
    Events,
    Lives,
    Segments,
    Settings,
    failures_of,
    lives_of,
)
from thence.readers.memory_snapshot.sniffing import NAME
from thence.readers.memory_snapshot.tape import NOTHING, Tape, read_tape
from thence.units import several

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from thence.readers.source import Source

    Cells = NDArray[np.uint32]
    Int64 = NDArray[np.int64]

ALLOCATOR = "torch"
_MAX_BYTES = 1 << 48
"""Of a block or a segment; addresses of devices have 48 bits or a few more."""
_LATEST_US = 1 << 52  # of Unix times: the year 2112; later ones do not fit into ns
_MIN_BYTES = 20
"""Of an event, a block or a segment in the file: those of PyTorch have 60 or more."""
_MAX_DEVICES = 1024
_SEGMENTS = {"device": pl.Int32(), "address": pl.Int64(), "bytes": pl.Int64()}
_RANK = re.compile(r"rank[_-]?(\d{1,9})(?!\d)", re.IGNORECASE)


def read(source: Source, progress: Callable[[int], None]) -> Tables:
    """The memory of all devices of one process.

    Args:
        progress: called with the number of stored bytes consumed so far.

    Raises:
        DamagedInput: the file is cut, wrong, or a pickle of anything but plain values.
        UnknownFormat: it holds no segments.
    """
    return read_with_segments(source, progress)[0]


def read_with_segments(source: Source, progress: Callable[[int], None]) -> tuple[Tables, pl.DataFrame]:
    """As `read`, with the memory that the allocator itself ever asked of CUDA, as far as the file shows.

    Returns:
        the tables; and device, address and bytes of segments, or of what was mapped into them.
    """
    reader = _Reader(read_tape(source, progress), source.name)
    return reader.tables(), pl.concat(reader.segments_seen).unique()


@dataclass(frozen=True)
class _Device:
    """The rows of one device, and what was inconsistent in them."""

    memory: pl.DataFrame
    totals: pl.DataFrame
    failures: pl.DataFrame
    lives: Lives


class _Reader:
    """Turns the columns of a snapshot into tables."""

    def __init__(self, tape: Tape, name: str) -> None:
        self.tape, self.name = tape, name
        root = np.array([tape.root], np.uint32)
        segments = tape.field(root, "segments")
        if segments[0] == NOTHING:
            raise UnknownFormat(name, "holds no segments of PyTorch's memory")
        self.segments = self._listed(segments)
        self.traces = tape.elements(tape.field(root, "device_traces")[0])
        self.annotations = tape.elements(tape.field(root, "external_annotations")[0])
        self.segments_seen = [pl.DataFrame(schema=_SEGMENTS)]
        self.first_us = 0
        self.settings = self._settings(tape.field(root, "allocator_settings"))
        match = _RANK.search(Path(name).name)
        self.rank, self.ranked = (int(match[1]), True) if match else (0, False)
        if len(self.traces) > _MAX_DEVICES:
            raise DamagedInput(name, "has histories of more than 1,024 devices")

    def tables(self) -> Tables:
        """The tables of all devices."""
        device = self._numbers(self.segments, "device", _MAX_DEVICES, missing=0)
        histories = [self._listed(trace) for trace in self.traces[:, np.newaxis]]
        times = [self._numbers(history, "time_us", _LATEST_US, missing=0) for history in histories]
        self.first_us = first = min((int(time[0]) for time in times if len(time)), default=0)
        count = max(len(histories), int(device.max(initial=-1)) + 1)
        devices = []
        for number in range(count):
            history = histories[number] if number < len(histories) else np.zeros(0, np.uint32)
            time = times[number] if number < len(times) else np.zeros(0, np.int64)
            of_device = self.segments[device == number]
            if len(of_device) or len(history):
                devices.append(self._device(number, of_device, history, (time - first) * 1000))
        if not devices:
            raise UnknownFormat(
                self.name,
                "is a snapshot of PyTorch's memory allocator that holds nothing: take it in the process that uses "
                "the GPU, before it frees its memory",
            )
        rows = 0
        for place, tables in enumerate(devices):
            devices[place] = _shifted(tables, rows)
            rows += len(tables.totals)
        return Tables(
            memory=_together([tables.memory for tables in devices], MEMORY.empty()),
            memory_totals=_together([tables.totals for tables in devices], MEMORY_TOTALS.empty()),
            memory_failures=_together([tables.failures for tables in devices], MEMORY_FAILURES.empty()),
            meta=self._meta(devices, first),
        )

    def _meta(self, devices: list[_Device], first_us: int) -> Meta:
        missing = sum(device.lives.inconsistent for device in devices)
        inferred = sum(device.lives.inferred for device in devices)
        warnings, losses, notes = [], [], []
        if missing:
            text = (
                f"{self.name}: {several(missing, 'block')} of the history without the event that returned them; they "
                "end where the next block of their address begins, or with the history"
            )
            warnings.append(text)
            losses.append(Loss("dropped", self.name, missing, text))
        if inferred:
            notes.append(
                f"{self.name}: {several(inferred, 'block')} above 1 MiB from before the history, which were returned "
                "in it: their sizes follow from their neighbours, and each may be wrong by up to 1 MiB"
            )
        if not any(len(device.totals) > 1 for device in devices):
            notes.append(
                f"{self.name}: holds no history, only what is live; torch.cuda.memory._record_memory_history() before "
                "the program begins records one"
            )
        return Meta(
            inputs=(self.name,),
            formats=(NAME,),
            epoch_ns=first_us * 1000 or None,
            warnings=tuple(warnings),
            losses=tuple(losses),
            notes=tuple(notes),
            ranks_stated=self.ranked,
        )

    def _settings(self, settings: Cells) -> Settings:
        tape = self.tape
        expandable = bool((tape.field(settings, "expandable_segments") >> 3 == 2)[0])
        unsplit, stated = tape.integers(tape.field(settings, "max_split_size"))
        divisions = tape.field(settings, "roundup_power2_divisions")
        counts = [int(tape.integers(tape.field(divisions, str(1 << power)))[0][0]) for power in range(16)]
        limit = int(unsplit[0])
        return Settings(
            expandable,
            limit if stated[0] and 0 < limit < _MAX_BYTES else None,
            tuple(min(max(count, 0), 1 << 20) for count in counts),
        )

    def _listed(self, lists: Cells) -> Cells:
        """The events, blocks or segments in lists; each is some bytes of the file."""
        if self.tape.counts(lists).sum() > self.tape.bytes // _MIN_BYTES:
            raise DamagedInput(self.name, "repeats its events or blocks")
        return self.tape.all_elements(lists)[0]

    def _numbers(self, dicts: Cells, key: str, limit: int, missing: int | None = None) -> Int64:
        """The integers of a key, which are from 0 to a limit; ``missing`` for dicts without it."""
        cells = self.tape.field(dicts, key)
        values, valid = self.tape.integers(cells)
        if missing is not None:
            values[cells == NOTHING] = missing
            valid |= cells == NOTHING
        if not valid.all() or values.min(initial=0) < 0 or values.max(initial=0) > limit:
            raise DamagedInput(self.name, f"is damaged: {key} is missing somewhere, or no number that it can be")
        return values

    def _streams(self, dicts: Cells) -> pl.Series:
        return _known(*self.tape.integers(self.tape.field(dicts, "stream")))

    def _blocks(self, segments: Cells) -> tuple[Blocks, Cells, Int64]:
        """The blocks of segments that are not free, the dict of each, and the row of its segment."""
        lists = self.tape.field(segments, "blocks")
        dicts, counts = self._listed(lists), self.tape.counts(lists)
        segment = np.repeat(np.arange(len(segments)), counts)
        size = self._numbers(dicts, "size", _MAX_BYTES)
        begins = self._numbers(segments, "address", 1 << 60)
        # Before torch 2.1, blocks have no address: they fill their segment in order.
        first = np.cumsum(counts) - counts
        within = np.cumsum(size) - size
        offset = within - np.repeat(within[np.minimum(first, len(within) - 1)] if len(size) else first, counts)
        stated = self.tape.field(dicts, "address")
        address = np.where(stated == NOTHING, begins[segment] + offset, self.tape.integers(stated)[0])
        requested = self._numbers(dicts, "requested_size", _MAX_BYTES, missing=0)
        state = self._texts(self.tape.field(dicts, "state"))
        free = state == "inactive"
        kept = np.flatnonzero(~free)
        blocks = Blocks(address[kept], size[kept], requested[kept], state[kept] == "active_allocated")
        return blocks, dicts[kept], segment[kept]

    def _texts(self, cells: Cells) -> NDArray[np.object_]:
        """The texts of cells; empty for others."""
        texts = np.array([*self.tape.texts, ""], object)
        return texts[self.tape.text_numbers(cells)]

    def _actions(self, history: Cells) -> Int64:
        numbers = np.array([ACTIONS.get(text, OTHER) for text in self.tape.texts] + [OTHER], np.int64)
        return numbers[self.tape.text_numbers(self.tape.field(history, "action"))]

    def _device(self, device: int, segments: Cells, history: Cells, time: Int64) -> _Device:
        addresses = self.tape.integers(self.tape.field(history, "addr"))[0]
        events = Events(self._actions(history), addresses, self._numbers(history, "size", _MAX_BYTES, missing=0))
        blocks, block_dicts, block_segment = self._blocks(segments)
        held = Segments(self._numbers(segments, "address", 1 << 60), self._numbers(segments, "total_size", _MAX_BYTES))
        for what in (events.size, blocks.size, held.size):
            if float(what.sum(dtype=np.float64)) > 1 << 62:
                raise DamagedInput(self.name, "is damaged: its sizes add up to more than any device has")
        of_segments = events.action == SEGMENT_ALLOC
        seen = {
            "device": device,
            "address": np.concatenate([held.address, events.address[of_segments]]),
            "bytes": np.concatenate([held.size, events.size[of_segments]]),
        }
        self.segments_seen.append(pl.DataFrame(seen, schema=_SEGMENTS))
        lives = lives_of(events, blocks, held, self.settings)
        totals, row_of_event = self._totals(device, events, lives, held, time)
        order = np.lexsort((lives.address, np.where(lives.opened == NEVER, -1, lives.opened)))
        lives = lives.rows(order)
        from_event, in_state = lives.opened != NEVER, lives.block != NEVER
        allocated, stated = np.zeros((2, len(order)), np.uint32)  # dicts with the stack, and with stream and pool
        allocated[in_state] = block_dicts[lives.block[in_state]]
        allocated[from_event] = history[lives.opened[from_event]]
        returned = lives.closed != NEVER
        stated[returned] = history[lives.closed[returned]]
        stated[in_state] = segments[block_segment[lives.block[in_state]]]
        stated[from_event] = history[lives.opened[from_event]]
        # Before torch 2.12, events have no pool: it is that of the segment, if that is still there.
        pool = self.tape.field(stated, "pool_id")
        around = self.tape.field(_containing(segments, held, lives.address), "segment_pool_id")
        memory = {
            "rank": np.full(len(order), self.rank, np.int32),
            "device": np.full(len(order), device, np.int32),
            "start": _at_events(time, lives.opened),
            "end": _at_events(time, lives.closed),
            "opened": _at_events(row_of_event, lives.opened),
            "closed": _at_events(row_of_event, lives.closed),
            "address": lives.address.astype(np.uint64),
            "bytes": lives.size,
            "requested": lives.requested,
            "stream": self._streams(stated),
            "pool": self._pools(np.where(pool == NOTHING, around, pool)),
            "allocator": pl.Series([ALLOCATOR], dtype=pl.Categorical()).new_from_index(0, len(order)),
            "label": self._labels(device, allocated, time, lives.opened),
            **places_of(self.tape, allocated, self.name),
        }
        failures = self._failures(device, events, history, lives, held, totals, row_of_event, time)
        return _Device(MEMORY.frame(memory), totals, failures, lives)

    def _labels(self, device: int, dicts: Cells, time: Int64, events: Int64) -> pl.Series:
        """Labels of events, or of blocks (`NEVER`), which have no time."""
        happened = events != NEVER
        times_us = np.zeros(len(events), np.int64)
        times_us[happened] = time[events[happened]] // 1000 + self.first_us
        return labels_of(self.tape, dicts, times_us, device, self.annotations, happened)

    def _pools(self, cells: Cells) -> pl.Series:
        """Names of private pools; null for the default pool, and where it is not stated."""
        distinct, number = np.unique(cells, return_inverse=True)
        elements, counts = self.tape.all_elements(distinct)
        values = self.tape.integers(elements)[0]
        first = np.cumsum(counts) - counts
        names: list[str | None] = [None] * len(distinct)
        for place in np.flatnonzero(counts == 2).tolist():
            pair = int(values[first[place]]), int(values[first[place] + 1])
            names[place] = None if pair == (0, 0) else str(pair)
        return pl.Series(names, dtype=pl.String).cast(pl.Categorical()).gather(number)

    def _totals(
        self, device: int, events: Events, lives: Lives, held: Segments, time: Int64
    ) -> tuple[pl.DataFrame, Int64]:
        """The table of what was handed out and reserved, and its row for each event."""
        count = len(events.action)
        handed = np.zeros(count, np.int64)
        np.add.at(handed, lives.opened[lives.opened != NEVER], lives.size[lives.opened != NEVER])
        np.subtract.at(handed, lives.closed[lives.closed != NEVER], lives.size[lives.closed != NEVER])
        got = np.where(events.action == SEGMENT_ALLOC, events.size, 0)
        got = np.where(events.action == SEGMENT_FREE, -events.size, got)
        at_first = int(lives.size[lives.opened == NEVER].sum())
        reserved_first = int(held.size.sum()) - int(got.sum())
        changes = np.zeros(count, np.bool_)
        changes[lives.opened[lives.opened != NEVER]] = True
        changes[lives.closed[lives.closed != NEVER]] = True
        changes |= got != 0
        # A reading before any change comes first.
        allocated = np.concatenate(([at_first], at_first + np.cumsum(handed)[changes]))
        reserved = np.concatenate(([reserved_first], reserved_first + np.cumsum(got)[changes]))
        begin = time[:1] if count else np.zeros(1, np.int64)
        totals = {
            "rank": np.full(len(allocated), self.rank, np.int32),
            "device": np.full(len(allocated), device, np.int32),
            "allocator": pl.Series([ALLOCATOR], dtype=pl.Categorical()).new_from_index(0, len(allocated)),
            "start": np.concatenate((begin, time[changes])),
            "allocated": allocated,
            "reserved": reserved,
            "inactive": reserved - allocated,
        }
        return MEMORY_TOTALS.frame(totals), np.cumsum(changes)

    def _failures(
        self,
        device: int,
        events: Events,
        history: Cells,
        lives: Lives,
        held: Segments,
        totals: pl.DataFrame,
        row_of_event: Int64,
        time: Int64,
    ) -> pl.DataFrame:
        failures = failures_of(events, lives, held, self.settings)
        rows = np.array([failure.event for failure in failures], np.int64)
        dicts = history[rows]
        after = row_of_event[rows]
        columns = {
            "rank": np.full(len(rows), self.rank, np.int32),
            "device": np.full(len(rows), device, np.int32),
            "start": time[rows],
            "after": after,
            "bytes": events.size[rows],
            "allocated": totals["allocated"].gather(after),
            "reserved": totals["reserved"].gather(after),
            "device_free": _known(*self.tape.integers(self.tape.field(dicts, "device_free"))),
            "largest_inactive": pl.Series([failure.largest_inactive for failure in failures], dtype=pl.Int64),
            "stream": self._streams(dicts),
            "allocator": pl.Series([ALLOCATOR] * len(rows), dtype=pl.Categorical()),
            "label": self._labels(device, dicts, time, rows),
            **places_of(self.tape, dicts, self.name),
        }
        return MEMORY_FAILURES.frame(columns)


def _containing(dicts: Cells, segments: Segments, addresses: Int64) -> Cells:
    """The dict of the segment around each address; `NOTHING` for none."""
    order = np.argsort(segments.address, kind="stable")
    begins, ends = segments.address[order], (segments.address + segments.size)[order]
    place = np.searchsorted(begins, addresses, "right") - 1
    inside = place >= 0
    inside[inside] = addresses[inside] < ends[place[inside]]
    segment = np.full(len(addresses), NOTHING)
    segment[inside] = dicts[order[place[inside]]]
    return segment


def _at_events(values: Int64, events: Int64) -> pl.Series:
    """The values of events; null for `NEVER`."""
    happened = events != NEVER
    at_events = np.zeros(len(events), np.int64)
    at_events[happened] = values[events[happened]]
    return _known(at_events, happened)


def _known(values: Int64, known: NDArray[np.bool_]) -> pl.Series:
    """The values where they are known, null elsewhere."""
    return pl.Series(values).zip_with(pl.Series(known), pl.Series([None], dtype=pl.Int64))


def _shifted(device: _Device, rows: int) -> _Device:
    """The rows of a device, whose references count from the first row of all devices."""
    if not rows:
        return device
    memory = device.memory.with_columns(pl.col("opened", "closed") + rows)
    failures = device.failures.with_columns(pl.col("after") + rows)
    return _Device(memory, device.totals, failures, device.lives)


def _together(frames: list[pl.DataFrame], nothing: pl.DataFrame) -> pl.DataFrame:
    return pl.concat(frames, rechunk=True) if frames else nothing
