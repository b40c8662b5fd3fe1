"""Notes module, line and phase of the launches of compiled code, as boundaries of a recording.

Before each launch of code that Inductor generated, `thence.capture.marks.generated_lines` reports from which parts of
the program the kernel was made. The places of its main part are noted if they changed; when the code has ended, the
places of the eager code around it are noted again. A fused kernel has one place of each kind: that of its main part
(`thence.capture.marks.launch_facts.main_part`, an estimate).

An unknown module is a place without a name whose ``detail`` is the code of the reason (`thence.model.reasons`).
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

from thence.capture.boundaries.chains import GENERATED
from thence.capture.boundaries.places import LINE, MODULE, PHASE, Place
from thence.capture.marks.captured_places import module_of_part, phase_of_part
from thence.capture.marks.generated_lines import UnknownPlaces, generated
from thence.capture.marks.launch_facts import main_part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.capture.boundaries.chains import Chains
    from thence.capture.boundaries.log import BoundaryLog
    from thence.capture.boundaries.places import Places
    from thence.capture.marks.generated import LineFacts
    from thence.capture.marks.generated_lines import EagerPlaces, GeneratedLines, Run
    from thence.capture.marks.launch_facts import Part
    from thence.capture.torch.modules import ModulePaths
    from thence.capture.torch.own_files import OwnFiles
    from thence.capture.torch.threads import Common, Threads

_KINDS = (MODULE, LINE, PHASE)
_FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+) (?P<function>.*)", re.DOTALL)
_OPERATORS_OF_TORCH = ("aten.", "prims.", "inductor.")
_Numbers = tuple[int, int, int]
"""Numbers of the places of module, line and phase."""


class _Local(threading.local):
    """The state of one thread.

    Attributes:
        run: the call of generated code that the thread is in.
        outer: places around this call.
        last: the places noted last; 0 for a place that has to be noted in any case.
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        self.outer: _Numbers = (0, 0, 0)
        self.last: _Numbers = (0, 0, 0)


class CurrentPlaces:
    """`thence.capture.marks.generated_lines.EagerPlaces` by hooks: the innermost places of the calling thread."""

    def __init__(self, common: Common, threads: Threads, module_paths: ModulePaths, is_own: OwnFiles) -> None:
        self._common = common
        self._threads = threads
        self._paths = module_paths
        self._is_own = is_own

    def current_module(self) -> str | None:
        """Path of the innermost module that is running; None outside of all modules."""
        return self._paths.path(self._common.here(self._threads.now)[0])

    def current_place(self, kind: int) -> int:
        """Number of the innermost place of a kind; 0 if it is not known."""
        thread = self._threads.now
        module, line = self._common.here(thread)
        return {MODULE: module, LINE: line, PHASE: thread.phase}.get(kind, 0)

    def is_own(self, file: str) -> bool:
        """Whether lines of a file are the user's."""
        return self._is_own(file)


class CompiledPlaces:
    """Notes boundaries while code that Inductor generated runs.

    Args:
        around: the places of the calling thread in eager code; None without hooks of eager code.
        lines: reports the launches of generated code.
        chains: takes module and line of generated code if stacks are read; None if boundaries are noted.
    """

    def __init__(
        self,
        places: Places,
        log: BoundaryLog,
        around: EagerPlaces | None = None,
        lines: GeneratedLines = generated,
        chains: Chains | None = None,
    ) -> None:
        self._places = places
        self._log = log
        self._around: EagerPlaces = around or UnknownPlaces()
        self._lines = lines
        self._local = _Local()
        self._chains = chains
        self._known_to_chains: set[int] = set()
        self._known: dict[tuple[int, str | None, int, str], tuple[LineFacts, _Numbers]] = {}

    @property
    def notes(self) -> Mapping[str, None]:
        """Sentences about what is not known, and why."""
        return self._lines.notes

    def begin(self) -> bool:
        """Follow compiled code from now on.

        Returns:
            whether compiled code can be followed, which takes Python 3.12 or newer; if not, `notes` has the reason.
        """
        self._lines.around = self._around
        if self._lines.follow(self.changed):
            return True
        self._lines.note(
            "kernels of compiled code outside of CUDA graphs get the module and line that called "
            "the code, because finer attribution requires Python 3.12 and a free id of "
            "sys.monitoring"
        )
        return False

    def end(self) -> None:
        """Follow compiled code no longer."""
        self._lines.unfollow(self.changed)
        self._lines.around = UnknownPlaces()

    def changed(self, run: Run | None, facts: LineFacts | None) -> None:
        """Called by `thence.capture.marks.generated_lines` before generated code launches something, and at its end."""
        here = self._local
        if run is None:
            return
        if run is not here.run:
            here.run = run
            here.outer = self._outer()
            here.last = (0, 0, 0)
            self._watch(run)
        if facts is None:
            self._leave(here)
            return
        self._note(here, self._numbers(run, facts, here.outer))
        if facts.parts and not facts.parts[0].op.startswith(_OPERATORS_OF_TORCH):
            here.last = (0, 0, 0)  # a custom operator of the user's may run Python code that notes places of its own

    def _outer(self) -> _Numbers:
        module, line, phase = (self._around.current_place(kind) or self._places.nothing(kind) for kind in _KINDS)
        return module, line, phase

    def _note(self, here: _Local, numbers: _Numbers) -> None:
        """Notes the places that have changed."""
        if numbers == here.last:
            return
        observe = self._log.observer
        if self._chains is not None:
            self._chains.native.go_below(1, 1, *numbers[:2])
        for kind, number, before in zip(_KINDS, numbers, here.last, strict=True):
            if number == before:
                continue
            if self._chains is None or kind == PHASE:
                self._log.note(number)
            elif observe is not None:
                observe(number)
        here.last = numbers

    def _leave(self, here: _Local) -> None:
        """Handle the end of generated code."""
        self._note(here, here.outer)
        if self._chains is not None:
            self._chains.native.go_below(1, 0, 0, 0)
        here.run = None

    def _watch(self, run: Run) -> None:
        """Register the code of a run as generated, so that chains end at it."""
        if self._chains is not None and id(run.module) not in self._known_to_chains:
            self._known_to_chains.add(id(run.module))
            for code in run.module.codes:
                self._chains.watch(code, GENERATED)

    def _numbers(self, run: Run, facts: LineFacts, outer: _Numbers) -> _Numbers:
        """Numbers of the places of a launch."""
        key = (id(facts), run.prefix, run.line, run.phase)
        known = self._known.get(key)
        if known is None or known[0] is not facts:
            known = self._known[key] = (facts, self._placed(run, facts))
        module, line, phase = known[1]
        # A place that is not known from the code is that of the code around it.
        return module or run.instance or outer[0], line or outer[1], phase or outer[2]

    def _placed(self, run: Run, facts: LineFacts) -> _Numbers:
        if not facts.parts:
            return self._unknown(facts), run.line, 0
        part = main_part(facts.parts)
        phase = phase_of_part(run, part)
        return (
            self._module(run, part, facts),
            self._line(run, part),
            self._places.number(Place(PHASE, 0, phase)) if phase else 0,
        )

    def _module(self, run: Run, part: Part, facts: LineFacts) -> int:
        path = module_of_part(run, part, facts)
        if path is None:
            return self._unknown(facts) if part.phase != "gradient" else self._places.nothing(MODULE)
        if path == run.prefix:
            return run.instance
        return self._places.number(Place(MODULE, run.instance if run.prefix else 0, path))

    def _unknown(self, facts: LineFacts) -> int:
        reason = "compiled_before" if facts.before else "made_by_compiler"
        return self._places.number(Place(MODULE, 0, None, reason))

    def _line(self, run: Run, part: Part) -> int:
        """Number of the innermost line of the user's code, under the line that called the generated code."""
        number = run.line
        for frame in part.stack:
            match = _FRAME.fullmatch(frame)
            if match is not None and self._around.is_own(match["file"]):
                place = Place(LINE, number, match["function"], match["file"], int(match["line"]))
                number = self._places.number(place)
        return number
