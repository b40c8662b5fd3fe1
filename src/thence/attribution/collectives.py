"""Which kernels a collective that a host op described ran as."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW, chain_to
from thence.model.tables import COLLECTIVES

if TYPE_CHECKING:
    from thence.model.tables import Tables

__all__ = ["described_collectives"]


def described_collectives(tables: Tables, launch: pl.Series) -> pl.DataFrame:
    """The `collectives` table with a device activity in every row.

    Kernels of CUDA graphs whose joined label describes a collective are among them.

    Producers that describe a collective on the host op only (``record_param_comms`` of older torch)
    have its kernels found here: those launched inside that op. Descriptions without a kernel are
    dropped: nothing ran for them on a device.

    Args:
        tables: of the trace.
        launch: host row that launched each device activity, null where unknown.
    """
    known = tables.collectives.filter(pl.col("gpu").is_not_null())
    known = pl.concat([known, _of_graphs(tables, known["gpu"])]).sort("gpu")
    on_host = tables.collectives.filter(pl.col("gpu").is_null())
    if on_host.is_empty():
        return known
    described = np.zeros(tables.host.height, np.bool_)
    described[on_host["host"].to_numpy()] = True
    parent = tables.host["parent"].fill_null(NO_ROW).cast(pl.Int64).to_numpy()
    around = chain_to(parent, launch.fill_null(NO_ROW).cast(pl.Int64).to_numpy(), described)
    found = (
        pl.DataFrame({"host": around})
        .with_row_index("gpu")
        .with_columns(pl.col("gpu", "host").cast(pl.Int32))
        .filter((tables.gpu["kind"] == "kernel") & ~pl.col("gpu").is_in(known["gpu"].implode()))
    )
    matched = on_host.drop("gpu").join(found, on="host").select(known.columns)
    return pl.concat([known, matched]).sort("gpu")


def _of_graphs(tables: Tables, known: pl.Series) -> pl.DataFrame:
    """What labels of graph nodes say of collectives, for kernels that nothing else describes."""
    kinds = tables.gpu["kind"].gather(tables.graph_places["gpu"])
    joined = tables.graph_places.select("gpu", "collective").filter(
        (kinds == "kernel")
        & pl.col("collective").is_not_null()
        & ~pl.col("gpu").is_in(known.implode())
    )
    return COLLECTIVES.frame({"gpu": joined["gpu"], **joined.unnest("collective").to_dict()})
