"""A store with the interface of `Trace`: the same methods and results, reading only what each method needs."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.analysis.rank_tables import concatenated
from thence.analysis.self_check import checked_references
from thence.analysis.steps.over_time import steps_over_time
from thence.errors import DamagedInput, MissingData
from thence.model.answer import ResultOrReason, result_or_reason
from thence.model.attributed import concat_attributed
from thence.model.selection import Selection
from thence.model.tables import NO_STEPS, STEP_KINDS, STEP_TIMES
from thence.store.parts import typed
from thence.store.summaries import SUMMARISED_BY
from thence.trace import Trace
from thence.units import several

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from thence.analysis.explain.answer import Explanation
    from thence.analysis.idle.answer import IdleTime
    from thence.analysis.memory.answer import Memory
    from thence.analysis.programs.compilation import Compilation
    from thence.analysis.ranks.answer import Job
    from thence.analysis.report.headline import Headline
    from thence.analysis.report.page import Page
    from thence.analysis.report.summary import Summary
    from thence.analysis.roofline import Roofline
    from thence.analysis.soundness.findings import Soundness
    from thence.analysis.steps.answer import StepTable
    from thence.analysis.steps.over_time import StepsOverTime
    from thence.analysis.whatif.answer import WhatIf
    from thence.model.attributed import Attributed
    from thence.model.peaks import Peaks
    from thence.model.places import By
    from thence.model.tables import Meta
    from thence.store.store import Store

_FOLDED_AFTER = 32
"""Number of parts whose tables are collected before they are merged, which bounds the memory."""


class StoredTrace(Trace):
    """The ranks of a store.

    `report`, `check`, `meta` and `sql` read what they need of each rank; everything else reads the tables of
    the selected ranks, if they fit into memory.

    Args:
        store: opened.
        selection: the part of the store to analyse.
    """

    def __init__(self, store: Store, selection: Selection | None = None) -> None:
        chosen = selection or Selection()
        chosen_store = store.of_ranks(chosen.ranks) if chosen.ranks else store
        vars(self).update(store=chosen_store, own=store.manifest.settings.own, selection=chosen)

    store: Store

    @cached_property
    def whole(self) -> Attributed:
        """The tables of the selected ranks.

        Raises:
            UsageError: they do not fit into memory.
        """
        self.store.check_memory()
        tables = concat_attributed(list(self.store.parts()))
        stored = self.store.meta
        meta = replace(tables.meta, warnings=stored.warnings, notes=stored.notes)
        return replace(tables, meta=meta)

    @cached_property
    def recorded(self) -> Attributed:
        """The same as `whole`: a store does not keep the tables as readers returned them."""
        return self.whole

    @property
    def rank_numbers(self) -> list[int]:
        """The selected ranks; no tables are read for this."""
        return self.store.ranks

    @property
    def meta(self) -> Meta:
        """Facts of all ranks."""
        return self.store.meta

    @property
    def selected_meta(self) -> Meta:
        """The same as `meta`; if more than ranks is selected, with what the selection left out."""
        return self.meta if self._ranks_only else super().selected_meta

    @property
    def _ranks_only(self) -> bool:
        """Whether nothing but ranks is selected, so that the stored summaries of ranks can be used."""
        return replace(self.selection, ranks=()) == Selection()

    @cached_property
    def _soundness(self) -> Soundness:
        """The findings of each rank when it was ingested, and findings about the times of all ranks together."""
        return self.store.soundness

    @property
    def _rows_at_once(self) -> int:
        """None: a store is read by one thread."""
        return 0

    def selected(self, selection: Selection) -> StoredTrace:
        """A selected part of the store; nothing is read of other ranks."""
        return StoredTrace(self.store, selection)

    def report(self, by: By = "kernel") -> Summary:
        """As `Trace.report`, rank by rank; by shape it needs host ranges, as operators are."""
        if by == "shape":
            self._need_host("report --by shape")
        from thence.analysis.summary_merge import MERGED_BY, merged_summary

        if by in SUMMARISED_BY and self._ranks_only:
            frames = self.store.report(self.selection.ranks)
        elif by in MERGED_BY and self.selection.window_ns is None:
            if "tables" in vars(self):  # which are not read once more
                return replace(super().report(by), meta=self.meta)
            frames = self._summarised(by)
        else:  # the times of a window count from the first activity of all ranks
            return super().report(by)
        if not frames or frames["totals"]["xla"].n_unique() != 1:
            return super().report(by)
        with self.store.reading():
            summary = merged_summary(frames, by, self.meta, self.selection)
        return self._answer(replace(summary, soundness=self._soundness))

    def _summarised(self, by: str) -> dict[str, pl.DataFrame]:
        """Tables of the report by a kind of place, from the tables of each rank; empty if one rank lacks data."""
        from thence.analysis.report.summary import summarize
        from thence.analysis.summary_merge import summary_tables

        kept: list[dict[str, pl.DataFrame]] = []
        for part in self._selected_parts():
            try:
                tables = summary_tables(
                    [summarize(part, by)], None, labels_joined=part.labels_joined, xla=not part.programs.is_empty()
                )
            except MissingData:  # the tables of all ranks together may suffice
                return {}
            kept.append(tables)
            if len(kept) == _FOLDED_AFTER:
                kept = [_together(kept)]
        return _together(kept) if kept else {}

    def _selected_parts(self) -> Iterator[Attributed]:
        """The selected part of every rank with device work."""
        from thence.analysis.selection.select import select

        for part in self.store.parts():
            if part.gpu.is_empty():
                continue
            ranks = tuple(rank for rank in self.selection.ranks if rank in part.ranks)
            try:
                yield checked_references(select(part, replace(self.selection, ranks=ranks)))
            except MissingData:
                continue  # another rank may have some of it

    def ranks(self, *, explain: bool = True) -> Job:
        """As `Trace.ranks`, from the summaries alone."""
        if not self._ranks_only:
            return super().ranks(explain=explain)
        from thence.analysis.ranks.answer import job_of
        from thence.analysis.ranks.nodes import nodes_of

        with self.store.reading():
            return self._answer(job_of(self.store.lateness(), nodes_of(self.meta.devices), explain=explain))

    @property
    def typical(self) -> StoredTrace:
        """The whole store: tables of all ranks are summed from their summaries, which do not tell steps apart."""
        return self

    @cached_property
    def headline(self) -> Headline:
        """As `Trace.headline`, from the summaries alone."""
        if not self._ranks_only:
            return super().headline
        from thence.analysis.report.headline import headline_of_summaries

        with self.store.reading():
            frames = self.store.lateness()
            tables = {name: frames[name].collect() for name in ("devices", "steps", "idle")}
            times = STEP_TIMES.complete(typed(self._scan(STEP_TIMES.name).collect(), STEP_TIMES.schema))
        devices = tables["devices"]
        if devices.is_empty():
            raise MissingData(f"{self.store.root}: holds no device activity")
        if unknown := set(devices["step_kind"].drop_nulls()) - STEP_KINDS.keys():
            kinds = ", ".join(sorted(unknown))
            raise DamagedInput(
                str(self.store.root),
                f"states steps of a kind that thence does not know ({kinds}); run the same thence ingest again",
            )
        late = result_or_reason(lambda: self.ranks(explain=False))
        if devices.height < 2 and late.result is not None and not late.result.shown.missing:
            late = ResultOrReason(None)
        return headline_of_summaries(tables, self._soundness, late, times)

    def page(self, known: Mapping[str, Any] | None = None) -> Page:
        """As `Trace.page`; of many ranks, the tables of two are read, and the summaries of all."""
        from thence.analysis.ranks import timeline_rows

        few = self.selection.ranks or len(self.rank_numbers) <= timeline_rows.MAX_IN_FULL
        if few or not self._ranks_only:
            return super().page(known)
        job = self.ranks()
        slowest, middle = (rank for rank, _ in timeline_rows.opened(job))
        of_all: tuple[By, ...] = ("kernel", "rank")
        late = ", which makes the others wait most" if job.ranks["wait_caused_ns"][0] else ""
        compared = "" if slowest == middle else f", and rank {middle}, with which it is compared"
        # Of two ranks, all others would count as missing.
        unread = "collectives: their tables of all ranks are not read for this page; thence collectives reads them"
        of_summaries = {
            "collectives": ResultOrReason[Any](None, unread),
            "headline": self.headline,
            "whole": self.report("kernel"),
            "steps": result_or_reason(self._steps_over_time),
            "job": ResultOrReason(job),
            "soundness": self._soundness,
            "explanation": self._explained_by_summaries(job),
        }
        page = self.selected(Selection(ranks=tuple(sorted({slowest, middle})))).page({**of_summaries, **(known or {})})
        return replace(
            page,
            summaries={**page.summaries, **{by: self.report(by) for by in of_all}},
            in_full=f"of rank {slowest}{late}{compared}",
            of_all=of_all,
        )

    def _explained_by_summaries(self, job: Job) -> Explanation:
        """The findings that need no tables."""
        from thence.analysis.explain.answer import Composed, explanation

        kernels = self.report("kernel")
        reason = f"the job has {several(len(self.rank_numbers), 'rank')}, whose tables are not read together"
        none = ResultOrReason[Any](None, reason)
        composed = Composed(
            self._soundness, self.headline, kernels, kernels, none, ResultOrReason(job), none, none, none, none,
            devices=kernels.devices, named=str(self.store.root),
        )  # fmt: skip
        return self._answer(replace(explanation(composed), not_answered=()))  # the two ranks' sections may answer it

    def _steps_over_time(self) -> StepsOverTime:
        from thence.analysis.report.headline import steps_of_summaries

        if not self._ranks_only:
            return super()._steps_over_time()
        with self.store.reading():
            frames = self.store.lateness()
            steps = steps_of_summaries({name: frames[name].collect() for name in ("devices", "steps")})
        if steps is None:
            raise MissingData(f"{self.store.root}: holds no steps: {NO_STEPS}")
        return steps_over_time(steps)

    def sql(self, query: str) -> pl.DataFrame:
        """As `Trace.sql`, as a lazy query over the files of all ranks, which reads only what the query needs.

        Row numbers, such as ``launch``, count within the input of their rank.
        """
        from thence.analysis.sql import answer

        frames = self.frames(query)
        if any(isinstance(frame, pl.LazyFrame) for frame in frames.values()):
            self.store.check_tables()
        return answer(frames, query)

    def frames(self, query: str) -> dict[str, pl.DataFrame | pl.LazyFrame]:
        """The tables that a query names, as lazy frames if nothing but ranks is selected."""
        if not self._ranks_only:
            return super().frames(query)
        from thence.analysis.sql import named

        lazy = [name for name in named(query) if name != "annotations"]
        frames: dict[str, pl.DataFrame | pl.LazyFrame] = {name: self._scan(name) for name in lazy}
        return frames | {name: getattr(self, name) for name in named(query) if name not in lazy}

    def _scan(self, name: str) -> pl.LazyFrame:
        table = self.store.scan(name)
        if name == "activities":
            table = table.drop("program_row", "hlo_recorded")
        if self.selection.ranks and "rank" in table.collect_schema().names():
            table = table.filter(pl.col("rank").is_in(list(self.selection.ranks)))
        return table

    def idle(self, by: str = "place") -> IdleTime:
        """As `Trace.idle`; needs host ranges."""
        self._need_host("idle")
        return super().idle(by)

    def steps(self) -> StepTable:
        """As `Trace.steps`; needs host ranges."""
        self._need_host("steps")
        return super().steps()

    def whatif(self, *changes: Any, **more: Any) -> WhatIf:
        """As `Trace.whatif`; needs host ranges."""
        self._need_host("whatif")
        return super().whatif(*changes, **more)

    def _suggested_gains(self) -> WhatIf:
        """As `Trace._suggested_gains`; needs host ranges."""
        self._need_host("whatif")
        return super()._suggested_gains()

    def roofline(self, by: By | None = None, peaks: Peaks | None = None) -> Roofline:
        """As `Trace.roofline`; by shape it needs host ranges, as operators are.

        Stores of earlier versions do not keep the work of activities, which follows from host ranges or HLO.
        """
        if by == "shape":
            self._need_host("roofline --by shape")
        elif not self.store.keeps_work:
            summaries = self.store.report(self.selection.ranks)
            if summaries and not summaries["totals"]["xla"].any():
                self._need_host("roofline")
        return super().roofline(by, peaks)

    def memory(self, by: str | None = None, at: str = "peak") -> Memory:
        """As `Trace.memory`; needs host ranges, except for XLA's programs, whose memory is known from their HLO."""
        summaries = self.store.report(self.selection.ranks)
        if summaries and not summaries["totals"]["xla"].any():
            self._need_host("memory")
        return super().memory(by, at)

    def compile(self, autotuning: str = "block") -> Compilation:
        """As `Trace.compile`; needs host ranges."""
        self._need_host("compile")
        return super().compile(autotuning)

    def _need_host(self, verb: str) -> None:
        if not self.store.manifest.settings.host:
            raise MissingData(
                f"{self.store.root}: holds no host ranges, which thence {verb} needs; thence ingest --host keeps them"
            )


def _together(tables: list[dict[str, pl.DataFrame]]) -> dict[str, pl.DataFrame]:
    from thence.analysis.summary_merge import REPORT_TABLES, folded

    return folded(concatenated(tables, REPORT_TABLES))
