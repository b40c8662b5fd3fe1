"""The results that make up a report on one trace; each part is a result or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import polars as pl

    from thence.analysis.collectives.answer import Collectives
    from thence.analysis.explain.answer import Explanation
    from thence.analysis.flame.answer import Flame
    from thence.analysis.idle.answer import IdleTime
    from thence.analysis.memory.answer import Memory
    from thence.analysis.memory.over_time import MemoryOverTime
    from thence.analysis.programs.answer import Programs
    from thence.analysis.programs.compilation import Compilation
    from thence.analysis.ranks.answer import Job
    from thence.analysis.report.headline import Headline
    from thence.analysis.report.summary import Summary, Totals
    from thence.analysis.roofline import Roofline
    from thence.analysis.soundness.findings import Soundness
    from thence.analysis.steps.over_time import StepsOverTime
    from thence.analysis.streams import Streams
    from thence.analysis.timelines.activity_timeline import ActivityTimeline
    from thence.analysis.whatif.answer import WhatIf
    from thence.model.answer import ResultOrReason
    from thence.units import Ns


@dataclass(frozen=True)
class Page:
    """All results of a report. A trace without device activities cannot have a report.

    Attributes:
        headline: the typical step, the verdict, and the rest of the recording.
        whole: totals of the whole trace, or of the selected part.
        summaries: summaries by kind of place (`thence.model.places.BY`); the first is by kernel. Like the flame graph
            and idle, they are of the typical steps, unless the trace has none or a part of it is selected.
        steps: how long each step took.
        job: late ranks; None for one device. With the reasons if any rank is late.
        timeline: every activity and every gap.
        flame: the flame graph.
        streams: streams, groups of kernels, concurrency.
        collectives: bandwidths and waits.
        programs: executions of XLA programs.
        compilation: compile time by phase.
        spread: how much durations of the same computation vary, as
            `thence.analysis.report.duration_spread.duration_spread` returns it.
        idle: why the devices were idle.
        soundness: whether the figures of this trace can be trusted.
        gains: of the changes that gain most.
        roofline: how well the GPU was used, by the default kind of place.
        explanation: the findings.
        shifts: ns that the timeline subtracts from the times of each rank.
        memory: what was live at the peak.
        memory_over_time: the same over time.
        default_kind: the kind of place that is shown first.
        in_full: for a page whose tables are those of few ranks of a job, which ranks these are, as a sentence without a
            period; else empty. Headline, totals, steps, late ranks, soundness and GPU time by `of_all` are of all
            ranks even so.
        of_all: kinds of place whose summaries are of all ranks, if ``in_full`` is not empty.
    """

    headline: Headline
    whole: Totals | Summary
    summaries: Mapping[str, Summary]
    steps: ResultOrReason[StepsOverTime]
    job: ResultOrReason[Job]
    timeline: ActivityTimeline
    flame: Flame
    streams: Streams
    collectives: ResultOrReason[Collectives]
    programs: ResultOrReason[Programs]
    compilation: ResultOrReason[Compilation]
    spread: pl.DataFrame
    idle: ResultOrReason[IdleTime]
    soundness: Soundness
    roofline: ResultOrReason[Roofline]
    gains: ResultOrReason[WhatIf]
    explanation: Explanation
    shifts: Mapping[int, Ns]
    memory: ResultOrReason[Memory]
    memory_over_time: ResultOrReason[MemoryOverTime]
    default_kind: str = "kernel"
    in_full: str = ""
    of_all: tuple[str, ...] = ()

    @property
    def summary(self) -> Summary:
        """GPU time by kernel."""
        return self.summaries["kernel"]

    @property
    def communication_ns(self) -> Ns:
        """Time in which communication ran, summed over devices."""
        return int(self.streams.concurrency.rows["communication_ns"].sum())

    @property
    def exposed_ns(self) -> Ns:
        """Part of communication_ns in which nothing was computed."""
        return self.communication_ns - int(self.streams.concurrency.rows["hidden_ns"].sum())
