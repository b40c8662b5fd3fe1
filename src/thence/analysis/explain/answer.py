"""`explain` makes findings of the other answers about a trace, the most severe first, and computes nothing itself.

Every figure is one that a verb prints, or such a figure as a share of the step that `report` states. Findings of one
severity are ordered by what they gain, or else take, of a step. A limit of characters keeps first what the verdict is
about, and where the time goes; the sections of `SECTIONS` each have a finding, or say why
the trace cannot answer. An unsound trace gets no finding that its defect may have changed: what remains is what was
recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.analysis.activity_rooflines import LINKS_WAIT
from thence.analysis.explain.finding import (
    MAX_ROWS,
    SENTENCE_WIDTH,
    Command,
    Finding,
    Gain,
    Moment,
    NotAnswered,
    all_quoted,
    option,
    quoted,
    sentence,
)
from thence.analysis.explain.moments import WINDOWS, longest_piece
from thence.analysis.idle.host_causes import MEANINGS
from thence.analysis.report.verdict import WITHOUT_STEPS
from thence.analysis.whatif.answer import FREEABLE
from thence.analysis.whatif.prediction import MAX_SUGGESTED
from thence.model.answer import Answer, Lines, ResultOrReason
from thence.model.places import FOLLOWING, LAYERED
from thence.model.selection import TYPICAL
from thence.model.thresholds import MAX_WITHOUT_EDGES_SHARE, SHOWN_SHARE, WELL_COVERED_SHARE
from thence.units import format_bytes, format_ns, format_share, several

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from thence.analysis.collectives.answer import Collectives
    from thence.analysis.idle.answer import IdleTime
    from thence.analysis.memory.answer import Memory
    from thence.analysis.ranks.answer import Job
    from thence.analysis.report.headline import Headline
    from thence.analysis.report.next_steps import NextStep
    from thence.analysis.report.summary import Summary
    from thence.analysis.roofline import Roofline
    from thence.analysis.soundness.findings import Soundness
    from thence.analysis.whatif.answer import WhatIf

KINDS: Mapping[str, str] = {
    "where": "where the GPU time goes, by the kind of place that covers most of it",
    "kernel": "the kernels that take most GPU time",
    "idle": "one cause for which the GPU is idle",
    "late": "a rank that makes the others wait, and why",
    "no_late_rank": "no rank makes the others wait",
    "communication": "communication in which nothing is computed",
    "use": "FLOP and bytes against what the GPU allows",
    "precision": "matrix products that a narrower data type would make faster",
    "headroom": "the place that is furthest above the time that the GPU allows",
    "memory": "the device with the highest peak of memory, and what holds it",
    "gain": "a change with its predicted gain",
    "rest": "the recording besides the typical steps",
}
"""The kinds of findings."""
SECTIONS = ("why the GPU is idle", "late ranks", "use of the GPU", "memory", "gains of changes", "time of a step")
"""Questions that a trace may be unable to answer."""
_MAX_CAUSES = 4
_MAX_GAINS = 3
_MAX_LATE = 3
_MIN_SHARE = 0.02
"""Causes, and exposed communication, below this share of a step are no finding."""
_MORE_OF_CAUSE = " on the host, also where the GPU does not wait for it"
_NO_PREDICTION = "headroom is no prediction: whatif --at-roofline predicts the gain of a place"
_BY_HOST = ("host_bound", "launch_bound", "input_bound")
"""Verdicts by which the GPU waits for its host in every step."""
_HIGH, _MEDIUM = 0.1, 0.02  # shares from which a finding has these severities
_SEVERITIES = ("high", "medium", "low", "info")
_STACKS = "thence record -- python ... samples the program; or torch.profiler with with_stack=True"
_MEMORY = "torch.profiler with profile_memory=True, or torch.cuda.memory._dump_snapshot()"


@dataclass(frozen=True)
class Explanation(Answer):
    """What an expert would say about a trace.

    Attributes:
        soundness: of the whole trace.
        headline: the typical step and the verdict; None without device work.
        findings: the most severe first.
        not_answered: what the trace cannot answer.
        useful: numbers of the findings, the most useful first; all in their order if it is empty.
        first: how many of these come before `not_answered` where a limit leaves some out.
        inputs: the inputs as a shell takes them, for commands.
        width: most characters of a sentence of the heading.
    """

    soundness: Soundness
    headline: Headline | None
    findings: tuple[Finding, ...]
    not_answered: tuple[NotAnswered, ...]
    useful: tuple[int, ...] = ()
    first: int = 5
    inputs: str = "INPUT"
    width: int = SENTENCE_WIDTH

    @property
    def ordered(self) -> tuple[Finding | NotAnswered, ...]:
        """Findings and what was not answered, in the order in which a limit keeps them."""
        kept = [self.findings[number] for number in self.useful] or self.findings
        return (*kept[: self.first], *self.not_answered, *kept[self.first :])

    def _said(self, text: str) -> str:
        return sentence(text, self.width)

    @property
    def heading(self) -> tuple[str, ...]:
        """What was not read, soundness, the worst finding about it, the typical step and the verdict."""
        worst = [str(finding) for finding in self.soundness.findings[:1]]
        steps = [] if self.headline is None or self.headline.steps is None else [self.headline.lines[0]]
        known = self.headline is not None and self.headline.verdict.code != "not_sound"
        verdict = [self.headline.verdict.text] if self.headline is not None and known else []
        lines = (*self.caveats.left_out[:1], self.soundness.verdict, *worst, *steps, *verdict, *self._warned)
        return tuple(map(self._said, lines))

    @property
    def _warned(self) -> list[str]:
        """The first warning of the readers, with the number of the others."""
        warnings = self.caveats.warnings
        more = f" (and {several(len(warnings) - 1, 'more warning')})" if len(warnings) > 1 else ""
        return [f"warning{more}: {warnings[0]}"] if warnings else []

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return self.heading

    def views(self) -> tuple[Lines, ...]:
        """The findings, then what was not answered."""
        findings = [(line, "") for finding in self.findings for line in finding_lines(finding, self.inputs)]
        missing = [(f"not answered: {n.question}: {n.reason}; {n.how}", "dim") for n in self.not_answered]
        return (Lines(tuple(findings)), Lines(tuple(missing)))

    def to_frame(self) -> pl.DataFrame:
        """One row for each finding, with the command that shows it, and its gain in ns."""
        rows = [
            {
                "id": f.id, "kind": f.kind, "rank": f.rank, "place": f.place or None, "claim": f.claim,
                "value": f.value, "unit": f.unit, "low": f.low, "high": f.high, "share": f.share,
                "severity": f.severity,
                "evidence": f.evidence.line(self.inputs), "gain_ns": f.gain and f.gain.ns,
                "gain_low_ns": f.gain and f.gain.low, "gain_high_ns": f.gain and f.gain.high,
                "next": f.next.line(self.inputs),
            }
            for f in self.findings
        ]  # fmt: skip
        return pl.DataFrame(rows, schema=_FRAME)

    def all_notes(self) -> tuple[str, ...]:
        """None: what limits the findings is in them."""
        return ()

    def opening(self) -> dict[str, Any]:
        """The part of the JSON document that is never left out."""
        steps = None if self.headline is None else self.headline.steps
        verdict = None if self.headline is None else self.headline.verdict
        return {
            "sound": {
                "sound": self.soundness.sound,
                "verdict": self._said(self.soundness.verdict),
                "findings": [
                    {"code": f.code, "rank": f.rank, "share": f.span_share, "text": self._said(f.text)}
                    for f in self.soundness.findings[:1]
                ],
                "more_findings": max(len(self.soundness.findings) - 1, 0),
            },
            "verdict": verdict and {"code": verdict.code, "text": self._said(verdict.text)},
            "steps": steps
            and {
                "count": steps.count,
                "typical": steps.typical,
                "median_ns": steps.median_ns if steps.plain is None else steps.plain.plain.median_ns,
                "busy_share": steps.busy_share,
                "idle_is": steps.idle_is,
            },
            "warnings": [self._said(text) for text in (*self.caveats.left_out[:1], *self._warned)],
        }

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values; `thence.writers.text.explanation` leaves findings out where there is a limit."""
        return {
            **self.opening(),
            "findings": [finding.to_json(self.inputs) for finding in self.findings],
            "not_answered": [entry.to_json() for entry in self.not_answered],
            "dropped": 0,
            "dropped_not_answered": 0,
        }

    def document(self) -> dict[str, Any]:
        """`to_json`: soundness is in it."""
        return self.to_json()


_SPANS = {
    "rank": pl.Int32, "device": pl.Int32, "start": pl.Int64, "duration": pl.Int64, "track": pl.String,
    "name": pl.String,
}  # fmt: skip
_FRAME = {
    "id": pl.String, "kind": pl.String, "rank": pl.Int64, "place": pl.String, "claim": pl.String, "value": pl.Float64,
    "unit": pl.String, "low": pl.Float64, "high": pl.Float64, "share": pl.Float64, "severity": pl.String,
    "evidence": pl.String, "gain_ns": pl.Float64, "gain_low_ns": pl.Float64, "gain_high_ns": pl.Float64,
    "next": pl.String,
}  # fmt: skip


def finding_lines(finding: Finding, inputs: str) -> Iterator[str]:
    """A finding as lines of text: its claim, its gain, and the commands."""
    yield f"[{finding.id}] {finding.severity}: {finding.claim}"
    if finding.gain is not None and finding.kind != "gain":
        yield f"  gain: {gain_text(finding.gain)}"
    elif finding.gain is None and finding.severity != "info":
        yield f"  no gain predicted: {finding.no_gain}"
    yield f"  evidence: {finding.evidence.line(inputs)}"
    if finding.next != finding.evidence:
        yield f"  next: {finding.next.line(inputs)}"


def gain_text(gain: Gain) -> str:
    """A predicted gain in words."""
    return f"{format_ns(gain.ns)} ({format_ns(gain.low)} to {format_ns(gain.high)}) if {gain.condition}"


@dataclass(frozen=True)
class Composed:
    """The answers that `explain` is made of, each computed once.

    Attributes:
        soundness: of the whole trace.
        headline: of the trace.
        summary, kernels: GPU time of the typical steps (of the whole trace without steps) by the default kind of
            place, and by kernel.
        idle: idle time of the same part.
        job: late ranks, with reasons if there are some; None for one device.
        collectives: of the whole trace.
        roofline: of the same part as the summary.
        memory: what was live at the peak.
        gains: of suggested changes.
        next_steps: what to ask next.
        kernel_moments: for each kernel's name, its longest execution.
        typical: whether the figures of `summary` are those of the typical steps.
        devices: number of devices with work.
        named: the inputs of the tables, for a sentence; those of a store differ from the store.
        windows: rank, device, step, start and duration of each step; empty without steps.
    """

    soundness: Soundness
    headline: Headline
    summary: Summary
    kernels: Summary
    idle: ResultOrReason[IdleTime]
    job: ResultOrReason[Job]
    collectives: ResultOrReason[Collectives]
    roofline: ResultOrReason[Roofline]
    memory: ResultOrReason[Memory]
    gains: ResultOrReason[WhatIf]
    next_steps: Sequence[NextStep] = ()
    kernel_moments: Mapping[str, Moment] = field(default_factory=dict)
    typical: bool = False
    devices: int = 1
    named: str = ""
    windows: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=WINDOWS))

    def reason(self, text: str) -> str:
        """Why an answer is missing, without the names of the inputs before it."""
        for named in (self.summary.meta.named, ", ".join(self.summary.meta.inputs), self.named):
            if named and text.startswith(f"{named}: holds "):
                return sentence(f"the trace {text.removeprefix(f'{named}: ')}")
            text = text.removeprefix(f"{named}: ")
        return sentence(text)

    @property
    def steps(self) -> tuple[str, ...]:
        """Options that select what the figures are of."""
        return ("--steps", TYPICAL) if self.typical else ()

    @property
    def whole(self) -> str:
        """What the GPU times are shares of, in words."""
        return "the GPU time of typical steps" if self.typical else "the GPU time"

    @property
    def unit(self) -> str:
        """What shares of time are of, in words."""
        return "a step" if self.headline.steps is not None else WITHOUT_STEPS

    @property
    def replayed(self) -> str:
        """What a change makes shorter, in words."""
        return "a step" if self.headline.steps is not None else "the program"

    @property
    def backward_share(self) -> float:
        """Share of the GPU time that is backward work and counts at the place of its forward operator."""
        rows = self.summary.rows.filter(pl.col("attributed"))
        return int(rows["backward_ns"].sum()) / max(self.summary.sum_ns, 1)

    def with_backward(self, kind: str) -> str:
        """What must be said of a place of a kind besides its name; empty if its backward work does not count there."""
        return (
            " (backward work counts at its forward operator)"
            if kind in FOLLOWING and self.backward_share >= SHOWN_SHARE
            else ""
        )

    @property
    def length_ns(self) -> float | None:
        """Length of a typical step, without recording if that is known; None without steps."""
        steps = self.headline.steps
        if steps is None:
            return None
        return steps.median_ns if steps.plain is None else steps.plain.plain.median_ns

    @property
    def next(self) -> Command:
        """The most promising command."""
        if not self.next_steps:
            return Command("report")
        first = self.next_steps[0]
        return Command(first.verb, first.options)


def explanation(composed: Composed) -> Explanation:
    """What an expert would say about a trace.

    Args:
        composed: the answers about it.
    """
    missing: list[NotAnswered] = []
    if composed.headline.steps is None:
        how = "mark steps: prof.step() of torch.profiler, thence.step(), jax.profiler.StepTraceAnnotation"
        missing.append(NotAnswered("time of a step", sentence(composed.headline.no_steps or "no steps"), how))
    where, kernels = list(_where(composed)), list(_kernels(composed))
    if composed.headline.verdict.code == "not_sound":
        how = sentence("thence check states what is wrong; record again so that it finds nothing")
        reason = "the trace is not sound, so idle time, the verdict and gains can be wrong"
        missing += [NotAnswered(question, reason, how) for question in ("why the GPU is idle", "gains of changes")]
        missing += [NotAnswered("late ranks", reason, how)] if composed.job.result is not None else []
        memory = list(_memory(composed, missing))
        return Explanation(composed.soundness, composed.headline, (*where, *kernels, *memory), tuple(missing))
    gains = list(_gains(composed, missing))
    idle = list(_idle(composed, missing))
    late = list(_late(composed, missing))
    use, wide = list(_use(composed, missing)), list(_precision(composed))
    memory = list(_memory(composed, missing))
    communication = list(_communication(composed))
    known = composed.roofline.result
    modelled = known is not None and known.modelled_share >= WELL_COVERED_SHARE
    # What the verdict is about comes first; where nothing makes the GPU wait, what it does.
    leading = {
        "waits_for_rank": [*late, *idle],
        "communication_bound": [*communication, *late, *idle],
        "gpu_bound": [*(use[:1] if modelled else kernels), *wide, *late, *idle],
    }.get(composed.headline.verdict.code, [*idle, *late])
    first = [*leading[:2], *gains[:1], *where, *leading[2:]]
    rest = [*gains[1:], *communication, *kernels, *memory, *use, *wide, *_rest(composed)]
    findings = (*first, *(finding for finding in rest if not any(finding is other for other in leading)))
    order = sorted(range(len(findings)), key=lambda number: _rank(composed, findings[number]))
    return Explanation(
        composed.soundness, composed.headline, tuple(findings[number] for number in order), tuple(missing),
        tuple(order.index(number) for number in range(len(findings))), max(len(first), 3),
    )  # fmt: skip


def _rank(composed: Composed, finding: Finding) -> tuple[int, bool, float]:
    """Where a finding stands; lower is before.

    By severity; what was measured before what a change would gain, which may be a change that cannot be made; then by
    the share of a step that it gains, or else takes.
    """
    severity = _SEVERITIES.index(finding.severity)
    if finding.severity == "info":
        return severity, False, 0.0
    gains = composed.gains.result
    share = finding.share or 0.0
    if finding.gain is not None and gains is not None:
        share = finding.gain.ns / max(gains.step_ns, 1)
    return severity, finding.kind == "gain", -share


def without_device_work(soundness: Soundness, reason: str) -> Explanation:
    """The explanation of a trace without device work: that it has none.

    Args:
        reason: why there is none, with the way out.
    """
    missing = NotAnswered("where the GPU time goes", sentence(reason), "record again with device activities")
    return Explanation(soundness, None, (), (missing,))


# ---- Sections


def _where(composed: Composed) -> Iterator[Finding]:
    """GPU time by the default kind of place: the largest rows, and the rest."""
    summary = composed.summary
    rows = summary.rows if summary.folded is None else summary.folded
    if rows.is_empty() or summary.by == "kernel":
        return
    shown = _rows(rows, summary.sum_ns, summary.by)
    named = [f"{row['name']} {format_share(row['share'], 1)}" for row in shown]
    parts = (*composed.steps, "--by", summary.by)
    of_backward = composed.backward_share
    counted = f"; backward work, {format_share(of_backward, 1)}, counts where its forward operator was called"
    backward = counted if of_backward >= SHOWN_SHARE else ""
    yield Finding(
        "where",
        f"{composed.whole} by {summary.heading}: {', '.join(named)}{backward}",
        float(summary.sum_ns),
        "ns",
        Command("report", parts),
        Command("report", (*parts, "--depth", "3") if summary.by in LAYERED else ("--by", "kernel")),
        share=1.0,
        rows=tuple(shown),
        no_gain="it describes the program; findings of kind gain have what changes gain",
        place=summary.by,
    )


def _rows(rows: pl.DataFrame, total: int, by: str) -> list[dict[str, Any]]:
    """The largest rows as evidence, and the rest as the last one, so that they add up to the whole."""
    most = rows.height if rows.height <= MAX_ROWS else MAX_ROWS - 1
    largest = rows.select("name", "attributed", "count", "total_ns").head(most)
    names = all_quoted(largest["name"].to_list(), by)
    shown = [
        {
            "name": text if row["attributed"] else sentence(row["name"]),
            "count": row["count"],
            "total_ns": row["total_ns"],
            "share": row["total_ns"] / max(total, 1),
        }
        for text, row in zip(names, largest.iter_rows(named=True), strict=True)
    ]
    rest = rows[most:]
    if rest.height:
        ns = int(rest["total_ns"].sum())
        count = int(rest["count"].sum())
        shown.append(
            {"name": several(rest.height, "other row"), "count": count, "total_ns": ns, "share": ns / max(total, 1)}
        )
    return shown


def _kernels(composed: Composed) -> Iterator[Finding]:
    """The kernels that take most time."""
    summary = composed.kernels
    if summary.rows.is_empty():
        return
    shown = _rows(summary.rows, summary.sum_ns, "kernel")
    named = [f"{row['name']} {format_share(row['share'], 1)}" for row in shown]
    largest = str(summary.rows["name"][0])
    command = Command("report", (*composed.steps, "--by", "kernel"))
    yield Finding(
        "kernel",
        f"{composed.whole} by kernel: {', '.join(named)}",
        float(summary.rows["total_ns"][0]),
        "ns",
        command,
        Command("roofline", ("--by", "kernel")) if composed.roofline.result is not None else command,
        share=shown[0]["share"],
        rows=tuple(shown),
        no_gain="it describes the program; findings of kind gain have what changes gain",
        moment=composed.kernel_moments.get(largest),
    )


def _idle(composed: Composed, missing: list[NotAnswered]) -> Iterator[Finding]:
    """The causes of idle time, those that take at least 2 % of a step."""
    causes = composed.headline.measured.causes
    question = "why the GPU is idle"
    if causes is None:
        reason = composed.headline.measured.no_causes or composed.idle.reason or "the trace does not tell"
        missing.append(NotAnswered(question, composed.reason(reason), _STACKS))
        return
    ordered = sorted(causes, key=lambda cause: (-causes[cause], cause))
    for cause in [c for c in ordered if causes[c] >= _MIN_SHARE][:_MAX_CAUSES]:
        if cause == "unknown":
            reason = f"the trace does not show why the GPU is idle for {format_share(causes[cause], 1)} of "
            missing.append(NotAnswered("a part of the idle time", reason + composed.unit, _STACKS))
            continue
        yield _cause(composed, cause, causes[cause])


def _cause(composed: Composed, cause: str, share: float) -> Finding:
    """One cause of idle time."""
    idle = composed.idle.result
    rows: list[dict[str, Any]] = []
    places, moment = "", None
    if idle is not None:
        of_cause = idle.shown_rows.filter(pl.col("cause") == cause)
        whole = int(of_cause["total_ns"].sum())
        largest = of_cause.drop_nulls("name").head(MAX_ROWS - 1)
        rows = [
            {"by": row["by"], "name": quoted(row["name"], row["by"] or ""), "total_ns": row["total_ns"]}
            for row in largest.iter_rows(named=True)
        ]
        if rest := whole - int(largest["total_ns"].sum()):
            rows.append({"by": None, "name": "the rest", "total_ns": rest})
        if rows and rows[0]["by"] not in (None, "step"):  # that it was in a step says nothing of where
            place = f"{rows[0]['by']} {rows[0]['name']}{composed.with_backward(rows[0]['by'])}"
            places = f", most of it at {place}" if rows[0]["total_ns"] > 0.5 * max(whole, 1) else ""
        moment = longest_piece(idle.unnamed.filter(pl.col("cause") == cause))
    steps = composed.headline.steps
    at_most = "at most " if steps is not None and steps.idle_is == "at most" else ""
    length = composed.length_ns
    ns = "" if length is None else f" ({format_ns(share * length)})"
    spread = composed.headline.measured.spread(cause)
    gain, no_gain = _gain_of(composed, f"free cause:{cause}")
    gains = composed.gains.result
    free = Command("whatif", ("--free", f"cause:{cause}"))
    return Finding(
        "idle",
        f"the GPU is idle for {at_most}{spread.text(share)} of {composed.unit}{ns} because of "
        f"{cause} ({MEANINGS[cause]}){places}",
        None if length is None else share * length,
        "ns per step" if length is not None else "share",
        Command("report") if idle is None else Command("idle", composed.steps),
        free if gains is not None and cause in gains.causes else composed.next,
        share=share,
        severity=_severity(share),
        rows=tuple(rows),
        gain=gain,
        no_gain=no_gain,
        place=cause,
        moment=moment,
    )


def _late(composed: Composed, missing: list[NotAnswered]) -> Iterator[Finding]:
    """Late ranks with their reasons, or that none is late."""
    job = composed.job.result
    if job is None:
        how = "if it is one rank of several, record all of them, and give all files"
        only_device = "one device, so no device waits for another"
        reason = composed.job.reason if composed.devices > 1 else only_device
        missing.append(NotAnswered("late ranks", composed.reason(reason), how))
        return
    late = job.stragglers
    if late.is_empty():
        if job.statement.startswith("no straggler:"):
            most = job.ranks.row(0, named=True)
            yield Finding(
                "no_late_rank", sentence(job.statement), float(most["caused_share"]), "share", Command("ranks"),
                Command("collectives") if composed.collectives.result is not None else composed.next,
                share=float(most["caused_share"]), no_gain="no rank is late",
            )  # fmt: skip
            return
        how = "record all ranks of the job, three or more typical steps"
        missing.append(NotAnswered("late ranks", sentence(job.statement), how))
        return
    for row in late.head(_MAX_LATE).iter_rows(named=True):
        yield _late_rank(composed, job, row)


def _late_rank(composed: Composed, job: Job, row: Mapping[str, Any]) -> Finding:
    """One late rank."""
    why = job.reasons_for(row["rank"], row["device"])
    rows: list[dict[str, Any]] = []
    because = ""
    if why is not None:
        of_cause = why.rows.filter(pl.col("by") == "cause")
        causes = [f"{cause} {format_share(share, 1)}" for cause, share in of_cause.select("cause", "share").rows()[:2]]
        lines = why.rows.filter(pl.col("by").is_in(["source", "module", "label"]))
        place = f" at {lines['by'][0]} {quoted(lines['name'][0])}" if lines.height else ""
        because = f"; its extra time: {', '.join(causes)}{place}" if causes else ""
        rows = [
            {"cause": r["cause"], "by": r["by"], "name": quoted(r["name"], r["by"]) if r["by"] != "cause" else None,
             "total_ns": r["total_ns"]}
            for r in why.rows.head(MAX_ROWS).iter_rows(named=True)
        ]  # fmt: skip
    gain, no_gain = _gain_of(composed, f"on-time rank:{row['rank']}")
    on_time = Command("whatif", ("--on-time", f"rank:{row['rank']}"))
    ours = job.cells.filter(pl.col("rank") == row["rank"], pl.col("device") == row["device"])
    worst = ours.sort("caused_ns", descending=True, maintain_order=True).head(1)
    windows = composed.windows.join(worst, left_on=("rank", "device", "step"), right_on=("rank", "device", "key"))
    return Finding(
        "late",
        f"rank {row['rank']} GPU {row['device']} makes the others wait {format_ns(row['mean_ns'])} per step "
        f"({format_share(row['late_share'], 1)} of a step) since {quoted(str(row['since_step']))}{because}",
        float(row["mean_ns"]),
        "ns per step",
        Command("ranks"),
        on_time if composed.gains.result is not None else composed.next,
        low=None if row["low_ns"] is None else float(row["low_ns"]),
        share=float(row["late_share"]),
        severity=_severity(row["late_share"]),
        rows=tuple(rows),
        gain=gain,
        no_gain=no_gain,
        place=f"GPU {row['device']}",
        rank=row["rank"],
        moment=longest_piece(windows),
    )


def _communication(composed: Composed) -> Iterator[Finding]:
    """Exposed communication, if it takes at least 2 % of a step."""
    times = composed.collectives.result
    exposed, spread = composed.headline.measured.exposed, composed.headline.measured.spread("exposed")
    if exposed < _MIN_SHARE:
        return
    rows: tuple[dict[str, Any], ...] = ()
    kind, largest = "", ""
    if times is not None:
        rows = _by_kind(times)
        kind = str(rows[0]["collective"])
        rows = tuple(row | {"collective": quoted(row["collective"])} for row in rows)
        largest = f"; the largest part in {quoted(kind)}"
    gain, no_gain = _gain_of(composed, f"free collective:{kind}")
    length = composed.length_ns
    ranks = Command("ranks") if composed.job.result is not None else composed.next
    yield Finding(
        "communication",
        f"for {spread.text(exposed)} of {composed.unit} the GPU communicates and computes nothing"
        f"{composed.headline.measured.waiting}{largest}",
        None if length is None else exposed * length,
        "ns per step" if length is not None else "share",
        ranks if times is None else Command("collectives"),
        ranks,
        share=exposed,
        severity=_severity(exposed),
        rows=rows,
        gain=gain,
        no_gain=no_gain,
        place=kind,
    )


def _by_kind(times: Collectives) -> tuple[dict[str, Any], ...]:
    """Count, total_ns and exposed_ns of each kind of collective, the most exposed first."""
    kinds = times.by_size.group_by(pl.col("collective").cast(pl.String).fill_null("unknown")).agg(
        count=pl.col("count").sum(), total_ns=pl.col("duration_ns").sum(), exposed_ns=pl.col("exposed_ns").sum()
    )
    return tuple(kinds.sort("exposed_ns", "collective", descending=[True, False]).head(MAX_ROWS).to_dicts())


def _use(composed: Composed, missing: list[NotAnswered]) -> Iterator[Finding]:
    """FLOP and bytes against what the GPU allows."""
    roofline = composed.roofline.result
    question = "use of the GPU"
    if roofline is None or not roofline.modelled_share:
        reason = "no work of the trace has known FLOP or bytes" if roofline is not None else composed.roofline.reason
        how = "torch.profiler with record_shapes=True, thence record, or XLA's HLO; --peak for other GPUs"
        missing.append(NotAnswered(question, composed.reason(reason), how))
        return
    totals = {key: value or 0 for key, value in roofline.totals.items()}
    modelled = totals["flop_modelled_ns"] + totals["bytes_only_ns"]
    bounded = totals["roofline_ns"] / max(modelled, 1)
    if not 0 <= bounded <= 1:
        reason = "the FLOP or bytes that the trace states are impossible"
        missing.append(NotAnswered(question, reason, "thence roofline lists them; --peak states other peaks"))
        return
    known = format_share(roofline.modelled_share, 1)
    of_steps = roofline.steps.drop_nulls("mfu")
    mfu = sorted(float(value) for value in of_steps["mfu"])
    ends = list(dict.fromkeys(format_share(value, 1) for value in (*mfu[:1], *mfu[-1:])))
    said = f"; MFU {' to '.join(ends)}" if mfu else ""
    counted = _counted(roofline)
    command = Command("roofline", (*composed.steps, "--by", roofline.by))
    rows = tuple(
        {"name": quoted(str(row["name"])) if row["name"] is not None else "without a place",
         "total_ns": row["total_ns"], "headroom_ns": row["headroom_ns"], "bound": row["bound"]}
        for row in roofline.rows.head(MAX_ROWS).iter_rows(named=True)
    )  # fmt: skip
    waits = "; a step gains less than that, because the host decides when much of it begins"
    verdict = composed.headline.verdict.code
    yield Finding(
        "use",
        f"work with known FLOP or bytes ({known} of {composed.whole}) would need "
        f"{format_share(bounded, 1)} of its time at the roofline of the GPU{said}{counted}"
        f"{waits if verdict in _BY_HOST else ''}",
        bounded,
        "share",
        command,
        Command("roofline", (*composed.steps, "--by", "kernel")),
        share=roofline.modelled_share,
        rows=rows,
        no_gain=_NO_PREDICTION,
    )
    yield from _headroom(composed, roofline, command)


def _headroom(composed: Composed, roofline: Roofline, command: Command) -> Iterator[Finding]:
    """The place that is furthest above the roofline, if most work has one."""
    places = roofline.rows.filter(pl.col("reason").is_null())  # only places can be changed
    row = next(places.iter_rows(named=True), None)
    if row is None or not row["headroom_ns"] or roofline.modelled_share < WELL_COVERED_SHARE:
        return
    place, headroom = str(row["name"]), format_ns(row["headroom_ns"])
    gains = composed.gains.result
    predicts = Command("whatif", option("at-roofline", roofline.by, place))
    yield Finding(
        "headroom",
        f"{roofline.heading} {quoted(place, roofline.by)} is furthest above the roofline: by {headroom} of its "
        f"{format_ns(row['total_ns'])} ({format_share(row['share'], 1)} of all known headroom) in {composed.whole}; "
        f"most of its modelled time is bound by {row['bound']}{f'; {LINKS_WAIT}' if row['bound'] == 'link' else ''}",
        float(row["headroom_ns"]),
        "ns",
        command,
        predicts if gains is not None and not gains.health.opaque else command,
        share=float(row["share"]),
        no_gain=_NO_PREDICTION,
        place=place,
    )


def _precision(composed: Composed) -> Iterator[Finding]:
    """Matrix products in FP32 or TF32."""
    roofline = composed.roofline.result
    if roofline is None or not roofline.wide_text:
        return
    command = Command("roofline", (*composed.steps, "--by", "kernel"))
    yield Finding(
        "precision",
        roofline.wide_text,
        float(sum(roofline.wide_ns.values())),
        "ns",
        command,
        command,
        share=roofline.wide_share,
        rows=tuple({"name": dtype, "total_ns": ns} for dtype, ns in roofline.wide_ns.items()),
        no_gain="narrower products change the results, and their time is not predicted",
    )


def _counted(roofline: Roofline) -> str:
    """What hardware counters say; empty without."""
    if roofline.counters is None or roofline.counters.windows.is_empty() or roofline.measured.is_empty():
        return ""
    names = [quoted(str(name), roofline.by) for name in roofline.rows["name"].to_list()]
    said = roofline.counters.said(roofline.measured.with_columns(pl.Series("name", names, dtype=pl.String)))
    return said and f"; {said}"


def _memory(composed: Composed, missing: list[NotAnswered]) -> Iterator[Finding]:
    """The device with the highest peak of memory, and what held it."""
    memory = composed.memory.result
    if memory is None or memory.devices.is_empty():
        reason = composed.reason(composed.memory.reason)
        missing.append(NotAnswered("memory", reason.partition(": torch.profiler records them")[0], _MEMORY))
        return
    row = memory.most
    who = "the host" if row["device"] is None else f"GPU {row['device']}"
    who = f"rank {row['rank']} {who}" + (f", program {quoted(row['program'])}" if row["program"] else "")
    same = [pl.col(name).eq_missing(pl.lit(row[name])) for name in ("rank", "device", "program")]
    rows = memory.rows.filter(*same).head(MAX_ROWS)
    names = ["without a place" if name is None else quoted(name) for name in rows["name"]]
    shares = [f"{name} {format_share(share, 1)}" for name, share in zip(names, rows["share"], strict=True)]
    used = " (arguments of the program count where they are used)" if row["program"] else ""
    most = f"; largest by {memory.heading}{used}: {', '.join(shares[:3])}" if shares else ""
    yield Finding(
        "memory",
        f"{who} has most memory in use: {format_bytes(row['peak_bytes'])} at its peak{most}",
        float(row["peak_bytes"]),
        "bytes",
        Command("memory", ("--by", memory.by)),
        Command("memory"),
        rows=tuple(
            {"name": name, "bytes": size, "share": share}
            for name, size, share in zip(names, rows["bytes"], rows["share"], strict=True)
        ),
        no_gain="it is no time",
        place=who,
        rank=row["rank"],
    )


def _gains(composed: Composed, missing: list[NotAnswered]) -> Iterator[Finding]:
    """The changes with the largest predicted gain; of those with the same gain, the first."""
    predicted = composed.gains.result
    question = "gains of changes"
    if predicted is None:
        how = "record all ranks with the waits between streams: thence record, or thence.torch.event_ids()"
        reason, _, own = composed.reason(composed.gains.reason).partition("; record ")
        missing.append(NotAnswered(question, reason, f"record {own}" if own else how))
        return
    seen: list[int] = []
    for row in predicted.rows.filter(verdict="gain").iter_rows(named=True):
        if len(seen) == _MAX_GAINS:
            break
        if any(abs(row["gain_ns"] - ns) <= SHOWN_SHARE * ns for ns in seen):
            continue  # a label with one kernel, and that kernel
        seen.append(row["gain_ns"])
        gain = _gain(composed, predicted, row)
        action, _, what = row["change"].partition(" ")
        kind, _, place = what.partition(":")
        given = ("--no-wait", what) if action == "no-wait" else option(action, kind, place)
        command = Command("whatif", given)
        yield Finding(
            "gain",
            f"{composed.replayed} would be {format_ns(gain.ns)} shorter ({format_share(row['gain_share'], 1)} of "
            f"{format_ns(predicted.step_ns)}; {format_ns(gain.low)} to {format_ns(gain.high)}) if {gain.condition}",
            gain.ns,
            "ns per step",
            command,
            Command("whatif"),
            low=gain.low,
            high=gain.high,
            share=row["gain_share"],
            severity=_severity(row["gain_share"]),
            gain=gain,
            place=f"{row['change']} {row['part']}".strip(),
        )
    if not seen:
        if predicted.health.opaque > MAX_WITHOUT_EDGES_SHARE:
            missing.append(NotAnswered(question, predicted.refusal, predicted.edges_advice))
            return
        reason = "no single change gains more than the interval of its prediction"
        missing.append(NotAnswered(question, reason, "record more steps; thence whatif --free predicts a given change"))


def _gain(composed: Composed, predicted: WhatIf, row: Mapping[str, Any]) -> Gain:
    """The gain of a row of `WhatIf.rows`; no gain is longer than the step."""
    before = row["before_ns"]
    low, high = (min(max(row[key], 0.0), 1.0) * before for key in ("low_share", "high_share"))
    action, _, what = row["change"].partition(" ")
    kind, _, place = what.partition(":")
    texts = {
        "free": f"{kind} {quoted(place, kind)} took no time{_MORE_OF_CAUSE if kind == 'cause' else ''}",
        "no-wait": f"calls that wait ({quoted(what)}) returned at once",
        "on-time": f"no rank waited for rank {place}",
    }
    backward = ", also in its backward pass" if composed.with_backward(kind) else ""
    part = f" ({row['part']}{backward})" if row["part"] else ""
    whole = predicted.program.partition(" (")[0]
    return Gain(row["gain_ns"], low, high, f"{texts.get(action, quoted(row['change']))}{part}, in {whole}")


def _gain_of(composed: Composed, change: str) -> tuple[Gain | None, str]:
    """The largest predicted gain of a change, or why there is none."""
    predicted = composed.gains.result
    if predicted is None:
        return None, "see what is not answered: gains of changes"
    rows = predicted.rows.filter(pl.col("change") == change, pl.col("verdict") == "gain")
    if rows.is_empty():
        return None, _why_none(predicted, change)
    return _gain(composed, predicted, rows.sort("gain_ns", descending=True, maintain_order=True).row(0, named=True)), ""


def _why_none(predicted: WhatIf, change: str) -> str:
    """Why a change is not among those with a predicted gain: it was not asked, there were better ones, or noise."""
    cause = change.removeprefix("free cause:")
    if cause != change and cause not in predicted.causes:
        return "no work of the host that could be freed is this cause"
    if cause != change and cause not in FREEABLE:
        return "this change was not asked here; thence whatif predicts it"
    if predicted.suggested and predicted.rows.height >= MAX_SUGGESTED:
        return f"it is not among the {MAX_SUGGESTED} changes that gain most"
    return "what it would gain is less than the uncertainty of the prediction"


def _rest(composed: Composed) -> Iterator[Finding]:
    """What the recording holds besides the typical steps."""
    if not composed.headline.rest:
        return
    run = composed.headline.run
    other = sum(part.ns for part in run if part.part != "steps")
    yield Finding(
        "rest",
        sentence(composed.headline.rest),
        float(other),
        "ns",
        Command("report"),
        composed.next,
        share=other / max(sum(part.ns for part in run), 1),
        rows=tuple({"part": part.part, "ns": part.ns} for part in run if part.ns)[:MAX_ROWS],
        no_gain="typical steps do not include it",
    )


def finding_spans(explained: Explanation) -> pl.DataFrame:
    """The findings that a time shows, as tracks with the columns of `thence.model.timeline.Timeline.spans`."""
    rows = [
        (f.moment.rank, f.moment.device, f.moment.start, f.moment.duration, f"finding: {f.kind}", f"{f.id} {f.claim}")
        for f in explained.findings
        if f.moment is not None
    ]
    return pl.DataFrame(rows, schema=_SPANS, orient="row")


def _severity(share: float) -> str:
    return "high" if share >= _HIGH else "medium" if share >= _MEDIUM else "low"
