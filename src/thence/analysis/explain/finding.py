"""A finding of `explain`, what could not be answered, and names and sentences that are safe to print.

Text of a trace is data: names lose their control characters, are at most `NAME_WIDTH` characters long and stand in
backticks, so no name can look like a sentence of thence, whoever reads it.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from thence.model.kernel_names import clip, short_names
from thence.model.own_code import SOURCE_PLACE
from thence.model.shortened_names import fitted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thence.units import Ns

NAME_WIDTH = 48
"""Most characters of a name of the trace."""
SENTENCE_WIDTH = 320
"""Most characters of a sentence of another answer, and of a reason."""
MAX_ROWS = 6
"""Most rows of evidence of a finding."""
_LONGEST = 4096
"""Characters of a name that decide how it is shortened."""
_NUMBER_AT_END = re.compile(r"[\s(,;:+-]*[\d.,]+\s*$")


@dataclass(frozen=True, slots=True)
class Command:
    """A command of thence on the same inputs: ``thence VERB INPUT OPTIONS``."""

    verb: str
    options: tuple[str, ...] = ()

    def line(self, inputs: str) -> str:
        """The command line.

        Args:
            inputs: as a shell takes them.
        """
        return " ".join(filter(None, ("thence", self.verb, inputs, shlex.join(self.options))))


@dataclass(frozen=True, slots=True)
class Gain:
    """What a change is predicted to gain. Times are ns of a step; of the recording if it has no steps.

    Attributes:
        ns, low, high: how much shorter a step is, and the interval.
        condition: the change, and of which program the prediction is.
    """

    ns: float
    low: float
    high: float
    condition: str

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"ns_per_step": round(self.ns), "low": round(self.low), "high": round(self.high), "if": self.condition}


@dataclass(frozen=True, slots=True)
class Moment:
    """A time of a device that shows a finding, on the trace's clock."""

    rank: int
    device: int
    start: Ns
    duration: Ns

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"rank": self.rank, "device": self.device, "start_ns": self.start, "duration_ns": self.duration}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that an expert would say about the trace.

    Attributes:
        kind: a key of `thence.analysis.explain.answer.KINDS`.
        claim: one sentence without a period.
        value, unit: the number that the claim is about, in the unit; None if there is none.
        low, high: interval or range of the value, in the unit; None without one.
        share: of a step, or of the GPU time, as the claim says; None if it is none.
        severity: high (a tenth of a step or more), medium (2 % or more), low, or info (describes the program).
        evidence: the command that shows it.
        rows: some of its rows, at most `MAX_ROWS`; where they are parts of a whole, the last is the rest.
        gain: what a change would gain; None if nothing is predicted.
        no_gain: why not; empty if a gain is predicted.
        next: what to ask next.
        place: what the finding is about, such as a cause or a kernel, as the trace names it.
        rank: which rank it is about; None for all.
        moment: when to look at the timeline; None if no single time shows it.
    """

    kind: str
    claim: str
    value: float | None
    unit: str
    evidence: Command
    next: Command
    low: float | None = None
    high: float | None = None
    share: float | None = None
    severity: str = "info"
    rows: tuple[Mapping[str, Any], ...] = ()
    gain: Gain | None = None
    no_gain: str = ""
    place: str = ""
    rank: int | None = None
    moment: Moment | None = field(default=None, compare=False)

    @property
    def id(self) -> str:
        """Stable over runs: a hash of kind, place and rank."""
        text = "\0".join((self.kind, self.place, "" if self.rank is None else str(self.rank)))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]

    def to_json(self, inputs: str) -> dict[str, Any]:
        """As JSON values.

        Args:
            inputs: as a shell takes them.
        """
        return {
            "id": self.id,
            "kind": self.kind,
            "rank": self.rank,
            "place": name(self.place) if self.place else None,
            "claim": self.claim,
            "value": self.value,
            "unit": self.unit,
            "low": self.low,
            "high": self.high,
            "share": self.share,
            "severity": self.severity,
            "evidence": {"command": self.evidence.line(inputs), "rows": [dict(row) for row in self.rows]},
            "at": None if self.moment is None else self.moment.to_json(),
            "gain": None if self.gain is None else self.gain.to_json(),
            "no_gain": self.no_gain,
            "next": self.next.line(inputs),
        }


@dataclass(frozen=True, slots=True)
class NotAnswered:
    """A question that the trace cannot answer.

    Attributes:
        question: in a few words.
        reason: why.
        how: how to record what is missing.
    """

    question: str
    reason: str
    how: str

    def to_json(self) -> dict[str, str]:
        """As JSON values."""
        return {"question": self.question, "reason": self.reason, "how": self.how}


def name(text: str) -> str:
    """A name of the trace as data: without control characters and backticks, at most `NAME_WIDTH` characters.

    A place in a source file keeps its file and line.
    """
    short = fitted([text], NAME_WIDTH)[0] if len(text) <= _LONGEST and SOURCE_PLACE.fullmatch(text) else text
    return _printable(clip(short, NAME_WIDTH)).replace("`", "'")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def quoted(text: str, by: str = "") -> str:
    """A name in backticks; kernels get their short names.

    Args:
        text: as the trace has it.
        by: the kind of place; empty for others.
    """
    if by == "kernel":
        text = short_names([text]).get(text, text)
    return f"`{name(text)}`"


def sentence(text: str, width: int = SENTENCE_WIDTH) -> str:
    """A sentence of another answer: without control characters, at most ``width`` characters and an ellipsis.

    A longer one ends before a word, never within or after a number.
    """
    kept = text[: 2 * width]
    kept = _printable(kept.replace("\n", " ").replace("\t", " ")).replace("`", "'")
    if len(kept) <= width and len(text) <= 2 * width:
        return kept
    kept = kept[:width].rsplit(" ", 1)[0]
    while (shorter := _NUMBER_AT_END.sub("", kept)) != kept:
        kept = shorter
    return f"{kept} ..."


def all_quoted(names: Sequence[str], by: str = "") -> list[str]:
    """As `quoted`; different names stay different."""
    if by == "kernel":
        short = short_names(list(names))
        names = [short.get(text, text) for text in names]
    return [quoted(text) for text in fitted([_printable(clip(text, _LONGEST)) for text in names], NAME_WIDTH)]


def option(action: str, kind: str, text: str) -> tuple[str, ...]:
    """The option of ``whatif`` for a change of exactly one place; none if its name is too long or not printable."""
    if kind in ("cause", "rank"):
        return f"--{action}", f"{kind}:{text}"
    return (f"--{action}", f"{kind}:^{re.escape(text)}$") if len(text) <= NAME_WIDTH and text.isprintable() else ()
