"""The call of an operator whose work each device activity does.

Of nested operators the outermost with FLOP decides, because the inner ones are how it computes; if none has FLOP, the
innermost that has inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.work.flop import FLOP
from thence.model.intervals import NO_ROW, chain_to

if TYPE_CHECKING:
    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed

_MAX_DEPTH = 64
"""Operators with FLOP inside each other; PyTorch nests three."""


def operator_rows(trace: Attributed) -> Int64:
    """Row in host of the operator whose work each activity does, `NO_ROW` for none."""
    host = trace.host
    launch = trace.places["launch"].fill_null(NO_ROW).cast(pl.Int64).to_numpy()
    if host["inputs"].null_count() == host.height:
        return np.full(len(launch), NO_ROW, np.int64)
    parent = host["parent"].fill_null(NO_ROW).cast(pl.Int64).to_numpy()
    has_inputs = host["inputs"].is_not_null().to_numpy()
    used = host["name"].unique().drop_nulls()
    names = used.filter(used.cast(pl.String).is_in(list(FLOP)))
    multiplies = _outermost(
        parent, launch, has_inputs & host["name"].is_in(names.implode()).fill_null(value=False).to_numpy()
    )
    return np.where(multiplies != NO_ROW, multiplies, chain_to(parent, launch, has_inputs))


def _outermost(parent: Int64, rows: Int64, wanted: Mask) -> Int64:
    """The outermost wanted row among each row and its ancestors, `NO_ROW` for none."""
    found = chain_to(parent, rows, wanted)
    for _ in range(_MAX_DEPTH):
        inside = found != NO_ROW
        further = np.full(len(found), NO_ROW, np.int64)
        further[inside] = chain_to(parent, parent[found[inside]], wanted)
        if (further == NO_ROW).all():
            break
        found = np.where(further != NO_ROW, further, found)
    return found


def operator_calls(trace: Attributed) -> pl.DataFrame:
    """What a replay of each activity needs to know of the call that launched it, in the order of ``gpu``.

    Returns:
        columns operator and inputs (text), node (position of the activity among those of the call, in order of their
        launch), nodes (number of the activities of the call); null where no operator with inputs launched it.
    """
    rows = operator_rows(trace)
    known = pl.Series(rows).replace(NO_ROW, None)
    launched = trace.host["start"].gather(trace.places["launch"].cast(pl.UInt32))
    calls = pl.DataFrame({"call": known, "launched": launched, "start": trace.gpu["start"]}).with_row_index()
    numbered = (
        calls.drop_nulls("call")
        .sort("launched", "start", maintain_order=True)
        .select("index", node=pl.int_range(pl.len()).over("call"), nodes=pl.len().over("call"))
    )
    of_row = known.cast(pl.UInt32)
    return (
        calls.join(numbered, on="index", how="left", maintain_order="left")
        .select(pl.col("node", "nodes").cast(pl.Int32))
        .with_columns(
            operator=trace.host["name"].gather(of_row).cast(pl.String),
            inputs=trace.host["inputs"].gather(of_row).cast(pl.String),
        )
        .select("operator", "inputs", "node", "nodes")
    )
