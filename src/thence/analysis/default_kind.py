"""The kind of place that says most of a trace: what its tables and flame graphs are by where nobody asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.model.attributed import Attributed

__all__ = ["default_kind"]

_WELL_COVERED = 2 / 3


def default_kind(trace: Attributed, kinds: Sequence[str], otherwise: str) -> str:
    """The first kind that covers at least two thirds of the GPU time; where none does, the one that covers most.

    A kind of which the trace has one place alone tells nothing apart, and does not count.

    Args:
        trace: attributed.
        kinds: to choose from, the most telling first.
        otherwise: what to take if the trace has no places of any of them.
    """
    duration = trace.gpu["duration"]
    total = max(int(duration.sum()), 1)
    covered: dict[str, float] = {}
    for kind in kinds:
        places = trace.places[kind]
        if places.n_unique() - bool(places.null_count()) < 2:
            continue
        time = duration.filter(places.is_not_null()).sum()
        covered[kind] = int(time) / total
        if covered[kind] >= _WELL_COVERED:
            return kind
    best = max(covered, key=covered.__getitem__, default=otherwise)
    return best if covered.get(best) else otherwise
