"""The API call that launched each device activity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW
from thence.model.launches import CALLS, matched_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.tables import Tables

_LINKED = pl.col("category").is_in(["op", "range", "framework"])


def launch_rows(tables: Tables) -> npt.NDArray[np.int64]:
    """Host row that launched each row of ``tables.gpu``, `NO_ROW` where the trace does not show it.

    This is the API call with the same correlation id or, where that call was not recorded, the op that the
    producer linked (``external``). A correlation id that several calls of one rank share identifies
    none of them.
    """
    launch = matched_rows(tables.gpu, tables.host, "correlation", CALLS)
    unknown = launch == NO_ROW
    if unknown.any():
        launch = np.where(unknown, matched_rows(tables.gpu, tables.host, "external", _LINKED), launch)
    return launch
