"""Labels graphed kernels by name, from all launches of that name in an eager run or in captures.

This is weaker than alignment: a name proves nothing about order, and kernels of one name may come from
elsewhere in the graph. So it is tried last, and has a rule of its own. A kernel gets the places that all launches of
its name have in common. It is used only if at least half of a launch's kernels occur in the run, because different
programs share a few common kernels, too. A name is used only if the ratio between its counts in the launch and in the
run is the most frequent ratio among all names: a name with another ratio has launches that the run does not show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.cuda_graphs.alignment import FOREIGN
from thence.attribution.cuda_graphs.captures import names_of_kinds
from thence.attribution.cuda_graphs.signatures import Names
from thence.model.places import GRAPH_LABELS
from thence.model.reasons import CODES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from thence.attribution.cuda_graphs.join_labels import Numbered
    from thence.attribution.cuda_graphs.replays import Replays
    from thence.model.graph_labels import Kernel

_RULE = "eager_kernel_name"
_MIN_KNOWN = 0.5


@dataclass(frozen=True)
class ByKernelName:
    """The kernel names of a run, with the places that all launches of a name have in common.

    Attributes:
        of_variant: number of the name of each variant of the replays, -1 for those that do not occur in the run.
            All memcpys count as one name, and all memsets.
        count: how often each name occurs in the run.
        place: row in ``places`` of each name, -1 for names whose launches have nothing in common.
        places: the places of the run, followed by those of the names.
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
        """The names of a run.

        Args:
            kernels: of the run.
            nodes: its launches: type and kernel.
            place: number of the places of each launch.
            places: the places by number.
            replays: the replays to be labelled.
        """
        frame = names_of_kinds(replays.kinds.frame)
        names = Names(kernels, frame["name"].drop_nulls().unique(maintain_order=True))
        of_kind = {"memcpy": len(kernels), "memset": len(kernels) + 1}
        of_variant = [
            of_kind.get(kind, -1) if kind != "kernel" else names.of_trace(name)
            for kind, name in frame.select("kind", "name").iter_rows()
        ]
        name = np.array(
            [
                of_kind[kind] if kind in of_kind else names.of_kernel(kernel)
                for kind, kernel in nodes.select("type", "kernel").iter_rows()
            ],
            np.int64,
        )
        shared = _shared(name, places.drop("collective")[place])
        number = np.full(len(kernels) + len(of_kind), -1, np.int64)
        number[shared["kernel"].to_numpy()] = places.height + np.arange(shared.height)
        nothing = pl.lit(None, places.schema["collective"]).alias("collective")
        return cls(
            np.array(of_variant, np.int64),
            np.bincount(name, minlength=len(number)),
            number,
            pl.concat([places, shared.with_columns(nothing).select(places.columns)]),
        )

    def put(self, assigned: Numbered, rows: NDArray[np.int64]) -> str | None:
        """Labels the activities that alignment left without a place.

        Args:
            assigned: what alignment found; changed in place.
            rows: of gpu, (launches, activities): launches with equal kernels.

        Returns:
            a note on how many were labelled, None if none were.
        """
        name = self.of_variant[assigned.replays.variant[rows]]
        left = (assigned.number[rows] < -1) & (assigned.number[rows] != FOREIGN)
        if not left.any() or (name[0] >= 0).sum() < _MIN_KNOWN * len(name[0]):
            return None
        launched = np.bincount(name[0][name[0] >= 0], minlength=len(self.count))
        present = np.flatnonzero(launched * self.count)
        if not len(present):  # copies alone, of which the run has none
            return None
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
            f"{int(chosen.sum()):,} of {int(left.sum()):,} activities that alignment could not label got the places "
            "that all launches of their kernel have in common"
        )


def _shared(name: NDArray[np.int64], places: pl.DataFrame) -> pl.DataFrame:
    """The places that all launches of a name have in common; one row for each name that has any."""
    alike = [
        pl.when(pl.col(column).n_unique() == 1).then(pl.col(column).first()).alias(column) for column in places.columns
    ]
    grouped = places.with_columns(kernel=pl.Series(name)).group_by("kernel", maintain_order=True)
    return grouped.agg(alike).filter(pl.any_horizontal(pl.col(GRAPH_LABELS).is_not_null()))
