"""Base class of `Trace` with the methods that explain its time and predict the gain of changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, cast

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.analysis.collectives.clock_sync import Alignment
    from thence.analysis.collectives.communication import Collectives
    from thence.analysis.collectives.instances import Instances
    from thence.analysis.glance import Glance
    from thence.analysis.headline import Headline
    from thence.analysis.idle.table import IdleTime
    from thence.analysis.part import Part
    from thence.analysis.ranks.job import Job
    from thence.analysis.soundness.findings import Soundness
    from thence.analysis.steps.table import StepTable
    from thence.analysis.summary import Summary
    from thence.analysis.whatif.graph import Program
    from thence.analysis.whatif.prediction import WhatIf
    from thence.model.attributed import Attributed
    from thence.model.graph_labels import GraphLabels
    from thence.model.places import By


class Explanations(ABC):
    """The overview of a trace, idle time, late ranks, steps, the gain of changes, and the critical path."""

    @property
    @abstractmethod
    def whole(self) -> Attributed:
        """The tables of the whole trace, regardless of the selection, with every device activity attributed."""

    @property
    @abstractmethod
    def attributed(self) -> Attributed:
        """The selected part of `whole`."""

    @property
    @abstractmethod
    def alignment(self) -> Alignment:
        """The offsets between the clocks of the ranks."""

    @property
    @abstractmethod
    def _instances(self) -> Instances:
        """Which kernels of different ranks are part of the same collective."""

    @property
    @abstractmethod
    def _graph_labels(self) -> tuple[GraphLabels, ...]:
        """Labels of captured CUDA graphs."""

    @abstractmethod
    def collective_times(self, warm_up: str = "heuristic", *, late: bool = True) -> Collectives:
        """Sizes, bandwidths, exposed and hidden time, and waits of collectives."""

    @abstractmethod
    def summary(self, by: By = "kernel") -> Summary:
        """Totals, and GPU time by one kind of place."""

    @property
    def default_kind(self) -> By:
        """The kind of place by which `glance` groups GPU time if none is given.

        It is the first of module, label, source and op, and with XLA programs the first of source, op_name and
        these, that covers two thirds of the GPU time, else the one that covers most; kernel if the trace has no
        places of these kinds.
        """
        from thence.analysis.default_kind import default_kind
        from thence.model.places import TABLE_KINDS, TABLE_KINDS_XLA

        kinds = TABLE_KINDS if self.attributed.programs.is_empty() else TABLE_KINDS_XLA
        return cast("By", default_kind(self.attributed, kinds, "kernel"))

    @property
    def tree_kind(self) -> By:
        """The kind of place of a tree if none is given: the first of module, label and op_name, as `default_kind`."""
        from thence.analysis.default_kind import default_kind
        from thence.model.places import TREE_KINDS

        return cast("By", default_kind(self.attributed, TREE_KINDS, TREE_KINDS[0]))

    @property
    @abstractmethod
    def soundness(self) -> Soundness:
        """Whether figures of the whole trace can be trusted."""

    @property
    @abstractmethod
    def all_work(self) -> Explanations:
        """All work of the selected ranks, devices and steps."""

    @property
    @abstractmethod
    def typical(self) -> Explanations:
        """The typical steps of this trace; the trace itself if it has none, or if a part of its work is selected."""

    @cached_property
    def headline(self) -> Headline:
        """The typical step, what limits it, and where the rest of the recording went.

        Of the selection, ranks, devices and steps count: what else is selected does not change how long a step takes.

        Raises:
            MissingData: the trace holds no device activity.
        """
        from thence.analysis.headline import headline
        from thence.analysis.no_device_work import no_device_work

        if self.attributed.gpu.is_empty():
            raise no_device_work(self.attributed)
        if self.all_work is not self:
            return self.all_work.headline
        return headline(self.attributed, self.soundness, self.typical.quick_idle, self._quick_late)

    @property
    def quick_idle(self) -> Part[IdleTime]:
        """Idle time by place, if it can be divided in little time."""
        from thence.analysis.idle.table import why_no_causes
        from thence.analysis.part import Part
        from thence.model.thresholds import MAX_HOST_RANGES

        trace = self.attributed
        unknown = why_no_causes(trace)
        if unknown is not None:
            return Part(None, f"not computed: {unknown}")
        if trace.host.height > MAX_HOST_RANGES:
            return Part(None, "not computed here, to save time; thence idle computes it")
        return Part(self._idle_by_place)

    @property
    def _quick_late(self) -> Part[Job]:
        """Late ranks, if the trace has collectives and they can be found in little time."""
        from thence.analysis.part import Part
        from thence.model.thresholds import MAX_HOST_RANGES

        trace = self.attributed
        if trace.collectives.is_empty() or not trace.selection.of_ranks_and_devices_only:
            return Part(None)
        if trace.host.height > MAX_HOST_RANGES:
            return Part(None, "late ranks: not looked for here, to save time; thence ranks does")
        return Part(self._late_ranks)

    def glance(self, by: By | None = None) -> Glance:
        """An overview: the typical step and the verdict, where the GPU time went, why it was idle, what to ask next.

        Args:
            by: the kind of place that each row of the summary is; None: `default_kind`.

        Raises:
            UsageError: ``by`` is none of `thence.model.places.BY`.
            MissingData: the trace holds no device activity, or nothing of that kind.
        """
        from thence.analysis.glance import glance
        from thence.analysis.next_steps import advice, next_steps
        from thence.analysis.summary import totals_of

        shown = self.typical
        summary = shown.summary(by or shown.default_kind)
        headline = self.headline
        return glance(
            shown.attributed,
            headline,
            summary,
            shown.quick_idle,
            whole=None if shown is self else totals_of(self.attributed),
            next_steps=next_steps(self.attributed, headline, summary, self._replays),
            advice=tuple(advice(self.attributed, summary)),
        )

    def _replays(self) -> bool:
        """Whether `what_if` can replay the trace."""
        from thence.analysis.whatif.health import health, missing_calls
        from thence.model.thresholds import MAX_UNEXPLAINED_SHARE

        if missing_calls(self.whole):
            return False
        return health(self.whole, self._program).unexplained <= MAX_UNEXPLAINED_SHARE

    def idle(self, by: str = "place") -> IdleTime:
        """Why the devices were idle: every idle nanosecond has exactly one cause.

        Args:
            by: what to group the idle time of each cause by: one of `thence.model.questions.IDLE_BY`.

        Raises:
            UsageError: ``by`` has another value.
            MissingData: the trace holds no device activity.
        """
        return self._idle_by_place if by == "place" else self._idle(by)

    @cached_property
    def _idle_by_place(self) -> IdleTime:
        """Cached, because the page of a report, its timeline and its flame graph all need it."""
        return self._idle("place")

    def _idle(self, by: str) -> IdleTime:
        from thence.analysis.consistency_of_answers import consistent_idle
        from thence.analysis.idle.table import idle_time

        found = idle_time(self.attributed, by, self._waited)
        return consistent_idle(found, self.attributed.meta)

    @property
    def ranks(self) -> list[int]:
        """The ranks of the selected part, ascending."""
        return list(self.attributed.ranks)

    def late_ranks(self, *, explain: bool = True) -> Job:
        """Which ranks made the others wait, for how long, since which step, and why.

        Args:
            explain: whether to find the reasons, too, which takes most of the time.

        Raises:
            MissingData: the trace holds no device activity.
        """
        if self.attributed.gpu.is_empty():
            from thence.analysis.no_device_work import no_device_work

            raise no_device_work(self.attributed)
        from thence.analysis.ranks.job import job_of
        from thence.analysis.ranks.summary import summarise_ranks

        return job_of(summarise_ranks(self.attributed, explain=explain), explain=explain)

    @cached_property
    def _late_ranks(self) -> Job | None:
        """Which ranks are late, without the reasons; None if only one device is selected and no rank is missing."""
        from thence.analysis.collectives.missing import ranks_of_job

        alone = self.attributed.gpu.select("rank", "device").n_unique() < 2
        if alone and not ranks_of_job(self.attributed).missing:
            return None
        return self.late_ranks(explain=False)

    def steps(self) -> StepTable:
        """Every step in order of time with its idle time by cause, the spread of step times, and outliers.

        If a part of the trace is selected, these are the steps in which selected work was launched, each as a whole.

        Raises:
            MissingData: the trace holds no steps, or none of the selected ones.
        """
        from thence.analysis.consistency_of_answers import consistent_steps
        from thence.analysis.steps.table import step_table

        found = step_table(self.attributed)
        return consistent_steps(found, self.whole.meta)

    def what_if(
        self,
        free: Sequence[str] = (),
        scale: Sequence[str] = (),
        no_wait: Sequence[str] = (),
        on_time: Sequence[str] = (),
    ) -> WhatIf:
        """Predicts the gain of changes, each on its own, by replaying the recorded program with the change.

        Without any argument, the result holds the ten changes with the largest gain.

        Args:
            free: work that takes no time, such as ``label:attention``, ``collective:all-gather`` or
                ``cause:loader``.
            scale: work that takes this fraction of its time, such as ``kernel:gemm=0.5``.
            no_wait: waiting host calls that return at once: ``item``, ``all``, a kind of wait (``stream``,
                ``event``, ``device``), or a regular expression that matches the place of the call.
            on_time: ranks that no other rank waits for in collectives, such as ``rank:3``.

        Raises:
            UsageError: a change cannot be parsed.
            MissingData: the trace holds no device activity, or explains too little of when activities began.
        """
        from thence.analysis.consistency_of_answers import consistent_what_if
        from thence.analysis.whatif.changes import parse_change
        from thence.analysis.whatif.prediction import what_if

        asked = {"free": free, "scale": scale, "no-wait": no_wait, "on-time": on_time}
        changes = [parse_change(action, text) for action, texts in asked.items() for text in texts]
        found = what_if(self.whole, self._program, changes)
        return consistent_what_if(found, self.whole.meta)

    def critical_path(self) -> pl.DataFrame:
        """The critical path of the recorded program, as consecutive pieces of time that do not overlap.

        `thence.analysis.whatif.critical_path.TILE` describes the columns; start is on the trace's clock.

        Raises:
            MissingData: the trace holds no device activity.
        """
        from thence.analysis.consistency_of_answers import consistent_path
        from thence.analysis.whatif.critical_path import critical_path

        found = critical_path(self.whole, self._program)
        tiles = consistent_path(found, self.whole.meta)
        return tiles.with_columns(start=pl.col("start") + self._program.origin_ns)

    @cached_property
    def _program(self) -> Program:
        """The graph of the whole trace; raises `MissingData` if there is no device activity."""
        from thence.analysis.whatif.graph import program_graph

        return program_graph(self.whole, *self._of_ranks, self._graph_labels)

    @property
    def _of_ranks(self) -> tuple[Alignment | None, Instances | None]:
        """Clock alignment and collective instances of the whole trace; None for both if it has a single rank."""
        if len(self.whole.ranks) < 2:
            return None, None
        from thence.analysis.collectives.clock_sync import align_clocks
        from thence.analysis.collectives.instances import collective_instances

        instances = collective_instances(self.whole)
        return align_clocks(self.whole, instances), instances

    @cached_property
    def _waited(self) -> pl.DataFrame | None:
        """How long kernels of collectives waited for the last rank; None for a single rank or without collectives."""
        if len(self.attributed.ranks) < 2:
            return None
        from thence.analysis.idle.table import waited_in_collectives
        from thence.analysis.part import part

        times = part(lambda: self.collective_times("keep", late=False)).result
        if times is None:
            return None
        return waited_in_collectives(times, self.alignment, self._instances)

    def _spans(self) -> pl.DataFrame:
        """Tracks of spans for timelines: the causes of idle time, and the critical path."""
        from thence.analysis.idle.table import idle_tracks

        return pl.concat([idle_tracks(self.attributed), *self._path_track()])

    def _path_track(self) -> list[pl.DataFrame]:
        """The critical path as one track, in a list.

        The list is empty if a part of the trace is selected, if the trace holds several ranks or no device
        activity, or if too much of its time is unexplained.
        """
        if self.attributed.selection or self.whole.gpu.is_empty() or len(self.whole.ranks) > 1:
            return []
        from thence.analysis.whatif.critical_path import critical_path, path_track
        from thence.analysis.whatif.health import health
        from thence.model.thresholds import MAX_UNEXPLAINED_SHARE

        program = self._program
        if health(self.whole, program).unexplained > MAX_UNEXPLAINED_SHARE:
            return []
        tiles = critical_path(self.whole, program)
        tiles = tiles.with_columns(start=pl.col("start") + program.origin_ns)
        return [path_track(self.whole, tiles)]
