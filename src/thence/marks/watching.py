"""Who wants to know of marks: looked up once, so that a mark for nobody costs nothing."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    Opened = Callable[[int, str, str | None, Mapping[str, object]], None]
    Closed = Callable[[int], None]

__all__ = ["Frame", "Listener", "Watch", "watch"]

Frame = tuple[Any, int, Any, Any]
"""A mark that is open: see `thence.marks.frames`."""

_NVTX_TOOLS = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
"""Set where a tool collects NVTX ranges: any tool, Nsight Systems."""


class Listener(Protocol):
    """Is told of every mark, on the thread that it happens on."""

    def opened(
        self, number: int, name: str, lane: str | None, metadata: Mapping[str, object]
    ) -> None:
        """A mark opened; `number` is its own in this process."""

    def closed(self, number: int) -> None:
        """It closed. Innermost first, save where asyncio tasks take turns on one thread."""

    def backward_opened(self, number: int | None, name: str) -> None:
        """An autograd node begins; `number` is the mark that was open around its forward, if any."""

    def backward_closed(self) -> None:
        """The autograd node that began last on this thread is over."""


def _no() -> bool:
    return False


class Watch:
    """What is there to tell marks to.

    Attributes:
        modules: how many modules were imported when `look` last looked.
        profiler: torch.autograd.profiler, or what says in its place that it is not running.
        sequence: the next autograd sequence number of this thread; None before there is a listener,
            or torch has used CUDA.
        loop: gives the asyncio event loop that runs on this thread, once asyncio is there.
        ranges: whether NVTX or JAX may want to know of marks.
        live: whether a listener, or a capture, is there.
        listeners: who is told.
        opened: tells all listeners that a mark opened, as `Listener.opened`; None where there is none.
        closed: likewise, as `Listener.closed`.
        changed: told which frame is the innermost one now, while captures are live.
        compiling: whether TorchDynamo is tracing the caller.
        framework: called once with torch when it has been imported.
    """

    def __init__(self) -> None:
        self.modules = 0
        self.profiler: Any = SimpleNamespace(_is_profiler_enabled=False)
        self.sequence: Callable[[], int] | None = None
        self.loop: Callable[[], object] | None = None
        self.ranges = False
        self.live = False
        self.listeners: tuple[Listener, ...] = ()
        self.opened: Opened | None = None
        self.closed: Closed | None = None
        self.changed: Callable[[Frame | None], None] | None = None
        self.compiling: Callable[[], bool] = _no
        self.framework: Callable[[Any], None] = lambda _torch: None
        self._torch: Any = None
        self._nvtx: Any = None
        self._nvtx_wanted = False
        self._lock = threading.RLock()

    def look(self) -> None:
        """See which frameworks and tools there are by now."""
        modules = len(sys.modules)
        with self._lock:
            if self._torch is None and (torch := _loaded_torch()) is not None:
                self._torch = torch
                self.profiler = torch.autograd.profiler
                self.compiling = torch.compiler.is_dynamo_compiling
                # Captures need CUDA: who does not use it does not pay for them. What torch.cuda._lazy_call
                # does, but for its lock: a recorder may look from within CUDA's own initialisation.
                if torch.cuda.is_initialized():
                    self._follow_autograd()
                else:
                    torch.cuda._queued_calls.append((self._follow_autograd, []))  # noqa: SLF001
                if self.listeners:
                    self._follow_autograd()
                self.framework(torch)
            self.loop = getattr(sys.modules.get("asyncio.events"), "_get_running_loop", None)
            self._update()
            self.modules = modules

    def listen(self, listener: Listener) -> None:
        """Tell a listener of every mark from now on."""
        with self._lock:
            self.listeners = (*self.listeners, listener)
            self._follow_autograd()
            self._update()

    def unlisten(self, listener: Listener) -> None:
        """Tell it no longer."""
        with self._lock:
            self.listeners = tuple(one for one in self.listeners if one is not listener)
            self._update()

    def watch_captures(self, changed: Callable[[Frame | None], None] | None) -> None:
        """Tell of frames, or no longer (None)."""
        with self._lock:
            self.changed = changed
            self._follow_autograd()
            self._update()

    def open_ranges(self, name: str) -> list[AbstractContextManager[object]]:
        """Opens a mark in the tools that show ranges: torch.profiler, NVTX, JAX."""
        ranges: list[AbstractContextManager[object]] = []
        if self.profiler._is_profiler_enabled:  # noqa: SLF001 - the flag has no other name
            ranges.append(self._torch.profiler.record_function(name))
        if self._nvtx_wanted:
            ranges.append(self._nvtx_range(name))
        ranges += _jax_ranges(name)
        for one in ranges:
            one.__enter__()
        return ranges

    def _follow_autograd(self) -> None:
        if self._torch is not None:
            self.sequence = self._torch.autograd._get_sequence_nr  # noqa: SLF001 - no public name

    def _update(self) -> None:
        self.live = bool(self.listeners) or self.changed is not None
        self.opened, self.closed = _tellers(self.listeners)
        # Whoever listens has the marks already, and may be the one who collects NVTX.
        collected = any(os.environ.get(name) for name in _NVTX_TOOLS)
        self._nvtx_wanted = collected and not self.listeners
        self.ranges = self._nvtx_wanted or "jax" in sys.modules

    def _nvtx_range(self, name: str) -> AbstractContextManager[object]:
        if self._nvtx is None:
            self._nvtx = _nvtx_functions(self._torch)
        return _pushed(name, *self._nvtx)


watch = Watch()


def _tellers(listeners: tuple[Listener, ...]) -> tuple[Opened | None, Closed | None]:
    """What tells these listeners that a mark opened, and closed: the function itself of one that is alone."""
    if not listeners:
        return None, None
    if len(listeners) == 1:
        return listeners[0].opened, listeners[0].closed

    def opened(number: int, name: str, lane: str | None, metadata: Mapping[str, object]) -> None:
        for listener in listeners:
            listener.opened(number, name, lane, metadata)

    def closed(number: int) -> None:
        for listener in listeners:
            listener.closed(number)

    return opened, closed


def _loaded_torch() -> Any:
    """torch, if its import is complete."""
    torch = sys.modules.get("torch")
    parts = ("torch.cuda.graphs", "torch.autograd.profiler", "torch.compiler", "torch.profiler")
    return torch if torch is not None and all(part in sys.modules for part in parts) else None


def _jax_ranges(name: str) -> Iterator[AbstractContextManager[object]]:
    """A named scope while JAX traces, a host range while its profiler runs."""
    jax = sys.modules.get("jax")
    core = sys.modules.get("jax._src.core")
    if jax is None or not hasattr(core, "trace_state_clean") or not hasattr(jax, "named_scope"):
        return
    if not core.trace_state_clean():  # type: ignore[union-attr]
        yield jax.named_scope(name)
    state = getattr(sys.modules.get("jax._src.profiler"), "_profile_state", None)
    if getattr(state, "profile_session", None) is not None:
        yield jax.profiler.TraceAnnotation(name)


@contextmanager
def _pushed(name: str, push: Callable[[str], object], pop: Callable[[], object]) -> Iterator[None]:
    push(name)
    try:
        yield
    finally:
        pop()


def _nvtx_functions(torch: Any) -> tuple[Callable[[str], object], Callable[[], object]]:
    """Push and pop of NVTX, from whatever brings it."""
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    try:
        import nvtx  # type: ignore[import-not-found,unused-ignore]  # optional
    except ImportError:
        warnings.warn(
            "a tool collects NVTX ranges, but neither PyTorch for CUDA nor the nvtx package is there "
            "to send marks to it: pip install nvtx",
            RuntimeWarning,
            stacklevel=2,
        )
        return lambda _name: None, lambda: None
    return nvtx.push_range, nvtx.pop_range
