"""What the host was in, where the thread that is asked about says little: another thread of the rank, or Python.

Causes of idle time and the critical path ask here, so that both say the same of the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thence.analysis.idle.host_threads import Pieces, leaves_of_threads, merged, together
from thence.analysis.idle.silence import python_runs
from thence.model.intervals import NO_ROW
from thence.model.tables import API_CALLS, HOST_CATEGORIES

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.analysis.idle.host_threads import Leaves
    from thence.model.attributed import Attributed

    Int64 = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

__all__ = ["HostTime"]


def _categories(*names: str) -> Mask:
    """Which categories of host rows these are."""
    return np.isin(HOST_CATEGORIES, names)


_LITTLE = _categories("step", "range", "framework")
_WORKING = _categories("op", "compile", "runtime", "driver")
_ANYTHING = _categories(*HOST_CATEGORIES)
_CALLS = _categories(*API_CALLS)


@dataclass(frozen=True)
class HostTime:
    """What the threads of the host are in over time.

    Attributes:
        category: code of each host row.
        is_call: which rows are API calls.
        first: the first row of each thread.
        rank: of each thread.
        leaves: of each thread.
        python: by rank, when its main thread is known to run Python where it is in nothing recorded (ns).
    """

    category: npt.NDArray[np.uint8]
    is_call: Mask
    first: Int64
    rank: npt.NDArray[np.int32]
    leaves: list[Leaves]
    python: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, trace: Attributed, thread: Int64) -> HostTime:
        """That of all host rows; thread of `thence.analysis.idle.host_threads.thread_numbers`."""
        host = trace.host
        category = host["category"].to_physical().to_numpy()
        is_call = _CALLS[category]
        first = np.flatnonzero(np.diff(thread, prepend=-1)) if len(thread) else thread
        end = (host["start"] + host["duration"]).to_numpy()
        return cls(
            category,
            is_call,
            first,
            host["rank"].to_numpy()[first],
            leaves_of_threads(host, is_call, thread),
            python_runs(trace, first, end),
        )

    def elsewhere(self, rank: int, pieces: Pieces) -> Pieces:
        """Replaces rows that say little by what another thread of the rank was in, if that says more.

        Where a thread is in little it is in none of the rows that say more, so that these are of other threads.

        Args:
            rank: whose threads are asked.
            pieces: what threads of it were in, in any order.

        Returns:
            finer pieces, in no order.
        """
        if not self.leaves:
            return pieces
        nothing = pieces.row == NO_ROW
        little = nothing | _LITTLE[self.category[pieces.row]]
        if not little.any():
            return pieces
        asked = pieces.chosen(np.flatnonzero(little))
        asked = asked.chosen(np.argsort(asked.start, kind="stable"))
        working = self._filled(rank, asked, _WORKING)
        # In nothing at all, anything that another thread is in says more.
        nothing = working.row == NO_ROW
        rest = self._filled(rank, working.chosen(nothing), _ANYTHING)
        return together([pieces.chosen(~little), working.chosen(~nothing), rest])

    def runs_python(self, rank: int, pieces: Pieces) -> Mask:
        """Which pieces are Python although no thread is in anything recorded."""
        nowhere = pieces.row == NO_ROW
        if rank not in self.python:
            return np.zeros_like(nowhere)
        low, high = self.python[rank]
        runs: Mask = nowhere & (pieces.start >= low) & (pieces.end <= high)
        return runs

    def _filled(self, rank: int, asked: Pieces, wanted: Mask) -> Pieces:
        """Those pieces, cut where a thread of the rank is in a row of a wanted category: that is taken."""
        near, rows = (asked.start, asked.end), wanted[self.category]
        threads = np.flatnonzero(self.rank == rank)
        if not len(threads) or not len(asked.row):
            return asked
        others = merged([self.leaves[number].lasting(rows, near) for number in threads])
        finer = others.within(*near)
        row = np.where(finer.row == NO_ROW, asked.row[finer.of], finer.row)
        return Pieces(asked.of[finer.of], finer.start, finer.end, row)
