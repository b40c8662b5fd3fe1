"""Whether hardware counters beside a recording are right, what they cost, and that nothing hangs or breaks.

    python benchmarks/gpu_counters.py OUT [PART ...]     # on a GPU with torch, as a user who may profile

Parts, each in a process of its own:

    sizes     memory and CPU time of a sample, by set of counters; which counters this chip lacks
    truth     products of bfloat16 and additions of known size, in blocks of one kind and mixed (in a CUDA graph,
              launched one by one, on two streams): tensor cores' FLOP and bytes read beside the known ones, by block
    cost      a CUDA graph that is limited by the GPU, and a loop of launches that is limited by the host, within one
              recording with windows of counters: time of blocks in windows, and while windows are opened and decoded,
              beside that of blocks between them, with 95 % intervals; CPU time of the thread that launches
    last      the cost of sampling all the time (``--counters-last``), each ms. Of a CUDA graph that is limited by the
              GPU: sampling begins and ends within one recording, while the program goes on; four blocks with, without,
              without, with, or the other way round, so that a host that slowly gets faster counts nothing. A part is
              decoded in each block with. Of a decode that is limited by the host: steps beside the decoding of a part,
              and those just before and after, which are of the same speed of the host
    last_jax, last_queued
              the same blocks of a training step of JAX, which is waited for each time, and of steps of narrow layers,
              of which ten are waited for at once, so that the GPU has always something to do
    decoding  CPU time to decode a sample, and the longest time in which another thread of Python did not run; what
              a sample of clock, power and energy takes
    starts    30 recordings of a window each: memory before and after
    ends      processes that fork, exit or are killed in a window; whether the next one can sample
    beside    torch.profiler during a recording with counters, and another process that samples the same device
    programs  recordings of a training step of transformers' Llama (train), of the same captured in a CUDA graph
              (graph), of a decode in CUDA graphs (decode) and of a training step of JAX (jax), for analyses; of loops
              in command buffers of JAX (loops), and of windows of steps with CUPTI detached between them (always)

A last line of each part says what was found; folders of recordings are in OUT. ``pool:last_jax`` in place of a part
takes together the blocks that several runs have left in folders of OUT.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import thence
from captured_step import captured, jax_training
from command_line import run_parts
from gpu_always import interval, trimmed_mean
from gpu_paused import program
from thence.capture.cuda import cupti
from thence.capture.cuda.nvml import ClockSamples
from thence.capture.cuda.pm_sampling import PmSampler, Room
from thence.capture.recorder.counter_windows import CounterWindows
from thence.model.column_file import decode as decode_part
from thence.model.counter_names import COUNTERS, DEFAULT, ENERGY

if TYPE_CHECKING:
    from collections.abc import Callable

SIDES = (1024, 1408, 1920, 2688, 3456)
FLOATS = (1_900_000, 3_800_000, 7_600_000, 19_000_000, 38_000_000)
FLOP_A_CYCLE = 1024
"""FLOP of a tensor core's cycle, dense bfloat16, where cycles are summed over sub-partitions (GH100)."""
WINDOW, EVERY = 0.04, 0.4
BLOCK, SETTLE = 0.5, 0.15
"""Seconds of a block, after which samples are decoded, too, and that a program goes on before a block after sampling
began or ended: so a part is decoded in each block, and has ended long before the block does."""
TIMEOUT_S = 240


def options(window: float = WINDOW, every: float = EVERY, **more: Any) -> thence.RecordOptions:
    """A recording with short windows that come often."""
    counters = thence.Counters(window_seconds=window, every_seconds=every)
    return thence.RecordOptions(counters=counters, baseline=False, **more)


def table(folder: Path, name: str) -> dict[str, Any]:
    """All rows of a table of the one process that was recorded, without Polars; parts that lack columns are not."""
    parts = [decode_part(path.read_bytes()) for path in sorted(folder.glob(f"*/{name}-*.npz"))]
    most = max((set(part) for part in parts), key=len, default=set())
    parts = [part for part in parts if set(part) == most]
    return {column: np.concatenate([np.asarray(part[column]) for part in parts]) for column in most}


def counters_of(folder: Path) -> dict[str, Any]:
    """The entry ``counters`` of the description."""
    (path,) = folder.glob("*/recording.json")
    document = json.loads(path.read_text())
    print("warnings", document["warnings"], "counts", document["counts"])
    parts = [decode_part(part.read_bytes()) for part in path.parent.glob("counters-*.npz")]
    energy = [part for part in parts if ENERGY in part]
    joules = sum(float(np.sum(part[ENERGY])) for part in energy)
    seconds = sum(float(np.sum(part["end"] - part["start"])) for part in energy) / 1e9
    watts = [sample / 1e3 for clocks in document["clocks"] for sample in clocks["milliwatts"] if sample]
    if seconds and watts:
        mean = statistics.mean(watts)
        print(f"{joules:.1f} J in {seconds:.2f} s: {joules / seconds:.0f} W; mean of the samples of power {mean:.0f} W")
    return dict(document["counters"])


class Kinds:
    """Ten kinds of kernels of known work."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.source = torch.randn(1 << 30, device="cuda")
        self.target = torch.empty_like(self.source)
        self.at = 0
        self.run = [self._product(side) for side in SIDES] + [self._addition(count) for count in FLOATS]
        self.flop = [2 * side**3 for side in SIDES] + [0] * len(FLOATS)
        self.bytes = [0] * len(SIDES) + [4 * count for count in FLOATS]
        for run in self.run:
            run()
        torch.cuda.synchronize()

    def _product(self, side: int) -> Callable[[], Any]:
        torch = self.torch
        a, b, c = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        return lambda: torch.mm(a, b, out=c)

    def _addition(self, count: int) -> Callable[[], None]:
        def run() -> None:
            self.at = 0 if self.at + count > self.source.numel() else self.at
            first, self.at = self.at, self.at + count
            self.torch.add(self.source[first : first + count], 1.0, out=self.target[first : first + count])

        return run


def for_seconds(seconds: float, run: Callable[[], Any]) -> None:
    """Runs for so long; the queue of launches stays short."""
    import torch

    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(20):
            run()
        torch.cuda.synchronize()


def sizes(_out: Path) -> None:
    """See above."""
    kinds = Kinds()
    known = {counter.name: counter.metric for counter in COUNTERS if counter.metric}
    few = [name for name in known if name in ("gr_active_cycles", "sm_active_cycles", "sm_elapsed_cycles")]
    sets = {"three": few, **{f"three and {name}": [*few, name] for name in known if name not in few}}
    sets |= {"default": list(DEFAULT), "all": list(known)}
    for name, wanted in sets.items():
        room = 0
        for room in (4000, 6000, 8000, 10_000, 12_000, 14_000, 17_000, 20_000, 24_000, 30_000, 40_000):
            metrics = {one: known[one] for one in wanted}
            sampler = PmSampler(cupti.load(), 0, metrics, 10_000, Room(1500, room, 1 << 30))
            sampler.start()
            began = time.perf_counter()
            while time.perf_counter() - began < 0.01:
                kinds.run[0]()
            kinds.torch.cuda.synchronize()
            sampler.stop()
            spent = time.thread_time()
            samples = sampler.take()
            spent = time.thread_time() - spent
            sampler.close()
            if not samples.overflow:
                break
        print(
            f"{name}: {sampler.image_bytes / 1500:.0f} B decoded; {len(samples.start)} samples fit at {room} B "
            f"each; {1e6 * spent / max(1, len(samples.start)):.0f} us of CPU each; left out {sampler.left_out}",
            flush=True,
        )


def truth(out: Path) -> None:
    """See above."""
    kinds = Kinds()
    torch = kinds.torch
    order = [kind for kind in range(10) for _ in range(30)]
    random.Random(1).shuffle(order)
    (out / "truth.json").write_text(json.dumps({"sides": SIDES, "floats": FLOATS, "order": order}))
    blocks = []
    with thence.record(out / "blocks", options()):
        for number, run in enumerate(kinds.run):
            began = time.time_ns()
            for_seconds(EVERY + 0.25, run)
            blocks.append((number, began, time.time_ns()))
    about, counters = counters_of(out / "blocks"), table(out / "blocks", "counters")
    kernels = table(out / "blocks", "kernels")
    print("metrics", about["metrics"], "left out", about["left_out"], "trouble", about["trouble"])
    for window in about["windows"]:
        _compare(kinds, blocks, window, counters, kernels)
    with thence.record(out / "mix", options()) as recording:
        graph = captured(torch, lambda: [kinds.run[kind]() for kind in order])
        for_seconds(1.0, graph.replay)
        recording.step()
        for_seconds(0.6, lambda: [kinds.run[kind]() for kind in order[:60]])
        recording.step()
        streams = [torch.cuda.Stream() for _ in range(2)]

        def both() -> None:
            for at, kind in enumerate(order[:60]):
                with torch.cuda.stream(streams[at % 2]):
                    kinds.run[kind]()

        for_seconds(0.6, both)
    print("mix", [(window["samples"], window["overflow"]) for window in counters_of(out / "mix")["windows"]])


def _compare(kinds: Kinds, blocks: Any, window: Any, counters: Any, kernels: Any) -> None:
    """Prints what a window that lies in one block counted, over what its kernels do; kernels at its ends in part."""
    inside = [block for block in blocks if block[1] <= window["start"] and window["end"] <= block[2]]
    if not inside or not window["samples"]:
        return
    ((number, _, _),) = inside
    lasted = kernels["end"] - kernels["start"]
    overlap = np.minimum(kernels["end"], window["end"]) - np.maximum(kernels["start"], window["start"])
    count = float((np.clip(overlap, 0, None) / lasted).sum())
    rows = (counters["start"] >= window["start"]) & (counters["end"] <= window["end"])
    gaps = int((np.diff(counters["start"][rows]) > 15_000).sum())
    kind = f"product {SIDES[number]}" if kinds.flop[number] else f"addition of {kinds.bytes[number] / 1e6:.1f} MB"
    flop = counters["tensor_cycles"][rows].sum() * FLOP_A_CYCLE / count
    read, written = (counters[f"dram_{way}_bytes"][rows].sum() / count for way in ("read", "write"))
    known = kinds.flop[number] or kinds.bytes[number]
    print(
        f"{kind}: {count:.1f} kernels of {lasted[overlap > 0].mean() / 1e3:.1f} us, {window['samples']} samples, "
        f"{gaps} gaps; measured over known {(flop if kinds.flop[number] else read) / known:.4f}; "
        f"read {read / 1e6:.3f} MB, written {written / 1e6:.3f} MB"
    )


class Log:
    """Times of windows, from the recorder's thread; ns of `time.perf_counter_ns`."""

    def __init__(self) -> None:
        self.begins: list[tuple[int, int]] = []
        self.stops: list[tuple[int, int]] = []
        self.finishes: list[tuple[int, int]] = []
        self.takes: list[tuple[int, int]] = []
        self._wrap(CounterWindows, "_begin", self.begins)
        self._wrap(PmSampler, "stop", self.stops)
        self._wrap(PmSampler, "take", self.takes)
        self._wrap(CounterWindows, "finish", self.finishes)

    def clear(self) -> None:
        """Forgets them."""
        for times in (self.begins, self.stops, self.finishes, self.takes):
            times.clear()

    def _wrap(self, owner: Any, name: str, times: list[tuple[int, int]]) -> None:
        original = getattr(owner, name)

        def noted(of: Any, *arguments: Any) -> Any:
            began = time.perf_counter_ns()
            result = original(of, *arguments)
            if name != "finish" or len(self.finishes) < len(self.stops):  # it is called where there is no window, too
                times.append((began, time.perf_counter_ns()))
            return result

        setattr(owner, name, noted)

    def state(self, began: int, ended: int) -> tuple[int, str] | None:
        """The window and what went on during a block; None: several things."""
        windows = zip(self.begins, self.stops, self.finishes, [*self.begins[1:], (0, 0)], strict=False)
        for number, (begin, stop, finish, after) in enumerate(windows):
            spans = {
                "opening": begin,
                "sampling": (begin[1], stop[0]),
                "decoding": (stop[1], finish[1]),
                "plain": (finish[1] + 20_000_000, after[0]),
            }
            for name, (first, last) in spans.items():
                if first <= began and ended <= last:
                    return number, name
        return None


def cost(out: Path, seconds: float = 15.0) -> None:
    """See above."""
    kinds, log = Kinds(), Log()
    torch = kinds.torch
    graph = captured(torch, lambda: [kinds.run[kind % 10]() for kind in range(20)])
    ones = torch.ones(1024, device="cuda")

    def launches() -> None:
        for _ in range(1000):
            ones.add_(1.0)

    for name, run, count in (("graph", graph.replay, 20), ("launches", launches, 1)):
        log.clear()
        blocks = []
        with thence.record(out / f"cost_{name}", options(every=1.0)):
            began = time.perf_counter()
            while time.perf_counter() - began < seconds:
                cpu, start = time.thread_time_ns(), time.perf_counter_ns()
                for _ in range(count):
                    run()
                torch.cuda.synchronize()
                blocks.append((start, time.perf_counter_ns(), time.thread_time_ns() - cpu))
        _differences(name, log, blocks)


def _differences(name: str, log: Log, blocks: list[tuple[int, int, int]]) -> None:
    """Prints by how much blocks of each state take longer than those before the next window."""
    cycles: dict[int, dict[str, list[tuple[int, int]]]] = {}
    for start, end, cpu in blocks:
        known = log.state(start, end)
        if known is not None:
            cycles.setdefault(known[0], {}).setdefault(known[1], []).append((end - start, cpu))
    late = [stop[0] - begin[1] for begin, stop in zip(log.begins, log.stops, strict=False)]
    print(f"{name}: windows of {min(late) / 1e6:.1f} to {max(late) / 1e6:.1f} ms instead of {1e3 * WINDOW:g}")
    plain = [median for cycle in cycles.values() for median, _ in cycle.get("plain", [])]
    print(f"{name}: {len(blocks)} blocks, plain {statistics.median(plain) / 1e6:.3f} ms")
    for state in ("opening", "sampling", "decoding"):
        for at, what in enumerate(("wall", "CPU of the launching thread")):
            pairs = [
                statistics.mean(block[at] for block in cycle[state])
                / statistics.mean(block[at] for block in cycle["plain"])
                - 1
                for cycle in cycles.values()
                if state in cycle and "plain" in cycle
            ]
            if len(pairs) > 1:
                half = 1.96 * statistics.stdev(pairs) / math.sqrt(len(pairs))
                print(f"  {state}, {what}: {statistics.mean(pairs):+.2%} +- {half:.2%} (n = {len(pairs)})")


class Last(thence.Counters):
    """The last seconds, of which a part is as long as a block."""

    @property
    def part_seconds(self) -> float:
        """See above."""
        return BLOCK


class Lasting:
    """Begins and ends the sampling of the last seconds within one recording.

    Attributes:
        samples: how many were kept.
    """

    def __init__(self, recording: thence.Recording) -> None:
        self._recorder = recording._recorder  # noqa: SLF001
        self._windows = self._recorder._counters  # noqa: SLF001

    @property
    def samples(self) -> int:
        """See above."""
        return sum(window["samples"] for window in self._windows._windows)  # noqa: SLF001

    def turn(self, step: Callable[[], None], *, on: bool) -> None:
        """Samples, or does not; the program goes on meanwhile, so that the GPU gets neither cold nor fast.

        Raises:
            RuntimeError: sampling did not begin.
        """
        if on == bool(self._windows._samplers):  # noqa: SLF001
            return
        turning = threading.Thread(target=self._turn, kwargs={"on": on})
        turning.start()
        while turning.is_alive():
            step()
        if on != bool(self._windows._samplers):  # noqa: SLF001
            raise RuntimeError(f"sampling did not {'begin' if on else 'end'}: {self._windows.facts()}")
        began = time.perf_counter()
        while time.perf_counter() - began < SETTLE:
            step()

    def _turn(self, *, on: bool) -> None:
        windows, recorder = self._windows, self._recorder
        windows._next = 0.0 if on else math.inf  # noqa: SLF001
        if not on:
            windows.hurry()
        recorder._by_thread(recorder._look_at_counters if on else windows.finish, 20)  # noqa: SLF001


def last(out: Path) -> None:
    """See above."""
    kinds = Kinds()
    torch = kinds.torch
    order = [0, *range(len(SIDES), len(SIDES) + len(FLOATS))] * 80  # below the power limit, so that the clock is steady
    graph = captured(torch, lambda: [kinds.run[kind]() for kind in order])

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    _sampled(out / "last_graph", lambda: replay, 75)
    _sampled(out / "last_decode", lambda: program("decode"), 45, blocks=False)


def last_jax(out: Path) -> None:
    """See above."""
    _sampled(out / "last_jax", lambda: jax_training(8192), 90)


def last_queued(out: Path) -> None:
    """See above."""
    # Narrow layers move more bytes for a FLOP: at the power limit the clock would vary.
    _sampled(out / "last_queued", lambda: jax_training(131_072, steps=10, width=128), 35)


def pool(out: Path, name: str) -> None:
    """Prints what the blocks of several runs show together, and each alone."""
    runs = [json.loads(path.read_text()) for path in sorted(out.glob(f"**/{name}.json"))]
    for run in runs:
        _print_blocks(name, run)
    _print_blocks(f"{name}, {len(runs)} runs", [block for run in runs for block in run])


def _sampled(folder: Path, prepare: Callable[[], Callable[[], None]], seconds: float, *, blocks: bool = True) -> None:
    """Samples all the time beside a program, and prints what that costs: in blocks, or beside decoding."""
    counters = (Last if blocks else thence.Counters)(interval_us=1000.0, last_seconds=5.0)
    log, written = Log(), folder.with_suffix(".json")
    with thence.record(folder, thence.RecordOptions(counters=counters, baseline=False)) as recording:
        step = prepare()
        lasting = Lasting(recording)
        _for(step, 1.0)
        if blocks:
            measured = _blocks(lasting, step, seconds, log)
            written.write_text(json.dumps(measured))
            _print_blocks(folder.name, measured)
        else:
            lasting.turn(step, on=True)
            log.clear()
            steps = _for(step, seconds)
            written.write_text(json.dumps({"steps": steps, "takes": log.takes}))
            _print_beside(folder.name, steps, log.takes, counters.part_seconds)
        lasting.turn(step, on=False)
    print(f"  {lasting.samples} samples kept, trouble {counters_of(folder)['trouble']}", flush=True)


def _for(step: Callable[[], None], seconds: float) -> list[tuple[int, int]]:
    """Begin and end of each step, ns."""
    times = [(0, time.perf_counter_ns())]
    while times[-1][1] < times[0][1] + 1e9 * seconds:
        step()
        times.append((times[-1][1], time.perf_counter_ns()))
    return times[1:]


def _blocks(lasting: Lasting, step: Callable[[], None], seconds: float, log: Log) -> list[dict[str, Any]]:
    """Blocks with and without, always four in one of the two orders that a steady drift does not change.

    Of each: wall and CPU time of the launching thread and of all, in seconds a step; ns of each step; seconds of
    decoding.
    """
    clocks = time.perf_counter, time.thread_time, time.process_time
    blocks: list[dict[str, Any]] = []
    order, end = random.Random(0), time.perf_counter() + seconds
    while time.perf_counter() < end:
        first = order.random() < 0.5
        for on in (first, not first, not first, first):
            lasting.turn(step, on=on)
            log.clear()
            before = [clock() for clock in clocks]
            steps = [last - begin for begin, last in _for(step, BLOCK)]
            spent = [(clock() - began) / len(steps) for clock, began in zip(clocks, before, strict=True)]
            decoded = sum(last - begin for begin, last in log.takes) / 1e9
            block = {"on": on, "wall": spent[0], "own": spent[1], "all": spent[2], "steps": steps, "decoded": decoded}
            blocks.append(block)
    return blocks


def _print_beside(name: str, steps: list[tuple[int, int]], takes: list[tuple[int, int]], part: float) -> None:
    """Prints by how much steps while a part is decoded are longer than those just before and after."""
    begin, end = np.array(steps).T
    busy = np.zeros(len(begin), dtype=bool)
    for first, last_ in takes:
        busy |= (begin < last_) & (end > first)
    losses, lasted = [], []
    for first, last_ in takes:
        during = (begin < last_) & (end > first)
        near = ~busy & (end > first - 0.3e9) & (begin < last_ + 0.3e9)
        if during.any() and near.sum() >= 4:
            usual = float((end - begin)[near].mean())
            losses.append(100 * float((end - begin)[during].sum() - usual * during.sum()) / (1e9 * part))
            lasted.append((last_ - first) / 1e6)
    print(
        f"{name}: {len(steps)} steps of {statistics.median(end - begin) / 1e6:.3f} ms, {len(losses)} parts are decoded"
    )
    middle, half = trimmed_mean(losses)
    print(f"  in {statistics.median(lasted):.1f} ms each, which costs {interval(losses)} % of the time")
    print(f"  without the tenth at each end {middle:+.3f} +- {half:.3f} %")


def _print_blocks(name: str, blocks: list[dict[str, Any]]) -> None:
    """Prints by how much blocks with are longer than the others, with each four as one value."""
    fours = list(zip(*(blocks[at::4] for at in range(4)), strict=True))
    usual = statistics.median(block["wall"] for block in blocks if not block["on"])
    decoded = sorted(1e3 * block["decoded"] for block in blocks if block["on"])
    print(f"{name}: {len(fours)} fours of blocks, {1e3 * usual:.3f} ms a step without")
    middle = statistics.median(decoded)
    print(f"  {decoded[0]:.1f} to {decoded[-1]:.1f} ms, median {middle:.1f}, of decoding in each with")
    for what, title in (("wall", "wall"), ("own", "CPU of the launching thread")):
        losses = [50 * sum(math.log(block[what]) * (1 if block["on"] else -1) for block in four) for four in fours]
        middle, half = trimmed_mean(losses)
        print(f"  {title}: {interval(losses)} %; without the tenth at each end {middle:+.3f} +- {half:.3f} %")
    shares = [
        sum((block["all"] - block["own"]) / block["wall"] * (0.5 if block["on"] else -0.5) for block in four)
        for four in fours
    ]
    print(f"  CPU of other threads: {interval(shares)} s a second")


def decoding(out: Path) -> None:
    """See above."""
    kinds, log, gaps, done = Kinds(), Log(), [], threading.Event()

    def tick() -> None:
        last = time.perf_counter_ns()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter_ns()
            gaps.append((last, now))
            last = now

    thread = threading.Thread(target=tick)
    for probe in ("c", "python"):
        with thence.record(out / f"decoding_{probe}", options()) as recording:
            recorder = recording._recorder  # noqa: SLF001
            if probe == "python":  # without the compiled probe's loop over samples
                recorder._look_at_counters = lambda r=recorder: r._counters.look(r._cupti, None, recording=True)  # noqa: SLF001
            for_seconds(0.3, kinds.run[0])
            if not thread.ident:
                thread.start()
            for_seconds(1.0, kinds.run[0])
        sizes = [window["samples"] for window in counters_of(out / f"decoding_{probe}")["windows"]]
        ends = [(stop[1], finish[1]) for stop, finish in zip(log.stops, log.finishes, strict=False)]
        longest = max((b - a for a, b in gaps if any(first <= a and b <= last for first, last in ends)), default=0)
        beside = sorted(b - a for a, b in gaps)[len(gaps) // 2]
        spent = sum(last - first for first, last in ends) / max(1, sum(sizes))
        print(f"{probe}: samples {sizes}, {spent / 1e3:.1f} us of wall a sample, longest gap {longest / 1e6:.2f} ms")
        print(f"  median gap {beside / 1e6:.2f} ms")
        log.clear()
        gaps.clear()
    done.set()
    thread.join()
    clocks, costs = ClockSamples(), []
    for _ in range(50):
        clocks.due, began = 0.0, time.perf_counter()
        clocks.look()
        costs.append(1e6 * (time.perf_counter() - began))
    print(f"a sample of clock, power and energy takes {statistics.median(costs):.0f} us, at most {max(costs):.0f} us")


def starts(out: Path) -> None:
    """See above."""
    kinds = Kinds()
    memory = []
    for number in range(30):
        with thence.record(out / f"start{number}", options(0.02, 0.2)):
            for_seconds(0.2, kinds.run[0])
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
        free, total = kinds.torch.cuda.mem_get_info()
        memory.append((round(resident), round((total - free) / 1e6)))
    about = [json.loads(path.read_text()) for path in out.glob("start*/*/recording.json")]
    print("windows", sum(len(one["counters"]["windows"]) for one in about), "of", len(about), "recordings")
    print(
        "troubles", {one["counters"]["trouble"] for one in about}, "warnings", {str(one["warnings"]) for one in about}
    )
    print("MB resident and on the device: first", memory[0], "second", memory[1], "last", memory[-1])


def ends(out: Path) -> None:
    """See above."""
    for way in ("fork", "_exit", "term", "kill"):
        command = [sys.executable, __file__, str(out), f"end:{way}"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        folders = sorted((out / f"end_{way}").glob("*/recording.json"))
        about = json.loads(folders[0].read_text()) if folders else {}
        counters = about.get("counters") or {}
        print(way, "code", done.returncode, "windows", [w["samples"] for w in counters.get("windows", [])], end=" ")
        print("trouble", counters.get("trouble"), "finished", about.get("finished"), done.stderr[-200:])


def end(out: Path, way: str) -> None:
    """A process that ends in a window."""
    kinds = Kinds()
    recording = thence.record(out / f"end_{way}", options(every=0.2))
    recording.start()
    for_seconds(0.4, kinds.run[0])
    windows = recording._recorder._counters  # noqa: SLF001
    began = time.monotonic()
    while not windows._samplers and time.monotonic() < began + 5:  # noqa: SLF001
        kinds.run[0]()
    if way == "fork":
        child = os.fork()
        if not child:
            sys.exit(0)
        print(os.waitpid(child, 0))
        for_seconds(0.3, kinds.run[0])
    if way == "_exit":
        os._exit(3)
    if way in ("term", "kill"):
        os.kill(os.getpid(), signal.SIGTERM if way == "term" else signal.SIGKILL)
        time.sleep(5)


def beside(out: Path) -> None:
    """See above."""
    kinds = Kinds()
    torch = kinds.torch
    with thence.record(out / "first", options(every=0.3)) as recording:
        for_seconds(0.3, kinds.run[0])
        windows = recording._recorder._counters  # noqa: SLF001
        while not windows._samplers:  # noqa: SLF001
            kinds.run[0]()
        other = [sys.executable, __file__, str(out), "end:other"]
        ended = threading.Event()
        threading.Thread(target=lambda: (subprocess.run(other, check=False, timeout=60), ended.set())).start()
        while not ended.is_set():
            for_seconds(0.1, kinds.run[0])
        with torch.profiler.profile() as profile:
            for_seconds(0.2, kinds.run[0])
    print("torch.profiler saw", len(profile.events()), "events")
    for name in ("first", "end_other"):
        about = counters_of(out / name)
        print(name, "windows", [window["samples"] for window in about["windows"]], "trouble", about["trouble"])


def train(out: Path, *, graph: bool = False) -> None:
    """Training of transformers' Llama, launched one by one, or captured and replayed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3, "num_attention_heads": 16}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **sizes)).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    words = torch.randint(0, 32000, (8, 1024), device="cuda")

    def step() -> None:
        logits = model(input_ids=words).logits
        torch.nn.functional.cross_entropy(logits.view(-1, 32000).float(), words.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not graph)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    own = (str(Path(__file__)), "transformers")
    with thence.record(out / ("graph" if graph else "train"), options(WINDOW, 0.3, own=own)) as recording:
        run = captured(torch, step).replay if graph else step
        for _ in range(150):
            run()
            torch.cuda.synchronize()
            recording.step()


def generate(out: Path) -> None:
    """Decoding with a static cache: each token is a CUDA graph."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, StaticCache

    config = GPT2Config(n_layer=6, n_embd=1024, n_head=16)
    model = GPT2LMHeadModel(config).to("cuda", torch.bfloat16).eval()
    cache = StaticCache(config=config, max_cache_len=1024)
    token = torch.randint(0, 50000, (32, 1), device="cuda")
    place = torch.tensor([500], device="cuda")

    def step() -> None:
        logits = model(input_ids=token, past_key_values=cache, cache_position=place).logits
        token.copy_(logits[:, -1:].argmax(-1))

    with torch.no_grad(), thence.record(out / "decode", options(WINDOW, 0.3, own=(str(Path(__file__)),))) as recording:
        graph = captured(torch, step)
        for _ in range(900):  # the cache holds 1,024 tokens
            graph.replay()
            torch.cuda.synchronize()
            recording.step()


def jax_step(out: Path) -> None:
    """A training step of JAX, of which compilation takes the first ones."""
    with thence.record(out / "jax", options(WINDOW, 0.3)):
        _for(jax_training(8192), 5.0)


def jax_loops(out: Path) -> None:
    """A loop and a branch of JAX inside of a command buffer, where a flush from another thread would crash."""
    with thence.record(out / "loops", options(WINDOW, 0.2)):
        import jax
        import jax.numpy as jnp

        matrix = jax.random.normal(jax.random.key(0), (64, 64)) * 0.1

        @jax.jit
        def solve(y: Any) -> Any:
            def turn(state: Any) -> Any:
                number, y, h = state
                k = jnp.tanh(matrix @ (y + h * jnp.tanh(matrix @ y)))
                y = jax.lax.cond(jnp.abs(k).max() < 10.0, lambda z: z + h * k, lambda z: z * 0.5, y)
                return number + 1, y, jnp.clip(h * 0.99, 1e-3, 1e-1)

            return jax.lax.while_loop(lambda state: state[0] < 300, turn, (0, y, 0.05))[1] * 0.1

        y, began = jnp.ones((64, 32)), time.perf_counter()
        while time.perf_counter() - began < 5:
            y = jax.block_until_ready(solve(y))
        print("sum", y.sum())


def always(out: Path) -> None:
    """Windows of few steps, with CUPTI detached between them."""
    kinds = Kinds()
    counters = thence.Counters(window_seconds=WINDOW, every_seconds=1.0)
    sampling = thence.Sampling(every=20, steps=3, budget=0.5, slow_steps=False)
    with thence.record(out / "always", thence.RecordOptions(counters=counters, sampling=sampling)) as recording:
        began = time.perf_counter()
        while time.perf_counter() - began < 5:
            for _ in range(50):
                kinds.run[1]()
            kinds.torch.cuda.synchronize()
            recording.step()
    about = json.loads(next((out / "always").glob("*/recording.json")).read_text())
    print("detachments", about["detachments"], "steps", recording._announced, about["sampling"])  # noqa: SLF001


def programs(out: Path) -> None:
    """See above."""
    for name in PROGRAMS:
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if name == "loops":
            environment["XLA_FLAGS"] = "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"
        command = [sys.executable, __file__, str(out), f"program:{name}"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=90, env=environment)
        print(name, "code", done.returncode, done.stdout[-200:], done.stderr[-600:] if done.returncode else "")
        with contextlib.suppress(ValueError):
            about = counters_of(out / name)
            print(name, [(w["samples"], w["overflow"]) for w in about["windows"]], about["trouble"], about["left_out"])


PARTS: dict[str, Callable[[Path], None]] = {
    part.__name__: part
    for part in (sizes, truth, cost, last, last_jax, last_queued, decoding, starts, ends, beside, programs)
}
PROGRAMS: dict[str, Callable[[Path], None]] = {
    "train": train,
    "graph": lambda out: train(out, graph=True),
    "decode": generate,
    "jax": jax_step,
    "loops": jax_loops,
    "always": always,
}


if __name__ == "__main__":
    run_parts(__doc__, PARTS, {"program": lambda out, name: PROGRAMS[name](out), "end": end, "pool": pool}, TIMEOUT_S)
