"""Two dense layers on two CUDA streams, recorded and judged. Needs an NVIDIA GPU and jax 0.6 or newer.

    python examples/jax_two_streams.py FOLDER
    thence streams FOLDER --expect 'GEMM>=2'

``--default`` leaves out on_stream, and the expectation fails. ``--variant grad`` runs forward and
backward pass, ``--variant vmap`` a batch. The layer is Transformer Engine's where that is installed.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

# Inside a CUDA graph (command buffer) a profiler sees the streams of the graph, not those of XLA.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")

import jax
import jax.numpy as jnp

import thence

if TYPE_CHECKING:
    from collections.abc import Callable

try:
    from transformer_engine.jax.dense import dense
except ImportError:

    def dense(x: Any, kernel: Any, bias: Any) -> Any:
        """A dense layer with bias."""
        return x @ kernel + bias


SIZE, STEPS, STREAM = 2048, 20, 1


def program(side: Callable[[Any, Any, Any], Any], variant: str) -> Callable[..., Any]:
    """Two dense layers of one input, the second one as ``side`` runs it."""

    def forward(x: Any, k0: Any, k1: Any, bias: Any) -> Any:
        return dense(x, k0, bias) + side(x, k1, bias)

    def loss(x: Any, k0: Any, k1: Any, bias: Any) -> Any:
        return jnp.square(forward(x, k0, k1, bias).astype(jnp.float32)).mean()

    variants = {
        "forward": forward,
        "grad": jax.grad(loss, argnums=(1, 2, 3)),
        "vmap": jax.vmap(forward, in_axes=(0, None, None, None)),
    }
    return variants[variant]


def arguments(variant: str) -> tuple[Any, ...]:
    """Input, two kernels and a bias, in bfloat16."""
    shape = (4, SIZE // 2, SIZE) if variant == "vmap" else (SIZE, SIZE)
    shapes = (shape, (SIZE, SIZE), (SIZE, SIZE), (SIZE,))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))


def main() -> None:
    """Records, says what the compiler made of the annotation, and judges."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="for the trace")
    parser.add_argument("--default", action="store_true", help="without on_stream")
    parser.add_argument("--variant", choices=("forward", "grad", "vmap"), default="forward")
    options = parser.parse_args()

    side = dense if options.default else thence.jax.on_stream(dense, STREAM)
    given = arguments(options.variant)
    step = jax.jit(program(side, options.variant)).lower(*given).compile()
    print("streams in the compiled program:", thence.jax.stream_of(step))

    jax.block_until_ready(step(*given))
    jax.profiler.start_trace(options.folder)
    for number in range(STEPS):
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            result = step(*given)
    jax.block_until_ready(result)
    jax.profiler.stop_trace()

    (check,) = thence.open(options.folder).streams().check("GEMM>=2")
    print(check)
    sys.exit(0 if check.ok else 1)


if __name__ == "__main__":
    main()
