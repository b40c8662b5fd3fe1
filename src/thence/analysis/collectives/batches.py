"""Batched sends and receives: matched message by message, then merged into kernels again.

A kernel that sends to one rank and receives from another has several partners, and these have further partners. So
each such kernel is an instance of its own, with peers: the kernels of other devices at the other ends of its
messages. It waits for the last of its peers, no matter what the peers wait for. A plain send or receive whose other
end is in a batch is treated in the same way.
"""

from __future__ import annotations

import polars as pl

NO_PEERS = pl.DataFrame(
    schema={
        "instance": pl.Int64,
        "rank": pl.Int32,
        "device": pl.Int32,
        "start": pl.Int64,
        "end": pl.Int64,
        "all_shown": pl.Boolean,
    }
)
"""Schema of the peers of instances: the kernels of other devices that the kernel of an instance needs.

all_shown: whether the trace shows the other ends of all messages of the instance's kernel."""
_OF_KERNEL = ("gpu", "rank", "device", "start", "end", "launch", "group", "of_xla", "replayed")


def pieces(collectives: pl.DataFrame, parts: pl.DataFrame) -> pl.DataFrame:
    """One row per described kernel; a kernel of a batch has one row per part instead.

    Args:
        collectives: `Attributed.collectives`.
        parts: `Attributed.collective_parts`.

    Returns:
        The columns of ``collectives`` and row (in ``collectives``), piece (number) and batched (whether it is a part
        of a batch), sorted by row and host.
    """
    whole = collectives.with_row_index("row").filter(pl.col("gpu").is_not_null())
    if parts.is_empty():
        return whole.with_columns(batched=False).with_row_index("piece")
    several = parts.join(whole.select("gpu", "row"), on="gpu")
    alone = whole.join(parts, on="gpu", how="anti")
    both = pl.concat([alone.with_columns(batched=False), several.with_columns(batched=True)], how="diagonal")
    # The operations of one batch keep the order of their host ops.
    return both.sort("row", "host", maintain_order=True).with_row_index("piece")


def whole_kernels(matched: pl.DataFrame, collectives: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Merges the messages of batches into one row per kernel.

    Args:
        matched: one row per piece: row, gpu, batched, instance and the other columns of
            `thence.analysis.collectives.instances.Instances.rows`.
        collectives: `Attributed.collectives`.

    Returns:
        ``matched`` with one row per kernel of batches, which is an instance of its own and unmatched if any of its
        messages is; and the peers of these instances with the columns of `NO_PEERS`, one row per instance and
        device: the kernel that began last.
    """
    if not matched["batched"].any():
        return matched.drop("batched"), NO_PEERS
    mixed = matched["instance"].filter(matched["batched"]).unique()
    of_batch = matched["instance"].is_in(mixed.implode())
    messages, whole = matched.filter(of_batch), matched.filter(~of_batch).drop("batched")
    taken = 1 + matched.select(pl.col("instance").max()).item()
    described = collectives.select(
        pl.int_range(pl.len(), dtype=pl.UInt32).alias("row"), "bytes", collective=pl.col("collective").cast(pl.String)
    )
    kernels = (
        messages.group_by("row", maintain_order=True)
        .agg(
            *(pl.col(name).first() for name in (*_OF_KERNEL, "group_size", "source_rank")),
            *(pl.col(name).max() for name in ("sequence", "members")),
            pl.col("unmatched").drop_nulls().first(),
        )
        .join(described, on="row", how="left", maintain_order="left")
        .with_columns(instance=pl.int_range(pl.len()) + taken)
    )
    peers = _peers(messages, kernels)
    kernels = kernels.with_columns(
        matched=1
        + kernels["instance"].replace_strict(*_counts(peers), default=0, return_dtype=pl.UInt32).cast(pl.UInt32)
    )
    rows = pl.concat([whole, kernels.select(whole.columns)]).sort("row")
    return rows, peers.select(list(NO_PEERS.schema))


def _peers(messages: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """The kernels of other devices at the other ends of each kernel's messages, as `whole_kernels` returns them."""
    place = ("rank", "device")
    shown = (pl.col("matched") > 1).all().over("gpu")
    ends = (
        messages.with_columns(all_shown=shown)
        .filter(pl.col("unmatched").is_null())
        .select("instance", "gpu", *place, "start", "end", "all_shown")
    )
    own = ends.select("gpu", *place, "all_shown", message="instance").join(
        kernels.select("gpu", own="instance"), on="gpu"
    )
    return (
        own.join(ends.drop("all_shown").rename({"instance": "message"}), on="message", suffix="_of_peer")
        .filter(pl.any_horizontal(pl.col(x) != pl.col(f"{x}_of_peer") for x in place))
        .select(*("start", "end", "all_shown"), instance="own", rank="rank_of_peer", device="device_of_peer")
        .sort("instance", "rank", "device", "start")
        .unique(["instance", "rank", "device"], keep="last", maintain_order=True)
    )


def _counts(peers: pl.DataFrame) -> tuple[pl.Series, pl.Series]:
    """The instances that have peers, and the number of peers of each."""
    counted = peers.group_by("instance").len()
    return counted["instance"], counted["len"]
