"""What a program is importing right now."""

from __future__ import annotations

import sys

__all__ = ["JAX_ON_CUDA", "jax_uses_cuda", "torch_is_being_imported"]

JAX_ON_CUDA = frozenset(
    {"jax_cuda12_plugin", "jax_cuda13_plugin", "jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"}
)
"""Modules that JAX imports when it looks for GPUs."""


def jax_uses_cuda() -> bool:
    """Whether JAX has looked for GPUs in this process."""
    return not JAX_ON_CUDA.isdisjoint(sys.modules)


def torch_is_being_imported() -> bool:
    """Whether the import of torch has begun and not ended."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
