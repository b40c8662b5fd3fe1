"""GPU time of a JAX function, measured with CUDA events on XLA's stream.

The function is compiled as a whole between two foreign-function calls (`thence.timing.xla_ffi`).
The first call has every array argument as input and output, so that no operation of the function can run
before it; the second has every result as input and output. Each call records an event on the stream that
XLA's operations run on. CUPTI is not used, so other profilers may be active.

The time between the events covers the function's operations and the gaps between them. Two things happen
before the first event: XLA copies the arguments, because they must not be overwritten, and a spin kernel
(`thence.timing.spin_kernel`) keeps the GPU busy for about as long as the host needs to launch a program.
This is the usual situation in JAX, where a program is launched as a whole and the host is several
launches ahead of the GPU.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thence.capture.cuda.cuda_events import Event, elapsed_ms, load_driver
from thence.errors import WrongArgument
from thence.timing import xla_ffi
from thence.timing.compiled_jax import Compiled, check_gpu, check_one_gpu
from thence.timing.gpu_time import GpuTime
from thence.timing.spin_kernel import HeadStart

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_HEAD_START_NS = 1_000_000
"""Time in ns in which the host launches some hundred kernels, or a few CUDA graphs of any size."""
_PLATFORM = "CUDA"
_START = "thence_event_before"
_END = "thence_event_after"


@dataclass(frozen=True, slots=True)
class _Marks:
    """The two foreign functions, registered with XLA until the process ends, and their events."""

    driver: Any
    start: Event
    end: Event
    kept: tuple[Any, ...]  # the C functions, kept alive for XLA
    in_use: threading.Lock


class EventTimer:
    """Runs one JAX function between two CUDA events.

    Raises:
        WrongArgument: the function was compiled ahead of time, so the events cannot be compiled into it.
    """

    def __init__(self, f: Callable[..., Any]) -> None:
        import jax  # type: ignore[import-not-found,unused-ignore]  # optional dependency

        if isinstance(f, jax.stages.Compiled):
            raise WrongArgument(
                "mode='events' compiles the function together with its events, but this function "
                "is compiled already: pass the jitted function, or use mode='cupti'"
            )
        self._compiled = Compiled(f, _before, _after)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], iterations: int) -> tuple[Any, list[GpuTime]]:
        """Runs the function once without timing, then ``iterations`` times with timing.

        Returns:
            The outputs of the last run, and the milliseconds of each timed run.

        Raises:
            WrongArgument: the arguments or the outputs contain no array, or are on several devices.
            MissingRequirement: the arguments are not on an NVIDIA GPU.
        """
        import jax

        arguments = self._compiled.arguments(args, kwargs)
        if not arguments.arrays:
            raise WrongArgument(
                "mode='events' needs an array among the arguments of a JAX function, for the first event "
                "to come before all that depends on it: pass one, or use mode='cupti'"
            )
        check_gpu(arguments.arrays)
        check_one_gpu(arguments.arrays)
        marks = _marks(_PLATFORM)
        with marks.in_use:
            outputs = jax.block_until_ready(self._compiled(arguments))
            check_one_gpu(outputs)
            times = []
            for _ in range(iterations):
                outputs = jax.block_until_ready(self._compiled(arguments))
                elapsed = elapsed_ms(marks.driver, marks.start, marks.end)
                times.append(GpuTime.of_events(elapsed, _HEAD_START_NS / 1e6))
        return outputs, times


@functools.cache
def _marks(platform: str) -> _Marks:
    """Registers the foreign functions with XLA, once per process, because XLA cannot unregister them."""
    import jax

    driver = load_driver()
    start, end, head_start = Event(driver), Event(driver), HeadStart(driver)

    def begin(stream: int) -> None:
        head_start.hold(stream, _HEAD_START_NS)
        start.record(stream)

    functions = xla_ffi.handler(begin), xla_ffi.handler(end.record)
    for name, function in zip((_START, _END), functions, strict=True):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform=platform)
    return _Marks(driver, start, end, functions, threading.Lock())


def _before(arrays: list[Any]) -> list[Any]:
    return _through(_START, arrays)


def _after(arrays: list[Any]) -> list[Any]:
    if not arrays:
        raise WrongArgument(
            "mode='events' needs an array among the outputs of a JAX function: XLA removes "
            "computations whose result is not returned, and the last event comes after the "
            "outputs. Return the results"
        )
    return _through(_END, arrays)


def _through(target: str, arrays: list[Any]) -> list[Any]:
    """Passes the arrays, unchanged, through a foreign call that has them as inputs and outputs."""
    import jax
    import jax.numpy as jnp  # type: ignore[import-not-found,unused-ignore]  # optional dependency

    # If an aliasing call has the same array twice, XLA copies it, and the copy would be timed.
    places = {id(array): array for array in arrays}
    plain = [_plain(jnp.asarray(array)) for array in places.values()]
    call = jax.ffi.ffi_call(
        target,
        [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in plain],
        has_side_effect=True,
        input_output_aliases={i: i for i in range(len(plain))},
    )
    passed = dict(zip(places, call(*plain), strict=True))
    return [_like(array, passed[id(array)]) for array in arrays]


def _plain(array: Any) -> Any:
    """The array; of an array of random keys, its integer data, because foreign functions take no keys."""
    import jax

    return jax.random.key_data(array) if _is_key(array) else array


def _like(array: Any, passed: Any) -> Any:
    import jax

    if not _is_key(array):
        return passed
    return jax.random.wrap_key_data(passed, impl=jax.random.key_impl(array))


def _is_key(array: Any) -> bool:
    import jax

    dtype = getattr(array, "dtype", None)
    return dtype is not None and bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))
