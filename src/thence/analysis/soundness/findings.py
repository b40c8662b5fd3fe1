"""The result of the check of a trace, and the table of its rules."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.model.answer import Answer, Lines
from thence.units import format_count, format_share, several

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.units import Ns

RULES: Mapping[str, str] = MappingProxyType(
    {
        "launch_without_work": "every launch of a kernel or CUDA graph has its device work",
        "partial_replay": "every launch of a CUDA graph ran all that launches of this graph ran",
        "listed_twice": "no device work and no launch is listed twice",
        "work_without_launch": "every kernel has the call that launched it, where calls are recorded",
        "no_device_work": "every rank that launched something has device work",
        "empty_steps": "every profiler step has device work, where others have",
        "windows_apart": "the ranks were recorded at the same time",
        "outlier": "no single execution takes 1,000 times the median of its kernel",
        "impossible_time": "no device work has an impossible start or duration",
        "broken_order": "kernels of one stream start in the order of their launches",
        "work_before_launch": "no device work starts before its launch",
        "late_clock": "no device work ends after a call that had waited for it, nor does all of it start late",
        "started_late": "device work starts soon after its launch if its device has nothing else to do",
        "profiler_overhead": "the profiler's own work does not make the GPU idle",
        "damaged_input": "the input is whole, and nothing of it had to be repaired",
        "lost_records": "the recorder lost no records",
    }
)
"""The code of every rule, and a sentence that is true of a sound trace."""

MISSING_RANKS = "missing_ranks"
"""Code of the note that the trace lacks ranks of its job. This is no rule: to record some ranks of a job is normal."""

COPIED_RANKS = "copied_ranks"
"""Code of the note that ranks are copies of one recording. Their own figures are right, so it is no rule."""

_COLUMNS = {
    "verdict": pl.String,
    "code": pl.String,
    "rank": pl.Int64,
    "device": pl.Int64,
    "count": pl.Int64,
    "span_ns": pl.Int64,
    "span_share": pl.Float64,
    "text": pl.String,
}

MISSING_WORK = frozenset(
    {
        *("launch_without_work", "partial_replay", "no_device_work", "empty_steps"),
        *("started_late", "damaged_input", "lost_records"),
    }
)
"""Rules whose violation means that the trace lacks device work that ran."""


MISSING, UNKNOWN_LAUNCHES, CLOCKS, WINDOWS, OVERHEAD = (
    "whether device work is missing",
    "which launch each kernel is from",
    "whether the clocks of host and device agree",
    "whether the ranks were recorded at the same time",
    "how much idle time the profiler caused",
)
"""What cannot be known of a trace if rules cannot be applied."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that the trace violates.

    Attributes:
        code: code of the rule, a key of `RULES`; of a note, also `MISSING_RANKS` and `COPIED_RANKS`.
        rank, device: where it was found; None if it concerns several ranks, or not one known device.
        count: number of launches, activities, steps or records that it concerns.
        span_ns: time that it affects, in ns.
        span_share: share of the span of the rank's device work (of all ranks if rank is None) that it affects,
            from 0 to 1.
        text: one sentence: what was found, where and when.
    """

    code: str
    rank: int | None
    device: int | None
    count: int
    span_ns: Ns
    span_share: float
    text: str

    def __str__(self) -> str:
        share = f" ({format_share(self.span_share, 1)} of the span)" if self.span_ns else ""
        return f"{self.code}: {self.text}{share}"

    def to_json(self) -> dict[str, Any]:
        """The finding as the command line prints it."""
        return {
            "code": self.code,
            "rank": self.rank,
            "device": self.device,
            "count": self.count,
            "span_ns": self.span_ns,
            "span_share": self.span_share,
            "text": self.text,
        }


@dataclass(frozen=True, slots=True)
class NotChecked:
    """A rule that could not be applied to the trace, or to a part of it.

    Attributes:
        code: code of the rule, a key of `RULES`.
        text: one sentence: why it could not be applied, and what the trace shows instead.
        unknown: what therefore cannot be known of the trace, one of the phrases below; empty if there is nothing that
            the rule could judge, or if it could judge nearly all.
    """

    code: str
    text: str
    unknown: str = ""


@dataclass(frozen=True)
class Soundness(Answer):
    """Whether a trace is sound.

    Attributes:
        findings: violations that make it unsound; those that affect most of the span first.
        notes: findings that explain a result but do not make it wrong, such as time of the profiler itself.
        not_checked: rules that could not be applied.
    """

    findings: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    @property
    def work_missing(self) -> bool:
        """Whether the trace lacks device work that ran; idle time is then an upper bound."""
        return any(finding.code in MISSING_WORK for finding in self.findings)

    def idle_is(self, *, unknown: bool = False) -> str:
        """How idle time of the trace is meant: ``exact``, or ``at most`` because work is missing; or ``unknown``."""
        return "unknown" if unknown else "at most" if self.work_missing else "exact"

    @property
    def unknown(self) -> tuple[str, ...]:
        """What cannot be known because rules could not be applied: phrases such as `MISSING`."""
        return tuple(dict.fromkeys(entry.unknown for entry in self.not_checked if entry.unknown))

    @property
    def verdict(self) -> str:
        """One sentence: whether the trace is sound, as far as it can be known."""
        if self.findings:
            bound = "; idle time is at most what is shown" if self.work_missing else ""
            return f"not sound: figures of this trace can be wrong{bound}"
        if not self.unknown:
            return "sound: nothing was found that makes its figures wrong"
        *most, last = self.unknown
        phrases = f"{', '.join(most)} and {last}" if most else last
        return f"nothing wrong was found, but this trace cannot show {phrases}"

    @property
    def statement(self) -> str | None:
        """One line to be shown with every result of an unsound trace; None if the trace is sound."""
        if self.sound:
            return None
        first, more = self.findings[0], len(self.findings) - 1
        share = format_share(first.span_share, 1)
        touched = f" (touches {share} of the span)" if first.span_ns else ""
        others = f"; {format_count(more)} more finding{'s' if more > 1 else ''}" if more else ""
        bound = " Idle time is at most what is shown." if self.work_missing else ""
        return f"this trace is not sound: {first.text}{touched}{others}; see thence check.{bound}"

    @property
    def lines(self) -> tuple[str, ...]:
        """The statement as a tuple, to be put before a result's notes; empty if the trace is sound."""
        return () if self.statement is None else (self.statement,)

    def findings_json(self) -> list[dict[str, Any]]:
        """The findings, as every verb prints them in its JSON."""
        return [finding.to_json() for finding in self.findings]

    def not_checked_reasons(self) -> dict[str, list[str]]:
        """Each reason why rules could not be applied, with the codes of these rules."""
        reasons: dict[str, list[str]] = {}
        for entry in self.not_checked:
            reasons.setdefault(entry.text, []).append(entry.code)
        return reasons

    def verdicts(self) -> dict[str, str]:
        """For each rule: unsound, not checked (at least in a part of the trace), or sound."""
        return (
            dict.fromkeys(RULES, "sound")
            | {entry.code: "not checked" for entry in self.not_checked}
            | {finding.code: "unsound" for finding in self.findings}
        )

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return (f"{len(RULES)} rules, {several(len(self.findings), 'finding')}",)

    def views(self) -> tuple[Lines, ...]:
        """The verdict, then each finding, note and reason why rules were not checked."""
        views = [
            Lines(((self.verdict, "bold green" if self.sound else "bold red"),)),
            Lines(tuple((f"  {finding}", "red") for finding in self.findings), limited=True, apart=False),
        ]
        if self.notes:
            views.append(Lines((("notes:", "bold"),), apart=False))
            views.append(Lines(tuple((f"  {note}", "") for note in self.notes), limited=True, apart=False))
        if self.not_checked:
            reasons = self.not_checked_reasons().items()
            lines = [(f"  {', '.join(codes)}: {text}", "dim") for text, codes in reasons]
            views.append(Lines((("not checked:", "bold"), *lines), apart=False))
        return tuple(views)

    def known(self) -> dict[str, float]:
        """See `Answer`."""
        return {"checked": 1 - len({entry.code for entry in self.not_checked}) / len(RULES)}

    def to_frame(self) -> pl.DataFrame:
        """One row for each finding, note and rule that was not checked: verdict and the attributes of `Finding`."""
        rows = [
            *({"verdict": "unsound", **finding.to_json()} for finding in self.findings),
            *({"verdict": "note", **finding.to_json()} for finding in self.notes),
            *({"verdict": "not checked", "code": x.code, "text": x.text} for x in self.not_checked),
        ]
        return pl.DataFrame(rows, schema=_COLUMNS)

    def notes_below(self) -> tuple[str, ...]:
        """Warnings of the readers; the findings are the answer itself."""
        return self.caveats.warnings

    def document(self) -> dict[str, Any]:
        """`to_json` with the warnings."""
        return {**self.to_json(), "warnings": list(self.caveats.warnings)}

    def to_json(self) -> dict[str, Any]:
        """The result as ``thence check --format json`` prints it."""
        return {
            "sound": self.sound,
            "rules": self.verdicts(),
            "findings": self.findings_json(),
            "notes": [note.to_json() for note in self.notes],
            "not_checked": [{"code": n.code, "text": n.text} for n in self.not_checked],
        }
