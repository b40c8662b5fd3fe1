"""Matches descriptions of collectives (kind, bytes, group) to the kernels that ran them.

A description comes with the kernel itself (Kineto), with the label of a CUDA graph node, with the HLO
instruction that the kernel runs, with the host op around the launch (``record_param_comms`` of older
torch, recordings, NCCL's NVTX ranges), or with the host ops of its parts (batches of sends and receives,
`thence.attribution.batched_transfers`). If a kernel has several descriptions, the first in this order is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.batched_transfers import batched_kernels, batched_parts
from thence.model.intervals import NO_ROW, chain_to
from thence.model.names import matching
from thence.model.tables import COLLECTIVES

if TYPE_CHECKING:
    from thence.model.tables import Tables


def complete_collectives(tables: Tables, launch: pl.Series) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The `collectives` table with a device activity in every row, and the parts of batched transfers.

    Descriptions without a kernel are dropped: nothing ran for them on a device.

    Args:
        tables: of the trace, with the HLO instruction of each activity in ``gpu``.
        launch: host row that launched each device activity, null where unknown.

    Returns:
        `collectives`, at most one row per kernel unless its producer wrote several; and
        `thence.model.attributed.Attributed.collective_parts`.
    """
    collectives = tables.collectives.filter(pl.col("gpu").is_not_null())
    for source in (_collectives_of_graph_labels, _collectives_of_hlo_instructions):
        collectives = pl.concat([collectives, source(tables, collectives["gpu"])])
    collectives = pl.concat([collectives, _collectives_of_host_ops(tables, collectives["gpu"], launch)])
    parts = batched_parts(tables, collectives["gpu"], launch)
    return pl.concat([collectives, batched_kernels(parts)]).sort("gpu"), parts


def _collectives_of_host_ops(tables: Tables, described_rows: pl.Series, launch: pl.Series) -> pl.DataFrame:
    """Collectives described by host ops, for kernels without a description yet that were launched inside them."""
    on_host = tables.collectives.filter(pl.col("gpu").is_null())
    if on_host.is_empty():
        return COLLECTIVES.empty()
    described = np.zeros(tables.host.height, np.bool_)
    described[on_host["host"].to_numpy()] = True
    parent = tables.host["parent"].fill_null(NO_ROW).cast(pl.Int64).to_numpy()
    around = chain_to(parent, launch.fill_null(NO_ROW).cast(pl.Int64).to_numpy(), described)
    launched = (
        pl.DataFrame({"host": around})
        .with_row_index("gpu")
        .with_columns(pl.col("gpu", "host").cast(pl.Int32))
        .filter((tables.gpu["kind"] == "kernel") & ~pl.col("gpu").is_in(described_rows.implode()))
    )
    return on_host.drop("gpu").join(launched, on="host").select(list(COLLECTIVES.schema))


def _collectives_of_hlo_instructions(tables: Tables, described_rows: pl.Series) -> pl.DataFrame:
    """Collectives described by HLO instructions: one row per execution, for its longest kernel.

    If one of the kernels is NCCL's, the row is for that kernel, however long its helper kernels take.
    """
    if not tables.hlo:
        return COLLECTIVES.empty()
    from thence.attribution.xla.hlo_collectives import collective_instructions

    described = [
        collective_instructions(module).select(
            pl.lit(place, pl.Int32).alias("module"),
            pl.col("name").alias("instruction"),
            "collective",
            pl.col("message_bytes").alias("bytes"),
            "group_size",
        )
        for place, module in enumerate(tables.hlo)
    ]
    every = pl.concat(described).unique(["module", "instruction"], keep="first")
    of_program = tables.programs.select(
        pl.int_range(pl.len(), dtype=pl.Int32).alias("program"), pl.col("hlo").alias("module")
    )
    # Command buffers have no iteration number, so each launch of the graph counts as one.
    replay = pl.when(pl.col("graph").is_not_null()).then("correlation")
    kernels = (
        tables.gpu.select(
            pl.int_range(pl.len(), dtype=pl.Int32).alias("gpu"),
            *("kind", "program", "iteration", "duration"),
            pl.col("hlo").cast(pl.String).alias("instruction"),
            replay.alias("replay"),
            nccl=matching(tables.gpu["name"], "(?i)nccl"),
        )
        .filter(pl.col("kind").is_in(["kernel", "thunk"]), ~pl.col("gpu").is_in(described_rows.implode()))
        .join(of_program, on="program")
        .join(every, on=["module", "instruction"])
        .sort("nccl", "duration", "gpu", descending=[True, True, False])
        .unique(["program", "instruction", "iteration", "replay"], keep="first", maintain_order=True)
    )
    return COLLECTIVES.frame(kernels.select("gpu", "collective", "bytes", "group_size").to_dict())


def _collectives_of_graph_labels(tables: Tables, described_rows: pl.Series) -> pl.DataFrame:
    """Collectives described by labels of graph nodes, for kernels without a description yet."""
    kinds = tables.gpu["kind"].gather(tables.graph_places["gpu"])
    joined = tables.graph_places.select("gpu", "collective").filter(
        (kinds == "kernel") & pl.col("collective").is_not_null() & ~pl.col("gpu").is_in(described_rows.implode())
    )
    return COLLECTIVES.frame({"gpu": joined["gpu"], **joined.unnest("collective").to_dict()})
