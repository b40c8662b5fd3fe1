"""Collectives of a recording: what was moved inside the marks around them.

A recording has such a mark around every collective of PyTorch (`thence.torch.label_collectives`); the
kernels that it launched are found by the attribution. The table ``collectives`` describes them by the serial
of the mark. In recordings of version 1, and of marks that the program made itself, the metadata of the mark
do; then that table has at most the number of the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.model.collective_columns import described, described_structs
from thence.model.collectives import NUMBERS, TEXTS
from thence.model.tables import COLLECTIVES
from thence.readers.recording.host import named

if TYPE_CHECKING:
    from thence.readers.recording.host import HostRanges

__all__ = ["described_collectives"]


def described_collectives(
    host: HostRanges, table: pl.DataFrame, names: pl.DataFrame
) -> pl.DataFrame:
    """Rows of `COLLECTIVES` without a device activity.

    Args:
        host: of the process.
        table: the table ``collectives`` of its recording.
        names: number and text (Categorical).
    """
    marks = pl.DataFrame({"serial": host.serial, "described": host.described})
    marks = marks.with_row_index("host").drop_nulls("serial")
    calls = marks.join(table.drop_nulls("serial").unique("serial"), on="serial", how="left")
    return pl.concat([_by_columns(calls, names), _by_metadata(calls, host)]).sort("host")


def _by_columns(calls: pl.DataFrame, names: pl.DataFrame) -> pl.DataFrame:
    rows = calls.filter(pl.col("collective") > 0)
    raw = {name: named(rows, name, names).cast(pl.String) for name in TEXTS}
    raw |= {name: rows[name] for name in NUMBERS}
    found = COLLECTIVES.frame({"host": rows["host"], **described(raw).to_dict()})
    return found.drop_nulls("collective")  # the part with its name can be damaged


def _by_metadata(calls: pl.DataFrame, host: HostRanges) -> pl.DataFrame:
    known = (pl.col("collective") > 0).fill_null(value=False)
    rows = calls.filter(pl.col("described").is_not_null() & ~known)
    frame = described_structs(host.collectives).gather(rows["described"]).struct.unnest()
    sequence = pl.coalesce(rows["sequence"], frame["sequence"])
    return COLLECTIVES.frame({"host": rows["host"], **frame.with_columns(sequence).to_dict()})
