"""Caches which consumers of marks are active, so that a mark that nobody consumes is nearly free."""

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

Frame = tuple[Any, int, Any, Any]
"""An open mark: see `thence.capture.marks.frames`."""

_NVTX_TOOLS = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
"""Environment variables that are set if a tool collects NVTX ranges: any tool, and Nsight Systems."""


class Listener(Protocol):
    """Is called for every mark, on the thread that opens or closes it."""

    def opened(self, number: int, name: str, lane: str | None, metadata: Mapping[str, object]) -> None:
        """Handle that a mark opened; `number` is unique in this process."""

    def closed(self, number: int) -> None:
        """Handle that a mark closed: the innermost first, unless asyncio tasks take turns on one thread."""

    def backward_opened(self, number: int | None, name: str) -> None:
        """Handle that an autograd node begins; `number` is that of the mark around its forward, if any."""

    def backward_closed(self) -> None:
        """Handle the end of the autograd node that began last on this thread."""


def _no() -> bool:
    return False


class Watch:
    """The consumers of marks that are active.

    Attributes:
        modules: number of imported modules at the last call of `look`.
        profiler: torch.autograd.profiler, or before its import an object that reports that it is not running.
        sequence: returns the next autograd sequence number of this thread; None until there is a listener,
            or torch uses CUDA.
        loop: returns the asyncio event loop that runs on this thread; None until asyncio is imported.
        ranges: whether NVTX or JAX may show marks as ranges.
        live: whether there is a listener or a capture.
        backward: whether backward passes are watched; their captures are in any case.
        listeners: the listeners.
        opened: calls `Listener.opened` of all listeners; None if there are none.
        closed: calls `Listener.closed` of all listeners; None if there are none.
        changed: called with the frame that has become the innermost one, during captures; None otherwise.
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
        self.backward = True
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
        """Update which frameworks and tools are present."""
        modules = len(sys.modules)
        with self._lock:
            if self._torch is None and (torch := _loaded_torch()) is not None:
                self._torch = torch
                self.profiler = torch.autograd.profiler
                self.compiling = torch.compiler.is_dynamo_compiling
                # Captures need CUDA, so programs without CUDA do not pay for them. This does the same as
                # torch.cuda._lazy_call, without its lock: a recorder may call it during CUDA's initialisation.
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
        """Call a listener for every mark from now on."""
        with self._lock:
            self.listeners = (*self.listeners, listener)
            self._follow_autograd()
            self._update()

    def unlisten(self, listener: Listener) -> None:
        """Stop calling a listener."""
        with self._lock:
            self.listeners = tuple(other for other in self.listeners if other is not listener)
            self._update()

    def watch_captures(self, changed: Callable[[Frame | None], None] | None) -> None:
        """Set the function that is called with innermost frames; None removes it."""
        with self._lock:
            self.changed = changed
            self._follow_autograd()
            self._update()

    def open_ranges(self, name: str) -> list[AbstractContextManager[object]]:
        """Open a mark in the tools that show ranges: torch.profiler, NVTX, JAX."""
        ranges: list[AbstractContextManager[object]] = []
        if self.profiler._is_profiler_enabled:  # noqa: SLF001 - the flag has no other name
            ranges.append(self._torch.profiler.record_function(name))
        if self._nvtx_wanted:
            ranges.append(self._nvtx_range(name))
        ranges += _jax_ranges(name)
        for opened in ranges:
            opened.__enter__()
        return ranges

    def _follow_autograd(self) -> None:
        if self._torch is not None:
            self.sequence = self._torch.autograd._get_sequence_nr  # noqa: SLF001 - no public name

    def _update(self) -> None:
        self.live = bool(self.listeners) or self.changed is not None
        self.opened, self.closed = _callbacks(self.listeners)
        # A listener has the marks already, and may be the tool that collects NVTX.
        collected = any(os.environ.get(name) for name in _NVTX_TOOLS)
        self._nvtx_wanted = collected and not self.listeners
        self.ranges = self._nvtx_wanted or "jax" in sys.modules

    def _nvtx_range(self, name: str) -> AbstractContextManager[object]:
        if self._nvtx is None:
            self._nvtx = _nvtx_functions(self._torch)
        return _pushed(name, *self._nvtx)


watch = Watch()


def _callbacks(listeners: tuple[Listener, ...]) -> tuple[Opened | None, Closed | None]:
    """Functions that call `opened` and `closed` of these listeners; for a single listener its own methods."""
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
    """The ranges for JAX: a named scope while JAX traces, a host range while its profiler runs."""
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
    """NVTX's push and pop, from PyTorch or from the nvtx package."""
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    try:
        import nvtx  # type: ignore[import-not-found,unused-ignore]  # optional
    except ImportError:
        warnings.warn(
            "a tool collects NVTX ranges, but neither PyTorch for CUDA nor the nvtx package is "
            "installed to send marks to it: pip install nvtx",
            RuntimeWarning,
            stacklevel=2,
        )
        return lambda _name: None, lambda: None
    return nvtx.push_range, nvtx.pop_range
