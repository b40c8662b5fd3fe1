"""Peak memory and CPU time of verbs, of two versions of thence beside each other.

    python benchmarks/memory_of_versions.py OTHER_SRC INPUT... [--verbs report,streams] [--rounds 3]

``OTHER_SRC`` is the folder ``src`` of the other version (``git archive COMMIT src | tar x -C DIR``), given the same
Python and libraries. Each run is a process of its own, the versions in turns; least of the rounds, both ways.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from command_line import documented_parser

MB = 1000  # of ru_maxrss, in kB
OURS = Path(__file__).parents[1] / "src"
RUN = """
import os, resource, sys
sys.stdout = open(os.devnull, "w")
from thence.cli import main
code = 0
try:
    main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(max(u.ru_maxrss for u in used), sum(u.ru_utime + u.ru_stime for u in used), code, file=sys.stderr)
"""


def measured(source: Path, verb: str, inputs: list[str]) -> tuple[float, float, str]:
    """Peak memory in MB, CPU seconds, and the exit code."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, *verb.split(), *inputs], stderr=subprocess.PIPE, check=False, text=True,
        env=os.environ | {"PYTHONPATH": str(source)},
    )  # fmt: skip
    peak, seconds, code = done.stderr.strip().splitlines()[-1].split()
    return int(peak) / MB, float(seconds), code


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("other", type=Path, metavar="OTHER_SRC")
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="several of one trace with commas")
    parser.add_argument("--verbs", default="report", help="with commas between them")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| input | verb | MB other | MB ours | ratio | s other | s ours | ratio |\n|---|---|---|---|---|---|---|---|")
    for given in options.inputs:
        for verb in options.verbs.split(","):
            rounds = [
                [measured(source, verb, given.split(",")) for source in (options.other, OURS)]
                for _ in range(options.rounds)
            ]
            (mb_other, s_other), (mb, s) = ([min(r[side][i] for r in rounds) for i in (0, 1)] for side in (0, 1))
            codes = {r[side][2] for r in rounds for side in (0, 1)} - {"0"}
            name = Path(given.split(",")[0]).name + (f" (exit {', '.join(sorted(codes))})" if codes else "")
            print(
                f"| {name} | {verb} | {mb_other:,.0f} | {mb:,.0f} | {mb / mb_other:.2f} | {s_other:.2f} | {s:.2f} | "
                f"{s / s_other:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
