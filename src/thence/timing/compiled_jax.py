"""A JAX function compiled under one jit, optionally with operations before and after it.

Arrays among the arguments become arguments of the compiled function. All other arguments (numbers,
strings, functions) are static, so that functions with static arguments work unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thence.errors import MissingRequirement, WrongArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_GPUS = {"gpu", "cuda"}


@dataclass(frozen=True, slots=True)
class _Static:
    """The static part of a call: the pytree structure of its arguments, and the leaves that are not arrays."""

    structure: Any
    places: tuple[int, ...]  # indices of the arrays among the leaves
    rest: tuple[tuple[type, Any], ...]  # with types, because 1, 1.0 and True are equal

    def leaves(self, arrays: Sequence[Any]) -> list[Any]:
        """All leaves, in order."""
        leaves = [value for _, value in self.rest]
        for place, array in zip(self.places, arrays, strict=True):
            leaves.insert(place, array)
        return leaves


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one call."""

    static: _Static
    arrays: list[Any]


class Compiled:
    """A function under one jit, with ``before`` applied to its arrays and ``after`` to its results.

    Args:
        f: function of pytrees of arrays and other values.
        before: takes the list of arrays among the arguments, and returns a list of like arrays.
        after: takes the list of results, and returns a list of like arrays.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        before: Callable[[list[Any]], list[Any]] = list,
        after: Callable[[list[Any]], list[Any]] = list,
    ) -> None:
        import jax  # type: ignore[import-not-found,unused-ignore]  # optional dependency

        def run(static: _Static, arrays: list[Any]) -> Any:
            args, kwargs = jax.tree.unflatten(static.structure, static.leaves(before(arrays)))
            leaves, structure = jax.tree.flatten(f(*args, **kwargs))
            return jax.tree.unflatten(structure, after(leaves))

        name = getattr(f, "__name__", "f")
        run.__name__ = name if isinstance(name, str) else "f"
        self._run = jax.jit(run, static_argnums=0)

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """The arguments of a call, separated into arrays and static arguments.

        Raises:
            WrongArgument: the call is inside a function that JAX is tracing, or an argument is neither
                an array nor hashable.
        """
        import jax
        import numpy as np

        leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise WrongArgument("measure cannot be called inside jit, grad or vmap: nothing runs there")
        is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
        places = tuple(i for i, array in enumerate(is_array) if array)
        rest = tuple((type(leaf), leaf) for leaf, array in zip(leaves, is_array, strict=True) if not array)
        static = _Static(structure, places, rest)
        try:
            hash(static)
        except TypeError as error:
            raise WrongArgument(f"an argument is neither an array nor hashable: {error}") from error
        return Arguments(static, [leaves[i] for i in places])

    def __call__(self, arguments: Arguments) -> Any:
        """Runs the function; returns before the GPU has finished.

        Raises:
            WrongArgument: the function cannot be compiled as a whole, because its Python code needs
                computed values.
        """
        import jax

        try:
            return self._run(arguments.static, arguments.arrays)
        except jax.errors.JAXTypeError as error:
            raise WrongArgument(
                "measure compiles a function that is not jitted as a whole, but the Python code of "
                "this function needs values that are computed on the GPU: pass the jitted part "
                "of it. "
                f"JAX says: {str(error).splitlines()[0]}"
            ) from error


def check_usable(tree: Any) -> None:
    """Checks that no array was donated to an earlier call, which deletes it.

    Raises:
        WrongArgument: an array was donated.
    """
    import jax

    leaves = jax.tree.leaves(tree)
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
        raise WrongArgument(
            "the function donates its arguments, and measure must call it more than once: jit it without donate_argnums"
        )


def check_one_gpu(tree: Any) -> None:
    """Checks that the arrays are on one device, because CUDA events measure only one.

    Raises:
        WrongArgument: they are on several devices.
    """
    devices = _devices(tree)
    if len(devices) > 1:
        raise WrongArgument(
            f"mode='events' times one device, but the arrays are on {len(devices)}: use "
            "mode='cupti', which adds up the kernels of all devices"
        )


def check_gpu(tree: Any) -> None:
    """Checks that the arrays are on GPUs; without arrays, that JAX's default backend is a GPU.

    Raises:
        MissingRequirement: the arrays, or the default backend, are not on a GPU.
    """
    import jax

    platforms = {device.platform for device in _devices(tree)} or {jax.default_backend()}
    for platform in sorted(platforms - _GPUS):
        raise MissingRequirement(
            f"the function runs on {platform}, but measure times NVIDIA GPUs only: `thence doctor` "
            "says what is missing here"
        )


def _devices(tree: Any) -> set[Any]:
    import jax

    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return {device for leaf in leaves for device in leaf.devices()}
