"""What a `Trace` offers for viewers: timelines of its devices and threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

from thence.errors import UsageError
from thence.model.places import LANES

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import polars as pl

    from thence.analysis.collectives.clock_sync import Alignment
    from thence.analysis.timelines.overview import Overview
    from thence.model.attributed import Attributed
    from thence.model.timeline import Timeline

__all__ = ["Timelines"]


class Timelines(ABC):
    """Timelines of all ranks, on one clock where theirs can be compared."""

    @property
    @abstractmethod
    def attributed(self) -> Attributed:
        """The selected part of the trace."""

    @property
    @abstractmethod
    def alignment(self) -> Alignment:
        """How far the clocks of the ranks are apart."""

    @abstractmethod
    def _spans(self) -> pl.DataFrame:
        """Tracks of spans: causes of idle time, and the critical path."""

    def timeline(
        self, lanes: Sequence[str] = (), clocks: str = "aligned", by: Alignment | None = None
    ) -> Timeline:
        """The trace as viewers show it.

        Args:
            lanes: of `thence.model.places.LANES`: what to show again on rows of its own.
            clocks: aligned, which moves each rank as a whole by one offset, that of `alignment`, where it has
                one, and states it in ``notes`` and ``corrections``; or recorded. Durations never change.
            by: instead of `alignment`, where the ranks are part of a larger job.

        Raises:
            UsageError: a lane or clock that there is not.
        """
        from thence.analysis.timelines.timeline import timeline

        if clocks not in ("aligned", "recorded") or not set(lanes) <= set(LANES):
            raise UsageError(
                f"clocks are aligned or recorded, lanes are of {', '.join(LANES)}; got {clocks!r} and {list(lanes)!r}"
            )
        if by is None and len(self.attributed.ranks) > 1:
            by = self.alignment
        return timeline(self.attributed, lanes, by if clocks == "aligned" else None, self._spans())

    def write(
        self,
        path: str | os.PathLike[str],
        lanes: Sequence[str] = (),
        clocks: str = "aligned",
        *,
        gpu_views: bool = False,
    ) -> None:
        """Writes the trace for a viewer, in the format that the path's ending says.

        Args:
            path: ending in .pftrace (ui.perfetto.dev), .json or .json.gz (Chrome, HTA, TensorBoard) or
                .parquet (a folder of tables). Replaced if it exists, but only by a complete one.
            lanes: as in `timeline`; Perfetto shows them.
            clocks: as in `timeline`.
            gpu_views: whether Perfetto's own GPU views get the activities, too, which are in the file twice then.

        Raises:
            UsageError: a format, lane or clock that there is not.
            ThenceError: it cannot be written there.
        """
        from thence.writers.timelines.write import write_timeline

        write_timeline(replace(self.timeline(lanes, clocks), gpu_views=gpu_views), path)

    def overview(self) -> Overview:
        """Every stream over time in a limited number of bins, clocks aligned where they can be.

        Raises:
            MissingData: the trace holds no device activity.
        """
        from thence.analysis.timelines.overview import overview

        return overview(self.attributed, self._applied_alignment)

    @property
    def _applied_alignment(self) -> Alignment | None:
        """The ranks' clocks where they can be compared."""
        aligned = len(self.attributed.ranks) > 1 and self.alignment.matched > 0
        return self.alignment if aligned else None
