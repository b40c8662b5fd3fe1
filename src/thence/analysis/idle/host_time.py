"""The host rows of all threads over time: if one thread shows little, another thread of the rank, or the program.

Causes of idle time and the critical path both use this module, so that they agree about the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.idle.host_threads import Pieces, leaves_of_threads, merged, together
from thence.analysis.idle.silence import program_runs
from thence.model.intervals import NO_ROW
from thence.model.phases import HOST_STATES, HostState
from thence.model.tables import API_CALLS, HOST_CATEGORIES

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.analysis.idle.host_threads import Leaves
    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed


def _categories(*names: str) -> Mask:
    """For each category code of host rows, whether it is one of these."""
    return np.isin(HOST_CATEGORIES, names)


_LITTLE = _categories("step", "range", "framework")
_WORKING = _categories("op", "compile", "runtime", "driver")
_CALLS = _categories(*API_CALLS)
_WAITS_FOR_THREADS = np.isin(HOST_STATES, (HostState.GIL, HostState.LOCK))


@dataclass(frozen=True)
class HostTime:
    """The host rows that threads are in over time.

    Attributes:
        little: whether a host row shows little: a step, a range, or a sample of a thread that waited for another one.
        working: whether a host row shows what its thread did: an operator, a call, or a sample of a thread that ran.
        is_call: whether a host row is an API call.
        first: the first row of each thread.
        rank: rank of each thread.
        leaves: innermost rows of each thread.
        program: by rank, the time (first and last ns) in which its main thread is known to run the program whenever it
            is in no recorded row.
    """

    little: Mask
    working: Mask
    is_call: Mask
    first: Int64
    rank: npt.NDArray[np.int32]
    leaves: list[Leaves]
    program: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, trace: Attributed, thread: Int64) -> HostTime:
        """Builds it from all host rows; ``thread`` as `thence.analysis.idle.host_threads.thread_numbers` returns it."""
        host = trace.host
        category = host["category"].to_physical().to_numpy()
        is_call = _CALLS[category]
        first = np.flatnonzero(np.diff(thread, prepend=-1)) if len(thread) else thread
        end = (host["start"] + host["duration"]).to_numpy()
        # The last element is for rows that are no samples, or of which the state is not known.
        state = host["state"].to_physical().cast(pl.Int64).fill_null(len(HOST_STATES)).to_numpy()
        waits = np.append(_WAITS_FOR_THREADS, False)[state]
        ran = np.append(~_WAITS_FOR_THREADS, False)[state]
        return cls(
            _LITTLE[category] | waits,
            _WORKING[category] | ran,
            is_call,
            first,
            host["rank"].to_numpy()[first],
            leaves_of_threads(host, is_call, thread),
            program_runs(trace, first, end),
        )

    def elsewhere(self, rank: int, pieces: Pieces) -> Pieces:
        """Replaces missing rows, and rows that show little, by more informative rows of other threads.

        While the innermost row of a thread shows little, the thread is in no more informative row, so the rows that
        are found are those of other threads.

        Args:
            rank: the rank of the threads.
            pieces: pieces of threads of the rank, in any order.

        Returns:
            finer pieces, in no particular order.
        """
        if not self.leaves:
            return pieces
        nothing = pieces.row == NO_ROW
        little = nothing | self.little[pieces.row]
        if not little.any():
            return pieces
        asked = pieces.chosen(np.flatnonzero(little))
        asked = asked.chosen(np.argsort(asked.start, kind="stable"))
        working = self._filled(rank, asked, self.working)
        # If the thread is in no row, any row of another thread is more informative.
        nothing = working.row == NO_ROW
        rest = self._filled(rank, working.chosen(nothing), np.ones_like(self.working))
        return together([pieces.chosen(~little), working.chosen(~nothing), rest])

    def runs_program(self, rank: int, pieces: Pieces) -> Mask:
        """Mask of the pieces in which no thread is in a recorded row, but the main thread runs the program."""
        nowhere = pieces.row == NO_ROW
        if rank not in self.program:
            return np.zeros_like(nowhere)
        low, high = self.program[rank]
        runs: Mask = nowhere & (pieces.start >= low) & (pieces.end <= high)
        return runs

    def _filled(self, rank: int, asked: Pieces, wanted: Mask) -> Pieces:
        """The pieces, cut where threads of the rank enter or leave wanted rows, with these rows."""
        near = (asked.start, asked.end)
        threads = np.flatnonzero(self.rank == rank)
        if not len(threads) or not len(asked.row):
            return asked
        others = merged([self.leaves[number].lasting(wanted, near) for number in threads])
        finer = others.within(*near)
        row = np.where(finer.row == NO_ROW, asked.row[finer.of], finer.row)
        return Pieces(asked.of[finer.of], finer.start, finer.end, row)
