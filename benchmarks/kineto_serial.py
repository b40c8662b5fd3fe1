"""What one process alone does while a large Kineto trace becomes a report: the part that more cores do not shorten.

    import     of thence, of the verb ``report`` and what it needs
    begin      from the call to the first decoded piece: processes are started
    pieces     to the last decoded piece: processes decode, this one joins their columns
    frames     to the tables
    attribute  to attributed tables
    summary    to the report
    serial     all of these but pieces

Wall and CPU seconds per GB of the process itself; ``all`` has the CPU seconds of the decoding processes, too. The
peaks are those of the process and of the largest decoding process. Each number is the least of all rounds.

Another checkout is measured in the same run, its rounds in turn with ours (``git worktree add /tmp/before REVISION``
makes one). With several counts of cores, the last line says how much faster the whole is on the last than on the
first.

    python benchmarks/kineto_serial.py [--megabytes 1000] [--repeat 3] [--cores 2 16] [--against /tmp/before/src]
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kineto_input import write_repeated
from read_kineto import RECORDING, physical_cores

STAGES = ("import", "begin", "pieces", "frames", "attribute", "summary")
ROUND = """
import time, json, os, resource, sys
marks = [(time.perf_counter(), time.process_time())]
marks[0] = (marks[0][0], 0.0)  # the start of the interpreter counts as import
mark = lambda: marks.append((time.perf_counter(), time.process_time()))
import thence.cli.report, thence.opening
from thence.attribution.attribute import attribute
from thence.analysis.summary import summarize
from thence.readers import registry
from thence.readers.kineto import read as kineto
mark()
whole = kineto.collected
def collected(pieces, *options):
    def watched():
        for number, piece in enumerate(pieces):
            if number == 0:
                mark()
            yield piece
    columns = whole(watched(), *options)
    mark()
    return columns
kineto.collected = collected
tables = registry.read([sys.argv[1]])
mark()
trace = attribute(tables, ())
mark()
summary = summarize(trace, "kernel")
mark()
children = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"marks": marks, "children": children.ru_utime + children.ru_stime,
                  "peaks": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, children.ru_maxrss],
                  "sum": summary.sum_ns}))
"""


PEAK = "peak MiB"


def one_round(source: Path, file: Path, cores: list[int]) -> dict[str, list[float]]:
    """Wall and CPU seconds of every stage; of ``PEAK`` the MiB of the process and of its largest child."""
    done = subprocess.run(
        [sys.executable, "-c", ROUND, str(file)],
        check=True,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(source), "POLARS_MAX_THREADS": str(len(cores))},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    found = json.loads(done.stdout)
    marks = found["marks"]
    stages = {
        name: [after[0] - before[0], after[1] - before[1]]
        for name, before, after in zip(STAGES, marks, marks[1:], strict=False)
    }
    alone = [name for name in STAGES if name != "pieces"]
    stages["serial"] = [sum(stages[name][kind] for name in alone) for kind in (0, 1)]
    stages["all"] = [marks[-1][0] - marks[0][0], marks[-1][1] + found["children"]]
    stages[PEAK] = [kib / 1024 for kib in found["peaks"]]
    return stages


def measured(
    sources: dict[str, Path], file: Path, cores: list[int], repeat: int
) -> dict[str, dict[str, list[float]]]:
    """The least of every number, of each checkout; their rounds take turns."""
    rounds: dict[str, list[dict[str, list[float]]]] = {which: [] for which in sources}
    for _ in range(repeat):
        for which, source in sources.items():
            rounds[which].append(one_round(source, file, cores))
    return {
        which: {
            stage: [min(one[stage][kind] for one in found) for kind in (0, 1)] for stage in found[0]
        }
        for which, found in rounds.items()
    }


def show(best: dict[str, dict[str, list[float]]], cores: int, gigabytes: float) -> None:
    """Prints a line for each stage, the checkouts side by side."""
    print(
        f"{cores} cores, {gigabytes:.2f} GB, s per GB" + " " * 4 + "".join(f"{w:>24}" for w in best)
    )
    for stage in next(iter(best.values())):
        line = f"  {stage:28}"
        for found in best.values():
            first, second = found[stage]
            if stage == PEAK:
                line += f"{first:12,.0f} self{second:5,.0f} MiB"
            else:
                line += f"{first / gigabytes:10.2f} wall{second / gigabytes:6.2f} CPU"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cores", type=int, nargs="+", default=[len(os.sched_getaffinity(0))])
    parser.add_argument("--against", type=Path, help="src folder of another checkout")
    parser.add_argument("--folder", type=Path, help="for the trace")
    options = parser.parse_args()
    sources = {"now": Path(__file__).resolve().parents[1] / "src"}
    if options.against:
        sources = {"before": options.against.resolve()} | sources
    for source in sources.values():  # as an installation does
        compileall.compile_dir(source, quiet=2)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        file = Path(name) / "trace.json"
        write_repeated(RECORDING, file, options.megabytes * 1_000_000)
        gigabytes = file.stat().st_size / 1e9
        wall: dict[str, list[float]] = {which: [] for which in sources}
        for count in options.cores:
            cores = physical_cores(count)
            best = measured(sources, file, cores, options.repeat)
            show(best, len(cores), gigabytes)
            for which, found in best.items():
                wall[which].append(found["all"][0])
    for which, seconds in wall.items():
        if len(seconds) > 1:
            print(f"{which}: {seconds[0] / seconds[-1]:.2f} x as fast on the most cores")


if __name__ == "__main__":
    main()
