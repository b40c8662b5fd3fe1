"""FLOP and bytes of the HLO instructions that run as kernels: each once, for one execution."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.xla.constituents import PRODUCTS, KernelGraph

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thence.model.hlo import HloModule


def instruction_work(module: HloModule) -> pl.DataFrame:
    """The work of each instruction that runs as a step of its own.

    Products, convolutions and attention have FLOP: dots, also in fusions, and calls of libraries. A kernel reads each
    operand once and writes each result once; of an operand that it slices, only the slice, and of a result that it
    updates in place, only the update. Results of a library that nothing uses are its workspace.

    Returns:
        columns hlo (name, unique), flop (null without products), bytes, type (in which the largest product multiplies).
    """
    graph = KernelGraph(module)
    table = module.instructions
    products = (graph.opcode.is_in(PRODUCTS) | (graph.opcode == "custom-call")).to_numpy()
    own = np.where(products, table["own_flops"].to_numpy(), 0).astype(np.float64)
    containers = np.zeros(graph.count, np.bool_)
    containers[graph.inner["caller"].to_numpy()] = True
    moved = graph.bytes_read() + _used(graph)
    moved = np.where(graph.free | containers, 0.0, moved)
    flop, size = (np.bincount(graph.kernel, each, graph.count + 1)[: graph.count] for each in (own, moved))
    types = (
        pl.DataFrame({"row": graph.kernel, "own": own, "type": table["product_type"].cast(pl.String)})
        .filter(pl.col("own") > 0)
        .sort("own", descending=True)
        .unique("row", keep="first", maintain_order=True)
        .select(pl.col("row").cast(pl.UInt32), "type")
    )
    return (
        graph.table.select("row", "top_level", hlo="name", flop=pl.lit(pl.Series(flop)), bytes=pl.lit(pl.Series(size)))
        .join(types, on="row", how="left", maintain_order="left")
        .filter("top_level")
        .select(
            "hlo",
            flop=pl.when(pl.col("flop") > 0).then("flop"),
            bytes=pl.when(pl.col("bytes") > 0).then("bytes"),
            type="type",
        )
        .unique("hlo", keep="first", maintain_order=True)
    )


def _used(graph: KernelGraph) -> NDArray[np.float64]:
    """Bytes that each instruction writes; of a library's tuple of results only those that are taken out of it."""
    written = graph.bytes_written()
    table = graph.table
    taken = table.filter(pl.col("opcode") == "get-tuple-element").select(
        pl.col("row").alias("consumer"), "result_bytes"
    )
    calls = table.filter(pl.col("opcode") == "custom-call").select(pl.col("row").alias("producer"))
    used = (
        graph.edges.join(taken, on="consumer")
        .join(calls, on="producer", how="semi")
        .group_by("producer")
        .agg(pl.col("result_bytes").sum())
    )
    rows = used["producer"].to_numpy()
    written[rows] = np.minimum(written[rows], used["result_bytes"].to_numpy().astype(np.float64))
    return written
