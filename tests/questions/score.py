"""Scores what answers questions about traces: verbs of thence, or any command.

    PYTHONPATH=tests:tests/support:tests/questions python tests/questions/score.py [--seed N] [--command TEMPLATE]

Without a command, each verb of thence is scored by itself. docs/questions.md describes the questions, the answers and
the score. The last line is the seed: with it, a run has the same questions again.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
from pathlib import Path

from answerers import VERBS, Asked, ask_command, ask_verb
from question import Score
from worlds import worlds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(100_000), help="of the third that is drawn")
    parser.add_argument("--command", help="command line with {trace}, {before} and {questions}; prints JSON")
    given = parser.parse_args()
    names = [given.command] if given.command else list(VERBS)
    scores = {name: Score() for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for world in worlds(Path(folder), given.seed):
            asked = None if given.command else Asked.of(world)
            for name, score in scores.items():
                reply = ask_command(name, world) if asked is None else ask_verb(name, asked)
                score.add(world, reply.answers, reply.text)
    for name, score in scores.items():
        print(f"\n{name}: {score.of('right')} of {score.total} right")
        print("\n".join(score.lines()))
    print(f"--seed {given.seed}")


if __name__ == "__main__":
    main()
