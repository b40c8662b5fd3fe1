"""Tracks of in-kernel ranges: a group for each launch, with nested groups for its SMs, their blocks and traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.timelines.track_packing import nested_sequence, split_lanes
from thence.writers.timelines.perfetto.arguments import inside_arguments
from thence.writers.timelines.perfetto.packets import Slices
from thence.writers.timelines.perfetto.tracks import Process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from thence.model.arrays import Int64
    from thence.model.timeline import Phases
    from thence.writers.timelines.perfetto.interning import Interned
    from thence.writers.timelines.perfetto.tracks import Tracks

    GroupOf = Callable[[Phases], int]

_CATEGORY = "in kernel"


def device_groups(tracks: Tracks, devices: dict[tuple[int, int], int]) -> GroupOf:
    """A function that returns the track of a launch's device, and adds it if the trace lacks the device."""

    def group(phases: Phases) -> int:
        key = phases.rank, phases.device
        if key not in devices:
            name = f"GPU {phases.device}"
            devices[key] = tracks.add(name, of=Process(tracks.free_pid(), name))
        return devices[key]

    return group


def add_inside(
    tracks: Tracks, interned: Interned, inside: Sequence[Phases], group_of: GroupOf, origin_ns: int
) -> list[Slices]:
    """Adds the tracks of all launches.

    Args:
        tracks: tracks of the file.
        interned: interned texts of the file.
        inside: in-kernel ranges of each launch.
        group_of: returns the parent track of a launch.
        origin_ns: ns to subtract from every time.

    Returns:
        The slices of each launch.
    """
    return [_launch(tracks, interned, phases, group_of(phases), origin_ns) for phases in inside]


def _launch(tracks: Tracks, interned: Interned, phases: Phases, device: int, origin_ns: int) -> Slices:
    ranges = phases.ranges
    keys = ranges.select("sm", "block", "index")
    distinct = keys.unique().sort("sm", "block", "index", nulls_last=True)
    numbers = keys.join(
        distinct.with_row_index("number"),
        on=["sm", "block", "index"], how="left", nulls_equal=True, maintain_order="left",
    )["number"].cast(pl.Int64).to_numpy()  # fmt: skip
    start = ranges["start_ns"].to_numpy() - origin_ns
    end = start + ranges["duration_ns"].to_numpy()
    lane = split_lanes(numbers, start, end)
    most = np.zeros(distinct.height, np.int64)
    np.maximum.at(most, numbers, lane + 1)
    uuids = _tracks(tracks, phases, device, distinct.rows(), most)
    first = np.cumsum(most) - most
    track = uuids[first[numbers] + lane] if len(numbers) else numbers
    return Slices(
        track,
        start,
        end,
        interned.names.column(ranges["name"]),
        np.full(len(track), interned.categories.of(_CATEGORY)),
        nested_sequence(track, start, end),
        inside_arguments(ranges, interned),
    )


def _tracks(tracks: Tracks, phases: Phases, device: int, keys: Sequence[tuple[Any, ...]], lanes: Int64) -> Int64:
    """Adds the tracks of the traces under the tracks of their SMs and blocks; returns the uuids of all lanes."""
    root = tracks.add(f"inside {phases.title}", device)
    uuids: list[int] = []
    last_sm: object = tracks  # a value that no key has; None would be an unknown SM
    last_block: object = tracks
    of_sm = of_block = root
    for (sm, block, index), count in zip(keys, lanes.tolist(), strict=True):
        if sm != last_sm:
            of_sm = tracks.add("SM unknown" if sm is None else f"SM {sm}", root)
            last_sm, last_block = sm, tracks
        if block != last_block:
            of_block = tracks.add(f"block {block}", of_sm)
            last_block = block
        uuids += tracks.lanes(f"{phases.scope} {index}", of_block, count)
    return np.array(uuids, np.int64)
