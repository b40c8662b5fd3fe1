"""Planted causes of idle time on a GPU: is each named, with its time and its line?

Every scenario makes the device wait in one known way, ten steps long, under torch.profiler with stacks; the program
itself measures how long the planted part took. Recording and checking are apart, because the recording
machine needs torch alone::

    python tests/gpu/idle.py record FOLDER      # on a GPU, about one minute
    python tests/gpu/idle.py check FOLDER       # anywhere, with thence

``check`` prints, for each scenario, the planted time, the idle time that thence gives the expected cause on the line
of the planted code, the difference, and the share of all idle time that is unknown. For calls that wait (item,
synchronize) it is the idle time that stands behind that call in the table of waits.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import documented_parser, end, judge

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[int], int]

STEPS = 10
PLANTED_US = 2000
# The cause, and the functions of whose lines it is: `busy` is what keeps the host in three of them, and `timed` calls
# what they plant, which may be no Python. Profilers record no call for the lock of a `with` statement: waiting for it
# is time of the Python function around it.
EXPECTED = {
    "loader": ("loader", "__getitem__|busy"),
    "item": ("wait", "planted_item"),
    "synchronize": ("wait", "planted_synchronize"),
    "empty_cache": ("allocation", "timed"),
    "first_use": ("first_use", "planted_first_use|lambda"),
    "gc": ("gc", "planted_gc|timed"),
    "lock": ("python", "acquire"),
    "logging": ("python", "planted_logging|busy|lambda"),
    "event_wait": ("event_wait", "planted_event_wait"),
}
"""Scenario: expected cause, and the function that its line is in."""
MAX_ERROR, MAX_ERROR_NS = 0.1, 1_000_000
"""How far idle time may be from what was planted: a share of it, or ns (a profiler adds some to each of ten steps)."""


def busy(us: float) -> None:
    """Keeps the thread busy."""
    until = time.perf_counter_ns() + int(us * 1000)
    while time.perf_counter_ns() < until:
        pass


def timed(work: Callable[[], object]) -> int:
    """Does it; returns the ns that it took."""
    begin = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - begin


def scenarios() -> dict[str, Step]:
    """Functions that do one step; each returns the planted ns."""
    import torch

    x = torch.randn(512, 512, device="cuda")
    return {
        "loader": loader(), **waits(x), "empty_cache": empty_cache(), "first_use": first_use(x),
        "gc": garbage_collection(), "lock": lock(), "logging": slow_logging(), "event_wait": event_wait(x),
    }  # fmt: skip


def loader() -> Step:
    """A data set that takes long for each item."""
    import torch

    class Slow(torch.utils.data.Dataset[Any]):
        planted = 0

        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> Any:
            begin = time.perf_counter_ns()
            busy(PLANTED_US)
            self.planted += time.perf_counter_ns() - begin
            return torch.zeros(1)

    data = Slow()
    batches = iter(torch.utils.data.DataLoader(data, batch_size=1))

    def planted_loader(_step: int) -> int:
        before = data.planted
        next(batches)
        return data.planted - before

    return planted_loader


def waits(x: Any) -> dict[str, Step]:
    """Calls that wait, and work of the host behind them."""
    import torch

    def planted_item(_step: int) -> int:
        (x @ x)[0, 0].item()
        return timed(lambda: busy(PLANTED_US))

    def planted_synchronize(_step: int) -> int:
        _ = x @ x
        torch.cuda.synchronize()
        return timed(lambda: busy(PLANTED_US))

    return {"item": planted_item, "synchronize": planted_synchronize}


def empty_cache() -> Step:
    """Memory that is given back to the driver."""
    import torch

    def planted_empty_cache(_step: int) -> int:
        blocks = [torch.empty(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(24)]
        torch.cuda.synchronize()
        del blocks
        return timed(torch.cuda.empty_cache)

    return planted_empty_cache


def first_use(x: Any) -> Step:
    """An operator whose kernels were never used before, every step another one."""
    import torch

    fresh = iter([
        torch.erfinv, torch.lgamma, torch.digamma, torch.special.i0e, torch.special.i1, torch.special.ndtri,
        torch.special.log_ndtr, torch.special.bessel_j0, torch.special.bessel_y1, torch.special.erfcx,
    ])  # fmt: skip

    def planted_first_use(_step: int) -> int:
        function: Any = next(fresh)
        return timed(lambda: function(x))

    return planted_first_use


def garbage_collection() -> Step:
    """A collection of garbage."""
    garbage: list[Any] = []
    for _ in range(40_000):
        pair: list[Any] = [[], []]
        pair[0].append(pair)
        garbage.append(pair)

    def planted_gc(_step: int) -> int:
        assert garbage  # it has to be looked at
        return timed(gc.collect)

    return planted_gc


def lock() -> Step:
    """A lock that another thread holds."""
    held_by_one = threading.Lock()

    def hold(held: threading.Event) -> None:
        with held_by_one:
            held.set()
            time.sleep(PLANTED_US / 1e6)

    def planted_lock(_step: int) -> int:
        held = threading.Event()
        other = threading.Thread(target=hold, args=(held,))
        other.start()
        held.wait()

        def acquire() -> None:
            with held_by_one:
                pass

        took = timed(acquire)
        other.join()
        return took

    return planted_lock


def slow_logging() -> Step:
    """A handler of messages that takes long."""

    class Handler(logging.Handler):
        def emit(self, _record: logging.LogRecord) -> None:
            busy(PLANTED_US)

    log = logging.getLogger("planted")
    log.addHandler(Handler())
    log.propagate = False

    def planted_logging(_step: int) -> int:
        return timed(lambda: log.warning("slow"))

    return planted_logging


def event_wait(x: Any) -> Step:
    """A stream that sleeps, and another that waits for it through an event."""
    import torch

    side = torch.cuda.Stream()
    runtime = ctypes.CDLL(next(iter(_mapped("libcudart"))))
    sleeper = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)

    def planted_event_wait(_step: int) -> int:
        event = torch.cuda.Event()
        with torch.cuda.stream(side):
            _ = x + 1
        runtime.cudaLaunchHostFunc(ctypes.c_void_p(side.cuda_stream), sleeper, ctypes.c_void_p(PLANTED_US))
        event.record(side)
        torch.cuda.current_stream().wait_event(event)
        _ = x + 2
        torch.cuda.synchronize()
        return PLANTED_US * 1000

    return planted_event_wait


def _mapped(name: str) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line[line.index("/") :] for line in lines if name in line and "/" in line})


def record(folder: Path) -> None:
    """Runs all scenarios and writes a trace of each, and what was planted."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    folder.mkdir(parents=True, exist_ok=True)
    x = torch.randn(512, 512, device="cuda")
    planted: dict[str, int] = {}
    for name, step in scenarios().items():
        if name != "first_use":
            step(0)
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        config = torch._C._profiler._ExperimentalConfig
        settings = config(enable_cuda_sync_events=True)
        total = 0
        with profile(activities=activities, with_stack=True, experimental_config=settings) as profiler:
            for number in range(STEPS):
                with record_function(f"ProfilerStep#{number}"):
                    _ = x @ x
                    torch.cuda.synchronize()
                    total += step(number)
                    _ = x @ x
            torch.cuda.synchronize()
        planted[name] = total
        profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
        print(f"{name:12} planted {total / 1e6:8.3f} ms", flush=True)
    (folder / "planted.json").write_text(json.dumps(planted))


def check(folder: Path) -> None:
    """Compares what was planted with what thence says."""
    import polars as pl

    import thence

    planted = json.loads((folder / "planted.json").read_text())
    print(f"{'scenario':12} {'planted':>10} {'found':>10} {'error':>8} {'unknown':>8}  cause and line")
    for name, ns in planted.items():
        cause, function = EXPECTED[name]
        found = thence.open(folder / f"{name}.json.gz", own=(__file__,)).idle("source")
        if cause == "wait":
            rows = found.waits.filter(pl.col("place").str.contains(function))
        else:
            rows = found.rows.filter(pl.col("cause") == cause, pl.col("name").str.contains(function))
        total = int(rows["total_ns"].sum())
        unknown = int(found.causes.filter(pl.col("cause") == "unknown")["total_ns"].sum())
        line = (rows["place" if cause == "wait" else "name"].to_list() or ["not found"])[0]
        judge(
            abs(total - ns) < max(MAX_ERROR * ns, MAX_ERROR_NS),
            f"{name:12} {ns / 1e6:7.3f} ms {total / 1e6:7.3f} ms {100 * (total - ns) / ns:+7.1f} % "
            f"{100 * unknown / max(found.idle_ns, 1):6.1f} %  {cause} {line}",
        )
        for row in found.causes.head(4).iter_rows(named=True):
            print(f"{'':14}{row['cause']:11} {row['total_ns'] / 1e6:8.3f} ms {100 * row['share']:5.1f} %")
    end()


if __name__ == "__main__":
    parser = documented_parser(__doc__)
    parser.add_argument("what", choices=("record", "check"))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    {"record": record, "check": check}[given.what](given.folder)
