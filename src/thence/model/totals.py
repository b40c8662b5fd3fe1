"""Conditions that the figures of an answer must meet: its totals, and that nothing is negative."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from thence.errors import Contradiction
from thence.model.tables import named_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

ROUNDING = 1e-6
"""Relative error that sums of floating-point times may have."""
MIN_NS = 1.0
"""Difference of such sums that is rounding, in ns."""


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


def close(left: float, right: float) -> bool:
    """Whether two sums of times in ns differ only by rounding."""
    return math.isclose(left, right, rel_tol=ROUNDING, abs_tol=MIN_NS)


def smallest(frame: pl.DataFrame, columns: tuple[str, ...]) -> float:
    """The least value in the columns; 0 if there is none."""
    least: list[Any] = [frame[name].min() for name in columns]
    return float(min((value for value in least if value is not None), default=0))
