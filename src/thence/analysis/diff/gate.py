"""Gates: bounds that a change must not exceed, such as ``total>5%`` or ``label:forward/attention>0.2ms``.

A gate is exceeded if the whole 95 % interval of the change lies above its bound, and may be if a part does. Of a
relative bound the interval is that of after - (1 + bound) before, so that the noise of both sides counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thence.analysis.diff.estimates import estimates
from thence.analysis.diff.paths import PARTS
from thence.analysis.diff.sample import ALL, BUSY, COMMUNICATION, EXPOSED, IDLE, STEP
from thence.errors import MissingData, UsageError
from thence.model.places import COMPARED
from thence.units import format_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.analysis.diff.compare import Diff

__all__ = ["Bound", "Gate", "judge", "needs_runs", "parse_bound"]

_BOUND = re.compile(
    r"(?P<what>.+?)\s*>\s*(?P<number>\d{1,12}(?:\.\d{1,9})?)\s*(?P<unit>%|ns|us|µs|ms|s)"
)
_UNITS_NS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
_WHOLE = {"total": STEP, BUSY: BUSY, IDLE: IDLE, COMMUNICATION: COMMUNICATION}
EXCEEDED, MAY_BE, WITHIN = "exceeded", "may be exceeded", "within"


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound of a change.

    Attributes:
        text: as the user wrote it.
        by: what the row is by.
        name: of the row; None for the whole.
        share: of before, from 0 on; None for a bound in ns.
        ns: per step; None for a relative one.
    """

    text: str
    by: str
    name: str | None
    share: float | None
    ns: float | None


@dataclass(frozen=True, slots=True)
class Gate:
    """A bound that was judged.

    Attributes:
        bound: which.
        verdict: exceeded, may be exceeded or within.
        before_ns, after_ns: of the row, per step.
        low_ns, high_ns: 95 % interval of by how much the bound is exceeded, negative where it is not; None where
            nothing is known of the noise.
    """

    bound: Bound
    verdict: str
    before_ns: float
    after_ns: float
    low_ns: float | None
    high_ns: float | None

    def fails(self, *, strict: bool) -> bool:
        """Whether the change is refused: it is certainly too large or, if strict, may be."""
        return self.verdict == EXCEEDED or (strict and self.verdict == MAY_BE)

    def to_json(self) -> dict[str, Any]:
        """As the command line prints it."""
        return {
            "bound": self.bound.text,
            "verdict": self.verdict,
            "before_ns": self.before_ns,
            "after_ns": self.after_ns,
            "over_low_ns": self.low_ns,
            "over_high_ns": self.high_ns,
        }

    def __str__(self) -> str:
        times = f"{format_ns(self.before_ns)} -> {format_ns(self.after_ns)}"
        if self.low_ns is None or self.high_ns is None:
            return f"{self.bound.text}: {self.verdict}: {times}, of unknown noise"
        low, high = (
            f"{format_ns(abs(ns))} {'above' if ns > 0 else 'below'}"
            for ns in (self.low_ns, self.high_ns)
        )
        return f"{self.bound.text}: {self.verdict}: {times}; from {low} to {high} the bound (95 %)"


def parse_bound(text: str) -> Bound:
    """A bound from what a user wrote.

    Raises:
        UsageError: it has another form, or names a kind that rows are not by.
    """
    found = _BOUND.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"--fail-on {text!r}: write what, > and a bound in %, ns, us, ms or s, such as 'total>5%', "
            "'label:forward/attention>10%' or 'idle>1ms'"
        )
    kind, colon, name = found["what"].strip().partition(":")
    by = _WHOLE.get(kind, kind)
    named_whole = by in _WHOLE.values() and by != IDLE and colon
    if by not in (*_WHOLE.values(), *COMPARED) or (by in COMPARED and not name) or named_whole:
        kinds = ", ".join((*_WHOLE, "idle:CAUSE", *(f"{kind}:NAME" for kind in COMPARED)))
        raise UsageError(
            f"--fail-on {text!r}: cannot judge {found['what']!r}; choose one of {kinds}"
        )
    number = float(found["number"])
    relative = found["unit"] == "%"
    return Bound(
        text,
        by,
        name if colon else None,
        number / 100 if relative else None,
        None if relative else number * _UNITS_NS[found["unit"]],
    )


def needs_runs(before: int, after: int) -> bool:
    """Whether the runs are too few for a gate that does not ask for the noise within runs alone."""
    return before + after < 3


def judge(diff: Diff, bounds: Sequence[Bound]) -> tuple[Gate, ...]:
    """Every bound with its verdict.

    Raises:
        MissingData: neither side has the row that a bound is about.
    """
    return tuple(_judged(diff, bound) for bound in bounds)


def _judged(diff: Diff, bound: Bound) -> Gate:
    row = _row(diff, bound)
    before = range(len(diff.before))
    after = range(len(diff.before), len(diff.before) + len(diff.after))
    found = estimates(diff.means, before, after, bound.share or 0.0)
    limit = bound.ns or 0.0
    low, high = float(found.low[row]) - limit, float(found.high[row]) - limit
    known = low > -float("inf")
    verdict = EXCEEDED if known and low > 0 else WITHIN if known and high <= 0 else MAY_BE
    return Gate(
        bound,
        verdict,
        float(found.before[row]),
        float(found.after[row]),
        low if known else None,
        high if known else None,
    )


def _row(diff: Diff, bound: Bound) -> int:
    """The row that a bound is about; of a path with parts the one that holds them all."""
    keys = diff.means.keys
    name = ALL if bound.name is None else bound.name
    if bound.by == COMMUNICATION and bound.name is None:
        name = EXPOSED
    for candidate in ((bound.by, f"{name}{PARTS}"), (bound.by, name)):
        if candidate in keys:
            return keys.index(candidate)
    held = [n for by, n in keys if by == bound.by and not n.endswith(PARTS)]
    close = [n for n in held if name.lower() in n.lower()][:5] or held[:5]
    there = f"; there is {', '.join(close)}" if close else ""
    raise MissingData(f"--fail-on {bound.text!r}: neither side has the {bound.by} {name}{there}")
