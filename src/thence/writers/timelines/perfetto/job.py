"""Summary rows of all ranks of a job: a group above everything else, and a group of the other ranks below."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.timelines.track_packing import nested_sequence, split_lanes
from thence.writers.timelines.perfetto.arguments import columns_as_arguments
from thence.writers.timelines.perfetto.packets import Counter, Slices
from thence.writers.timelines.perfetto.tracks import Process

if TYPE_CHECKING:
    from thence.model.timeline import JobRows
    from thence.writers.timelines.perfetto.interning import Interned
    from thence.writers.timelines.perfetto.tracks import Tracks

_UNIT = "ms"
_ARGUMENTS = {
    "step": "step",
    "step_ns": "step ns",
    "compute_ns": "compute ns",
    "wait_ns": "exposed wait ns",
    "caused_ns": "wait caused ns",
    "detail": "detail",
}


class JobLayout:
    """Adds the rows of a job to a file.

    Args:
        job: the rows.
        tracks, interned: tracks and interned texts of the file.
        origin_ns: ns to subtract from every time.
    """

    def __init__(self, job: JobRows, tracks: Tracks, interned: Interned, origin_ns: int) -> None:
        self._job = job
        self._tracks = tracks
        self._interned = interned
        self._origin_ns = origin_ns

    def above(self) -> tuple[list[Slices], Counter]:
        """The group above: counters of the whole job, late ranks, and a row for each rank that is shown in full."""
        group = self._group(self._job.title)
        counters = self._counters(group)
        late = self._slices(self._job.spans, group, "late rank")
        return [late, self._steps(group, folded=False)], counters

    def below(self) -> Slices:
        """The group below: a row for each of the other ranks."""
        return self._steps(self._group(self._job.folded_title), folded=True)

    def _group(self, title: str) -> int:
        return self._tracks.add(title, of=Process(self._tracks.free_pid(), title))

    def _steps(self, group: int, *, folded: bool) -> Slices:
        rows = self._job.rows.filter(pl.col("folded") == folded)
        return self._slices(rows, group, "step of a rank")

    def _slices(self, rows: pl.DataFrame, group: int, category: str) -> Slices:
        """Slices on one row per track name under a group, in the order in which the names first occur."""
        titles = rows["track"].unique(maintain_order=True)
        number = rows["track"].cast(pl.Enum(titles)).to_physical().cast(pl.Int64).to_numpy()
        start = rows["start"].to_numpy() - self._origin_ns
        end = start + rows["duration"].to_numpy()
        lane = split_lanes(number, start, end)
        most = np.ones(len(titles), np.int64)
        np.maximum.at(most, number, lane + 1)
        uuids = [
            uuid
            for title, count in zip(titles, most.tolist(), strict=True)
            for uuid in self._tracks.lanes(title, group, count)
        ]
        first = np.cumsum(most) - most
        track = np.array(uuids, np.int64)[first[number] + lane]
        return Slices(
            track,
            start,
            end,
            self._interned.names.column(rows["name"]),
            np.full(len(track), self._interned.categories.of(category)),
            nested_sequence(track, start, end),
            columns_as_arguments(rows, _ARGUMENTS, self._interned),
        )

    def _counters(self, group: int) -> Counter:
        rows = self._job.counters
        titles = rows["counter"].unique(maintain_order=True).to_list()
        track = {title: self._tracks.add(title, group, unit=_UNIT) for title in titles}
        of = np.array([track[title] for title in rows["counter"]], np.int64)
        return Counter(of, rows["time"].to_numpy() - self._origin_ns, rows["value"].to_numpy())
