"""`Timeline`: the trace prepared for viewers by `thence.analysis.timelines.timeline`, encoded by writers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

    from thence.model.attributed import Attributed

__all__ = ["JobRows", "Phases", "Timeline"]


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
class JobRows:
    """All ranks of a job in few rows, beside those that a timeline shows in full.

    Attributes:
        title: of the group of rows above everything else.
        folded_title: of the group of the other ranks, below everything else.
        rows: rank, device, track (its name), folded (whether it is one of the other ranks), step, name, start and
            duration (ns), and step_ns, compute_ns, wait_ns (exposed), caused_ns: one row per device and step, sorted
            by folded, rank, device and start.
        counters: counter, time (ns), value (ms) of the whole job.
        spans: track, name, start, duration (ns) and detail (text): who is late.
    """

    title: str
    folded_title: str
    rows: pl.DataFrame
    counters: pl.DataFrame
    spans: pl.DataFrame


@dataclass(frozen=True)
class Timeline:
    """What a viewer shows.

    Attributes:
        trace: attributed, with times on one clock.
        counters: rank, device, counter (of `thence.analysis.timelines.timeline.COUNTERS`), time (ns), value
            (Float64): from that time on.
        lanes: by kind of `thence.model.places.LANES`: for each row of gpu the lane that shows
            it again, null for none.
        corrections: ns that were subtracted from all times of a rank, by rank; empty where none were.
        notes: what was done to clocks, and why, as sentences.
        spans: rank, device, track (its name), name, start and duration (ns): tracks of their own on a device, whose
            spans do not overlap.
        inside: what happened inside kernels, launch by launch.
        gpu_views: whether Perfetto's own GPU views get the activities of devices, too; they are in the file twice then.
        job: all ranks of the job that the trace is a part of.
    """

    trace: Attributed
    counters: pl.DataFrame
    lanes: Mapping[str, pl.Series] = field(default_factory=dict)
    corrections: Mapping[int, int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    inside: Sequence[Phases] = ()
    spans: pl.DataFrame | None = None
    gpu_views: bool = False
    job: JobRows | None = None
