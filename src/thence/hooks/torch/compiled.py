"""Module, line and phase of what compiled code launches, as boundaries of a recording.

`thence.marks.generated_lines` tells before each launch of code that Inductor generated what it is made of. The
places of its main part are noted where they change, and when the code is over those of the eager code around it.
A fused kernel has one place of each kind: that of its main part (`thence.marks.launch_facts.main_part`, estimated).

A module that cannot be told is a place without a name whose ``detail`` is the code of the reason
(`thence.model.reasons`).
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

from thence.boundaries.chains import GENERATED
from thence.boundaries.places import LINE, MODULE, PHASE, Place
from thence.marks.captured_places import module_of_part, phase_of_part
from thence.marks.generated_lines import Nowhere, generated
from thence.marks.launch_facts import main_part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.boundaries.chains import Chains
    from thence.boundaries.log import BoundaryLog
    from thence.boundaries.places import Places
    from thence.marks.generated import LineFacts
    from thence.marks.generated_lines import Around, GeneratedLines, Run
    from thence.marks.launch_facts import Part

__all__ = ["CompiledPlaces"]

_KINDS = (MODULE, LINE, PHASE)
_FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+) (?P<function>.*)", re.DOTALL)
_OPERATORS_OF_TORCH = ("aten.", "prims.", "inductor.")
_Numbers = tuple[int, int, int]
"""Of the places of module, line and phase."""


class _Local(threading.local):
    """What one thread notes.

    Attributes:
        run: the call of generated code that it is in.
        outer: places around that.
        last: places that were noted last; 0 where it must be noted in any case.
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        self.outer: _Numbers = (0, 0, 0)
        self.last: _Numbers = (0, 0, 0)


class CompiledPlaces:
    """Notes boundaries while code that Inductor generated runs.

    Args:
        places: of the recording.
        log: takes the boundaries.
        around: what the hooks of eager code know of the calling thread; None where there are none.
        lines: that are followed.
        chains: has the places below generated code, where stacks are read; None where boundaries are noted.
    """

    def __init__(
        self,
        places: Places,
        log: BoundaryLog,
        around: Around | None = None,
        lines: GeneratedLines = generated,
        chains: Chains | None = None,
    ) -> None:
        self._places = places
        self._log = log
        self._around: Around = around or Nowhere()
        self._lines = lines
        self._local = _Local()
        self._chains = chains
        self._known_to_chains: set[int] = set()
        self._known: dict[tuple[int, str | None, int, str], tuple[LineFacts, _Numbers]] = {}

    @property
    def notes(self) -> Mapping[str, None]:
        """What could not be told and why, as sentences."""
        return self._lines.notes

    def begin(self) -> bool:
        """From now on.

        Returns:
            whether compiled code can be followed: Python 3.12 and newer; `notes` says why not.
        """
        self._lines.around = self._around
        if self._lines.follow(self.changed):
            return True
        self._lines.note(
            "what compiled code launches outside of CUDA graphs has the module and line of the call of that code, as "
            "following its instructions takes Python 3.12 and a free id of sys.monitoring"
        )
        return False

    def end(self) -> None:
        """No longer."""
        self._lines.unfollow(self.changed)
        self._lines.around = Nowhere()

    def changed(self, run: Run | None, facts: LineFacts | None) -> None:
        """Generated code launches something from here on, or is over: `thence.marks.generated_lines`."""
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
            here.last = (
                0,
                0,
                0,
            )  # an operator of the user may run Python, and note places of its own

    def _outer(self) -> _Numbers:
        module, line, phase = (
            self._around.current_place(kind) or self._places.nothing(kind) for kind in _KINDS
        )
        return module, line, phase

    def _note(self, here: _Local, numbers: _Numbers) -> None:
        """Notes what has changed."""
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
        """The code is over."""
        self._note(here, here.outer)
        if self._chains is not None:
            self._chains.native.go_below(1, 0, 0, 0)
        here.run = None

    def _watch(self, run: Run) -> None:
        """Have chains end at the code that runs."""
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
        # What the code does not say is as around it.
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
            return (
                self._unknown(facts) if part.phase != "gradient" else self._places.nothing(MODULE)
            )
        if path == run.prefix:
            return run.instance
        return self._places.number(Place(MODULE, run.instance if run.prefix else 0, path))

    def _unknown(self, facts: LineFacts) -> int:
        reason = "compiled_before" if facts.before else "made_by_compiler"
        return self._places.number(Place(MODULE, 0, None, reason))

    def _line(self, run: Run, part: Part) -> int:
        """Number of the innermost line of the user's, below the line that called the code."""
        number = run.line
        for frame in part.stack:
            match = _FRAME.fullmatch(frame)
            if match is not None and self._around.is_own(match["file"]):
                place = Place(LINE, number, match["function"], match["file"], int(match["line"]))
                number = self._places.number(place)
        return number
