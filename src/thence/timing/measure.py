"""``thence.measure``: GPU time of a function of JAX or PyTorch.

outputs, ms = thence.measure(f)(x, y)                        # sum of its kernels
outputs, kernels = thence.measure(f, aggregate=False)(x, y)  # [("gemm_fusion_dot", 0.012), ...]
outputs, times = thence.measure(f, iterations=10)(x, y)      # ten numbers
outputs, ms = thence.measure(f, mode="events")(x, y)         # first operation to last, with gaps

The same rule for everybody: without ``mode`` it is "cupti". So it is in JAX's own measure
(jax.experimental.mosaic.gpu.profiler) since jax 0.7.2, which knows no other; until 0.7.1 its default was
"events": there, say ``mode="events"`` for the numbers of before.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from thence.errors import MissingRequirement, UsageError, WrongArgument
from thence.timing import compiled_jax, events_torch
from thence.timing.compiled_jax import Compiled
from thence.timing.events_jax import EventTimer
from thence.timing.kernel_times import KernelTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from thence.timing.kernel_times import Kernels

__all__ = ["measure"]

_MODES = ("cupti", "events")
_MOST_VALUES = 100_000  # values of an argument that are looked at to tell whose it is


def measure(
    f: Callable[..., Any],
    mode: Literal["cupti", "events"] = "cupti",
    *,
    aggregate: bool = True,
    iterations: int = 1,
    finalize: bool = True,
) -> Callable[..., tuple[Any, Any]]:
    """The function, returning its GPU time beside its outputs.

    It is called once to warm up (compile, autotune, fill caches), then once for each iteration; between
    calls the GPU is left to finish. So a function that changes its arguments does so each time.

    A JAX function that is not jitted is compiled as a whole; arguments that are no arrays are what it
    is compiled for. PyTorch functions run as they are: eager, compiled, or the replay of a CUDA graph.

    Args:
        f: function of JAX or PyTorch.
        mode: "cupti", the default: the sum of the durations of all kernels, on all devices; copies and sets of
            memory do not count, gaps neither, and kernels that run at the same time count both. Needs
            CUPTI, which serves one profiler at a time. "events": from before the first to after the last
            operation, gaps included, by CUDA events on the stream that the function runs on; one
            device; works beside any profiler. The GPU is kept busy before, so that launching does not
            count: of an operation in eager PyTorch (0.05 ms), of the whole program in JAX and under
            torch.compile (1 ms). Gaps in which the GPU waits for the host count from there on. About
            0.002 ms are the events' own.
        aggregate: False: not the sum but a list of (kernel name, milliseconds) in order of start;
            mode "cupti" only.
        iterations: how often to measure; with more than one, there is a list of as many results.
        finalize: False leaves CUPTI loaded after measuring, which saves starting it the next time; until
            it is taken down, profilers of other libraries may be refused. Mode "cupti" only.

    Returns:
        A function that takes what ``f`` takes, and returns (outputs of the last call, milliseconds).
        Without any kernel, "cupti" gives None for the sum.

    Raises:
        WrongArgument: an argument makes no sense; it is a UsageError and a ValueError.
        UsageError: from the call: a JAX function without arguments or
            outputs, with arguments on several devices ("events"), or one that donates its arguments;
            kernels that differ from one iteration to the next.
        MissingRequirement: from the call: there is no GPU, no CUPTI, or another profiler holds it.
    """
    _check_arguments(f, mode, iterations, aggregate=aggregate, finalize=finalize)
    measured = _Measured(f, mode, aggregate, iterations, finalize)

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return measured(args, kwargs)

    return functools.update_wrapper(call, f, updated=())


def _check_arguments(
    f: object, mode: str, iterations: object, *, aggregate: bool, finalize: bool
) -> None:
    if not callable(f):
        raise WrongArgument(f"measure takes a function, not {f!r}")
    if mode not in _MODES:
        raise WrongArgument(f"measure knows the modes 'cupti' and 'events', not {mode!r}")
    if not isinstance(iterations, int) or isinstance(iterations, bool) or iterations < 1:
        raise WrongArgument(f"iterations is how often to measure, 1 or more, not {iterations!r}")
    if mode == "events" and not aggregate:
        raise WrongArgument(
            "mode='events' cannot tell kernels apart: leave out aggregate=False, or use mode='cupti'"
        )
    if mode == "events" and not finalize:
        raise WrongArgument("mode='events' uses no CUPTI: finalize=False means nothing to it")


class _Measured:
    """One function with what was made for measuring it, which later calls use again."""

    def __init__(
        self,
        f: Callable[..., Any],
        mode: str,
        aggregate: bool,  # noqa: FBT001 - as measure was told
        iterations: int,
        finalize: bool,  # noqa: FBT001 - as measure was told
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
            _check_same([names for names, _ in kernels])
            times = [_result(names, ms, self._aggregate) for names, ms in kernels]
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

    def _jax_kernels(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Kernels]]:
        import jax  # type: ignore[import-not-found,unused-ignore]  # needed by those who use it

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

    def _torch_kernels(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Kernels]]:
        events_torch.check_cuda()
        call = functools.partial(self._f, *args, **kwargs)
        devices = events_torch.devices_of(_values((args, kwargs, call())))
        events_torch.wait(devices)
        return self._kernels(call, lambda _outputs: events_torch.wait(devices))

    def _kernels(
        self, call: Callable[[], Any], wait: Callable[[Any], Any]
    ) -> tuple[Any, list[Kernels]]:
        kernels = []
        with contextlib.ExitStack() as recording:
            recorded = _started(recording, KernelTimes(finalize=self._finalize))
            for _ in range(self._iterations):
                outputs = call()
                wait(outputs)
                kernels.append(recorded.take())
        return outputs, kernels


def _started(recording: contextlib.ExitStack, times: KernelTimes) -> KernelTimes:
    try:
        return recording.enter_context(times)
    except MissingRequirement as error:
        raise MissingRequirement(f"{error}. Or use mode='events', which needs no CUPTI") from error


def _result(names: Sequence[str], ms: Sequence[float], aggregate: bool) -> Any:  # noqa: FBT001 - as measure was told
    if not aggregate:
        return list(zip(names, ms, strict=True))
    return sum(ms) if ms else None


def _check_same(names: Sequence[Sequence[str]]) -> None:
    """Refuses iterations that cannot be compared. Kernels of several streams may change places."""
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
    """The framework of a function, "jax" or "torch": by the function, its arguments, or else its outputs."""
    loaded = [name for name in ("jax", "torch") if name in sys.modules]
    if not loaded:
        raise UsageError("measure times functions of JAX and PyTorch, and neither is imported")
    values = (*_parts(f), *args, *kwargs.values())
    owners = (_owner(value) for value in _values(values))
    framework = next((owner for owner in owners if owner), None)
    if framework is None and len(loaded) > 1:
        # JAX functions have outputs, so what returns nothing of JAX's is not one.
        outputs = (_owner(value) for value in _values(f(*args, **kwargs)))
        framework = next((owner for owner in outputs if owner), "torch")
    return framework or loaded[0]


def _parts(f: Any) -> tuple[Any, ...]:
    """The function and what it is bound to."""
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
    while waiting and seen < _MOST_VALUES:
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
    """Fields of a dataclass or an instance that is registered as a pytree with JAX, if it is."""
    jax = sys.modules.get("jax")
    if jax is None or _owner(value) or jax.tree.structure(value) == jax.tree.structure(0):
        return []
    return [leaf for leaf in jax.tree.leaves(value) if leaf is not value]
