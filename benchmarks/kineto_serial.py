"""What one process alone does while a large Kineto trace becomes a report: the part that more cores do not shorten.

    import     of thence, by ``import thence.cli`` and what ``report`` needs
    begin      from the call to the first decoded piece: processes are started
    pieces     to the last decoded piece: processes decode, this one joins their columns
    frames     to the tables
    attribute  to attributed tables
    summary    to the report

Wall and CPU seconds of the process itself, CPU seconds of all decoding processes, and all of it per GB. Serial is
what stands outside of pieces. Other checkouts can be measured in the same run: their rounds take turns with ours.

    python benchmarks/kineto_serial.py [--megabytes 1000] [--repeat 3] [--cores 2 16] [--against OTHER/src]
"""

from __future__ import annotations

import argparse
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
import thence.cli, thence.opening
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
                  "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "sum": summary.sum_ns}))
"""


def one_round(source: Path, file: Path, cores: list[int]) -> dict[str, list[float]]:
    """Wall and CPU seconds of every stage; all CPU seconds and the peak under names of their own."""
    done = subprocess.run(
        [sys.executable, "-c", ROUND, str(file)],
        check=True,
        capture_output=True,
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
    stages["peak MiB"] = [found["peak"] / 1024] * 2
    return stages


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
    sources = {"this": Path(__file__).parents[1] / "src"}
    if options.against:
        sources["other"] = options.against.resolve()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        file = Path(name) / "trace.json"
        write_repeated(RECORDING, file, options.megabytes * 1_000_000)
        gigabytes = file.stat().st_size / 1e9
        for count in options.cores:
            cores = physical_cores(count)
            rounds: dict[str, list[dict[str, list[float]]]] = {which: [] for which in sources}
            for _ in range(options.repeat):
                for which, source in sources.items():
                    rounds[which].append(one_round(source, file, cores))
            for which, found in rounds.items():
                print(
                    f"{which}, {len(cores)} cores, {gigabytes:.2f} GB; the best of {options.repeat}, per GB:"
                )
                for stage in found[0]:
                    wall, cpu = (min(one[stage][kind] for one in found) for kind in (0, 1))
                    if stage == "peak MiB":
                        print(f"  {stage:10} {wall:8,.0f}")
                    else:
                        print(
                            f"  {stage:10} {wall / gigabytes:8.2f} s wall {cpu / gigabytes:8.2f} s CPU"
                        )


if __name__ == "__main__":
    main()
