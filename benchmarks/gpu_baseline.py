"""Whether CUPTI can be detached from running programs and attached again, and what graph trace allows.

    python benchmarks/gpu_baseline.py detach [-o OUT.json] [--rounds 200] [--only PROGRAM ...] [--way WAY ...]
    python benchmarks/gpu_baseline.py trace [-o OUT.json]
    python benchmarks/gpu_baseline.py kinds [-o OUT.json] [--rounds 60]

detach: programs of PyTorch and JAX take steps; between two of them CUPTI is attached (subscriber, callbacks, kinds),
and after two more steps detached (synchronise, flush, cuptiFinalize), --rounds times. Each program runs in each way
in a process of its own, so that a crash is a result. Of every attached window: whether all kernels of its steps were
recorded, with an end; whether the numbers of launches that the callback reads are those of the kernels; whether ids
of graphs and of their nodes stay; NVTX ranges; what attaching and detaching took. Ways:

    direct     cuptiUnsubscribe and cuptiFinalize are called by the thread that takes the steps
    callback   cuptiFinalize is called in CUPTI's callback, at the end of a CUDA call of that thread
    pause      kinds are disabled and enabled, and CUPTI stays attached (as thence does where it cannot detach)

trace: CUPTI's kind GRAPH_TRACE (one record for each launch of a graph) beside kernel records: toggled while attached,
and chosen anew at each attachment, for graphs that were instantiated before and after. What a replay costs in each
state.

kinds: what a step costs in each state of CUPTI, by alternation in one process: detached, kernel records alone, with
callbacks of the compiled probe for launches, with CUPTI's records of launches, with NVTX ranges. For JAX programs with
loops in command buffers and beside them, and for an eager training step. Paired differences with 95 % intervals. With
--way profiler, what jax.profiler and torch.profiler add to the same programs.

Needs a GPU and torch; programs of JAX and torch.compile are left out where these are absent. Each part takes some
100 s on 16 cores. Programs share the GPU, so times are no measurements except those of `trace`.
"""

from __future__ import annotations

import collections
import faulthandler
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from command_line import documented_parser
from thence.capture.boundaries.probe import choose_probe
from thence.capture.recorder.options import RecordOptions

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

Step = "Callable[[], object]"
HERE = Path(__file__).resolve()
WAYS = ("direct", "callback", "pause")
KERNEL, MEMCPY, MEMCPY2, MEMSET, MARKER, GRAPH_TRACE = 10, 1, 22, 2, 12, 51
RUNTIME, DRIVER = 5, 4
CALLS = {RUNTIME: 2, DRIVER: 1}
"""Domains of the kinds of calls."""
KINDS = (KERNEL, MEMCPY, MEMCPY2, MEMSET, MARKER)
CHILD_SECONDS, ROUND_SECONDS, KINDS_SECONDS = 80, 30, 15
"""When a child is killed; when it takes no further round, and of `kinds`."""


class Attachment:
    """CUPTI, attached and detached as a recorder would do it."""

    def __init__(self) -> None:
        from thence.capture.cuda.cupti import load
        from thence.capture.recorder.activity_parser import ActivityParser
        from thence.capture.recorder.buffers import Buffers
        from thence.capture.recorder.counting import Counting

        self.cupti = load()
        self.counting, self.buffers = Counting(), Buffers(400 << 20)
        self.parser = ActivityParser(self.cupti)
        self._options = RecordOptions()
        self._attached = False
        self._handle = 0
        self._kinds: tuple[int, ...] = ()
        self.finalize = self.cupti.address("cuptiFinalize")
        self.counter = 0
        self._ids: dict[int, list[int]] = {}

    def attach(self, kinds: tuple[int, ...] = KINDS, *, callbacks: bool = True) -> None:
        from thence.capture.boundaries.probe import Followed
        from thence.capture.cuda.cupti import CuptiError

        cupti = self.cupti
        if not self._attached:
            self._handle = cupti.subscribe(self.counting.callback)
            try:
                cupti.buffers_are_zeroed()
            except CuptiError as error:
                print("buffers:", error, flush=True)
            cupti.register(self.buffers.requested, self.buffers.completed)
            cupti.system_thread_ids()
            if callbacks:
                self.counting.begin(cupti, self._handle)
                self.counting.listen(cupti, self._handle, self._wanted)
            self._attached = True
        for kind in kinds:
            cupti.enable(kind)
            for callback_id in self._unwanted(kind):
                cupti.api(CALLS[kind], callback_id, on=False)
        self._kinds = kinds
        self.counting.follow(Followed.CALLS)
        if self.counting.log is not None:
            self.counter = self.counting.log.note(0)
            self.counting.log.take()

    def _unwanted(self, kind: int) -> list[int]:
        """Functions of which CUPTI shall make no records, as a recorder chooses."""
        if kind not in CALLS:
            return []
        if kind not in self._ids:
            wants = RecordOptions(launches=True).wants_call
            names = self.cupti.callbacks(CALLS[kind])
            self._ids[kind] = [number for number, name in names if not wants(name)]
        return self._ids[kind]

    def _wanted(self, name: str) -> bool:
        return self._options.calls_back(name, launches=True)

    def detach(self, way: str) -> int:
        """Returns what cuptiFinalize returned; 0 if it was not called."""
        from thence.capture.boundaries.probe import Followed
        from thence.capture.cuda.synchronization import synchronize

        self.counting.follow(Followed.NOTHING)
        synchronize(30)
        self.cupti.flush(unfinished=True)
        for kind in self._kinds:
            self.cupti.disable(kind)
        if way == "pause":
            return 0
        self._attached = False
        if way == "callback":
            native: Any = self.counting.compiled
            return int(native.call_at_exit(self.counting.address, self.finalize)[0])
        self.cupti.unsubscribe(self._handle)
        self.cupti.finalize()
        return 0

    def take(self) -> dict[int, dict[str, np.ndarray[Any, Any]]]:
        """Columns of the records so far, by kind; the launches as kind 0."""
        found: dict[int, list[dict[str, np.ndarray[Any, Any]]]] = collections.defaultdict(list)
        while True:
            try:
                filled = self.buffers.filled.get_nowait()
            except Exception:  # noqa: BLE001 - queue.Empty
                break
            if filled is None:
                continue
            for kind, columns in self.parser.read(filled.address, filled.valid_bytes):
                found[kind].append(columns)
            self.buffers.recycle(filled)
        names: dict[str, int] = {}
        calls = self.counting.take_calls(lambda name: names.setdefault(name, len(names)))
        calls["graph"] = np.isin(calls["function"], [n for name, n in names.items() if "GraphLaunch" in name])
        tables = {kind: {c: np.concatenate([p[c] for p in parts]) for c in parts[0]} for kind, parts in found.items()}
        return {**tables, 0: calls}


# Programs: each returns its step.


def eager() -> Any:
    """Training of a small Llama: a thread of autograd launches the backward pass."""
    import torch

    from small_llama import WORDS, Llama

    model = Llama().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    words = torch.randint(0, WORDS, (2, 64), device="cuda")

    def step() -> None:
        torch.cuda.nvtx.range_push("step")
        loss = torch.nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.nvtx.range_pop()

    return step


def threads() -> Any:
    """Three other threads launch all the time, on streams of their own."""
    import torch

    x = torch.ones(512, device="cuda")
    ends = threading.Event()

    def launches() -> None:
        y, stream = torch.ones(4096, device="cuda"), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not ends.is_set():
                for _ in range(20):
                    y.mul_(1.0)
                stream.synchronize()

    for _ in range(3):
        threading.Thread(target=launches, daemon=True).start()

    def step() -> None:
        for _ in range(50):
            x.add_(1)

    step.end = ends.set  # type: ignore[attr-defined]
    return step


def loader() -> Any:
    """A DataLoader whose thread pins memory, beside an eager step."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    inner = eager()
    data = TensorDataset(torch.ones(20_000, 256))
    batches = itertools.chain.from_iterable(
        DataLoader(data, 16, num_workers=2, pin_memory=True) for _ in itertools.count()
    )

    def step() -> None:
        next(batches)[0].cuda(non_blocking=True)
        inner()

    return step


def graphs() -> Any:
    """Replays of two captured graphs, one of them with a side stream, and eager launches."""
    import torch

    x, y = torch.ones(64, device="cuda"), torch.ones(256, 256, device="cuda")
    graph, other, side = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    for _ in range(3):
        x.add_(1)
        y.copy_(y @ y * 0.0 + 1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(40):
            x.add_(1)
    with torch.cuda.graph(other):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul_(1)
        for _ in range(10):
            y.copy_(y @ y * 0.0 + 1)
        torch.cuda.current_stream().wait_stream(side)

    def step() -> None:
        graph.replay()
        x.add_(1)
        other.replay()

    return step


def recaptured() -> Any:
    """A graph that is captured anew every third step, also while CUPTI is detached."""
    import torch

    x = torch.ones(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    count = 0

    def step() -> None:
        nonlocal graph, count
        if count % 3 == 0:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(20):
                    x.add_(1)
        count += 1
        graph.replay()
        graph.replay()

    return step


def compiled(mode: str) -> Any:
    import torch

    from small_llama import WORDS, Llama

    model = Llama(1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=mode != "default")
    words = torch.randint(0, WORDS, (2, 64), device="cuda")
    function = torch.compile(model, mode=mode)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        loss = torch.nn.functional.cross_entropy(function(words).flatten(0, 1), words.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compile_default() -> Any:
    """torch.compile."""
    return compiled("default")


def compile_graphs() -> Any:
    """torch.compile with CUDA graphs."""
    return compiled("reduce-overhead")


def nccl() -> Any:
    """DistributedDataParallel on one rank: NCCL's watchdog thread queries events all the time."""
    import torch

    from small_llama import WORDS, Llama

    folder = tempfile.mkdtemp()
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
    torch.distributed.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(Llama(1).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    words = torch.randint(0, WORDS, (2, 64), device="cuda")
    many = torch.ones(1 << 16, device="cuda")

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
        loss.backward()
        torch.distributed.all_reduce(many)
        optimizer.step()
        optimizer.zero_grad()

    return step


def jax_step(loops: int) -> Any:
    import functools

    import jax
    import jax.numpy as jnp

    @functools.partial(jax.jit, donate_argnums=0)
    def train(x: Any) -> Any:
        y = x
        for _ in range(6):
            y = jnp.sin(y @ x) * 0.1 + jnp.cumsum(y, 0) * 1e-3
        for _ in range(loops):
            y = jax.lax.fori_loop(0, 8, lambda i, z: jnp.cos(z @ x + i) * 0.1, y)
            y = jax.lax.cond(y[0, 0] > 2, lambda z: z * 2, jnp.tanh, y)
        return jnp.tanh(y) * 0.1 + 1e-2

    state = [jnp.ones((256, 256))]
    for _ in range(5):
        state[0] = train(state[0])

    def step() -> None:
        state[0] = train(state[0])

    return step


def jax_buffers() -> Any:
    """JAX with command buffers."""
    return jax_step(0)


def jax_loops() -> Any:
    """JAX with command buffers, loops and branches."""
    return jax_step(2)


def jax_while() -> Any:
    """The same with loops inside of command buffers."""
    return jax_step(2)


def profiled() -> Any:
    """torch.profiler profiles some steps while CUPTI is detached, and gives CUPTI back."""
    import torch

    inner = eager()
    inner_profile = torch.profiler.profile

    def between(number: int) -> str | None:
        if number % 20 != 10:
            return None
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with inner_profile(activities=activities) as profile:
            inner()
            torch.cuda.synchronize()
        devices = sum(event.device_type.name == "CUDA" for event in profile.events())
        for _ in range(3):  # its teardown runs in a callback of a later CUDA call
            inner()
            torch.cuda.synchronize()
        time.sleep(0.05)
        return f"profile with {'kernels' if devices > 50 else f'{devices} activities'}"

    inner.between = between
    return inner


PROGRAMS = {
    one.__name__: one
    for one in (
        eager, threads, loader, graphs, recaptured, compile_default, compile_graphs, nccl, jax_buffers, jax_loops,
        jax_while, profiled,
    )
}  # fmt: skip
ENVIRONMENT = {
    "jax_ode_while": {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=+WHILE"},
    "jax_while": {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=+WHILE"},
    "profiled": {"TEARDOWN_CUPTI": "1"},
}
FLUSHES = ("flush_here", "flush_elsewhere")
"""Further ways, of JAX's programs: cuptiActivityFlushAll(0) after each step on the thread that launches, without
waiting for the device; and by another thread, which is known to crash with loops in command buffers."""


def detach_child(name: str, way: str, rounds: int) -> dict[str, Any]:
    """Attaches and detaches, and returns what was found."""
    step = PROGRAMS[name]()
    for _ in range(6):
        step()
    attachment = Attachment()
    if way in FLUSHES:
        return flush_child(step, attachment, way, rounds)
    windows: list[dict[str, Any]] = []
    said: collections.Counter[str] = collections.Counter()
    began = time.monotonic()
    for number in range(rounds):
        if time.monotonic() - began > ROUND_SECONDS:
            break
        a = time.perf_counter()
        attachment.attach()
        b = time.perf_counter()
        counter = attachment.counter
        step()
        step()
        c = time.perf_counter()
        code = attachment.detach(way)
        d = time.perf_counter()
        if code:
            said[f"cuptiFinalize {code}"] += 1
        windows.append({**facts(name, attachment.take()), "counter": counter, "attach": b - a, "detach": d - c})
        step()
        step()
        between = getattr(step, "between", None)
        answer = None if between is None else between(number)
        if answer:
            said[answer] += 1
        if number % 10 == 0:
            print("round", number, flush=True)
    if hasattr(step, "end"):
        step.end()
    return {**summary(windows), "said": dict(said), "outstanding": attachment.buffers.outstanding}


def facts(name: str, tables: dict[int, dict[str, np.ndarray[Any, Any]]]) -> dict[str, Any]:
    """Of one attached window."""
    nothing = {"correlation": np.zeros(0, int)}
    kernels, calls = tables.get(KERNEL, nothing), tables[0]
    if not len(kernels["correlation"]):
        return {"kernels": 0, "calls": len(calls["correlation"])}
    if name == "threads":  # the others are in the middle of something
        mine = kernels["stream"] == kernels["stream"].min()
        kernels = {column: values[mine] for column, values in kernels.items()}
    numbers, graphed = calls["correlation"].astype(np.int64), kernels["graph"] != 0
    launched = np.isin(kernels["correlation"], numbers)
    replays = np.isin(kernels["correlation"], numbers[calls["graph"]])
    copies = sum(len(tables[kind]["start"]) for kind in (MEMCPY, MEMCPY2, MEMSET) if kind in tables)
    return {
        "kernels": len(kernels["start"]),
        "graphed": int(graphed.sum()),
        "copies": copies,
        "unfinished": int((kernels["end"] == 0).sum()),
        "eager_unmatched": int((~launched & ~graphed).sum()),
        "graphed_unmatched": int((~replays & graphed & (kernels["correlation"] != 0)).sum()),
        "bodies": int((graphed & (kernels["correlation"] == 0)).sum()),
        "graphs": sorted(set(kernels["graph"][graphed].tolist())),
        "nodes": sorted(set(kernels["node"][graphed].tolist())),
        "first": int(kernels["correlation"][kernels["correlation"] > 0].min(initial=1 << 31)),
        "ranges": len(tables[MARKER]["time"]) if MARKER in tables else 0,
        "calls": len(numbers),
        "launch_threads": len(set(calls["thread"].tolist())),
    }


def summary(windows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all windows: the usual value of each count, and how often another was seen."""
    found: dict[str, Any] = {"windows": len(windows)}
    for count in ("kernels", "graphed", "copies", "unfinished", "eager_unmatched", "graphed_unmatched", "bodies",
                  "ranges", "calls", "launch_threads"):  # fmt: skip
        seen = collections.Counter(window.get(count) for window in windows)
        found[count] = dict(seen.most_common(4))
    sets = [(tuple(window.get("graphs", ())), tuple(window.get("nodes", ()))) for window in windows]
    found["distinct_sets_of_graph_ids"] = len({graphs for graphs, _ in sets})
    found["distinct_sets_of_node_ids"] = len({nodes for _, nodes in sets})
    found["graph_ids"] = [list(graphs)[:6] for graphs, _ in sets[:3]]
    found["counters_at_attach"] = [window["counter"] for window in windows[:4]]
    found["first_correlations"] = [window.get("first") for window in windows[:4]]
    for what in ("attach", "detach"):
        values = sorted(window[what] * 1e3 for window in windows)
        if values:
            found[f"{what}_ms"] = [round(values[int(q * (len(values) - 1))], 2) for q in (0, 0.5, 0.9, 1)]
    return found


def flush_child(step: Any, attachment: Attachment, way: str, rounds: int) -> dict[str, Any]:
    attachment.attach()
    over = threading.Event()

    def flush() -> None:
        while not over.wait(0.002):
            attachment.cupti.flush(unfinished=False)

    other = threading.Thread(target=flush, daemon=True)
    if way == "flush_elsewhere":
        other.start()
    kernels, steps, late = 0, 0, []
    for number in range(rounds * 5):
        step()
        steps += 1
        if way == "flush_here":
            attachment.cupti.flush(unfinished=False)
        if number % 20 == 19:
            taken = attachment.take()
            late.append(len(taken[KERNEL]["start"]) if KERNEL in taken else 0)
            kernels += late[-1]
        if number % 100 == 0:
            print("round", number, flush=True)
    over.set()
    attachment.detach("pause")
    rest = attachment.take()
    last = len(rest[KERNEL]["start"]) if KERNEL in rest else 0
    return {"steps": steps, "kernels": kernels + last, "of_these_after_the_end": last, "each_20_steps": late[:10]}


# Graph trace.


def trace_torch(state: str) -> dict[str, Any]:
    """One experiment with graphs of PyTorch; what was reached is printed as it goes."""
    import torch

    x = torch.ones(64, device="cuda")

    def capture() -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(400):
                x.add_(1)
        return graph

    x.add_(1)
    torch.cuda.synchronize()
    return trace_program(state, capture, lambda graph: graph.replay(), torch.cuda.synchronize)


def trace_jax(state: str) -> dict[str, Any]:
    """The same with a command buffer of JAX; it is built at the first calls."""
    import functools

    import jax
    import jax.numpy as jnp

    def capture() -> Any:
        @functools.partial(jax.jit, donate_argnums=0)
        def train(x: Any) -> Any:
            for _ in range(100):
                x = jnp.tanh(x @ x) * 0.1
            return x

        state = [jnp.ones((64, 64))]
        for _ in range(4):
            state[0] = jax.block_until_ready(train(state[0]))
        return train, state

    def replay(made: Any) -> None:
        train, state = made
        state[0] = train(state[0])

    def wait() -> None:
        for array in jax.live_arrays():
            array.block_until_ready()

    return trace_program(state, capture, replay, wait)


BOTH = (*KINDS, GRAPH_TRACE)
REPLAY = ("replay",)
STATES = {
    "kernels, detached": [("capture",), ("attach", KINDS), REPLAY, ("detach",), REPLAY] * 2,
    "toggled, graph before": [("capture",), ("attach", KINDS), REPLAY, ("on",), REPLAY, ("off",), REPLAY],
    "toggled, graph within": [("attach", KINDS), ("capture",), REPLAY, ("on",), REPLAY, ("off",), REPLAY],
    "toggled, graph under trace": [
        ("attach", BOTH), ("capture",), REPLAY, ("off",), REPLAY, ("on",), REPLAY, ("off",), REPLAY
    ],
    "windows, graph before": [
        ("capture",), ("attach", BOTH), REPLAY, ("detach",), ("attach", KINDS), REPLAY, ("detach",),
        *[("attach", BOTH), REPLAY, ("detach",), ("attach", KINDS), REPLAY, ("detach",)] * 20,
    ],
    "windows, graph within": [
        ("attach", KINDS), ("capture",), REPLAY, ("detach",),
        *[("attach", BOTH), REPLAY, ("detach",), ("attach", KINDS), REPLAY, ("detach",)] * 20,
    ],
    "windows, graph under trace": [
        ("attach", BOTH), ("capture",), REPLAY, ("detach",),
        *[("attach", KINDS), REPLAY, ("detach",), ("attach", BOTH), REPLAY, ("detach",)] * 20,
    ],
    "trace without kernels, graph before": [
        ("capture",), ("attach", (MEMCPY, GRAPH_TRACE)), REPLAY, ("detach",), ("attach", KINDS), REPLAY
    ],
    "callback windows, graph before": [
        ("capture",), *[("attach", BOTH), REPLAY, ("back",), ("attach", KINDS), REPLAY, ("back",)] * 20
    ],
}  # fmt: skip
"""What is done, in order; each in a process of its own."""
TIMED = [
    ("capture",),
    *[("attach", KINDS), ("replay",), ("detach",), ("replay",), ("attach", BOTH), ("replay",), ("detach",)] * 30,
]  # fmt: skip
"""The same, alone on the GPU, for times."""


def trace_program(
    state: str, capture: Callable[[], Any], replay: Callable[[Any], None], wait: Callable[[], None]
) -> dict[str, Any]:
    attachment = Attachment()
    made: Any = None
    done, times = [], collections.defaultdict(list)
    for what, *more in TIMED if state == "timed" else STATES[state]:
        print("doing", len(done), what, *more, flush=True)
        if what == "capture":
            made = capture()
        elif what == "attach":
            attachment.attach(*more)
            on = GRAPH_TRACE in more[0]
        elif what in {"detach", "back"}:
            attachment.detach("direct" if what == "detach" else "callback")
        elif what == "on":
            attachment.cupti.enable(GRAPH_TRACE)
            on = True
        elif what == "off":
            attachment.cupti.disable(GRAPH_TRACE)
            on = False
        elif what == "replay":
            wait()
            attachment.take()
            traces = attachment.parser.unknown.get(GRAPH_TRACE, 0)
            begin = time.perf_counter()
            for _ in range(10):
                replay(made)
            wait()
            took = (time.perf_counter() - begin) * 1e5
            if attachment._attached:  # noqa: SLF001 - of this script
                attachment.cupti.flush(unfinished=True)
            tables = attachment.take()
            kernels = len(tables[KERNEL]["start"]) if KERNEL in tables else 0
            kind = "detached" if not attachment._attached else "trace on" if on else "trace off"  # noqa: SLF001
            times[kind].append(took)
            done.append((kind, kernels // 10, attachment.parser.unknown.get(GRAPH_TRACE, 0) - traces))
    seen = collections.Counter(done)
    return {
        "kernels_of_a_replay_and_trace_records_of_10": [[*key, count] for key, count in seen.items()],
        "us_a_replay": {kind: round(statistics.median(values), 1) for kind, values in times.items()},
    }


# Kinds.


def jax_ode() -> Any:
    """An integration by an adaptive loop in JAX: thousands of small graphed kernels in a step."""
    import jax
    import jax.numpy as jnp

    matrix = jax.random.normal(jax.random.key(0), (64, 64)) * 0.1

    @jax.jit
    def solve(y: Any) -> Any:
        def turn(state: Any) -> Any:
            number, y, h = state
            k1 = jnp.tanh(matrix @ y)
            k2 = jnp.tanh(matrix @ (y + h * k1))
            k3 = jnp.tanh(matrix @ (y + h * 0.5 * k2))
            error = jnp.abs(k1 - k3).max()
            y = jax.lax.cond(error < 10.0, lambda z: z + h * (k1 + k2 + k3) * 0.01, lambda z: z * 0.5, y)
            return number + 1, y, jnp.clip(h * 0.99, 1e-3, 1e-1)

        _, y, _ = jax.lax.while_loop(lambda s: s[0] < 300, turn, (0, y, 0.05))
        return y * 0.1

    state = [jnp.ones((64, 32))]

    def step() -> None:
        state[0] = jax.block_until_ready(solve(state[0]))

    return step


def torch_step() -> Any:
    """The eager training step, with the device's work."""
    import torch

    inner = eager()

    def step() -> None:
        inner()
        torch.cuda.synchronize()

    return step


TIMED_PROGRAMS = {"jax_ode": jax_ode, "jax_ode_while": jax_ode, "torch": torch_step}
_KERNELS = (KERNEL, MEMCPY, MEMCPY2, MEMSET)
KIND_STATES: dict[str, tuple[tuple[int, ...], bool] | None] = {
    "detached": None,
    "kernels": (_KERNELS, False),
    "kernels, callbacks": (_KERNELS, True),
    "kernels, records of launches": ((*_KERNELS, RUNTIME, DRIVER), False),
    "kernels, NVTX": ((*_KERNELS, MARKER), False),
    "kernels, callbacks, NVTX": ((*_KERNELS, MARKER), True),
    "kernels, records of launches, NVTX": ((*_KERNELS, MARKER, RUNTIME, DRIVER), False),
}
"""Kinds of records and whether callbacks are made, by the name of the state."""
KIND_WAYS = ("nvtx", "plain", "profiler")
"""Of `kinds`: with NVTX, without, and with jax.profiler or torch.profiler as the only other state than detached."""
KIND_CASES = (
    ("jax_ode", "nvtx"), ("jax_ode", "plain"), ("jax_ode_while", "nvtx"), ("torch", "nvtx"),
    ("jax_ode", "profiler"), ("torch", "profiler"),
)  # fmt: skip


def block(
    step: Any, attachment: Attachment, state: tuple[tuple[int, ...], bool] | None, steps: int
) -> tuple[float, dict[str, int]]:
    """Takes steps in a state; returns ms of a step, and records of a step by kind."""
    if state is not None:
        attachment.attach(state[0], callbacks=state[1])
    step()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    took = (time.perf_counter() - begin) / steps * 1e3
    if state is None:
        return took, {}
    attachment.detach("direct")
    tables = attachment.take()
    return took, {str(kind): max(map(len, table.values())) // (steps + 1) for kind, table in tables.items()}


def profiled_block(step: Any, name: str, steps: int) -> float:
    """Takes steps under the framework's own profiler; returns ms of a step, without the profiler's work at its end."""
    with tempfile.TemporaryDirectory() as folder:
        profile: Any
        if name.startswith("jax"):
            import jax

            profile = jax.profiler.trace(folder)
        else:
            from torch.profiler import profile as torch_profile

            profile = torch_profile()
        with profile:
            step()
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            return (time.perf_counter() - begin) / steps * 1e3


def profiler_child(name: str, rounds: int) -> dict[str, Any]:
    """As `kinds_child`, with the framework's profiler instead of ours: jax.profiler or torch.profiler."""
    os.environ["TEARDOWN_CUPTI"] = "1"  # torch.profiler gives CUPTI back at its end
    step = TIMED_PROGRAMS[name]()
    for _ in range(5):
        step()
    begin = time.perf_counter()
    for _ in range(5):
        step()
    in_a_block = max(3, round(0.03 / ((time.perf_counter() - begin) / 5)))
    times: dict[str, list[float]] = {"detached": [], "profiler": []}
    began = time.monotonic()
    for number in range(rounds):
        if time.monotonic() - began > KINDS_SECONDS:
            break
        for state in list(times) if number % 2 else reversed(times):
            if state == "profiler":
                took = profiled_block(step, name, in_a_block)
            else:
                step()
                begin = time.perf_counter()
                for _ in range(in_a_block):
                    step()
                took = (time.perf_counter() - begin) / in_a_block * 1e3
            times[state].append(took)
    return {"steps_in_a_block": in_a_block, **beside_detached(times)}


def beside_detached(times: dict[str, list[float]]) -> dict[str, Any]:
    """Of each state its median, and by how much its blocks take longer than those of the state detached."""
    plain = np.array(times["detached"])
    found: dict[str, Any] = {"rounds": len(plain)}
    for state, values in times.items():
        more = np.array(values) - plain
        wide = 1.96 * more.std(ddof=1) / len(more) ** 0.5
        found[state] = {
            "median_ms": round(float(np.median(values)), 3),
            "more_ms": [round(float(x), 3) for x in (more.mean() - wide, more.mean(), more.mean() + wide)],
            "median_more_percent": round(float(np.median(more / plain)) * 100, 1),
        }
    return found


def kinds_child(name: str, way: str, rounds: int) -> dict[str, Any]:
    if way == "profiler":
        return profiler_child(name, rounds)
    if way == "nvtx":
        from thence.capture.cuda.libraries import find_libcupti

        os.environ["NVTX_INJECTION64_PATH"] = find_libcupti()
    step = TIMED_PROGRAMS[name]()
    for _ in range(5):
        step()
    attachment = Attachment()
    begin = time.perf_counter()
    for _ in range(5):
        step()
    in_a_block = max(3, round(0.03 / ((time.perf_counter() - begin) / 5)))
    states = {k: v for k, v in KIND_STATES.items() if way == "nvtx" or "NVTX" not in k}
    times: dict[str, list[float]] = {state: [] for state in states}
    counts: dict[str, Any] = {}
    chance, began = random.Random(0), time.monotonic()
    for _ in range(rounds):
        if time.monotonic() - began > KINDS_SECONDS:
            break
        for state in chance.sample(list(states), len(states)):
            took, records = block(step, attachment, states[state], in_a_block)
            times[state].append(took)
            counts[state] = records
    return {"steps_in_a_block": in_a_block, "records_of_a_step": counts, **beside_detached(times)}


# Children.


def child(part: str, name: str, way: str, rounds: int) -> None:
    faulthandler.enable()
    if part == "detach":
        found = detach_child(name, way, rounds)
    elif part == "kinds":
        found = kinds_child(name, way, rounds)
    else:
        found = (trace_torch if name == "torch" else trace_jax)(way)
    print("RESULT " + json.dumps(found), flush=True)
    os._exit(0)  # what a framework does at its end is not the question


def run(part: str, name: str, way: str, rounds: int) -> dict[str, Any]:
    command = [sys.executable, str(HERE), "child", part, name, way, str(rounds)]
    env = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE.parent), *sys.path]),
        **ENVIRONMENT.get(name, {}),
    }
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=env, timeout=CHILD_SECONDS, check=False
        )  # fmt: skip
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, out, err = None, _text(late.stdout), _text(late.stderr)
    lines = out.splitlines()
    results = [line.removeprefix("RESULT ") for line in lines if line.startswith("RESULT ")]
    ended = "too long" if code is None else signal.Signals(-code).name if code < 0 else code
    found: dict[str, Any] = {"part": part, "program": name, "way": way, "ended": ended,
                             "seconds": round(time.monotonic() - begin, 1)}  # fmt: skip
    if results:
        found |= json.loads(results[0])
    if not results or code != 0:
        found |= {"last": lines[-3:], "error": err[-1500:]}
    return found


def _text(content: str | bytes | None) -> str:
    return content.decode(errors="replace") if isinstance(content, bytes) else content or ""


def cases(options: argparse.Namespace) -> Iterator[tuple[str, str, str, int]]:
    if options.part == "trace":
        for name in ("torch", "jax"):
            for state in STATES:
                yield "trace", name, state, 0
        return
    if options.part == "kinds":
        for name, way in KIND_CASES:
            if way in (options.way or KIND_WAYS):
                yield "kinds", name, way, min(options.rounds, 60)
        return
    for name in options.only or PROGRAMS:
        ways = [*(options.way or WAYS), *(FLUSHES if name.startswith("jax") and not options.way else ())]
        for way in ways:
            yield "detach", name, way, options.rounds


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        _, _, part, name, way, rounds = sys.argv
        child(part, name, way, int(rounds))
        return
    parser = documented_parser(__doc__)
    parser.add_argument("part", choices=("detach", "trace", "kinds"))
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--only", nargs="*", choices=tuple(PROGRAMS))
    parser.add_argument("--way", nargs="*", choices=(*WAYS, *FLUSHES, *KIND_WAYS))
    parser.add_argument("--at-once", type=int, default=21, help="processes that run at the same time")
    options = parser.parse_args()
    if choose_probe().compiled is None:
        sys.exit("the compiled probe is not built (pip install -e .), so callbacks cannot be measured")
    all_found = []
    with ThreadPoolExecutor(1 if options.part == "kinds" else options.at_once) as pool:
        for found in pool.map(lambda case: run(*case), cases(options)):
            all_found.append(found)
            print(json.dumps(found), flush=True)
    for name in ("torch", "jax") if options.part == "trace" else ():
        all_found.append(run("trace", name, "timed", 0))
        print(json.dumps(all_found[-1]), flush=True)
    crashed = [f"{one['program']} {one['way']}: {one['ended']}" for one in all_found if one["ended"] != 0]
    print(f"\n{len(all_found)} runs; crashed or failed: {'; '.join(crashed) or 'none'}")
    if options.output:
        options.output.write_text(json.dumps(all_found, indent=1))


if __name__ == "__main__":
    main()
