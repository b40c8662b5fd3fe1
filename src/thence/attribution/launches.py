"""The API call that each device activity came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW
from thence.model.launches import CALLS, matched_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.tables import Tables

__all__ = ["BY_CORRELATION", "BY_LINKED_OP", "NOT_FOUND", "launch_rows"]

BY_CORRELATION = "correlation id"
BY_LINKED_OP = "op linked by the profiler"
NOT_FOUND = "the trace holds no API call that launched it"


def launch_rows(tables: Tables) -> tuple[npt.NDArray[np.int64], pl.Series]:
    """Host row that launched each row of ``tables.gpu``, and how it was found.

    The API call with the same correlation id; where that call was not recorded, the op that the
    producer linked (``external``). A correlation id that several calls of one rank share identifies
    none of them.

    Returns:
        int64 array, `NO_ROW` where there is none, and a Categorical Series of rules.
    """
    launch = matched_rows(tables.gpu, tables.host, "correlation", CALLS)
    by_call = launch != NO_ROW
    by_op = np.zeros(len(launch), np.bool_)
    if not by_call.all():
        ops = pl.col("category").is_in(["op", "range", "framework"])
        linked = matched_rows(tables.gpu, tables.host, "external", ops)
        by_op = ~by_call & (linked != NO_ROW)
        launch = np.where(by_op, linked, launch)
    rules = pl.Series([BY_CORRELATION, BY_LINKED_OP, NOT_FOUND], dtype=pl.Categorical())
    return launch, rules.gather(np.where(by_call, 0, np.where(by_op, 1, 2)))
