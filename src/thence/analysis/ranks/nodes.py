"""The machines (nodes) of a job: which ranks are on which, and which groups the network connects.

The traces state the name of their machine (`thence.model.tables.Device.node`). Results number the machines from 0, in
the order of their lowest ranks. A link is what the members of a group have between them:

    network     they are on several nodes, so data crosses the network
    node        all are on one node: NVLink or PCIe, which traces do not tell apart
    unknown     the machine of a member is not known
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.thresholds import SLOW_LINK_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from thence.model.arrays import Float64
    from thence.model.tables import Device

NETWORK, NODE, UNKNOWN = "network", "node", "unknown"


def nodes_of(devices: Iterable[Device]) -> dict[int, int]:
    """The number of the node of each rank whose machine is known."""
    names = {device.rank: device.node for device in devices if device.node}
    numbers: dict[str, int] = {}
    return {rank: numbers.setdefault(names[rank], len(numbers)) for rank in sorted(names)}


def nodes_column(ranks: pl.Series, nodes: Mapping[int, int]) -> pl.Series:
    """The number of the node of each of these ranks; null where it is not known."""
    return pl.Series("node", [nodes.get(rank) for rank in ranks], dtype=pl.Int32)


def with_links(groups: pl.DataFrame, nodes: Mapping[int, int]) -> pl.DataFrame:
    """Groups with nodes (how many their members are on; null if that of a member is not known) and link.

    Args:
        groups: with ranks (list; null if they are not listed).
        nodes: number of the node of each rank.
    """
    counts, links = [], []
    for ranks in groups["ranks"].to_list():
        node_of_rank = {nodes.get(rank) for rank in ranks} if ranks else {None}
        known = node_of_rank - {None}
        counts.append(len(node_of_rank) if None not in node_of_rank else None)
        links.append(NETWORK if len(known) > 1 else UNKNOWN if None in node_of_rank else NODE)
    return groups.with_columns(nodes=pl.Series(counts, dtype=pl.Int32), link=pl.Series(links, dtype=pl.String))


def by_node(places: pl.DataFrame, matrix: Float64, nodes: Mapping[int, int]) -> tuple[pl.DataFrame, Float64]:
    """What the median device of each node with several devices did, if there are other nodes.

    Half of the devices of a node must be late for this to be late, so it tells a late node from a late rank.

    Args:
        places: rank of each device.
        matrix: ns of each device in each step, shape (devices, steps).
        nodes: number of the node of each rank.

    Returns:
        node, ranks (list) and devices (how many) of each node; and ns of its median device, shape (nodes, steps).
    """
    numbered = places.select("rank", node=nodes_column(places["rank"], nodes), at=pl.int_range(pl.len()))
    every = numbered.drop_nulls("node").group_by("node").agg("at", ranks=pl.col("rank").unique().sort()).sort("node")
    whole_nodes = every.with_columns(devices=pl.col("at").list.len().cast(pl.Int32)).filter(
        pl.col("devices") > 1, pl.len() > 1
    )
    medians = [np.median(matrix[rows], axis=0) for rows in whole_nodes["at"].to_list()]
    return whole_nodes.drop("at"), np.reshape(medians, (whole_nodes.height, matrix.shape[1]))


def slow_link_of(ranks: pl.DataFrame, links: pl.DataFrame) -> pl.Series:
    """For each straggler, the group whose slow link makes it late: by at least half of what it causes; else null.

    A rank whose transfers take longer in one group arrives later in the others.

    Args:
        ranks: rank, straggler and mean_ns of each device.
        links: as `thence.analysis.ranks.process_groups.slow_links` returns them.
    """
    extra: dict[int, tuple[float, int]] = {}
    for group, members, ns in links.select("group", "ranks", "extra_ns").iter_rows():
        for rank in members or ():
            extra[rank] = max(extra.get(rank, (0.0, group)), (ns, group))
    slow = [
        extra[rank][1] if late and rank in extra and extra[rank][0] >= SLOW_LINK_SHARE * ns else None
        for rank, late, ns in ranks.select("rank", "straggler", "mean_ns").iter_rows()
    ]
    return pl.Series("slow_link", slow, dtype=pl.Int32)
