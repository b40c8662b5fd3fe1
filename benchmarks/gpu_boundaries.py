"""Launches found by CUPTI's number of them: what that costs, and whether it is right, on a real GPU with PyTorch.

    python setup.py build_ext --inplace          # the compiled probe, where it is not installed
    python benchmarks/gpu_boundaries.py [floor] [truth] [callback] [--out DIR]
    python benchmarks/gpu_boundaries.py check DIR/truth.npz      # needs thence's reader; no GPU

floor      us that each way of recording adds to a launch of a tiny kernel: ways take turns in one process, each
           compared with the plain loop before and after it. Then memory, threads and bytes on disk.
truth      with the API calls recorded beside it, whether each activity lies after the same boundary of its
           thread by its number and by the time of its launch call: kernels, copies, sets, graphs, two threads at
           once, two devices where there are two.
callback   what a callback in C on every launch would add: by it threads that launch at once could be told apart.
check      the same recording through the reader: whether the threads that it calls certain are right.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["TEARDOWN_CUPTI"] = "1"  # torch.profiler gives CUPTI back when a profile ends

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCRATCH = Path(tempfile.mkdtemp(prefix="thence-boundaries-"))
LAUNCHES, EACH = 5_000, 10
BARE = {"modules": False, "lines": False}
"""Launches of one measurement, and how many of them lie between two boundaries."""
ROUNDS, LARGE_EVERY, SECONDS = 45, 3, 110
"""How often each way has its turn, the dear ones every third time; and when it ends at the latest."""
DEVICE_KINDS = (10, 1, 22, 2)
"""Kernels, copies, peer copies, sets."""
LAUNCHING = {
    2: ("cudaLaunchKernel", "cudaLaunchKernelExC"),
    1: ("cuLaunchKernel", "cuLaunchKernelEx"),
}


class Session:
    """CUPTI with kernels and a counter, its buffers thrown away or kept.

    Args:
        probe: ``c``, ``python`` or None for no counter.
        latency: whether kernels hold when they were queued.
        calls: whether launch calls are recorded, too.
        callbacks: whether every launch is called back for.
        keep: whether buffers are read; else a collector in C throws them away.
    """

    def __init__(
        self,
        probe: str | None = None,
        *,
        latency: bool = False,
        calls: bool = False,
        callbacks: bool = False,
        keep: bool = False,
    ) -> None:
        from thence.cuda import cupti, layouts
        from thence.recorder.buffers import Buffers
        from thence.recorder.counting import Counting

        os.environ["THENCE_PROBE"] = probe or "c"
        self.cupti, self.log = cupti.load(), None
        self.counting = Counting() if probe or callbacks else None
        self.handle = None
        self.buffers = Buffers(1 << 30) if keep else None
        if self.counting is not None:
            self.handle = self.cupti.subscribe(self.counting.callback)
        if self.buffers is not None:
            self.cupti.register(self.buffers.requested, self.buffers.completed)
        else:
            assert collector().collect(self.cupti.path.encode()) == 0
        self.cupti.buffers_are_zeroed()
        self.cupti.system_thread_ids()
        if self.counting is not None and probe:
            self.counting.begin(self.cupti, self.handle)
            assert self.counting.log is not None, self.counting.facts()
            self.log = self.counting.log
        if callbacks:
            self._call_back_for_launches()
        if latency:
            self.cupti.latency_timestamps(on=True)
        self.kinds = (*DEVICE_KINDS, *(layouts.CALLS if calls else ()))
        for kind in self.kinds:
            self.cupti.enable(kind)
            if kind in layouts.CALLS:
                self._record_launches(layouts.CALLS[kind])

    def _call_back_for_launches(self) -> None:
        for domain, names in LAUNCHING.items():
            for name in names:
                number = self.cupti.callback_id(domain, name)
                if number is not None:
                    self.cupti.enable_callback(self.handle, domain, number, on=True)

    def _record_launches(self, domain: int) -> None:
        from thence.cuda import cupti
        from thence.recorder.options import RecordOptions

        options = RecordOptions(launches=True)
        for number in range(1, cupti.MOST_CALLBACK_IDS):
            name = self.cupti.callback_name(domain, number)
            if name is None:
                break
            if not options.wants_call(name):
                self.cupti.api(domain, number, on=False)

    def end(self) -> None:
        import torch

        torch.cuda.synchronize()
        self.cupti.flush(unfinished=True)
        for kind in self.kinds:
            self.cupti.disable(kind)
        if self.handle is not None:
            self.cupti.unsubscribe(self.handle)
        self.cupti.finalize()

    def records(self) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
        """Rows by table, of a session that kept its buffers and has ended."""
        from thence.cuda import layouts
        from thence.recorder.walking import Walker

        assert self.buffers is not None
        walker, parts = Walker(self.cupti), {}
        while not self.buffers.filled.empty():
            filled = self.buffers.filled.get()
            for kind, columns in walker.read(filled.address, filled.valid_bytes):
                parts.setdefault(layouts.LAYOUTS[kind].table, []).append(columns)
        return {
            table: {name: np.concatenate([part[name] for part in pieces]) for name in pieces[0]}
            for table, pieces in parts.items()
        }


def collector() -> ctypes.CDLL:
    """The collector in C, compiled once."""
    library = SCRATCH / "cupti_collector.so"
    if not library.exists():
        source = str(Path(__file__).with_name("cupti_collector.c"))
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), source, "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


# What it costs.


def plain_loop(x: Any) -> float:
    import torch

    begin = time.perf_counter()
    for _ in range(LAUNCHES // EACH):
        for _ in range(EACH):
            x.add_(1)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / LAUNCHES * 1e6


def noted_loop(x: Any, note: Callable[[int], object]) -> float:
    import torch

    begin = time.perf_counter()
    for i in range(LAUNCHES // EACH):
        note(i)
        for _ in range(EACH):
            x.add_(1)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / LAUNCHES * 1e6


def marked_loop(x: Any) -> float:
    import torch

    import thence

    begin = time.perf_counter()
    for _ in range(LAUNCHES // EACH):
        with thence.mark("block"):
            for _ in range(EACH):
                x.add_(1)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / LAUNCHES * 1e6


def by_cupti(x: Any, **how: Any) -> float:
    session = Session(**how)
    log = session.log
    took = plain_loop(x) if log is None else noted_loop(x, log.note)
    session.end()
    return took


def by_thence(
    x: Any, loop: Callable[[Any], float], said: dict[str, str], probe: str, **options: Any
) -> float:
    import thence

    os.environ["THENCE_PROBE"] = probe
    began = memory_mb(), len(list(Path("/proc/self/task").iterdir()))
    with thence.record(SCRATCH / "floor", thence.RecordOptions(**options)) as recording:
        took = loop(x)
        during = memory_mb(), len(list(Path("/proc/self/task").iterdir()))
    size = sum(path.stat().st_size for path in recording.folder.rglob("*"))
    assert recording.counts["kernels"] >= LAUNCHES, recording.counts
    said[f"{loop.__name__} {probe} {options}"] = (
        f"{size / recording.counts['kernels']:.1f} bytes a kernel on disk, memory {during[0] - began[0]:+.1f} MB, "
        f"threads {during[1] - began[1]:+d}, dropped {recording.dropped}"
    )
    shutil.rmtree(recording.folder)
    return took


def by_torch(x: Any, *names: str) -> float:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[getattr(ProfilerActivity, name) for name in names]):
        return plain_loop(x)


def quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def memory_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def floor() -> None:
    import torch

    x = torch.ones(64, device="cuda")
    said: dict[str, str] = {}
    cheap: dict[str, Callable[[], float]] = {
        "CUPTI: kernels": lambda: by_cupti(x),
        "CUPTI: + queued times": lambda: by_cupti(x, latency=True),
        f"CUPTI: + probe in C every {EACH}": lambda: by_cupti(x, latency=True, probe="c"),
        f"CUPTI: + probe in Python every {EACH}": lambda: by_cupti(x, latency=True, probe="python"),
        "thence: without modules and lines": lambda: by_thence(x, plain_loop, said, "c", **BARE),
        f"thence: + a mark every {EACH}": lambda: by_thence(x, marked_loop, said, "c", **BARE),
    }
    dear: dict[str, Callable[[], float]] = {
        "thence: the same, probe in Python": lambda: by_thence(
            x, marked_loop, said, "python", **BARE
        ),
        "thence: --with launches, marks": lambda: by_thence(
            x, marked_loop, said, "c", launches=True, **BARE
        ),
        "thence: default, a line for each launch": lambda: by_thence(x, plain_loop, said, "c"),
        "torch.profiler CUDA": lambda: by_torch(x, "CUDA"),
        "torch.profiler CPU + CUDA": lambda: by_torch(x, "CPU", "CUDA"),
    }
    for way in (*cheap.values(), *dear.values()):
        way()
    added: dict[str, list[float]] = {name: [] for name in (*cheap, *dear)}
    plain, before, end = [], plain_loop(x), time.monotonic() + SECONDS
    for turn in range(ROUNDS):
        if time.monotonic() > end:
            break
        for name, way in (*cheap.items(), *(dear.items() if turn % LARGE_EVERY == 0 else ())):
            gc.collect()
            during, after = way(), plain_loop(x)
            added[name].append(during - (before + after) / 2)
            plain.append(after)
            before = after
    print(
        f"plain {statistics.median(plain):.3f} us a launch; added us a launch, median (quartiles):"
    )
    for name, found in added.items():
        low, middle, high = quartiles(found)
        print(f"{name:40} {middle:+.3f} ({low:+.3f} {high:+.3f}) n={len(found)}")
    above = [
        m - k
        for m, k in zip(
            added[f"thence: + a mark every {EACH}"], added["CUPTI: kernels"], strict=True
        )
    ]
    low, middle, high = quartiles(above)
    print(
        f"marks above CUPTI's kernel records alone, paired: {middle:+.3f} ({low:+.3f} {high:+.3f})"
    )
    for name, text in said.items():
        print(f"  {name}: {text}")


def callback() -> None:
    import torch

    x = torch.ones(64, device="cuda")
    ways: dict[str, Callable[[], float]] = {
        "kernels": lambda: by_cupti(x),
        "kernels + a callback in C for each launch": lambda: by_cupti(x, callbacks=True),
        "kernels + probe + such callbacks": lambda: by_cupti(x, callbacks=True, probe="c"),
        "kernels + launch calls recorded": lambda: by_cupti(x, calls=True),
    }
    for way in ways.values():
        way()
    added: dict[str, list[float]] = {name: [] for name in ways}
    before = plain_loop(x)
    for _ in range(20):
        for name, way in ways.items():
            gc.collect()
            during, after = way(), plain_loop(x)
            added[name].append(during - (before + after) / 2)
            before = after
    for name, found in added.items():
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"{name:45} {middle:+.3f} us a launch ({low:+.3f} {high:+.3f}) n={len(found)}")


# Whether it is right.


@contextmanager
def place(log: Any, number: list[int], flags: int = 0) -> Iterator[None]:
    """A boundary at either end, each with a place of its own."""
    number[0] += 1
    log.note(number[0], flags)
    yield
    number[0] += 1
    log.note(number[0])


def program(log: Any) -> None:
    """Kernels, copies, sets, graphs, on one device after the other; then two threads by turns, then at once."""
    import torch

    from thence.boundaries.log import BEGINS, ENDS

    number = [0]
    host = torch.ones(1 << 16, pin_memory=True)
    for device in range(min(2, torch.cuda.device_count())):
        with torch.cuda.device(device):
            x, y = torch.ones(64, device="cuda"), torch.ones(1 << 16, device="cuda")
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with place(log, number), torch.cuda.graph(graph):
                for _ in range(20):
                    y.add_(1)
                y.copy_(y.clone())
            for _ in range(200):
                with place(log, number):
                    x.add_(1), x.mul_(2)
                with place(log, number):
                    y.copy_(host, non_blocking=True), host.copy_(y, non_blocking=True)
                with place(log, number):
                    y.zero_(), y[:10].clone()
                with place(log, number):
                    graph.replay()
                with place(log, number):
                    float(x[0])
            if device:
                with place(log, number):
                    y.copy_(torch.ones(1 << 16, device="cuda:0"))

    def work(count: int, *, flagged: bool) -> None:
        x = torch.ones(64, device="cuda")
        with place(log, number, BEGINS if flagged else 0):
            for _ in range(count):
                with place(log, number):
                    x.add_(1)
        number[0] += 1
        log.note(number[0], ENDS)

    for turn in range(20):  # as a backward pass: one thread waits for the other
        number[0] += 1
        log.note(number[0], ENDS)
        thread = threading.Thread(target=work, args=(50,), kwargs={"flagged": True})
        thread.start(), thread.join()
        number[0] += 1
        log.note(number[0], BEGINS)
        del turn
    threads = [
        threading.Thread(target=work, args=(500,), kwargs={"flagged": False}) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()


def truth(out: Path) -> None:
    import torch

    torch.ones(1, device="cuda")
    for probe in ("c", "python"):
        session = Session(probe, latency=True, calls=True, keep=True)
        assert session.log is not None
        print(session.counting.facts() if session.counting else None)
        program(session.log)
        boundaries = session.log.take()
        session.end()
        tables = session.records()
        compared(boundaries, tables)
        arrays = {f"boundaries.{name}": column for name, column in boundaries.items()}
        for table, columns in tables.items():
            arrays |= {f"{table}.{name}": column for name, column in columns.items()}
        if probe == "c":
            np.savez(out / "truth.npz", **arrays)


def compared(boundaries: dict[str, Any], tables: dict[str, Any]) -> None:
    """Prints how many activities lie after one boundary by number and by time, by kind."""
    calls = tables["calls"]
    order = np.argsort(calls["correlation"], kind="stable")
    known, first = np.unique(calls["correlation"][order], return_index=True)
    call_of = order[first]
    for table in ("kernels", "copies", "sets"):
        rows = tables.get(table)
        if rows is None:
            continue
        at = np.minimum(np.searchsorted(known, rows["correlation"]), len(known) - 1)
        has_call = known[at] == rows["correlation"]
        thread, start = calls["thread"][call_of[at]], calls["start"][call_of[at]].astype(np.int64)
        by_number, by_time = np.full(len(at), -1), np.full(len(at), -1)
        for one in np.unique(boundaries["thread"]):
            own = boundaries["thread"] == one
            here = thread == one
            counter, time_ns, which = (boundaries[c][own] for c in ("counter", "time", "place"))
            which = np.append(which.astype(np.int64), -1)
            by_number[here] = which[np.searchsorted(counter, rows["correlation"][here]) - 1]
            by_time[here] = which[np.searchsorted(time_ns, start[here], "right") - 1]
        graphed = rows["graph"] != 0
        for what, chosen in (("eager", has_call & ~graphed), ("in graphs", has_call & graphed)):
            equal = int((by_number[chosen] == by_time[chosen]).sum())
            print(f"{table:8} {what:10} equal {equal:,} of {int(chosen.sum()):,}")
        print(f"{table:8} without a recorded call: {int((~has_call).sum()):,}; queued set: "
              f"{int((rows['queued'] > 0).sum()) if 'queued' in rows else 0:,}")  # fmt: skip


def check(path: Path) -> None:
    """What the reader calls certain, against the launch calls."""
    import polars as pl

    from thence.model.launches import COUNTED
    from thence.readers.recording.counted import boundaries_of, counted_launches

    arrays = np.load(path)

    def table(name: str, *columns: str) -> pl.DataFrame:
        return pl.DataFrame({c: arrays[f"{name}.{c}"].astype(np.int64) for c in columns})

    boundaries = boundaries_of(table("boundaries", "counter", "time", "thread", "place", "flags"))
    shared = ("correlation", "start", "graph")
    gpu = pl.concat(
        [table("kernels", *shared, "queued")]
        + [
            table(name, *shared).with_columns(queued=pl.lit(0, pl.Int64))
            for name in ("copies", "sets")
            if f"{name}.start" in arrays
        ],
        how="diagonal_relaxed",
    ).sort("start")
    gpu = gpu.with_columns(pl.when(pl.col("graph") != 0).then(pl.col("graph")).alias("graph"))
    found = counted_launches(gpu, gpu["queued"], pl.Series([], dtype=pl.Int64), boundaries)
    calls = table("calls", "correlation", "thread", "start").unique("correlation", keep="first")
    both = found.join(calls, on="correlation", suffix="_call")
    certain = both.filter(pl.col("name").cast(pl.String).is_in(COUNTED))
    right = certain.filter(pl.col("thread") == pl.col("thread_call")).height
    late = certain.filter(pl.col("latest") == pl.col("start"))
    away = (late["start"] - late["start_call"]).abs()
    print(
        f"{both.height:,} launches, {certain.height:,} certain, of these {right:,} of the right thread"
    )
    print(found["name"].value_counts(sort=True))
    print(
        f"queued is {away.median():.0f} ns from the call (90 %: {away.quantile(0.9):.0f}) in {late.height:,}"
    )


def main() -> None:
    wanted = sys.argv[1:]
    if wanted[:1] == ["check"]:
        check(Path(wanted[1]))
        return
    out = SCRATCH
    if "--out" in wanted:
        at = wanted.index("--out")
        out = Path(wanted[at + 1])
        del wanted[at : at + 2]
    import torch

    import thence

    print(torch.cuda.get_device_name(), torch.__version__, "thence", thence.__version__)
    parts: dict[str, Callable[[], None]] = {
        "floor": floor, "truth": lambda: truth(out), "callback": callback,
    }  # fmt: skip
    for name in wanted or parts:
        print(f"--- {name}", flush=True)
        begin = time.perf_counter()
        try:
            parts[name]()
        except Exception as error:  # noqa: BLE001 - the other parts still say something
            import traceback

            traceback.print_exc()
            print("FAILED", error)
        print(f"    ({time.perf_counter() - begin:.1f} s)", flush=True)
    shutil.rmtree(SCRATCH, ignore_errors=True)


if __name__ == "__main__":
    main()
