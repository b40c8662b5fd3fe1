"""Follows code that Inductor generated while it runs, and reports the next launch, on any thread.

Generated modules are read when they are loaded, from a cold cache or a warm one. While there are followers, the
functions of these modules, and no other code, have events for instructions (sys.monitoring, Python 3.12); the event of
an instruction that begins no launch is disabled the first time. Events for lines would be enough, but in long
functions such as these, each takes microseconds to find the number of its line.
Before Python 3.12 a capture of a CUDA graph follows generated code with sys.settrace, only on its own thread; outside
of captures it is not followed.

Paths of modules in generated code are relative to the module that was compiled. If several instances share the code
(``compile()`` of each block), the path of the instance is that of the module that is running; in the backward, it is
that of the forward which made the autograd node, found by the node's sequence number.
"""

from __future__ import annotations

import functools
import sys
import threading
from contextlib import contextmanager
from opcode import EXTENDED_ARG
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from thence.capture.boundaries.places import LINE, MODULE
from thence.capture.marks.generated import is_generated, read_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import CodeType, FrameType

    from thence.capture.marks.generated import LineFacts, Module

_TOOL_IDS = (4, 3)
"""Tool ids of sys.monitoring that are not reserved."""
_MAX_FORWARDS = 1 << 14
"""Limit on the calls of forwards that are kept for their backward."""
_HEAD = 300  # first characters of a module, which contain the id


class EagerPlaces(Protocol):
    """The places of the calling thread in eager code, from hooks."""

    def current_module(self) -> str | None:
        """Path of the innermost nn.Module that is running; None if there is none, or it is not known."""

    def current_place(self, kind: int) -> int:
        """Number of the innermost place of a kind (`thence.capture.boundaries.places`); 0 if it is not known."""

    def is_own(self, file: str) -> bool:
        """Whether lines of a file are to be shown."""


class UnknownPlaces:
    """The `EagerPlaces` for processes without hooks of eager code: no place is known."""

    def current_module(self) -> str | None:
        """Returns None: not known."""
        return None

    def current_place(self, kind: int) -> int:
        """Returns 0: not known."""
        return 0 * kind

    def is_own(self, file: str) -> bool:
        """Returns True for every file with a name."""
        return bool(file)


class Run(NamedTuple):
    """One call of a generated module.

    Attributes:
        module: the generated module.
        prefix: path of the module instance that was compiled; None if it is not known.
        line: number of the place of the line that called the code, or its forward; 0 if it is not known.
        instance: number of the place of that module instance; 0 if it is not known.
        phase: phase to use instead of that of its nodes; empty to use that of the nodes.
    """

    module: Module
    prefix: str | None
    line: int
    instance: int = 0
    phase: str = ""

    def path(self, relative: str | None) -> str | None:
        """Path of a module, from its path relative to the compiled one; None if neither it nor `prefix` is known."""
        if not self.prefix:
            return relative if self.prefix is None else (relative or "")
        return f"{self.prefix}.{relative}" if relative else self.prefix


class _Thread(threading.local):
    """The state of a thread: the call of generated code that it runs, and the graphs that it compiles."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.opened_by: CodeType | None = None
        self.graphs: list[Any] = []


class GeneratedLines:
    """The generated modules of this process, and the followers of their launches.

    Nothing here raises in the program.

    Attributes:
        around: the places of threads in eager code.
        notes: sentences about what is not known and why, each once.
    """

    def __init__(self) -> None:
        self.around: EagerPlaces = UnknownPlaces()
        self.notes: dict[str, None] = {}
        self._lines: dict[int, Mapping[int, LineFacts]] = {}
        self._offsets: dict[int, dict[int, LineFacts]] = {}
        self._modules: dict[int, Module] = {}
        self._followers: tuple[Callable[[Run | None, LineFacts | None], None], ...] = ()
        self._forwards: dict[int, tuple[int, str | None, int, int]] = {}
        self._thread = _Thread()
        self._tool: int | None = None
        self._lock = threading.RLock()

    def note(self, sentence: str) -> None:
        """Add a sentence to `notes`."""
        self.notes[sentence] = None

    def follow_loading(self) -> None:
        """Read generated modules when they are loaded from now on, and those that are loaded already."""
        codecache = sys.modules.get("torch._inductor.codecache")
        cache = getattr(codecache, "PyCodeCache", None)
        if cache is not None and not hasattr(cache.load_by_key_path, "thence_original"):
            original = cache.load_by_key_path.__func__

            @functools.wraps(original)
            def load_by_key_path(cls: Any, key: str, path: str, linemap: Any = None, *args: Any, **kwargs: Any) -> Any:
                module = original(cls, key, path, linemap, *args, **kwargs)
                self.loaded(module, linemap or ())
                return module

            load_by_key_path.thence_original = original  # type: ignore[attr-defined]
            cache.load_by_key_path = classmethod(load_by_key_path)
            for module in list(cache.modules):
                path = module.__file__
                self.loaded(module, list(zip(*cache.linemaps.get(path, ()), strict=False)))
        self._follow_compiling()

    def _follow_compiling(self) -> None:
        """Keep TorchDynamo's graph available while code for it is generated or loaded."""
        compile_fx = sys.modules.get("torch._inductor.compile_fx")
        original = getattr(compile_fx, "compile_fx", None)
        if original is None or hasattr(original, "thence_original"):
            return

        @functools.wraps(original)
        def compiling(model: Any, *args: Any, **kwargs: Any) -> Any:
            with self._graph(getattr(model, "graph", None)):
                return original(model, *args, **kwargs)

        compiling.thence_original = original  # type: ignore[attr-defined]
        compile_fx.compile_fx = compiling  # type: ignore[union-attr]

    @contextmanager
    def _graph(self, graph: Any) -> Iterator[None]:
        graphs = self._thread.graphs
        graphs.append(graph)
        try:
            yield
        finally:
            graphs.pop()

    def loaded(self, module: Any, line_map: Any) -> None:
        """Read a module that Inductor loaded; a module that is not the code of a compiled graph is ignored."""
        try:
            with open(module.__file__, encoding="utf-8") as file:  # noqa: PTH123 - runs in the user's program
                head = file.read(_HEAD)
                if is_generated(head.split("\n")) is None:
                    return
                lines = (head + file.read()).split("\n")
            graph = self._thread.graphs[-1] if self._thread.graphs else None
            generated_module = read_module(module, lines, line_map, graph)
        except Exception as error:  # noqa: BLE001 - the program comes first
            self.note(f"code that was compiled could not be read: {error!r}")
            return
        if generated_module is None:
            return
        if any(first.before for first in generated_module.first_facts()):
            self.note(
                "code from a compile cache that was filled without thence has no modules for its "
                "backward pass, and only a part of the other facts: empty the cache or set "
                "TORCH_COMPILE_CACHE_KEY_TAG to recompile it"
            )
        with self._lock:
            for code in generated_module.codes:
                facts = generated_module.lines.get(id(code), {})
                self._lines[id(code)] = facts
                self._offsets[id(code)] = _offsets(code, facts)
                self._modules[id(code)] = generated_module
            if self._tool is not None:
                self._switch(generated_module, on=True)

    def follow(self, follower: Callable[[Run | None, LineFacts | None], None]) -> bool:
        """Call a follower before every launch and at the end of a function, on the thread that runs it.

        Returns:
            whether this works: not before Python 3.12, nor if other tools use all tool ids of sys.monitoring.
        """
        with self._lock:
            if self._tool is None and not self._begin():
                return False
            self._followers = (*self._followers, follower)
            return True

    def unfollow(self, follower: Callable[[Run | None, LineFacts | None], None]) -> None:
        """Stop calling a follower."""
        with self._lock:
            self._followers = tuple(other for other in self._followers if other != follower)
            if not self._followers and self._tool is not None:
                self._end()

    def trace(self, follower: Callable[[Run | None, LineFacts | None], None]) -> bool:
        """As `follow`, but on this thread only, by sys.settrace; until `untrace`.

        Returns:
            whether this works: not if a debugger or a coverage tool uses sys.settrace.
        """
        if "torch._inductor.codecache" not in sys.modules:
            return True  # nothing is compiled
        if sys.gettrace() is not None:
            return False
        self._followers = (*self._followers, follower)
        sys.settrace(self._called)
        return True

    def untrace(self, follower: Callable[[Run | None, LineFacts | None], None]) -> None:
        """Undo `trace`."""
        if sys.gettrace() == self._called:
            sys.settrace(None)
        self._followers = tuple(other for other in self._followers if other != follower)

    def _begin(self) -> bool:
        monitoring = getattr(sys, "monitoring", None)
        if monitoring is None:
            return False
        free = (number for number in _TOOL_IDS if monitoring.get_tool(number) is None)
        self._tool = next(free, None)
        if self._tool is None:
            self.note(
                "kernels of compiled code have no module and no line, because other tools use the ids of sys.monitoring"
            )
            return False
        monitoring.use_tool_id(self._tool, "thence: generated code")
        events = monitoring.events
        monitoring.register_callback(self._tool, events.PY_START, self._started)
        monitoring.register_callback(self._tool, events.INSTRUCTION, self._instruction)
        monitoring.register_callback(self._tool, events.PY_RETURN, self._returned)
        for module in set(self._modules.values()):
            self._switch(module, on=True)
        return True

    def _end(self) -> None:
        monitoring = sys.monitoring  # type: ignore[attr-defined,unused-ignore]  # Python 3.12
        for module in set(self._modules.values()):
            self._switch(module, on=False)
        for event in ("PY_START", "INSTRUCTION", "PY_RETURN"):
            monitoring.register_callback(self._tool, getattr(monitoring.events, event), None)
        monitoring.free_tool_id(self._tool)
        self._tool = None

    def _switch(self, module: Module, *, on: bool) -> None:
        monitoring = sys.monitoring  # type: ignore[attr-defined,unused-ignore]  # Python 3.12
        events = monitoring.events
        wanted = events.PY_START | events.INSTRUCTION | events.PY_RETURN if on else events.NO_EVENTS
        for code in module.codes:
            monitoring.set_local_events(self._tool, code, wanted)

    def _started(self, code: CodeType, _offset: int = 0) -> None:
        """Handle the beginning of a generated function."""
        module = self._modules.get(id(code))
        here = self._thread
        if module is None:
            return
        if code is not module.entry and here.run is not None and here.run.module is module:
            return  # a partition of the module that runs
        here.opened_by = code
        try:
            here.run = self._run(module)
        except Exception as error:  # noqa: BLE001 - the program comes first
            self.note(f"which part of the compiled code runs could not be determined: {error!r}")
            here.run = Run(module, None, 0)

    def _instruction(self, code: CodeType, offset: int) -> Any:
        """Handle the next instruction of a generated function; disables its event if it begins no launch."""
        facts = self._offsets.get(id(code), {}).get(offset)
        if facts is None:
            return sys.monitoring.DISABLE  # type: ignore[attr-defined,unused-ignore]  # Python 3.12
        self._report(self._thread.run, facts)
        return None

    def _returned(self, code: CodeType, _offset: int = 0, _value: object = None) -> None:
        """Handle the end of a generated function."""
        here = self._thread
        run = here.run
        if here.opened_by is code:
            here.run = here.opened_by = None
        self._report(run, None)

    def _report(self, run: Run | None, facts: LineFacts | None) -> None:
        for follower in self._followers:
            try:
                follower(run, facts)
            except Exception as error:  # noqa: BLE001 - the program comes first
                self.note(f"a launch of compiled code could not be recorded: {error!r}")

    def _called(self, frame: FrameType, event: str, _argument: object) -> Any:
        """The function for sys.settrace: follows generated functions only."""
        code = frame.f_code
        lines = self._lines.get(id(code))
        if event != "call" or lines is None:
            return None
        self._started(code)

        def local(frame: FrameType, event: str, _argument: object) -> Any:
            if event == "line" and (facts := lines.get(frame.f_lineno)) is not None:
                self._report(self._thread.run, facts)
            elif event == "return":
                self._returned(code)
            return local

        return local

    def _run(self, module: Module) -> Run:
        torch = sys.modules["torch"]
        node = torch._C._current_autograd_node()  # noqa: SLF001 - no public name
        if module.kind == "backward" and node is not None:
            return Run(module, *self._forward_of(node._sequence_nr()))  # noqa: SLF001
        around = self.around
        prefix, line = around.current_module(), around.current_place(LINE)
        instance = around.current_place(MODULE)
        if module.kind != "forward":
            return Run(module, prefix, line, instance)
        # The autograd node of a compiled forward is made just before its code begins to run.
        number = torch.autograd._get_sequence_nr() - 1  # noqa: SLF001 - no public name
        here = threading.get_ident()
        known = self._forwards.pop(number, None)
        if known is not None and known[0] != here and known[1] != prefix:
            self._forwards[number] = (here, None, 0, 0)  # two threads have this number
        else:
            self._forwards[number] = (here, prefix, line, instance)
        while len(self._forwards) > _MAX_FORWARDS:
            self._forwards.pop(next(iter(self._forwards)), None)
        return Run(module, prefix, line, instance, "recompute" if node is not None else "")

    def _forward_of(self, sequence: int) -> tuple[str | None, int, int]:
        """Prefix, line and instance of the forward that made the autograd node of a number."""
        return self._forwards.get(sequence, (0, None, 0, 0))[1:]


def _offsets(code: CodeType, lines: Mapping[int, LineFacts]) -> dict[int, LineFacts]:
    """The facts of lines, by the offset of each line's first instruction."""
    by_offset: dict[int, LineFacts] = {}
    seen = set()
    instructions = code.co_code
    for start, _, line in code.co_lines():
        if line is None or line in seen or line not in lines:
            continue
        seen.add(line)
        by_offset[start] = lines[line]
        while instructions[start] == EXTENDED_ARG:  # events may be for either instruction
            start += 2  # noqa: PLW2901 - bytes of one instruction
            by_offset[start] = lines[line]
    return by_offset


generated = GeneratedLines()
