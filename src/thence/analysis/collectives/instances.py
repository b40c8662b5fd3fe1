"""Finds the kernels of different ranks and devices that are one collective ("instance").

    collectives with a sequence number   same process group, kind and number
    sends and receives                   same process group, source and destination, aligned by order; kernels
                                         of batches by each of their messages (`batches`)
    collectives of XLA programs          same instruction in executions that are aligned by program name
    all others, and replays of graphs    same process group, aligned by what they move

Aligned means that the sequences of calls of two participants are matched by their content (`call_alignment`), not
by counting from their starts. Replays of a CUDA graph repeat the sequence numbers of the capture, so for replays
the numbers are only part of the tokens. A kernel that cannot be matched is an instance of its own, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.collectives.call_alignment import Calls, pair_calls
from thence.model.attributed import once_per_trace
from thence.model.collective_kinds import JOINT, PEERS, kind_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.attributed import Attributed


UNMATCHED = {
    "ambiguous": "steps repeat, and several ways of pairing them fit equally well",
    "no_partner": "no other rank has the same call: its profile began later or ended earlier, or lost calls",
    "peers_unknown": "the trace does not record which rank sent to which",
    "mixed_groups": "more devices ran the instruction than its group has: several groups at once",
}
"""Why a kernel was matched with no other; `Instances.rows` holds the keys."""

_GROUP = ("group_name", "group_description", "group_ranks")
_UNEVEN = ("all-to-all", "ragged-all-to-all", "gather", "scatter")
"""Kinds in which ranks may contribute different numbers of bytes."""
_SOME_PEERS = ("collective-permute", "coalesced", "send-recv")
"""Kinds between pairs or rings of ranks, which no producer records."""
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


_NO_ROWS = pl.DataFrame(
    schema={
        "row": pl.UInt32, "gpu": pl.Int32, "rank": pl.Int32, "device": pl.Int32, "collective": pl.String,
        "bytes": pl.Int64, "group_size": pl.Int32, "source_rank": pl.Int32, "sequence": pl.Int64, "start": pl.Int64,
        "end": pl.Int64, "launch": pl.Int64, "group": pl.UInt32, "of_xla": pl.Boolean, "replayed": pl.Boolean,
        "instance": pl.Int64, "members": pl.UInt32, "matched": pl.UInt32, "unmatched": pl.String,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Instances:
    """Kernels matched across ranks and devices.

    Attributes:
        rows: row (in ``trace.collectives``), gpu (row), rank, device, collective (kind), bytes, group_size,
            source_rank, sequence, start, end (ns), launch (ns, null where unknown), group (number; sends and
            receives of different peers are different groups), of_xla, replayed, instance (number), members (number
            of devices of the trace that have calls of its group, or run its XLA program), matched (number of devices
            that show the instance), unmatched (a key of `UNMATCHED`; null where it is matched, or where no other
            device could have a partner). In order of row. A kernel of a batch is an instance of its own.
        peers: instance, rank, device, start, end (ns), all_shown (`NO_PEERS`): the kernels of other devices that a
            kernel of a batch exchanges messages with, which have instances of their own.
    """

    rows: pl.DataFrame = field(default_factory=_NO_ROWS.clone)
    peers: pl.DataFrame = field(default_factory=NO_PEERS.clone)


def unmatched_reasons(rows: pl.DataFrame) -> list[str]:
    """A sentence for each reason why kernels were not matched, with their number.

    Args:
        rows: with the column unmatched of `Instances.rows`.
    """
    counts = rows["unmatched"].drop_nulls().value_counts(sort=True)
    return [
        f"{count:,} of {rows.height:,} kernels are matched with no other rank: {UNMATCHED[reason]}"
        for reason, count in counts.iter_rows()
    ]


@once_per_trace
def collective_instances(trace: Attributed) -> Instances:
    """Matches rows of ``Tables.collectives`` that are the same collective on different ranks and devices.

    Several kernels with one sequence number are parts of one collective. Replica groups of one XLA
    instruction are not distinguished, because no producer lists them per execution: if more devices
    ran the instruction than a group has, it is not matched. Rows without a kernel are left out.
    """
    if trace.collectives["gpu"].null_count() == trace.collectives.height:
        return Instances()
    rows = _rows(trace)
    calls = _aligned(_calls(rows))
    key = ["group", "what", "aligned", "number"]
    numbered = (
        attached(rows, calls, "call")
        .with_columns(
            aligned=pl.when("by_order").then("aligned").otherwise(None),
            alone=pl.coalesce(pl.when("by_order").then("reason"), "reason_of_row"),
        )
        .with_columns(own=pl.when(pl.col("alone").is_not_null() | (pl.col("group_size") == 1)).then("piece"))
        .with_columns(instance=pl.struct(*key, "own").rank("dense").cast(pl.Int64) - 1)
    )
    program = pl.when("of_xla").then("program_name")
    counted = numbered.with_columns(program_name=program).with_columns(
        members=pl.struct("rank", "device").n_unique().over("group", "program_name")
    )
    counted = counted.with_columns(matched=_devices(counted))
    mixed = (pl.col("matched") > pl.col("group_size")).fill_null(value=False)
    missing = (pl.col("matched") == 1) & (pl.col("members") > 1) & pl.col("group_size").ne_missing(1)
    unmatched = (
        pl.when(pl.col("alone").is_not_null())
        .then("alone")
        .when(mixed)
        .then(pl.lit("mixed_groups"))
        .when(missing)
        .then(pl.lit("no_partner"))
    )
    columns = (
        *("row", "gpu", "rank", "device", "collective", "bytes", "group_size", "source_rank"),
        *("sequence", "start", "end", "launch", "group", "of_xla", "replayed", "instance"),
    )
    instances = counted.select(*columns, "members", "matched", "batched", "piece", unmatched=unmatched)
    return Instances(*merged_batches(instances.sort("piece").drop("piece"), trace.collectives))


def _devices(rows: pl.DataFrame) -> pl.Series:
    """For each row, the number of devices that have rows of the same instance."""
    distinct, base = np.unique(together(rows, "rank", "device"), return_inverse=True)
    pairs = np.unique(rows["instance"].to_numpy() * len(distinct) + base)
    instance = pairs // max(len(distinct), 1)
    counts = np.bincount(instance).astype(np.uint32)
    return pl.Series(counts[rows["instance"].to_numpy()] if len(pairs) else counts)


def together(rows: pl.DataFrame, *keys: str) -> npt.NDArray[np.int64]:
    """One number for each row, equal for rows that are equal in all key columns (which hold numbers from 0).

    If nearly all rows differ, sorting these numbers takes a fraction of the time and memory of a group_by.
    """
    number = np.zeros(rows.height, np.int64)
    for key in keys:
        column = rows[key].to_numpy().astype(np.int64)
        number = number * (int(column.max(initial=0)) + 1) + column
    return number


def _rows(trace: Attributed) -> pl.DataFrame:
    """Described kernels, or the parts of kernels of batches, with the columns by which they are matched.

    group: number of the group within which calls are matched. what: the kind, or the XLA instruction. number: the
    sequence number, or how often the instruction ran before in the same execution. call: number of the call
    that is aligned. token: number that alignment compares. by_order: whether the row is matched by alignment.
    """
    described = batched_messages(trace.collectives, trace.collective_parts)
    kernels = trace.gpu.select("rank", "device", "start", "duration", "program", "hlo", "correlation")
    frame = described.select(
        *("row", "piece", "batched", "gpu", "bytes", "group_size", "sequence"),
        *(_in_job(name) for name in ("source_rank", "destination_rank")),
        *(pl.col(name).to_physical() for name in ("element_type", *_GROUP)),
        collective=_kinds(described["collective"]),
        replayed=pl.col("gpu").is_in(trace.graph_places["gpu"].implode()),
    ).hstack(kernels[described["gpu"].to_numpy()])
    host = trace.places["launch"].gather(described["gpu"].cast(pl.UInt32)).cast(pl.UInt32)
    launch = trace.host["start"].gather(host).rename("launch")
    names = trace.programs.select(
        pl.int_range(pl.len(), dtype=pl.Int32).alias("program"), pl.col("name").to_physical().alias("program_name")
    )
    placed = frame.hstack([launch]).with_columns(pl.col("hlo").to_physical(), end=pl.col("start") + pl.col("duration"))
    return _keyed(attached(placed, names, "program"))


def attached(rows: pl.DataFrame, others: pl.DataFrame, *on: str) -> pl.DataFrame:
    """The rows with the columns of others, whose keys are unique; a plain join would copy every column of the rows."""
    added = rows.select(on).join(others, on=on, how="left", maintain_order="left")
    return rows.hstack(added.get_columns()[len(on) :])


def _kinds(names: pl.Series) -> pl.Series:
    """The kind of each collective; the patterns are searched in each distinct name only once."""
    distinct = names.cast(pl.String).drop_nulls().unique()
    kinds = distinct.to_frame("name").select(kind_of(pl.col("name"))).to_series()
    return names.cast(pl.String).replace_strict(distinct, kinds, default=None, return_dtype=pl.String)


def _in_job(name: str) -> pl.Expr:
    """A peer's rank in the job.

    torch.profiler records only the peer, by its position in the process group; producers that record both ends record
    ranks of the job. The position is kept as it is if the list of ranks is cut off; a number that exceeds 32 bits or
    a position outside of the list gives null.
    """
    exclusive = pl.col("source_rank").is_null() != pl.col("destination_rank").is_null()
    listed = pl.when(exclusive).then(pl.col("group_ranks").cast(pl.String))
    whole = listed.str.contains(r"^\[\d+(, ?\d+)*\]$")
    numbers = pl.when(whole).then(listed).str.extract_all(r"\d+")
    members = numbers.cast(pl.List(pl.Int32), strict=False)
    place = members.list.get(pl.col(name), null_on_oob=True)
    return pl.when(members.is_null()).then(name).otherwise(place).alias(name)


def _keyed(frame: pl.DataFrame) -> pl.DataFrame:
    """Adds the columns that `_rows` describes."""
    frame = _grouped(frame)
    # Kernels of one replay with one sequence number are parts of one call; an execution of a
    # program is one call; every other kernel is a call of its own.
    of_xla, repeated = pl.col("of_xla"), pl.when("replayed").then("sequence")
    part = pl.when("replayed", pl.col("sequence").is_not_null()).then("correlation")
    call = pl.struct(
        *("rank", "device", "group"),
        pl.when("of_xla").then("program").alias("execution"),
        pl.when(~of_xla & part.is_null()).then("piece").alias("alone"),
        part.alias("part"),
        repeated.alias("repeated"),
    )
    size = pl.when(~pl.col("collective").is_in(_UNEVEN)).then("bytes")
    token = pl.struct(
        pl.when(of_xla).then("program_name").alias("name"),
        pl.when(~of_xla).then("what").alias("kind"),
        pl.when(~of_xla).then(size).alias("moved"),
        pl.when(~of_xla).then("element_type").alias("type"),
        pl.when(~of_xla).then("group_size").alias("ranks"),
        repeated.alias("repeated"),
    )
    kind = pl.col("collective")
    unnamed = kind.is_in(_SOME_PEERS) & pl.col("group_size").ne_missing(2)
    unknown = unnamed | (kind.is_in(PEERS) & (pl.col("source").is_null() | pl.col("target").is_null()))
    times_before = pl.int_range(pl.len()).over("call", "what")
    common = {"by_order": ~pl.col("numbered"), "reason_of_row": pl.when(unknown).then(pl.lit("peers_unknown"))}
    if frame["numbered"].all():
        nothing = pl.lit(None, pl.Int64)
        return frame.with_columns(call=nothing, token=nothing, number="sequence", **common)
    return (
        frame.with_columns(
            call=pl.when(~pl.col("numbered")).then(call.rank("dense")).cast(pl.Int64),
            token=token.rank("dense").cast(pl.Int64),
            **common,
        )
        .sort("start", maintain_order=True)
        .with_columns(number=pl.when("numbered").then("sequence").when("of_xla").then(times_before))
    )


def _grouped(frame: pl.DataFrame) -> pl.DataFrame:
    """Adds the group of each kernel, its kind or instruction, and whether it is matched by its sequence number.

    Sends and receives of a pair are a group of their own, because their sequence numbers differ between the two ranks.
    """
    kind = pl.col("collective")
    of_xla = pl.col("program").is_not_null() & pl.col("hlo").is_not_null()
    peer = ~of_xla & kind.is_in(PEERS)
    source = pl.coalesce("source_rank", pl.when(kind == "send").then("rank"))
    target = pl.coalesce("destination_rank", pl.when(kind == "recv").then("rank"))
    return frame.with_columns(
        of_xla=of_xla,
        numbered=~of_xla & ~peer & ~pl.col("replayed") & pl.col("sequence").is_not_null(),
        source=pl.when(peer).then(source),
        target=pl.when(peer).then(target),
        what=pl.when(of_xla).then("hlo").when(~peer).then(_number(kind)),
    ).with_columns(
        group=pl.struct(
            "of_xla", *(pl.when(~pl.col("of_xla")).then(name).alias(name) for name in _GROUP), *("source", "target")
        ).rank("dense")
    )


def _number(text: pl.Expr) -> pl.Expr:
    """Equal numbers for equal texts."""
    return text.cast(pl.Categorical()).to_physical()


def _calls(rows: pl.DataFrame) -> pl.DataFrame:
    """The calls that are matched by alignment, in the order of their launch.

    A call of XLA is an execution of a program; its end is that of its last collective of a kind in `JOINT`.
    """
    joint = pl.col("collective").is_in(JOINT)
    calls = (
        rows.filter("by_order", pl.col("reason_of_row").is_null())
        .group_by("call")
        .agg(
            pl.col("group", "rank", "device", "token").first(),
            pl.col("start", "launch").min(),
            pl.coalesce(pl.col("end").filter(joint).max(), pl.col("end").max()),
            joint=joint.any(),
        )
    )
    # Kernels on several streams begin in any order, so calls are sorted by launch if all launches are known.
    known = calls.group_by("group", "rank", "device").agg(known=pl.col("launch").null_count() == 0)
    return (
        calls.join(known, on=["group", "rank", "device"], maintain_order="left")
        .with_columns(order=pl.when("known").then("launch"))
        .sort("group", "rank", "device", "order", "start", "call")
    )


def _aligned(calls: pl.DataFrame) -> pl.DataFrame:
    """For each call, the number of the reference's call that it is paired with, or why there is none.

    The reference of a group is the participant with the most calls.

    Returns:
        call, aligned, reason.
    """
    rank, call = calls["rank"].to_numpy(), calls["call"].to_numpy()
    group, member = calls["group"].to_numpy(), together(calls, "group", "rank", "device")
    bounds = np.concatenate([[0], 1 + np.flatnonzero(np.diff(member)), [calls.height]])
    every = Calls(*(calls[name].to_numpy() for name in ("token", "end", "joint")))
    aligned, ambiguous = np.full(len(call), -1, np.int64), np.zeros(len(call), np.bool_)
    parts = [slice(*ends) for ends in pairwise(bounds.tolist()) if ends[0] < ends[1]]
    for _, of_group in groupby(parts, key=lambda part: group[part.start]):
        # The reference is the first of the participants with the most calls.
        reference, *others = sorted(of_group, key=lambda part: part.start - part.stop)
        ours = every.part(reference.start, reference.stop)
        for part in others:
            one_clock = bool(rank[part.start] == rank[reference.start])
            pairs = pair_calls(ours, every.part(part.start, part.stop), one_clock=one_clock)
            aligned[part.start + pairs.second] = call[reference.start + pairs.first]
            ambiguous[part] = pairs.ambiguous > 0
        ambiguous[reference] = bool(others) and all(ambiguous[part.start] for part in others)
        if not ambiguous[reference.start]:
            aligned[reference] = call[reference]
    reason = pl.when("ambiguous").then(pl.lit("ambiguous")).otherwise(pl.lit("no_partner"))
    return pl.DataFrame({"call": call, "aligned": aligned, "ambiguous": ambiguous}).select(
        "call", "aligned", reason=pl.when(pl.col("aligned") < 0).then(reason)
    )


_OF_KERNEL = ("gpu", "rank", "device", "start", "end", "launch", "group", "of_xla", "replayed")


def batched_messages(collectives: pl.DataFrame, parts: pl.DataFrame) -> pl.DataFrame:
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


def merged_batches(matched: pl.DataFrame, collectives: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
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
    """The kernels of other devices at the other ends of each kernel's messages, as `merged_batches` returns them."""
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
