"""Matches descriptions of collectives (kind, bytes, group) to the kernels that ran them.

A description comes with the kernel itself (Kineto), with the label of a CUDA graph node, with the HLO
instruction that the kernel runs, with the host op around the launch (``record_param_comms`` of older
torch, recordings, NCCL's NVTX ranges), or with the host ops of its parts (batches of sends and receives).
If a kernel has several descriptions, the first in this order is used.

Batches: ``batch_isend_irecv`` and the schedules of torch.distributed.pipelining put sends and receives into one NCCL
group: each send or receive writes an op ``record_param_comms``, and after these ops the range
``nccl:coalesced`` launches one kernel for all of them. Kineto describes the ops, but not the kernel. An op that
launched nothing itself is a part of the kernel that the ``nccl:coalesced`` range around the op launches. If
there is no such range around it, it is a part of the kernel of the next such range on its thread, unless another
described op, such as a wait, lies between the two. If a range launched several send or receive kernels, it is
unknown which part belongs to which kernel, and the range is left out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.columns import not_null, row_numbers
from thence.model.intervals import NO_ROW, chain_to
from thence.model.names import matching
from thence.model.tables import COLLECTIVES

if TYPE_CHECKING:
    from thence.model.arrays import Int64, Mask
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
    collectives = tables.collectives[np.flatnonzero(not_null(tables.collectives["gpu"]))]
    for source in (_collectives_of_graph_labels, _collectives_of_hlo_instructions):
        collectives = pl.concat([collectives, source(tables, collectives["gpu"])])
    collectives = pl.concat([collectives, _collectives_of_host_ops(tables, collectives["gpu"], launch)])
    parts = batched_parts(tables, collectives["gpu"], launch)
    return pl.concat([collectives, batched_kernels(parts)]).sort("gpu"), parts


def described_on_host(tables: Tables) -> pl.DataFrame:
    """The rows of `collectives` without a device activity."""
    return tables.collectives[np.flatnonzero(~not_null(tables.collectives["gpu"]))]


def _collectives_of_host_ops(tables: Tables, described_rows: pl.Series, launch: pl.Series) -> pl.DataFrame:
    """Collectives described by host ops, for kernels without a description yet that were launched inside them."""
    on_host = described_on_host(tables)
    if on_host.is_empty():
        return COLLECTIVES.empty()
    described = np.zeros(tables.host.height, np.bool_)
    described[on_host["host"].to_numpy()] = True
    parent = row_numbers(tables.host["parent"])
    around = chain_to(parent, row_numbers(launch), described)
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
    instructions = pl.concat(described).unique(["module", "instruction"], keep="first")
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
        .join(instructions, on=["module", "instruction"])
        .sort("nccl", "duration", "gpu", descending=[True, True, False])
        .unique(["program", "instruction", "iteration", "replay"], keep="first", maintain_order=True)
    )
    return COLLECTIVES.frame(kernels.select("gpu", "collective", "bytes", "group_size").to_dict())


def _collectives_of_graph_labels(tables: Tables, described_rows: pl.Series) -> pl.DataFrame:
    """Collectives described by labels of graph nodes, for kernels without a description yet."""
    if tables.graph_places["collective"].null_count() == tables.graph_places.height:
        return COLLECTIVES.empty()
    kinds = tables.gpu["kind"].gather(tables.graph_places["gpu"])
    joined = tables.graph_places.select("gpu", "collective").filter(
        (kinds == "kernel") & pl.col("collective").is_not_null() & ~pl.col("gpu").is_in(described_rows.implode())
    )
    return COLLECTIVES.frame({"gpu": joined["gpu"], **joined.unnest("collective").to_dict()})


# ---- Batched sends and receives of torch.distributed: one kernel that several host ops describe


BATCH = "send-recv"
"""Name of a batch in the column ``collective``."""
_BATCH_RANGE = "nccl:coalesced"
_BATCH_KERNEL = r"(?i)^(?:nccl|rccl).*send_?recv"
_TRANSFERS = ("send", "recv", "isend", "irecv")
_THREAD = ("rank", "process", "thread")
_SHARED = ("element_type", "group_name", "group_description", "group_ranks", "group_size")


def batched_parts(tables: Tables, described_rows: pl.Series, launch: pl.Series) -> pl.DataFrame:
    """The sends and receives of each batch, in the columns of `COLLECTIVES`: several rows per row of gpu.

    Args:
        described_rows: rows of gpu that already have a description; they get no parts.
        launch: host row that launched each device activity, null where unknown.

    Returns:
        One row per part, sorted by gpu and host.
    """
    on_host = described_on_host(tables).drop_nulls("host")
    if on_host.is_empty():
        return COLLECTIVES.empty()
    batches = _batches(tables, described_rows, launch)
    if batches.is_empty():
        return COLLECTIVES.empty()
    is_transfer = pl.col("collective").cast(pl.String).str.to_lowercase().is_in(_TRANSFERS)
    launched = _launched_themselves(tables, on_host["host"], launch)
    ops = on_host.select("host", part=is_transfer & ~launched)
    places = tables.host.select(*_THREAD, "start").with_row_index("host")
    ranges = pl.DataFrame({"host": np.flatnonzero(_is_range(tables)).astype(np.int32)})
    marks = (
        pl.concat([ops.unique("host"), ranges], how="diagonal")
        .join(places.with_columns(pl.col("host").cast(pl.Int32)), on="host")
        .sort(*_THREAD, "start", "host")
        .with_columns(
            # The next row that is not a part: the range of the batch, or another described op before it.
            next=pl.when(~pl.col("part").fill_null(value=False))
            .then("host")
            .fill_null(strategy="backward")
            .over(*_THREAD)
        )
    )
    parts = marks.filter("part")
    inside = pl.Series(_around(tables, parts["host"], _is_range(tables))).cast(pl.Int32)
    of_batches = parts.select("host", range=pl.when(inside != NO_ROW).then(inside).otherwise("next")).join(
        batches, on="range"
    )
    return (
        on_host.drop("gpu")
        .join(of_batches.select("host", "gpu"), on="host")
        .select(list(COLLECTIVES.schema))
        .sort("gpu", "host")
    )


def batched_kernels(parts: pl.DataFrame) -> pl.DataFrame:
    """One row of `COLLECTIVES` for each kernel: the sum of its parts.

    bytes is the sum over the parts, in_elements the sum over the sends, out_elements the sum over the receives, each
    null where the value of a part is unknown. The other columns have the value that all parts share, else
    null. host is the op of the first part.
    """
    if parts.is_empty():
        return COLLECTIVES.empty()
    name = pl.col("collective").cast(pl.String).str.to_lowercase()
    sends = name.str.contains("send")
    kernels = parts.group_by("gpu", maintain_order=True).agg(
        pl.col("host").first(),
        *(pl.when(pl.col(x).n_unique() == 1).then(pl.col(x).first()).alias(x) for x in _SHARED),
        bytes=_sum_of_known(pl.col("bytes")),
        in_elements=_sum_of_known(pl.col("in_elements").filter(sends)),
        out_elements=_sum_of_known(pl.col("out_elements").filter(~sends)),
        collective=pl.lit(BATCH),
    )
    return COLLECTIVES.frame(kernels.to_dict())


def _sum_of_known(values: pl.Expr) -> pl.Expr:
    """The sum, null if one of the values is null."""
    return pl.when(values.null_count() == 0).then(values.sum())


def _batches(tables: Tables, described_rows: pl.Series, launch: pl.Series) -> pl.DataFrame:
    """The range (host row) and gpu of each send or receive kernel without a description, if alone in its range."""
    chosen = (tables.gpu["kind"] == "kernel") & matching(tables.gpu["name"], _BATCH_KERNEL)
    rows = chosen.arg_true()
    around = _around(tables, launch.gather(rows), _is_range(tables))
    return (
        pl.DataFrame({"range": around, "gpu": rows}, schema_overrides={"gpu": pl.Int32})
        .with_columns(pl.col("range").cast(pl.Int32))
        .filter(pl.col("range") != NO_ROW)
        .filter(pl.len().over("range") == 1)
        .filter(~pl.col("gpu").is_in(described_rows.implode()))
    )


def _is_range(tables: Tables) -> Mask:
    """Which host rows are ranges that launch batches."""
    return matching(tables.host["name"], f"^{re.escape(_BATCH_RANGE)}$").to_numpy()


def _launched_themselves(tables: Tables, ops: pl.Series, launch: pl.Series) -> pl.Series:
    """Which of the ops launched a kernel, or contain a range ``nccl:...``, whose kernel the trace may have lost."""
    is_op = np.zeros(tables.host.height, np.bool_)
    is_op[ops.to_numpy()] = True
    ranges = matching(tables.host["name"], "^nccl:").arg_true()
    launches = launch.drop_nulls().unique()
    inside = pl.concat([ranges.cast(pl.Int64), launches.cast(pl.Int64)])
    return ops.is_in(pl.Series(_around(tables, inside, is_op)).cast(pl.Int32).implode())


def _around(tables: Tables, rows: pl.Series, wanted: Mask) -> Int64:
    """The innermost wanted row among each host row and its ancestors; `NO_ROW` where there is none."""
    parent = row_numbers(tables.host["parent"])
    return chain_to(parent, row_numbers(rows), wanted)
