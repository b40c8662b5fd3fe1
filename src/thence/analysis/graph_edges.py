"""The edges of captured CUDA graphs, by the kernels and labels at both ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.errors import MissingData

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.model.graph_labels import CapturedGraph, GraphLabels

WAY_OUT = (
    "edges are in recordings of thence record (PyTorch), in labels of thence.save_labels(), and in files of "
    "torch.cuda.export_graph_data (torch 2.15), which --labels takes"
)
"""Where edges of captured graphs come from, for messages of analyses that lack them."""


def graph_edges(labels: Sequence[GraphLabels]) -> pl.DataFrame:
    """One row for each edge: a node, and a node that waits for it.

    Args:
        labels: labels of captured graphs.

    Returns:
        rank (null where the file does not state it), graph (id), node (number), kernel (name; the type of the node
        if it is no kernel), label, next_node, next_kernel, next_label. For each graph, rows are in order of node
        and next_node.

    Raises:
        MissingData: none of the labels hold edges.
    """
    frames = [_edges(graph, file) for file in labels for graph in file.graphs if graph.edges is not None]
    if not frames:
        raise MissingData(
            f"the labels have no edges of CUDA graphs, and PyTorch's annotation files never do: {WAY_OUT}"
        )
    return pl.concat(frames)


def _edges(graph: CapturedGraph, file: GraphLabels) -> pl.DataFrame:
    assert graph.edges is not None
    kernels = pl.Series([k.demangled or k.name for k in file.kernels], dtype=pl.String)
    paths = pl.Series(["/".join(label.path) or None for label in file.labels], dtype=pl.String)
    nodes = graph.nodes.select(
        "number",
        kernel=pl.coalesce(kernels.gather(graph.nodes["kernel"].cast(pl.UInt32)), pl.col("type")),
        label=paths.gather(graph.nodes["label"].cast(pl.UInt32)),
    )
    edges = pl.DataFrame(np.asarray(graph.edges, np.int64), schema=["node", "next_node"])
    following = nodes.rename({name: f"next_{name}" for name in ("kernel", "label")})
    return (
        edges.join(nodes, left_on="node", right_on="number", how="left")
        .join(following, left_on="next_node", right_on="number", how="left")
        .select(
            pl.lit(file.process.rank, pl.Int64).alias("rank"),
            pl.lit(graph.id, pl.Int64).alias("graph"),
            *("node", "kernel", "label", "next_node", "next_kernel", "next_label"),
        )
        .sort("node", "next_node")
    )
