"""How long and with how much memory a large Kineto trace becomes a kernel report; peers beside it.

Makes a trace of the wanted size from a real recording, then runs, one after the other in processes
of their own and on the same cores:

    thence       ``thence report TRACE --format json``: the whole kernel report with attribution
    orjson       ``orjson.loads`` of the same bytes, which alone is no analysis yet
    traceinsight HTA's kernel breakdown, where it is installed (pip install traceinsight); it wants
                 a folder of gzipped ranks, which is made before the clock starts

Seconds are wall time including the start of the interpreter; memory is the largest sum of the
resident sets of the process and its children.

    python benchmarks/read_kineto.py [--megabytes 1000] [--cores 2] [--repeat 3] [--keep FILE]
"""

from __future__ import annotations

import gzip
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from command_line import documented_parser
from kineto_input import write_repeated

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


def measured(command: list[str], cores: int) -> tuple[float, int]:
    """Wall seconds and peak bytes of a command on some physical cores."""
    chosen = physical_cores(cores)
    begin = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
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
    return seconds, peak


def best(name: str, command: list[str], cores: int, repeat: int) -> tuple[float, int]:
    runs = [measured(command, cores) for _ in range(repeat)]
    seconds, peak = min(s for s, _ in runs), max(p for _, p in runs)
    every = " ".join(f"{s:.2f}" for s, _ in runs)
    print(f"{name:13} {seconds:8.2f} s   {peak / 1e6:8.0f} MB   (runs: {every})", flush=True)
    return seconds, peak


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
        ours, our_peak = best("thence", report, arguments.cores, arguments.repeat)
        print(f"{'':13} {size / ours / 1e6:8.0f} MB/s")
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
            seconds, peak = best(name, command, arguments.cores, 1)
            print(f"{'':13} thence is {seconds / ours:.1f}x faster, {peak / our_peak:.1f}x smaller")


if __name__ == "__main__":
    main()
