"""Marks in code that JAX traces; skipped where jax is not installed."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import thence  # noqa: E402


def test_a_mark_names_the_operations_that_jax_traces_inside_it() -> None:
    @thence.mark("layer")
    def layer(x):
        with thence.mark("scoped", fact=1):
            y = jnp.sin(x)
        return y + 1

    program = jax.jit(layer).lower(jnp.ones(3)).compile().as_text()
    assert "layer/scoped/sin" in program
    assert "layer/add" in program
    assert "scoped/add" not in program


def test_a_mark_in_eager_code_changes_nothing() -> None:
    with thence.mark("eager"):
        assert float(jnp.sin(jnp.ones(()))) == pytest.approx(0.841471)
