"""Whether samples of program counters are right, what they cost, and that nothing hangs or breaks.

    python benchmarks/gpu_stalls.py OUT [PART ...]     # on a GPU with torch and jax, as a user who may profile

Parts, each in a process of its own:

    phases    a Triton kernel of three phases, four mixes of them: the recording; clock profiles of the same kernel with
              thence.inside's ranges (phases_*.npz); its time, and its time without each phase
    compare   of what `phases` left (needs Polars, no GPU): shares of the phases by samples, by ranges, and by what
              leaving the phase out saves
    cost      a CUDA graph that is limited by the GPU, and a decode that is limited by the host, in blocks with sampling
              and without it, in random order: difference with its 95 % interval
    processes the same graph and decode in processes of their own: alone, recorded, recorded with stalls
    jax       as `cost`, for a training step of JAX
    errors    the same work 40 times: how much the shares of reasons differ, beside the stated standard error
    starts    20 recordings without stalls and 100 with: results, memory, time to start and stop
    ends      processes that fork, exit or are killed; whether the next one can sample
    beside    torch.profiler during a recording with samples; modules that were loaded before; hardware counters
    pallas    lines of a Pallas kernel by Triton and of one by Mosaic GPU; XLA_FLAGS=--xla_gpu_generate_line_info=true

A last line of each part says what was found; recordings are in OUT.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import thence
from captured_step import captured, jax_training
from command_line import run_parts
from thence.model.column_file import decode as decode_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIXES = {"load": (48, 20, 1), "math": (6, 300, 1), "gather": (6, 20, 10), "mixed": (16, 100, 3)}
"""Rounds of each phase."""
PHASES = ("load", "math", "gather")
PROGRAMS, SIZE, N = 8192, 1024, 1 << 26
STALLS = thence.RecordOptions(stalls=True)
TIMEOUT_S = 100


def table(folder: Path, name: str) -> dict[str, Any]:
    """All rows of a table of the one process that was recorded, without Polars; texts for the numbers of names."""
    parts = [decode_part(path.read_bytes()) for path in sorted(folder.glob(f"*/{name}-*.npz"))]
    columns = {column: np.concatenate([np.asarray(part[column]) for part in parts]) for column in parts[0]}
    if name == "names":
        return columns
    names = table(folder, "names")
    texts = dict(zip(names["number"].tolist(), names["name"].tolist(), strict=True))
    for column in {"kernel", "file", "reason", "name"} & set(columns):
        columns[column] = np.array([texts.get(number, "") for number in columns[column].tolist()])
    return columns


def about(folder: Path) -> dict[str, Any]:
    """The entry ``stalls`` of the description, after the warnings were printed."""
    document = json.loads(next(folder.glob("*/recording.json")).read_text())
    if document["warnings"]:
        print("warnings", document["warnings"])
    return dict(document["stalls"])


def lines(folder: Path, kernel: str = "", most: int = 8) -> Counter[tuple[str, int]]:
    """Samples by file and line of the kernels whose name begins so; the largest are printed with their reasons."""
    rows = table(folder, "stalls")
    found: Counter[tuple[str, int]] = Counter()
    reasons: dict[tuple[str, int], Counter[str]] = {}
    for at in range(len(rows["samples"])):
        if str(rows["kernel"][at]).startswith(kernel):
            key = (Path(str(rows["file"][at])).name, int(rows["line"][at]))
            found[key] += int(rows["samples"][at])
            reasons.setdefault(key, Counter())[str(rows["reason"][at])] += int(rows["samples"][at])
    for key, count in found.most_common(most):
        why = ", ".join(f"{name} {n / count:.0%}" for name, n in reasons[key].most_common(3))
        print(f"    {key[0] or '(no lines)'}:{key[1]} {count / max(1, found.total()):.1%} {why}")
    return found


def times_us(run: Callable[[], Any], count: int = 20) -> float:
    """The time of a launch between two events."""
    import torch

    run()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(count):
        run()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / count * 1e3


def phases(out: Path) -> None:
    """See above."""
    found = {mix: _of_mix(out, mix, rounds) for mix, rounds in MIXES.items()}
    (out / "phases.json").write_text(json.dumps(found))


def _of_mix(out: Path, mix: str, rounds: tuple[int, ...]) -> dict[str, float]:
    """Records a mix, saves a profile of the same with ranges, and times it, as it is and without each phase."""
    import torch

    from phased_kernel import NAMES, inside, phased, ranged

    with thence.record(out / f"phases_{mix}", thence.RecordOptions(stalls=True, lines=False, modules=False)):
        x = torch.randn(N, device="cuda")
        y = torch.empty(1024, device="cuda")
        for _ in range(60):
            phased[(PROGRAMS,)](x, y, N, *rounds, SIZE)
        torch.cuda.synchronize()
    print(mix, about(out / f"phases_{mix}"))
    lines(out / f"phases_{mix}", "phased")
    us = {"plain_us": times_us(lambda: phased[(PROGRAMS,)](x, y, N, *rounds, SIZE))}
    for at, name in enumerate(PHASES):
        less = [0 if i == at else count for i, count in enumerate(rounds)]
        us[f"without_{name}_us"] = times_us(lambda less=less: phased[(PROGRAMS,)](x, y, N, *less, SIZE))
    profile = inside.Profile(NAMES, capacity=8, num_warps=4, kernel="ranged")
    buffer = profile.launch(PROGRAMS).arguments
    ranged[(PROGRAMS,)](x, y, N, *buffer, 8, *rounds, SIZE, num_warps=4)
    torch.cuda.synchronize()
    profile.save(out / f"phases_{mix}.npz")
    us["ranged_us"] = times_us(lambda: ranged[(PROGRAMS,)](x, y, N, *buffer, 8, *rounds, SIZE, num_warps=4))
    print(mix, us, flush=True)
    return us


def compare(out: Path) -> None:
    """See above."""
    source = (Path(__file__).parent / "phased_kernel.py").read_text().splitlines()
    marked = {name: next(i for i, line in enumerate(source, 1) if line.endswith(f"# {name}")) for name in PHASES}
    found = json.loads((out / "phases.json").read_text())
    for mix, us in found.items():
        stalls = thence.open(out / f"phases_{mix}").stalls().rows.filter(kernel="phased")
        of_line = dict(stalls.group_by("line").agg(n=stalls["samples"].sum() * 0).rows())
        of_line = {line: int(stalls.filter(line=line)["samples"].sum()) for line in of_line}
        of_phase = dict.fromkeys(PHASES, 0)
        other = 0
        for line, samples in of_line.items():
            # the loop's own line is above, the barrier below a phase
            phase = next((name for name, at in marked.items() if line is not None and at - 1 <= line <= at + 1), None)
            if phase is None:
                other += samples
            else:
                of_phase[phase] += samples
        total = sum(of_phase.values()) + other
        ranges = thence.inside.open(out / f"phases_{mix}.npz").summary().rows
        clocks = {name: float(ranges.filter(name=name)["total_ns"].sum()) for name in PHASES}
        saved = {name: max(0.0, us["plain_us"] - us[f"without_{name}_us"]) for name in PHASES}
        print(f"{mix}: {us['plain_us']:.0f} us, with ranges {us['ranged_us']:.0f} us; {total:,} samples", end="")
        print(f", {other / total:.1%} on other lines")
        for name in PHASES:
            print(
                f"  {name:7} {of_phase[name] / total:6.1%} by samples, {clocks[name] / sum(clocks.values()):6.1%} by "
                f"ranges, {saved[name] / us['plain_us']:6.1%} saved without it"
            )


class Switch:
    """Starts and stops sampling in the current context, while it stays enabled."""

    class Parameters(ctypes.Structure):
        """CUpti_PCSamplingStartParams."""

        _fields_ = (("size", ctypes.c_size_t), ("private", ctypes.c_void_p), ("context", ctypes.c_void_p))

    def __init__(self, recording: thence.Recording) -> None:
        self._library = ctypes.CDLL(recording._recorder._cupti.path)  # noqa: SLF001
        context = ctypes.c_void_p()
        ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
        if not context.value:
            ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        self._parameters = self.Parameters(24, None, context.value)
        self.on = True

    def turn(self, *, on: bool) -> None:
        """Samples, or does not."""
        if on != self.on:
            call = self._library.cuptiPCSamplingStart if on else self._library.cuptiPCSamplingStop
            if code := call(ctypes.byref(self._parameters)):
                raise RuntimeError(f"CUPTI returned {code}")
            self.on = on


def alternated(name: str, switch: Switch, block: Callable[[], None], seconds: float) -> None:
    """Prints by how much blocks take longer while program counters are sampled, in pairs of random order."""
    clocks = time.perf_counter, time.thread_time, time.process_time
    pairs: dict[str, list[float]] = {"wall": [], "CPU of the launching thread": [], "CPU of other threads": []}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(pairs["wall"]) < 10:
        taken = {}
        for on in random.sample((True, False), 2):
            switch.turn(on=on)
            block()
            before = [clock() for clock in clocks]
            block()
            taken[on] = [clock() - began for clock, began in zip(clocks, before, strict=True)]
        (wall, own, every), (plain, own_plain, every_plain) = taken[True], taken[False]
        pairs["wall"].append(wall / plain - 1)
        pairs["CPU of the launching thread"].append(own / own_plain - 1)
        pairs["CPU of other threads"].append((every - own) / wall - (every_plain - own_plain) / plain)
    switch.turn(on=True)
    bursts = pairs.pop("CPU of other threads")
    half = 1.96 * statistics.stdev(bursts) / math.sqrt(len(bursts))
    print(f"{name}, CPU of other threads: {statistics.mean(bursts):+.3f} +- {half:.3f} s a second")
    for what, values in pairs.items():
        print(f"{name}, {what}: {of_median(values)} (n = {len(values)}, {1e3 * plain:.2f} ms)", flush=True)


def of_median(values: list[float]) -> str:
    """The median, and its 95 % interval by ranks: single blocks of a noisy host are far off."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    low, high = (ordered[min(max(round(len(values) / 2 + way * half), 0), len(values) - 1)] for way in (-1, 1))
    return f"{statistics.median(values):+.2%} ({low:+.2%} to {high:+.2%})"


@contextlib.contextmanager
def sampled(folder: Path) -> Iterator[thence.Recording]:
    """A recording with stalls; what it says is printed."""
    recording = thence.record(folder, STALLS)
    recording.start()
    yield recording
    began = time.perf_counter()
    recording.stop()
    print(f"{folder.name}: stopped in {time.perf_counter() - began:.2f} s, {about(folder)}")


def cost(out: Path) -> None:
    """See above."""
    import torch

    with sampled(out / "cost") as recording:
        graphs, decode = _graphs_and_decode(torch)
        switch = Switch(recording)
        alternated("graph", switch, graphs, 8)
        alternated("decode", switch, decode, 16)


def _graphs_and_decode(torch: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """Blocks of some ms: replays of a CUDA graph that the GPU limits, and a decode that its launches limit."""
    a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(1 << 22, device="cuda")
    c = torch.empty_like(b)
    graph = captured(torch, lambda: [(torch.mm(a, a), torch.add(b, 1.0, out=c)) for _ in range(20)])
    layers = torch.nn.ModuleList(
        torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True, device="cuda") for _ in range(6)
    ).eval()
    token = torch.randn(1, 1, 256, device="cuda")

    def decode() -> None:
        with torch.no_grad():
            for _ in range(3):
                x = token
                for layer in layers:
                    x = layer(x)
        torch.cuda.synchronize()

    def graphs() -> None:
        for _ in range(15):
            graph.replay()
        torch.cuda.synchronize()

    return graphs, decode


def processes(out: Path) -> None:
    """See above."""
    found: dict[str, dict[str, list[float]]] = {"graph": {}, "decode": {}}
    for number in range(6):
        for way in random.sample(("alone", "recorded", "stalls"), 3):
            command = [sys.executable, __file__, str(out / f"process{number}_{way}"), f"process:{way}"]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
            for name, seconds in json.loads(done.stdout.splitlines()[-1]).items():
                found[name].setdefault(way, []).append(seconds)
    for name, ways in found.items():
        for way in ("recorded", "stalls"):
            ratios = [with_it / alone - 1 for with_it, alone in zip(ways[way], ways["alone"], strict=True)]
            print(f"{name}, {way} over alone: {of_median(ratios)}, {1e3 * statistics.median(ways['alone']):.2f} ms")
        ratios = [with_it / without - 1 for with_it, without in zip(ways["stalls"], ways["recorded"], strict=True)]
        print(f"{name}, stalls over recorded: {of_median(ratios)} (n = {len(ratios)})")


def process(out: Path, way: str) -> None:
    """One process of `processes`: prints the medians of its blocks."""
    import torch

    if way != "alone":
        thence.record(out, thence.RecordOptions(stalls=way == "stalls", baseline=False)).start()
    medians = {}
    for name, block in zip(("graph", "decode"), _graphs_and_decode(torch), strict=True):
        times, end = [], time.perf_counter() + 1.2
        while time.perf_counter() < end:
            began = time.perf_counter()
            block()
            times.append(time.perf_counter() - began)
        medians[name] = statistics.median(times)
    print(json.dumps(medians))


def jax_step(out: Path) -> None:
    """See above."""
    with sampled(out / "jax") as recording:
        steps = jax_training(4096, 20)
        steps()
        alternated("jax", Switch(recording), steps, 8)
    lines(out / "jax")


def errors(out: Path) -> None:
    """See above."""
    import torch

    from phased_kernel import phased

    x, y = torch.ones(N, device="cuda"), torch.empty(1024, device="cuda")
    shares: dict[str, list[float]] = {}
    counts = []
    for number in range(40):
        folder = out / f"errors{number}"
        with thence.record(folder, thence.RecordOptions(stalls=True, lines=False, modules=False)):
            for _ in range(4):
                phased[(PROGRAMS,)](x, y, N, *MIXES["mixed"], SIZE)
            torch.cuda.synchronize()
        rows = table(folder, "stalls")
        of_kernel = rows["kernel"] == "phased"
        counts.append(int(rows["samples"][of_kernel].sum()))
        for reason in set(rows["reason"][of_kernel].tolist()):
            samples = rows["samples"][of_kernel & (rows["reason"] == reason)].sum()
            shares.setdefault(reason, []).append(float(samples) / counts[-1])
    print("samples", min(counts), "to", max(counts))
    for reason, values in shares.items():
        share = statistics.mean(values)
        if len(values) == len(counts) and share > 0.01:
            stated = math.sqrt(share * (1 - share) / statistics.mean(counts))
            print(f"{reason}: {share:.2%}, deviation {statistics.stdev(values):.3%}, stated {stated:.3%}")


def starts(out: Path) -> None:
    """See above."""
    import torch

    a = torch.randn(1024, 1024, device="cuda")
    plain = torch.mm(a, a).sum().item()
    for stalls, count in ((False, 20), (True, 100)):
        results, took = set(), []
        for number in range(count):
            began = time.perf_counter()
            options = thence.RecordOptions(stalls=stalls, lines=False, modules=False)
            recording = thence.record(out / f"start{number}_{stalls}", options)
            recording.start()
            running = time.perf_counter()
            for _ in range(20):
                b = torch.mm(a, a)
            results.add(b.sum().item())
            ending = time.perf_counter()
            recording.stop()
            free, total = torch.cuda.mem_get_info()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
            took.append((running - began, time.perf_counter() - ending, resident, (total - free) / 1e6))
        print("stalls", stalls, "same results", results == {plain}, "seconds to start and stop, MB resident and used:")
        for at in (0, 1, count // 2, count - 1):
            print("  ", at, *(f"{value:.3f}" for value in took[at]))
    print("troubles", {about(out / f"start{number}_True")["trouble"] for number in range(100)})


def ends(out: Path) -> None:
    """See above."""
    for way in ("fork", "_exit", "term", "kill", "return"):
        command = [sys.executable, __file__, str(out), f"end:{way}"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        print(way, "code", done.returncode, done.stdout[-200:], done.stderr[-200:])
        with contextlib.suppress(StopIteration):
            print("  ", about(out / f"end_{way}"), "rows", len(table(out / f"end_{way}", "stalls")["samples"]))


def end(out: Path, way: str) -> None:
    """A process that ends while it is sampled."""
    import torch

    thence.record(out / f"end_{way}", STALLS).start()
    a = torch.randn(1024, 1024, device="cuda")
    began = time.perf_counter()
    while time.perf_counter() < began + 1:
        for _ in range(50):
            torch.mm(a, a)
        torch.cuda.synchronize()
    if way == "fork":
        child = os.fork()
        if not child:
            sys.exit(0)
        print(os.waitpid(child, 0))
    elif way == "_exit":
        os._exit(3)
    elif way in ("term", "kill"):
        os.kill(os.getpid(), signal.SIGTERM if way == "term" else signal.SIGKILL)
        time.sleep(5)


def beside(out: Path) -> None:
    """See above."""
    import torch

    from phased_kernel import phased
    from thence.capture.cuda import cupti
    from thence.capture.cuda.pm_sampling import PmSampler, Room

    x, y = torch.ones(N, device="cuda"), torch.empty(1024, device="cuda")
    run = phased[(PROGRAMS,)]
    run(x, y, N, *MIXES["mixed"], SIZE)
    torch.cuda.synchronize()
    with thence.record(out / "late", STALLS):
        for _ in range(20):
            run(x, y, N, *MIXES["mixed"], SIZE)
        torch.softmax(x[: 1 << 20], 0)
        torch.cuda.synchronize()
        try:
            PmSampler(
                cupti.load(), 0, {"gr_active_cycles": "gr__cycles_active.sum"}, 10_000, Room(500, 16_000, 1 << 28)
            )
            print("hardware counters can be sampled, too")
        except thence.MissingRequirement as error:
            print("hardware counters:", error)
        with torch.profiler.profile() as profile:
            for _ in range(50):
                run(x, y, N, *MIXES["load"], SIZE)
            torch.cuda.synchronize()
    kernels = sum(event.name == "phased" and event.device_time_total > 0 for event in profile.events())
    print("torch.profiler saw", kernels, "kernels;", about(out / "late"))
    lines(out / "late")


def pallas(out: Path) -> None:
    """See above."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu, triton

    size = 1024
    x = jnp.arange(1 << 20, dtype=jnp.float32) * 1e-6
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def by_triton(x_ref: Any, y_ref: Any) -> None:
        value = x_ref[...]
        for _ in range(8):
            value = jnp.exp(-value * value)
        y_ref[...] = value

    def by_mosaic(x_ref: Any, y_ref: Any) -> None:
        at = jax.lax.axis_index("blocks") * size
        value = x_ref[pl.ds(at, size)]
        for _ in range(8):
            value = jnp.exp(-value * value)
        y_ref[pl.ds(at, size)] = value

    blocks = x.size // size
    spec = pl.BlockSpec((size,), lambda i: (i,))
    kernels = {
        "Triton": lambda: pl.pallas_call(
            by_triton, out_shape=shape, grid=(blocks,), in_specs=[spec], out_specs=spec,
            compiler_params=triton.CompilerParams(num_warps=4), name="by_triton",
        ),
        "Mosaic GPU": lambda: mosaic_gpu.kernel(by_mosaic, out_type=shape, grid=(blocks,), grid_names=("blocks",)),
    }  # fmt: skip
    with sampled(out / "pallas"):
        for name, made in kernels.items():
            try:
                kernel = jax.jit(made())
                for _ in range(1000):
                    y = kernel(x)
                print(name, float(y.sum()))
            except Exception as error:  # noqa: BLE001 - one of them may be missing in this jax
                print(name, "failed:", repr(error)[:400])
    for name in sorted(set(table(out / "pallas", "stalls")["kernel"].tolist())):
        print("  ", name)
        lines(out / "pallas", name)


PARTS: dict[str, Callable[[Path], None]] = {
    "phases": phases,
    "compare": compare,
    "cost": cost,
    "processes": processes,
    "jax": jax_step,
    "errors": errors,
    "starts": starts,
    "ends": ends,
    "beside": beside,
    "pallas": pallas,
}


if __name__ == "__main__":
    run_parts(__doc__, PARTS, {"end": end, "process": process}, TIMEOUT_S)
