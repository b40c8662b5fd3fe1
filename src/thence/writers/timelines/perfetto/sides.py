"""Two runs in one Perfetto trace: each row of one run is directly below the same row of the other."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.diff.aligned_steps import SIDES
from thence.analysis.timelines.track_packing import nested_sequence, split_lanes
from thence.atomic_files import atomic_open, not_written
from thence.errors import ThenceError
from thence.writers.timelines.perfetto.arguments import columns_as_arguments
from thence.writers.timelines.perfetto.packets import Interned, Slices, packet, slice_packets
from thence.writers.timelines.perfetto.tracks import Process, Tracks
from thence.writers.wire_format import bytes_field, text_field, uint_field

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

    from thence.analysis.diff.aligned_steps import AlignedSteps
    from thence.model.arrays import Int64


_BOOTTIME = 6  # BuiltinClock
_OF_ACTIVITIES = {"label": "label", "module": "module", "op": "op", "source": "source"}
_OF_STEPS = {"moved_ns": "moved by ns"}


def write_sides_file(aligned: AlignedSteps, path: str | os.PathLike[str]) -> None:
    """Writes both sides atomically to a file.

    Raises:
        ThenceError: the file cannot be written.
    """
    try:
        with atomic_open(Path(path)) as stream:
            write_sides(aligned, stream)
    except OSError as error:
        raise ThenceError(not_written(Path(path), error)) from error


def write_sides(aligned: AlignedSteps, stream: IO[bytes]) -> None:
    """Writes both sides as a Perfetto trace.

    Args:
        aligned: the aligned steps of both sides.
        stream: binary stream; not closed.
    """
    tracks, interned = Tracks(), Interned()
    slices = [_steps(aligned, tracks, interned), *_devices(aligned, tracks, interned)]
    for content in _head(aligned, tracks, interned):
        stream.write(content)
    for part in slices:
        for chunk in slice_packets(part):
            stream.write(chunk.data)


def _head(aligned: AlignedSteps, tracks: Tracks, interned: Interned) -> Iterator[bytes]:
    """Yields the packets before the slices: clock, facts, interned data and track descriptors."""
    clock = uint_field(1, _BOOTTIME) + uint_field(2, 0)
    defaults = bytes_field(59, uint_field(58, _BOOTTIME))  # the same fields as in write.py
    clocks = bytes_field(6, bytes_field(1, clock) + uint_field(2, _BOOTTIME))
    yield packet(clocks + defaults + uint_field(87, 1), clears_state=True)
    facts = {
        f"thence.{side}.{number}": name
        for side, inputs in zip(SIDES, aligned.inputs, strict=True)
        for number, name in enumerate(inputs)
    }
    entries = (text_field(1, key) + text_field(3, text) for key, text in facts.items())
    yield packet(bytes_field(126, b"".join(bytes_field(1, entry) for entry in entries)))
    for message in interned.messages():
        yield packet(bytes_field(12, message))
    for track in tracks.all:
        yield packet(bytes_field(60, track.descriptor()))


def _steps(aligned: AlignedSteps, tracks: Tracks, interned: Interned) -> Slices:
    name = "steps, aligned"
    group = tracks.add(name, of=Process(tracks.free_pid(), name))
    uuids = np.array([tracks.add(side, group) for side in SIDES], np.int64)
    frame = aligned.steps.with_columns(kind=pl.lit("step"))
    return _slices(frame, uuids[frame["side"].to_numpy()], interned, _OF_STEPS)


def _devices(aligned: AlignedSteps, tracks: Tracks, interned: Interned) -> Iterable[Slices]:
    """Yields slices; the tracks are a group for each GPU, with a row for each stream and side."""
    for (rank, device), rows in sorted(
        aligned.activities.group_by("rank", "device", maintain_order=True), key=lambda part: part[0]
    ):
        name = f"rank {rank}: GPU {device}"
        group = tracks.add(name, of=Process(tracks.free_pid(), name))
        for (stream,), of_stream in sorted(rows.group_by("stream", maintain_order=True), key=lambda part: str(part[0])):
            for side, title in enumerate(SIDES):
                ours = of_stream.filter(pl.col("side") == side).sort("start", maintain_order=True)
                yield _stream(ours, f"stream {stream}, {title}", (tracks, group), interned)


def _stream(rows: pl.DataFrame, title: str, place: tuple[Tracks, int], interned: Interned) -> Slices:
    """The slices of one side of a stream; slices that overlap without nesting are on several lanes of the row."""
    tracks, group = place
    start = rows["start"].to_numpy()
    lane = split_lanes(np.zeros(len(start), np.int64), start, start + rows["duration"].to_numpy())
    uuids = np.array(tracks.lanes(title, group, int(lane.max(initial=0)) + 1), np.int64)
    return _slices(rows, uuids[lane], interned, _OF_ACTIVITIES)


def _slices(frame: pl.DataFrame, track: Int64, interned: Interned, arguments: dict[str, str]) -> Slices:
    start = frame["start"].to_numpy()
    end = start + frame["duration"].to_numpy()
    return Slices(
        track,
        start,
        end,
        interned.names.column(frame["name"]),
        interned.categories.column(frame["kind"]),
        nested_sequence(track, start, end),
        columns_as_arguments(frame, arguments, interned),
    )
