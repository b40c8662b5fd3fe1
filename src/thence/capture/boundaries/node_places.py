"""The places in which autograd nodes were made, by thread and number of the node, for the backward pass.

Each thread numbers the nodes that it makes, and a node holds its number and its thread. By these two the launches of a
node in the backward pass get the places of its forward operation. The join happens when rows are written; nothing is
done while the node runs.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from thence.model.arrays import UInt32


LEAF = (1 << 64) - 1
"""The number that all nodes share which accumulate gradients into leaves."""
MAX_ROWS = 1 << 17
"""Limit on the rows of each thread; the latest are kept: enough for many forward passes, in 3 MB."""
MAX_THREADS = 64
"""Limit on the threads whose rows are kept: those that made nodes last."""
_MAX_CALLS = 1 << 14
"""Limit on the calls of the engine whose lines are kept."""
_ROW = np.dtype([("begin", "<u8"), ("end", "<u8"), ("module", "<u4"), ("line", "<u4")])


class NodePlaces:
    """Places of module and line by thread and number of nodes; 0 where the place is not known."""

    def __init__(self, no_line: int) -> None:
        self._no_line = no_line
        self._rows: dict[int, np.ndarray[Any, Any]] = {}
        self._latest: dict[int, Any] = {}
        self._called: deque[tuple[int, int]] = deque(maxlen=_MAX_CALLS)

    def add(self, makers: Any, begins: Any, ends: Any, modules: UInt32, lines: UInt32) -> None:
        """Add ranges of nodes: thread that made them, first number, end (excluded), module, line; all shapes (n,)."""
        for maker in sorted(set(makers.tolist())):
            mine = makers == maker
            rows = np.empty(int(mine.sum()), _ROW)
            for name, values in zip(_ROW.names or (), (begins, ends, modules, lines), strict=True):
                rows[name] = values[mine]
            rows = np.concatenate([self._rows.pop(maker, rows[:0]), rows])
            self._rows[maker] = rows[np.argsort(rows["begin"], kind="stable")][-MAX_ROWS:]
        while len(self._rows) > MAX_THREADS:
            del self._rows[next(iter(self._rows))]

    def find(self, makers: Any, numbers: Any) -> tuple[UInt32, UInt32]:
        """Places of the modules and of the lines of nodes; shapes (n,)."""
        modules, lines = np.zeros((2, len(makers)), np.uint32)
        for maker in sorted(set(makers.tolist())):
            rows = self._rows.get(maker)
            if rows is None or not len(rows):
                continue
            mine = np.flatnonzero(makers == maker)
            wanted = numbers[mine]
            row = np.maximum(np.searchsorted(rows["begin"], wanted, "right") - 1, 0)
            known = (rows["begin"][row] <= wanted) & (wanted < rows["end"][row])
            modules[mine[known]] = rows["module"][row[known]]
            lines[mine[known]] = rows["line"][row[known]]
        return modules, lines

    def around(self, rows: Any, order: Any) -> tuple[UInt32, UInt32]:
        """Places of module and line in which the node that runs at each row was made; 0 outside of nodes.

        A leaf's node gets the places of the node that ran before it on the thread. Where the line is not known, it is
        the line that called the engine.

        Args:
            rows: columns time, thread, maker (0: outside of nodes) and node, shape (n,).
            order: indices that sort the rows by thread and time.
        """
        rows = rows[order]
        plain = (rows["maker"] > 0) & (rows["node"] != LEAF)
        modules, lines = np.zeros((2, len(rows)), np.uint32)
        modules[plain], lines[plain] = self.find(rows["maker"][plain], rows["node"][plain])
        unknown = plain & ((lines == 0) | (lines == self._no_line))
        lines[unknown] = self._calling(rows["time"][unknown])
        places = np.stack([modules, lines], 1)
        thread = rows["thread"]
        before = np.maximum.accumulate(np.where(plain, np.arange(len(rows)), 0))
        leaf = (rows["maker"] > 0) & ~plain
        same = plain[before] & (thread[before] == thread)
        for number in sorted(set(thread[leaf].tolist())):
            mine = leaf & (thread == number)
            places[mine] = np.where(same[mine, None], places[before[mine]], self._latest.get(number, 0))
        latest, last = np.unique(thread[plain][::-1], return_index=True)
        self._latest.update(zip(latest.tolist(), places[plain][::-1][last], strict=True))
        unsorted = np.empty_like(places)
        unsorted[order] = places
        return unsorted[:, 0], unsorted[:, 1]

    def calls(self, time: int, line: int) -> None:
        """Note which line has called the engine that runs from a time (Unix ns) on; 0: none or several have."""
        self._called.append((time, line))

    def _calling(self, times: Any) -> UInt32:
        if not self._called:
            return np.zeros(len(times), np.uint32)
        called = list(self._called)
        starts = np.array([time for time, _ in called])
        call = np.searchsorted(starts, times, "right") - 1
        lines = np.array([line for _, line in called], np.uint32)
        return np.where(call >= 0, lines[call], 0)
