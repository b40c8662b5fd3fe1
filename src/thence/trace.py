"""`Trace`: the public object with tables, attribution and analyses; a method for each verb of the command line."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import polars as pl

from thence.errors import MissingData, UsageError
from thence.importing import later_modules
from thence.model import thresholds
from thence.model.answer import Answer, Caveats, ResultOrReason, result_or_reason
from thence.model.places import FLAME_KINDS, LANES, TABLE_KINDS, TABLE_KINDS_XLA, TREE_KINDS, page_kinds
from thence.model.selection import SEPARATE, TYPICAL, Selection, parse_steps, parse_window
from thence.parallel import both
from thence.units import several

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from thence.analysis import annotations as annotation_tables
    from thence.analysis import no_device_work, streams
    from thence.analysis import roofline as rooflines
    from thence.analysis import self_check as self_checks
    from thence.analysis import sql as sql_queries
    from thence.analysis import stalls as stall_answers
    from thence.analysis.collectives import answer as communication
    from thence.analysis.collectives import clock_sync, instances, missing
    from thence.analysis.collectives.answer import Collectives
    from thence.analysis.collectives.clock_sync import Alignment
    from thence.analysis.collectives.instances import Instances
    from thence.analysis.cuda_graphs import lanes as graph_lane_tables
    from thence.analysis.cuda_graphs import replayed_graph
    from thence.analysis.cuda_graphs.lanes import GraphLanes
    from thence.analysis.cuda_graphs.replayed_graph import ReplayedGraph
    from thence.analysis.diff import answer as compare
    from thence.analysis.diff import sample as samples
    from thence.analysis.diff.answer import Diff
    from thence.analysis.diff.sample import Sample
    from thence.analysis.explain import answer as explanations
    from thence.analysis.explain import moments
    from thence.analysis.explain.answer import Explanation
    from thence.analysis.flame import answer as flame
    from thence.analysis.flame import stalls as flame_stalls
    from thence.analysis.flame.answer import Flame
    from thence.analysis.grouping import kernel_groups, time_by_place
    from thence.analysis.idle import answer as idle_answer
    from thence.analysis.idle.answer import IdleTime
    from thence.analysis.memory import answer as memory_answer
    from thence.analysis.memory import flame as memory_flames
    from thence.analysis.memory import kinds as memory_kinds
    from thence.analysis.memory import over_time as memory_times
    from thence.analysis.memory import tracks as memory_tracks
    from thence.analysis.memory.answer import Memory
    from thence.analysis.memory.over_time import MemoryOverTime
    from thence.analysis.programs import answer as programs
    from thence.analysis.programs import compilation, warmup
    from thence.analysis.programs.answer import Programs
    from thence.analysis.programs.compilation import Compilation
    from thence.analysis.ranks import answer as ranks_answer
    from thence.analysis.ranks import nodes as rank_nodes
    from thence.analysis.ranks import summary as rank_summaries
    from thence.analysis.ranks.answer import Job
    from thence.analysis.report import duration_spread, headline, next_steps, summary
    from thence.analysis.report import first_screen as first_screens
    from thence.analysis.report import page as pages
    from thence.analysis.report.first_screen import FirstScreen
    from thence.analysis.report.headline import Headline
    from thence.analysis.report.page import Page
    from thence.analysis.report.summary import Summary
    from thence.analysis.roofline import Roofline
    from thence.analysis.selection import select
    from thence.analysis.self_check import SelfCheck
    from thence.analysis.soundness import check
    from thence.analysis.soundness.findings import Soundness
    from thence.analysis.stalls import Stalls
    from thence.analysis.steps import answer as steps_answer
    from thence.analysis.steps import over_time as step_times
    from thence.analysis.steps import windows as step_windows
    from thence.analysis.steps.answer import StepKinds, StepTable
    from thence.analysis.steps.over_time import StepsOverTime
    from thence.analysis.streams import Streams
    from thence.analysis.timelines import activity_timeline
    from thence.analysis.timelines import overview as overviews
    from thence.analysis.timelines import timeline as timelines
    from thence.analysis.timelines.overview import Overview
    from thence.analysis.whatif import answer as whatif_answer
    from thence.analysis.whatif import changes, critical_path, graph, prediction
    from thence.analysis.whatif.answer import WhatIf
    from thence.analysis.whatif.graph import Program
    from thence.attribution import attribute
    from thence.attribution.cuda_graphs import labelling
    from thence.attribution.cuda_graphs.labelling import Coverage
    from thence.model.attributed import Attributed
    from thence.model.peaks import Peaks
    from thence.model.places import By, FlameBy
    from thence.model.tables import Meta, Tables
    from thence.model.timeline import Timeline
    from thence.readers import label_files
    from thence.writers.charts import results as charts
    from thence.writers.charts.chart import Chart
    from thence.writers.flame import chart as flame_charts
    from thence.writers.page import report_page
    from thence.writers.timelines import write as timeline_files
else:
    # A run of the command line needs one or two analyses, and importing all of them takes longer than reading a small
    # trace.
    _LATER = {
        "thence.analysis": "annotations:annotation_tables no_device_work roofline:rooflines self_check:self_checks "
        "sql:sql_queries stalls:stall_answers streams",
        "thence.analysis.collectives": "answer:communication clock_sync instances missing",
        "thence.analysis.cuda_graphs": "lanes:graph_lane_tables replayed_graph",
        "thence.analysis.diff": "answer:compare sample:samples",
        "thence.analysis.explain": "answer:explanations moments",
        "thence.analysis.flame": "answer:flame stalls:flame_stalls",
        "thence.analysis.grouping": "kernel_groups time_by_place",
        "thence.analysis.idle": "answer:idle_answer",
        "thence.analysis.memory": "answer:memory_answer flame:memory_flames kinds:memory_kinds over_time:memory_times "
        "tracks:memory_tracks",
        "thence.analysis.programs": "answer:programs compilation warmup",
        "thence.analysis.ranks": "answer:ranks_answer nodes:rank_nodes summary:rank_summaries",
        "thence.analysis.report": "duration_spread first_screen:first_screens headline next_steps page:pages summary",
        "thence.analysis.selection": "select",
        "thence.analysis.soundness": "check",
        "thence.analysis.steps": "answer:steps_answer over_time:step_times windows:step_windows",
        "thence.analysis.timelines": "activity_timeline overview:overviews timeline:timelines",
        "thence.analysis.whatif": "answer:whatif_answer changes critical_path graph prediction",
        "thence.attribution": "attribute",
        "thence.attribution.cuda_graphs": "labelling",
        "thence.readers": "label_files",
        "thence.writers.charts": "results:charts",
        "thence.writers.flame": "chart:flame_charts",
        "thence.writers.page": "report_page",
        "thence.writers.timelines": "write:timeline_files",
    }
    globals().update(later_modules(_LATER))

_FLAME_FRAMES = 300
"""Frames of the flame graph of a notebook."""
_Answer = TypeVar("_Answer", bound=Answer)
_Choice = TypeVar("_Choice", bound=enum.Enum)


@dataclass(frozen=True)
class Trace:
    """A trace of one or several ranks with attributed GPU time.

    Attributes:
        recorded: Polars frames (see ``thence.model.tables``) as the readers returned them, with labels of CUDA graphs
            joined.
        own: patterns of further files that count as the user's own code, as `thence.open` takes them.
        selection: the part of the trace that the analyses cover.
    """

    recorded: Tables
    own: tuple[str, ...] = ()
    selection: Selection = field(default_factory=Selection)

    @cached_property
    def whole(self) -> Attributed:
        """The tables of the whole trace, regardless of the selection, with every device activity attributed."""
        attributed, _ = both(
            lambda: attribute.attribute(self.recorded, self.own),
            lambda: self._soundness,  # which every answer states
            self._rows_at_once,
        )
        return attributed

    @property
    def _rows_at_once(self) -> int:
        """Host ranges, of which `thence.parallel.both` needs many to compute two things at once."""
        return self.recorded.host.height

    @cached_property
    def tables(self) -> Attributed:
        """The frames of the selected part, attributed (see ``thence.model.attributed``): the input of all analyses."""
        return self_checks.checked_references(select.select(self.whole, self.selection))

    def select(
        self,
        ranks: Sequence[int] = (),
        devices: Sequence[int] = (),
        steps: str | None = None,
        window: str | None = None,
        only: str | None = None,
        warm_up: str = SEPARATE,
        program: str | None = None,
    ) -> Trace:
        """The part of this trace for which all given conditions hold, as a trace whose totals are those of the part.

        Args:
            ranks: ranks to keep; empty: all.
            devices: indices of devices to keep; empty: all.
            steps: keeps work launched in these steps, such as ``3:6`` for steps 3, 4 and 5, or ``typical``.
            window: keeps work that began in this time after the first device activity, such as ``1.2s:1.4s``.
            only: keeps work whose name, label, module, op, HLO instruction or op_name matches this regex.
            warm_up: how to treat warm-up executions of XLA programs, and XLA's autotuner. ``separate``: in rows of
                their own in `report` and `flame`. ``keep``: like other work. ``heuristic`` or
                ``first-compiled``: left out, by that rule.
            program: keeps work of the XLA program of this name, or of the ``main`` programs: those of the steps.

        Raises:
            UsageError: a condition cannot be parsed, or there is no such rank, device or program.
            MissingData: nothing is left.
        """
        chosen = Selection(
            tuple(ranks), tuple(devices), parse_steps(steps) if steps else None,
            parse_window(window) if window else None, program, only, warm_up,
        )  # fmt: skip
        return self.selected(chosen)

    def selected(self, selection: Selection) -> Trace:
        """A part of the trace, from a `Selection`; see `select`."""
        part = Trace(self.recorded, self.own, selection)
        vars(part).update(whole=self.whole, _soundness=self._soundness)  # the trace is attributed and checked once
        _ = part.tables  # raises here if the selection is invalid or empty
        return part

    @cached_property
    def all_work(self) -> Trace:
        """All work of the selected ranks, devices and steps; this trace if no other part is selected."""
        selection = self.tables.selection
        whole = replace(selection.of_ranks_and_devices, steps=selection.steps)
        return self if selection in (whole, replace(whole, warm_up="keep")) else self.selected(whole)

    @cached_property
    def typical(self) -> Trace:
        """The typical steps of this trace; the trace itself if it has none, or if a part of its work is selected."""
        selection = self.tables.selection
        if not selection.of_ranks_and_devices_only or self.tables.steps.is_empty():
            return self
        try:
            return self.selected(replace(selection, steps=TYPICAL))
        except MissingData:
            return self

    @property
    def meta(self) -> Meta:
        """Facts about the whole trace, including warnings."""
        return self.recorded.meta

    @property
    def selected_meta(self) -> Meta:
        """As `meta`, with notes on what the selection left out."""
        return self.tables.meta

    @cached_property
    def activities(self) -> pl.DataFrame:
        """`gpu` and `places` joined row by row: one frame for custom sql_queries.

        Column ``iteration`` is that of `places`. Column ``iteration`` of `gpu`, which counts the earlier runs of the
        same instruction, is renamed to ``repetition``.
        """
        recorded = self.tables.gpu.drop("program", "hlo")  # places has them by name
        recorded = recorded.rename({"iteration": "repetition"})
        return pl.concat([recorded, self.tables.places], how="horizontal")

    def check(self) -> Soundness:
        """Whether figures of the whole trace can be trusted: findings, and which rules could not be checked."""
        return replace(self._soundness, caveats=Caveats(left_out=self.meta.left_out, warnings=self.meta.warnings))

    @cached_property
    def _soundness(self) -> Soundness:
        return check.check(self.recorded)

    @cached_property
    def annotations(self) -> pl.DataFrame:
        """The metadata of marks, with a typed column for each field; see `thence.analysis.annotations`."""
        return annotation_tables.annotation_table(self.tables)

    @property
    def graph_coverage(self) -> Coverage:
        """How much of the work in CUDA graphs has a label, and by which rule."""
        return labelling.coverage(self.tables)

    def graph_lanes(self) -> GraphLanes:
        """The work in CUDA graphs, per stream as recorded and per lane as labelled."""
        return graph_lane_tables.graph_lanes(self.timeline(("lane",), clocks="recorded"))

    def graph_edges(self) -> pl.DataFrame:
        """The edges of captured CUDA graphs, from their labels; see `thence.analysis.cuda_graphs.replayed_graph`.

        Raises:
            MissingData: no labels with edges were joined.
        """
        return replayed_graph.graph_edges(self.recorded.graph_labels)

    def replayed_graph(self, graph_id: int | None = None) -> ReplayedGraph:
        """A captured CUDA graph with the mean times of its replays and its critical path.

        Args:
            graph_id: id of the captured or of the executable graph; None: the graph with the most GPU time.

        Raises:
            MissingData: no graph in the trace has known edges; the message has the way out.
            UsageError: none of them has this id.
        """
        return replayed_graph.replayed_graph(self.tables, self.recorded.graph_labels, graph_id)

    def label(
        self,
        labels: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        eager: Trace | Sequence[Trace] | None = None,
    ) -> Trace:
        """The same trace with labels for the work in CUDA graphs; `graph_coverage` reports for how much of it.

        Either ``labels`` or ``eager`` must be given.

        Args:
            labels: a file that `thence.save_labels` wrote in the process of this trace, or an annotation file of
                PyTorch, whose name contains the rank; several files for several ranks.
            eager: a trace of the same code run without CUDA graphs, or of the capture itself; its kernels' places
                become the labels. Several traces if each capture, or each rank, was recorded on its own.

        Raises:
            UsageError: neither or both are given.
            InputError: the labels cannot be read, or are of another process or program.
            MissingData: nothing ran in a CUDA graph, or nothing matches; the message says where the two first
                differ.
        """
        if (labels is None) == (eager is None):
            raise UsageError("give either labels= or eager=")
        if eager is not None:
            traces = [eager] if isinstance(eager, Trace) else eager
            return self._relabelled(labelling.labelled_from_eager(self.recorded, [trace.tables for trace in traces]))
        several = isinstance(labels, Sequence) and not isinstance(labels, str)
        paths = list(labels) if several else [labels]  # type: ignore[arg-type]
        return self._relabelled(labelling.labelled(self.recorded, [label_files.read_labels(path) for path in paths]))  # type: ignore[arg-type]

    def _relabelled(self, tables: Tables) -> Trace:
        return Trace(tables, self.own, self.selection)

    def report(self, by: By = "kernel") -> Summary:
        """Totals, and GPU time by one kind of place: kernel, label, module, op, source, step, stream, rank ...

        Args:
            by: the kind of place that each row is: one of `thence.model.places.BY`.

        Raises:
            UsageError: ``by`` is none of `thence.model.places.BY`.
            MissingData: the trace holds no device activity.
        """
        if by not in self._reports:
            answer = replace(summary.summarize(self.tables, by), soundness=self._soundness)
            self._reports[by] = self._answer(answer)
        return self._reports[by]

    def report_and_headline(self, by: By = "kernel") -> tuple[Summary, Headline]:
        """As `report` and `headline`, of a large trace both at once."""
        return both(lambda: self.report(by), lambda: self.headline, self._rows_at_once)

    @cached_property
    def _reports(self) -> dict[str, Summary]:
        """Cached by kind of place, because the page of a report and its findings need the same."""
        return {}

    def roofline(self, by: By | None = None, peaks: Peaks | None = None) -> Roofline:
        """FLOP, bytes, the share of what the device allows, and headroom, by one kind of place.

        Args:
            by: the kind of place that each row is: one of `thence.model.places.BY`; None: `default_kind`.
            peaks: of all devices, instead of those that thence knows.

        Raises:
            UsageError: ``by`` is none of `thence.model.places.BY`.
            MissingData: the trace holds no device activity, or the peaks of its devices are not known.
        """
        by = by or self.default_kind
        if peaks is not None:
            return self._answer(rooflines.roofline(self.tables, by, peaks))
        if by not in self._rooflines:
            self._rooflines[by] = self._answer(rooflines.roofline(self.tables, by, None))
        return self._rooflines[by]

    @cached_property
    def _rooflines(self) -> dict[str, Roofline]:
        """Cached as `_reports`, for the peaks that thence knows."""
        return {}

    def stalls(self) -> Stalls:
        """Where inside kernels the multiprocessors spent their time: samples by kernel, line and reason of the stall.

        Only ranks and devices of the selection count.

        Raises:
            MissingData: the trace holds no samples of program counters.
        """
        return self._answer(stall_answers.stalls(self.tables))

    def memory(self, by: str | None = None, at: str = "peak") -> Memory:
        """Memory that was live at the peak, or at another moment, by place; what grows, and what would help.

        Only ranks and devices of the selection count: the peak is that of the whole trace.

        Args:
            by: one of `thence.model.places.MEMORY_BY`; None: the first of module, source and op that is known.
            at: ``peak``; ``oom``, the first allocation that failed; or a time after the first device activity, such as
                ``1.2s``.

        Raises:
            UsageError: ``by`` or ``at`` has another value.
            MissingData: the trace holds no events about memory; or, for ``oom``, no allocation failed.
        """
        if by is None and at == "peak":
            return self._peak_of_memory
        return self._answer(memory_answer.memory(self.tables, by, at))

    @cached_property
    def _peak_of_memory(self) -> Memory:
        """Cached, because the page of a report, its findings and its chart over time need it."""
        return self._answer(memory_answer.memory(self.tables, None))

    def memory_over_time(self, by: str | None = None) -> MemoryOverTime:
        """What the device with the highest peak held over time, by place: see `plot_memory`.

        Args:
            by: as `memory` takes it.

        Raises:
            UsageError: ``by`` has another value.
            MissingData: the trace holds no events about memory.
        """
        return self._answer(memory_times.memory_over_time(self.tables, by or self.memory().by))

    def step_kinds(self) -> StepKinds:
        """Time per step of an inference server, by batch size, layer and kernel.

        Raises:
            MissingData: the trace holds no steps of a server that thence knows.
        """
        return steps_answer.step_kinds(self.tables)

    def flame(
        self,
        by: FlameBy | None = None,
        split: str = "none",
        idle: str = "steady",
        *,
        fold: bool = False,
        weight: str = "time",
        stalls: bool = False,
    ) -> Flame:
        """GPU time as a flame graph: a prefix tree of frames in ``.nodes``.

        Args:
            by: the kind of place that the frames are: one of `thence.model.places.FLAMES`. None: the first of
                op_name, module, label, source and ops that covers two thirds of the GPU time, else the one that
                covers most.
            split: ``phase`` makes the phases (forward, backward ...) the outermost frames; ``none`` does not.
            idle: which idle time has frames. ``steady``: all except that before and inside the first executions
                of XLA programs. ``include``: all. ``exclude``: none.
            fold: whether equal layers of a model are one frame; by module, label or op_name.
            weight: what the width of a frame is: ``time``; ``headroom``, the time beyond what the device allows; or
                ``memory``, the bytes live at the peak, without idle time, phases or folding.
            stalls: whether kernels have frames inside: lines of their source, and what warps waited for there; not for
                memory.

        Raises:
            UsageError: ``by``, ``split``, ``idle`` or ``weight`` has another value, ``by`` has no layers to fold, or
                memory is to have stalls.
            MissingData: the trace holds no device activity; or, for headroom, the peaks of its devices are not known;
                or, for memory, it holds no events about memory; or, for stalls, no samples of program counters.
        """
        if weight == flame.Weight.MEMORY.value:
            if stalls:
                raise UsageError("memory has no stalls: weigh by time or headroom")
            return self._answer(memory_flames.memory_flame(self.tables, by))
        usual = self.tree_kind if fold else time_by_place.default_kind(self.tables, FLAME_KINDS, "ops")
        parts, shown, width = _choice(flame.Split, split), _choice(flame.Idle, idle), _choice(flame.Weight, weight)
        # Cached, because the page of a report needs the same idle time.
        graph = flame.flame(
            self.tables, by or usual, parts, shown, lambda _: self._idle_by_place, fold=fold, weight=width
        )
        graph = flame_stalls.with_stalls(graph, self.tables) if stalls else graph
        return self._answer(replace(graph, notes=(*self._soundness.lines, *graph.notes)))

    @cached_property
    def alignment(self) -> Alignment:
        """The offsets between the clocks of the ranks, from the ends of the collectives that they share."""
        return clock_sync.align_clocks(self.tables, self._instances)

    @cached_property
    def _instances(self) -> Instances:

        return instances.collective_instances(self.tables)

    def programs(self, warm_up: str = "heuristic") -> Programs:
        """Executions, GPU time, idle time and launch latency of XLA programs.

        Args:
            warm_up: the rule for the warm-up executions that are left out: ``heuristic``, ``first-compiled``, or
                ``keep`` to leave out none.

        Raises:
            UsageError: ``warm_up`` has another value.
            MissingData: the trace holds no XLA program.
        """
        if self.tables.programs.is_empty():
            raise MissingData(
                f"{self.meta.named}: holds no XLA programs; traces of jax.profiler, nsys-jax and thence record hold "
                "them"
            )
        return self._answer(programs.programs(self.tables, _choice(warmup.WarmUp, warm_up)))

    def collectives(self, warm_up: str = "heuristic", *, late: bool = True) -> Collectives:
        """Sizes, bandwidths, exposed and hidden time, and waits of collectives, on aligned clocks.

        Args:
            warm_up: as in `programs`; the first calls of PyTorch's communicators count as warm-up, too.
            late: whether to decide which ranks are late, as `ranks` does, and which waits no rank caused.

        Raises:
            UsageError: ``warm_up`` has another value.
            MissingData: the trace holds no collective kernels.
        """
        alignment = self.alignment if len(self.tables.ranks) > 1 else None
        rule = _choice(warmup.WarmUp, warm_up)
        verdict = self._late_ranks if late else None
        times = communication.collectives(self.tables, rule, alignment, self._instances, verdict)
        if times.devices.is_empty():
            raise MissingData(f"{self.meta.named}: {missing.why_no_collectives(self.tables)}")
        return self._answer(times)

    def streams(
        self, groups: Mapping[str, str] | kernel_groups.Patterns | None = None, expect: Sequence[str] = ()
    ) -> Streams:
        """The work on each stream by group of kernels, and which groups ran at the same time.

        Args:
            groups: further groups of kernels, from name to regular expression. They are tried before the groups of
                `thence.analysis.grouping.kernel_groups`; a group with the name of one of these extends it.
            expect: expectations to check, such as ``GEMM>=2``: see `thence.analysis.streams`.

        Raises:
            MissingData: the trace holds no device activity.
            UsageError: the name or regular expression of a group, or an expectation, is invalid.
        """
        given = groups or {}
        patterns = given if isinstance(given, kernel_groups.Patterns) else kernel_groups.Patterns(tuple(given.items()))
        answer = streams.streams(self.tables, patterns)
        return self._answer(replace(answer, checks=answer.check(*expect)))

    def compile(self, autotuning: str = "block") -> Compilation:
        """Wall time of compilation by phase.

        Args:
            autotuning: ``block`` makes autotuning one phase, ``detail`` shows the phases inside it.

        Raises:
            UsageError: ``autotuning`` has another value.
            MissingData: the trace holds no compilation.
        """
        if not (self.tables.host["category"] == "compile").any():
            raise MissingData(
                f"{self.meta.named}: holds no compilation; nsys-jax and thence record hold XLA's compile phases"
            )
        return self._answer(compilation.compilation(self.tables, _choice(compilation.Autotuning, autotuning)))

    def spread(self, warm_up: str = "heuristic") -> pl.DataFrame:
        """How much durations vary between runs of one computation: see `thence.analysis.report.duration_spread`.

        Args:
            warm_up: as in `programs`.

        Raises:
            UsageError: ``warm_up`` has another value.
        """
        return duration_spread.duration_spread(self.tables, _choice(warmup.WarmUp, warm_up))

    def page(self, known: Mapping[str, Any] | None = None) -> Page:
        """The results of all analyses, as ``thence report -o report.html`` shows them.

        Args:
            known: fields of the page by name that are not computed, because the caller has them.

        Raises:
            MissingData: the trace holds no device activity.
        """
        shown = self.typical
        kinds = page_kinds(xla=not self.tables.programs.is_empty())
        parts = {by: result_or_reason(lambda by=by: shown.report(by)).result for by in kinds}  # type: ignore[misc]
        fields: dict[str, Callable[[], Any]] = {
            "headline": lambda: self.headline,
            "whole": lambda: summary.totals_of(self.tables),
            "summaries": lambda: {by: part for by, part in parts.items() if part is not None},
            "steps": lambda: result_or_reason(self._steps_over_time),
            "job": lambda: result_or_reason(self.ranks) if self._quick_late.reason else self._named,
            "timeline": lambda: activity_timeline.activity_timeline(
                self.tables, self._idle_by_place.pieces, self._applied_alignment
            ),
            "flame": shown.flame,
            "streams": self.streams,
            "collectives": lambda: result_or_reason(self.collectives),
            "programs": lambda: result_or_reason(self.programs),
            "compilation": lambda: result_or_reason(self.compile),
            "spread": self.spread,
            "idle": lambda: result_or_reason(shown.idle),
            "soundness": lambda: self._soundness,
            "roofline": lambda: result_or_reason(lambda: shown.roofline(shown.default_kind)),
            "gains": lambda: self._gains,
            "explanation": self.explain,
            "shifts": lambda: {} if self._applied_alignment is None else self._applied_alignment.shifts,
            "memory": lambda: result_or_reason(self.memory),
            "memory_over_time": lambda: result_or_reason(self.memory_over_time),
            "default_kind": lambda: shown.default_kind,
        }
        given = known or {}
        return pages.Page(**{name: given[name] if name in given else made() for name, made in fields.items()})

    def _steps_over_time(self) -> StepsOverTime:
        return step_times.steps_over_time(step_windows.selected_steps(self.tables))

    def report_html(self) -> str:
        """The report as one HTML page that needs no other file and no network.

        Raises:
            MissingData: the trace holds no device activity.
        """
        return report_page.report_html(self.page())

    @cached_property
    def _caveats(self) -> Caveats:
        sound, meta = self._soundness, self.selected_meta
        return Caveats(
            inputs=meta.inputs,
            unsound=sound.lines,
            findings=tuple(sound.findings_json()),
            work_missing=sound.work_missing,
            left_out=meta.left_out,
            notes=meta.notes,
            warnings=meta.warnings,
        )

    def _answer(self, result: _Answer) -> _Answer:
        """The result of an analysis with the caveats of this trace, checked."""
        answer = replace(result, caveats=self._caveats)
        answer.self_check()
        return answer

    def self_check(self) -> SelfCheck:
        """Checks the invariants that hold for every trace; each analysis also checks its own results.

        Returns:
            The figures that were checked. They display as a table in a notebook; ``str`` makes them one sentence.

        Raises:
            Contradiction: row references point outside their table, attributed and unattributed
                time do not add up to the whole, or devices are busy for longer than their span.
        """
        checked = self_checks.checked_references(self.tables)
        return self_checks.self_check_result(checked, self.report() if self.tables.gpu.height else None)

    @property
    def default_kind(self) -> By:
        """The kind of place by which `first_screen` groups GPU time if none is given.

        It is the first of module, label, source and op, and with XLA programs the first of source, op_name and
        these, that covers two thirds of the GPU time, else the one that covers most; kernel if the trace has no
        places of these kinds.
        """
        kinds = TABLE_KINDS if self.tables.programs.is_empty() else TABLE_KINDS_XLA
        return cast("By", time_by_place.default_kind(self.tables, kinds, "kernel"))

    @property
    def tree_kind(self) -> By:
        """The kind of place of a tree if none is given: the first of module, label and op_name, as `default_kind`."""
        return cast("By", time_by_place.default_kind(self.tables, TREE_KINDS, TREE_KINDS[0]))

    @cached_property
    def headline(self) -> Headline:
        """The typical step, what limits it, and where the rest of the recording went.

        Of the selection, ranks, devices and steps count: what else is selected does not change how long a step takes.

        Raises:
            MissingData: the trace holds no device activity.
        """
        if self.tables.gpu.is_empty():
            raise no_device_work.no_device_work(self.tables)
        if self.all_work is not self:
            return self.all_work.headline
        return headline.headline(self.tables, self._soundness, self.typical.quick_idle, self._quick_late)

    @property
    def quick_idle(self) -> ResultOrReason[IdleTime]:
        """Idle time by place, if it can be divided in little time."""
        trace = self.tables
        unknown = idle_answer.why_no_causes(trace)
        if unknown is not None:
            return ResultOrReason(None, f"not computed: {unknown}")
        if trace.host.height > thresholds.MAX_HOST_RANGES:
            return ResultOrReason(None, "not computed here, to save time; thence idle computes it")
        return ResultOrReason(self._idle_by_place)

    @property
    def _quick_late(self) -> ResultOrReason[Job]:
        """Late ranks, if the trace has collectives and they can be found in little time."""
        trace = self.tables
        if trace.collectives.is_empty() or not trace.selection.of_ranks_and_devices_only:
            return ResultOrReason(None)
        if trace.host.height > thresholds.MAX_HOST_RANGES:
            return ResultOrReason(None, "late ranks: not looked for here, to save time; thence ranks does")
        return ResultOrReason(self._late_ranks)

    def first_screen(self, by: By | None = None) -> FirstScreen:
        """An overview: the typical step and the verdict, where the GPU time went, why it was idle, what to ask next.

        Args:
            by: the kind of place that each row of the summary is; None: `default_kind`.

        Raises:
            UsageError: ``by`` is none of `thence.model.places.BY`.
            MissingData: the trace holds no device activity, or nothing of that kind.
        """
        shown = self.typical
        tables = shown.tables  # before the report, which of a store would read each rank's once more
        causes, headline = both(
            lambda: shown.report(by or shown.default_kind), lambda: self.headline, self._rows_at_once
        )
        return first_screens.first_screen(
            tables,
            headline,
            causes,
            shown.quick_idle,
            whole=None if shown is self else summary.totals_of(self.tables),
            next_steps=next_steps.next_steps(self.tables, self.headline, causes, self._replays),
            advice=tuple(next_steps.advice(self.tables, causes)),
        )

    def _replays(self) -> bool:
        """Whether `whatif` can replay the trace, and predicts changes of most of its work."""
        if prediction.missing_calls(self.whole):
            return False
        health = prediction.health(self.whole, self._program)
        return (
            health.unexplained <= thresholds.MAX_UNEXPLAINED_SHARE
            and health.opaque <= thresholds.MAX_WITHOUT_EDGES_SHARE
        )

    def explain(self) -> Explanation:
        """What an expert would say about this trace: findings with evidence and gains, and what it cannot tell.

        If a part of the trace is selected, gains are not predicted: they are those of the whole program.
        """
        return self._explained

    def explained_timeline(self) -> Timeline:
        """As `timeline`, with the findings of `explain` on tracks of their devices."""
        by = self.alignment if len(self.tables.ranks) > 1 else None
        spans = pl.concat([self._spans(), explanations.finding_spans(self.explain())])
        return timelines.timeline(self.tables, (), by, spans)

    @cached_property
    def _explained(self) -> Explanation:
        """Cached, because the page of a report shows it, too."""
        if self.tables.gpu.is_empty():
            reason = str(no_device_work.no_device_work(self.tables))
            return self._answer(explanations.without_device_work(self._soundness, reason))
        shown = self.typical
        summary = shown.report(shown.default_kind)
        composed = explanations.Composed(
            self._soundness,
            self.headline,
            summary,
            shown.report("kernel"),
            shown.quick_idle,
            self._named,
            result_or_reason(lambda: self.collectives(late=False)),
            result_or_reason(lambda: shown.roofline(shown.default_kind)),
            result_or_reason(self.memory),
            self._gains,
            next_steps.next_steps(self.tables, self.headline, summary, lambda: False),
            moments.longest_executions(shown.tables),
            shown is not self,
            self.tables.gpu.select("rank", "device").n_unique(),
            self.tables.meta.named,
            moments.step_windows(self.tables),
        )
        return self._answer(explanations.explanation(composed))

    @cached_property
    def _named(self) -> ResultOrReason[Job]:
        """Cached, because the page of a report and its findings need it."""
        return result_or_reason(self._named_ranks)

    @cached_property
    def _gains(self) -> ResultOrReason[WhatIf]:
        """Cached as `_named`."""
        return result_or_reason(self._suggested_gains)

    def _named_ranks(self) -> Job:
        """Late ranks, with the reasons if any is named; raises `MissingData` if they cannot be looked for."""
        late = self._quick_late
        if late.result is None:
            raise MissingData(late.reason or "the trace holds no collectives in which devices could wait for another")
        return late.result if late.result.stragglers.is_empty() else self.ranks()

    def _suggested_gains(self) -> WhatIf:
        """The changes with the largest gain, without the critical path; raises `MissingData` if none is predicted."""
        if self.tables.selection:
            raise MissingData("gains are predicted for whole traces, and a part of this one is selected")
        if self.whole.host.height > thresholds.MAX_HOST_RANGES:
            raise MissingData("not predicted here, to save time; thence whatif predicts them")
        return self._answer(whatif_answer.what_if(self.whole, self._program, []))

    def idle(self, by: str = "place") -> IdleTime:
        """Why the devices were idle: every idle nanosecond has exactly one cause.

        Args:
            by: what to group the idle time of each cause by: one of `thence.model.places.IDLE_BY`.

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

        return self._answer(idle_answer.idle_time(self.tables, by, self._waited))

    @property
    def rank_numbers(self) -> list[int]:
        """The ranks of the selected part, ascending."""
        return list(self.tables.ranks)

    def ranks(self, *, explain: bool = True) -> Job:
        """Which ranks made the others wait, for how long, since which step, and why.

        Args:
            explain: whether to find the reasons, too, which takes most of the time.

        Raises:
            MissingData: the trace holds no device activity.
        """
        if self.tables.gpu.is_empty():
            raise no_device_work.no_device_work(self.tables)
        summaries = rank_summaries.summarise_ranks(self.tables, explain=explain)
        return self._answer(ranks_answer.job_of(summaries, rank_nodes.nodes_of(self.meta.devices), explain=explain))

    @cached_property
    def _late_ranks(self) -> Job | None:
        """Which ranks are late, without the reasons; None if only one device is selected and no rank is missing."""
        alone = self.tables.gpu.select("rank", "device").n_unique() < 2
        if alone and not missing.ranks_of_job(self.tables).missing:
            return None
        return self.ranks(explain=False)

    def steps(self) -> StepTable:
        """Every step in order of time with its idle time by cause, the spread of step times, and outliers.

        If a part of the trace is selected, these are the steps in which selected work was launched, each as a whole.

        Raises:
            MissingData: the trace holds no steps, or none of the selected ones.
        """
        return self._answer(steps_answer.step_table(self.tables))

    def whatif(
        self,
        free: Sequence[str] = (),
        scale: Sequence[str] = (),
        no_wait: Sequence[str] = (),
        on_time: Sequence[str] = (),
        at_roofline: Sequence[str] = (),
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
            at_roofline: work that takes as long as the device allows, as far as that is known, or that divided by a
                share: ``module:mlp=0.8``.

        Raises:
            UsageError: a change cannot be parsed.
            MissingData: the trace holds no device activity, or explains too little of when activities began; or, with
                ``at_roofline``, the peaks of its devices are not known.
        """
        asked = {
            "free": free, "scale": scale, "at-roofline": at_roofline, "no-wait": no_wait, "on-time": on_time
        }  # fmt: skip
        parsed = [changes.parse_change(action, text) for action, texts in asked.items() for text in texts]
        answer = whatif_answer.what_if(self.whole, self._program, parsed)
        return self._answer(replace(answer, path=self._path_summary))

    @cached_property
    def _path_summary(self) -> pl.DataFrame:
        return critical_path.path_summary(self.whole, self.critical_path())

    def critical_path(self) -> pl.DataFrame:
        """The critical path of the recorded program, as consecutive pieces of time that do not overlap.

        `thence.analysis.whatif.critical_path.TILE` describes the columns; start is on the trace's clock.

        Raises:
            MissingData: the trace holds no device activity.
        """
        tiles = critical_path.critical_path(self.whole, self._program)
        return tiles.with_columns(start=pl.col("start") + self._program.origin_ns)

    @cached_property
    def _program(self) -> Program:
        """The graph of the whole trace; raises `MissingData` if there is no device activity."""
        return graph.program_graph(self.whole, *self._of_ranks, self.recorded.graph_labels)

    @property
    def _of_ranks(self) -> tuple[Alignment | None, Instances | None]:
        """Clock alignment and collective instances of the whole trace; None for both if it has a single rank."""
        if len(self.whole.ranks) < 2:
            return None, None
        every = instances.collective_instances(self.whole)
        return clock_sync.align_clocks(self.whole, every), every

    @cached_property
    def _waited(self) -> pl.DataFrame | None:
        """How long kernels of collectives waited for the last rank; None for a single rank or without collectives."""
        if len(self.tables.ranks) < 2:
            return None
        times = result_or_reason(lambda: self.collectives("keep", late=False)).result
        if times is None:
            return None
        return idle_answer.waited_in_collectives(times, self.alignment, self._instances)

    def _spans(self) -> pl.DataFrame:
        """Tracks of spans for timelines: the causes of idle time, the critical path, and the largest allocations."""
        memory = [] if self.tables.memory.is_empty() else [memory_tracks.memory_tracks(self.tables)]
        return pl.concat([idle_answer.idle_tracks(self.tables), *self._path_track(), *memory])

    def _path_track(self) -> list[pl.DataFrame]:
        """The critical path as one track, in a list.

        The list is empty if a part of the trace is selected, if the trace holds several ranks or no device
        activity, or if too much of its time is unexplained.
        """
        if self.tables.selection or self.whole.gpu.is_empty() or len(self.whole.ranks) > 1:
            return []

        program = self._program
        if prediction.health(self.whole, program).unexplained > thresholds.MAX_UNEXPLAINED_SHARE:
            return []
        return [critical_path.path_track(self.whole, self.critical_path())]

    def timeline(self, lanes: Sequence[str] = (), clocks: str = "aligned", by: Alignment | None = None) -> Timeline:
        """The trace prepared for viewers.

        Args:
            lanes: kinds, of `thence.model.places.LANES`, by which to show the device activities again, on rows of
                their own.
            clocks: ``aligned`` shifts all times of a rank by the one offset that `alignment` has for it, if any,
                and states it in ``notes`` and ``corrections``; ``recorded`` shifts nothing. Durations never change.
            by: the alignment to use instead of `alignment`, if the ranks are part of a larger job.

        Raises:
            UsageError: there is no such lane, or ``clocks`` has another value.
        """
        if clocks not in ("aligned", "recorded") or not set(lanes) <= set(LANES):
            raise UsageError(
                f"clocks must be aligned or recorded, and lanes among {', '.join(LANES)}; got {clocks!r} and "
                f"{list(lanes)!r}"
            )
        if by is None and len(self.tables.ranks) > 1:
            by = self.alignment
        return timelines.timeline(self.tables, lanes, by if clocks == "aligned" else None, self._spans())

    def convert(
        self,
        path: str | os.PathLike[str],
        lanes: Sequence[str] = (),
        clocks: str = "aligned",
        *,
        gpu_views: bool = False,
    ) -> None:
        """Writes the trace for a viewer, in the format that the ending of the path selects.

        Args:
            path: ending in .pftrace (ui.perfetto.dev), .json or .json.gz (Chrome, HTA, TensorBoard) or
                .parquet (a folder of tables). An existing one is replaced, but only by a complete one.
            lanes: as in `timeline`; Perfetto shows them.
            clocks: as in `timeline`.
            gpu_views: whether to write the device activities a second time, in the form that Perfetto's own GPU
                views read.

        Raises:
            UsageError: there is no such format or lane, or ``clocks`` has another value.
            ThenceError: the file cannot be written.
        """
        timeline_files.write_timeline(replace(self.timeline(lanes, clocks), gpu_views=gpu_views), path)

    def overview(self) -> Overview:
        """Every stream over time in a limited number of bins, with clocks aligned if they can be.

        Raises:
            MissingData: the trace holds no device activity.
        """
        return overviews.overview(self.tables, self._applied_alignment)

    @property
    def _applied_alignment(self) -> Alignment | None:
        """The alignment of the ranks' clocks; None for a single rank, or if no collective could be matched."""
        aligned = len(self.tables.ranks) > 1 and self.alignment.matched > 0
        return self.alignment if aligned else None

    def sample(self, *, outliers: bool = False, causes: bool | None = None) -> Sample:
        """The steps of this run, summed up for a comparison; the result holds no device activities.

        Args:
            outliers: whether to keep outlier steps.
            causes: whether to divide idle time by cause; None: only if that takes little time.
        """
        return samples.sample(self.tables, self._soundness, outliers=outliers, causes=causes)

    def diff(self, after: Trace) -> Diff:
        """What changed from this run to ``after``.

        To compare several runs on each side, pass their samples to `thence.analysis.diff.answer`.
        """
        answer = compare.compare([self.sample()], [after.sample()])
        answer.self_check()
        return answer

    def sql(self, query: str) -> pl.DataFrame:
        """Runs an SQL query over the tables of the trace.

        The tables are gpu, host, places, activities, annotations, collectives, threads, programs, events, waits,
        steps, step_times, memory, memory_totals and memory_failures.

        Example:
            ``trace.sql("select label, sum(duration) as ns from activities group by label order by ns desc")``

        Raises:
            UsageError: the query is not valid SQL, names a table or column that does not exist, or reads a file.
        """
        return sql_queries.answer(self.frames(query), query)

    def frames(self, query: str) -> dict[str, pl.DataFrame | pl.LazyFrame]:
        """The tables that an SQL query may need, by name; lazy frames for tables that have not been read."""
        return {name: self._frame(name) for name in sql_queries.named(query)}

    def _frame(self, name: str) -> pl.DataFrame:
        if name == "memory":
            return memory_kinds.placed_memory(self.tables)
        frame: pl.DataFrame = getattr(self if name in ("activities", "annotations") else self.tables, name)
        return frame

    def plot_timeline(self) -> Chart:
        """A chart of every stream over time.

        This and the methods below return a `Chart`, which shows itself in notebooks, has its numbers as a frame
        (``to_frame()``), and is written by ``save("chart.svg")`` or ``save("chart.html")``.
        """
        return charts.timeline_chart(self.overview())

    def plot_by(self, by: By = "kernel", top: int = 15) -> Chart:
        """The ``top`` largest rows of ``report(by)``."""
        return charts.by_chart(self.report(by), top)

    def plot_roofline(self, by: By = "shape") -> Chart:
        """TFLOP/s against FLOP per byte of each row of ``roofline(by)``, and what the GPU allows."""
        return charts.roofline_chart(self.roofline(by))

    def plot_memory(self, by: str | None = None) -> Chart:
        """Memory over time by place, on the device with the highest peak."""
        return charts.memory_chart(self.memory_over_time(by))

    def plot_flame(self, by: FlameBy | None = None) -> Chart:
        """The flame graph; ``thence flame`` writes a page with zoom, search and filters."""
        return flame_charts.flame_chart(self.flame(by).largest(_FLAME_FRAMES))

    def plot_streams(self) -> Chart:
        """Time of each stream by group of kernels."""
        return charts.groups_chart(self.streams())

    def plot_concurrency(self) -> Chart:
        """How long one, two or more streams of each device were busy at once."""
        return charts.concurrency_chart(self.streams())

    def plot_bandwidth(self) -> Chart:
        """Bus bandwidth of collectives against message size."""
        return charts.bandwidth_chart(self.collectives())

    def plot_waits(self) -> Chart:
        """How long collectives waited for the last of their devices."""
        return charts.waits_chart(self.collectives())

    def plot_wait_histogram(self) -> Chart:
        """Histogram of the times that collectives waited."""
        return charts.wait_histogram_chart(self.collectives())

    def plot_wait_sizes(self) -> Chart:
        """How long collectives waited, against message size."""
        return charts.wait_sizes_chart(self.collectives())

    def plot_last_arrivals(self) -> Chart:
        """How long the others waited for each device that arrived last, and the waits that no device caused."""
        return charts.last_arrivals_chart(self.collectives())

    def plot_programs(self) -> Chart:
        """Active and idle time of XLA programs."""
        return charts.programs_chart(self.programs())

    def plot_spread(self) -> Chart:
        """Spread of durations against their mean, for each computation."""
        return charts.spread_chart(self.spread())

    def plot_compile(self) -> Chart:
        """Compile time by phase."""
        return charts.compile_chart(self.compile())

    def __repr__(self) -> str:
        selected = f", selected: {self.selection}" if self.selection else ""
        return (
            f"<thence.Trace of {self.meta.named}: {', '.join(dict.fromkeys(self.meta.formats))}, "
            f"{several(len(self.rank_numbers), 'rank')}{selected}>"
        )

    def _repr_html_(self) -> str:
        return self.first_screen()._repr_html_()


def _choice(choices: type[_Choice], name: str) -> _Choice:
    try:
        return choices(name)
    except ValueError:
        allowed = ", ".join(str(choice.value) for choice in choices)
        raise UsageError(f"invalid value {name!r}; choose one of {allowed}") from None
