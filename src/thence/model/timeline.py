"""`Timeline`: the trace prepared for viewers by `thence.analysis.timelines.timeline`, encoded by writers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

    from thence.model.attributed import Attributed


@dataclass(frozen=True)
class Phases:
    """The ranges that were recorded inside one kernel launch, on a timeline's clock.

    Attributes:
        title: the kernel's name, numbered if several launches have the same name.
        rank, device: where it ran.
        scope: what one in-kernel trace covers, as in `Decoded.scope`.
        ranges: as in `Decoded.ranges`, start_ns on the clock of the timeline; names as text.
    """

    title: str
    rank: int
    device: int
    scope: str
    ranges: pl.DataFrame


@dataclass(frozen=True)
class JobRows:
    """All ranks of a job in few rows, in addition to the ranks that a timeline shows in full.

    Attributes:
        title: of the group of rows at the top of the timeline.
        folded_title: of the group of the other ranks, at the bottom of the timeline.
        rows: rank, device, track (its name), folded (whether it is one of the other ranks), step, name, start and
            duration (ns), and step_ns, compute_ns, wait_ns (exposed), caused_ns: one row per device and step, sorted
            by folded, rank, device and start.
        counters: counter, time (ns), value (ms) of the whole job.
        spans: track, name, start, duration (ns) and detail (text): which ranks are late.
    """

    title: str
    folded_title: str
    rows: pl.DataFrame
    counters: pl.DataFrame
    spans: pl.DataFrame


@dataclass(frozen=True)
class Timeline:
    """The contents of a timeline for viewers.

    Attributes:
        trace: attributed, with times on one clock.
        counters: rank, device, counter (of `thence.analysis.timelines.timeline.COUNTERS`), time (ns), value
            (Float64), which holds from that time on.
        lanes: by kind of `thence.model.places.LANES`: for each row of gpu the lane that shows
            it again, null for none.
        corrections: ns that were subtracted from all times of a rank, by rank; empty if nothing was.
        notes: what was done to clocks, and why, as sentences.
        spans: rank, device, track (its name), name, start and duration (ns): separate tracks of a device, whose
            spans do not overlap.
        inside: the ranges inside kernels, one entry per launch.
        gpu_views: whether to write device activities a second time, in the form that Perfetto's own GPU views read.
        job: all ranks of the job, if the trace is a part of a folded job.
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
