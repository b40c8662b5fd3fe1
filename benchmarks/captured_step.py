"""Steps that several benchmarks run: one captured as a CUDA graph, and one of JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def warm_up(torch: Any, step: Callable[[], object]) -> None:
    """Runs the step three times on a stream of its own, as is needed before it is captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)


def captured(torch: Any, step: Callable[[], object]) -> Any:
    """A CUDA graph of the step."""
    warm_up(torch, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def jax_training(rows: int, steps: int = 1, width: int = 1024) -> Callable[[], None]:
    """Training steps of JAX with known products, in command buffers; it waits for the end of the last one.

    Args:
        rows: of the input.
        steps: that one call makes.
        width: columns of the input; inner layers have four times as many.
    """
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 4)
    shapes = 2 * ((width, 4 * width), (4 * width, width))
    inputs = jax.random.normal(keys[0], (rows, width), jnp.bfloat16)
    state = {"weights": [jax.random.normal(k, s, jnp.bfloat16) * 0.02 for k, s in zip(keys, shapes, strict=True)]}

    def loss(weights: Any, inputs: Any) -> Any:
        x = inputs
        for weight in weights:
            x = jax.nn.gelu(x @ weight)
        return (x.astype(jnp.float32) ** 2).mean()

    @jax.jit
    def train_step(weights: Any, inputs: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights, inputs)
        return jax.tree.map(lambda w, g: w - 0.01 * g.astype(w.dtype), weights, gradient), value

    def make_steps() -> None:
        for _ in range(steps):
            state["weights"], value = train_step(state["weights"], inputs)
        jax.block_until_ready(value)

    return make_steps
