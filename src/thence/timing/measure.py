"""``thence.measure``: measures the GPU time of a JAX or PyTorch function.

outputs, ms = thence.measure(f)(x, y)                        # sum of its kernels
outputs, kernels = thence.measure(f, aggregate=False)(x, y)  # [("gemm_fusion_dot", 0.012), ...]
outputs, times = thence.measure(f, iterations=10)(x, y)      # ten numbers
outputs, ms = thence.measure(f, mode="events")(x, y)         # first operation to last, with gaps
ms.gaps_ms, ms.before_ms, ms.to_json()                       # what lies between the two modes

The default mode is "cupti" for every function. JAX's own ``measure`` (jax.experimental.mosaic.gpu.profiler)
has only this mode since jax 0.7.2. Until jax 0.7.1 its default was "events": pass ``mode="events"`` to get
numbers that are comparable with it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from thence.errors import MissingRequirement, UsageError, WrongArgument
from thence.timing import compiled_jax, events_torch
from thence.timing.compiled_jax import Compiled
from thence.timing.events_jax import EventTimer
from thence.timing.gpu_time import GpuTime
from thence.timing.kernel_times import KernelTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from thence.timing.kernel_times import Activities

_MODES = ("cupti", "events")
_MAX_VALUES = 100_000  # most values that `_values` visits to find the framework or the devices


def measure(
    f: Callable[..., Any],
    mode: Literal["cupti", "events"] = "cupti",
    *,
    aggregate: bool = True,
    iterations: int = 1,
    finalize: bool = True,
) -> Callable[..., tuple[Any, Any]]:
    """A function that calls ``f`` and returns its GPU time together with its outputs.

    ``f`` is called once to warm up (compile, autotune, fill caches), then once for each iteration. The GPU
    finishes each call before the next one starts. If ``f`` modifies its arguments, each call does so.

    A JAX function that is not jitted is compiled as a whole; its arguments that are not arrays are static.
    PyTorch functions run as they are: eager, compiled, or the replay of a CUDA graph.

    Args:
        f: function of JAX or PyTorch.
        mode: "cupti", the default: the sum of the durations of all kernels on all devices. Memcpys,
            memsets and gaps are not included; kernels that run at the same time are both included.
            Needs CUPTI, which only one profiler can use at a time. "events": the time from before the
            first to after the last operation, including gaps, by CUDA events on the stream that the
            function runs on. For one device only; works next to any other profiler. A spin kernel
            keeps the GPU busy before the first event, so that launch time is not included: of one
            operation in eager PyTorch (0.05 ms), of the whole program in JAX and under torch.compile
            (1 ms). Later gaps in which the GPU waits for the host are included. The events themselves
            add about 0.002 ms.
        aggregate: False: return a list of (kernel name, milliseconds) in order of start instead of the
            sum; mode "cupti" only.
        iterations: number of measurements; with more than one, a list of as many results is returned.
        finalize: False leaves CUPTI loaded after measuring, which saves the time to start it for the next
            measurement; until CUPTI is finalized, profilers of other libraries may be refused. Mode
            "cupti" only.

    Returns:
        A function that takes the arguments of ``f``, and returns (outputs of the last call, milliseconds).
        If no kernel ran, the sum is None in mode "cupti". The milliseconds are a float
        (`thence.timing.gpu_time.GpuTime`) whose attributes, repr and ``to_json()`` state what the sum leaves out. In
        mode "cupti": gaps, copies, overlap, the time from the first start to the last end, from the call to the
        first start, and from the last end to the return. In mode "events": how long the GPU can have waited
        for the host (PyTorch); the length of other gaps is not known there.

    Raises:
        WrongArgument: an argument has an invalid value; WrongArgument is a UsageError and a ValueError.
        UsageError: raised by the call: a JAX function has no arrays among its arguments or outputs
            ("events"), has arguments on several devices ("events"), or donates its arguments; or the
            kernels differ from one iteration to the next.
        MissingRequirement: raised by the call: there is no GPU or no CUPTI, or another profiler uses it.
    """
    _check_arguments(f, mode, iterations, aggregate=aggregate, finalize=finalize)
    measured = _Measured(f, mode, aggregate, iterations, finalize)

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return measured(args, kwargs)

    return functools.update_wrapper(call, f, updated=())


def _check_arguments(f: object, mode: str, iterations: object, *, aggregate: bool, finalize: bool) -> None:
    if not callable(f):
        raise WrongArgument(f"measure needs a function, not {f!r}")
    if mode not in _MODES:
        raise WrongArgument(f"mode must be 'cupti' or 'events', not {mode!r}")
    if not isinstance(iterations, int) or isinstance(iterations, bool) or iterations < 1:
        raise WrongArgument(f"iterations must be an integer of at least 1, not {iterations!r}")
    if mode == "events" and not aggregate:
        raise WrongArgument("mode='events' cannot distinguish kernels: leave out aggregate=False, or use mode='cupti'")
    if mode == "events" and not finalize:
        raise WrongArgument("mode='events' uses no CUPTI: finalize=False has no effect there; leave it out")


class _Measured:
    """A function to measure, with the compiled functions and events that later calls reuse."""

    def __init__(
        self,
        f: Callable[..., Any],
        mode: str,
        aggregate: bool,  # noqa: FBT001 - the argument of `measure`
        iterations: int,
        finalize: bool,  # noqa: FBT001 - the argument of `measure`
    ) -> None:
        self._finalize = finalize
        self._f = f
        self._mode = mode
        self._aggregate = aggregate
        self._iterations = iterations
        self._timer: EventTimer | None = None
        self._compiled: Compiled | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        of_jax = _framework(self._f, args, kwargs) == "jax"
        if self._mode == "events":
            outputs, times = (self._jax_events if of_jax else self._torch_events)(args, kwargs)
        else:
            outputs, kernels = (self._jax_kernels if of_jax else self._torch_kernels)(args, kwargs)
            _check_same([call.activities.names for call in kernels])
            times = [call.result(aggregate=self._aggregate) for call in kernels]
        return outputs, times if self._iterations > 1 else times[0]

    def _jax_events(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        if self._timer is None:
            self._timer = EventTimer(self._f)
        return self._timer.run(args, kwargs, self._iterations)

    def _torch_events(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        events_torch.check_cuda()
        call = functools.partial(self._f, *args, **kwargs)
        devices = events_torch.devices_of(_values((args, kwargs, call())))
        events_torch.wait(devices)
        return events_torch.time_calls(call, devices, self._iterations)

    def _jax_kernels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[_Call]]:
        import jax  # type: ignore[import-not-found,unused-ignore]  # optional dependency

        call = self._jax_call(args, kwargs)
        outputs = jax.block_until_ready(call())
        compiled_jax.check_usable((args, kwargs))
        compiled_jax.check_gpu((args, kwargs, outputs))
        return self._kernels(call, jax.block_until_ready)

    def _jax_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
        import jax

        if isinstance(self._f, jax.stages.Wrapped | jax.stages.Compiled):
            return functools.partial(self._f, *args, **kwargs)
        if self._compiled is None:
            self._compiled = Compiled(self._f)
        return functools.partial(self._compiled, self._compiled.arguments(args, kwargs))

    def _torch_kernels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[_Call]]:
        events_torch.check_cuda()
        call = functools.partial(self._f, *args, **kwargs)
        devices = events_torch.devices_of(_values((args, kwargs, call())))
        events_torch.wait(devices)
        return self._kernels(call, lambda _outputs: events_torch.wait(devices))

    def _kernels(self, call: Callable[[], Any], wait: Callable[[Any], Any]) -> tuple[Any, list[_Call]]:
        kernels = []
        with contextlib.ExitStack() as recording:
            recorded = _started(recording, KernelTimes(finalize=self._finalize))
            for _ in range(self._iterations):
                called_ns = time.time_ns()
                outputs = call()
                wait(outputs)
                returned_ns = time.time_ns()
                kernels.append(_Call(recorded.take(), called_ns, returned_ns))
        return outputs, kernels


def _started(recording: contextlib.ExitStack, times: KernelTimes) -> KernelTimes:
    try:
        return recording.enter_context(times)
    except MissingRequirement as error:
        raise MissingRequirement(f"{error}. Or use mode='events', which needs no CUPTI") from error


class _Call(NamedTuple):
    """The activities of one call, and the Unix times in ns at which it began and at which its work was waited for."""

    activities: Activities
    called_ns: int
    returned_ns: int

    def result(self, *, aggregate: bool) -> Any:
        """The sum of its kernels, None without kernels; or their names and times."""
        if not aggregate:
            return list(zip(self.activities.names, self.activities.ms, strict=True))
        return GpuTime.of_activities(*self) if self.activities.names else None


def _check_same(names: Sequence[Sequence[str]]) -> None:
    """Checks that every iteration ran the same kernels. Their order may differ, with several streams.

    Raises:
        UsageError: the kernels of an iteration differ from those of the first.
    """
    first = Counter(names[0])
    for i, others in enumerate(names[1:], 2):
        if Counter(others) == first:
            continue
        other = sorted((first - Counter(others)) + (Counter(others) - first))
        raise UsageError(
            f"call {i} ran other kernels than call 1 ({len(others)} and {len(names[0])}; they differ in "
            f"{', '.join(other[:3])}{' ...' if len(other) > 3 else ''}), so their times cannot be "
            "compared: use iterations=1, or call the function until it has settled"
        )


def _framework(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The framework of a function, "jax" or "torch", by the function, its arguments, or else its outputs."""
    loaded = [name for name in ("jax", "torch") if name in sys.modules]
    if not loaded:
        raise UsageError("measure times functions of JAX and PyTorch, and neither is imported")
    values = (*_parts(f), *args, *kwargs.values())
    owners = (_owner(value) for value in _values(values))
    framework = next((owner for owner in owners if owner), None)
    if framework is None and len(loaded) > 1:
        # A JAX function returns JAX arrays, so a function that returns none is taken for PyTorch's.
        outputs = (_owner(value) for value in _values(f(*args, **kwargs)))
        framework = next((owner for owner in outputs if owner), "torch")
    return framework or loaded[0]


def _parts(f: Any) -> tuple[Any, ...]:
    """The function and the objects that it is bound to: arguments of a partial, instance of a method."""
    if isinstance(f, functools.partial):
        return (*_parts(f.func), *f.args, *f.keywords.values())
    return (f, getattr(f, "__self__", None))


def _owner(value: Any) -> str | None:
    roots = {kind.__module__.split(".")[0] for kind in type(value).__mro__}
    if roots & {"jax", "jaxlib"}:
        return "jax"
    return "torch" if "torch" in roots else None


def _values(tree: Any) -> Iterator[Any]:
    """The values in nested lists, tuples, dicts, and pytrees registered with JAX."""
    waiting, seen = [tree], 0
    while waiting and seen < _MAX_VALUES:
        value = waiting.pop()
        seen += 1
        if isinstance(value, dict):
            waiting.extend(reversed(value.values()))
        elif isinstance(value, list | tuple):
            waiting.extend(reversed(value))
        else:
            yield value
            waiting.extend(_fields(value))


def _fields(value: Any) -> list[Any]:
    """The leaves of an instance of a class that is registered as a pytree with JAX; else none."""
    jax = sys.modules.get("jax")
    if jax is None or _owner(value) or jax.tree.structure(value) == jax.tree.structure(0):
        return []
    return [leaf for leaf in jax.tree.leaves(value) if leaf is not value]
