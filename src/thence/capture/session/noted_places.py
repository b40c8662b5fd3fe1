"""Places, boundaries and samples as tables of a recording.

A thread that has ended without a boundary would still count as a thread that may launch. So whenever rows are
taken, threads that no longer exist get a boundary with the flag `ENDS`: they launch nothing more.

Where old parts of a recording are deleted, the rows of each part begin with the last boundary of each thread and kind
of place before them, with the flag `REPEATED`: a thread of autograd may note that it is in the backward pass only once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.capture.boundaries.log import BEGINS, ENDS, REPEATED
from thence.capture.boundaries.places import Places

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.capture.boundaries.log import BoundaryLog
    from thence.capture.boundaries.samples import HostSamples
    from thence.capture.recorder.names import Names

_THREADS = "/proc/self/task"


class NotedPlaces:
    """The places and boundaries that hooks and marks note in one recording.

    Args:
        samples: of threads while they launch nothing; None for none.
        is_own: whether a file is the user's.
        repeats: whether rows begin with the last boundaries before them.

    Attributes:
        log: of boundaries.
        places: the places that hooks number.
    """

    def __init__(
        self,
        log: BoundaryLog,
        samples: HostSamples | None = None,
        is_own: Callable[[str], bool] = lambda _file: False,
        *,
        repeats: bool = False,
    ) -> None:
        self.log = log
        self._repeats = repeats
        self._kinds = np.zeros(1, np.int64)
        self._latest: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._samples = samples
        self._is_own = is_own
        self.places = Places()
        self._may_launch: set[int] = set()
        log.note(0)  # so that launches before this thread's first place are known to be its own

    def take(self, names: Names) -> dict[str, dict[str, Any]]:
        """Rows of ``boundaries``, ``samples`` and ``places`` since the last call."""
        rows = self.log.take()
        ended = self._ended(rows)
        if ended:
            self.log.note(0, BEGINS | ENDS)  # only reads the counter: this thread launches nothing
            last = self.log.take()
            rows = {name: np.concatenate([rows[name], last[name]]) for name in rows}
            moment = {"counter": rows["counter"][-1], "time": rows["time"][-1], "place": 0}
            last_boundary = {**moment, "thread": ended, "flags": ENDS}
            rows = {
                name: np.concatenate([column, np.full(len(ended), last_boundary[name], column.dtype)])
                for name, column in rows.items()
            }
        tables = {"boundaries": self._after_latest(rows, ended) if self._repeats else rows}
        if self._samples is not None:
            tables["samples"] = self._samples.take(self.places, self._is_own)
        tables["places"] = self._new_places(names)
        return {name: columns for name, columns in tables.items() if len(next(iter(columns.values())))}

    def _after_latest(self, rows: dict[str, np.ndarray[Any, Any]], ended: list[int]) -> dict[str, Any]:
        """The rows after the last ones before them, of each thread and kind of place."""
        names = tuple(rows)
        before = sorted(self._latest.values(), key=lambda row: int(row[names.index("counter")]))
        known = len(self._kinds)
        more = [self.places[number].kind for number in range(known, len(self.places) + 1)]
        self._kinds = np.append(self._kinds, np.array(more, np.int64))
        threads, kinds = rows["thread"].astype(np.int64), self._kinds[rows["place"].astype(np.int64)]
        keys = threads << 3 | kinds
        _, last = np.unique(keys[::-1], return_index=True)
        for index in (len(keys) - 1 - last).tolist():
            self._latest[int(threads[index]), int(kinds[index])] = tuple(rows[name][index] for name in names)
        self._latest = {key: row for key, row in self._latest.items() if key[0] not in ended}
        if not before:
            return rows
        columns = dict(zip(names, zip(*before, strict=True), strict=True))
        repeated = {name: np.array(columns[name], rows[name].dtype) for name in names}
        repeated["flags"] |= np.array(REPEATED, rows["flags"].dtype)
        return {name: np.concatenate([repeated[name], rows[name]]) for name in names}

    def _ended(self, rows: dict[str, np.ndarray[Any, Any]]) -> list[int]:
        """Threads that may launch according to their last boundary, but no longer exist."""
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
            ([names.of_text(text) if text else 0 for text in column] for column in zip(*texts, strict=True))
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
