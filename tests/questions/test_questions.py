"""thence answers the questions rightly or abstains: whatever is asked, it claims nothing that cannot be known."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from answerers import VERBS, Asked, ask_verb
from question import Score
from worlds import worlds

if TYPE_CHECKING:
    from pathlib import Path

LEAST_RIGHT = {
    "explain": 0.88, "report": 0.5, "idle": 0.3, "check": 0.3, "ranks": 0.3, "whatif": 0.3, "diff": 0.3,
}  # fmt: skip
"""Share of the questions that a verb alone answers rightly, at least; `docs/questions.md` has the figures."""
EVERYWHERE = ("explain",)
"""Verbs that are asked about all worlds; the others only about those that are drawn in this run."""
DRAWN = {"loader", "pause", "launch", "gpu_bound", "late", "slower", "lost"}
"""Worlds that are drawn in this run as well: once is enough here; tests/questions/score.py asks about both."""


def test_verbs_alone_and_explain_answer_rightly_or_abstain(tmp_path: Path) -> None:
    seed = secrets.randbelow(100_000)
    scores = {verb: Score() for verb in VERBS}
    for world in worlds(tmp_path, seed):
        if world.name in DRAWN:
            continue
        asked = Asked.of(world)
        for verb in VERBS if world.name.endswith("drawn") else EVERYWHERE:
            reply = ask_verb(verb, asked)
            scores[verb].add(world, reply.answers, reply.text)
    assert scores["explain"].total >= 120
    for verb, score in scores.items():
        told = f"{verb}, with --seed {seed} of tests/questions/score.py:\n" + "\n".join(score.lines())
        assert not score.missed, told
        assert not score.said, told
        assert score.of("right") >= LEAST_RIGHT.get(verb, 0.25) * score.total, told
