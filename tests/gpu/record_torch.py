"""What recording costs and whether it is right, on a real GPU, with PyTorch.

    python tests/gpu/record_torch.py [overhead] [agreement] [labels] [volume] [killed] [launcher]

Overhead is measured interleaved: one repetition runs the same loops plain, recorded, plain again, under
torch.profiler, and so on; medians of all repetitions are compared, with the quartiles. What CUPTI costs by
itself is measured with a collector in C (cupti_collector.c) that throws the records away.
"""

from __future__ import annotations

import collections
import ctypes
import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from support import documented_parser, end, judge

if __name__ == "__main__":
    OPTIONS = documented_parser(__doc__)
    OPTIONS.add_argument("parts", nargs="*", metavar="PART", help="all of them without it")
    GIVEN = OPTIONS.parse_args()

os.environ["TEARDOWN_CUPTI"] = "1"  # torch.profiler gives CUPTI back when a profile ends

import torch
from torch.profiler import ProfilerActivity, profile

import thence
from thence.capture.cuda import cupti, layouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCRATCH = Path(tempfile.mkdtemp(prefix="thence-record-"))
LAUNCHES, NODES = 10_000, 100
MAX_LOST_S = 2.5
"""What a killed program may lose: the recorder writes every second, or two where a part is large."""
KERNELS_ONLY = thence.RecordOptions(launches=False, nvtx=False)
EVERYTHING = thence.RecordOptions(launches=True)
GRAPHS = {"64": (1 << 6, 300), "1M": (1 << 20, 150), "4M": (1 << 22, 60)}
"""Graphs of additions: how many numbers a kernel adds to, and how often the graph is replayed."""


class Loops:
    """Tiny kernels: launched one by one under marks; and in CUDA graphs, tiny and less tiny ones."""

    def __init__(self) -> None:
        self.x = torch.ones(64, device="cuda")
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self.eager(200)
        for name, (size, _) in GRAPHS.items():
            x, self.graphs[name] = torch.ones(size, device="cuda"), torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[name]):
                for _ in range(NODES):
                    x.add_(1)
            self.replay(name, 5)

    def eager(self, launches: int = LAUNCHES) -> float:
        """Us per kernel."""
        x, begin = self.x, time.perf_counter()
        for _ in range(launches // 20):
            with thence.mark("block"):
                for _ in range(20):
                    x.add_(1)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / launches * 1e6

    def replay(self, graph: str, replays: int) -> float:
        """Us per kernel."""
        begin = time.perf_counter()
        for _ in range(replays):
            self.graphs[graph].replay()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / replays / NODES * 1e6

    def measured(self) -> list[float]:
        """Us per kernel of each loop; what begins, begins before."""
        self.eager(200)
        for name in GRAPHS:
            self.replay(name, 5)
        return [self.eager(), *(self.replay(name, runs) for name, (_, runs) in GRAPHS.items())]


KERNELS = LAUNCHES + 200 + sum(runs + 5 for _, runs in GRAPHS.values()) * NODES
"""Kernels of one measurement."""


@contextmanager
def by_thence(options: thence.RecordOptions) -> Iterator[None]:
    """Recorded by thence; every kernel must be there."""
    with thence.record(SCRATCH / "overhead", options) as recording:
        yield
    assert recording.counts["kernels"] == KERNELS, recording.counts
    shutil.rmtree(recording.folder)


@contextmanager
def by_torch(*activities: ProfilerActivity) -> Iterator[None]:
    """Recorded by torch.profiler."""
    with profile(activities=activities):
        yield


@contextmanager
def by_cupti_alone(options: thence.RecordOptions) -> Iterator[None]:
    """Recorded by a collector in C that throws the records away: what CUPTI itself costs."""
    libcupti, collector = cupti.load(), ctypes.CDLL(str(collector_library()))
    collector.collected_bytes.restype = ctypes.c_size_t
    assert collector.collect(libcupti.path.encode()) == 0
    libcupti.buffers_are_zeroed()
    for kind in options.kinds():
        libcupti.enable(kind)
        for callback_id in range(1, 4096) if kind in layouts.CALLS else ():
            name = libcupti.callback_name(layouts.CALLS[kind], callback_id)
            if name is None:
                break
            if not options.wants_call(name):
                libcupti.api(layouts.CALLS[kind], callback_id, on=False)
    yield
    torch.cuda.synchronize()
    libcupti.flush(unfinished=True)
    for kind in options.kinds():
        libcupti.disable(kind)
    libcupti.finalize()
    assert collector.collected_bytes() >= KERNELS * layouts.LAYOUTS[layouts.KERNEL].smallest


def collector_library() -> Path:
    """The collector, compiled once."""
    library = SCRATCH / "cupti_collector.so"
    if not library.exists():
        source = str(Path(__file__).with_name("cupti_collector.c"))
        compiler = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), source, "-ldl", "-lpthread"]
        subprocess.run(compiler, check=True)
    return library


LAUNCHES_TOO = thence.RecordOptions(launches=True, nvtx=False)
WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "CUPTI alone, kernels": lambda: by_cupti_alone(KERNELS_ONLY),
    "CUPTI alone, launches too": lambda: by_cupti_alone(LAUNCHES_TOO),
    "thence, kernels": lambda: by_thence(KERNELS_ONLY),
    "thence, default": lambda: by_thence(thence.RecordOptions()),
    "thence, launches + labels": lambda: by_thence(LAUNCHES_TOO),
    "thence, everything": lambda: by_thence(EVERYTHING),
    "torch.profiler, CUDA": lambda: by_torch(ProfilerActivity.CUDA),
    "torch.profiler, CPU+CUDA": lambda: by_torch(ProfilerActivity.CPU, ProfilerActivity.CUDA),
}


def overhead(seconds: float = 150) -> None:
    """Time per kernel in each way, in one interleaved run.

    Each way is compared with the plain runs before and after it, in the same process; that nothing of a
    profiler stays behind shows in those after it.
    """
    loops = Loops()

    def once(way: Callable[[], AbstractContextManager[None]]) -> list[float]:
        gc.collect()
        with way():
            return loops.measured()

    for way in (nullcontext, *WAYS.values()):
        once(way)  # warm up
    times: dict[str, list[list[list[float]]]] = {name: [] for name in WAYS}
    before, end = once(nullcontext), time.monotonic() + seconds
    while time.monotonic() < end:
        for name, way in WAYS.items():
            during, after = once(way), once(nullcontext)
            times[name].append([before, during, after])
            before = after
    print("us per kernel plain before and after, and what the way adds to their mean: medians (quartiles)")
    print(" " * 26, *(f"{loop:^40}" for loop in ("eager", *(f"graph of {n}" for n in GRAPHS))))
    for name, found in times.items():
        line = f"{name:26}"
        for i in range(1 + len(GRAPHS)):
            plain = [statistics.median(one[side][i] for one in found) for side in (0, 2)]
            added = [d[i] - (b[i] + a[i]) / 2 for b, d, a in found]
            low, middle, high = statistics.quantiles(added, n=4)
            share = 100 * middle / statistics.mean(plain)
            line += f" {plain[0]:6.3f} {plain[1]:6.3f} {middle:+6.3f} ({low:+.3f} {high:+.3f}) {share:+5.1f} %"
        print(f"{line}  n={len(found)}")


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    """One training step."""
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


def agreement() -> None:
    """The same program under torch.profiler and thence: counts, names, total time."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)), torch.nn.GELU()).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(512, 1024, device="cuda")
    for _ in range(5):
        step(model, optimizer, data)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(20):
            step(model, optimizer, data)
        torch.cuda.synchronize()
    profiled.export_chrome_trace(str(SCRATCH / "torch.json"))
    with thence.record(SCRATCH / "agreement") as recording:
        for _ in range(20):
            step(model, optimizer, data)
    ours, theirs = recording.open(), thence.open(str(SCRATCH / "torch.json"))
    counts = [collections.Counter(t.tables.gpu["name"].cast(str).str.strip_chars().to_list()) for t in (ours, theirs)]
    totals = [t.tables.gpu.filter(t.tables.gpu["kind"] == "kernel")["duration"].sum() for t in (ours, theirs)]
    judge(
        counts[0] == counts[1],
        f"names and counts of {ours.tables.gpu.height} activities, torch.profiler has {theirs.tables.gpu.height}",
    )
    for name in counts[0].keys() ^ counts[1].keys():
        print("  differs:", name[:120], counts[0][name], counts[1][name])
    judge(0.9 < totals[0] / totals[1] < 1.1, f"kernel time, of torch.profiler's: {totals[0] / totals[1]:.4f}")
    print("summary attributed:", ours.report().attributed_ns, ours.meta.warnings)


def labels() -> None:
    """Labels against what the program did: eager, backward and graphed kernels."""
    x = torch.ones(1 << 14, device="cuda", requires_grad=True)
    y = torch.ones(1 << 14, device="cuda")
    y.sin(), y.exp(), x.sin().sum().backward()
    torch.cuda.synchronize()
    with thence.record(SCRATCH / "labels") as recording:
        for _ in range(30):
            with thence.mark("model"):
                with thence.mark("first"):
                    hidden = x.sin()
                with thence.mark("second"):
                    loss = hidden.exp().sum()
            loss.backward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with thence.mark("captured"):
                for _ in range(10):
                    z = y.cos()
            for _ in range(14):
                z = z.sqrt()
        for _ in range(4):
            graph.replay()
    trace = recording.open()
    rows = trace.activities.select("name", "label", "phase", "graph").with_columns(
        trace.activities["name"].cast(str), trace.activities["label"].cast(str), trace.activities["phase"].cast(str)
    )
    expected = {  # part of the kernel's name, inside a graph: label, phase, how many
        ("sin_kernel_cuda", False): ("model/first", "forward", 30),
        ("exp_kernel_cuda", False): ("model/second", "forward", 30),
        ("cos_kernel_cuda", False): ("model/first", "backward", 30),
        ("cos_kernel_cuda", True): ("captured", None, 40),
        ("sqrt_kernel_cuda", True): (None, None, 56),
    }
    for (part, graphed), (label, phase, count) in expected.items():
        found = rows.filter(rows["name"].str.contains(part) & (rows["graph"].is_not_null() == graphed))
        ok = found.height == count and set(found["label"]) == {label}
        ok &= phase is None or set(found["phase"]) == {phase}
        judge(ok, f"{part:18} graphed={graphed!s:6} {found.height} {set(found['label'])} {set(found['phase'])}")
    print(recording.folder, sorted(p.name for p in recording.folder.iterdir()), trace.meta.warnings)
    print(trace.self_check())


def resident_mb() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def volume(kernels: int = 10_000_000) -> None:
    """Memory, disk and the time to stop, of many kernels."""
    loops = Loops()
    before = resident_mb()
    recording = thence.record(SCRATCH / "volume")
    recording.start()
    most, began = before, time.perf_counter()
    for _ in range(kernels // NODES // 1000):
        loops.replay("64", 1000)
        most = max(most, resident_mb())
    took, begin = time.perf_counter() - began, time.perf_counter()
    recording.stop()
    stop = time.perf_counter() - begin
    counts = recording.counts
    size = sum(p.stat().st_size for p in recording.folder.iterdir())
    print(
        f"{counts['kernels']:,} kernels in {took:.1f} s, dropped {recording.dropped}; memory {before:.0f} MB before, "
        f"at most {most:.0f} MB ({most - before:+.0f}); stop {stop:.2f} s; {size / 1e6:.0f} MB on disk in "
        f"{len(list(recording.folder.iterdir()))} files"
    )
    begin = time.perf_counter()
    trace = recording.open()
    print(f"opened in {time.perf_counter() - begin:.1f} s: {trace.tables.gpu.height:,} rows")


KILLED = """
import os, signal, time, torch
x = torch.ones(64, device="cuda")
end, n = time.monotonic() + 7, 0
while time.monotonic() < end:
    for _ in range(100): x.add_(1)
    torch.cuda.synchronize(); n += 100
    with open({progress!r}, "a") as f: f.write(f"{{time.time_ns()}} {{n}}\\n")
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed() -> None:
    """A program that is killed: what is missing of its recording."""
    progress = SCRATCH / "progress"
    command = [sys.executable, "-m", "thence", "record", "-o", str(SCRATCH / "killed"), "--"]
    program = KILLED.format(progress=str(progress))
    done = subprocess.run([*command, sys.executable, "-c", program], check=False, capture_output=True, text=True)
    judge(
        done.returncode == 128 + 9, f"exit code {done.returncode} of a program that was killed: {done.stderr.strip()}"
    )
    lines = [line.split() for line in progress.read_text().splitlines()]
    trace = thence.open(str(SCRATCH / "killed"))
    adds = trace.tables.gpu.filter(trace.tables.gpu["name"].cast(str).str.contains("Add|add|elementwise"))
    last = (adds["start"] + adds["duration"]).max() + trace.meta.epoch_ns
    missing = (int(lines[-1][0]) - last) / 1e9
    judge(
        bool(adds.height) and missing < MAX_LOST_S,
        f"launched {lines[-1][1]}, recorded {adds.height}; the recording ends {missing:.2f} s before the program; "
        f"{trace.meta.warnings}",
    )


LAUNCHED = """
import os, sys, torch, thence
def child(n):
    with thence.mark("child"):
        for _ in range(n): torch.ones(64, device="cuda").add_(1)
if __name__ == "__main__":
    if os.fork() == 0:
        child(10); torch.cuda.synchronize(); sys.exit(0)
    os.wait()
    with thence.mark("parent"):
        child(20)
    torch.cuda.synchronize()
    sys.exit(7)
"""


def launcher() -> None:
    """A program that forks before it uses the GPU, and ends with a code of its own."""
    script = SCRATCH / "program.py"
    script.write_text(LAUNCHED)
    command = [sys.executable, "-m", "thence", "record", "-o", str(SCRATCH / "launched"), "--"]
    done = subprocess.run([*command, sys.executable, str(script)], check=False, capture_output=True, text=True)
    judge(done.returncode == 7, f"exit code {done.returncode} of a program that ends with 7: {done.stderr.strip()}")
    trace = thence.open(str(SCRATCH / "launched"))
    counts = dict(trace.report("label").rows.select("name", "count").iter_rows())
    # Twice as many in the parent as in the child that it forked, a fill and an addition each.
    judge(
        (counts.get("parent"), counts.get("child")) == (40, 20), f"activities by label {counts}; {trace.meta.warnings}"
    )


def main() -> None:
    """Run what is named, or everything."""
    everything = (agreement, labels, overhead, volume, killed, launcher)
    wanted = GIVEN.parts or [one.__name__ for one in everything]
    print(torch.cuda.get_device_name(), torch.__version__, "thence", thence.__version__)
    for one in everything:
        if one.__name__ in wanted:
            print(f"--- {one.__name__}")
            begin = time.perf_counter()
            try:
                one()
            except Exception as error:  # noqa: BLE001 - the other parts still say something
                import traceback

                traceback.print_exc()
                judge(False, f"{one.__name__} failed: {error}")
            print(f"    ({time.perf_counter() - begin:.1f} s)", flush=True)
    shutil.rmtree(SCRATCH, ignore_errors=True)
    end()


if __name__ == "__main__":
    main()
