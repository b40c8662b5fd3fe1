"""How long and with how much memory a large Kineto trace becomes a kernel report; peers beside it.

Makes a trace of the wanted size from a real recording, then runs, one after the other in processes
of their own and on the same cores:

    thence       ``thence report TRACE --format json``: the whole kernel report with attribution
    in Python    the same without the compiled scanner (THENCE_SCANNER=python), its rounds in turn with those above
    orjson       ``orjson.loads`` of the same bytes, which alone is no analysis yet
    traceinsight HTA's kernel breakdown, where it is installed (pip install traceinsight); it wants
                 a folder of gzipped ranks, which is made before the clock starts

Seconds are wall time including the start of the interpreter, and CPU time of the process and its
children; memory is the largest sum of their resident sets. On a machine that does other work, CPU
seconds say more.

    python benchmarks/read_kineto.py [--megabytes 1000] [--cores 2] [--repeat 3] [--keep FILE]
"""

from __future__ import annotations

import gzip
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from command_line import documented_parser
from kineto_input import write_repeated

if TYPE_CHECKING:
    from collections.abc import Mapping

RECORDING = Path(__file__).parent.parent / "tests/data/torch/torch_eager_rank0.json.gz"
ORJSON = "import orjson, sys; print(len(orjson.loads(open(sys.argv[1], 'rb').read())['traceEvents']))"
HTA = """
import sys
try:
    from hta.trace_analysis import TraceAnalysis
except ImportError:
    from traceinsight.trace_analysis import TraceAnalysis
analyzer = TraceAnalysis(trace_dir=sys.argv[1])
print(analyzer.get_gpu_kernel_breakdown(visualize=False)[1].head())
"""


def resident_bytes(root: int) -> int:
    """Resident memory of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    resident: dict[int, int] = {}
    page = os.sysconf("SC_PAGE_SIZE")
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            resident[int(entry.name)] = int((entry / "statm").read_text().split()[1]) * page
        except (OSError, IndexError):
            continue  # it ended meanwhile
        children.setdefault(parent, []).append(int(entry.name))
    total, open_ = 0, [root]
    while open_:
        pid = open_.pop()
        total += resident.get(pid, 0)
        open_ += children.get(pid, [])
    return total


def physical_cores(count: int) -> list[int]:
    """Processors to run on: one of each physical core before a second one of any."""
    seen: dict[str, int] = {}
    usable = sorted(os.sched_getaffinity(0))
    rounds = []
    for cpu in usable:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = siblings.read_text() if siblings.exists() else str(cpu)
        seen[core] = seen.get(core, 0) + 1
        rounds.append((seen[core], cpu))
    return [cpu for _, cpu in sorted(rounds)[:count]]


class Used(NamedTuple):
    """What a command needed: wall and CPU seconds, and bytes at its peak."""

    seconds: float
    cpu: float
    peak: int


def measured(command: list[str], cores: int, environment: Mapping[str, str] | None = None) -> Used:
    """What a command needs on some physical cores."""
    chosen = physical_cores(cores)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        preexec_fn=lambda: os.sched_setaffinity(0, chosen),  # noqa: PLW1509 - no threads here yet
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, resident_bytes(process.pid))
        time.sleep(0.01)
    seconds = time.perf_counter() - begin
    if process.returncode:
        errors = process.stderr.read().decode() if process.stderr else ""
        raise SystemExit(f"{command[:4]} failed:\n{errors[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Used(seconds, cpu, peak)


def best(name: str, runs: list[Used]) -> Used:
    """The least seconds and the highest peak of some runs, which are printed."""
    least = Used(min(run.seconds for run in runs), min(run.cpu for run in runs), max(run.peak for run in runs))
    every = " ".join(f"{run.seconds:.2f}" for run in runs)
    print(
        f"{name:13} {least.seconds:8.2f} s {least.cpu:8.2f} CPU s {least.peak / 1e6:8.0f} MB   (runs: {every})",
        flush=True,
    )
    return least


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="keep the trace here, or use it if it is there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = arguments.keep or Path(folder) / "trace.json"
        if not trace.exists():
            write_repeated(RECORDING, trace, arguments.megabytes * 1_000_000)
        size = trace.stat().st_size
        print(f"{size / 1e6:.0f} MB, {arguments.cores} cores, best of {arguments.repeat}")
        report = [sys.executable, "-m", "thence", "report", str(trace), "--format", "json"]
        ways: dict[str, list[Used]] = {"c": [], "python": []}
        for _ in range(arguments.repeat):
            for way, runs in ways.items():
                runs.append(measured(report, arguments.cores, {"THENCE_SCANNER": way}))
        ours, in_python = best("thence", ways["c"]), best("in Python", ways["python"])
        print(f"{'':13} {size / ours.seconds / 1e6:8.0f} MB/s", end="")
        faster, less = in_python.seconds / ours.seconds, in_python.cpu / ours.cpu
        print(f"; the compiled scanner is {faster:.1f}x faster and needs {less:.1f}x less CPU time")
        peers = {}
        if importlib.util.find_spec("orjson"):
            peers["orjson.loads"] = [sys.executable, "-c", ORJSON, str(trace)]
        if importlib.util.find_spec("hta") or importlib.util.find_spec("traceinsight"):
            ranks = Path(folder) / "ranks"
            ranks.mkdir()
            with trace.open("rb") as plain, gzip.open(ranks / "rank0.json.gz", "wb", 1) as zipped:
                shutil.copyfileobj(plain, zipped, 1 << 22)
            peers["traceinsight"] = [sys.executable, "-c", HTA, str(ranks)]
        for name, command in peers.items():
            peer = best(name, [measured(command, arguments.cores)])
            print(f"{'':13} thence is {peer.seconds / ours.seconds:.1f}x faster, {peer.peak / ours.peak:.1f}x smaller")


if __name__ == "__main__":
    main()
