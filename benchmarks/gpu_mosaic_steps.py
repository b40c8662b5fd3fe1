"""The steps of a user of JAX's Mosaic GPU profiler, done with it and with thence, on one kernel.

    python benchmarks/gpu_mosaic_steps.py FOLDER            # needs a Hopper GPU or newer, and jax 0.8 or newer
    python benchmarks/gpu_mosaic_steps.py FOLDER check      # anywhere: decodes what thence saved

JAX: ``profile_space`` and ``profile_dir`` among the compiler's parameters, a run, the file of Chrome events; and
``profiler.measure``. thence: the run within ``thence.inside.pallas``, ``profile.save``; and `thence.measure`.
Printed are the ranges of each side by name, and the times of one function by both calls in both modes.
"""

from __future__ import annotations

import collections
import inspect
import json
import runpy
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from command_line import documented_parser

if __name__ == "__main__":
    OPTIONS = documented_parser(__doc__)
    OPTIONS.add_argument("folder", type=Path, metavar="FOLDER", help="of what each profiler wrote")
    OPTIONS.add_argument("check", nargs="?", choices=("check",), help="only decode what is there")
    GIVEN = OPTIONS.parse_args()

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler as jax_profiler
from jax.experimental.pallas import mosaic_gpu as plgpu

import thence

BLOCKS, SPACE, REPEATS = 64, 6, 20


def kernel_of(module: Any, x: Any, **given: Any) -> Any:
    """The example's kernel, compiled anew."""
    return jax.jit(
        plgpu.kernel(
            module.body,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(BLOCKS,),
            grid_names=("blocks",),
            **given,
        )
    )


def with_jax(module: Any, x: Any, folder: Path) -> dict[str, int]:
    """Ranges by name in the file that JAX writes."""
    folder.mkdir(parents=True, exist_ok=True)
    parameters = plgpu.CompilerParams(profile_space=SPACE, profile_dir=str(folder))
    run = kernel_of(module, x, compiler_params=parameters)
    run(x).block_until_ready()
    jax.effects_barrier()
    (file,) = folder.glob("*-trace.json")
    events = json.loads(file.read_text())["traceEvents"]
    return dict(collections.Counter(event["name"] for event in events if event["ph"] in "BX"))


def with_thence(module: Any, x: Any, folder: Path) -> dict[str, int]:
    """Ranges by name in the profile of the same kernel."""
    with thence.inside.pallas(profile_space=SPACE) as profile:
        run = kernel_of(module, x)
        run(x).block_until_ready()
    jax.effects_barrier()
    print("saved", *profile.save(folder / "kernel.npz"))
    (execution,) = profile.executions
    ranges = execution.decode().ranges
    return dict(collections.Counter(ranges["name"].cast(str).to_list()))


def measured(call: Any, x: Any) -> tuple[float, float]:
    """Median and lowest time of a function in ms, and what it returns must be the function's result."""
    times = []
    for _ in range(REPEATS):
        result, ms = call(x)
        times.append(ms)
        assert bool(jnp.isfinite(result).all())
    return statistics.median(times), min(times)


def check(folder: Path) -> None:
    """Ranges by name in the profile that thence saved."""
    ranges = thence.inside.open(folder / "kernel.npz").ranges
    print("ranges of thence:    ", dict(collections.Counter(ranges["name"].cast(str).to_list())))


def main() -> None:
    folder = GIVEN.folder
    if GIVEN.check:
        check(folder)
        return
    examples = Path(__file__).parent.parent / "examples"
    module = SimpleNamespace(**runpy.run_path(str(examples / "inside_pallas.py")))
    x = jax.random.uniform(jax.random.key(0), (BLOCKS * module.SIZE,))
    jax_ranges = with_jax(module, x, folder / "jax")
    print("ranges of JAX's file:", jax_ranges)
    try:
        print("ranges of thence:    ", with_thence(module, x, folder))
    except ImportError as error:  # decoding needs Polars, which the machine with the GPU may lack
        print("thence's profile was not decoded here:", error)
    big = jnp.ones((4096, 4096), jnp.bfloat16)
    step = jax.jit(lambda a: jnp.tanh(a @ a) @ a)
    step(big).block_until_ready()
    has_modes = "mode" in inspect.signature(jax_profiler.measure).parameters
    for mode in ("cupti", "events"):
        theirs_given = {"mode": mode} if has_modes else {}  # jax 0.11 has kept CUPTI alone
        ours = measured(thence.measure(step, mode=mode), big)
        theirs = measured(jax_profiler.measure(step, **theirs_given), big)
        print(
            f"measure({mode}): thence {ours[0]:.4f} ms (least {ours[1]:.4f}), "
            f"jax{'' if has_modes else ' (cupti)'} {theirs[0]:.4f} ms (least {theirs[1]:.4f}), "
            f"ratio {ours[0] / theirs[0]:.4f}"
        )


if __name__ == "__main__":
    main()
