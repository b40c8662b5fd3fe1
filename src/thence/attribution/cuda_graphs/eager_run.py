"""A run without CUDA graphs, or the calls of its captures, as one sequence of launches with their places."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.attribution.cuda_graphs.by_order import Candidate
from thence.attribution.cuda_graphs.other_rank import collectives_of_rank
from thence.attribution.cuda_graphs.replays import in_cuda_graph
from thence.attribution.launches import launch_rows
from thence.attribution.work.operator_calls import operator_calls
from thence.model.graph_labels import NODES, CapturedGraph, Kernel
from thence.model.intervals import NO_ROW
from thence.model.places import GRAPH_LABELS
from thence.model.tables import DESCRIBED, GRAPH_PLACES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from thence.attribution.cuda_graphs.signatures import Names
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
    rows: NDArray[np.int64]
    graph: CapturedGraph
    kernels: tuple[Kernel, ...]
    label: NDArray[np.int64]
    places: pl.DataFrame
    called: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
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
        whole = tables.host.filter(
            (pl.col("rank") == rank)
            & ((pl.col("category") == "step") | (pl.col("parent").is_null() & (pl.col("category") == "range")))
        )
        return cls(
            tables, rows, CapturedGraph(0, (), None, nodes),
            tuple(Kernel(name) for name in distinct),
            label.cast(pl.Int64).to_numpy(), distinct_places.drop("number"), called[rows],
            whole["start"].to_numpy(), (whole["start"] + whole["duration"]).to_numpy(), names,
        )  # fmt: skip

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

    def stretches(self) -> list[slice]:
        """The launches in each profiler step and outermost range, then all launches."""
        first = np.searchsorted(self.called, self.begins)
        last = np.searchsorted(self.called, self.ends, "right")
        distinct = dict.fromkeys(zip(first.tolist(), last.tolist(), strict=True))
        inside = [slice(low, high) for low, high in distinct if low < high]
        whole = slice(0, len(self.rows))
        return [*(part for part in inside if part != whole), whole]

    @property
    def one_stream(self) -> bool:
        """Whether all its activities ran on one stream."""
        return self.tables.gpu.select("device", "stream")[self.rows].n_unique() <= 1

    def window(self, chosen: NDArray[np.int64], names: Names, title: str) -> Candidate:
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


def _gather(values: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    if not len(values):
        return np.zeros(len(rows), np.int64)
    taken: NDArray[np.int64] = values[np.maximum(rows, 0)]
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
