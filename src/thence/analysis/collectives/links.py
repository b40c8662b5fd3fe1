"""What collectives crossed: the network between machines, or the links inside of one.

The words are those of `thence.analysis.ranks.nodes`. They are those of the process group: data of a group on several
machines crosses the network somewhere. A send and its receive are between two ranks, so those decide. Producers do not
list the members of groups of XLA programs: their devices are those that ran the program, if the trace has the whole
job and no two groups run at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from thence.analysis.collectives.missing import listed_ranks, ranks_of_job
from thence.analysis.ranks.nodes import NETWORK, NODE, UNKNOWN, nodes_of
from thence.model.collective_kinds import MESSAGES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from thence.model.attributed import Attributed

NOT_DESCRIBED = "not_described"
UNKNOWN_LINKS = {
    "machine": "the trace does not state the machine of each of their ranks",
    "members": "the trace does not list the ranks of their groups",
    "peer": "the trace lacks the other end, and the group is on several machines",
    NOT_DESCRIBED: "nothing describes them",
}
"""Why a link is unknown; the column link_unknown holds the keys."""
_GROUP = ("group", "of_xla", "messages", "listed")


def links_of(trace: Attributed, rows: pl.DataFrame) -> pl.DataFrame:
    """Adds link, and link_unknown (a key of `UNKNOWN_LINKS`; null where the link is known).

    Args:
        rows: those of `thence.analysis.collectives.instances.Instances` of this trace.
    """
    described = rows.with_columns(
        messages=pl.col("collective").is_in(MESSAGES) & ~pl.col("of_xla"),
        listed=trace.collectives["group_ranks"].gather(rows["row"]).cast(pl.String),
    )
    groups = described.group_by(_GROUP).agg(
        pl.col("rank").unique(), pl.col("group_size").max(), devices=pl.struct("rank", "device").n_unique()
    )
    nodes, whole = nodes_of(trace.meta.devices), not ranks_of_job(trace).missing
    links = [_link(group, nodes, whole_job=whole) for group in groups.iter_rows(named=True)]
    schema = {"link": pl.String, "link_unknown": pl.String}
    told = groups.select(_GROUP).hstack(pl.DataFrame(links, schema=schema, orient="row"))
    joined = described.join(told, on=_GROUP, how="left", nulls_equal=True, maintain_order="left")
    return joined.drop("messages", "listed")


def _link(group: Mapping[str, Any], nodes: Mapping[int, int], *, whole_job: bool) -> tuple[str, str | None]:
    """Link of a group, and why it is unknown."""
    size, shown = group["group_size"], {*group["rank"]}
    listed, all_listed = listed_ranks(group["listed"] or "")
    of_members = {nodes.get(rank) for rank in shown.union(listed)}
    if len(of_members - {None}) > 1:
        if group["messages"]:
            ends = {nodes.get(rank) for rank in shown}
            if len(shown) < 2:
                return UNKNOWN, "peer"
            return (UNKNOWN, "machine") if None in ends else (NETWORK if len(ends) > 1 else NODE, None)
        several_groups = group["of_xla"] and size is not None and group["devices"] > size
        return (UNKNOWN, "members") if several_groups else (NETWORK, None)
    if None in of_members:
        return UNKNOWN, "machine"
    complete = all_listed or (whole_job and size is not None and group["devices"] >= size)
    return (NODE, None) if complete else (UNKNOWN, "members")


def unknown_links(rows: pl.DataFrame) -> Iterator[str]:
    """A sentence for each reason why links are unknown, with the number of kernels.

    Args:
        rows: with link_unknown as `links_of` adds it.
    """
    counts = rows["link_unknown"].drop_nulls().value_counts().sort("count", "link_unknown", descending=[True, False])
    for reason, count in counts.iter_rows():
        if reason != NOT_DESCRIBED:  # `thence.analysis.collectives.missing.undescribed_kernels` says it
            yield (
                f"whether {count:,} of {rows.height:,} kernels crossed a network is unknown: {UNKNOWN_LINKS[reason]}"
            )
