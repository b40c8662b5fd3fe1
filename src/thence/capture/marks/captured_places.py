"""Finds the place in the program in which each node of a CUDA graph was made, from notes during its capture.

Three things are noted, each with the number of nodes at that moment: boundaries of eager code
(`thence.capture.boundaries`), if a recording has them, launches in code that Inductor generated
(`thence.capture.marks.generated_lines`), and calls of operators (`thence.capture.marks.captured_calls`).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thence.capture.boundaries.places import LINE, MODULE, PHASE
from thence.capture.marks.generated import LineFacts
from thence.capture.marks.generated_lines import Run
from thence.capture.marks.graph_labels import NodeCall, NodePlace
from thence.capture.marks.launch_facts import main_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from thence.capture.boundaries.places import Place
    from thence.capture.marks.launch_facts import Part

Launch = tuple[Run, LineFacts]
"""The call of generated code, and the facts of its launches until the next note."""
Noted = int | Launch | None
"""Number of a place, a launch, or None for the end of generated code."""

_MAX_FRAMES = 1000


@dataclass
class Called:
    """A call of an operator.

    Attributes:
        name: of the operator.
        inputs: as JSON.
        node: number of the autograd node that runs in a backward pass, or else was made last; None if unknown.
        backward: whether such a node runs.
        begin: number of the graph's nodes before the call.
        end: and after it.
    """

    name: str
    inputs: str
    node: int | None
    backward: bool
    begin: int
    end: int


def with_calls(
    places: Sequence[tuple[int, NodePlace | None]], calls: Sequence[Called]
) -> list[tuple[int, NodePlace | None]]:
    """The same places, with the operator whose call made each node.

    A node of a backward pass outside of all modules has the module and lines of the forward call that made the
    autograd node.

    Args:
        places: as `node_places` returns them.
        calls: in order of their begin, so that of nested calls the inner one decides.
    """
    starts = [count for count, _ in places]
    result = dict(places)

    def placed(node: int) -> NodePlace:
        index = bisect_right(starts, node) - 1
        return (places[index][1] if index >= 0 else None) or NodePlace()

    forward: dict[int, NodePlace] = {}
    of_node: dict[int, NodePlace] = {}
    for call in calls:
        place = placed(call.begin)
        if call.node is not None and not call.backward:
            forward.setdefault(call.node, place)
        made = forward.get(call.node or 0) if call.backward and place.module is None else None
        for node in range(call.begin, call.end):
            part = NodeCall(call.name, call.inputs, node - call.begin, call.end - call.begin)
            own = placed(node)._replace(call=part)
            of_node[node] = own if made is None else own._replace(module=made.module, stack=made.stack or own.stack)
        if call.end > call.begin:
            after = placed(call.end)
            result.setdefault(call.end, None if after == NodePlace() else after)
    return sorted({**result, **of_node}.items(), key=lambda item: item[0])


def node_places(noted: Iterable[tuple[int, Noted]], named: Mapping[int, Place]) -> list[tuple[int, NodePlace | None]]:
    """The places of nodes, each with the number of nodes from which on it holds.

    Args:
        noted: number of nodes at each note, and the note, in order.
        named: the places by number.
    """
    reading = _Reading(named)
    places: list[tuple[int, NodePlace | None]] = []
    for count, note in noted:
        reading.take(note)
        if places and places[-1][0] == count:
            places.pop()  # no node was made there
        places.append((count, reading.place()))
    return places


class _Reading:
    """The state at one point of a capture: numbers of places by kind, and the launch of generated code."""

    def __init__(self, named: Mapping[int, Place]) -> None:
        self._named = named
        self._numbers: dict[int, int] = {}
        self._launch: Launch | None = None

    def take(self, note: Noted) -> None:
        """Apply the next note."""
        if not isinstance(note, int):
            self._launch = note
        elif note in self._named:
            self._numbers[self._named[note].kind] = note

    def place(self) -> NodePlace | None:
        """The present place; None if nothing of it is known."""
        module, phase = self._name(MODULE), self._name(PHASE)
        if self._launch is None:
            place = NodePlace(module, self._frames(self._numbers.get(LINE, 0)), phase)
            return None if place == NodePlace() else place
        run, facts = self._launch
        outer = self._frames(run.line)
        if not facts.parts:
            return NodePlace(None, outer, phase)
        main = main_part(facts.parts)
        return NodePlace(
            module_of_part(run, main, facts),
            (*outer, *main.stack),
            phase_of_part(run, main) or phase,
            main.op or None,
            tuple(_described(run, part, facts) for part in facts.parts) if len(facts.parts) > 1 else (),
        )

    def _name(self, kind: int) -> str | None:
        number = self._numbers.get(kind)
        return None if number is None else self._named[number].name

    def _frames(self, number: int) -> tuple[str, ...]:
        """The chain of lines of a place, outermost first."""
        frames: list[str] = []
        while (place := self._named.get(number)) is not None and len(frames) < _MAX_FRAMES:
            if place.name is not None:
                frames.append(f"{place.detail}:{place.line} {place.name}")
            number = place.parent
        return tuple(reversed(frames))


def module_of_part(run: Run, part: Part, facts: LineFacts) -> str | None:
    """Path of the module of a part; None if it is not known.

    Nodes that Inductor made itself have neither module nor line. In code that was compiled without thence, a missing
    module does not mean that the part is outside of all modules.
    """
    if part.module is None and (facts.before or not part.stack or part.phase == "gradient"):
        return None
    return run.path(part.module)


def phase_of_part(run: Run, part: Part) -> str:
    """Phase of a part; empty if the code has none: code that is not differentiated is not called forward."""
    if part.phase != "forward":
        return part.phase
    return run.phase or ("" if run.module.kind == "inference" else "forward")


def _described(run: Run, part: Part, facts: LineFacts) -> tuple[str | None, str | None, str, str, float]:
    line = part.stack[-1] if part.stack else None
    return (module_of_part(run, part, facts), line, part.op, phase_of_part(run, part), part.share)
