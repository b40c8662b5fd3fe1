"""Labels graphed kernels by name, from an eager run in which all kernels of that name have one label.

This is weaker than alignment: a name proves nothing about order, and kernels of one name may come from
elsewhere in the graph. So it is tried last, and has a rule of its own. It is used only if at least half of a
launch's kernels occur in the eager run, because different programs share a few common kernels, too. A name is used
only if the ratio between its counts in the launch and in the eager run is the most frequent ratio among all names:
a name with another ratio has launches that the eager run does not show.
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
    """The kernel names of an eager run, with the places of those that have a single label.

    Attributes:
        of_variant: number of the name of each variant of the replays, -1 for variants that are not kernels
            or do not occur in the eager run.
        count: how often each name occurs in the eager run.
        place: row in ``places`` with what all launches of a name have in common, -1 for names with
            several labels or none.
        places: the places of the eager run, followed by those of the names.
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
            places: the places by number.
            replays: the replays to be labelled.
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
            a note on how many were labelled, None if none were.
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
        fitting = np.append(np.zeros(len(self.count), np.bool_), [False])  # the last one is for -1
        fitting[present] = times == each[how_many.argmax()]
        fitting[:-1] &= self.place >= 0
        chosen = left & fitting[name]
        if not chosen.any():
            return None
        assigned.put(rows[chosen], self.place[name[chosen]], CODES.index(_RULE))
        assigned.confidence[rows[chosen]] = np.nan
        return (
            f"{int(chosen.sum()):,} of {int(left.sum()):,} kernels that alignment could not label got their "
            "label by name: the name has a single label in the eager run"
        )


def _single(name: NDArray[np.int64], places: pl.DataFrame) -> pl.DataFrame:
    """The places that all launches of a name have in common; one row for each name with a single label."""
    alike = [
        pl.when(pl.col(column).n_unique() == 1).then(pl.col(column).first()).alias(column)
        for column in places.columns
    ]
    # If the run has no labels, its operators are used instead.
    said = "label" if places["label"].count() else "op"
    grouped = places.with_columns(kernel=pl.Series(name)).group_by("kernel", maintain_order=True)
    return grouped.agg(alike).filter(pl.col(said).is_not_null())
