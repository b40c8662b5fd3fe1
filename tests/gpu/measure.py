"""thence.measure in both modes against CUPTI's own records, on functions of 10 us to 10 ms.

    python tests/gpu/measure.py torch jax      # needs an NVIDIA GPU

Every function is measured in mode "cupti" (sum of kernels) and in mode "events", and recorded for several
calls, with a synchronization after each. Records of a call give its sum, and its span: first start to last
end, which "events" should be near where the GPU and not the host decides. Where the host does, recording
itself makes the span longer. Medians of 10 calls, all in one process, one after the other.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import thence
from support import documented_parser, end, judge
from thence.capture.cuda import cupti
from thence.capture.cuda.layouts import KERNEL
from thence.capture.recorder.activity_parser import ActivityParser
from thence.capture.recorder.buffers import Buffers

CALLS = 10
MAX_ERROR, MAX_ERROR_MS = 0.05, 0.005
"""How far mode cupti may be from CUPTI's own records of other calls: a share, or ms where calls are short."""

Call = Callable[..., Any]
Wait = Callable[[Any], object]


def reference(call: Call, wait: Wait) -> tuple[float, float, int]:
    """Median over calls of (sum of kernels, first start to last end) in ms, and kernels of a call."""
    library, buffers = cupti.load(), Buffers(64 << 20)
    handle = library.subscribe()
    library.register(buffers.requested, buffers.completed)
    library.enable(KERNEL)
    for _ in range(CALLS):
        wait(call())
    library.flush(unfinished=True)
    parser, starts, ends = ActivityParser(library), [], []
    while not buffers.filled.empty():
        filled = buffers.filled.get()
        for kind, records in parser.read(filled.address, filled.valid_bytes):
            if kind == KERNEL:
                starts.append(records["start"].copy())
                ends.append(records["end"].copy())
        buffers.recycle(filled)
    library.disable(KERNEL)
    library.unsubscribe(handle)
    library.finalize()
    start, end = (np.concatenate(a).astype(np.int64) for a in (starts, ends))
    order = np.argsort(start)
    start, end = start[order].reshape(CALLS, -1), end[order].reshape(CALLS, -1)
    sums = (end - start).sum(axis=1) / 1e6
    spans = (end.max(axis=1) - start.min(axis=1)) / 1e6
    return float(np.median(sums)), float(np.median(spans)), start.shape[1]


def compare(name: str, f: Call, args: tuple[Any, ...], wait: Wait) -> None:
    call = lambda: f(*args)  # noqa: E731
    for _ in range(3):
        wait(call())
    _, sums = thence.measure(f, iterations=CALLS)(*args)
    _, events = thence.measure(f, mode="events", iterations=CALLS)(*args)
    ref_sum, ref_span, count = reference(call, wait)
    _, listed = thence.measure(f, aggregate=False)(*args)
    cupti_ms, events_ms = statistics.median(sums), statistics.median(events)
    judge(
        len(listed) == count and abs(cupti_ms - ref_sum) <= max(MAX_ERROR * ref_sum, MAX_ERROR_MS),
        f"{name:34} {count:5} {cupti_ms:9.4f} {ref_sum:9.4f} {cupti_ms / ref_sum:7.3f}"
        f" {events_ms:9.4f} {ref_span:9.4f} {events_ms / ref_span:7.3f}"
        f" {1e3 * (events_ms - ref_span):+8.1f} {sum(ms for _, ms in listed):9.4f}",
    )
    between(sums, events, ref_span)


def between(sums: list[Any], events: list[Any], ref_span: float) -> None:
    """Prints what lies between the two modes, as the results state it; their parts must add up."""
    for ms in sums:
        whole = ms.kernels_ms + ms.copies_ms - ms.overlap_ms + ms.gaps_ms
        assert abs(whole - ms.span_ms) < 1e-6, ms.to_json()
    parts = ("gaps_ms", "copies_ms", "overlap_ms", "span_ms", "before_ms", "after_ms")
    unknown = sum(ms.before_ms is None for ms in sums)
    medians = {
        name: statistics.median(getattr(ms, name) for ms in sums if ms.before_ms is not None)
        for name in parts
        if unknown < len(sums)
    }
    text = ", ".join(f"{name[:-3]} {1e3 * value:.1f}" for name, value in medians.items())
    waiting = [ms.waiting_for_host_ms for ms in events if ms.waiting_for_host_ms is not None]
    said = f"{1e3 * statistics.median(waiting):.1f}" if waiting else "unknown"
    print(
        f"    us: {text}; span by CUPTI's records {1e3 * ref_span:.1f}; host and GPU clocks contradict each other in "
        f"{unknown} of {len(sums)} calls; mode events: waiting for the host at most {said}",
        flush=True,
    )


def heading(title: str) -> None:
    print(f"\n{title}")
    print(
        f"{'function':34} {'kern':>5} {'cupti':>9} {'sum':>9} {'ratio':>7} {'events':>9} {'span':>9}"
        f" {'ratio':>7} {'diff us':>8} {'list':>9}   (ms)"
    )


def torch_functions() -> None:
    import torch

    heading(f"torch {torch.__version__}")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    wait = lambda _out: torch.cuda.synchronize()  # noqa: E731
    for n in (256, 1024, 4096, 8192):
        x = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
        compare(f"matmul {n}", torch.matmul, (x, x), wait)

    single = [thence.measure(torch.matmul, "events")(x, x)[1] for _ in range(6)]
    print("the last one, six single calls in mode events:", [round(ms, 4) for ms in single])

    def chain(y: Any) -> Any:
        for _ in range(20):
            y = torch.tanh(y) * 1.01
        return y

    for n in (1 << 14, 1 << 20, 1 << 24, 1 << 27):
        y = torch.randn(n, device="cuda")
        compare(f"40 elementwise, {n}", chain, (y,), wait)
    block = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)).cuda()
    x = torch.randn(4096, 1024, device="cuda")
    compare("MLP 4096 x 1024", block, (x,), wait)
    try:
        compare("MLP, torch.compile", torch.compile(block), (x,), wait)
    except Exception as error:  # noqa: BLE001 - no compiler on some machines
        print(f"torch.compile: {type(error).__name__}: {str(error)[:90]}")
    y = torch.randn(1 << 16, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        chain(y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(y)
    compare("40 elementwise, graph replay", graph.replay, (), wait)
    with torch.cuda.stream(side):
        compare("matmul 4096, on a side stream", torch.matmul, (x[:, :1024], x.T), wait)


def jax_functions() -> None:
    import jax
    import jax.numpy as jnp

    heading(f"jax {jax.__version__}")
    wait = jax.block_until_ready
    for n in (256, 1024, 4096, 8192):
        x = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
        compare(f"matmul {n}", jax.jit(lambda a, b: a @ b), (x, x), wait)
    for n in (1 << 14, 1 << 20, 1 << 24, 1 << 27):
        y = jnp.linspace(0, 1, n)
        compare(f"elementwise, fused, {n}", jax.jit(lambda y: jnp.tanh(y) * 1.01 + y), (y,), wait)

    def layers(x: Any, ws: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w)
            x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        return x

    for n in (256, 2048):
        ws = [jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(8)]
        x = jax.random.normal(jax.random.key(9), (n, n), jnp.bfloat16)
        compare(f"8 layers, {n}", jax.jit(layers), (x, ws), wait)
        step = jax.jit(jax.value_and_grad(lambda x, ws: layers(x, ws).astype(jnp.float32).sum()))
        compare(f"8 layers with gradient, {n}", step, (x, ws), wait)
    out, ms = thence.measure(layers)(x, ws)
    print(f"the same not jitted: {ms:.4f} ms, output {out.shape}")
    _, listed = thence.measure(jax.jit(layers), aggregate=False)(x, ws)
    print("list:", [(name[:40], round(ms, 4)) for name, ms in listed[:4]], "...")


def beside_a_profiler() -> None:
    import torch

    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    f = torch.matmul
    _, before = thence.measure(f, mode="events")(x, x)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        _, during = thence.measure(f, mode="events")(x, x)
        try:
            thence.measure(f)(x, x)
            judge(False, "CUPTI was free while torch.profiler ran")
        except thence.MissingRequirement as error:
            judge(True, f"while torch.profiler runs, mode='cupti': {error}")
    print(f"mode='events': {before:.4f} ms before, {during:.4f} ms while torch.profiler runs")
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    print(f"torch.profiler itself still saw {len(kernels)} device events")
    try:
        _, ms = thence.measure(f)(x, x)
        print(f"after torch.profiler, mode='cupti': {ms:.4f} ms")
    except thence.MissingRequirement as error:
        print(f"after torch.profiler, mode='cupti': {error}")


def profiler_after_measure() -> None:
    import torch

    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    thence.measure(torch.matmul)(x, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.matmul(x, x)
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    judge(bool(kernels), f"torch.profiler after mode='cupti' sees {len(kernels)} device events")


if __name__ == "__main__":
    options = documented_parser(__doc__)
    options.add_argument("frameworks", nargs="*", metavar="FRAMEWORK", help="torch, jax or both")
    given = options.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    begin = time.perf_counter()
    wanted = given.frameworks or ["torch", "jax"]
    if len(wanted) > 1:  # torch.profiler keeps CUPTI: a process for each
        for framework in wanted:
            done = subprocess.run([sys.executable, __file__, framework], check=False)
            judge(done.returncode == 0, f"functions of {framework}")
    elif wanted == ["torch"]:
        torch_functions()
        profiler_after_measure()
        beside_a_profiler()
    else:
        jax_functions()
    print(f"\n{time.perf_counter() - begin:.0f} s", flush=True)
    end()
