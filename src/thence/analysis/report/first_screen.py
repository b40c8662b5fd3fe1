"""The first screen of a report: headline, where the GPU time went, why the GPU was idle, and what to ask next.

The findings about the soundness of the trace are in the summary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.collectives.exposure import exposure
from thence.model.answer import Answer, TableView
from thence.model.columns import at_once
from thence.model.shortened_names import fitted
from thence.model.thresholds import SHOWN_AT_FIRST_SHARE
from thence.units import format_count, format_ns, format_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from thence.analysis.idle.answer import IdleTime
    from thence.analysis.report.headline import Headline
    from thence.analysis.report.next_steps import NextStep
    from thence.analysis.report.summary import Summary, Totals
    from thence.model.answer import ResultOrReason
    from thence.model.attributed import Attributed
    from thence.units import Ns

_MAX_CAUSES = 4
_MAX_PLACES = 3
_PLACE_WIDTH = 44

_SEPARATE_WORDS = {"warm_up": "warm-up", "incomplete": "incomplete executions", "autotuning": "autotuning"}
"""A few words for each code of `thence.model.reasons.SEPARATE`."""


@dataclass(frozen=True)
class FirstScreen(Answer):
    """The first answers about a trace. All times are ns.

    Attributes:
        headline: the typical step, the verdict, and the rest of the recording.
        summary: totals, and GPU time by the requested kind of place or by `default_kind`: of the typical steps; of
            the whole trace, or the selected part of it, if it has no steps or if a part is selected.
        whole: totals of the whole trace; None if the summary has them.
        phases: GPU time of each phase, the most first; null where the phase is not known.
        communication_ns: time in which communication ran, summed over devices.
        exposed_ns: the part of communication_ns in which nothing was computed.
        idle: why the devices were idle, or the reason why that was not computed.
        next_steps: what to ask next, the most promising question first.
        advice: what another recording would show, one sentence each.
    """

    headline: Headline
    summary: Summary
    whole: Totals | None
    phases: pl.DataFrame
    communication_ns: Ns
    exposed_ns: Ns
    idle: ResultOrReason[IdleTime]
    next_steps: tuple[NextStep, ...]
    advice: tuple[str, ...] = ()

    @property
    def next_step(self) -> NextStep:
        """The first of `next_steps`."""
        return self.next_steps[0]

    @property
    def answers(self) -> list[tuple[str, list[str]]]:
        """The topic of each answer and the parts of the answer, as text."""
        return list(_answers(self))

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        inputs, totals = self.summary.about()
        return (inputs, *self.headline.lines, totals)

    def views(self) -> tuple[TableView, ...]:
        """Those of the summary."""
        return self.summary.views()

    def remarks(self) -> Iterator[str]:
        """The answers, and what to ask next."""
        yield from (f"{question}: {', '.join(parts)}" for question, parts in self.answers)
        yield from (f"next: {step.call}: {step.why}" for step in self.next_steps)

    def known(self) -> Mapping[str, float]:
        """See `Answer`."""
        return self.summary.known()

    def all_notes(self) -> tuple[str, ...]:
        """The answers, what to ask next, and the notes of the summary."""
        return (*self.remarks(), *self.summary.all_notes())


def first_screen(
    trace: Attributed,
    headline: Headline,
    summary: Summary,
    idle: ResultOrReason[IdleTime],
    *,
    whole: Totals | None = None,
    next_steps: Sequence[NextStep] = (),
    advice: Sequence[str] = (),
) -> FirstScreen:
    """The first answers about a trace.

    Args:
        trace: the part that the summary is of.
        summary: with the soundness of the whole trace.
        idle: idle time of the same part.
        whole: totals of the whole trace, if the summary is of a part.
        next_steps: what to ask next.
        advice: what another recording would show.
    """
    devices = exposure(trace).devices
    communication, exposed = (int(devices[name].sum()) for name in ("communication_ns", "exposed_ns"))
    phases = (
        pl.LazyFrame([trace.gpu["duration"], trace.places["phase"]])
        .group_by(pl.col("phase").cast(pl.String))
        .agg(total_ns=pl.col("duration").sum())
        .sort("total_ns", "phase", descending=[True, False])
        .pipe(at_once)
    )
    return FirstScreen(
        headline, summary, whole, phases, communication, exposed, idle, tuple(next_steps), tuple(advice),
    )  # fmt: skip


def _answers(screen: FirstScreen) -> Iterator[tuple[str, list[str]]]:
    """Yields the topic of each answer and the parts of the answer."""
    summary = screen.summary
    known = screen.phases.filter(pl.col("phase").is_not_null())
    if not known.is_empty():
        yield (
            "phases",
            [
                f"{phase} {format_share(ns, summary.sum_ns)}"
                for phase, ns in known.rows()
                if ns >= SHOWN_AT_FIRST_SHARE * summary.sum_ns
            ]
            + _included(summary),
        )
    if screen.communication_ns:
        share = format_share(screen.communication_ns, summary.busy_ns)
        exposed = format_ns(screen.exposed_ns)
        yield (
            "communication",
            [
                f"{format_ns(screen.communication_ns)} ({share} of busy)",
                f"{exposed} of it exposed (nothing computed meanwhile)",
            ],
        )
    yield from _idle_answers(screen)
    yield "sound", _sound_answer(screen)


def _included(summary: Summary) -> list[str]:
    """Names the work that the table keeps in separate rows but that the shares of the phases include."""
    separate = [words for code, words in _SEPARATE_WORDS.items() if code in summary.separate["code"]]
    return [f"{' and '.join(separate)} included"] if separate else []


def _idle_answers(screen: FirstScreen) -> Iterator[tuple[str, list[str]]]:
    idle = screen.idle.result
    if idle is None or not idle.idle_ns:
        if screen.summary.idle_unknown:
            return
        measured = screen.headline.measured
        causes = measured.causes if measured.of_steps and measured.causes else {}  # which a store keeps
        first = sorted(causes, key=lambda cause: (-causes[cause], cause))[:_MAX_CAUSES]
        if shares := [(cause, causes[cause]) for cause in first if causes[cause] >= SHOWN_AT_FIRST_SHARE]:
            yield "idle because of", [f"{cause} {format_share(share, 1)} of a step" for cause, share in shares]
        elif screen.idle.reason:
            yield "idle because of", [screen.idle.reason]
        return
    largest = idle.causes.filter(pl.col("share") >= SHOWN_AT_FIRST_SHARE).head(_MAX_CAUSES)
    yield "idle because of", _shares(largest["cause"].to_list(), largest["share"])
    places = (
        idle.rows.filter(pl.col("name").is_not_null(), pl.col("by") != "reason")
        .group_by("name")
        .agg(pl.col("share").sum())
        .sort("share", "name", descending=[True, False])
        .filter(pl.col("share") >= SHOWN_AT_FIRST_SHARE)
        .head(_MAX_PLACES)
    )
    if not places.is_empty():
        yield "idle at", _shares(fitted(places["name"].to_list(), _PLACE_WIDTH), places["share"])


def _shares(names: Iterable[str], shares: pl.Series) -> list[str]:
    return [f"{name} {format_share(share, 1)}" for name, share in zip(names, shares, strict=True)]


def _sound_answer(screen: FirstScreen) -> list[str]:
    soundness = screen.summary.soundness
    if not soundness.sound:
        findings = len(soundness.findings)
        return [f"no: {format_count(findings)} finding{'s' if findings > 1 else ''} (thence check)"]
    if not soundness.unknown:
        return ["nothing wrong was found"]
    first, *more = soundness.unknown
    return ["nothing wrong was found", f"but the trace cannot show {first}", *more]
