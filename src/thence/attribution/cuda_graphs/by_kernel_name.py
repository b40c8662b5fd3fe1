"""Labels graphed kernels by name, from an eager run in which all kernels of that name have one label.

This is weaker than alignment: a name proves nothing about order, and kernels of one name may come from
elsewhere in the graph. So it is asked last, and has a rule of its own. It only speaks where at least half of
a launch's kernels occur in the eager run, since different programs share a few common kernels, too; and only
of names that occur in the launch as many times as often as in the eager run as most names do, since a name
with more or fewer launches than its share has some that the eager run does not show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.cuda_graphs.signatures import Names
from thence.model.reasons import CODES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from thence.attribution.cuda_graphs.join_labels import Numbered
    from thence.attribution.cuda_graphs.replays import Replays
    from thence.model.graph_labels import Kernel

__all__ = ["ByKernelName"]

_RULE = "eager_kernel_name"
_LEAST_KNOWN = 0.5


@dataclass(frozen=True)
class ByKernelName:
    """What the kernel names of an eager run say.

    Attributes:
        of_variant: number of the name of each variant of the replays, -1 for what is no kernel or not
            in the eager run.
        count: how often each name occurs in the eager run.
        place: number in ``places`` of what all launches of a name have in common, -1 for names with
            several labels.
        places: those of the eager run, with those of the names behind them.
    """

    of_variant: NDArray[np.int64]
    count: NDArray[np.int64]
    place: NDArray[np.int64]
    places: pl.DataFrame

    @classmethod
    def of(
        cls,
        kernels: Sequence[Kernel],
        nodes: pl.DataFrame,
        place: NDArray[np.int64],
        places: pl.DataFrame,
        replays: Replays,
    ) -> ByKernelName:
        """The names of an eager run.

        Args:
            kernels: of the run.
            nodes: its launches: type and kernel.
            place: number of the places of each launch.
            places: what these numbers stand for.
            replays: that are to be labelled.
        """
        frame = replays.kinds.frame
        names = Names(kernels, frame["name"].drop_nulls().unique(maintain_order=True))
        of_variant = [
            names.of_trace(name) if kind == "kernel" else -1
            for kind, name in frame.select("kind", "name").iter_rows()
        ]
        of_kernel = np.array([names.of_kernel(i) for i in range(len(kernels))], np.int64)
        is_kernel = (nodes["type"] == "kernel").to_numpy()
        name = of_kernel[nodes["kernel"].to_numpy()[is_kernel]]
        single = _single(name, places.drop("collective")[place[is_kernel]])
        number = np.full(len(kernels), -1, np.int64)
        number[single["kernel"].to_numpy()] = places.height + np.arange(single.height)
        nothing = pl.lit(None, places.schema["collective"]).alias("collective")
        return cls(
            np.array(of_variant, np.int64),
            np.bincount(name, minlength=len(kernels)),
            number,
            pl.concat([places, single.with_columns(nothing).select(places.columns)]),
        )

    def put(self, assigned: Numbered, rows: NDArray[np.int64]) -> str | None:
        """Labels the kernels that alignment left without a place.

        Args:
            assigned: what alignment found; changed in place.
            rows: of gpu, (launches, activities): launches with equal kernels.

        Returns:
            what was done, None if nothing.
        """
        name = self.of_variant[assigned.replays.variant[rows]]
        kind = assigned.replays.kinds.frame["kind"] == "kernel"
        is_kernel = kind.to_numpy()[assigned.replays.variant[rows]]
        left = is_kernel & (assigned.number[rows] < -1)
        if not left.any() or (name >= 0).sum() < _LEAST_KNOWN * is_kernel.sum():
            return None
        launched = np.bincount(name[0][name[0] >= 0], minlength=len(self.count))
        present = np.flatnonzero(launched)
        times = launched[present] / self.count[present]
        each, how_many = np.unique(times, return_counts=True)
        fitting = np.append(np.zeros(len(self.count), np.bool_), [False])  # the last is that of -1
        fitting[present] = times == each[how_many.argmax()]
        fitting[:-1] &= self.place >= 0
        chosen = left & fitting[name]
        if not chosen.any():
            return None
        assigned.put(rows[chosen], self.place[name[chosen]], CODES.index(_RULE))
        assigned.confidence[rows[chosen]] = np.nan
        return (
            f"{int(chosen.sum()):,} of {int(left.sum()):,} kernels whose order proves nothing are labelled by "
            "their name, which has a single label in the eager run"
        )


def _single(name: NDArray[np.int64], places: pl.DataFrame) -> pl.DataFrame:
    """For each name with a single label: what all its launches have in common."""
    alike = [
        pl.when(pl.col(column).n_unique() == 1).then(pl.col(column).first()).alias(column)
        for column in places.columns
    ]
    # Where the run has no labels, its operators take their place.
    said = "label" if places["label"].count() else "op"
    grouped = places.with_columns(kernel=pl.Series(name)).group_by("kernel", maintain_order=True)
    return grouped.agg(alike).filter(pl.col(said).is_not_null())
