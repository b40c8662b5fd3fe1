"""A question about a trace with its known answer, and how answers are scored.

An answer is a number, a text, true or false, or None: the answerer abstains. ``UNKNOWN`` is the known answer of
questions that the trace cannot answer; only abstaining is right there. What abstains on a question that can be answered
is counted apart from what is wrong, because it misleads nobody.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

UNKNOWN = "cannot be known from this trace"
TOPICS = ("where", "step", "idle", "limit", "late", "sound", "change", "gain", "use", "memory")


@dataclass(frozen=True)
class Question:
    """A question about one trace.

    Attributes:
        ask: what is asked, as a code for commands: ``TOPIC:WHAT`` or ``TOPIC:WHAT:OF``, such as
            ``idle:cause_share:loader``.
        text: the question in words, for people and agents.
        answer: the known answer, or `UNKNOWN`.
        within: by how much a number may differ.
        must_not: answers that would be harmful, not only wrong.
    """

    ask: str
    text: str
    answer: Any
    within: float = 0.0
    must_not: tuple[Any, ...] = ()

    @property
    def topic(self) -> str:
        """The first word of ``ask``."""
        return self.ask.partition(":")[0]

    def outcome(self, given: Any) -> str:
        """How an answer counts: right, abstained, wrong, claimed (though it cannot be known) or harmful."""
        abstains = given is None or given == UNKNOWN
        if self.answer == UNKNOWN:
            return "right" if abstains else "claimed"
        if abstains:
            return "abstained"
        if any(_same(given, wrong, 0.0) for wrong in self.must_not):
            return "harmful"
        return "right" if _same(given, self.answer, self.within) else "wrong"


def _same(given: Any, known: Any, within: float) -> bool:
    if isinstance(known, bool) or isinstance(given, bool):
        return given is known
    if isinstance(known, int | float):
        return isinstance(given, int | float) and abs(given - known) <= within
    return str(given) == str(known)


@dataclass(frozen=True)
class World:
    """A trace, or several of one job or run, and the questions about it.

    Attributes:
        name: of the world, unique.
        paths: inputs of one trace.
        questions: about it.
        before: inputs of a run before, for questions of the topic change.
        must_not_say: regular expressions of false claims: nothing that a command prints about the trace may match one.
    """

    name: str
    paths: tuple[Path, ...]
    questions: tuple[Question, ...]
    before: tuple[Path, ...] = ()
    must_not_say: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What an answerer is told: everything but the answers."""
        questions = [{"id": f"{self.name}/{q.ask}", "ask": q.ask, "question": q.text} for q in self.questions]
        return {
            "trace": [str(path) for path in self.paths],
            "before": [str(path) for path in self.before],
            "questions": questions,
        }


@dataclass
class Score:
    """What an answerer reached.

    Attributes:
        counts: number of questions by topic and outcome.
        missed: a line for each answer that is wrong, claimed or harmful.
        said: a line for each false claim in what it printed.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def add(self, world: World, answers: Mapping[str, Any], text: str) -> None:
        """Counts the answers about one world.

        Args:
            world: asked about.
            answers: by ``ask``; without one, the answerer abstains.
            text: all that the answerer printed.
        """
        for question in world.questions:
            given = answers.get(question.ask)
            outcome = question.outcome(given)
            self.counts[question.topic, outcome] += 1
            if outcome in ("wrong", "claimed", "harmful"):
                self.missed.append(f"{world.name}: {question.ask}: {given!r} is {outcome}; {question.answer!r} is true")
        for pattern in world.must_not_say:
            if found := re.search(pattern, text):
                self.said.append(f"{world.name}: says {found[0]!r}")

    def of(self, outcome: str) -> int:
        """Number of questions with an outcome."""
        return sum(number for (_, counted), number in self.counts.items() if counted == outcome)

    @property
    def total(self) -> int:
        """Number of questions."""
        return sum(self.counts.values())

    def lines(self) -> Iterable[str]:
        """The score as a table: a line for each topic, and their sums."""
        outcomes = ("right", "abstained", "wrong", "claimed", "harmful")
        yield f"{'topic':10}" + "".join(f"{outcome:>11}" for outcome in outcomes)
        for topic in (*TOPICS, "all"):
            counts = [self.of(o) if topic == "all" else self.counts[topic, o] for o in outcomes]
            if any(counts):
                yield f"{topic:10}" + "".join(f"{count:11}" for count in counts)
        yield from (f"  {line}" for line in (*self.missed, *self.said))
