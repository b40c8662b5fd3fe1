"""What a user asks first: how long a step takes, how busy the GPU is in it, what limits it, and where the rest went.

Figures of steps are of the typical steps (`thence.analysis.steps.windows`), and of their windows on the devices
(`thence.analysis.steps.windows`), so that time in which a device waits for the first work of a step counts. They are
medians over the windows of all devices, because a few long steps change means and sums, and not what is typical; where
devices differ, the range of their own medians is stated beside it:

median         of the durations
busy share     of busy time / duration
idle share     1 - busy share, which is the median of idle time / duration; "at most" where work is missing
exposed share  of exposed communication / duration
causes         of the idle time of each cause / duration

The rest of the recording is divided into parts, each with its own time. The time of a part is a mean over the devices,
so the parts of a recording add up to the mean time from the first to the last recorded moment of a rank, which are
those of its device work and of the processes that launched it, without the profiler's own work:

start_up  before the first step: loading, compilation, autotuning, warm-up without steps
steps     typical steps, and one part for each rule by which others are left out: first, warm_up, outlier, last
between   between steps: evaluation, checkpoints, pauses
unrecorded  the same, where steps were not recorded, to measure the cost of recording
after     after the last step
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import polars as pl

from thence.analysis.collectives.exposure import exposure
from thence.analysis.idle.causes import idle_causes
from thence.analysis.report.verdict import ALIKE, Late, Measured, Pace, Spread, Verdict, verdict
from thence.analysis.selection.select import in_time
from thence.analysis.selection.windows import busy_in_windows, cut_to_windows, unrecorded_times, windows_of_selection
from thence.analysis.steps.plain_step import of_some_steps, plain_step, why_no_plain_step
from thence.analysis.steps.windows import OUTLIER, RULES, Steps, basis_of, left_out_of_windows, selected_steps
from thence.errors import MissingData
from thence.model.columns import at_once, mask_of
from thence.model.grouped_intervals import numbered
from thence.model.tables import ENDLESS, NO_STEPS
from thence.model.thresholds import MAX_HOST_RANGES, SAMPLED_HOST_RANGES, SHOWN_SHARE
from thence.units import format_ns, several

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from thence.analysis.idle.answer import IdleTime
    from thence.analysis.ranks.answer import Job
    from thence.analysis.soundness.findings import Soundness
    from thence.analysis.steps.plain_step import PlainStep
    from thence.model.answer import ResultOrReason
    from thence.model.attributed import Attributed
    from thence.units import Ns

PARTS = ("start_up", "steps", *RULES, "between", "unrecorded", "after")
"""Parts of a recording, in the order in which they are listed."""
_PART_WORDS = {
    "start_up": "start-up",
    "first": "first step",
    "warm_up": "warm-up steps",
    "outlier": "outlying steps",
    "last": "last step",
    "between": "between steps",
    "unrecorded": "steps that were not recorded, to measure the cost of recording",
    "after": "after the steps",
}


_Causes: TypeAlias = "Mapping[str, tuple[float, Spread]]"
"""The share of each cause of idle time, and its spread over the devices."""
_Pieces: TypeAlias = "tuple[pl.DataFrame, pl.DataFrame]"
"""Pieces of idle time, each with its cause, and the windows in which they lie."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The typical step.

    Attributes:
        kind: how steps were found: a key of `thence.model.tables.STEP_KINDS`.
        what: what they are, in words.
        count: number of steps.
        typical: how many of them are typical.
        left_out: number of the other steps, by rule.
        median_ns: as the module's docstring defines it.
        busy_share, exposed_share: likewise, from 0 to 1.
        min_ns, max_ns: the shortest and the longest window of typical steps and outliers.
        idle_is: how the idle share is meant: exact, or at most.
        busy_ns: median of busy time.
        plain: the step without recording, if the trace holds it: then the busy share is that of ``busy_ns`` in it.
        busy_spread, exposed_spread: of both shares over the devices.
    """

    kind: str
    what: str
    count: int
    typical: int
    left_out: Mapping[str, int]
    median_ns: float
    busy_share: float
    exposed_share: float
    min_ns: Ns
    max_ns: Ns
    idle_is: str = "exact"
    busy_ns: float = 0.0
    plain: PlainStep | None = None
    busy_spread: Spread = ALIKE
    exposed_spread: Spread = ALIKE

    def as_plain(self, plain: PlainStep) -> StepFigures:
        """The figures of the step without recording.

        Nothing is known of the GPU's work in a plain step, so the work of a recorded one counts as its work. Kernels
        may take longer while they are recorded, so that it may be more than the plain step: then the GPU is busy all
        the time.
        """
        length = max(plain.plain.median_ns, 1)
        busy = min(self.busy_ns / length, 1.0)
        shorter = self.median_ns / length
        exposed = min(self.exposed_share * shorter, busy)
        return replace(
            self,
            busy_share=busy,
            exposed_share=exposed,
            plain=plain.beside_other_processes(self.busy_ns),
            busy_spread=self.busy_spread.scaled(shorter),
            exposed_spread=self.exposed_spread.scaled(shorter),
        )

    @property
    def spread(self) -> float:
        """The largest difference of a step from the median, as a share of the median."""
        return max(self.max_ns - self.median_ns, self.median_ns - self.min_ns) / max(self.median_ns, 1)

    @property
    def idle_share(self) -> float:
        """Share of a step in which nothing ran."""
        return 1 - self.busy_share

    @property
    def text(self) -> str:
        """The figures as one sentence without a period."""
        at_most = "at most " if self.idle_is == "at most" else ""
        at_least = "at least " if self.idle_is == "at most" else ""
        steps = f"{self._counted} of {format_ns(self.median_ns)}"
        if self.plain is not None:
            steps = self.plain.text
        return (
            f"{steps}: GPU busy {at_least}{self.busy_spread.text(self.busy_share)}, idle {at_most}"
            f"{self.busy_spread.rest.text(self.idle_share)}"
        )

    @property
    def _counted(self) -> str:
        """How many steps the figures are of: ``3 steps``, or ``1 step (of 2)``."""
        counted = several(self.typical, "step")
        return counted if self.typical == self.count else f"{counted} (of {self.count:,})"

    @property
    def basis(self) -> str:
        """What the steps are, and how many of them the figures leave out."""
        basis = basis_of(self.what, self.left_out)
        if self.plain is None:
            return basis
        return f"{self.plain.basis}; GPU busy by {several(self.typical, 'recorded step')}: {basis}"

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {
            "count": self.count,
            "median_ns": self.median_ns,
            "busy_share": self.busy_share,
            "idle_share": self.idle_share,
            "idle_is": self.idle_is,
            "busy_ns": self.busy_ns,
            "exposed_share": self.exposed_share,
            "kind": self.kind,
            "what": self.what,
            "typical": self.typical,
            "left_out": dict(self.left_out),
        }


@dataclass(frozen=True, slots=True)
class RunPart:
    """A part of a recording. Times are ns, means over the devices.

    Attributes:
        part: of `PARTS`.
        ns: its time.
        busy_ns: how long any work ran in it.
        compile_ns: how long a thread of the host compiled in it.
        autotuning_ns: how long work of XLA's autotuner ran in it.
    """

    part: str
    ns: Ns
    busy_ns: Ns
    compile_ns: Ns
    autotuning_ns: Ns

    @property
    def title(self) -> str:
        """The name of the part in words."""
        return _PART_WORDS.get(self.part, self.part)

    @property
    def text(self) -> str:
        """The part in words: ``start-up 18.1 s (compiling 15.2 s)``."""
        inside = [
            f"{what} {format_ns(ns)}"
            for what, ns in (
                ("compiling", self.compile_ns),
                ("XLA's autotuner", self.autotuning_ns),
                ("GPU busy", self.busy_ns - self.autotuning_ns),
            )
            if ns >= max(SHOWN_SHARE * self.ns, 1)
        ]
        return f"{self.title} {format_ns(self.ns)}" + (f" ({', '.join(inside)})" if inside else "")

    def to_json(self) -> dict[str, Any]:
        """The part as JSON values."""
        return {
            "part": self.part,
            "ns": self.ns,
            "busy_ns": self.busy_ns,
            "compile_ns": self.compile_ns,
            "autotuning_ns": self.autotuning_ns,
        }


@dataclass(frozen=True)
class Headline:
    """The first answer about a trace.

    Attributes:
        steps: the typical step; None if the trace has no steps.
        no_steps: why there are none, as a part of a sentence; empty if there are.
        verdict: what limits the program.
        measured: the figures of which the verdict is made.
        no_plain: why it is not known how long a step takes without recording; empty if it is, and for traces that are
            no recordings of steps.
        late: one sentence on late and missing ranks; empty for one device if no rank is missing.
        run: the parts of the recording; empty without steps.
    """

    steps: StepFigures | None
    no_steps: str
    verdict: Verdict
    measured: Measured
    late: str = ""
    no_plain: str = ""
    run: tuple[RunPart, ...] = field(default=())

    @property
    def start_up_ns(self) -> Ns | None:
        """Time before the first step; None without steps."""
        return next((part.ns for part in self.run if part.part == "start_up"), None)

    @property
    def lines(self) -> tuple[str, ...]:
        """The headline as text: the step, the verdict, the rest of the recording, late ranks."""
        return tuple(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.steps is not None:
            yield f"{self.steps.text} ({self.steps.basis})"
        yield self.verdict.text
        if rest := self.rest:
            yield rest
        if self.plain_text:
            yield self.plain_text
        if self.late:
            yield self.late

    @property
    def plain_text(self) -> str:
        """What must be said of the plain step besides its figures, one sentence without a period; mostly empty."""
        if self.no_plain:
            return f"how long a step takes without being recorded is not known: {self.no_plain}"
        if self.steps is None or self.steps.plain is None:
            return ""
        if self.steps.busy_ns > self.steps.plain.plain.median_ns:
            return (
                f"work of the GPU in a recorded step took {format_ns(self.steps.busy_ns)}, more than a plain step: "
                "kernels take longer while they are recorded"
            )
        return ""

    @property
    def rest(self) -> str:
        """The parts of the recording besides the typical steps, in words; empty if they are short."""
        whole = max(sum(part.ns for part in self.run), 1)
        shown = [part for part in self.run if part.part != "steps" and part.ns >= SHOWN_SHARE * whole]
        gpus = 1 if self.steps is None else self.steps.busy_spread.gpus
        mean = f", mean of {gpus} GPUs" if gpus > 1 else ""
        return f"rest of the recording{mean}: {', '.join(part.text for part in shown)}" if shown else ""

    def to_json(self) -> dict[str, Any]:
        """The headline as JSON values: the keys with which ``report --format json`` begins."""
        plain = None if self.steps is None else self.steps.plain
        return {
            "verdict": self.verdict.to_json(),
            "steps": None if self.steps is None else self.steps.to_json(),
            "no_steps": self.no_steps,
            "plain_step_ns": None if plain is None else plain.to_json(),
            "no_plain_step": self.no_plain,
            "start_up_ns": self.start_up_ns,
            "run": [part.to_json() for part in self.run],
            "late_ranks": self.late,
        }


def headline(
    trace: Attributed, soundness: Soundness, idle: ResultOrReason[IdleTime], late: ResultOrReason[Job]
) -> Headline:
    """The first answer about a trace.

    Args:
        trace: attributed; if steps are selected, their figures count.
        idle: idle time of the typical steps, or of the whole trace without steps; or why it was not computed.
        late: late ranks, or why they were not looked for; neither without collectives.

    Raises:
        MissingData: the trace holds no device activity.
    """
    run: tuple[RunPart, ...] = ()
    try:
        steps = selected_steps(trace)
    except MissingData as error:
        no_steps = NO_STEPS if NO_STEPS in str(error) else str(error)
        figures = None
        windows = _whole(trace)
        shares = _Shares.of_whole(windows)
    else:
        no_steps = ""
        windows = steps.typical
        figures = step_figures(steps, soundness)
        recorded_idle = figures.idle_share
        plain = None if of_some_steps(trace) else plain_step(trace.step_times)
        if plain is not None:
            figures = figures.as_plain(plain)
        if trace.selection.of_ranks_and_devices_only:
            run = tuple(_run(trace, steps))
        shares = _Shares.of_steps(figures)
    pieces = _pieces(trace, idle.result, None if figures is None else windows)
    reason = "" if pieces is not None else idle.reason
    causes = None if pieces is None else _of_windows(*pieces)
    if figures is None and idle.result is not None:
        causes = _of_window(idle.result, shares, causes or {})
    pace = None
    if late.result is not None:
        pace = _pace(late.result, windows, partial(_of_device, pieces), reason, of_steps=figures is not None)
    if figures is not None and figures.plain is not None and causes is not None:
        causes = _in_plain_step(causes, recorded_idle, figures.idle_share)
    shares = replace(shares, causes=causes, no_causes=reason, pace=pace)
    made = _headline(figures, no_steps, shares, soundness, late, run)
    if figures is None or figures.plain is not None or of_some_steps(trace):
        return made
    return replace(made, no_plain=why_no_plain_step(trace))


def _pieces(trace: Attributed, idle: IdleTime | None, steps: pl.DataFrame | None) -> _Pieces | None:
    """The pieces of idle time whose causes are known, in the typical steps or in the whole; None if they are not known.

    Args:
        idle: idle time of the steps, or of the whole trace without steps; None if it was not computed.
        steps: the windows of the typical steps; None if the trace has none.
    """
    if idle is not None:
        return idle.unnamed, windows_of_selection(trace.around) if steps is None else steps
    if steps is None or trace.around.host.height <= MAX_HOST_RANGES:
        return None
    return sampled_idle(trace, SAMPLED_HOST_RANGES)


def _in_plain_step(causes: _Causes, recorded: float, plain: float) -> _Causes:
    """Shares of causes in the plain step: those of a recorded one, all made smaller (or larger) alike.

    Args:
        causes: share of each cause in a recorded step.
        recorded: share of idle time in it.
        plain: share of idle time in a plain step.
    """
    ratio = plain / recorded if recorded > 0 else 0.0
    return {cause: (share * ratio, spread.scaled(ratio)) for cause, (share, spread) in causes.items()}


def headline_of_summaries(
    summaries: Mapping[str, pl.DataFrame], soundness: Soundness, late: ResultOrReason[Job], times: pl.DataFrame
) -> Headline:
    """The first answer about a job, from the summaries of its ranks: without the parts of the recording.

    Args:
        summaries: the tables devices, steps and idle of `thence.analysis.ranks.summary.SUMMARY`.
        late: late ranks, or why they were not looked for.
        times: the table step_times of all ranks.
    """
    steps = steps_of_summaries(summaries)
    if steps is None:
        windows = summaries["steps"].sort("rank", "device", "start")
        figures, no_steps = None, NO_STEPS
        shares = _Shares.of_whole(windows)
    else:
        figures, no_steps = step_figures(steps, soundness), ""
        windows = steps.typical.rename({"row": "step", "step": "name"})

    def causes_in(some: pl.DataFrame) -> _Causes | None:
        """The share of each cause in some windows."""
        if figures is None:
            return None
        counted = some.select("rank", "device", "step", "duration").with_row_index("window")
        sums = summaries["idle"].filter(pl.col("by") == "cause").join(counted, on=["rank", "device", "step"])
        sums = sums.group_by(pl.col("cause").cast(pl.String), "window").agg(ns=pl.col("total_ns").sum())
        return _median_shares(sums, counted)

    causes = causes_in(windows)
    if figures is not None and (plain := plain_step(times)) is not None:
        recorded_idle = figures.idle_share
        figures = figures.as_plain(plain)
        causes = _in_plain_step(causes or {}, recorded_idle, figures.idle_share)
    if figures is not None:
        shares = _Shares.of_steps(figures)
    why = "" if figures else "a store keeps the causes of idle time in steps only"
    pace = None
    if late.result is not None:

        def of_device(rank: int, device: int) -> _Causes | None:
            return causes_in(windows.filter(rank=rank, device=device))

        pace = _pace(late.result, windows, of_device, why, of_steps=figures is not None)
    shares = replace(shares, causes=causes, no_causes=why, pace=pace)
    return _headline(figures, no_steps, shares, soundness, late, ())


def steps_of_summaries(summaries: Mapping[str, pl.DataFrame]) -> Steps | None:
    """The steps of a job, from the summaries of its ranks (see `headline_of_summaries`); None if it has none."""
    kinds = summaries["devices"]["step_kind"].drop_nulls()
    if kinds.is_empty():
        return None
    kind = str(kinds.mode().sort()[0])
    frame = summaries["steps"].sort("rank", "device", "start").rename({"step": "row", "name": "step"})
    return Steps(frame.with_columns(left_out_of_windows(frame, endless=kind in ENDLESS)), kind)


@dataclass(frozen=True, slots=True)
class _Shares:
    """Shares of a step or of the whole window, as in `Measured`; ``exposed`` and ``busy`` with their spreads."""

    busy: float
    exposed: float
    busy_spread: Spread
    exposed_spread: Spread
    causes: _Causes | None = None
    no_causes: str = ""
    pace: Pace | None = None

    @classmethod
    def of_steps(cls, figures: StepFigures) -> _Shares:
        """Of typical steps."""
        return cls(figures.busy_share, figures.exposed_share, figures.busy_spread, figures.exposed_spread)

    @classmethod
    def of_whole(cls, windows: pl.DataFrame) -> _Shares:
        """Of the whole window of each device: rank, device, duration, busy_ns and exposed_ns."""
        of_device = windows.group_by("rank", "device").agg(pl.col("duration", "busy_ns", "exposed_ns").sum())
        length = max(int(of_device["duration"].sum()), 1)
        busy, exposed = (int(of_device[name].sum()) / length for name in ("busy_ns", "exposed_ns"))
        busy_spread, exposed_spread = _spreads(of_device, "busy_ns", "exposed_ns")
        return cls(busy, exposed, busy_spread, exposed_spread)

    def measured(self, late: tuple[Late, ...], *, of_steps: bool) -> Measured:
        """What a verdict is made of."""
        causes = self.causes or {}
        shares = None if self.causes is None else {cause: share for cause, (share, _) in causes.items()}
        spreads = {"busy": self.busy_spread, "idle": self.busy_spread.rest, "exposed": self.exposed_spread}
        spreads |= {cause: spread for cause, (_, spread) in causes.items()}
        return Measured(of_steps, self.busy, self.exposed, shares, self.no_causes, late, spreads, self.pace)


def _spreads(windows: pl.DataFrame, *names: str) -> list[Spread]:
    """The spread over the devices of columns of ns as shares of ``duration``, the median of each device."""
    if windows.is_empty() or not names:
        return [ALIKE] * len(names)
    shares = ((pl.col(name) / pl.col("duration").clip(1)).median() for name in names)
    of_device = windows.group_by("rank", "device").agg(shares)
    of_names = (of_device[name].to_numpy() for name in names)
    return [Spread(float(s.min()), float(s.max()), len(s), float(s.mean())) for s in of_names]


def _headline(
    figures: StepFigures | None,
    no_steps: str,
    shares: _Shares,
    soundness: Soundness,
    late: ResultOrReason[Job],
    run: tuple[RunPart, ...],
) -> Headline:
    measured = shares.measured(() if late.result is None else _late(late.result), of_steps=figures is not None)
    said = late.reason if late.result is None else late.result.statement
    return Headline(figures, no_steps, verdict(measured, soundness), measured, said, run=run)


def step_figures(steps: Steps, soundness: Soundness) -> StepFigures:
    """The typical step of a trace."""
    frame, typical = steps.frame, steps.typical
    busy_spread, exposed_spread = _spreads(typical, "busy_ns", "exposed_ns")
    length = pl.col("duration").clip(1)
    median, busy_ns, busy, exposed = typical.select(
        pl.col("duration").median(),
        pl.col("busy_ns").median(),
        busy=(pl.col("busy_ns") / length).median(),
        exposed=(pl.col("exposed_ns") / length).median(),
    ).row(0)
    return StepFigures(
        steps.kind,
        steps.what,
        _steps_of(frame),
        _steps_of(typical),
        steps.left_out,
        median,
        busy,
        exposed,
        *_extremes(steps),
        soundness.idle_is(),
        busy_ns,
        busy_spread=busy_spread,
        exposed_spread=exposed_spread,
    )


def _extremes(steps: Steps) -> tuple[Ns, Ns]:
    """The shortest and the longest of the typical steps and outliers, ns."""
    kept = pl.col("left_out").is_null() | (pl.col("left_out") == OUTLIER)
    duration = steps.frame.filter(kept)["duration"]
    duration = steps.frame["duration"] if duration.is_empty() else duration
    return int(str(duration.min())), int(str(duration.max()))


def _steps_of(frame: pl.DataFrame) -> int:
    """The number of steps in windows: that of the device with most."""
    return int(str(frame.group_by("rank", "device").len()["len"].max() or 0))


def _whole(trace: Attributed) -> pl.DataFrame:
    """The whole window of the work of each device: rank, device, duration, busy_ns and exposed_ns."""
    around = trace.around
    windows = windows_of_selection(around)
    device = ["rank", "device"]
    exposed = exposure(around).devices[[*device, "exposed_ns"]].lazy()
    return (
        windows.hstack([pl.Series("busy_ns", busy_in_windows(windows, around.gpu))])
        .lazy()
        .group_by(device, maintain_order=True)
        .agg(pl.col("duration", "busy_ns").sum())
        .join(exposed, on=device, how="left", maintain_order="left")
        .with_columns(pl.col("exposed_ns").fill_null(0))
        .pipe(at_once)
    )


def _pace(
    job: Job, windows: pl.DataFrame, causes: Callable[[int, int], _Causes | None], no_causes: str, *, of_steps: bool
) -> Pace | None:
    """The device that waits least for others; None for one device, and without exposed communication.

    None also if more than half of that may be waiting or transfers: `Job.ranks` has it as ``unknown_ns``.

    Args:
        job: with the waits of each device.
        windows: rank, device, duration, busy_ns and exposed_ns of the steps, or of the whole of each device.
        causes: the share of each cause of idle time of a rank and device.
        no_causes: why they are not known; empty if they are.
        of_steps: whether the windows are steps.
    """
    exposed = float(job.ranks["exposed_ns"].sum())
    if job.ranks.height < 2 or not exposed or float(job.ranks["unknown_ns"].sum()) > exposed / 2:
        return None
    rank, device = job.ranks.sort("exposed_wait_ns", "rank", "device").select("rank", "device").row(0)
    own = windows.filter(rank=rank, device=device)
    if own.is_empty():
        return None
    length = pl.col("duration").clip(1)
    medians = own.select((pl.col("busy_ns") / length).median(), (pl.col("exposed_ns") / length).median())
    busy, exposed_share = medians.row(0)
    paces = causes(rank, device)
    of_cause = None if paces is None else {cause: share for cause, (share, _) in paces.items()}
    measured = Measured(of_steps, busy, exposed_share, of_cause, no_causes)
    return Pace(rank, device, float(job.ranks["exposed_wait_ns"].sum()) / exposed, measured)


def _of_device(pieces: _Pieces | None, rank: int, device: int) -> _Causes | None:
    """The median share of each cause of idle time in the windows of a device; None if the causes are not known."""
    return None if pieces is None else _of_windows(pieces[0], pieces[1].filter(rank=rank, device=device))


def _of_window(idle: IdleTime, shares: _Shares, of_windows: _Causes) -> _Causes:
    """The share of each cause of idle time in the whole window of all devices, with the spreads of the windows."""
    causes = idle.causes[["cause", "share"]].rows()
    spreads = {cause: spread for cause, (_, spread) in of_windows.items()}
    return {cause: (share * (1 - shares.busy), spreads.get(cause, ALIKE)) for cause, share in causes}


def _of_windows(pieces: pl.DataFrame, windows: pl.DataFrame) -> _Causes:
    """The median share of each cause of pieces of idle time in windows."""
    piece, window, start, end = cut_to_windows(pieces, windows)
    cause = pieces["cause"][piece].cast(pl.String)
    parts = pl.DataFrame({"window": window, "cause": cause, "ns": end - start})
    sums = parts.group_by("cause", "window").agg(pl.col("ns").sum())
    return _median_shares(sums, windows)


def sampled_idle(trace: Attributed, most_ranges: int) -> _Pieces | None:
    """The idle time of some typical steps with its causes, those in the middle of the recording.

    For traces of so many host ranges that looking at all would take long. Half as many steps are tried until there are
    few enough ranges.

    Args:
        trace: attributed, with typical steps.
        most_ranges: most host ranges that may be looked at.

    Returns:
        the pieces of idle time and the windows of these steps; None if there are more host ranges in a single step.
    """
    steps = selected_steps(trace)
    every, windows = steps.frame, steps.typical.sort("start", maintain_order=True)
    count = windows.height
    while count:
        first = (windows.height - count) // 2
        some = windows.slice(first, count).sort("rank", "device", "start")
        begin, end = around(every, some)
        host_end = pl.col("start") + pl.col("duration")
        ranges = trace.around.host.select(((pl.col("start") < end) & (host_end > begin)).sum()).item()
        if ranges <= most_ranges:
            part = in_time(trace.around, begin, end)
            return idle_causes(part, some), some
        count //= 2
    return None


def around(every: pl.DataFrame, some: pl.DataFrame) -> tuple[int, int]:
    """The time of some steps with the steps before and after them on the same devices.

    The one before has the kernels that are the first of their name, the one after the kernel that ends the last idle
    time.

    Args:
        every: the windows of all steps.
        some: some of them.

    Returns:
        begin and end, ns on the trace's clock.
    """
    device, end = ("rank", "device"), pl.col("start") + pl.col("duration")
    near = every.sort(*device, "start").select(
        *device,
        "start",
        before=pl.col("start").shift(1).over(device).fill_null(pl.col("start")),
        after=end.shift(-1).over(device).fill_null(end),
    )
    near = near.join(some, on=[*device, "start"], how="semi")
    return int(near["before"].to_numpy().min()), int(near["after"].to_numpy().max())


def _median_shares(sums: pl.DataFrame, windows: pl.DataFrame) -> _Causes:
    """The median share of each cause in windows; windows without the cause count as 0.

    Args:
        sums: cause, window (row in ``windows``), ns.
        windows: rank, device and duration (ns) of each.
    """
    of_cause = sums.lazy().group_by("cause", maintain_order=True).agg("window", "ns").sort("cause").pipe(at_once)
    inside = np.zeros((of_cause.height, windows.height), np.int64)
    for place, (_, rows, ns) in enumerate(of_cause.iter_rows()):
        inside[place, rows] = ns
    causes = of_cause["cause"].to_list()
    columns = [pl.Series(cause, ns) for cause, ns in zip(causes, inside, strict=True)]
    spreads = _spreads(windows[["rank", "device", "duration"]].hstack(columns), *causes)
    medians = np.median(inside / np.maximum(windows["duration"].to_numpy(), 1), axis=1).tolist()
    return dict(zip(causes, zip(medians, spreads, strict=True), strict=True))


def _late(job: Job) -> tuple[Late, ...]:
    named = job.stragglers.select("rank", "caused_share", "late_share")
    return tuple(Late(*row) for row in named.sort("caused_share", descending=True).rows())


# ---- Parts of the recording


def _run(trace: Attributed, steps: Steps) -> Iterator[RunPart]:
    """The parts of the recording, means over the devices with steps."""
    device = ("rank", "device")
    frame = steps.frame.join(_moments(trace), on="rank", how="left", maintain_order="left")
    end = pl.col("start") + pl.col("duration")
    of_device = frame.group_by(device, maintain_order=True).agg(
        pl.col("begun", "ended").first(), first=pl.col("start").min(), last=end.max()
    )
    windows = pl.concat(
        [
            of_device.select(*device, part=pl.lit("start_up"), start="begun", end="first"),
            frame.select(*device, "start", part=pl.col("left_out").fill_null("steps"), end=end),
            _between(frame, unrecorded_times(trace)),
            of_device.select(*device, part=pl.lit("after"), start="last", end="ended"),
        ],
        how="diagonal",
    ).select(*device, "part", "start", duration=(pl.col("end") - pl.col("start")).clip(0))
    trying = trace.places.select(
        pl.any_horizontal(pl.col("program_rule", "separate") == "autotuning").fill_null(value=False)
    ).to_series()
    compiling = trace.host.filter(pl.col("category") == "compile")
    covers = {
        "busy": trace.gpu,
        "compiled": of_device.select(device).join(compiling.drop("thread"), on="rank"),
        "tuned": trace.gpu.filter(trying),
    }
    sums = (
        windows.with_columns(pl.Series(name, busy_in_windows(windows, c)) for name, c in covers.items())
        .group_by("part")
        .agg(pl.col("duration", *covers).sum() // max(of_device.height, 1))
    )
    times = {part: ns for part, *ns in sums.rows()}
    return (RunPart(part, *times[part]) for part in PARTS if part in times)


def _between(frame: pl.DataFrame, pauses: pl.DataFrame) -> pl.DataFrame:
    """The times between windows of steps: rank, device, part, start and end; ``unrecorded`` if steps were left out.

    Args:
        pauses: as `unrecorded_times` returns them.
    """
    device = ("rank", "device")
    gaps = frame.select(
        *device, start=pl.col("start") + pl.col("duration"), end=pl.col("start").shift(-1).over(device)
    ).drop_nulls()
    left = gaps.sort("end").join_asof(
        pauses.select("rank", pause="end").sort("pause"), left_on="end", right_on="pause", by="rank",
        check_sortedness=False,
    )  # fmt: skip
    part = pl.when(pl.col("pause") > pl.col("start")).then(pl.lit("unrecorded"))
    return left.select(*device, "start", "end", part=part.otherwise(pl.lit("between")))


def _moments(trace: Attributed) -> pl.DataFrame:
    """The first and the last recorded moment of each rank: rank, begun and ended, ns.

    What the profiler did itself is none of them, nor is what a process did that launched no work, such as the one that
    starts those of the ranks; unless no launch of the rank is known.
    """
    end = (pl.col("start") + pl.col("duration")).max()
    moments = (pl.col("start").min().alias("begun"), end.alias("ended"))
    number, processes = numbered(trace.host, "rank", "process")
    launching = processes[np.unique(number[trace.places["launch"].drop_nulls().to_numpy()])]
    own = mask_of(trace.host["category"] != "overhead")
    start, length = (trace.host[name].to_numpy()[own] for name in ("start", "duration"))
    number = number[own]
    first = np.flatnonzero(np.append(True, number[1:] != number[:-1]))[: len(number)]  # rows are in order of processes
    of_program = processes[number[first]].with_columns(
        begun=np.minimum.reduceat(start, first), ended=np.maximum.reduceat(start + length, first)
    )
    others = of_program.join(launching, on="rank", how="semi").join(launching, on=["rank", "process"], how="anti")
    of_program = of_program.join(others, on=["rank", "process"], how="anti").drop("process")
    both = pl.concat([trace.gpu.group_by("rank").agg(moments), of_program])
    return both.group_by("rank").agg(pl.col("begun").min(), pl.col("ended").max())
