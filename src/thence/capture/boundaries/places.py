"""The places of a program: every distinct place once, with a number.

A place is of one kind (`KINDS`): a module, a line of the user's code, a phase, a step, or any Python frame that a
sample showed (`thence.capture.boundaries.samples`). Places of one kind form a tree: the parent of a line is the line
that called its function, the parent of a module is the module around it. The place with the name None means *no* place
of its kind: the thread has left all of them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

MODULE, LINE, PHASE, STEP, FRAME = range(1, 6)
KINDS = {MODULE: "module", LINE: "line", PHASE: "phase", STEP: "step", FRAME: "frame"}
"""Codes of kinds, as recordings hold them."""
MODEL_CALL = "model call"
"""Name of a step that begins because a model was called without gradients. In a program that trains, such calls before
the first step of the optimizer, as a rollout's tokens, are parts of its first step: only a reader knows that."""
LOOP_ROUND = "round of a loop"
"""Name of a step that is one round of a loop, or some of them, because nothing else begins steps so far."""


class Place(NamedTuple):
    """One place.

    Attributes:
        kind: a code of `KINDS`.
        parent: number of the place around it, 0 for none.
        name: path of a module (``model.layers.3.self_attn``), qualified name of a function, name of a phase or of
            a step; None for no place of this kind.
        detail: class of a module, file of a line or frame, batch size or the like of a step; None where there is none.
        line: number of the line; 0 where only the function is certain, and for other kinds.
    """

    kind: int
    parent: int
    name: str | None
    detail: str | None = None
    line: int = 0


class Places:
    """The numbers of places, from 1 on. Thread-safe."""

    def __init__(self) -> None:
        self._numbers: dict[Place, int] = {}
        self._places: list[Place] = []
        self._taken = 0
        self._lock = threading.Lock()

    def number(self, place: Place) -> int:
        """The number of a place, which is added if it is new; hooks keep it, so that a boundary needs no lookup."""
        number = self._numbers.get(place)
        if number is None:
            with self._lock:
                number = self._numbers.get(place)
                if number is None:
                    self._places.append(place)
                    number = self._numbers[place] = len(self._places)
        return number

    def nothing(self, kind: int) -> int:
        """The number that means no place of a kind."""
        return self.number(Place(kind, 0, None))

    def take(self) -> Sequence[tuple[int, Place]]:
        """Number and place of every place that is new since the last call."""
        with self._lock:
            first, self._taken = self._taken, len(self._places)
            return list(enumerate(self._places[first:], first + 1))

    def named(self) -> dict[int, Place]:
        """All places by number."""
        with self._lock:
            return dict(enumerate(self._places, 1))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> Place:
        """The place with a number."""
        if number < 1:
            raise IndexError(number)
        return self._places[number - 1]
