"""How often `thence history` finds a planted slowdown, and how often it names a change where there is none.

    python benchmarks/history_noise.py [HISTORIES]

Runs are those of `tests/support/run_histories.py`: a recorded step of a training program, with a pace of each run, each
kernel in each run and each step, and some runs that something else disturbed. Of each history of 44 runs, the longest
module takes longer since run 30: 1.3 and 1.6 times as long are 2.4 and 4.8 % of the step.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from command_line import documented_parser

sys.path.append(str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from run_histories import DAY_NS, FIRST_NS, longest_module, runs
from thence.analysis.diff.sample import STEP
from thence.analysis.history.answer import history


def main() -> None:
    """Prints the shares."""
    parser = documented_parser(__doc__)
    parser.add_argument("histories", type=int, nargs="?", default=100, help="of each kind")
    count = parser.parse_args().histories
    random = np.random.default_rng(0)
    quiet = sum(history(runs(seed)).changes.height > 0 for seed in range(count))
    print(f"nothing planted: {quiet} of {count} histories name a change")
    for slower in (1.3, 1.6):
        when = named = early = 0
        for seed in range(count):
            made = runs(1_000_000 + seed, slower=slower)
            order = [*random.permutation(29), *(29 + random.permutation(15))]
            shuffled = [
                replace(made[at], name=f"run{place + 1:02}", started_ns=FIRST_NS + place * DAY_NS)
                for place, at in enumerate(order)
            ]
            found = history(shuffled)
            of_step = found.changes.filter(by=STEP)["run"].to_list()
            when += bool({30, 31} & {*of_step})
            early += bool((found.changes["run"] < 30).any())
            named += longest_module() in found.explanation[0]
        print(
            f"module {slower} times as long: the step is slower since run 30 or 31 in {when} of {count}, "
            f"the module is in the first sentence of {named}, a change before run 30 in {early}"
        )


if __name__ == "__main__":
    main()
