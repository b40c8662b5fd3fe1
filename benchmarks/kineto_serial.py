"""What one process alone does while a large Kineto trace becomes a report: the part that more cores do not shorten.

    begin      from the start of the interpreter to the first decoded piece: imports, processes are started
    pieces     to the last decoded piece: processes decode, this one imports what it lacks and joins their columns
    frames     to the tables
    attribute  to attributed tables
    summary    to the report
    serial     all of these but pieces
    alone      all of these, of pieces only the CPU seconds that this process itself needs: what would be left if
               there were any number of decoding processes and none had to be waited for
    estimate   CPU seconds of alone, and an Nth of those of the decoding processes, for N cores: no measurement,
               and no more than a bound; on a machine that does other work it says more than wall seconds

thence is imported as by its verb ``report`` where click is installed, else as by ``thence.open``.

Seconds per GB, wall and CPU of the process itself; ``all`` has the CPU seconds of the decoding processes, too. The
peaks are those of the process and of the largest decoding process. Each number is the least of all rounds; every
round is printed as it ends. On one core the process decodes by itself: then begin ends with its imports, and all of
pieces is its own.

Another checkout is measured in the same run, its rounds in turn with ours (``git worktree add /tmp/before REVISION``
makes one), and its serial part compared with ours. With several counts of cores, the last lines say how much faster
the whole is on the last than on the first, and how much of it is serial if the rest is shared among the cores
(Amdahl's law).

    python benchmarks/kineto_serial.py [--megabytes 1000] [--repeat 3] [--cores 2 16] [--estimate 2 16]
                                       [--against /tmp/before/src]

Needs of the repository src/thence, tests/data/torch/torch_eager_rank0.json.gz, and of benchmarks/ this file,
kineto_input.py and read_kineto.py; numpy, polars, msgspec and isal (and click, for the whole command line); and room
for the trace in --folder, by default that of temporary files.
"""

from __future__ import annotations

import compileall
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from command_line import documented_parser
from kineto_input import write_repeated
from read_kineto import RECORDING, physical_cores

PACKAGES = ("numpy", "polars", "msgspec", "isal")
STAGES = ("begin", "pieces", "frames", "attribute", "summary")
ROUND = """
import time, json, os, resource, sys
from concurrent.futures import Future
from contextlib import nullcontext
from importlib.util import find_spec
marks = [(time.perf_counter(), 0.0)]  # the CPU time of starting the interpreter counts, too
mark = lambda: marks.append((time.perf_counter(), time.process_time()))
decoded = Future.set_result
def first(self, result):
    Future.set_result = decoded
    decoded(self, result)
    mark()
Future.set_result = first
import thence.__main__
with getattr(thence.__main__, "reading_ahead", lambda _: nullcontext())(["report", sys.argv[1]]):
    if find_spec("click"):
        getattr(thence.__main__, "loaded", lambda: __import__("thence.cli"))()
        import thence.cli.report
    import thence.opening
    from thence.attribution.attribute import attribute
    from thence.analysis.report.summary import summarize
    from thence.readers import registry
    from thence.readers.kineto import read as kineto
    whole = kineto.collected
    def collected(*options):
        if len(os.sched_getaffinity(0)) < 2:
            mark()
        columns = whole(*options)
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


def check(sources: dict[str, Path], cores: list[int]) -> None:
    """Ends with a sentence where something is missing, before anything is made or measured."""
    missing = [f"the package {name}" for name in PACKAGES if importlib.util.find_spec(name) is None]
    files = [RECORDING, *(source / "thence" / "__main__.py" for source in sources.values())]
    missing += [f"the file {file}" for file in files if not file.is_file()]
    if missing:
        raise SystemExit(f"kineto_serial: {' and '.join(missing)} missing")
    usable = len(os.sched_getaffinity(0))
    if usable < max(cores):
        raise SystemExit(f"kineto_serial: {max(cores)} cores are asked for, {usable} can be used")


def one_round(source: Path, file: Path, cores: list[int]) -> dict[str, list[float]]:
    """Wall and CPU seconds of every stage; of ``PEAK`` the MiB of the process and of its largest child."""
    path = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]  # packages may come from there
    done = subprocess.run(
        [sys.executable, "-c", ROUND, str(file)],
        check=False,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "POLARS_MAX_THREADS": str(len(cores))},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if done.returncode:
        raise SystemExit(f"kineto_serial: a round of {source} failed, as said above")
    found = json.loads(done.stdout)
    marks = found["marks"]
    stages = {
        name: [after[0] - before[0], after[1] - before[1]]
        for name, before, after in zip(STAGES, marks[:-1], marks[1:], strict=True)
    }
    serial = [name for name in STAGES if name != "pieces"]
    stages["serial"] = [sum(stages[name][kind] for name in serial) for kind in (0, 1)]
    joining = stages["pieces"][1]
    stages["alone"] = [spent + joining for spent in stages["serial"]]
    stages["all"] = [marks[-1][0] - marks[0][0], marks[-1][1] + found["children"]]
    stages[PEAK] = [kib / 1024 for kib in found["peaks"]]
    return stages


def measured(sources: dict[str, Path], file: Path, cores: list[int], repeat: int) -> dict[str, dict[str, list[float]]]:
    """The least of every number, of each checkout; their rounds take turns."""
    rounds: dict[str, list[dict[str, list[float]]]] = {which: [] for which in sources}
    for number in range(repeat):
        for which, source in sources.items():
            found = one_round(source, file, cores)
            rounds[which].append(found)
            wall, cpu = found["all"]
            alone = found["alone"][1]
            print(
                f"  {which}, round {number + 1}: {wall:.2f} s wall, {cpu:.2f} s CPU, {alone:.2f} of it alone",
                flush=True,
            )
    return {
        which: {stage: [min(one[stage][kind] for one in found) for kind in (0, 1)] for stage in found[0]}
        for which, found in rounds.items()
    }


def show(best: dict[str, dict[str, list[float]]], cores: int, gigabytes: float, estimated: list[int]) -> None:
    """Prints a line for each stage, the checkouts side by side."""
    print(f"{cores} cores, {gigabytes:.2f} GB, s per GB" + " " * 4 + "".join(f"{w:>24}" for w in best))
    for stage in next(iter(best.values())):
        line = f"  {stage:28}"
        for found in best.values():
            first, second = found[stage]
            if stage == PEAK:
                line += f"{first:12,.0f} self{second:5,.0f} MiB"
            else:
                line += f"{first / gigabytes:10.2f} wall{second / gigabytes:6.2f} CPU"
        print(line, flush=True)
    for count in estimated if cores > 1 else ():
        line = f"  {f'estimate for {count} cores':28}"
        for found in best.values():
            alone, everything = found["alone"][1], found["all"][1]
            seconds = (alone + (everything - alone) / count) / gigabytes
            line += f"{seconds:10.2f}{'':14}"
        print(line)
    if len(best) > 1:
        before, now = (found["serial"] for found in best.values())
        wall, cpu = (after / earlier for earlier, after in zip(before, now, strict=True))
        print(f"  the serial part is {wall:.2f} of that before in wall, {cpu:.2f} in CPU seconds")


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cores", type=int, nargs="+", default=[len(os.sched_getaffinity(0))])
    parser.add_argument("--estimate", type=int, nargs="*", default=[2, 16], help="for so many cores")
    parser.add_argument("--against", type=Path, help="src folder of another checkout")
    parser.add_argument("--folder", type=Path, help="for the trace")
    options = parser.parse_args()
    sources = {"now": Path(__file__).resolve().parents[1] / "src"}
    if options.against:
        sources = {"before": options.against.resolve()} | sources
    check(sources, options.cores)
    for source in sources.values():  # as an installation does
        compileall.compile_dir(source, quiet=2)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        file = Path(name) / "trace.json"
        write_repeated(RECORDING, file, options.megabytes * 1_000_000)
        gigabytes = file.stat().st_size / 1e9
        print(f"{gigabytes:.2f} GB written", flush=True)
        wall: dict[str, list[float]] = {which: [] for which in sources}
        for count in options.cores:
            cores = physical_cores(count)
            best = measured(sources, file, cores, options.repeat)
            show(best, len(cores), gigabytes, options.estimate)
            for which, found in best.items():
                wall[which].append(found["all"][0])
    first, last = options.cores[0], options.cores[-1]
    for which, seconds in wall.items() if last > first else ():
        serial = (last * seconds[-1] - first * seconds[0]) / (last - first) / gigabytes
        print(
            f"{which}: {last} cores are {seconds[0] / seconds[-1]:.2f} x as fast as {first}; "
            f"by Amdahl's law {serial:.2f} s per GB are serial"
        )


if __name__ == "__main__":
    main()
