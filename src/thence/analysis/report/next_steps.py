"""Which commands to run next on a trace: each works on that trace, and shows what the first screen does not.

The verdict decides the order. A command is proposed only if the trace holds what it needs, so the conditions here are
those under which the verbs answer. What only another recording would show is advice, not a command.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.idle.answer import why_no_causes
from thence.model.formats import THENCE_RECORDING
from thence.model.places import STEP_KIND, TABLE_KINDS
from thence.model.selection import TYPICAL
from thence.model.thresholds import (
    ONE_LINE_SHARE,
    PROPOSED_COMPILING_SHARE,
    PROPOSED_COVERED_SHARE,
    PROPOSED_EXPOSED_SHARE,
    PROPOSED_SPREAD_SHARE,
    VERDICT_IDLE_SHARE,
)
from thence.units import format_ns, format_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from thence.analysis.report.headline import Headline
    from thence.analysis.report.summary import Summary
    from thence.model.attributed import Attributed

MAX_SHOWN = 3
"""Most commands that are proposed."""
MAX_REPLAYED = 150_000
"""Most rows (activities and host ranges) of a trace for which it is tried whether ``whatif`` can replay it: that takes
about a second for so many, and only a replay shows whether the recording explains enough."""
_CODE = ("module", "label", "source", "op_name")
_NOT_OF_JAX = ("module", "label")
"""Kinds of places that programs of JAX may lack, whose op_names say as much."""
_FORMATS_OF_RECORDINGS = frozenset({THENCE_RECORDING})


@dataclass(frozen=True, slots=True)
class NextStep:
    """A question that a trace suggests.

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


def next_steps(trace: Attributed, headline: Headline, summary: Summary, replays: Callable[[], bool]) -> list[NextStep]:
    """The questions that a trace suggests, the most promising first; at least one, at most `MAX_SHOWN`.

    Args:
        replays: whether ``whatif`` can replay the trace; called only if that is worth knowing.
    """
    by_topic = {
        "check": _check(summary),
        "ranks": _ranks(trace, headline),
        "collectives": _collectives(trace, headline),
        "idle": _idle(trace, headline),
        "compile": _compile(trace, headline),
        "step-kind": _server_steps(trace, summary),
        "steps": _steps(trace, headline),
        "rows": _rows(trace, summary),
    }
    leading = {
        "not_sound": "check",
        "waits_for_rank": "ranks",
        "communication_bound": "collectives",
        "input_bound": "idle",
        "launch_bound": "idle",
        "host_bound": "idle",
        "unknown": "idle",
        "gpu_bound": "rows",
    }[headline.verdict.code]
    order = [leading, *(topic for topic in by_topic if topic != leading)]
    steps = [step for topic in order if (step := by_topic[topic]) is not None]
    if len(steps) < MAX_SHOWN and trace.gpu.height + trace.host.height <= MAX_REPLAYED and replays():
        steps.append(_what_if())
    if len(steps) < MAX_SHOWN:
        steps.append(_flame())
    return steps[:MAX_SHOWN]


def _check(summary: Summary) -> NextStep | None:
    if summary.soundness.sound:
        return None
    count = len(summary.soundness.findings)
    why = f"{count} finding{'s' if count > 1 else ''}: what is wrong with the trace, where and when"
    return NextStep("check", (), "trace.check()", why)


def _ranks(trace: Attributed, headline: Headline) -> NextStep | None:
    """Late ranks need several devices that wait for each other in collectives."""
    if trace.collectives.is_empty() or trace.gpu.select("rank", "device").n_unique() < 2:
        return None
    late = headline.measured.late
    if late:
        why = "which rank makes the others wait, since when, and why"
    else:
        why = "how long ranks wait for each other, by rank and group"
    return NextStep("ranks", (), "trace.ranks()", why)


def _collectives(trace: Attributed, headline: Headline) -> NextStep | None:
    if headline.measured.exposed < PROPOSED_EXPOSED_SHARE or trace.collectives.is_empty():
        return None
    share = format_share(headline.measured.exposed, 1)
    waiting = headline.measured.waiting
    why = f"communication is exposed for {share} of {_whole(headline)}{waiting}: shows sizes and bandwidths"
    return NextStep("collectives", (), "trace.collectives()", why)


def _idle(trace: Attributed, headline: Headline) -> NextStep | None:
    idle = 1 - headline.measured.busy
    if idle < VERDICT_IDLE_SHARE or why_no_causes(trace.around) is not None:
        return None
    why = (
        f"the GPU is idle for {format_share(idle, 1)} of {_whole(headline)}: shows the lines and calls that it waits "
        "for"
    )
    if headline.steps is None:
        return NextStep("idle", (), "trace.idle()", why)
    call = f'trace.select(steps="{TYPICAL}").idle()'
    return NextStep("idle", ("--steps", TYPICAL), call, why)


def _compile(trace: Attributed, headline: Headline) -> NextStep | None:
    compiled = sum(part.compile_ns for part in headline.run)
    whole = max(sum(part.ns for part in headline.run), 1)
    if compiled < PROPOSED_COMPILING_SHARE * whole or not (trace.host["category"] == "compile").any():
        return None
    why = f"the host compiled for {format_ns(compiled)}: by phase and program"
    return NextStep("compile", (), "trace.compile()", why)


def _server_steps(trace: Attributed, summary: Summary) -> NextStep | None:
    known = trace.places["step-kind"].null_count() < trace.places.height
    if not known or summary.by == STEP_KIND:
        return None
    why = "passes of an inference server: time per pass by batch size, layer and kernel"
    return NextStep("report", ("--by", STEP_KIND), "trace.step_kinds()", why)


def _steps(trace: Attributed, headline: Headline) -> NextStep | None:
    steps = headline.steps
    if steps is None or steps.count < 2 or (trace.host.is_empty() and trace.programs.is_empty()):
        return None
    if steps.spread < PROPOSED_SPREAD_SHARE and "outlier" not in steps.left_out:
        return None
    shortest, longest = format_ns(steps.min_ns), format_ns(steps.max_ns)
    why = f"steps take {shortest} to {longest}: shows each, and what the long ones spend more on"
    return NextStep("steps", (), "trace.steps()", why)


def _rows(trace: Attributed, summary: Summary) -> NextStep | None:
    """Another kind of place that explains most of the time: the first that is not shown."""
    whole = max(summary.sum_ns, 1)
    for kind in (*TABLE_KINDS, "kernel"):
        if kind == summary.by:
            continue
        if kind == "kernel":
            names, covered = trace.gpu["name"], 1.0
        else:
            names, covered = trace.places[kind], summary.attributed_ns.get(kind, 0) / whole
        several = names.n_unique() - bool(names.null_count()) > 1
        if several and covered >= PROPOSED_COVERED_SHARE:
            why = f"the same time by {kind}" + (f" ({format_share(covered, 1)})" * (covered < 1))
            return NextStep("report", ("--by", kind), f'trace.report("{kind}")', why)
    return None


def _what_if() -> NextStep:
    why = "what the largest kernels, places, waits and causes of idle time would gain if they were gone"
    return NextStep("whatif", (), "trace.whatif()", why)


def _flame() -> NextStep:
    why = "all GPU time by call stack, on one page"
    return NextStep("flame", ("-o", "flame.html"), "trace.plot_flame()", why)


def _whole(headline: Headline) -> str:
    return "the recording" if headline.steps is None else "a step"


def advice(trace: Attributed, summary: Summary) -> Iterator[str]:
    """What another recording would show, one sentence each."""
    named, shown = (summary.attributed_ns.get(kind, 0) for kind in ("op_name", summary.by))
    if summary.by in _NOT_OF_JAX and named >= PROPOSED_COVERED_SHARE * summary.sum_ns > 0 and shown < named / 2:
        has_it, has_name = (format_share(ns, summary.sum_ns) for ns in (shown, named))
        yield (
            f"{has_it} of the GPU time has a {summary.by}, {has_name} has the op_name that JAX wrote: thence report "
            "--by op_name shows it"
        )
        return
    inside = [reason for reason in summary.unattributed.get("label", ()) if reason.code == "graph"]
    if inside and inside[0].share >= 0.2 and "thence label" in (inside[0].advice or ""):
        share = format_share(inside[0].share, 1)
        yield (
            f"{share} of the GPU time is in CUDA graphs without labels: thence label REPLAY --eager EAGER takes them "
            "from a run without graphs, --labels LABELS from what thence.save_labels wrote at their capture"
        )
        return
    covered = max(summary.attributed_ns.get(kind, 0) for kind in _CODE)
    recorded = set(trace.meta.formats) <= _FORMATS_OF_RECORDINGS
    known = covered >= PROPOSED_COVERED_SHARE * summary.sum_ns or recorded or not trace.programs.is_empty()
    if not known and not trace.meta.accelerators - {"cuda"}:
        yield (
            f"{format_share(summary.sum_ns - covered, summary.sum_ns)} of the GPU time has no module, label or line: "
            "thence record -- python ... names them without any annotation"
        )
    elif recorded:
        yield from _one_line(trace)


def _one_line(trace: Attributed) -> Iterator[str]:
    """That one line of the program launched nearly everything, although the time is in several modules."""
    places = trace.places.select("source", "module", duration=trace.gpu["duration"])
    lines = places.drop_nulls("source").group_by("source").agg(pl.col("duration").sum())
    largest = lines.sort("duration").tail(1)
    share = sum(largest["duration"]) / max(int(trace.gpu["duration"].sum()), 1)
    if share >= ONE_LINE_SHARE and places["module"].drop_nulls().n_unique() > 1:
        yield (
            f"{format_share(share, 1)} of the GPU time is launched by one line, {largest['source'][0]}: "
            "thence record --own PACKAGE, with the library that it calls (--own transformers), names lines inside it"
        )
