"""mark(): names a region of a program once for all tools."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from thence.capture.marks.compiling import ends, opens
from thence.capture.marks.frames import numbers, task, thread, top
from thence.capture.marks.watching import watch
from thence.errors import UsageError, WrongArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Self

    from thence.capture.marks.watching import Frame

_F = TypeVar("_F", bound="Callable[..., Any]")
_modules = sys.modules


class mark:  # noqa: N801 - used like a function
    """Names the work inside it, for every tool that is active.

        with thence.mark("attention", layer=3):
            ...

        @thence.mark("loss")
        def loss(...): ...

    Nested marks form a path. Marks name:

    - the nodes of a CUDA graph that is being captured, on whatever stream, including the backward: see
      `thence.save_labels`
    - ranges in torch.profiler and in JAX's profiler while they run, NVTX ranges if a tool such as
      Nsight Systems collects them, and ranges in thence's own recordings
    - operations that JAX traces (jax.named_scope)
    - operations that torch.compile traces, and the kernels that Inductor generates for them, once a CUDA
      graph captures these kernels (PyTorch 2.9 and newer; in older versions compiled code only has the
      marks around it). In compiled code, make the mark where it is used, or use it as a decorator:
      TorchDynamo refuses context managers that were made outside

    If no tool is active, a mark costs less than a microsecond. One mark can be used repeatedly, and in
    several threads at once. Around a coroutine function it is open while the coroutine runs or waits;
    around a generator function, while the generator runs.

    Args:
        name: name of the work; or a dict of it and further facts, as PyTorch's mark_kernels takes it: ``{"name":
            "attention", "stream": 61, "layer": 3}`` is the same as the arguments of these names.
        lane: name or number of an extra lane that shows the work again, in addition to its real stream, in
            timelines made with ``--lanes lane``. After a number, the names of the marks on the lane are shown
            in parentheses.
        stream: the same as `lane`, under the name that PyTorch's mark_kernels uses; the work stays on its
            stream.
        metadata: further facts to show with the work: numbers, strings and lists of them. Inner marks
            override outer ones.

    Raises:
        WrongArgument: the name is not a string, the lane is neither name nor number, or both `lane` and
            `stream` are given.
    """

    __slots__ = ("lane", "metadata", "name")

    from_library = False

    def __init__(
        self,
        name: str | Mapping[str, Any],
        lane: str | int | None = None,
        *,
        stream: str | int | None = None,
        **metadata: object,
    ) -> None:
        given = name
        if isinstance(name, dict):
            facts = {**name, **metadata}
            name = facts.pop("name", None)
            lane, stream = facts.pop("lane", lane), facts.pop("stream", stream)
            metadata = facts
        if not isinstance(name, str):
            raise WrongArgument(
                'mark needs a name, as in thence.mark("attention") or thence.mark({"name": "attention"}), '
                f"not {given!r}"
            )
        self.name = name
        self.lane = None if lane is None and stream is None else _lane(lane, stream)
        self.metadata = metadata

    def __enter__(self) -> Self:
        w = watch
        if w.compiling():  # a constant for TorchDynamo, which does not trace the rest
            opens(self.name)
            return self
        if len(_modules) != w.modules:
            w.look()
        wanted = w.ranges or w.profiler._is_profiler_enabled  # noqa: SLF001 - the flag has no other name
        state = thread.state if w.loop is None or w.loop() is None else task
        number = next(numbers)
        frame: Frame = (state.top, number, self, self._ranges() if wanted else None)
        state.top = frame
        if w.sequence is not None:
            log, start = state.log, w.sequence()
            if log.starts[-1] == start:
                log.frames[-1] = frame
            else:
                log.note(start, frame)
        if w.opened is not None:
            w.opened(number, self.name, self.lane, self.metadata)
        if w.changed is not None:
            w.changed(frame)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        w = watch
        if w.compiling():
            ends()
            return
        state = thread.state if w.loop is None or w.loop() is None else task
        frame = state.top
        if frame is not None and frame[2] is self:
            rest = frame[0]
        else:
            frame, rest = _taken_out(frame, self)
            if frame is None:
                return  # opened in another thread or task
        state.top = rest
        if w.sequence is not None:
            log, start = state.log, w.sequence()
            if log.starts[-1] == start:
                log.frames[-1] = rest
            else:
                log.note(start, rest)
        if w.changed is not None:
            w.changed(top.get())
        if w.closed is not None:
            w.closed(frame[1])
        if frame[3]:
            for opened in reversed(frame[3]):
                opened.__exit__(kind, error, traceback)

    def __call__(self, function: _F) -> _F:
        """Returns the function with the mark open whenever it runs."""
        if not callable(function):
            raise UsageError(f"mark decorates functions, not {function!r}")
        for test, wrap in (
            (inspect.isasyncgenfunction, _marked_async_generator),
            (inspect.iscoroutinefunction, _marked_coroutine),
            (inspect.isgeneratorfunction, _marked_generator),
        ):
            if test(function):
                return wrap(self, function)  # type: ignore[return-value]

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if watch.compiling():  # TorchDynamo only enters context managers made in traced code
                with mark(self.name, self.lane, **self.metadata):  # type: ignore[arg-type]  # no lane among these
                    return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return marked  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"thence.mark({self.name!r})"

    def _ranges(self) -> list[Any] | None:
        """Open ranges in the tools that show them."""
        return watch.open_ranges(self.name)


def _lane(lane: object, stream: object) -> str:
    """The lane of a mark, as text."""
    if lane is not None and stream is not None:
        raise WrongArgument(f"lane={lane!r} and stream={stream!r} mean the same: give one of them")
    wanted = stream if lane is None else lane
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return str(wanted)
    if not isinstance(wanted, str):
        raise WrongArgument(
            f"a lane must be a name or a number, not {wanted!r}; marks do not move work to other streams"
        )
    return wanted


class LibraryMark(mark):
    """A mark set by a library: it adds metadata, and its name is a fallback, for work without any other name.

    Profilers show ranges for such work by themselves.
    """

    __slots__ = ()

    from_library = True

    def _ranges(self) -> None:
        return None


def _taken_out(frame: Frame | None, wanted: mark) -> tuple[Frame | None, Frame | None]:
    """The innermost frame with the mark `wanted`, which is not the innermost mark, and the frames without it.

    This happens for a generator that has a mark open while its caller opens and closes others.
    """
    above = []
    while frame is not None and frame[2] is not wanted:
        above.append(frame)
        frame = frame[0]
    if frame is None:
        return None, None
    rest: Frame | None = frame[0]
    for inner in reversed(above):
        rest = (rest, *inner[1:])
    return frame, rest


def _marked_coroutine(around: mark, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def marked(*args: Any, **kwargs: Any) -> Any:
        with around:
            return await function(*args, **kwargs)

    return marked


def _marked_generator(around: mark, function: Callable[..., Any]) -> Callable[..., Any]:
    """The mark is open from each next() to its yield: the work of the caller in between is not the generator's."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        generator = function(*args, **kwargs)
        step, value = generator.send, None
        while True:
            try:
                with around:
                    item = step(value)
            except StopIteration as stop:
                return stop.value
            try:
                value = yield item
                step = generator.send
            except GeneratorExit:
                with around:
                    generator.close()
                raise
            except BaseException as error:  # noqa: BLE001 - thrown in by the caller: the generator's to handle
                step, value = generator.throw, error

    return marked


def _marked_async_generator(around: mark, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for an asynchronous generator."""

    @functools.wraps(function)
    async def marked(*args: Any, **kwargs: Any) -> Any:
        generator = function(*args, **kwargs)
        step, value = generator.asend, None
        while True:
            try:
                with around:
                    item = await step(value)
            except StopAsyncIteration:
                return
            try:
                value = yield item
                step = generator.asend
            except GeneratorExit:
                with around:
                    await generator.aclose()
                raise
            except BaseException as error:  # noqa: BLE001 - thrown in by the caller: the generator's to handle
                step, value = generator.athrow, error

    return marked
