"""Places and boundaries as tables of a recording.

A thread that ends without saying so would count as one that may launch for ever after. So when rows are
taken, threads that are there no longer get a boundary that says that they launch nothing more.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.boundaries.log import BEGINS, ENDS
from thence.boundaries.places import Places

if TYPE_CHECKING:
    from thence.boundaries.log import BoundaryLog
    from thence.recorder.names import Names

__all__ = ["NotedPlaces"]

_THREADS = "/proc/self/task"


class NotedPlaces:
    """What hooks and marks noted in one recording.

    Args:
        log: their boundaries.

    Attributes:
        log: the same.
        places: that hooks name.
    """

    def __init__(self, log: BoundaryLog) -> None:
        self.log = log
        self.places = Places()
        self._may_launch: set[int] = set()
        log.note(0)  # what this thread launches before its first place is its own

    @property
    def several_launch(self) -> bool:
        """Whether more than one thread may launch, by what they said when rows were last taken."""
        return len(self._may_launch) > 1

    def take(self, names: Names) -> dict[str, dict[str, Any]]:
        """Rows of ``boundaries`` and ``places`` since this was last asked."""
        rows = self.log.take()
        ended = self._ended(rows)
        if ended:
            self.log.note(0, BEGINS | ENDS)  # this thread launches nothing: it asks for the number
            last = self.log.take()
            rows = {name: np.concatenate([rows[name], last[name]]) for name in rows}
            moment = {"counter": rows["counter"][-1], "time": rows["time"][-1], "place": 0}
            said = {**moment, "thread": ended, "flags": ENDS}
            rows = {
                name: np.concatenate([column, np.full(len(ended), said[name], column.dtype)])
                for name, column in rows.items()
            }
        tables = {"boundaries": rows, "places": self._new_places(names)}
        return {
            name: columns for name, columns in tables.items() if len(next(iter(columns.values())))
        }

    def _ended(self, rows: dict[str, np.ndarray[Any, Any]]) -> list[int]:
        """Threads that may launch by what they said, and are not there any more."""
        thread, flags = rows["thread"][::-1], rows["flags"][::-1]
        latest, first = np.unique(thread, return_index=True)
        ends = (flags[first] & ENDS) != 0
        self._may_launch |= set(latest[~ends].tolist())
        self._may_launch -= set(latest[ends].tolist())
        if len(self._may_launch) < 2:
            return []
        try:
            alive = {int(name) for name in os.listdir(_THREADS)}  # noqa: PTH208 - a few names, no paths
        except OSError:
            return []
        ended = sorted(self._may_launch - alive)
        self._may_launch.difference_update(ended)
        return ended

    def _new_places(self, names: Names) -> dict[str, Any]:
        new = self.places.take()
        texts = [(place.name, place.detail) for _, place in new]
        name, detail = (
            (
                [names.of_text(text) if text else 0 for text in column]
                for column in zip(*texts, strict=True)
            )
            if new
            else ([], [])
        )
        return {
            "number": np.array([number for number, _ in new], np.uint32),
            "kind": np.array([place.kind for _, place in new], np.uint8),
            "parent": np.array([place.parent for _, place in new], np.uint32),
            "name": np.array(name, np.uint32),
            "detail": np.array(detail, np.uint32),
            "line": np.array([place.line for _, place in new], np.uint32),
        }
