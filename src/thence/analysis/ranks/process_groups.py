"""Process groups of a job: the kind of parallelism, the waits in each group, and links slower than others.

The kind of a group is found by the first of these rules that applies: its name and description (``dp``,
``TENSOR_MODEL_PARALLEL_GROUP``, ``mesh_pp`` ...); its traffic, if it has only sends and receives (pipeline); its
traffic, if it has all-to-alls and not all ranks are members (expert); its size (all ranks). Otherwise it is unknown.

A group has a slow link if its transfers (from the arrival of the last rank to the end of the collective) take longer
than those of other groups with the same collective, group size and message size, by more than `LATE_RANK_SHARE` of a
step on average, with a lower bound above 0 as in `thence.analysis.ranks.lateness`. A group is compared only if
there are at least two other groups like it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.ranks.lateness import late_since
from thence.analysis.ranks.nodes import UNKNOWN
from thence.model.collective_kinds import JOINT, MESSAGES

if TYPE_CHECKING:
    from thence.analysis.ranks.job_collectives import JobCollectives

KINDS = ("data", "tensor", "pipeline", "expert", "context", "all", "unknown")
"""Kinds of process groups, by the parallelism that they serve; all: a group of all ranks."""
_NAMES = (  # first match decides
    ("expert", r"(?:^|[^a-z])(?:e?[td]?p?_?)?(?:ep|expert|moe)(?:[^a-z]|$)|expert"),
    ("pipeline", r"(?:^|[^a-z])pp(?:[^a-z]|$)|(?:^|[^a-z0-9])p(?:[^a-z0-9]|$)|pipe"),
    ("tensor", r"(?:^|[^a-z])(?:tp|mp)(?:[^a-z]|$)|tensor|model_parallel"),
    ("data", r"(?:^|[^a-z])(?:dp|fsdp|ddp|hsdp|shard|replicate)(?:[^a-z]|$)|data|replica|fsdp"),
    ("context", r"(?:^|[^a-z])(?:cp|sp)(?:[^a-z]|$)|context|sequence"),
)

_MIN_ALIKE = 3
"""Minimum number of similar groups that are compared: of only two, it cannot be decided which one is slow."""
_LINKS: dict[str, pl.DataType] = {
    "group": pl.Int32(),
    "members": pl.String(),
    "ranks": pl.List(pl.Int32()),
    "nodes": pl.Int32(),
    "link": pl.String(),
    "extra_ns": pl.Float64(),
    "low_ns": pl.Float64(),
    "since_step": pl.String(),
    "times": pl.Float64(),
}


def group_rows(collectives: JobCollectives, world: int) -> pl.DataFrame:
    """Waits by process group.

    Args:
        collectives: of the job.
        world: number of ranks of the job.

    Returns:
        group, kind (one of `KINDS`), told_by (what decided the kind: name, size, traffic or null), name,
        description, members, size, shown (number of its devices in the trace), nodes and link (see
        `thence.analysis.ranks.nodes.with_links`), collectives (number of instances), and,
        summed over devices, exposed_ns, exposed_wait_ns (where a participant is missing, to the last arrival that the
        trace shows) and transfer_ns (exposed time that is no wait; null if devices are missing, or none of the
        collectives is matched); the largest wait first. Collectives of XLA programs are one group without a name.
    """
    messages = pl.col("collective").is_in(MESSAGES)
    sums = collectives.rows.group_by("group").agg(
        collectives=pl.col("instance").n_unique(),
        shown=pl.struct("rank", "device").n_unique().cast(pl.Int32),
        listed_size=pl.col("group_size").max(),
        exposed_ns=pl.col("exposed_ns").sum(),
        exposed_wait_ns=pl.col("exposed_wait_ns").sum(),
        told=pl.col("complete").any(),
        only_messages=messages.all(),
        exchanges=pl.col("collective").is_in(("all-to-all", "ragged-all-to-all")).any(),
    )
    rows = sums.join(collectives.groups, on="group", how="left", nulls_equal=True)
    size = pl.coalesce(pl.col("ranks").list.len().cast(pl.Int32), "listed_size")
    text = pl.concat_str(
        pl.col("description").fill_null(""), pl.lit(" "), pl.col("name").fill_null("")
    ).str.to_lowercase()
    named = pl.coalesce(pl.when(text.str.contains(pattern)).then(pl.lit(kind)) for kind, pattern in _NAMES)
    of_all_ranks = (size == world) & (world > 1)
    kind = (
        pl.when(named.is_not_null()).then(named)
        .when(pl.col("only_messages")).then(pl.lit("pipeline"))
        .when(pl.col("exchanges") & ~of_all_ranks).then(pl.lit("expert"))
        .when(of_all_ranks).then(pl.lit("all"))
        .otherwise(pl.lit("unknown"))
    )  # fmt: skip
    decided_by = (
        pl.when(named.is_not_null()).then(pl.lit("name"))
        .when(pl.col("only_messages")).then(pl.lit("traffic"))
        .when(pl.col("exchanges") & ~of_all_ranks).then(pl.lit("traffic"))
        .when(of_all_ranks).then(pl.lit("size"))
    )  # fmt: skip
    return rows.select(
        "group", "name", "description", "members", "collectives", "exposed_ns", "exposed_wait_ns",
        "nodes", kind=kind, told_by=decided_by, size=size, link=pl.col("link").fill_null(UNKNOWN),
        shown="shown",
        transfer_ns=pl.when((pl.col("shown") >= size).fill_null(value=True) & pl.col("told")).then(
            (pl.col("exposed_ns") - pl.col("exposed_wait_ns")).clip(lower_bound=0)
        ),
    ).select(
        "group", "kind", "told_by", "name", "description", "members", "size", "shown", "nodes", "link", "collectives",
        "exposed_ns", "exposed_wait_ns", "transfer_ns",
    ).sort("exposed_wait_ns", "group", descending=[True, False], nulls_last=True)  # fmt: skip


_MAX_ALIKE = 4
"""Groups that differ in their members and figures only, up to which each is a row of its own."""


def folded_groups(groups: pl.DataFrame) -> pl.DataFrame:
    """The groups as people read them: many that differ in their members and figures only are one row.

    Args:
        groups: as `group_rows` returns them.

    Returns:
        The columns of groups, and alike: how many groups the row is. Its figures are their sums, transfer_ns null if
        that of one is unknown; its members are those of the group with the largest wait. The largest wait first.
    """
    key = ["kind", "size", "shown", "link", "description"]
    many = pl.len().over(key) > _MAX_ALIKE
    place = pl.when(many).then(0).otherwise(pl.int_range(1, pl.len() + 1))
    figures = ("collectives", "exposed_ns", "exposed_wait_ns", "transfer_ns")
    sums = [pl.when(pl.col(name).null_count() == 0).then(pl.col(name).sum()).alias(name) for name in figures]
    others = [pl.col(name).first() for name in groups.columns if name not in (*key, *figures)]
    return (
        groups.with_columns(place=place)
        .group_by(*key, "place", maintain_order=True)
        .agg(*others, *sums, alike=pl.len())
        .select(*groups.columns, "alike")
        .with_columns(
            members=pl.when(pl.col("alike") > 1)
            .then(pl.format("most waits in {}", pl.col("members").fill_null("?")))
            .otherwise("members")
        )
        .sort("exposed_wait_ns", "group", descending=[True, False], nulls_last=True)
    )


def slow_links(collectives: JobCollectives, steps: pl.DataFrame, keys: list[str], step_ns: float) -> pl.DataFrame:
    """Groups whose transfers take longer than those of similar groups.

    Args:
        collectives: of the job.
        steps: as `thence.analysis.ranks.lateness.step_keys` returns them.
        keys: keys of the steps that count, in order.
        step_ns: mean time of a step.

    Returns:
        group, members (text), ranks (list; null if unknown), nodes and link (as in `group_rows`), extra_ns (mean per
        step, since since_step), low_ns (lower bound of extra_ns less the mean of the other groups), since_step (key),
        times (transfer time of the group / median of similar groups).
    """
    if collectives.groups.height < _MIN_ALIKE:
        return pl.DataFrame(schema=_LINKS)
    moved = _transfers(collectives, steps, keys)
    if moved.is_empty():
        return pl.DataFrame(schema=_LINKS)
    extra = moved.group_by("group", "key").agg(
        extra=(pl.col("moving") - pl.col("typical")).sum(),
        moving=pl.col("moving").sum(),
        typical=pl.col("typical").sum(),
    )
    groups = extra["group"].unique().sort()
    row = extra["group"].replace_strict(groups, range(len(groups)), return_dtype=pl.Int64).to_numpy()
    step = extra["key"].replace_strict(keys, range(len(keys)), return_dtype=pl.Int64).to_numpy()
    matrix = np.zeros((len(groups), len(keys)))
    matrix[row, step] = np.maximum(extra["extra"].to_numpy(), 0)
    tested = late_since(matrix, step_ns).with_columns(group=groups)
    since = pl.Series(keys, dtype=pl.String).gather(tested["since"].cast(pl.UInt32))
    times = extra.group_by("group").agg(times=pl.col("moving").sum() / pl.col("typical").sum())
    return (
        tested.with_columns(since_step=since, extra_ns="mean_ns")
        .filter("straggler")
        .join(times, on="group")
        .join(collectives.groups, on="group", how="left")
        .sort("extra_ns", "group", descending=[True, False])
        .select(pl.col(name).cast(dtype) for name, dtype in _LINKS.items())
    )


def _transfers(collectives: JobCollectives, steps: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """Transfers of which all members are shown, in groups with at least two similar groups.

    Returns:
        group, key, moving and typical (its time and the median of similar groups, ns), and further columns.
    """
    like = ["collective", "bytes", "group_size", "key", "turn"]
    place = ["rank", "device", "step"]
    moved = (
        collectives.rows.filter(pl.col("known"), pl.col("group").is_not_null(), pl.col("collective").is_in(JOINT))
        .join(steps.filter(pl.col("key").is_in(keys)).select(*place, "key"), on=place)
        .group_by("group", "instance")
        .agg(
            pl.col("collective", "bytes", "group_size", "key").first(),
            start=pl.col("start").max(),
            moving=(pl.col("end").max() - pl.col("start").max()).clip(lower_bound=0),
            shown=pl.len(),
        )
        .filter(pl.col("shown") == pl.col("group_size"))
        .sort("group", "start", "instance")
    )
    turn = pl.int_range(pl.len()).over("group", "key", "collective", "bytes", "group_size")
    return (
        moved.with_columns(turn=turn)
        .with_columns(typical=pl.col("moving").median().over(like), alike=pl.col("group").n_unique().over(like))
        .filter(pl.col("alike") >= _MIN_ALIKE)
    )
