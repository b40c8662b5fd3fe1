"""In-kernel profiles on a GPU: true times, the cost of an event, overflow, real buffers for the tests.

    python benchmarks/gpu_inside.py [FOLDER [PART...]]

Compares, for kernels of CuPy, Triton, Pallas and raw Mosaic GPU, the time from the first start to the
last end inside with what CUPTI says of the same launch. Buffers go to FOLDER, where it is given.
"""

from __future__ import annotations

import ctypes
import gzip
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import polars as pl

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from thence.errors import ThenceError
from thence.inside.decoding import decode
from thence.inside.files import save
from thence.recorder import cupti
from thence.recorder.layouts import KERNEL
from thence.recorder.walking import Walker

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.inside.decoding import Decoded
    from thence.inside.description import Description

EXAMPLES = Path(__file__).parent.parent / "examples"
RESULTS: list[str] = []
Run = tuple[np.ndarray[Any, Any], "Description"]


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Spans:
    """Start and end of kernels by CUPTI, in ns of the system clock."""

    def __enter__(self) -> Self:
        self._cupti = cupti.load()
        self._memory: list[Any] = []
        self._full: list[tuple[int, int]] = []
        self._subscriber = self._cupti.subscribe()
        self._cupti.register(self._requested, self._completed)
        self._cupti.enable(KERNEL)
        return self

    def __exit__(self, *_: object) -> None:
        self._cupti.disable(KERNEL)
        self._cupti.unsubscribe(self._subscriber)
        self._cupti.finalize()

    def _requested(self, buffer: Any, size: Any, most: Any) -> None:
        self._memory.append((ctypes.c_uint64 * (1 << 17))())
        buffer[0], size[0], most[0] = ctypes.addressof(self._memory[-1]), 1 << 20, 0

    def _completed(self, _c: Any, _s: int, buffer: int | None, _size: int, valid: int) -> None:
        if buffer is not None:
            self._full.append((buffer, valid))

    def spans(self, count: int) -> list[tuple[int, int]]:
        """(start, end) in ns of the one kernel that ran ``count`` times, in order."""
        self._cupti.flush(unfinished=True)
        found: dict[str, list[tuple[int, int]]] = {}
        walker = Walker(self._cupti)
        for address, valid in self._full:
            for kind, columns in walker.read(address, valid):
                if kind != KERNEL:
                    continue
                for pointer, start, end in zip(
                    columns["name"], columns["start"], columns["end"], strict=True
                ):
                    name = ctypes.string_at(int(pointer)).decode(errors="replace")
                    found.setdefault(name, []).append((int(start), int(end)))
        self._full.clear()
        fitting = [name for name, spans in found.items() if len(spans) == count]
        for hint in ("smooth", "gemm", "mosaic", "body", "kernel", ""):
            named = [name for name in fitting if hint in name]
            if len(named) == 1:
                return sorted(found[named[0]])
        said(f"no one kernel ran {count} times: { {n: len(s) for n, s in found.items()} }")
        return []


def said(text: str) -> None:
    RESULTS.append(text)
    print(text, flush=True)


def judge(
    label: str, words: np.ndarray[Any, Any], description: Description, span: tuple[int, int]
) -> Decoded:
    """Whether first start to last end is what CUPTI says, within 5 % or 2 us."""
    start, end = span
    decoded = decode(words, description)
    ranges = decoded.ranges
    first = int(ranges["start_ns"].min())
    last = int((ranges["start_ns"] + ranges["duration_ns"]).max())
    begun, ended = int(decoded.traces["start_ns"].min()), int(decoded.traces["end_ns"].max())
    took, inside = end - start, last - first
    off = abs(inside - took)
    verdict = "ok" if off <= max(0.05 * took, 2000) else "OFF"
    shift = (
        f"; globaltimer - CUPTI: start {begun - start:+,} ns, end {ended - end:+,} ns"
        if decoded.timer_bits == 64
        else ""
    )
    said(
        f"{label}: CUPTI {took:,} ns, inside {inside:,} ns, off {off:,} ns"
        f" ({100 * off / took:.1f} %) {verdict}; traces {ended - begun:,} ns{shift}"
    )
    return decoded


def compare(label: str, work: Callable[[], list[Run]], folder: Path | None, kept: str = "") -> None:
    work()  # compiled, warm
    with Spans() as kernels:
        runs = work()
        spans = kernels.spans(len(runs))
    said(f"{label}: {len(runs)} buffers, {len(spans)} kernels in CUPTI")
    for i, ((words, description), span) in enumerate(zip(runs, spans, strict=False)):
        if folder is not None and kept and i == len(runs) - 1:
            save(folder / kept, words, description)
        decoded = judge(f"{label} run {i}", words, description, span)
        ranges = decoded.ranges
        if i == 0:
            means = ranges.group_by("name").agg(pl.col("duration_ns").mean()).sort("name")
            said(
                f"    {decoded.traces.height} traces, {ranges.height} ranges, mean ns: "
                + ", ".join(
                    f"{n} {t:.0f}" for n, t in zip(means["name"], means["duration_ns"], strict=True)
                )
                + f"; overhead {decoded.overhead_cycles} cycles"
                + "".join(f"; {w}" for w in decoded.warnings)
            )


def of_launches(profile: Any) -> list[Run]:
    return [(launch.words(), launch.description) for launch in profile.launches]


def cupy_kernels(folder: Path | None) -> None:
    module = example("inside_cupy")
    for blocks, rounds, kept in ((16, 50, "cupy.npz"), (264, 200, ""), (4096, 2000, "")):
        compare(
            f"CuPy {blocks} blocks",
            lambda b=blocks, r=rounds: of_launches(module.run(b, r, repeats=2)),
            folder,
            kept,
        )
    for scope, staged in (("block", True), ("warpgroup", True), ("warp", False)):
        compare(
            f"CuPy {scope} staged={staged}",
            lambda s=scope, g=staged: of_launches(module.run(264, 200, scope=s, staged=g)),
            folder,
        )


def triton_kernels(folder: Path | None) -> None:
    module = example("inside_triton")
    for blocks, rounds, kept in ((64, 50, "triton.npz"), (264, 200, ""), (4096, 1000, "")):
        compare(
            f"Triton {blocks} blocks",
            lambda b=blocks, r=rounds: of_launches(module.run(b, r, repeats=2)),
            folder,
            kept,
        )


def pallas_kernels(folder: Path | None) -> None:
    module = example("inside_pallas")

    def work(blocks: int) -> list[Run]:
        return [(e.words, e.description) for e in module.run(blocks, repeats=3).executions]

    for blocks, kept in ((32, "pallas.npz"), (264, ""), (4096, ""), (65536, "")):
        compare(f"Pallas {blocks} blocks", lambda b=blocks: work(b), folder, kept)


def raw_mosaic(folder: Path | None) -> None:
    import jax
    import jax.numpy as jnp
    from jax._src.interpreters import mlir
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, gpu, memref

    from thence.inside import mosaic

    blocks, threads = 16, 256
    shape = jax.ShapeDtypeStruct((blocks * threads,), jnp.float32)
    x = jnp.arange(blocks * threads, dtype=jnp.float32)
    for scope in ("warpgroup", "warp"):
        spec = mosaic.ProfilerSpec(capacity=16, scope=scope, kernel="scale")

        def body(ctx: Any, x: Any, y: Any, _: Any) -> None:
            index = ir.IndexType.get()
            size = arith.constant(index, threads)
            i = arith.addi(
                arith.muli(gpu.block_id(gpu.Dimension.x), size), gpu.thread_id(gpu.Dimension.x)
            )
            with ctx.named_region("load"):
                value = memref.load(x, [i])
            with ctx.named_region("compute"):
                for _ in range(200):
                    value = arith.addf(value, arith.mulf(value, value))
            with ctx.named_region("store"):
                memref.store(value, y, [i])

        with mlir.make_ir_context(), ir.Location.unknown():
            kernel = mgpu.as_gpu_kernel(
                body, (blocks, 1, 1), (threads, 1, 1), shape, shape, (), prof_spec=spec
            )

        def work(spec: Any = spec, kernel: Any = kernel) -> list[Run]:
            spec.executions.clear()
            kernel(x).block_until_ready()
            kernel(x).block_until_ready()
            jax.effects_barrier()
            return list(spec.executions)

        kept = "mosaic.npz" if scope == "warp" else ""
        compare(f"raw Mosaic {scope}", work, folder, kept)


def overhead(_: Path | None) -> None:
    import cupy

    from thence.inside import cuda
    from thence.inside import triton as inside_triton

    said(
        f"an event takes: CUDA {cuda.event_overhead():.0f} cycles,"
        f" Triton {inside_triton.event_overhead():.0f} cycles"
    )
    source = """
    extern "C" __global__ void loop(THENCE_PARAMETERS) {
        THENCE_KERNEL();
        #pragma unroll 1
        for (int i = 0; i < 200; ++i) { THENCE_BEGIN("a"); THENCE_END("a"); }
    }"""
    profile = cuda.Profile(source, block=32, capacity=400, overhead_cycles=0)
    kernel = cupy.RawKernel(profile.source, "loop")
    for _ in range(3):
        launch = profile.launch(1)
        kernel((1,), (32,), launch.arguments)
    clocks = launch.words()[17::2]
    steps = np.diff(clocks)
    said(
        f"in a loop: begin to end {np.median(steps[::2]):.0f}, end to begin {np.median(steps[1::2]):.0f}"
    )
    module = example("inside_cupy")
    x = cupy.random.rand(264 * 256, dtype=cupy.float32)
    for define in ("", "#define THENCE_OFF\n"):
        profile = cuda.Profile(module.SOURCE, block=256, capacity=8, overhead_cycles=0)
        kernel = cupy.RawKernel(define + profile.source, "smooth")
        launch = profile.launch(264)
        with Spans() as kernels:
            for _ in range(20):
                kernel((264,), (256,), (x, x, cupy.int32(200), *launch.arguments))
            cupy.cuda.Device().synchronize()
            spans = kernels.spans(20)
        took = np.median([end - start for start, end in spans])
        said(
            f"{'without' if define else 'with'} events: {took:,.0f} ns (CUPTI, median of {len(spans)})"
        )


def overflow(folder: Path | None) -> None:
    import cupy

    from thence.inside import cuda

    source = """
    extern "C" __global__ void crowded(unsigned int* bad, THENCE_PARAMETERS) {
        __shared__ unsigned int before[256];
        before[threadIdx.x] = 0xABCD0000u + threadIdx.x;
        THENCE_KERNEL();
        __shared__ unsigned int after[256];
        after[threadIdx.x] = 0x12340000u + threadIdx.x;
        if (threadIdx.x / 32 == 3) return;  // a warp that leaves early
        for (int i = 0; i <= threadIdx.x / 32; ++i) { THENCE_RANGE("r"); }
        if (before[threadIdx.x] != 0xABCD0000u + threadIdx.x) atomicAdd(bad, 1);
        if (after[threadIdx.x] != 0x12340000u + threadIdx.x) atomicAdd(bad, 1);
    }"""
    for staged in (True, False):
        profile = cuda.Profile(source, block=256, capacity=2, staged=staged, overhead_cycles=0)
        kernel = cupy.RawKernel(profile.source, "crowded")
        bad = cupy.zeros(1, dtype=cupy.uint32)
        launch = profile.launch((3, 2))
        kernel((3, 2, 2), (256,), (bad, *launch.arguments))  # twice the blocks there is room for
        words = launch.words().reshape(6, 8, 20)
        events, dropped = words[..., 5], words[..., 6]
        ranges = np.where(np.arange(8) == 3, 0, np.arange(1, 9))
        right = (
            (events == np.minimum(2 * ranges, 2)).all()
            and (dropped == np.maximum(2 * ranges - 2, 0)).all()
            and (words[..., 0] == 0x7E4CE001).all()
            and (words[..., 3] == np.arange(6)[:, None]).all()
            and (words[..., 10] != 0).all()
        )
        said(
            f"overflow, capacity 2, staged={staged}: records {'right' if right else 'WRONG'},"
            f" {int(bad[0])} corrupted neighbours, dropped {int(dropped.sum())}"
        )
        if folder is not None and staged:
            save(folder / "overflow.npz", launch.words(), launch.description)


def gemm(folder: Path | None) -> None:
    module = example("inside_gemm")

    def work(**options: Any) -> list[Run]:
        profile, error = module.run(**options)
        said(f"GEMM pipeline {options}: relative error {error:.1e}")
        return of_launches(profile)

    for options in ({}, {"staged": True}, {"depth": 2048}):
        work(**options)
        with Spans() as kernels:
            ((words, description),) = work(**options)
            span = kernels.spans(3)[-1]
        if folder is not None and not options:
            save(folder / "gemm.npz", words, description)
        decoded = judge(f"GEMM pipeline {options}", words, description, span)
        totals = decoded.ranges.group_by("name").agg(pl.col("net_ns").sum()).sort("name")
        parts = zip(totals["name"], totals["net_ns"], strict=True)
        said("    " + ", ".join(f"{name} {ns / 1e6:.3f} ms" for name, ns in parts))


def torch_extension(_: Path | None) -> None:
    import torch
    from torch.utils.cpp_extension import load_inline

    from thence.inside import cuda

    body = example("inside_cupy").SOURCE.replace('extern "C" ', "")
    host = """
    void run(torch::Tensor x, torch::Tensor y, torch::Tensor events, int64_t blocks) {
        smooth<<<x.numel() / 256, 256, 0, at::cuda::getCurrentCUDAStream()>>>(
            x.data_ptr<float>(), y.data_ptr<float>(), 50,
            reinterpret_cast<unsigned int*>(events.data_ptr<int>()), blocks);
    }"""
    profile = cuda.Profile(body, block=256, capacity=8, kernel="smooth")
    module = load_inline(
        "thence_torch",
        cpp_sources="void run(torch::Tensor x, torch::Tensor y, torch::Tensor events, int64_t blocks);",
        cuda_sources="#include <torch/extension.h>\n#include <ATen/cuda/CUDAContext.h>\n"
        + profile.source
        + host,
        functions=["run"],
    )
    x = torch.rand(64 * 256, device="cuda")

    def work() -> list[Run]:
        profile.launches.clear()
        for _ in range(2):
            module.run(x, torch.empty_like(x), *profile.launch(64, arrays="torch").arguments)
        return of_launches(profile)

    compare("PyTorch extension", work, None)


def pallas_variants(_: Path | None) -> None:
    import jax
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from thence.inside.pallas_kernels import pallas

    module = example("inside_pallas")
    x = jax.random.uniform(jax.random.key(0), (8 * module.SIZE,))
    made = {
        "out_type": jax.ShapeDtypeStruct(x.shape, x.dtype),
        "grid": (8,),
        "grid_names": ("blocks",),
    }
    original = plgpu.kernel
    for label, scope in (("traces of warps", "warp"), ("profile.params() given", "warpgroup")):
        with pallas(6, scope=scope) as profile:
            if scope == "warp":
                kernel = plgpu.kernel(module.body, **made)
            else:  # as in a module that imported the function before
                kernel = original(module.body, **made, compiler_params=profile.params())
            run = jax.jit(kernel)
            run(x).block_until_ready()
            run(x).block_until_ready()
        run(x).block_until_ready()
        jax.effects_barrier()
        decoded = [execution.decode() for execution in profile.executions]
        said(
            f"Pallas, {label}: {len(decoded)} executions of 2 inside and 1 outside, traces"
            f" {[d.traces.height for d in decoded]}, ranges {[d.ranges.height for d in decoded]},"
            f" {decoded[0].description.names}, {decoded[0].warnings}"
        )


def merging(folder: Path | None) -> None:
    """Records and profiles inside at the same time; every range must lie in its kernel's slice."""
    import thence

    modules = {name: example(f"inside_{name}") for name in ("cupy", "triton", "pallas")}
    for label, blocks, repeats in (("small", (4, 16, 16), 3), ("large", (264, 264, 264), 8)):

        def work(blocks: Any = blocks, repeats: int = repeats) -> dict[str, list[Run]]:
            return {
                "cupy": of_launches(modules["cupy"].run(blocks[0], 50, repeats=repeats)),
                "triton": of_launches(modules["triton"].run(blocks[1], 50, repeats=repeats)),
                "pallas": [
                    (e.words, e.description)
                    for e in modules["pallas"].run(blocks[2], repeats=repeats).executions
                ],
            }

        work()
        with tempfile.TemporaryDirectory() as directory:
            with thence.record(directory) as recording:
                runs = work()
            trace = recording.open()
            kept = None if folder is None or label != "small" else folder / "merge"
            parts = []
            for name, of_kernel in runs.items():
                for i, (words, description) in enumerate(of_kernel):
                    parts.append((f"{name}-{i}.npz", decode(words, description)))
                    if kept is not None:
                        kept.mkdir(exist_ok=True)
                        save(kept / f"{name}-{i}.npz", words, description)
            if kept is not None:
                scrubbed(trace.timeline(), kept / "trace.json.gz")
            said(f"merging {label}: {trace.gpu.height} activities; {trace.meta.warnings}")
            check_merged(trace, parts, label, Path(directory))


def check_merged(trace: Any, parts: list[Any], label: str, directory: Path) -> None:
    """Launches found for all buffers and for each alone, and the ranges of the files that are written."""
    from thence.analysis.inside_launches import find_launches, span
    from thence.analysis.inside_timeline import merged
    from thence.writers.files import write_timeline

    recorded = trace.timeline()
    right = 0
    for name, decoded in parts:
        try:
            (place,) = find_launches(recorded, [(name, decoded)])
        except ThenceError as error:
            said(f"merging {label}: {name} alone: {error}; {decoded.description.launch}")
            continue
        right += place.number == number_of(name)
        if number_of(name) == 1:
            said(f"merging {label}, alone: {place.said(name)}")
    said(f"merging {label}: {right} of {len(parts)} buffers alone find their launch")
    timeline = merged(recorded, parts)
    for ending in ("json", "pftrace"):
        write_timeline(timeline, directory / f"all.{ending}")
    if len(sys.argv) > 1 and label == "small":
        write_timeline(timeline, Path(sys.argv[1]) / "all.pftrace")
    events = json.loads((directory / "all.json").read_bytes())["traceEvents"]
    ranges = [e for e in events if e.get("cat") == "in_kernel"]
    kernels = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel"]
    outside = sum(
        not any(start - 1 <= e["ts"] and e["ts"] + e["dur"] <= end + 1 for start, end in kernels)
        for e in ranges
    )
    said(f"merging {label}: {len(ranges)} ranges in Chrome JSON, {outside} outside of any slice")
    worst = 0
    places = find_launches(recorded, parts)
    for (name, decoded), place, phases in zip(parts, places, timeline.inside, strict=True):
        if place.number != number_of(name):
            said(f"merging {label}, together: {name} is WRONG: {place.number}")
        both = sum(span(decoded)) + 2 * place.moved_ns  # start and end of the slice
        ranges_end = (phases.ranges["start_ns"] + phases.ranges["duration_ns"]).max()
        before = (both - place.slice_ns) // 2 - int(phases.ranges["start_ns"].min())
        after = int(ranges_end) - (both + place.slice_ns) // 2
        worst = max(worst, before, after)
    said(f"merging {label}: ranges are outside of their kernel's slice by {worst} ns at most")


def number_of(name: str) -> int:
    return int(name.removesuffix(".npz").split("-")[1])


def scrubbed(recorded: Any, path: Path) -> None:
    """Kernels and the calls that launched them, as the Kineto JSON of a small test."""
    tables = recorded.tables
    calls = tables.host.filter(pl.col("category").is_in(["runtime", "driver"]))
    gpu = tables.gpu.filter(pl.col("kind") == "kernel")
    calls = calls.filter(pl.col("correlation").is_in(gpu["correlation"].implode()))
    events: list[dict[str, Any]] = [
        {
            "ph": "X", "cat": "cuda_runtime", "name": row["name"], "pid": 1, "tid": 1,
            "ts": row["start"] / 1000, "dur": row["duration"] / 1000,
            "args": {"correlation": row["correlation"]},
        }
        for row in calls.iter_rows(named=True)
    ] + [
        {
            "ph": "X", "cat": "kernel", "name": row["name"], "pid": row["device"], "tid": row["stream"],
            "ts": row["start"] / 1000, "dur": row["duration"] / 1000,
            "args": {
                "device": row["device"], "stream": row["stream"], "correlation": row["correlation"],
                "grid": row["grid"], "block": row["block"],
            },
        }
        for row in gpu.iter_rows(named=True)
    ]  # fmt: skip
    document = {
        "schemaVersion": 1,
        "baseTimeNanoseconds": tables.meta.epoch_ns,
        "traceEvents": events,
    }
    path.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))


PARTS = (
    cupy_kernels,
    triton_kernels,
    pallas_kernels,
    pallas_variants,
    raw_mosaic,
    overhead,
    overflow,
    gemm,
    torch_extension,
    merging,
)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if len(sys.argv) > 2 and part.__name__ not in sys.argv[2:]:
            continue
        try:
            part(folder)
        except Exception:  # noqa: BLE001 - the other parts still have something to say
            said(f"{part.__name__} FAILED: " + traceback.format_exc()[-900:])
    print("\n=== results ===", *RESULTS, sep="\n")


if __name__ == "__main__":
    main()
