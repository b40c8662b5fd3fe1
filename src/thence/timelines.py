"""Base class of `Trace` with the methods that make and write timelines of its devices and threads."""

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


class Timelines(ABC):
    """Timelines of all ranks, on one clock if the clocks of the ranks can be aligned."""

    @property
    @abstractmethod
    def attributed(self) -> Attributed:
        """The selected part of the trace."""

    @property
    @abstractmethod
    def alignment(self) -> Alignment:
        """The offsets between the clocks of the ranks."""

    @abstractmethod
    def _spans(self) -> pl.DataFrame:
        """Tracks of spans: causes of idle time, and the critical path."""

    def timeline(self, lanes: Sequence[str] = (), clocks: str = "aligned", by: Alignment | None = None) -> Timeline:
        """The trace prepared for viewers.

        Args:
            lanes: kinds, of `thence.model.places.LANES`, by which to show the device activities again, on rows of
                their own.
            clocks: ``aligned`` shifts all times of a rank by the one offset that `alignment` has for it, if any,
                and states it in ``notes`` and ``corrections``; ``recorded`` shifts nothing. Durations never change.
            by: the alignment to use instead of `alignment`, if the ranks are part of a larger job.

        Raises:
            UsageError: there is no such lane, or ``clocks`` has another value.
        """
        from thence.analysis.timelines.timeline import timeline

        if clocks not in ("aligned", "recorded") or not set(lanes) <= set(LANES):
            raise UsageError(
                f"clocks must be aligned or recorded, and lanes among {', '.join(LANES)}; got {clocks!r} and "
                f"{list(lanes)!r}"
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
        """Writes the trace for a viewer, in the format that the ending of the path selects.

        Args:
            path: ending in .pftrace (ui.perfetto.dev), .json or .json.gz (Chrome, HTA, TensorBoard) or
                .parquet (a folder of tables). An existing one is replaced, but only by a complete one.
            lanes: as in `timeline`; Perfetto shows them.
            clocks: as in `timeline`.
            gpu_views: whether to write the device activities a second time, in the form that Perfetto's own GPU
                views read.

        Raises:
            UsageError: there is no such format or lane, or ``clocks`` has another value.
            ThenceError: the file cannot be written.
        """
        from thence.writers.timelines.write import write_timeline

        write_timeline(replace(self.timeline(lanes, clocks), gpu_views=gpu_views), path)

    def overview(self) -> Overview:
        """Every stream over time in a limited number of bins, with clocks aligned if they can be.

        Raises:
            MissingData: the trace holds no device activity.
        """
        from thence.analysis.timelines.overview import overview

        return overview(self.attributed, self._applied_alignment)

    @property
    def _applied_alignment(self) -> Alignment | None:
        """The alignment of the ranks' clocks; None for a single rank, or if no collective could be matched."""
        aligned = len(self.attributed.ranks) > 1 and self.alignment.matched > 0
        return self.alignment if aligned else None
