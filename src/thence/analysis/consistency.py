"""Checks that every trace and every result must pass before it is shown.

Figures that contradict each other are worse than none. If a check fails, thence has a defect, or a reader accepted
a malformed input. The checks are cheap compared to the analyses: sums of results, bounds of row references.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import polars as pl

from thence.errors import Contradiction
from thence.model.places import PLACES
from thence.model.tables import named_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.model.attributed import Attributed
    from thence.model.tables import Meta

ROUNDING = 1e-6
"""Relative error that sums of floating-point times may have."""
MIN_NS = 1.0
"""Difference of such sums that is rounding, in ns."""


def row_references(trace: Attributed) -> tuple[tuple[str, pl.Series, int], ...]:
    """The columns of row numbers: what they refer to, in words; the column; the number of rows there are."""
    rows, ranges = trace.gpu.height, trace.host.height
    return (
        ("parents of host ranges", trace.host["parent"], ranges),
        ("forward ranges", trace.host["forward"], ranges),
        ("launches", trace.places["launch"], ranges),
        ("steps of activities", trace.places["step_row"], trace.steps.height),
        ("activities of collectives", trace.collectives["gpu"], rows),
        ("activities of parts of collectives", trace.collective_parts["gpu"], rows),
        ("host ranges of parts of collectives", trace.collective_parts["host"], ranges),
        ("host ranges of collectives", trace.collectives["host"], ranges),
        ("host ranges that describe collectives", trace.host_collectives["host"], ranges),
        ("calls of CUDA events", trace.events["host"], ranges),
        ("records of CUDA events", trace.events["record"], trace.events.height),
        ("calls that wait", trace.waits["host"], ranges),
        ("records that are waited for", trace.waits["record"], trace.events.height),
        ("activities in CUDA graphs", trace.graph_places["gpu"], rows),
        ("activities of programs", trace.gpu["program"], trace.programs.height),
        ("HLO modules of programs", trace.programs["hlo"], len(trace.hlo)),
    )


def consistent_references(trace: Attributed) -> Attributed:
    """Returns the trace after checking that its row references point into their tables.

    Raises:
        Contradiction: a row reference is out of bounds, or an activity has neither a place nor a reason for having
            none.
    """
    rows = trace.gpu.height
    for what, column, count in row_references(trace):
        inside = column.drop_nulls().is_between(0, count - 1).all()
        must(trace.meta.inputs, inside, f"{what} refer to rows that do not exist")
    must(trace.meta.inputs, trace.places.height == rows, "activities have no place in the table of places")
    parts = trace.collective_parts["gpu"].is_in(trace.collectives["gpu"].implode()).all()
    must(trace.meta.inputs, parts, "parts of collectives belong to no collective")
    unique = trace.graph_places["gpu"].is_unique().all()
    must(trace.meta.inputs, unique, "an activity has two places in CUDA graphs")
    for kind in PLACES:
        told = rows == 0 or trace.places[f"{kind}_rule"].null_count() == 0
        must(trace.meta.inputs, told, f"activities have neither a {kind} nor a reason why not")
    return trace


def must(inputs: Sequence[str], holds: bool, what: str) -> None:  # noqa: FBT001 - as assert
    """Raises an error if a condition that figures must meet does not hold.

    Args:
        inputs: the inputs of the trace, for the message.
        holds: whether the condition holds.
        what: what is wrong if it does not, for the message.

    Raises:
        Contradiction: the condition does not hold.
    """
    if not holds:
        raise Contradiction(
            f"{named_inputs(inputs)}: {what}; no figures are shown, because they contradict each other: please "
            "report this and attach the trace"
        )


def consistent_path(tiles: pl.DataFrame, meta: Meta) -> pl.DataFrame:
    """Returns the tiles of a critical path after checking that they follow each other without gap or overlap.

    Raises:
        Contradiction: they do not.
    """
    start = tiles["start"]
    end = start + tiles["duration"]
    follow = bool((end.head(max(tiles.height - 1, 0)) == start.slice(1)).all())
    must(
        meta.inputs,
        follow and smallest(tiles, ("duration",)) >= 0,
        "the parts of the critical path overlap or leave gaps",
    )
    return tiles


def close(left: float, right: float) -> bool:
    """Whether two sums of times in ns differ only by rounding."""
    return math.isclose(left, right, rel_tol=ROUNDING, abs_tol=MIN_NS)


def smallest(frame: pl.DataFrame, columns: tuple[str, ...]) -> float:
    """The least value in the columns; 0 if there is none."""
    values = frame.select(pl.min_horizontal(pl.col(columns).min())).item()
    return 0 if values is None else float(values)
