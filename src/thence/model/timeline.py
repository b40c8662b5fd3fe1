"""`Timeline`: the trace prepared for viewers by `thence.analysis.timeline`, encoded by writers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

    from thence.model.attributed import Attributed

__all__ = ["Phases", "Timeline"]


@dataclass(frozen=True)
class Phases:
    """What happened inside one launch, on a timeline's clock.

    Attributes:
        title: the kernel's name, numbered where several launches have the same.
        rank, device: where it ran.
        scope: what one trace is, as in `Decoded.scope`.
        ranges: as in `Decoded.ranges`, start_ns on the clock of the timeline; names as text.
    """

    title: str
    rank: int
    device: int
    scope: str
    ranges: pl.DataFrame


@dataclass(frozen=True)
class Timeline:
    """What a viewer shows.

    Attributes:
        trace: attributed, with times on one clock.
        counters: rank, device, counter (of `thence.analysis.timeline.COUNTERS`), time (ns), value
            (Float64): from that time on.
        lanes: by kind of `thence.model.places.LANES`: for each row of gpu the lane that shows
            it again, null for none.
        corrections: ns that were subtracted from all times of a rank, by rank; empty where none were.
        notes: what was done to clocks, and why, as sentences.
        spans: rank, device, track (its name), name, start and duration (ns): tracks of their own on a device, whose
            spans do not overlap.
        inside: what happened inside kernels, launch by launch.
        gpu_views: whether Perfetto's own GPU views get the activities of devices, too; they are in the file twice then.
    """

    trace: Attributed
    counters: pl.DataFrame
    lanes: Mapping[str, pl.Series] = field(default_factory=dict)
    corrections: Mapping[int, int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    inside: Sequence[Phases] = ()
    spans: pl.DataFrame | None = None
    gpu_views: bool = False
