"""Gates: bounds that a change must not exceed, such as ``total>5%`` or ``label:forward/attention>0.2ms``.

A bound is exceeded if the whole 95 % interval of the change lies above it, and may be exceeded if only a part does or
the noise is unknown. For a relative bound, the interval is that of after - (1 + bound) before, so that the noise of
both sides counts.

``new:kernel>1%`` bounds the time of all kernels that no run before has; its share is of the step before. Their time is
nothing before, so any is more than a bound of 0. The errors of several such rows add up, as if they varied together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.analysis.diff.estimates import PARTS, RunMeans, estimates
from thence.analysis.diff.sample import ALL, BUSY, COMMUNICATION, EXPOSED, IDLE, STEP, UNATTRIBUTED
from thence.errors import MissingData, UsageError
from thence.model.kernel_names import clip
from thence.model.places import COMPARED
from thence.units import format_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.analysis.diff.estimates import Estimates

_BOUND = re.compile(
    r"(?P<what>.+?)\s*>\s*(?:(?P<number>\d{1,12}(?:\.\d{1,9})?)\s*(?P<unit>%|ns|us|µs|ms|s)|(?P<none>0))"
)
_UNITS_NS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
_WHOLE = {"step": STEP, "total": STEP, BUSY: BUSY, IDLE: IDLE, COMMUNICATION: COMMUNICATION}
NEW = "new"
"""The kind of a bound of the rows that only the side after has."""
_NAMED = 80
"""Most characters of a name in an error."""
_MAX_NEW = 3
"""Most new rows that a gate names."""
EXCEEDED, MAY_BE, WITHIN = "exceeded", "may be exceeded", "within"


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound of a change.

    Attributes:
        text: the bound as the user wrote it.
        by: column ``by`` of the row; `NEW` for all new rows of a kind.
        name: name of the row, or the kind of new rows; None for the whole.
        share: share of before, or of the step before for new rows, at least 0; None for a bound in ns.
        ns: ns per step; None for a relative bound.
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
        bound: the bound.
        verdict: exceeded, may be exceeded or within.
        before_ns, after_ns: time of the row per step.
        low_ns, high_ns: 95 % interval of the excess over the bound, negative below it; None if the noise is unknown.
        new: of a bound of new rows, their names, that with most time first.
        within_runs: whether the noise between runs is not known, so that the interval is that of the noise within each.
    """

    bound: Bound
    verdict: str
    before_ns: float
    after_ns: float
    low_ns: float | None
    high_ns: float | None
    new: tuple[str, ...] = ()
    within_runs: bool = False

    def fails(self, *, strict: bool) -> bool:
        """Whether the gate fails: the bound is exceeded or, if strict, may be, and the row did not become faster."""
        return self.verdict == EXCEEDED or (strict and self.verdict == MAY_BE and self.after_ns >= self.before_ns)

    def to_json(self) -> dict[str, Any]:
        """As the command line prints it."""
        return {
            "bound": self.bound.text,
            "verdict": self.verdict,
            "before_ns": self.before_ns,
            "after_ns": self.after_ns,
            "over_low_ns": self.low_ns,
            "over_high_ns": self.high_ns,
            "new": list(self.new),
        }

    def __str__(self) -> str:
        times = f"{format_ns(self.before_ns)} -> {format_ns(self.after_ns)}"
        if self.new:
            more = f" and {len(self.new) - _MAX_NEW} more" if len(self.new) > _MAX_NEW else ""
            times += f" ({', '.join(clip(name, _NAMED) for name in self.new[:_MAX_NEW])}{more})"
        if self.low_ns is None or self.high_ns is None:
            return f"{self.bound.text}: {self.verdict}: {times}; the noise is unknown"
        low, high = (f"{format_ns(abs(ns))} {'above' if ns > 0 else 'below'}" for ns in (self.low_ns, self.high_ns))
        judged = f"{self.verdict} between these two runs" if self.within_runs else self.verdict
        return f"{self.bound.text}: {judged}: {times}; from {low} to {high} the bound (95 %)"


def parse_bound(text: str) -> Bound:
    """Parses a bound that a user wrote.

    Raises:
        UsageError: the syntax is wrong, or no rows are of the kind that it names.
    """
    match = _BOUND.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"--fail-on {text!r}: write WHAT>BOUND with the bound in %, ns, us, ms or s, or 0, such as 'total>5%', "
            "'label:forward/attention>10%', 'idle>1ms' or 'new:kernel>0'"
        )
    kind, colon, name = match["what"].strip().partition(":")
    by = _WHOLE.get(kind, kind)
    named_whole = by in _WHOLE.values() and by != IDLE and colon
    unknown = by not in (*_WHOLE.values(), *COMPARED, NEW) or (by == NEW and name not in COMPARED)
    if unknown or (by in COMPARED and not name) or named_whole:
        kinds = ", ".join((*_WHOLE, "idle:CAUSE", *(f"{kind}:NAME" for kind in COMPARED), "new:KIND"))
        raise UsageError(f"--fail-on {text!r}: cannot judge {match['what']!r}; choose one of {kinds}")
    number = float(match["number"] or match["none"])
    relative = match["unit"] == "%"
    return Bound(
        text,
        by,
        name if colon else None,
        number / 100 if relative else None,
        None if relative else number * _UNITS_NS[match["unit"] or "ns"],
    )


def needs_runs(before: int, after: int) -> bool:
    """Whether there are too few runs to know the noise between runs, which gates use by default."""
    return before + after < 3


def judge(means: RunMeans, before: Sequence[int], after: Sequence[int], bounds: Sequence[Bound]) -> tuple[Gate, ...]:
    """Judges every bound.

    Args:
        means: means of the runs of both sides.
        before: numbers of the runs before.
        after: numbers of the runs after.
        bounds: to judge.

    Raises:
        MissingData: neither side has the row of a bound.
    """
    within_runs = needs_runs(len(before), len(after))
    return tuple(replace(_judged(means, before, after, bound), within_runs=within_runs) for bound in bounds)


def _judged(means: RunMeans, before: Sequence[int], after: Sequence[int], bound: Bound) -> Gate:
    if bound.by == NEW:
        return _judged_new(means, before, after, bound)
    row = _row(means, bound)
    return _against(bound, estimates(means, before, after, bound.share or 0.0), row, bound.ns or 0.0)


def _against(bound: Bound, estimated: Estimates, row: int, limit: float, new: tuple[str, ...] = ()) -> Gate:
    """The gate of a row whose difference may be so many ns."""
    low, high = float(estimated.low[row]) - limit, float(estimated.high[row]) - limit
    known = low > -float("inf")
    verdict = EXCEEDED if known and low > 0 else WITHIN if known and high <= 0 else MAY_BE
    return Gate(
        bound,
        verdict,
        float(estimated.before[row]),
        float(estimated.after[row]),
        low if known else None,
        high if known else None,
        new,
    )


def _judged_new(means: RunMeans, before: Sequence[int], after: Sequence[int], bound: Bound) -> Gate:
    """The gate of all rows of a kind that no run before has.

    Raises:
        MissingData: neither side has a row of the kind.
    """
    of_kind = [by == bound.name and not n.endswith(PARTS) and n != UNATTRIBUTED for by, n in means.keys]
    if not any(of_kind):
        raise MissingData(f"--fail-on {bound.text!r}: neither side has rows by {bound.name}")
    time = means.mean[:, [*after]].mean(axis=1)
    rows = np.flatnonzero(np.array(of_kind) & (means.mean[:, [*before]].max(axis=1) == 0) & (time > 0))
    rows = rows[np.argsort(-time[rows], kind="stable")]
    step = float(means.mean[means.keys.index((STEP, ALL)), [*before]].mean())
    limit = bound.ns if bound.share is None else bound.share * step
    new_means = RunMeans(
        [(NEW, str(bound.name))],
        means.mean[rows].sum(axis=0, keepdims=True),
        np.square(np.sqrt(means.least[rows]).sum(axis=0, keepdims=True)),
        np.square(np.sqrt(means.error[rows]).sum(axis=0, keepdims=True)),
        means.freedom[rows].min(axis=0, keepdims=True, initial=np.inf if rows.size else 0.0),
        means.count[rows].sum(axis=0, keepdims=True),
        means.share[rows].max(axis=0, keepdims=True, initial=0.0),
        means.steps,
    )
    gate = _against(
        bound, estimates(new_means, before, after), 0, limit or 0.0, tuple(means.keys[row][1] for row in rows)
    )
    certain = (EXCEEDED if gate.after_ns else WITHIN) if not limit else WITHIN if not rows.size else gate.verdict
    return replace(gate, verdict=certain)


def _row(means: RunMeans, bound: Bound) -> int:
    """The number of the row of a bound; for a path with parts, the row of the path and all its parts."""
    keys = means.keys
    name = ALL if bound.name is None else bound.name
    if bound.by == COMMUNICATION and bound.name is None:
        name = EXPOSED
    for candidate in ((bound.by, f"{name}{PARTS}"), (bound.by, name)):
        if candidate in keys:
            return keys.index(candidate)
    held = [n for by, n in keys if by == bound.by and not n.endswith(PARTS)]
    close = [n for n in held if name.lower() in n.lower()][:5] or held[:5]
    suggestion = f"; there is {', '.join(clip(name, _NAMED) for name in close)}" if close else ""
    raise MissingData(f"--fail-on {bound.text!r}: neither side has the {bound.by} {name}{suggestion}")
