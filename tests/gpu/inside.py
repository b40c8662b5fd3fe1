"""In-kernel profiles on a GPU: true times, the cost of an event, overflow, real buffers for the tests.

    python tests/gpu/inside.py [FOLDER [PART...]]

Compares, for kernels of CuPy, Triton, Pallas and raw Mosaic GPU, the time from the first start to the
last end inside with what CUPTI says of the same launch. Buffers go to FOLDER, where it is given.
"""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from inside_measuring import RESULTS, Run, Spans, against_cupti, compare, example, of_launches, said
from inside_merging import merging
from support import documented_parser, end, folder_argument, judge
from thence.inside.files import save

if TYPE_CHECKING:
    from pathlib import Path


def cupy_kernels(folder: Path | None) -> None:
    module = example("inside_cupy")
    for blocks, rounds, kept in ((16, 50, "cupy.npz"), (264, 200, ""), (4096, 2000, "")):
        compare(
            f"CuPy {blocks} blocks", lambda b=blocks, r=rounds: of_launches(module.run(b, r, repeats=2)), folder, kept
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
            f"Triton {blocks} blocks", lambda b=blocks, r=rounds: of_launches(module.run(b, r, repeats=2)), folder, kept
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
            i = arith.addi(arith.muli(gpu.block_id(gpu.Dimension.x), size), gpu.thread_id(gpu.Dimension.x))
            with ctx.named_region("load"):
                value = memref.load(x, [i])
            with ctx.named_region("compute"):
                for _ in range(200):
                    value = arith.addf(value, arith.mulf(value, value))
            with ctx.named_region("store"):
                memref.store(value, y, [i])

        with mlir.make_ir_context(), ir.Location.unknown():
            kernel = mgpu.as_gpu_kernel(body, (blocks, 1, 1), (threads, 1, 1), shape, shape, (), prof_spec=spec)

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

    said(f"an event takes: CUDA {cuda.event_overhead():.0f} cycles, Triton {inside_triton.event_overhead():.0f} cycles")
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
    said(f"in a loop: begin to end {np.median(steps[::2]):.0f}, end to begin {np.median(steps[1::2]):.0f}")
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
        said(f"{'without' if define else 'with'} events: {took:,.0f} ns (CUPTI, median of {len(spans)})")


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
        decoded = against_cupti(f"GEMM pipeline {options}", words, description, span)
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
        cuda_sources="#include <torch/extension.h>\n#include <ATen/cuda/CUDAContext.h>\n" + profile.source + host,
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
    made = {"out_type": jax.ShapeDtypeStruct(x.shape, x.dtype), "grid": (8,), "grid_names": ("blocks",)}
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
    options = documented_parser(__doc__)
    folder_argument(options, "for the buffers")
    options.add_argument("parts", nargs="*", metavar="PART", help="all of them without it")
    given = options.parse_args()
    folder = given.folder
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if given.parts and part.__name__ not in given.parts:
            continue
        try:
            part(folder)
        except Exception:  # noqa: BLE001 - the other parts still have something to say
            said(f"{part.__name__} FAILED: " + traceback.format_exc()[-900:])
            judge(False, f"{part.__name__} ran to its end")
        else:
            judge(True, f"{part.__name__} ran to its end")
    print("\n=== results ===", *RESULTS, sep="\n")
    end()


if __name__ == "__main__":
    main()
