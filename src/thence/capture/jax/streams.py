"""JAX: put work on CUDA streams of its own, and query how the compiler assigned streams.

    import thence

    side = thence.jax.on_stream(dense, 1)        # or @thence.jax.on_stream(n=1)

    @jax.jit
    def layer(x, k0, k1, b):
        return dense(x, k0, b) + side(x, k1, b)  # two GEMMs, two streams

    compiled = layer.lower(x, k0, k1, b).compile()
    thence.jax.stream_of(compiled)                              # (1,)
    thence.jax.custom_calls(compiled)                           # [("te_gemm_ffi", None, 1), ("te_gemm_ffi", 1, 1)]

XLA honours a stream annotation only on a call that is not inlined; on an op outside of such a call it has
no effect. So the function becomes one call with the attributes ``_xla_stream_annotation`` and
``inlineable=false``, by the best API that the installed jax offers:

    jax 0.11.1 and newer   jax.experimental.compute_on.compute_on, called with the function
    jax 0.10.1 to 0.11.0   jax.experimental.compute_on.compute_on2
    jax 0.6 to 0.10.0      set_xla_metadata around a jitted call

The annotation survives jit, grad and vmap: the backward pass runs on the stream, too. On devices other
than CUDA GPUs it has no effect.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from thence.errors import MissingRequirement, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_OLDEST = (0, 6)
_START = re.compile(r" (?:call|async)-start\(")
_ANNOTATION = re.compile(r'_xla_stream_annotation="([0-9]{1,9})"')
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|called_computations|branch_computations)=\{?([%\w.\-, ]+)\}?")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


class CustomCalls(NamedTuple):
    """Custom calls of one target in an optimized program.

    Attributes:
        target: name of the target, such as ``te_gemm_ffi``.
        stream: number of the XLA stream in the annotation; None without annotation.
        calls: number of calls.
    """

    target: str
    stream: int | None
    calls: int


def on_stream(f: Callable[..., Any] | None = None, n: int | None = None) -> Any:
    """Returns a function whose work runs on stream ``n`` of XLA.

    Args:
        f: function that takes arrays and pytrees of arrays, positional or by keyword, and returns such. Bind
            other arguments with functools.partial. If ``f`` is left out, the result is a decorator.
        n: number of the stream, 1 or more; everything else runs on stream 0. XLA maps the numbers to CUDA
            streams of its own: traces show other ids, and may show several for one number.

    Returns:
        A function like ``f``. Independent work can run concurrently with it. `stream_of` returns whether
        XLA kept the annotation, and ``thence streams --expect`` checks on which streams the kernels ran.

    Raises:
        UsageError: ``n`` is not such a number, or ``f`` is not callable.
        MissingRequirement: jax is not installed, or older than 0.6.
    """
    if f is None and n is not None:
        return functools.partial(on_stream, n=n)
    if not callable(f):
        raise UsageError(f"on_stream takes a function and a stream number, not {f!r}")
    if not isinstance(n, int) or isinstance(n, bool) or not 0 < n < 10**9:
        raise UsageError(f"on_stream needs the number of a stream, 1 or more, not {n!r}")
    place = _placing()

    def work(args: Any, kwargs: Any) -> Any:  # two pytrees: compute_on takes no keywords
        return f(*args, **kwargs)

    work.__name__ = getattr(f, "__name__", work.__name__)  # jit puts it into op names
    placed = place(work, n)

    @functools.wraps(f, updated=())
    def on_its_stream(*args: Any, **kwargs: Any) -> Any:
        return placed(args, kwargs)

    return on_its_stream


def stream_of(compiled: Any) -> tuple[int, ...]:
    """The streams that the optimized program assigns to asynchronous calls.

    Args:
        compiled: the result of ``jax.jit(f).lower(...).compile()``.

    Returns:
        Stream numbers as `on_stream` took them, ascending; empty if no annotation survived: the device is
        not a CUDA GPU, or --xla_gpu_experimental_stream_annotation is switched off.

    Raises:
        UsageError: ``compiled`` is something else, or its HLO is not available.
    """
    starts = (line for line in _hlo(compiled, "stream_of").splitlines() if _START.search(line))
    numbers = (annotation for line in starts if (annotation := _ANNOTATION.search(line)))
    return tuple(sorted({int(number[1]) for number in numbers}))


def custom_calls(compiled: Any) -> list[CustomCalls]:
    """The custom calls of the optimized program, counted with and without a stream annotation.

    A call counts as annotated if the annotation is on the call itself, or on a call of the computation
    that contains it.

    Args:
        compiled: the result of ``jax.jit(f).lower(...).compile()``, or the text of its HLO.

    Returns:
        one row for each target and stream, in this order, rows without annotation first.

    Raises:
        UsageError: ``compiled`` is something else, or its HLO is not available.
    """
    text = compiled if isinstance(compiled, str) else _hlo(compiled, "custom_calls")
    computation = ""
    targets: list[tuple[str, int | None, str]] = []  # target, its own stream, computation
    calls: dict[
        str, list[tuple[str, int | None]]
    ] = {}  # by called computation: the calling computation, and the stream of the call
    for line in text.splitlines():
        if line[:1] not in (" ", "}", ""):
            header = _COMPUTATION.match(line)
            computation = header[1] if header else computation
            continue
        annotated = _ANNOTATION.search(line)
        stream = int(annotated[1]) if annotated else None
        for called in _CALLED.findall(line):
            for name in called.split(","):
                calls.setdefault(name.strip().lstrip("%"), []).append((computation, stream))
        if target := _TARGET.search(line):
            targets.append((target[1], stream, computation))
    counts = Counter((target, _inherited(stream, where, calls, frozenset())) for target, stream, where in targets)
    rows = [CustomCalls(target, stream, count) for (target, stream), count in counts.items()]
    return sorted(rows, key=lambda row: (row.target, -1 if row.stream is None else row.stream))


def _inherited(
    stream: int | None, computation: str, calls: dict[str, list[tuple[str, int | None]]], seen: frozenset[str]
) -> int | None:
    """The stream of an instruction, or else that of the nearest annotated call around its computation."""
    if stream is not None or computation in seen:
        return stream
    around = (
        _inherited(of_call, caller, calls, seen | {computation}) for caller, of_call in calls.get(computation, ())
    )
    return next((inherited for inherited in around if inherited is not None), None)


def _hlo(compiled: Any, who: str) -> str:
    text = compiled.as_text() if hasattr(compiled, "as_text") else None
    if not isinstance(text, str) or "HloModule" not in text:
        raise UsageError(f"{who} needs the compiled program, jax.jit(f).lower(...).compile(), and its HLO")
    return text


def _placing() -> Callable[[Callable[..., Any], int], Callable[..., Any]]:
    """The function that puts a function on a stream with the installed jax."""
    try:
        import jax  # type: ignore[import-not-found,unused-ignore]  # optional
    except ImportError as error:
        raise MissingRequirement("thence.jax needs jax, which is not installed: pip install 'jax[cuda13]'") from error
    version = tuple(int(part) for part in re.findall(r"\d+", jax.__version__)[:2])
    if version < _OLDEST:
        raise MissingRequirement(f"jax {jax.__version__} cannot put work on a stream of its own; jax 0.6 and newer can")
    # The context manager that older jax has under the name compute_on is not used: it has no effect on bare ops.
    compute_on = _compute_on()
    return _by_metadata if compute_on is None else functools.partial(_by_compute_on, compute_on)


def _compute_on() -> Callable[..., Any] | None:
    """compute_on in the form that takes a function, under either of its names; None if jax lacks it."""
    from jax.experimental import compute_on  # type: ignore[import-not-found,unused-ignore]  # see _placing

    for name in ("compute_on2", "compute_on"):
        function = getattr(compute_on, name, None)
        if function is not None and "out_memory_spaces" in inspect.signature(function).parameters:
            return function  # type: ignore[no-any-return,unused-ignore]  # jax may be untyped here
    return None


def _by_compute_on(compute_on: Callable[..., Any], f: Callable[..., Any], n: int) -> Callable[..., Any]:
    import jax

    placed: Callable[..., Any] = compute_on(
        f, compute_type=f"gpu_stream:{n}", out_memory_spaces=jax.memory.Space.Device
    )
    return placed


def _by_metadata(f: Callable[..., Any], n: int) -> Callable[..., Any]:
    import jax
    from jax.experimental.xla_metadata import set_xla_metadata  # type: ignore[import-not-found,unused-ignore]

    called = jax.jit(f)  # jit makes the call that the annotation must sit on

    def placed(*args: Any) -> Any:
        with set_xla_metadata(_xla_stream_annotation=str(n), inlineable="false"):
            return called(*args)

    return placed
