"""A run without CUDA graphs, or the calls of its captures, as one sequence of launches with their places.

Descriptions of collectives from the run of another rank: Ranks of one program call the same collectives, but in
process groups of their own, and these may differ in size. The layout of the groups
(`thence.model.tables.Meta.process_groups`) gives the group of a rank: the one with the same members, or else the only
one with the same description that has the rank as a member. Peers, uneven splits, and message sizes that depend on
the size of the group are those of one rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.attribution.cuda_graphs.by_alignment import Candidate
from thence.attribution.cuda_graphs.replays import in_cuda_graph
from thence.attribution.host_rows import launch_rows
from thence.attribution.work.operator_calls import operator_calls
from thence.model.graph_labels import NODES, CapturedGraph, Kernel
from thence.model.intervals import NO_ROW
from thence.model.places import GRAPH_LABELS
from thence.model.tables import DESCRIBED, GRAPH_PLACES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from thence.attribution.cuda_graphs.signatures import KernelNames
    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed


_PLACES = (*GRAPH_LABELS, "position", "lane")


@dataclass(frozen=True)
class EagerRun:
    """An eager run as one sequence of launches.

    Attributes:
        tables: of the run.
        rows: its rows of gpu in the order of launch.
        graph: the launches as nodes without edges.
        kernels: the distinct kernel names.
        label: for each launch, the number of its places.
        places: the distinct places by number.
        called: for each launch, its time (ns).
        begins, ends: times (ns) of every profiler step and outermost range.
        names: for each launch, the kernel name for messages.
    """

    tables: Attributed
    rows: Int64
    graph: CapturedGraph
    kernels: tuple[Kernel, ...]
    label: Int64
    places: pl.DataFrame
    called: Int64
    begins: Int64
    ends: Int64
    names: list[str]

    @classmethod
    def of(cls, tables: Attributed, rank: int) -> EagerRun:
        """The launches of one rank outside of graphs."""
        launch = launch_rows(tables)
        eager = ~in_cuda_graph(tables, launch) & (tables.gpu["rank"] == rank).to_numpy()
        rows = np.flatnonzero(eager)
        start = tables.gpu["start"].to_numpy()
        called = np.where(launch == NO_ROW, start, _gather(tables.host["start"].to_numpy(), launch))
        rows = rows[np.lexsort((start[rows], called[rows]))]
        gpu = tables.gpu[rows]
        names = gpu["name"].cast(pl.String).fill_null("").to_list()
        distinct = {name: i for i, name in enumerate(dict.fromkeys(names))}
        nodes = pl.DataFrame(
            {
                "number": np.arange(len(rows)),
                "type": gpu["kind"].cast(pl.String),
                "kernel": [distinct[name] for name in names],
                **{name: gpu[name] for name in ("grid", "block", "shared_memory")},
            }
        )
        missing = {name: None for name in NODES if name not in nodes.columns}
        nodes = nodes.with_columns(**missing).select(pl.col(name).cast(dtype) for name, dtype in NODES.items())
        places = _places(tables)[rows]
        distinct_places = places.unique(maintain_order=True).with_row_index("number")
        label = places.join(distinct_places, on=places.columns, how="left", nulls_equal=True, maintain_order="left")[
            "number"
        ]
        ranges = tables.host.filter(
            (pl.col("rank") == rank)
            & ((pl.col("category") == "step") | (pl.col("parent").is_null() & (pl.col("category") == "range")))
        )
        return cls(
            tables=tables,
            rows=rows,
            graph=CapturedGraph(0, (), None, nodes),
            kernels=tuple(Kernel(name) for name in distinct),
            label=label.cast(pl.Int64).to_numpy(),
            places=distinct_places.drop("number"),
            called=called[rows],
            begins=ranges["start"].to_numpy(),
            ends=(ranges["start"] + ranges["duration"]).to_numpy(),
            names=names,
        )

    def of_rank(self, rank: int, groups: Iterable[Mapping[str, Any]]) -> tuple[EagerRun, int]:
        """The run as that of another rank of the same program.

        Args:
            rank: the other rank.
            groups: the process groups that the producers described.

        Returns:
            The run, and in how many descriptions of collectives the process group is unknown.
        """
        collectives, unknown = collectives_of_rank(self.places["collective"], rank, groups)
        return replace(self, places=self.places.with_columns(collective=collectives)), unknown

    def iterations(self) -> list[slice]:
        """The launches in each profiler step and outermost range, then all launches."""
        first = np.searchsorted(self.called, self.begins)
        last = np.searchsorted(self.called, self.ends, "right")
        distinct = dict.fromkeys(zip(first.tolist(), last.tolist(), strict=True))
        inside = [slice(low, high) for low, high in distinct if low < high]
        all_launches = slice(0, len(self.rows))
        return [*(part for part in inside if part != all_launches), all_launches]

    @property
    def one_stream(self) -> bool:
        """Whether all its activities ran on one stream."""
        return self.tables.gpu.select("device", "stream")[self.rows].n_unique() <= 1

    def window(self, chosen: Int64, names: KernelNames, title: str) -> Candidate:
        """Makes a captured graph of chosen launches: an edge joins consecutive launches of a stream.

        A launch may be chosen several times.
        """
        stream = self.tables.gpu.select("device", "stream")[self.rows[chosen]]
        order = np.lexsort((np.arange(len(chosen)), stream["stream"], stream["device"]))
        stream_number = stream.select(pl.struct("device", "stream").rank("dense")).to_series().to_numpy()
        same = stream_number[order][1:] == stream_number[order][:-1]
        edges = np.stack([order[:-1][same], order[1:][same]], axis=1)
        nodes = self.graph.nodes[chosen].with_columns(number=pl.int_range(len(chosen), dtype=pl.Int64))
        graph = CapturedGraph(0, (), None, nodes, edges)
        return Candidate(graph, names, self.label[chosen], title, [self.names[i] for i in chosen.tolist()])


def _gather(values: Int64, rows: Int64) -> Int64:
    if not len(values):
        return np.zeros(len(rows), np.int64)
    taken: Int64 = values[np.maximum(rows, 0)]
    return taken


def _places(trace: Attributed) -> pl.DataFrame:
    """The places of every activity as text, with the description of its collective."""
    places = trace.places.select(pl.col(_PLACES).cast(pl.String))
    described = trace.collectives.unique("gpu", keep="first", maintain_order=True)
    structs = described.select(DESCRIBED).to_struct().cast(GRAPH_PLACES.schema["collective"])
    number = np.full(trace.gpu.height, NO_ROW, np.int64)
    number[described["gpu"].to_numpy()] = np.arange(described.height)
    row = pl.Series(number)
    return places.with_columns(
        metadata=pl.lit(None, pl.String), collective=structs.gather(row.set(row == NO_ROW, None).cast(pl.UInt32))
    ).hstack(operator_calls(trace))


# ---- Collectives as those of another rank


_COMPLETE_LIST = re.compile(r"\[\s*\d+(?:\s*,\s*\d+)*\s*\]")
_UNNAMED = ("", "undefined")
"""Descriptions of groups that were made without one."""
_SIZES = ("bytes", "in_elements", "out_elements")
_GROUP_FACTS = ("group_name", "group_description", "group_ranks", "group_size")


def collectives_of_rank(
    collectives: pl.Series, rank: int, groups: Iterable[Mapping[str, Any]]
) -> tuple[pl.Series, int]:
    """The descriptions for another rank than the one that recorded them.

    Args:
        collectives: structs of `thence.model.tables.GRAPH_PLACES`, null where there is none.
        rank: to describe them for.
        groups: the process groups that producers described: name, description and ranks.

    Returns:
        the descriptions, and in how many of the distinct ones the group is unknown.
    """
    layout = [
        {**group, "members": members} for group in groups if (members := _members(group.get("ranks"))) is not None
    ]
    distinct = collectives.drop_nulls().unique(maintain_order=True)
    described = [_described(dict(row), rank, layout) for row in distinct.to_list()]
    changed = pl.Series(described, dtype=collectives.dtype)
    table = pl.DataFrame({"was": distinct, "is": changed})
    joined = collectives.to_frame("was").join(table, on="was", how="left", maintain_order="left")
    return joined["is"], sum(row["group_size"] is None for row in described)


def _described(row: dict[str, Any], rank: int, layout: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    result = dict.fromkeys(row) | {name: row[name] for name in ("collective", "element_type")}
    uneven = any((row[name] or "[]") != "[]" for name in ("in_splits", "out_splits"))
    alike = row["in_elements"] is not None and row["in_elements"] == row["out_elements"]
    members = _members(row["group_ranks"])
    if members is not None and rank in members:
        result |= {name: row[name] for name in (*_GROUP_FACTS, "sequence")}
    else:
        result |= _group(row["group_description"], rank, layout)
    if not uneven and (alike or (row["group_size"] or 0) == (result["group_size"] or -1)):
        result |= {name: row[name] for name in _SIZES}
    return result


def _group(description: str | None, rank: int, layout: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The group of a rank with this description; empty if there is none, or if several have it."""
    candidates = {
        (str(group["name"]), group["members"])
        for group in layout
        if group["description"] == description and rank in group["members"]
    }
    if (description or "") in _UNNAMED or len(candidates) != 1:
        return {}
    name, members = candidates.pop()
    return {
        "group_name": name,
        "group_description": description,
        "group_ranks": str(list(members)),
        "group_size": len(members),
    }


def _members(ranks: object) -> tuple[int, ...] | None:
    """The ranks of a group; None if the list is cut or missing."""
    if isinstance(ranks, str):
        complete = _COMPLETE_LIST.fullmatch(ranks.strip())
        ranks = [int(number) for number in re.findall(r"\d+", ranks)] if complete else None
    if not isinstance(ranks, list) or not all(type(member) is int for member in ranks):
        return None
    return tuple(ranks) or None
