"""`Trace`: the public object with tables, attribution and analyses.

Each method, here and in the base classes, imports the analyses and writers that it calls: most runs of the command
line need one analysis, and importing all of them took longer than reading a small trace.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import polars as pl

from thence.comparing import Comparing
from thence.errors import MissingData, UsageError
from thence.explanations import Explanations
from thence.model.selection import APART, TYPICAL, Selection, parse_steps, parse_window
from thence.pictures import Pictures
from thence.querying import Querying
from thence.timelines import Timelines

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from thence.analysis.collectives.clock_sync import Alignment
    from thence.analysis.collectives.communication import Collectives
    from thence.analysis.collectives.instances import Instances
    from thence.analysis.flame.flame import Flame
    from thence.analysis.graph_lanes import GraphLanes
    from thence.analysis.kernel_groups import Patterns
    from thence.analysis.programs.compilation import Compilation
    from thence.analysis.programs.programs import Programs
    from thence.analysis.proof import Proof
    from thence.analysis.replayed_graph import ReplayedGraph
    from thence.analysis.report import Report
    from thence.analysis.soundness.findings import Soundness
    from thence.analysis.steps.kinds import StepKinds
    from thence.analysis.streams import Streams
    from thence.analysis.summary import Summary
    from thence.attribution.cuda_graphs.coverage import Coverage
    from thence.model.attributed import Attributed
    from thence.model.graph_labels import GraphLabels
    from thence.model.places import By, FlameBy
    from thence.model.tables import Meta, Tables


@dataclass(frozen=True)
class Trace(Querying, Comparing, Explanations, Timelines, Pictures):
    """A trace of one or several ranks with attributed GPU time.

    Attributes:
        tables: Polars frames (see ``thence.model.tables``) as the readers returned them, with labels of CUDA graphs
            joined.
        own: patterns of further files that count as the user's own code, as `thence.open` takes them.
        selection: the part of the trace that the analyses cover.
    """

    tables: Tables
    own: tuple[str, ...] = ()
    selection: Selection = field(default_factory=Selection)

    @cached_property
    def whole(self) -> Attributed:
        """The tables of the whole trace, regardless of the selection, with every device activity attributed."""
        from thence.attribution.attribute import attribute

        return attribute(self.tables, self.own)

    @cached_property
    def attributed(self) -> Attributed:
        """The selected part of `whole`: the input of all analyses and writers."""
        from thence.analysis.consistency import consistent_references
        from thence.analysis.select import select

        return consistent_references(select(self.whole, self.selection))

    def select(
        self,
        ranks: Sequence[int] = (),
        devices: Sequence[int] = (),
        steps: str | None = None,
        window: str | None = None,
        only: str | None = None,
        warm_up: str = APART,
        program: str | None = None,
    ) -> Trace:
        """The part of this trace for which all given conditions hold, as a trace whose totals are those of the part.

        Args:
            ranks: ranks to keep; empty: all.
            devices: indices of devices to keep; empty: all.
            steps: keeps work launched in these steps, such as ``3:6`` for steps 3, 4 and 5, or ``typical``.
            window: keeps work that began in this time after the first device activity, such as ``1.2s:1.4s``.
            only: keeps work whose name, label, module, op, HLO instruction or op_name matches this regex.
            warm_up: how to treat warm-up executions of XLA programs, and XLA's autotuner. ``apart``: in rows of
                their own in `summary` and `flame`. ``keep``: like other work. ``heuristic`` or
                ``first-compiled``: left out, by that rule.
            program: keeps work of the XLA program of this name, or of the ``main`` programs: those of the steps.

        Raises:
            UsageError: a condition cannot be parsed, or there is no such rank, device or program.
            MissingData: nothing is left.
        """
        chosen = Selection(
            tuple(ranks),
            tuple(devices),
            parse_steps(steps) if steps else None,
            parse_window(window) if window else None,
            program,
            only,
            warm_up,
        )
        return self.selected(chosen)

    def selected(self, selection: Selection) -> Trace:
        """A part of the trace, from a `Selection`; see `select`."""
        part = Trace(self.tables, self.own, selection)
        vars(part)["whole"] = self.whole  # the trace is attributed once
        _ = part.attributed  # raises here if the selection is invalid or empty
        return part

    @cached_property
    def all_work(self) -> Trace:
        """All work of the selected ranks, devices and steps; this trace if no other part is selected."""
        selection = self.attributed.selection
        whole = replace(selection.of_ranks_and_devices, steps=selection.steps)
        return self if selection in (whole, replace(whole, warm_up="keep")) else self.selected(whole)

    @cached_property
    def typical(self) -> Trace:
        """The typical steps of this trace; the trace itself if it has none, or if a part of its work is selected."""
        selection = self.attributed.selection
        if not selection.of_ranks_and_devices_only or self.attributed.steps.is_empty():
            return self
        try:
            return self.selected(replace(selection, steps=TYPICAL))
        except MissingData:
            return self

    @property
    def gpu(self) -> pl.DataFrame:
        """One row per device activity: kernel, memcpy or memset."""
        return self.attributed.gpu

    @property
    def host(self) -> pl.DataFrame:
        """One row per range on a host thread."""
        return self.attributed.host

    @property
    def threads(self) -> pl.DataFrame:
        """Names of the host threads."""
        return self.attributed.threads

    @property
    def programs(self) -> pl.DataFrame:
        """One row per execution of an XLA program on one device."""
        return self.attributed.programs

    @property
    def events(self) -> pl.DataFrame:
        """One row per call that made a stream record a CUDA event or wait for one."""
        return self.attributed.events

    @property
    def waits(self) -> pl.DataFrame:
        """One row per host call that waited for the device."""
        return self.attributed.waits

    @property
    def step_times(self) -> pl.DataFrame:
        """One row per step that thence's recorder saw, recorded or not; empty for other traces."""
        return self.attributed.step_times

    @property
    def meta(self) -> Meta:
        """Facts about the whole trace, including warnings."""
        return self.tables.meta

    @property
    def selected_meta(self) -> Meta:
        """As `meta`, with notes on what the selection left out."""
        return self.attributed.meta

    @property
    def places(self) -> pl.DataFrame:
        """Where each row of `gpu` came from, row by row: label, module, op, source, hlo ... and the rule for each."""
        return self.attributed.places

    @property
    def collectives(self) -> pl.DataFrame:
        """What each collective kernel moved; column ``gpu`` is the kernel's row in `gpu`."""
        return self.attributed.collectives

    @cached_property
    def activities(self) -> pl.DataFrame:
        """`gpu` and `places` joined row by row: one frame for custom queries.

        Column ``iteration`` is that of `places`. Column ``iteration`` of `gpu`, which counts the earlier runs of the
        same instruction, is renamed to ``repetition``.
        """
        recorded = self.gpu.drop("program", "hlo")  # places has them by name
        recorded = recorded.rename({"iteration": "repetition"})
        return pl.concat([recorded, self.places], how="horizontal")

    @cached_property
    def soundness(self) -> Soundness:
        """Whether figures of the whole trace can be trusted: findings, and which rules could not be checked."""
        from thence.analysis.soundness.check import check

        return check(self.tables)

    @cached_property
    def annotations(self) -> pl.DataFrame:
        """The metadata of marks, with a typed column for each field; see `thence.analysis.annotation_table`."""
        from thence.analysis.annotation_table import annotation_table

        return annotation_table(self.attributed)

    @property
    def graph_coverage(self) -> Coverage:
        """How much of the work in CUDA graphs has a label, and by which rule."""
        from thence.attribution.cuda_graphs.coverage import coverage

        return coverage(self.attributed)

    def graph_lanes(self) -> GraphLanes:
        """The work in CUDA graphs, per stream as recorded and per lane as labelled."""
        from thence.analysis.graph_lanes import graph_lanes

        return graph_lanes(self.timeline(("lane",), clocks="recorded"))

    def graph_edges(self) -> pl.DataFrame:
        """The edges of captured CUDA graphs, from their labels; see `thence.analysis.graph_edges`.

        Raises:
            MissingData: no labels with edges were joined.
        """
        from thence.analysis.graph_edges import graph_edges

        return graph_edges(self.tables.graph_labels)

    def replayed_graph(self, graph_id: int | None = None) -> ReplayedGraph:
        """A captured CUDA graph with the mean times of its replays and its critical path.

        Args:
            graph_id: id of the captured or of the executable graph; None: the graph with the most GPU time.

        Raises:
            MissingData: no graph in the trace has known edges; the message has the way out.
            UsageError: none of them has this id.
        """
        from thence.analysis.replayed_graph import replayed_graph

        return replayed_graph(self.attributed, self.tables.graph_labels, graph_id)

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
        from thence.attribution.cuda_graphs.labelling import labelled, labelled_from_eager
        from thence.readers.label_files import read_labels

        if (labels is None) == (eager is None):
            raise UsageError("give either labels= or eager=")
        if eager is not None:
            traces = [eager] if isinstance(eager, Trace) else eager
            return self._relabelled(labelled_from_eager(self.tables, [trace.attributed for trace in traces]))
        several = isinstance(labels, Sequence) and not isinstance(labels, str)
        paths = list(labels) if several else [labels]  # type: ignore[arg-type]
        return self._relabelled(labelled(self.tables, [read_labels(path) for path in paths]))  # type: ignore[arg-type]

    def _relabelled(self, tables: Tables) -> Trace:
        return Trace(tables, self.own, self.selection)

    def summary(self, by: By = "kernel") -> Summary:
        """Totals, and GPU time by one kind of place: kernel, label, module, op, source, step, stream, rank ...

        Args:
            by: the kind of place that each row is: one of `thence.model.places.BY`.

        Raises:
            UsageError: ``by`` is none of `thence.model.places.BY`.
            MissingData: the trace holds no device activity.
        """
        from thence.analysis.consistency import consistent_summary
        from thence.analysis.summary import summarize

        found = consistent_summary(summarize(self.attributed, by))
        return replace(found, soundness=self.soundness)

    def step_kinds(self) -> StepKinds:
        """Time per step of an inference server, by batch size, layer and kernel.

        Raises:
            MissingData: the trace holds no steps of a server that thence knows.
        """
        from thence.analysis.steps.kinds import step_kinds

        return step_kinds(self.attributed)

    def flame(
        self, by: FlameBy | None = None, split: str = "none", idle: str = "steady", *, fold: bool = False
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

        Raises:
            UsageError: ``by``, ``split`` or ``idle`` has another value, or ``by`` has no layers to fold.
            MissingData: the trace holds no device activity.
        """
        from thence.analysis.consistency import consistent_flame
        from thence.analysis.default_kind import default_kind
        from thence.analysis.flame.flame import Idle, Split, flame
        from thence.model.places import FLAME_KINDS

        usual = self.tree_kind if fold else default_kind(self.attributed, FLAME_KINDS, "ops")
        parts, shown = _choice(Split, split), _choice(Idle, idle)
        # Cached, because the page of a report needs the same idle time.
        graph = flame(self.attributed, by or usual, parts, shown, lambda _: self._idle_by_place, fold=fold)
        found = consistent_flame(graph)
        return replace(found, notes=(*self.soundness.lines, *found.notes))

    @cached_property
    def alignment(self) -> Alignment:
        """The offsets between the clocks of the ranks, from the ends of the collectives that they share."""
        from thence.analysis.collectives.clock_sync import align_clocks

        return align_clocks(self.attributed, self._instances)

    @property
    def _graph_labels(self) -> tuple[GraphLabels, ...]:
        """Labels of captured CUDA graphs that came with the trace, or were given to `label`."""
        return self.tables.graph_labels

    @cached_property
    def _instances(self) -> Instances:
        from thence.analysis.collectives.instances import collective_instances

        return collective_instances(self.attributed)

    def program_times(self, warm_up: str = "heuristic") -> Programs:
        """Executions, GPU time, idle time and launch latency of XLA programs.

        Args:
            warm_up: the rule for the warm-up executions that are left out: ``heuristic``, ``first-compiled``, or
                ``keep`` to leave out none.

        Raises:
            UsageError: ``warm_up`` has another value.
            MissingData: the trace holds no XLA program.
        """
        from thence.analysis.consistency_of_answers import consistent_programs
        from thence.analysis.programs.programs import programs
        from thence.analysis.programs.warmup import WarmUp

        if self.programs.is_empty():
            raise MissingData(
                f"{self._inputs}: holds no XLA programs; traces of jax.profiler, nsys-jax and thence record hold them"
            )
        found = programs(self.attributed, _choice(WarmUp, warm_up))
        return consistent_programs(found, self.meta)

    def collective_times(self, warm_up: str = "heuristic", *, late: bool = True) -> Collectives:
        """Sizes, bandwidths, exposed and hidden time, and waits of collectives, on aligned clocks.

        Args:
            warm_up: as in `program_times`; the first calls of PyTorch's communicators count as warm-up, too.
            late: whether to decide which ranks are late, as `late_ranks` does, and which waits no rank caused.

        Raises:
            UsageError: ``warm_up`` has another value.
            MissingData: the trace holds no collective kernels.
        """
        from thence.analysis.collectives.communication import collectives
        from thence.analysis.collectives.missing import why_no_collectives
        from thence.analysis.consistency_of_answers import consistent_collectives
        from thence.analysis.programs.warmup import WarmUp

        alignment = self.alignment if len(self.attributed.ranks) > 1 else None
        rule = _choice(WarmUp, warm_up)
        verdict = self._late_ranks if late else None
        times = collectives(self.attributed, rule, alignment, self._instances, verdict)
        if times.devices.is_empty():
            raise MissingData(f"{self._inputs}: {why_no_collectives(self.attributed)}")
        return consistent_collectives(times, self.meta)

    def streams(self, groups: Mapping[str, str] | Patterns | None = None) -> Streams:
        """The work on each stream by group of kernels, and which groups ran at the same time.

        Args:
            groups: further groups of kernels, from name to regular expression. They are tried before the groups of
                `thence.analysis.kernel_groups`; a group with the name of one of these extends it.

        Raises:
            MissingData: the trace holds no device activity.
            UsageError: the name or regular expression of a group is invalid.
        """
        from thence.analysis.consistency import consistent_streams
        from thence.analysis.kernel_groups import Patterns
        from thence.analysis.streams import streams

        given = groups or {}
        patterns = given if isinstance(given, Patterns) else Patterns(tuple(given.items()))
        return consistent_streams(streams(self.attributed, patterns))

    def compile_times(self, autotuning: str = "block") -> Compilation:
        """Wall time of compilation by phase.

        Args:
            autotuning: ``block`` makes autotuning one phase, ``detail`` shows the phases inside it.

        Raises:
            UsageError: ``autotuning`` has another value.
            MissingData: the trace holds no compilation.
        """
        from thence.analysis.consistency_of_answers import consistent_compilation
        from thence.analysis.programs.compilation import Autotuning, compilation

        if not (self.host["category"] == "compile").any():
            raise MissingData(
                f"{self._inputs}: holds no compilation; nsys-jax and thence record hold XLA's compile phases"
            )
        found = compilation(self.attributed, _choice(Autotuning, autotuning))
        return consistent_compilation(found, self.meta)

    def spread(self, warm_up: str = "heuristic") -> pl.DataFrame:
        """How much durations vary between runs of one computation: see `thence.analysis.spread.compute_spread`.

        Args:
            warm_up: as in `program_times`.

        Raises:
            UsageError: ``warm_up`` has another value.
        """
        from thence.analysis.programs.warmup import WarmUp
        from thence.analysis.spread import compute_spread

        return compute_spread(self.attributed, _choice(WarmUp, warm_up))

    def report(self) -> Report:
        """The results of all analyses, as ``thence report -o report.html`` shows them.

        Raises:
            MissingData: the trace holds no device activity.
        """
        from thence.analysis.part import part
        from thence.analysis.report import Report
        from thence.analysis.summary import totals_of
        from thence.analysis.timelines.activity_timeline import activity_timeline
        from thence.model.places import page_kinds

        shown = self.typical
        kinds = page_kinds(xla=not self.programs.is_empty())
        parts = {by: part(lambda by=by: shown.summary(by)).result for by in kinds}  # type: ignore[misc]
        return Report(
            headline=self.headline,
            whole=totals_of(self.attributed),
            summaries={by: summary for by, summary in parts.items() if summary is not None},
            timeline=activity_timeline(self.attributed, self.idle().pieces, self._applied_alignment),
            flame=shown.flame(),
            streams=self.streams(),
            collectives=part(self.collective_times),
            programs=part(self.program_times),
            compilation=part(self.compile_times),
            spread=self.spread(),
            idle=shown.idle(),
            soundness=self.soundness,
            default_kind=self.default_kind,
        )

    def report_html(self) -> str:
        """The report as one HTML page that needs no other file and no network.

        Raises:
            MissingData: the trace holds no device activity.
        """
        from thence.writers.page.report_page import report_html

        return report_html(self.report())

    @property
    def _inputs(self) -> str:
        return self.meta.named

    def self_check(self) -> Proof:
        """Checks the invariants that hold for every trace; each analysis also checks its own results.

        Returns:
            The figures that were checked. They display as a table in a notebook; ``str`` makes them one sentence.

        Raises:
            Contradiction: row references point outside their table, attributed and unattributed
                time do not add up to the whole, or devices are busy for longer than their span.
        """
        from thence.analysis.consistency import consistent_references
        from thence.analysis.proof import proof

        checked = consistent_references(self.attributed)
        return proof(checked, self.summary() if self.gpu.height else None)

    def _repr_html_(self) -> str:
        return self.glance()._repr_html_()


_Choice = TypeVar("_Choice", bound=enum.Enum)


def _choice(choices: type[_Choice], name: str) -> _Choice:
    try:
        return choices(name)
    except ValueError:
        allowed = ", ".join(str(choice.value) for choice in choices)
        raise UsageError(f"invalid value {name!r}; choose one of {allowed}") from None
