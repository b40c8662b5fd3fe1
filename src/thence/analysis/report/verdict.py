"""The verdict on a trace: what limits a typical step, as one sentence with a code.

The first of these that holds decides. Shares are of the time of the typical steps (`thence.analysis.steps.windows`);
in a trace without steps, of the whole window of its device work, and the sentence says so.

not_sound            work is missing in the trace, or times are impossible: its idle and busy time are not those of the
                     program. First, because every other verdict is made of these figures.
waits_for_rank       ranks are late (`thence.analysis.ranks`), and make the others wait for at least as long as the
                     GPUs are idle for the largest group of causes. Before communication, because who waits for a late
                     rank does so inside of collectives: until the rank is in time, their time is not that of transfers.
communication_bound  the GPUs communicate without computing for at least `VERDICT_EXPOSED_SHARE`, and for at least as
                     long as they are idle. A fifth and not a tenth: faster transfers gain no more than this time, while
                     the GPU still decides how long the rest of the step takes. If at least half of this time is
                     waiting for other ranks (`Pace`), it is not the time of transfers: the verdict is that of the
                     device that waits least, for which the others wait; and waits_for_rank if even that one mostly
                     waits, so that the ranks wait for each other in turn.
gpu_bound            the GPUs are idle for less than `VERDICT_IDLE_SHARE`, or mostly between work that was queued
                     already: a faster host would gain nothing.
input_bound, launch_bound, host_bound, unknown
                     the GPUs are idle for at least `VERDICT_IDLE_SHARE`: the group of causes (`GROUPS`) with most of
                     it. From a tenth on, the queue runs empty in every step, so that the host decides how long a step
                     takes, however fast the kernels are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from thence.model.thresholds import (
    NAMED_CAUSE_SHARE,
    SHOWN_SHARE,
    UNEVEN_SHARE,
    VERDICT_EXPOSED_SHARE,
    VERDICT_IDLE_SHARE,
    WAITING_SHARE,
)
from thence.units import format_share

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.analysis.soundness.findings import Soundness

_MAX_NAMED = 3
COMPARING = frozenset({"windows_apart", "work_without_launch"})
"""Rules of soundness that concern neither busy nor idle time: their violation leaves other verdicts possible."""

CODES = (
    *("gpu_bound", "host_bound", "launch_bound", "input_bound", "communication_bound"),
    *("waits_for_rank", "unknown", "not_sound"),
)
"""Every code of a verdict."""
GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "loader": "input_bound",
        "launch": "launch_bound",
        "operator": "launch_bound",
        "queued": "gpu_bound",
        "event_wait": "gpu_bound",
        "unknown": "unknown",
    }
)
"""The verdict of each cause of idle time; all other causes are work or waiting of the host: host_bound."""
WITHOUT_STEPS = "the time from the first to the last GPU activity (no steps were found)"
"""What shares of time are of in a trace without steps."""
_WORDS = {
    "input_bound": "input-bound: the GPU is idle for {idle} of {whole}, mostly while the host loads data",
    "launch_bound": "launch-bound: the GPU is idle for {idle} of {whole}, mostly while the host launches its work",
    "host_bound": "host-bound: the GPU is idle for {idle} of {whole}, mostly while the host runs other code or waits",
    "gpu_bound": "GPU-bound: the GPU is idle for {idle} of {whole}, mostly between work that was already queued",
    "unknown": "unknown: the GPU is idle for {idle} of {whole}, and the trace does not show why for most of it",
}


@dataclass(frozen=True, slots=True)
class Late:
    """A rank that makes others wait.

    Attributes:
        rank: its number.
        share: the wait that it caused, as a share of all steps that count: this is compared with other causes.
        since: the same as a share of the steps since it is late: this is what ``ranks`` says.
    """

    rank: int
    share: float
    since: float


@dataclass(frozen=True, slots=True)
class Spread:
    """A share of a step on several GPUs, where one figure for all of them is a median.

    Attributes:
        low, high: of the GPU with the lowest and the highest share, from 0 to 1.
        gpus: number of GPUs.
        mean: of the GPUs.
    """

    low: float
    high: float
    gpus: int
    mean: float

    def scaled(self, factor: float) -> Spread:
        """The shares times a factor, at most 1."""
        low, high, mean = (min(share * factor, 1.0) for share in (self.low, self.high, self.mean))
        return Spread(low, high, self.gpus, mean)

    @property
    def rest(self) -> Spread:
        """The spread of 1 less the share."""
        return Spread(1 - self.high, 1 - self.low, self.gpus, 1 - self.mean)

    @property
    def uneven(self) -> bool:
        """Whether the GPUs differ so much that their median may be the figure of none."""
        return self.high - self.low >= UNEVEN_SHARE

    def text(self, median: float) -> str:
        """A share in words: the median, or where GPUs differ their range, with the median after it."""
        if not self.uneven:
            return format_share(median, 1)
        return (
            f"{format_share(self.low, 1)} to {format_share(self.high, 1)} ({self.gpus} GPUs, median "
            f"{format_share(median, 1)})"
        )


ALIKE = Spread(0.0, 0.0, 1, 0.0)
"""Of one GPU."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The device that waits least for others in a job whose communication is partly waiting.

    Attributes:
        rank, device: which one it is.
        waits: share of the exposed communication of all devices that is waiting for other ranks, from 0 to 1.
        measured: its own shares.
    """

    rank: int
    device: int
    waits: float
    measured: Measured


@dataclass(frozen=True, slots=True)
class Measured:
    """What a verdict is made of. Shares are of the time of all typical steps of all devices, from 0 to 1.

    Attributes:
        of_steps: whether the shares are of typical steps; else of the whole window of the device work.
        busy: share in which anything ran.
        exposed: share in which a device communicated and computed nothing.
        causes: share of each cause of idle time; None if the causes are not known.
        no_causes: why the causes are not known, as a part of a sentence; empty if they are.
        late: late ranks, the one that causes most waits first.
        spreads: of "busy", "idle", "exposed" and causes, over the GPUs.
        pace: which device waits least; None if it is not known who waits for whom.
    """

    of_steps: bool
    busy: float
    exposed: float
    causes: Mapping[str, float] | None = None
    no_causes: str = ""
    late: tuple[Late, ...] = ()
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    pace: Pace | None = None

    @property
    def waiting(self) -> str:
        """How much of the exposed communication is waiting for other ranks, in words; empty if none or not known."""
        if self.pace is None or self.pace.waits < SHOWN_SHARE:
            return ""
        return f", {format_share(self.pace.waits, 1)} of it waiting for other ranks"

    @property
    def mostly_waits(self) -> bool:
        """Whether at least half of the exposed communication is waiting."""
        return self.pace is not None and self.pace.waits >= WAITING_SHARE

    def spread(self, what: str) -> Spread:
        """The spread of "busy", "idle", "exposed" or a cause."""
        return self.spreads.get(what, ALIKE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits the program.

    Attributes:
        code: of `CODES`.
        text: one sentence.
    """

    code: str
    text: str

    def to_json(self) -> dict[str, str]:
        """The verdict as JSON values."""
        return {"code": self.code, "text": self.text}


def verdict(measured: Measured, soundness: Soundness) -> Verdict:
    """What limits a typical step.

    Args:
        measured: the figures of the steps.
    """
    wrong = [finding for finding in soundness.findings if finding.code not in COMPARING]
    if wrong:
        return Verdict("not_sound", f"not sound: {wrong[0].text}")
    whole = "a step" if measured.of_steps else WITHOUT_STEPS
    idle = max(1 - measured.busy, 0.0)
    groups: dict[str, float] = {}
    for cause, share in (measured.causes or {}).items():
        code = GROUPS.get(cause, "host_bound")
        groups[code] = groups.get(code, 0.0) + share
    largest = max(groups, key=lambda code: (groups[code], code), default="unknown")
    late = sum(rank.share for rank in measured.late)
    if measured.late and late >= groups.get(largest, idle):
        return Verdict("waits_for_rank", _late_text(measured, whole))
    others = f"; {_late_text(measured, whole)}" if measured.late else ""
    if measured.exposed >= VERDICT_EXPOSED_SHARE and measured.exposed >= idle:
        of_communication = _of_communication(measured, soundness, whole)
        return Verdict(of_communication.code, of_communication.text + others)
    if idle < VERDICT_IDLE_SHARE:
        exposed = (
            f", {format_share(measured.exposed, 1)} of it communication without computing"
            if measured.exposed >= VERDICT_IDLE_SHARE
            else ""
        )
        text = f"GPU-bound: the GPU is busy for {measured.spread('busy').text(measured.busy)} of {whole}{exposed}"
        return Verdict("gpu_bound", text + others)
    idle_text = measured.spread("idle").text(idle)
    if measured.causes is None:
        text = f"unknown: the GPU is idle for {idle_text} of {whole}; why is unknown: {measured.no_causes}"
        return Verdict("unknown", text + others)
    text = _WORDS[largest].format(idle=idle_text, whole=whole)
    return Verdict(largest, f"{text} ({_named(measured.causes, largest)}){others}")


def _of_communication(measured: Measured, soundness: Soundness, whole: str) -> Verdict:
    """The verdict on a step that is mostly exposed communication: transfers, or what the ranks wait for."""
    pace = measured.pace
    exposed = (
        f"for {measured.spread('exposed').text(measured.exposed)} of {whole} the GPU communicates and computes nothing"
        f"{measured.waiting}"
    )
    if pace is None or not measured.mostly_waits:
        return Verdict("communication_bound", f"communication-bound: {exposed}")
    own = verdict(pace.measured, soundness)
    if own.code == "communication_bound":  # even the device that waits least mostly communicates
        return Verdict("waits_for_rank", f"the ranks wait for each other in turn: {exposed}")
    name, _, text = own.text.partition(": ")
    return Verdict(own.code, f"{name}: on rank {pace.rank} GPU {pace.device}, which waits least, {text}; {exposed}")


def _late_text(measured: Measured, whole: str) -> str:
    """A sentence on the late ranks."""
    named = [f"{late.rank} ({format_share(late.since, 1)} of {whole})" for late in measured.late]
    ranks = f"rank {named[0]}" if len(named) == 1 else f"ranks {', '.join(named)}"
    return f"the other ranks wait for {ranks}"


def _named(causes: Mapping[str, float], code: str) -> str:
    """The largest causes of a verdict with their shares, the largest first."""
    whole = sum(causes.values())
    of_code = {c: share for c, share in causes.items() if GROUPS.get(c, "host_bound") == code}
    ordered = sorted(of_code, key=lambda cause: (-of_code[cause], cause))
    kept = [cause for cause in ordered if of_code[cause] >= NAMED_CAUSE_SHARE * whole] or ordered[:1]
    return ", ".join(f"{cause} {format_share(of_code[cause], 1)}" for cause in kept[:_MAX_NAMED])
