"""Labels activities by the id of their graph node.

The id of a node of an executable graph is the graph's id << 32 | number (CUPTI; some exporters write the
number alone). Instantiation keeps the numbers of the captured graph's own nodes; those inside child
graphs come after them, one child graph after the other. Kernel names are compared too: a node that ran
another kernel than the one captured proves that graph and labels do not belong together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.cuda_graphs.signatures import ACTIVITIES, short_name
from thence.model.collective_kinds import can_launch, kernels_of_nccl, kind_of
from thence.model.columns import values_or

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from thence.attribution.cuda_graphs.replays import Replays
    from thence.attribution.cuda_graphs.signatures import KernelNames
    from thence.model.arrays import Int64
    from thence.model.graph_labels import CapturedGraph, GraphLabels

_LOW = (1 << 32) - 1  # bits of a node id that are its number; those above are the id of the graph


@dataclass(frozen=True)
class Executed:
    """An executable graph that ran.

    Attributes:
        rank: of the process.
        id: of the executable graph.
        rows: rows of gpu that it ran.
        number: number of the node of each row.
        nodes: distinct pairs of node number and variant.
    """

    rank: int
    id: int
    rows: Int64
    number: Int64
    nodes: list[tuple[int, int]]


@dataclass(frozen=True)
class Match:
    """The result of matching the nodes of one executable graph by their ids.

    Attributes:
        number, label: number of each matched node, and its label in the labels file, -1 where none was open.
        rule: for each, the code of the rule by which it was matched.
        refused: why nothing was matched; None if something was.
        foreign: whether the labels do not name this executable graph.
        graph: the captured graph that it was matched to.
        row: row of each matched node among the nodes of that graph, -1 where the file does not list it.
    """

    number: Sequence[int] = ()
    label: Sequence[int] = ()
    rule: Sequence[str] = ()
    refused: str | None = None
    foreign: bool = False
    graph: CapturedGraph | None = None
    row: Sequence[int] = ()

    @property
    def by_id(self) -> bool:
        """Whether the labels name this executable graph."""
        return self.refused is None and "graph_number" not in self.rule


def executed(replays: Replays) -> list[Executed]:
    """The executable graphs that ran, for activities that have ids of graph and node."""
    gpu, rows = replays.tables.gpu, replays.rows
    if not gpu["node"].count() or not len(rows):
        return []
    node = gpu["node"].gather(rows)
    has_ids = (node.is_not_null() & ((node > _LOW) | gpu["graph"].gather(rows).is_not_null())).to_numpy()
    rows = rows[has_ids]
    if not len(rows):
        return []
    ids = values_or(node, 0)[has_ids]
    graph = gpu["graph"].gather(rows).fill_null(0).to_numpy()
    full = ids > _LOW
    # An id of 64 bits has the graph's number in its high word; a shorter one has the graph in another column.
    key = np.where(full, ids >> np.uint64(32), graph & np.uint64(_LOW))
    key |= gpu["rank"].gather(rows).to_numpy().astype(np.uint64) << np.uint64(32)
    number = (ids & np.uint64(_LOW)).astype(np.int64)
    distinct = pl.Series(key).unique().sort().to_numpy()
    result = []
    order = np.argsort(key, kind="stable") if len(distinct) > 1 else np.arange(len(key))
    bounds = np.searchsorted(key[order], distinct).tolist()
    for graph_key, low, high in zip(distinct.tolist(), bounds, [*bounds[1:], len(key)], strict=True):
        graph_rows = order[low:high]
        result.append(_executed(replays, graph_key >> 32, graph_key & _LOW, rows[graph_rows], number[graph_rows]))
    return result


def _executed(replays: Replays, rank: int, graph: int, rows: Int64, number: Int64) -> Executed:
    kinds = max(replays.kinds.frame.height, 1)
    pairs = pl.Series(number * kinds + replays.variant[rows]).unique().sort().to_list()
    return Executed(rank, graph, rows, number, [divmod(pair, kinds) for pair in pairs])


def match(executable: Executed, labels: GraphLabels, names: KernelNames, kernels: pl.DataFrame) -> Match:
    """The labels of an executable graph's nodes.

    Args:
        executable: the graph that ran.
        labels: of the process that ran it.
        names: numbers of kernel names in both.
        kernels: the variants of the trace: kind and name.
    """
    same_id = [g for g in labels.graphs if executable.id in g.executables or executable.id == g.id]
    if same_id:
        matches = [_matched(executable, graph, labels, names, kernels, "graph_node") for graph in same_id]
        return next((m for m in matches if m.refused is None), matches[0])
    fitting = []
    for graph in labels.graphs:
        if graph.nodes["kernel"].null_count() < graph.nodes.height:  # ids alone prove nothing here
            candidate = _matched(executable, graph, labels, names, kernels, "graph_number")
            if candidate.refused is None:
                fitting.append(candidate)
    distinct = {tuple(zip(m.number, _texts(m, labels), strict=True)) for m in fitting}
    if len(distinct) == 1:
        return fitting[0]
    reason = "the labels do not name its executable graph"
    if not labels.kernels and any(graph.id < executable.id for graph in labels.graphs):
        reason += (
            ': ids of captured graphs (annotation_config key_by="source") are joined only together with the labels of '
            'thence.save_labels(), which name both; use key_by="exec"'
        )
    if distinct:
        reason += f", and {len(fitting)} captured graphs with other labels have the same kernels"
    return Match(refused=reason, foreign=True)


def _texts(match: Match, labels: GraphLabels) -> Iterator[str]:
    return (repr(labels.labels[label]) if label >= 0 else "" for label in match.label)


def _matched(
    ran: Executed, graph: CapturedGraph, labels: GraphLabels, names: KernelNames, kernels: pl.DataFrame, rule: str
) -> Match:
    """Matches one executable graph to one captured graph."""
    nodes = graph.nodes.with_columns(pl.col("label").fill_null(-1))
    row_of_number = {number: i for i, number in enumerate(nodes["number"].to_list())}
    top = nodes["parent"].is_null().to_list()
    place = _NodesAndKernels(nodes, labels, names, kernels)
    top_level = [(n, v) for n, v in ran.nodes if n in row_of_number and top[row_of_number[n]]]
    inside = [(n, v) for n, v in ran.nodes if n not in row_of_number or not top[row_of_number[n]]]
    for number, variant in top_level:
        if not place.fits(row_of_number[number], variant):
            return Match(
                refused=f"node {number} ran {place.ran(variant)}, "
                f"but {place.was(row_of_number[number])} was captured there"
            )
    if rule == "graph_number":
        # A small graph fits the beginning of many graphs, so all captured kernels must have run.
        own_kernels = (pl.col("type") == "kernel") & pl.col("parent").is_null()
        captured = nodes.filter(own_kernels)["number"].to_list()
        missing = sorted(set(captured) - {number for number, _ in top_level})
        if missing or not top_level:
            return Match(refused=f"node {missing[0] if missing else 0} did not run")
    if nodes["type"].eq("unknown").all():  # the file lists only the labelled nodes
        of_node = nodes["label"].to_list()
        listed = [row_of_number.get(n, -1) for n, _ in ran.nodes]
        label = [-1 if row < 0 else of_node[row] for row in listed]
        numbers = [n for n, _ in ran.nodes]
        return Match(numbers, label, [rule] * len(label), graph=graph, row=listed)
    of_child = place.children(inside, row_of_number)
    if of_child is None and (rule == "graph_number" or not top_level):
        number = inside[0][0]
        return Match(refused=f"node {number} ran, but the captured graph {graph.id} has no such node")
    of_child = of_child or {}
    numbers = [n for n, _ in dict(top_level).items()]
    rows = [row_of_number[n] for n in numbers] + [*of_child.values()]
    label = nodes["label"].gather(rows).to_list() if rows else []
    rules = [rule] * len(numbers) + ["graph_child"] * len(of_child)
    return Match([*numbers, *of_child], label, rules, graph=graph, row=rows)


@dataclass(frozen=True)
class _NodesAndKernels:
    """Compares the nodes of a captured graph with the kernels of a trace."""

    nodes: pl.DataFrame
    labels: GraphLabels
    names: KernelNames
    kernels: pl.DataFrame

    @cached_property
    def _captured(self) -> list[tuple[str, int]]:
        """Type of each node, and number of its kernel's name, -1 where that is unknown."""
        return [
            (kind, -1 if kernel is None else self.names.of_kernel(kernel))
            for kind, kernel in self.nodes.select("type", "kernel").iter_rows()
        ]

    @cached_property
    def _traced(self) -> list[tuple[str, int]]:
        """Kind of each variant, and number of its name."""
        return [(kind, self.names.of_trace(name)) for kind, name in self.kernels.select("kind", "name").iter_rows()]

    @cached_property
    def _described(self) -> dict[int, tuple[str, str | None]]:
        """Kind and element type of the collective that each label describes, by the number of the label."""
        described = {
            number: label.collective for number, label in enumerate(self.labels.labels) if label.collective is not None
        }
        names = pl.DataFrame(
            {"name": [description.collective for description in described.values()]}, {"name": pl.String}
        )
        kinds = names.select(kind_of(pl.col("name"))).to_series()
        types = [description.element_type for description in described.values()]
        return dict(zip(described, zip(kinds, types, strict=True), strict=True))

    @cached_property
    def _kernels_of_nccl(self) -> list[tuple[str | None, str | None]]:
        """Kind and element type in the name of each variant."""
        return kernels_of_nccl(self.kernels["name"]).rows()

    def fits(self, row: int, variant: int) -> bool:
        """Whether a node can have run a kernel; unknown types and names match anything."""
        (captured, kernel), (kind, name) = self._captured[row], self._traced[variant]
        if captured in ACTIVITIES and captured != kind:
            return False
        return (kernel < 0 or kind != "kernel" or name == kernel) and not self.contradicts(row, variant)

    def contradicts(self, row: int, variant: int) -> bool:
        """Whether the label of a node describes another collective than the one in the name of a kernel."""
        described = self._described.get(self._labels[row]) if self._described else None
        return described is not None and not can_launch(*self._kernels_of_nccl[variant], *described)

    @cached_property
    def _labels(self) -> list[int]:
        return self.nodes["label"].to_list()

    def ran(self, variant: int) -> str:
        """The kernel name of a variant for messages."""
        return f"`{short_name(self.kernels['name'][variant] or '')}`"

    def was(self, row: int) -> str:
        """The kernel name or type of a captured node for messages, or the collective that its label describes."""
        kernel = self.nodes["kernel"][row]
        described = self._described.get(self._labels[row])
        if kernel is None and described is not None:
            return f"a collective of the kind {described[0]}"
        if kernel is None:
            return f"a {self.nodes['type'][row]}"
        captured = self.labels.kernels[kernel]
        return f"`{short_name(captured.demangled or captured.name)}`"

    def children(self, inside: Sequence[tuple[int, int]], row_of_number: dict[int, int]) -> dict[int, int] | None:
        """Maps the numbers of nodes inside child graphs to rows; None if that is ambiguous.

        Instantiation gives these nodes new numbers, in the order of the child graphs. Not every node
        leaves an activity, so the offset of the first one is found by comparing kernels.
        """
        if not inside:
            return {}
        if all(n in row_of_number and self.fits(row_of_number[n], v) for n, v in inside):
            return {n: row_of_number[n] for n, _ in inside}
        frame = self.nodes.with_row_index("row").filter(pl.col("parent").is_not_null())
        rows = frame.sort("number")["row"].to_list()
        first, last = inside[0][0], inside[-1][0]
        fitting = [
            offset
            for offset in range(len(rows) - (last - first))
            if all(self.fits(rows[offset + n - first], v) for n, v in inside)
        ]
        assignments = [{n: rows[offset + n - first] for n, _ in inside} for offset in fitting]
        labels = {tuple(self.nodes["label"].gather([*assignment.values()]).to_list()) for assignment in assignments}
        return assignments[0] if len(labels) == 1 else None
