"""Was it worth moving work to another stream? The verdict of `thence diff` against step times without a profiler.

Each program exists twice: before, with all work on one stream, and after, with a part of it on a second stream.
Recording and checking are apart, because the recording machine needs torch and jax alone::

    python benchmarks/gpu_moved.py record FOLDER [--seconds 170] [--runs 4]   # on one GPU
    python benchmarks/gpu_moved.py check FOLDER                               # anywhere, with thence

    captured_training       a training step in a CUDA graph: the average of the weights (bound by bandwidth) beside
                            matrix products that do not fill the GPU
    captured_bandwidth      a training step in a CUDA graph: two updates that both need all of the bandwidth
    eager_copy              an eager training step: the copy of the next batch from the host beside matrix products
    eager_bandwidth         an eager step: two updates that both need all of the bandwidth
    decode                  one token of a decoder with a static cache, in a CUDA graph: small kernels and copies of
                            the cache to the host beside the next layers
    decode_joined           the same, but the main stream waits for each of them at once: nothing can overlap
    unchanged               captured_training's step before, both times: nothing moved
    jax_few_blocks          two chains of long kernels of few thread blocks, in JAX with compute_on
    jax_small               two chains of small matrix products, in JAX
    jax_bandwidth           two chains of elementwise programs that both need all of the bandwidth, in JAX

A run is a process of its own that records every program before and after: first the time of a step without a
profiler, by CUDA events (JAX: by the host's clock) around blocks of BLOCK steps that take turns, then a trace of
TRACED steps of each. FOLDER/PROGRAM/before|after/NN.json.gz (JAX: a folder), and FOLDER/times_LIBRARY_NN.json.
"""

from __future__ import annotations

import gzip
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captured_step import captured
from command_line import documented_parser

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[], None]

BLOCKS, BLOCK, UNTRACED, TRACED = 12, 20, 6, 16
SIDES = ("before", "after")
JAX_FLAGS = "--xla_gpu_enable_command_buffer="
"""Inside a CUDA graph a profiler shows the streams of the graph, not those of XLA."""


class Layers:
    """A small network whose matrix products do not fill a large GPU, with a training step written out."""

    def __init__(self, torch: Any, width: int = 2048, batch: int = 512, depth: int = 4) -> None:
        self.torch = torch
        make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.x = make(batch, width)
        self.layers = [torch.nn.Linear(width, width, device="cuda", dtype=torch.bfloat16) for _ in range(depth)]
        self.parameters = [p for layer in self.layers for p in layer.parameters()]
        self.averages = [p.detach().float().clone() for p in self.parameters]

    def forward_backward(self) -> None:
        x = self.x
        for layer in self.layers:
            x = self.torch.nn.functional.gelu(layer(x))
        gradients = self.torch.autograd.grad(x.float().square().mean(), self.parameters)
        self.gradients = gradients

    def average(self) -> None:
        """The exponential average of the weights, in full precision: it reads and writes far more than it computes."""
        for average, parameter in zip(self.averages, self.parameters, strict=True):
            average.lerp_(parameter.detach().float(), 0.01)

    def update(self) -> None:
        with self.torch.no_grad():
            self.torch._foreach_add_(self.parameters, list(self.gradients), alpha=-1e-4)


def beside(torch: Any, side: Any, work: Step, other: Step) -> None:
    """Work on a second stream while the current one does other work; joined at the end."""
    main = torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        work()
    other()
    main.wait_stream(side)


def captured_training(torch: Any) -> dict[str, Step]:
    net, side = Layers(torch), torch.cuda.Stream()

    def before() -> None:
        net.average()
        net.forward_backward()
        net.update()

    def after() -> None:
        beside(torch, side, net.average, net.forward_backward)
        net.update()

    return {"before": captured(torch, before).replay, "after": captured(torch, after).replay}


def unchanged(torch: Any) -> dict[str, Step]:
    step = captured_training(torch)["before"]
    return dict.fromkeys(SIDES, step)


def two_updates(torch: Any) -> tuple[Step, Step]:
    """Two kernels of equal length that each need all of the bandwidth."""
    size = 64 * 1024 * 1024
    a, b = (torch.ones(size, device="cuda") for _ in range(2))
    return lambda: a.mul_(1.0001), lambda: b.add_(1.0)


def captured_bandwidth(torch: Any) -> dict[str, Step]:
    net, side = Layers(torch), torch.cuda.Stream()
    one, two = two_updates(torch)

    def before() -> None:
        net.forward_backward()
        one()
        two()
        net.update()

    def after() -> None:
        net.forward_backward()
        beside(torch, side, one, two)
        net.update()

    return {"before": captured(torch, before).replay, "after": captured(torch, after).replay}


def eager_copy(torch: Any) -> dict[str, Step]:
    net = Layers(torch, 4096, 4096, 2)
    side = torch.cuda.Stream()
    batch = torch.randn(4096, 4096).to(torch.bfloat16).pin_memory()
    following = torch.empty_like(batch, device="cuda")

    def copy() -> None:
        following.copy_(batch, non_blocking=True)

    def before() -> None:
        copy()
        net.forward_backward()
        net.update()

    def after() -> None:
        beside(torch, side, copy, net.forward_backward)
        net.update()

    return {"before": before, "after": after}


def eager_bandwidth(torch: Any) -> dict[str, Step]:
    net, side = Layers(torch, 4096, 4096, 2), torch.cuda.Stream()
    one, two = two_updates(torch)

    def before() -> None:
        net.forward_backward()
        one()
        two()

    def after() -> None:
        net.forward_backward()
        beside(torch, side, one, two)

    return {"before": before, "after": after}


class Decoder:
    """One token of a decoder whose key-value cache has a fixed size."""

    WIDTH, HEADS, DEPTH, LENGTH, BATCH = 2048, 16, 6, 2048, 8

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02  # noqa: E731
        width, shape = self.WIDTH, (self.BATCH, self.HEADS, self.LENGTH, self.WIDTH // self.HEADS)
        self.x = make(self.BATCH, width)
        self.layers = [
            {
                "qkv": make(width, 3 * width),
                "out": make(width, width),
                "up": make(width, 4 * width),
                "down": make(4 * width, width),
                "k": make(*shape),
                "v": make(*shape),
            }
            for _ in range(self.DEPTH)
        ]
        self.page = torch.empty(self.LENGTH, shape[3], dtype=torch.bfloat16).pin_memory()
        self.statistics = torch.zeros(self.DEPTH, self.BATCH, device="cuda")

    def attention(self, layer: dict[str, Any], x: Any) -> Any:
        q, k, v = (x @ layer["qkv"]).view(self.BATCH, 3, self.HEADS, 1, -1).unbind(1)
        layer["k"][:, :, 7:8] = k
        layer["v"][:, :, 7:8] = v
        mixed = self.torch.nn.functional.scaled_dot_product_attention(q, layer["k"], layer["v"])
        return x + mixed.reshape(self.BATCH, -1) @ layer["out"]

    def mlp(self, layer: dict[str, Any], x: Any) -> Any:
        return x + self.torch.nn.functional.gelu(x @ layer["up"]) @ layer["down"]

    def aside(self, number: int, x: Any) -> None:
        """What nobody waits for: statistics in small kernels, and a page of the cache to the host."""
        layer = self.layers[number]
        values = x.float()
        self.statistics[number] = values.square().mean(1).sqrt() + values.abs().amax(1)
        self.page.copy_(layer["k"][0, 0], non_blocking=True)

    def step(self, side: Any, *, at_once: bool = False) -> None:
        main, x = self.torch.cuda.current_stream(), self.x
        for number, layer in enumerate(self.layers):
            x = self.attention(layer, x)
            if side is None:
                self.aside(number, x)
            else:
                side.wait_stream(main)
                with self.torch.cuda.stream(side):
                    self.aside(number, x)
                if at_once:
                    main.wait_stream(side)
            x = self.mlp(layer, x)
        if side is not None:
            main.wait_stream(side)


def decode(torch: Any) -> dict[str, Step]:
    decoder, side = Decoder(torch), torch.cuda.Stream()
    return {
        "before": captured(torch, lambda: decoder.step(None)).replay,
        "after": captured(torch, lambda: decoder.step(side)).replay,
    }


def decode_joined(torch: Any) -> dict[str, Step]:
    decoder, side = Decoder(torch), torch.cuda.Stream()
    return {
        "before": captured(torch, lambda: decoder.step(None)).replay,
        "after": captured(torch, lambda: decoder.step(side, at_once=True)).replay,
    }


TORCH: dict[str, Callable[[Any], dict[str, Step]]] = {
    "captured_training": captured_training,
    "captured_bandwidth": captured_bandwidth,
    "eager_copy": eager_copy,
    "eager_bandwidth": eager_bandwidth,
    "decode": decode,
    "decode_joined": decode_joined,
    "unchanged": unchanged,
}
JAX = {
    "jax_few_blocks": ("arithmetic", (8192,), 12),
    "jax_small": ("products", (512, 512), 24),
    "jax_bandwidth": ("passes", (64 * 1024 * 1024,), 3),
}
"""Kind of each chain, shape of its arrays, and its length."""
DEPTH = 100
"""Dependent operations in a kernel of kind arithmetic: it takes several us, however few elements it has."""


def times_by_events(torch: Any, steps: dict[str, Step]) -> dict[str, list[float]]:
    """Milliseconds of a step, in blocks that take turns."""
    result: dict[str, list[float]] = {side: [] for side in steps}
    for number in range(BLOCKS):
        for side in SIDES if number % 2 else reversed(SIDES):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            steps[side]()
            start.record()
            for _ in range(BLOCK):
                steps[side]()
            end.record()
            torch.cuda.synchronize()
            result[side].append(start.elapsed_time(end) / BLOCK)
    return result


def trace_torch(torch: Any, step: Step, path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile, schedule  # type: ignore[import-not-found,unused-ignore]  # on the GPU machine

    wanted = schedule(wait=UNTRACED - 2, warmup=2, active=TRACED, repeat=1)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    raw = path.with_suffix("")
    with profile(
        activities=activities, schedule=wanted, on_trace_ready=lambda done: done.export_chrome_trace(str(raw))
    ) as profiler:
        for _ in range(UNTRACED + TRACED):
            step()
            profiler.step()
        torch.cuda.synchronize()
    document = json.loads(raw.read_bytes())
    events = [event for event in document["traceEvents"] if event.get("cat") != "ac2g"]
    document["traceEvents"] = events  # the arrows repeat the correlation ids
    path.write_bytes(gzip.compress(json.dumps(document, separators=(",", ":")).encode(), 6))
    raw.unlink()


def run_torch(folder: Path, number: int) -> dict[str, Any]:
    """One run of the programs of torch, in this process."""
    import torch  # type: ignore[import-not-found,unused-ignore]  # on the GPU machine

    torch.manual_seed(0)
    times: dict[str, Any] = {}
    for name, make in TORCH.items():
        try:
            steps = make(torch)
            for step in steps.values():
                for _ in range(5):
                    step()
            torch.cuda.synchronize()
            times[name] = times_by_events(torch, steps)
            for side, step in steps.items():
                target = folder / name / side
                target.mkdir(parents=True, exist_ok=True)
                trace_torch(torch, step, target / f"{number:02}.json.gz")
        except Exception:  # noqa: BLE001 - one program that fails stops no other
            traceback.print_exc()
            print(f"{name}: FAILED, left out")
        steps = {}
        torch.cuda.empty_cache()
    return times


def jax_step(name: str, *, moved: bool) -> Step:
    """A compiled step with two independent chains, the second one on a stream of its own if it is moved."""
    import jax  # type: ignore[import-not-found,unused-ignore]  # on the GPU machine
    import jax.numpy as jnp  # type: ignore[import-not-found,unused-ignore]

    kind, shape, length = JAX[name]

    def arithmetic(x: Any, w: Any) -> Any:
        for _ in range(length):
            for _ in range(DEPTH):
                x = jnp.tanh(x * w)
            x = jax.lax.optimization_barrier(x)  # what follows is another kernel
        return x

    def products(x: Any, w: Any) -> Any:
        for _ in range(length):
            x = jnp.tanh(x @ w)
        return x

    def passes(x: Any, w: Any) -> Any:
        for n in range(length):
            # Without the barrier, all passes would be one.
            x = jax.lax.optimization_barrier(x * w + n)
        return x

    chain = {"arithmetic": arithmetic, "products": products, "passes": passes}[kind]
    other: Any = chain
    if moved:
        from jax.experimental import compute_on  # type: ignore[import-not-found,unused-ignore]

        place = getattr(compute_on, "compute_on2", None) or compute_on.compute_on
        other = place(chain, compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device)
    arrays = [jnp.full(shape, value, jnp.float32) for value in (0.5, 0.25, 0.999, 0.99)]
    step = jax.jit(lambda x, y, v, w: (chain(x, v), other(y, w))).lower(*arrays).compile()
    return lambda: jax.block_until_ready(step(*arrays))


def run_jax(folder: Path, number: int) -> dict[str, Any]:
    """One run of the programs of JAX, in this process."""
    import jax  # type: ignore[import-not-found,unused-ignore]  # on the GPU machine

    times: dict[str, Any] = {}
    for name in JAX:
        try:
            steps = {side: jax_step(name, moved=side == "after") for side in SIDES}
            for step in steps.values():
                for _ in range(5):
                    step()
            times[name] = {side: [] for side in SIDES}
            for block in range(BLOCKS):
                for side in SIDES if block % 2 else reversed(SIDES):
                    begin = time.perf_counter_ns()
                    for _ in range(BLOCK):
                        steps[side]()
                    times[name][side].append((time.perf_counter_ns() - begin) / BLOCK / 1e6)
            for side, step in steps.items():
                jax.profiler.start_trace(str(folder / name / side / f"{number:02}"))
                for traced in range(TRACED):
                    with jax.profiler.StepTraceAnnotation("step", step_num=traced):
                        step()
                jax.profiler.stop_trace()
        except Exception:  # noqa: BLE001 - one program that fails stops no other
            traceback.print_exc()
            print(f"{name}: FAILED, left out")
    return times


def record(folder: Path, runs: int, seconds: float, libraries: list[str]) -> None:
    """Each run in processes of its own, one for torch and one for JAX, while there is time."""
    begin = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"XLA_FLAGS": JAX_FLAGS, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    longest = 0.0
    for number in range(runs):
        began = time.monotonic()
        if began - begin + longest > seconds:
            print(f"{seconds:.0f} s are nearly over: {runs - number} runs are left out")
            break
        for library in libraries:
            command = [sys.executable, __file__, "run", library, str(folder), str(number)]
            done = subprocess.run(command, env=environment, check=False)
            if done.returncode:
                print(f"run {number} of {library} ended with {done.returncode}")
        longest = max(longest, time.monotonic() - began)
        print(f"run {number}: {time.monotonic() - began:.0f} s", flush=True)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{time.monotonic() - begin:.0f} s, {size / 1e6:.1f} MB")


def truth(folder: Path, name: str) -> tuple[list[float], list[float]]:
    """Median milliseconds of a step before and after in each run, without a profiler."""
    sides: tuple[list[float], list[float]] = [], []
    for path in sorted(folder.glob("times_*.json")):
        times = json.loads(path.read_text()).get(name)
        if times:
            for values, side in zip(sides, SIDES, strict=True):
                values.append(statistics.median(times[side]))
    return sides


def check(folder: Path) -> None:
    """Prints thence's verdict on each program beside the times without a profiler."""
    import thence
    from thence.analysis.diff.answer import compare

    for name in (*TORCH, *JAX):
        runs = [sorted((folder / name / side).glob("*")) for side in SIDES]
        if not all(runs):
            print(f"\n{name}: was not recorded")
            continue
        before, after = truth(folder, name)
        change = [(b - a) / a for a, b in zip(before, after, strict=True)]
        print(
            f"\n{name}: without a profiler {statistics.median(before):.3f} ->"
            f" {statistics.median(after):.3f} ms, {100 * statistics.median(change):+.1f} %"
            f" ({100 * min(change):+.1f} to {100 * max(change):+.1f} in {len(change)} runs)"
        )
        samples = [[thence.open(run).sample() for run in side] for side in runs]
        found = compare(*samples)
        for refusal in found.refusals:
            print(f"  refused ({refusal.code}): {refusal.text}")
        for text in found.explanation:
            print(f"  {text}")
        print("  " + json.dumps(found.to_json().get("moved_streams")))


def main() -> None:
    options = documented_parser(__doc__)
    verbs = options.add_subparsers(required=True, dest="verb")
    recording = verbs.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--runs", type=int, default=4)
    recording.add_argument("--library", choices=["torch", "jax"], action="append", help="only this one")
    recording.add_argument("--seconds", type=float, default=170)
    verbs.add_parser("check").add_argument("folder", type=Path)
    run = verbs.add_parser("run", help="one run in this process; record starts it")
    run.add_argument("library", choices=["torch", "jax"])
    run.add_argument("folder", type=Path)
    run.add_argument("number", type=int)
    given = options.parse_args()
    if given.verb == "record":
        record(given.folder, given.runs, given.seconds, given.library or ["torch", "jax"])
    elif given.verb == "check":
        check(given.folder)
    else:
        times = (run_torch if given.library == "torch" else run_jax)(given.folder, given.number)
        path = given.folder / f"times_{given.library}_{given.number:02}.json"
        path.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
