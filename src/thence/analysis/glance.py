"""A trace at a glance: where the GPU time went, why the GPU was idle, and which question to ask next.

The findings about the soundness of the trace are in the summary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.collectives.exposure import exposure
from thence.analysis.idle.table import idle_time, why_no_causes
from thence.analysis.report import Part
from thence.model.fitted_names import fitted
from thence.model.formats import LABELS_FILE
from thence.notebook import Form, Shown
from thence.units import format_count, format_ns, format_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from thence.analysis.idle.table import IdleTime
    from thence.analysis.soundness.findings import Soundness
    from thence.analysis.summary import Summary
    from thence.model.attributed import Attributed
    from thence.units import Ns

__all__ = ["Glance", "NextStep", "glance"]

_MOST_HOST_RANGES = 1_000_000
"""Idle time of traces with more host ranges is not divided by cause: that takes some 2 s of CPU time per million."""
_MOST_IDLE = 0.5
_SOME_IDLE = 0.2
_EXPOSED = 0.2
_IN_GRAPHS = 0.2
_COVERED = 0.5
_MOST_CAUSES = 4
_MOST_PLACES = 3
_PLACE = 44
_LEAST_SHARE = 0.005
_CODE = ("module", "label", "source", "op_name")


_APART_WORDS = {
    "warm_up": "warm-up",
    "incomplete": "incomplete executions",
    "autotuning": "autotuning",
}
"""A few words for each code of `thence.model.reasons.APART`."""


@dataclass(frozen=True, slots=True)
class NextStep:
    """The question that a trace suggests.

    Attributes:
        verb: verb of the command line.
        options: options of the command line, which follow the inputs.
        call: the equivalent Python expression, for a `Trace` named ``trace``.
        why: what in the trace suggests the question.
    """

    verb: str
    options: tuple[str, ...]
    call: str
    why: str


@dataclass(frozen=True)
class Glance(Shown):
    """The first answers about a trace. All times are ns.

    Attributes:
        summary: totals, and GPU time by the requested kind of place or by `default_kind`.
        phases: GPU time of each phase, the most first; null where the phase is not known.
        communication_ns: time in which communication ran, summed over devices.
        exposed_ns: the part of communication_ns in which nothing was computed.
        idle: why the devices were idle, or the reason why that was not computed.
        next_step: what to ask next.
    """

    summary: Summary
    phases: pl.DataFrame
    communication_ns: Ns
    exposed_ns: Ns
    idle: Part[IdleTime]
    next_step: NextStep

    @property
    def answers(self) -> list[tuple[str, list[str]]]:
        """The topic of each answer and the parts of the answer, as text."""
        return list(_answers(self))

    def form(self) -> Form:
        """What a notebook shows of it."""
        said = (f"{question}: {', '.join(parts)}" for question, parts in self.answers)
        step = self.next_step
        of_summary = self.summary.form()
        return replace(
            of_summary, notes=(*said, f"next: {step.call}: {step.why}", *of_summary.notes)
        )


def glance(trace: Attributed, summary: Summary) -> Glance:
    """The first answers about a trace.

    Args:
        trace: attributed; a part of a trace where one was selected.
        summary: summary of the same part, with the soundness of the whole trace.
    """
    devices = exposure(trace).devices
    communication, exposed = (
        int(devices[name].sum()) for name in ("communication_ns", "exposed_ns")
    )
    phases = (
        trace.gpu.select("duration", phase=trace.places["phase"])
        .group_by(pl.col("phase").cast(pl.String))
        .agg(total_ns=pl.col("duration").sum())
        .sort("total_ns", "phase", descending=[True, False])
    )
    return Glance(
        summary,
        phases,
        communication,
        exposed,
        _idle(trace, summary),
        _next_step(trace, summary, exposed),
    )


def _idle(trace: Attributed, summary: Summary) -> Part[IdleTime]:
    if not summary.idle_ns:
        return Part(None)
    unknown = why_no_causes(trace)
    if unknown is not None:
        return Part(None, f"not computed: {unknown}")
    if trace.host.height > _MOST_HOST_RANGES:
        return Part(None, "not computed here, to save time; thence idle computes it")
    return Part(idle_time(trace))


def _next_step(trace: Attributed, summary: Summary, exposed: Ns) -> NextStep:
    """The first question that applies: problems that make figures wrong or empty come before large amounts of time."""
    return (
        _soundness(summary.soundness)
        or _graphs(summary)
        or _nothing_attributed(summary)
        or _idle_step(summary, _MOST_IDLE)
        or _communication(trace, summary, exposed)
        or _server_steps(trace)
        or _idle_step(summary, _SOME_IDLE)
        or NextStep(
            "flame",
            ("-o", "flame.html"),
            "trace.plot_flame()",
            "all GPU time by call stack, on one page",
        )
    )


def _soundness(soundness: Soundness) -> NextStep | None:
    if soundness.sound:
        return None
    found = len(soundness.findings)
    why = f"{found} finding{'s' if found > 1 else ''}: what is wrong with the trace, where and when"
    return NextStep("check", (), "trace.soundness", why)


def _graphs(summary: Summary) -> NextStep | None:
    """Suggests labels if CUDA graphs have none and labels can be joined to traces of this format."""
    inside = [reason for reason in summary.unattributed.get("label", ()) if reason.code == "graph"]
    if not inside or inside[0].share < _IN_GRAPHS or "thence label" not in (inside[0].advice or ""):
        return None
    share = format_share(inside[0].share, 1)
    if "--eager" in (inside[0].advice or ""):
        options = ("--eager", "EAGER", "-o", "labelled.json.gz")
        return NextStep(
            "label", options, "trace.label(eager=thence.open(EAGER))",
            f"{share} of the GPU time is in CUDA graphs without labels; EAGER is a trace of a run without graphs",
        )  # fmt: skip
    options = ("--labels", LABELS_FILE, "-o", "labelled.json.gz")
    return NextStep(
        "label", options, f'trace.label("{LABELS_FILE}")',
        f"{share} of the GPU time is in CUDA graphs without labels; thence.save_labels writes them at capture, "
        "or --eager takes them from a run without graphs",
    )  # fmt: skip


def _nothing_attributed(summary: Summary) -> NextStep | None:
    covered = max(summary.attributed_ns.get(kind, 0) for kind in _CODE)
    if covered >= _COVERED * summary.sum_ns:
        return None
    return NextStep(
        "report", ("--by", "op"), 'trace.summary("op")',
        f"{format_share(summary.sum_ns - covered, summary.sum_ns)} of the GPU time has no module, label or line; "
        "thence record -- python ... records them",
    )  # fmt: skip


def _idle_step(summary: Summary, least: float) -> NextStep | None:
    if summary.idle_ns < least * summary.span_ns:
        return None
    share = format_share(summary.idle_ns, summary.span_ns)
    why = f"the GPU was idle for {share} of the time: shows the lines and calls that it waited for"
    return NextStep("idle", (), "trace.idle()", why)


def _communication(trace: Attributed, summary: Summary, exposed: Ns) -> NextStep | None:
    if exposed < _EXPOSED * summary.busy_ns or trace.collectives.is_empty():
        return None
    why = f"{format_ns(exposed)} of exposed communication: shows sizes, and who waits for whom"
    return NextStep("collectives", (), "trace.collective_times()", why)


def _server_steps(trace: Attributed) -> NextStep | None:
    if trace.places["step-kind"].null_count() == trace.places.height:
        return None
    why = "steps of an inference server: time per step by batch size, layer and kernel"
    return NextStep("report", ("--by", "step-kind"), "trace.step_kinds()", why)


def _answers(glance: Glance) -> Iterator[tuple[str, list[str]]]:
    """Yields the topic of each answer and the parts of the answer."""
    summary = glance.summary
    known = glance.phases.filter(pl.col("phase").is_not_null())
    if not known.is_empty():
        yield (
            "phases",
            [
                f"{phase} {format_share(ns, summary.sum_ns)}"
                for phase, ns in known.rows()
                if ns >= _LEAST_SHARE * summary.sum_ns
            ]
            + _included(summary),
        )
    if glance.communication_ns:
        share = format_share(glance.communication_ns, summary.busy_ns)
        exposed = format_ns(glance.exposed_ns)
        yield (
            "communication",
            [
                f"{format_ns(glance.communication_ns)} ({share} of busy)",
                f"{exposed} of it exposed (nothing computed meanwhile)",
            ],
        )
    yield from _idle_answers(glance)
    yield "sound", _sound_answer(glance)


def _included(summary: Summary) -> list[str]:
    """Names the work that the table keeps in separate rows but that the shares of the phases include."""
    apart = [words for code, words in _APART_WORDS.items() if code in summary.apart["code"]]
    return [f"{' and '.join(apart)} included"] if apart else []


def _idle_answers(glance: Glance) -> Iterator[tuple[str, list[str]]]:
    idle = glance.idle.result
    if idle is None or not idle.idle_ns:
        if glance.idle.reason:
            yield "idle because of", [glance.idle.reason]
        return
    causes = idle.causes.filter(pl.col("share") >= _LEAST_SHARE).head(_MOST_CAUSES)
    yield "idle because of", _shares(causes["cause"].to_list(), causes["share"])
    places = (
        idle.rows.filter(pl.col("name").is_not_null(), pl.col("by") != "reason")
        .group_by("name")
        .agg(pl.col("share").sum())
        .sort("share", "name", descending=[True, False])
        .filter(pl.col("share") >= _LEAST_SHARE)
        .head(_MOST_PLACES)
    )
    if not places.is_empty():
        yield "idle at", _shares(fitted(places["name"].to_list(), _PLACE), places["share"])


def _shares(names: Iterable[str], shares: pl.Series) -> list[str]:
    return [f"{name} {format_share(share, 1)}" for name, share in zip(names, shares, strict=True)]


def _sound_answer(glance: Glance) -> list[str]:
    soundness = glance.summary.soundness
    if not soundness.sound:
        found = len(soundness.findings)
        return [f"no: {format_count(found)} finding{'s' if found > 1 else ''} (thence check)"]
    if not soundness.unknown:
        return ["nothing wrong was found"]
    first, *more = soundness.unknown
    return ["nothing wrong was found", f"but the trace cannot show {first}", *more]
