"""The default kind of place of a trace, by which its tables and flame graphs divide time if the user names none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thence.model.thresholds import WELL_COVERED_SHARE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.model.attributed import Attributed


def default_kind(trace: Attributed, kinds: Sequence[str], otherwise: str) -> str:
    """The first kind that covers at least two thirds of the GPU time; if none does, the kind that covers most.

    A kind of which the trace has only one place distinguishes nothing, and is skipped.

    Args:
        trace: attributed.
        kinds: kinds to choose from, the most informative first.
        otherwise: the result if the trace has no places of any of these kinds.
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
        if covered[kind] >= WELL_COVERED_SHARE:
            return kind
    best = max(covered, key=covered.__getitem__, default=otherwise)
    return best if covered.get(best) else otherwise
