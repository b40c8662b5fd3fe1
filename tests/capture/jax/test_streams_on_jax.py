"""Functions on streams of their own, lowered for CUDA without a GPU. Needs jax 0.6 or newer."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import pytest

import thence

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402 - only where there is jax

if TYPE_CHECKING:
    from collections.abc import Callable

ANNOTATED_CALL = re.compile(r"call @(\S+)\(.*_xla_stream_annotation = \"(\d+)\", inlineable = \"false\"")


def dense(x: Any, kernel: Any, bias: Any) -> Any:
    return jnp.tanh(x @ kernel + bias)


def streams(f: Callable[..., Any], *arguments: Any) -> list[str]:
    """Streams of the annotated calls in the lowered program, in its order."""
    lowered = jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",))
    calls = [ANNOTATED_CALL.search(line) for line in lowered.as_text().splitlines()]
    return [found[2] for found in calls if found]


@pytest.fixture
def arguments() -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((4, 8), (8, 8), (8,))
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))  # type: ignore[return-value]


def test_the_annotation_sits_on_a_call_that_is_not_inlined(arguments: Any) -> None:
    assert streams(thence.jax.on_stream(dense, 3), *arguments) == ["3"]
    assert streams(dense, *arguments) == []


def test_two_functions_get_two_streams(arguments: Any) -> None:
    one, two = thence.jax.on_stream(dense, 1), thence.jax.on_stream(dense, 2)
    assert streams(lambda *a: one(*a) + two(*a), *arguments) == ["1", "2"]


def test_the_result_stays_the_same(arguments: Any) -> None:
    moved = thence.jax.on_stream(dense, 1)
    expected = dense(*arguments)
    for f in (moved, jax.jit(moved)):
        assert jnp.allclose(f(*arguments), expected, atol=1e-6)


def test_it_decorates(arguments: Any) -> None:
    @thence.jax.on_stream(n=2)
    def named(x: Any, kernel: Any, bias: Any) -> Any:
        """Says what it does."""
        return dense(x, kernel, bias)

    assert named.__name__ == "named"
    assert named.__doc__ == "Says what it does."
    assert streams(named, *arguments) == ["2"]


def test_forward_and_backward_pass_run_on_the_stream(arguments: Any) -> None:
    moved = thence.jax.on_stream(dense, 1)

    def loss(f: Callable[..., Any], *a: Any) -> Any:
        return f(*a).sum()

    gradient = jax.grad(functools.partial(loss, moved), argnums=(0, 1, 2))
    assert streams(gradient, *arguments) == ["1", "1"]
    expected = jax.grad(functools.partial(loss, dense), argnums=(0, 1, 2))(*arguments)
    for ours, theirs in zip(gradient(*arguments), expected, strict=True):
        assert jnp.allclose(ours, theirs, atol=1e-5)


def test_a_batched_function_stays_on_the_stream(arguments: Any) -> None:
    x, kernel, bias = arguments
    batch = jnp.stack([x, 2 * x])
    moved = jax.vmap(thence.jax.on_stream(dense, 1), in_axes=(0, None, None))
    assert streams(moved, batch, kernel, bias) == ["1"]
    expected = jnp.stack([dense(x, kernel, bias), dense(2 * x, kernel, bias)])
    assert jnp.allclose(moved(batch, kernel, bias), expected, atol=1e-6)


def test_gradients_of_batches_stay_on_the_stream(arguments: Any) -> None:
    moved = thence.jax.on_stream(dense, 1)
    gradient = jax.grad(lambda x, k, b: jax.vmap(moved, in_axes=(0, None, None))(x, k, b).sum())
    x, kernel, bias = arguments
    assert streams(gradient, x[None], kernel, bias) == ["1", "1"]


def test_keywords_pytrees_and_closures_work(arguments: Any) -> None:
    x, kernel, bias = arguments

    def layer(x: Any, *, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"y": dense(x, parameters["kernel"], parameters["bias"]) * bias}

    def program(x: Any, scale: Any) -> Any:
        closure = thence.jax.on_stream(lambda y: y * scale, 2)
        moved = thence.jax.on_stream(layer, 1)
        return closure(moved(x, parameters={"kernel": kernel, "bias": bias})["y"])

    assert streams(program, x, jnp.float32(2)) == ["1", "2"]
    assert jnp.allclose(program(x, jnp.float32(2)), dense(*arguments) * bias * 2, atol=1e-6)


def test_a_function_with_bound_settings_works(arguments: Any) -> None:
    x, kernel, bias = arguments
    bound = functools.partial(dense, bias=bias)
    assert streams(thence.jax.on_stream(bound, 1), x, kernel) == ["1"]


def test_a_program_without_streams_has_none(arguments: Any) -> None:
    # No CUDA compiler is at hand here; other backends ignore the annotation.
    compiled = jax.jit(thence.jax.on_stream(dense, 1)).lower(*arguments).compile()
    if jax.default_backend() != "gpu":
        assert thence.jax.stream_of(compiled) == ()
    assert thence.jax.stream_of(jax.jit(dense).lower(*arguments).compile()) == ()


def test_what_is_not_compiled_is_refused(arguments: Any) -> None:
    with pytest.raises(thence.UsageError, match="compile"):
        thence.jax.stream_of(jax.jit(dense).lower(*arguments))


@pytest.mark.parametrize("n", [0, -1, 1.0, True, "1", None])
def test_a_stream_has_a_number_from_1(n: Any) -> None:
    with pytest.raises(thence.UsageError, match="number of a stream"):
        thence.jax.on_stream(dense, n)


def test_only_functions_go_on_streams() -> None:
    with pytest.raises(thence.UsageError, match="takes a function"):
        thence.jax.on_stream(3, 1)
