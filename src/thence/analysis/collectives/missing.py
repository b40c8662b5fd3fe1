"""What a trace lacks of the communication of its job: descriptions of collectives, and ranks.

The number of ranks of a job is, in this order,

    the world size that an input states (torch.profiler)
    the devices of its XLA programs (replicas times partitions) by the devices of a rank
    the size of its largest process group: a group of which the trace gives the size, but not all ranks, is taken as
        the ranks from 0 on, if it has more members than the highest rank that the trace shows (NCCL's ranges in
        Nsight Systems; recordings, which list the first 30 ranks of a group)

A rank that is one of these, or that a process group lists, and that has no device activity in the trace is missing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.grouping.kernel_groups import communicates
from thence.model.names import distinct_names
from thence.model.reasons import advice
from thence.units import format_ranges, format_share

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thence.model.attributed import Attributed
    from thence.model.tables import Tables

_OTHER = "thence record and torch.profiler describe them"
_MAX_RANKS = 1 << 20
"""Ranks. A larger number is not believed, because it would be ten times that of the largest jobs that are known, and
every missing rank is listed."""
_NUMBER = re.compile(r"\d{1,9}")


@dataclass(frozen=True)
class JobRanks:
    """How many ranks of its job a trace shows.

    Attributes:
        shown: number of ranks with device activity.
        missing: the other ranks of the job, as far as the trace names or counts them; ascending.
    """

    shown: int
    missing: tuple[range, ...] = ()

    @property
    def missing_ranks(self) -> list[int]:
        """The missing ranks, one by one."""
        return list(chain.from_iterable(self.missing))

    @property
    def statement(self) -> str:
        """Such as ``8 of 512 ranks; missing 8-511``; empty if no rank is missing."""
        if not self.missing:
            return ""
        whole = self.shown + sum(map(len, self.missing))
        return f"{self.shown:,} of {whole:,} ranks; missing {format_ranges(self.missing)}"


def job_ranks(shown: Iterable[int], size: int | None, members: Iterable[str | None]) -> JobRanks:
    """Which ranks of its job a trace lacks.

    Args:
        shown: ranks with device activity.
        size: number of ranks of the job; None if unknown.
        members: the ranks of each process group, as the producers wrote them.
    """
    present, listed = set(shown), set[int]()
    end = 0 if size is None or size > _MAX_RANKS else size  # a store may state any
    for text in set(filter(None, members)):
        numbers, whole = listed_ranks(text)
        if whole:
            listed.update(number for number in numbers if number < _MAX_RANKS)
    # A job has up to a million ranks, and a file shows one: only what lies between those shown is looked at.
    edges = [-1, *sorted(rank for rank in present if 0 <= rank < end), end]
    missing = [range(low + 1, high) for low, high in pairwise(edges) if high - low > 1]
    for rank in sorted(rank for rank in listed - present if rank >= end):
        if missing and missing[-1].stop == rank:
            missing[-1] = range(missing[-1].start, rank + 1)
        else:
            missing.append(range(rank, rank + 1))
    return JobRanks(len(present), tuple(missing))


def ranks_of_job(tables: Tables) -> JobRanks:
    """Which ranks of its job a trace shows, and which it lacks."""
    members = distinct_names(tables.collectives["group_ranks"]).cast(pl.String)
    return job_ranks(tables.gpu["rank"].unique(), job_size(tables), members)


def job_size(tables: Tables) -> int | None:
    """The number of ranks of the job that a trace is of; None if nothing in the trace tells it."""
    sizes = (facts.get("world_size") for facts in tables.meta.facts)
    stated = [size for size in sizes if isinstance(size, int) and 0 < size <= _MAX_RANKS]
    if stated:
        return max(stated)
    return _size_of_programs(tables) or _size_of_groups(tables)


def _devices_of_a_rank(tables: Tables) -> int:
    """Devices of the rank with most of them."""
    used = tables.gpu.select("rank", "device").unique().group_by("rank").len()["len"]
    described = [device.rank for device in tables.meta.devices]
    counts: list[int] = [1, *used, *map(described.count, set(described))]
    return max(counts)


def _size_of_programs(tables: Tables) -> int | None:
    """The number of ranks on whose devices the XLA program with most devices runs."""
    devices = max(((m.replicas or 1) * (m.partitions or 1) for m in tables.hlo), default=1)
    if devices == 1:
        return None
    ranks, rest = divmod(devices, _devices_of_a_rank(tables))
    return ranks if 1 < ranks <= _MAX_RANKS and not rest else None


def _size_of_groups(tables: Tables) -> int | None:
    """The size of the largest process group that is taken as the ranks from 0 on."""
    if tables.collectives.is_empty():
        return None
    rows = tables.collectives.select("gpu", "group_size", "group_ranks")
    program = tables.gpu["program"].gather(rows["gpu"].cast(pl.UInt32))
    groups = rows.filter(program.is_null()).select("group_size", pl.col("group_ranks").cast(pl.String)).unique()
    highest, devices = max(tables.ranks, default=0), _devices_of_a_rank(tables)
    largest = 0
    for size, members in groups.drop_nulls("group_size").iter_rows():
        numbers, whole = listed_ranks(members or "")
        ranks, rest = divmod(size, devices)
        from_0 = numbers[:-1] == list(range(len(numbers[:-1])))
        if highest < ranks <= _MAX_RANKS and not rest and not whole and from_0:
            largest = max(largest, ranks)
    return largest or None


def listed_ranks(members: str) -> tuple[list[int], bool]:
    """The numbers in a text such as ``[0, 1, 2]``, and whether it lists all members: ``[0, 1, ..., 511]`` does not."""
    numbers = [int(text) for text in _NUMBER.findall(members)]
    return numbers, bool(numbers) and "..." not in members


def why_no_collectives(trace: Attributed) -> str:
    """The message for a trace that describes no collectives, to follow the input's name and a colon.

    A single GPU is given as the cause only if the trace has one GPU and no kernel communicates.
    """
    ranks = len(trace.ranks)
    devices = trace.gpu.select("rank", "device").n_unique()
    if communicates(trace).any():
        return f"describes no collectives, though kernels communicate: {_ways(trace)}"
    if devices < 2:
        return "describes no collectives, because it is of a single GPU"
    return f"describes no collectives, though it has {max(devices, ranks)} GPUs: {_ways(trace)}"


def undescribed_kernels(trace: Attributed, rows: pl.DataFrame) -> str:
    """The message on how much of the communication has no description, and how to record descriptions.

    Args:
        rows: one row per kernel that communicates: described (false for some), collective, duration_ns.
    """
    without = rows.filter(~rows["described"])
    share = format_share(int(without["duration_ns"].sum()), int(rows["duration_ns"].sum()))
    batched = (
        "; batched sends and receives (batch_isend_irecv, pipeline schedules) get their description from the ops "
        "before their range nccl:coalesced on the same thread, if this range launched one kernel"
        if (without["collective"] == "send-recv").any()
        else ""
    )
    return (
        f"{without.height:,} of {rows.height:,} kernels that communicate, {share} of their time, have no description "
        f"(no message size, no group, so no bandwidth and no waits): {_ways(trace)}{batched}"
    )


def _ways(trace: Attributed) -> str:
    """How to record descriptions with the producers of the trace."""
    on = trace.meta.accelerators
    ways = dict.fromkeys(advice("no_collectives", [name], accelerators=on) for name in trace.meta.formats)
    return "; ".join(filter(None, ways)) or _OTHER
