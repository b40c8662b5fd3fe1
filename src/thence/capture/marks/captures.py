"""Follows CUDA-graph captures of PyTorch, and finds which marks were open when each of their nodes was made.

Every capture of PyTorch goes through torch.cuda.CUDAGraph: torch.cuda.graph, make_graphed_callables and
the graph trees of torch.compile(mode="reduce-overhead") call its capture_begin and capture_end. These
are wrapped; replay is not. At each mark the number of nodes in the graph is noted. Nodes are numbered in
the order of their creation, so at the end these notes give the mark of each node, on whatever stream it
is. In the same way, the boundaries of a recording and the launches of code that Inductor generated give
the module, lines and phase of each node.
"""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from thence.capture.boundaries.places import LINE, MODULE, PHASE
from thence.capture.cuda import cupti as cupti_library
from thence.capture.cuda import driver as driver_library
from thence.capture.marks.captured_calls import CapturedCalls
from thence.capture.marks.captured_places import Called, node_places, with_calls
from thence.capture.marks.frames import label_of, numbers, reopened, thread, top
from thence.capture.marks.generated_lines import generated
from thence.capture.marks.launch_facts import main_marks, main_part
from thence.capture.marks.marking import LibraryMark, mark
from thence.errors import MissingRequirement

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.capture.boundaries.log import BoundaryLog
    from thence.capture.boundaries.places import Places
    from thence.capture.cuda.driver import GraphDriver
    from thence.capture.marks.captured_places import Noted
    from thence.capture.marks.generated import LineFacts
    from thence.capture.marks.generated_lines import Run
    from thence.capture.marks.graph_labels import Label, LabelledGraphs
    from thence.capture.marks.graph_nodes import CapturedGraph, NodeIds
    from thence.capture.marks.watching import Frame, Watch


@dataclass
class _Capture:
    """A capture in progress.

    Attributes:
        graph: handle of the CUgraph.
        stream: stream on which the capture began.
        device: index of the CUDA device.
        thread: thread that began it.
        base: frame of the autograd node in which it began; None outside of nodes.
        log: the frames that became the innermost one, each with the number of nodes at that moment.
        places: the notes about places, each with the number of nodes at that moment.
        calls: the operators that were called, in order of their begin.
    """

    graph: int
    stream: int
    device: int
    thread: int
    base: Frame | None
    log: list[tuple[int, Frame | None]] = field(default_factory=list)
    places: list[tuple[int, Noted]] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)


class Streams(Protocol):
    """The stream and device that this thread uses; handles are integers."""

    def current(self) -> int:
        """The current stream."""

    def device(self) -> int:
        """Index of the current device."""


class TorchStreams:
    """The stream and device that PyTorch uses on this thread."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def current(self) -> int:
        """The current stream."""
        return int(self._torch.cuda.current_stream().cuda_stream)

    def device(self) -> int:
        """Index of the current device."""
        return int(self._torch.cuda.current_device())


class Captures:
    """The captures of this process.

    Nothing here raises in the program that is being captured: failures become notes.

    Attributes:
        in_backward: returns the frame of the autograd node that this thread is running, if any.
    """

    def __init__(
        self,
        graphs: LabelledGraphs,
        streams: Streams,
        watch: Watch,
        load_driver: Callable[[], GraphDriver] = driver_library.load,
        load_cupti: Callable[[], NodeIds] = cupti_library.load,
    ) -> None:
        self._graphs = graphs
        self._streams = streams
        self._watch = watch
        self._load_driver = functools.cache(load_driver)
        self._load_cupti = functools.cache(load_cupti)  # finding the library takes milliseconds
        self._live: list[_Capture] = []
        self._for_threads: dict[int, int] = {}
        self.in_backward: Callable[[], Frame | None] = lambda: None
        self._boundaries: tuple[BoundaryLog, Places] | None = None
        self._owners: weakref.WeakKeyDictionary[Any, CapturedGraph] = weakref.WeakKeyDictionary()

    def follow_boundaries(self, boundaries: tuple[BoundaryLog, Places] | None) -> None:
        """Give nodes the places of a recording's boundaries, from the next capture on; None: stop doing so."""
        self._boundaries = boundaries

    def begun(self) -> None:
        """Follow the capture of the current stream, if there is one that is not followed yet."""
        try:
            stream = self._streams.current()
            graph = self._load_driver().captured_graph(stream)
        except MissingRequirement as error:
            self._graphs.note(f"a capture could not be observed: {error}")
            return
        if graph is None or any(live.graph == graph for live in self._live):
            return
        for capture in [live for live in self._live if live.stream == stream]:
            self._forget(capture)  # its end was not observed
            self._graphs.note("a capture ended without torch.cuda.CUDAGraph, so it has no labels")
        base = self.in_backward()
        capture = _Capture(graph, stream, self._streams.device(), threading.get_ident(), base)
        self._live.append(capture)
        self._note_frame(capture, base or top.get())
        self._watch.watch_captures(self.changed)
        self._follow_places(capture)

    def changed(self, frame: Frame | None) -> None:
        """Note that a frame became the innermost one on this thread."""
        for capture in tuple(self._live):
            if self._belongs(capture):
                self._note_frame(capture, frame)

    def ending(self) -> CapturedGraph | None:
        """Read the graph of the current stream's capture just before its end; None if it failed or has no nodes."""
        self.begun()  # in case its beginning was not observed
        stream = self._streams.current()
        capture = next((live for live in self._live if live.stream == stream), None)
        if capture is None:
            return None
        self._forget(capture)
        try:
            driver = self._load_driver()
            if driver.captured_graph(capture.stream) != capture.graph:
                self._graphs.note("a capture failed, so its graph has no labels")
                return None
            if not driver.node_count(capture.graph):
                return None  # graph trees capture an empty graph first
            labels = _labels(capture.log)
            named = {} if self._boundaries is None else self._boundaries[1].named()
            places = with_calls(node_places(capture.places, named), capture.calls)
            for sentence in tuple(generated.notes):
                self._graphs.note(sentence)
            return self._graphs.add(driver, self._load_cupti(), capture.graph, capture.device, labels, places)
        except MissingRequirement as error:
            self._graphs.note(f"the nodes of a captured graph could not be read: {error}")
            return None

    def called(self, name: str, inputs: str, node: int | None, backward: bool) -> Callable[[], None]:  # noqa: FBT001
        """Note that this thread calls an operator; the result is to be called when it has returned.

        The arguments are those of `thence.capture.marks.captured_places.Called`.
        """
        begun = []
        for capture in tuple(self._live):
            if self._belongs(capture) and (count := self._count(capture)) is not None:
                call = Called(name, inputs, node, backward, count, count)
                capture.calls.append(call)
                begun.append((capture, call))

        def ended() -> None:
            for capture, call in begun:
                call.end = self._count(capture) or call.begin

        return ended

    def ended(self, owner: Any, captured: CapturedGraph) -> None:
        """Handle the success of a capture; `owner` is its torch.cuda.CUDAGraph."""
        self._owners[owner] = captured
        self.instantiated(owner)

    def failed(self, captured: CapturedGraph) -> None:
        """Discard a capture that failed at its end."""
        self._graphs.remove(captured)
        self._graphs.note("a capture failed at its end, so its graph has no labels")

    def instantiated(self, owner: Any) -> None:
        """Note the id of the executable graph of a torch.cuda.CUDAGraph, if it has a new one."""
        captured = self._owners.get(owner)
        if captured is None:
            return
        handle = _executable(owner)
        if handle is None:
            return
        try:
            number = self._load_cupti().graph_exec_id(handle)
        except MissingRequirement as error:
            self._graphs.note(f"the id of an executable graph could not be read: {error}")
            return
        if number not in captured.executables:
            captured.executables.append(number)

    def reset(self, owner: Any) -> None:
        """Handle that a torch.cuda.CUDAGraph releases its graph."""
        self._owners.pop(owner, None)

    def complete(self) -> None:
        """Note the ids of executable graphs whose instantiation was not observed: a first replay() can instantiate."""
        for owner in list(self._owners):
            self.instantiated(owner)

    def work_for(self, caller: int | None) -> None:
        """Note that this thread works for the thread `caller` from now on, as the engine's do; None: for none."""
        if caller is None:
            self._for_threads.pop(threading.get_ident(), None)
        else:
            self._for_threads[threading.get_ident()] = self._for_threads.get(caller, caller)

    def _belongs(self, capture: _Capture) -> bool:
        """Whether the work of this thread goes into a capture."""
        here = threading.get_ident()
        if capture.thread in (here, self._for_threads.get(here)):
            return True
        return self._load_driver().captured_graph(self._streams.current()) == capture.graph

    def _note_frame(self, capture: _Capture, frame: Frame | None) -> None:
        count = self._count(capture)
        if count is None:
            return
        if capture.log and capture.log[-1][0] == count:
            capture.log.pop()  # no node was made under its frame
        capture.log.append((count, frame or capture.base))

    def _count(self, capture: _Capture) -> int | None:
        """The number of nodes of a capture so far; None if the capture has failed."""
        driver = self._load_driver()
        try:
            # A capture can fail at any moment, and its graph is gone then.
            if driver.captured_graph(capture.stream) != capture.graph:
                return None
            return driver.node_count(capture.graph)
        except MissingRequirement as error:
            self._graphs.note(f"a capture could not be followed to its end: {error}")
            return None

    def _follow_places(self, capture: _Capture) -> None:
        """Note places during a capture, beginning with the present ones."""
        for kind in (MODULE, LINE, PHASE):
            number = generated.around.current_place(kind)
            if number:
                capture.places.append((0, number))
        if len(self._live) > 1:
            return  # followed already
        if self._boundaries is not None:
            self._boundaries[0].observer = self._crossed
        if not generated.follow(self._launching) and not generated.trace(self._launching):
            self._graphs.note(
                "kernels of compiled code have only the label of the whole compiled call, because "
                "a debugger or a coverage tool was tracing the program"
            )

    def _crossed(self, place: int) -> None:
        """Note that this thread crossed a boundary."""
        for capture in tuple(self._live):
            if self._belongs(capture) and (count := self._count(capture)) is not None:
                capture.places.append((count, place))

    def _launching(self, run: Run | None, facts: LineFacts | None) -> None:
        """Note that generated code is about to launch something, or has ended."""
        for capture in tuple(self._live):
            if not self._belongs(capture) or (count := self._count(capture)) is None:
                continue
            known = run is not None and facts is not None
            capture.places.append((count, (run, facts) if known else None))  # type: ignore[arg-type]
            base = capture.base or top.get()
            frame = _frame_of(base, facts) if facts is not None and facts.parts else base
            if capture.log and capture.log[-1][0] == count:
                capture.log.pop()
            capture.log.append((count, frame or capture.base))

    def _forget(self, capture: _Capture) -> None:
        self._live.remove(capture)
        if not self._live:
            if self._boundaries is not None:
                self._boundaries[0].observer = None
            generated.unfollow(self._launching)
            generated.untrace(self._launching)
            self._watch.watch_captures(None)


def _frame_of(base: Frame | None, facts: LineFacts) -> Frame:
    """The frame of a launch in generated code, with the marks around the launch and its operator."""
    paths = main_marks(facts.parts)
    frame = base
    for name in paths[0] if paths else ():
        frame = (frame, next(numbers), mark(name), None)
    operators = dict.fromkeys(part.op for part in facts.parts if part.op)
    metadata: dict[str, Any] = {"Original ATen": ", ".join(operators)}
    if len(paths) > 1:  # fused from several
        metadata["marks"] = ["/".join(path) for path in paths]
    name = main_part(facts.parts).op or "compiled"
    return (frame, next(numbers), LibraryMark(name, None, **metadata), None)


def _labels(log: list[tuple[int, Frame | None]]) -> list[tuple[int, Label | None]]:
    """The log with labels in place of frames."""
    known: set[tuple[str, ...]] | None = None
    labels: dict[int, Label | None] = {}
    for _, frame in log:
        if frame is None or frame[1] in labels:
            continue
        if known is None and reopened(frame):
            known = thread.state.log.paths()
        labels[frame[1]] = label_of(frame, known or set())
    return [(count, None if frame is None else labels[frame[1]]) for count, frame in log]


def _executable(owner: Any) -> int | None:
    """Handle of a torch.cuda.CUDAGraph's CUgraphExec; None if there is none yet, or torch does not return it."""
    if not hasattr(owner, "raw_cuda_graph_exec"):
        return None  # before torch 2.8
    try:
        return int(owner.raw_cuda_graph_exec())
    except RuntimeError:
        return None


def patch_torch(torch: Any, captures: Captures) -> Callable[[], None]:
    """Wrap the methods of torch.cuda.CUDAGraph to follow captures; the result undoes that."""
    owner = torch.cuda.CUDAGraph
    wrappers = _wrappers(captures, CapturedCalls(torch, captures.called))
    originals = {name: vars(owner)[name] for name in wrappers if name in vars(owner)}
    for name, original in originals.items():
        setattr(owner, name, _wrapped(original, wrappers[name]))
    if torch.cuda.is_initialized():
        captures.begun()  # this may be during a capture

    def undo() -> None:
        for name, original in originals.items():
            setattr(owner, name, original)

    return undo


def _wrappers(captures: Captures, calls: CapturedCalls) -> dict[str, Callable[..., None]]:
    """Wrappers by name of the method of torch.cuda.CUDAGraph; each is called with the method and the graph."""

    def capture_begin(original: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
        original(owner, *args, **kwargs)
        captures.begun()
        calls.enter()

    def capture_end(original: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
        calls.leave()
        captured = captures.ending()
        try:
            original(owner, *args, **kwargs)
        except BaseException:
            if captured is not None:
                captures.failed(captured)
            raise
        if captured is not None:
            captures.ended(owner, captured)

    def instantiate(original: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
        original(owner, *args, **kwargs)
        captures.instantiated(owner)

    def reset(original: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
        captures.reset(owner)
        original(owner, *args, **kwargs)

    known = (capture_begin, capture_end, instantiate, reset)
    return {wrapper.__name__: wrapper for wrapper in known}


def _wrapped(original: Any, wrapper: Callable[..., None]) -> Any:
    @functools.wraps(original)
    def wrapped(owner: Any, *args: Any, **kwargs: Any) -> None:
        wrapper(original, owner, *args, **kwargs)

    return wrapped
