"""Launches found by CUPTI's number of them: what that costs, on a real GPU with PyTorch.

    python setup.py build_ext --inplace          # the compiled probe, where it is not installed
    python benchmarks/gpu_boundaries.py [floor] [callback]

floor      us that each way of recording adds to a launch of a tiny kernel: ways take turns in one process, each
           compared with the plain loop before and after it. Then memory, threads and bytes on disk.
callback   what a callback in C on every launch would add: by it threads that launch at once could be told apart.

``gpu_boundaries_truth.py`` shows whether it is right.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command_line import documented_parser

os.environ["TEARDOWN_CUPTI"] = "1"  # torch.profiler gives CUPTI back when a profile ends

from cupti_sessions import SCRATCH, Session

if TYPE_CHECKING:
    from collections.abc import Callable

LAUNCHES, EACH = 5_000, 10
"""Launches of one measurement, and how many of them lie between two boundaries."""
BARE = {"modules": False, "lines": False}
"""Options of a recording without modules and lines."""
ROUNDS, LARGE_EVERY, SECONDS = 45, 3, 110
"""How often each way has its turn, the costly ones every third time; and when it ends at the latest."""


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


def by_cupti(x: Any, loop: Callable[[Any], float] = plain_loop, **how: Any) -> float:
    session = Session(**how)
    log = session.log
    took = loop(x) if log is None else noted_loop(x, log.note)
    session.end()
    return took


def by_thence(x: Any, loop: Callable[[Any], float], said: dict[str, str], probe: str, **options: Any) -> float:
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
    frequent: dict[str, Callable[[], float]] = {
        "CUPTI: kernels": lambda: by_cupti(x),
        f"CUPTI: kernels, a mark every {EACH} that nobody records": lambda: by_cupti(x, marked_loop),
        "CUPTI: + queued times": lambda: by_cupti(x, latency=True),
        f"CUPTI: + probe in C every {EACH}": lambda: by_cupti(x, latency=True, probe="c"),
        f"CUPTI: + probe in Python every {EACH}": lambda: by_cupti(x, latency=True, probe="python"),
        "thence: without modules and lines": lambda: by_thence(x, plain_loop, said, "c", **BARE),
        f"thence: + a mark every {EACH}": lambda: by_thence(x, marked_loop, said, "c", **BARE),
    }
    costly: dict[str, Callable[[], float]] = {
        "thence: the same, probe in Python": lambda: by_thence(x, marked_loop, said, "python", **BARE),
        "thence: --with launches, marks": lambda: by_thence(x, marked_loop, said, "c", launches=True, **BARE),
        "thence: default, a line for each launch": lambda: by_thence(x, plain_loop, said, "c"),
        "torch.profiler CUDA": lambda: by_torch(x, "CUDA"),
        "torch.profiler CPU + CUDA": lambda: by_torch(x, "CPU", "CUDA"),
    }
    for way in (*frequent.values(), *costly.values()):
        way()
    added: dict[str, list[float]] = {name: [] for name in (*frequent, *costly)}
    plain, before, end = [], plain_loop(x), time.monotonic() + SECONDS
    for turn in range(ROUNDS):
        if time.monotonic() > end:
            break
        for name, way in (*frequent.items(), *(costly.items() if turn % LARGE_EVERY == 0 else ())):
            gc.collect()
            during, after = way(), plain_loop(x)
            added[name].append(during - (before + after) / 2)
            plain.append(after)
            before = after
    print(f"plain {statistics.median(plain):.3f} us a launch; added us a launch, median (quartiles):")
    for name, found in added.items():
        low, middle, high = quartiles(found)
        print(f"{name:52} {middle:+.3f} ({low:+.3f} {high:+.3f}) n={len(found)}")
    marks = added[f"thence: + a mark every {EACH}"]
    for name in ("CUPTI: kernels", f"CUPTI: kernels, a mark every {EACH} that nobody records"):
        low, middle, high = quartiles([m - k for m, k in zip(marks, added[name], strict=True)])
        print(f"recorded marks above '{name}', paired: {middle:+.3f} ({low:+.3f} {high:+.3f})")
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


def main() -> None:
    parts: dict[str, Callable[[], None]] = {"floor": floor, "callback": callback}
    parser = documented_parser(__doc__)
    parser.add_argument("part", nargs="*", default=list(parts), help=f"of {', '.join(parts)}")
    wanted = parser.parse_args().part
    if unknown := set(wanted) - set(parts):
        parser.error(f"no such part: {', '.join(unknown)}")
    import torch

    import thence

    print(torch.cuda.get_device_name(), torch.__version__, "thence", thence.__version__)
    for name in wanted:
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
