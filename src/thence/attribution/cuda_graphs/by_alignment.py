"""Labels replays without node ids by aligning their activities to captured graphs.

The graph is the one whose nodes have the kernels that ran, with equal multiplicities. If a kernel ran more or less
often than the graph has it, its activities stay open; the others are aligned if they are at least `MIN_SHARE` of the
kernels. If several captured graphs match equally well, an activity gets a label only if it has that label in all of
them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from thence.attribution.cuda_graphs.alignment import FOREIGN, UNDECIDED, NotOrdered, Pattern, Topology, align, edges_of
from thence.attribution.cuda_graphs.signatures import ACTIVITIES, Signatures, short_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from thence.attribution.cuda_graphs.replays import Group, Replays
    from thence.attribution.cuda_graphs.signatures import KernelNames
    from thence.model.arrays import Int64, Mask
    from thence.model.graph_labels import CapturedGraph


MIN_SHARE = 0.9
"""Share of the kernels of a replay and of its source that must match; with less they may be of different programs."""


@dataclass(frozen=True)
class Outcome:
    """The result of aligning one group of launches.

    Attributes:
        label: int64 (launches, activities): number of the label, -1 where the node has none,
            `UNDECIDED` where several are possible, `FOREIGN` where no node has such a kernel.
        refused: for each launch, why it was not aligned; None where it was.
        note: how the launches differ from the graph, if they do.
    """

    label: Int64
    refused: list[str | None]
    note: str | None = None


@dataclass(frozen=True)
class Candidate:
    """A captured graph to align to.

    Attributes:
        graph: with edges.
        names: numbers of kernel names in its labels file and in the trace.
        label: number of the label of each node, -1 for none, as in `Outcome.label`.
        title: its name in messages.
        kernel_names: name of each node's kernel for messages.
    """

    graph: CapturedGraph
    names: KernelNames
    label: Int64
    title: str
    kernel_names: Sequence[str]

    def signatures(self, replays: Replays) -> Signatures:
        """Signatures of its nodes and of the variants of the trace."""
        return Signatures.of(self.graph, self.names, replays.kinds)

    @cached_property
    def topology(self) -> Topology:
        """The partial order of its nodes.

        Raises:
            NotOrdered: the edges give no usable order.
        """
        return Topology.of(*edges_of(self.graph))


@dataclass(frozen=True)
class _Fit:
    """A candidate whose nodes have the kernels that ran.

    Attributes:
        candidate: the graph.
        signatures: of its nodes and of the trace.
        nodes: rows of the nodes whose kernels ran as often as the graph has them.
        times: how many replays of the graph one launch consists of.
        activities_left: how many activities have no counterpart.
        nodes_left: how many nodes have none.
    """

    candidate: Candidate
    signatures: Signatures
    nodes: Int64
    times: int
    activities_left: int
    nodes_left: int


def aligned_group(group: Group, replays: Replays, candidates: Sequence[tuple[Candidate, Signatures]]) -> Outcome:
    """Labels the activities of a group of equal launches.

    Args:
        candidates: graphs that may have been launched, with their signatures.
    """
    shape = group.rows.shape
    if not candidates:
        return _refused(shape, "no captured graph with edges and kernel names is known")
    compared = [_fit(group, replays, *candidate) for candidate in candidates]
    fits = [fit for fit in compared if fit is not None]
    if not fits:
        return _refused(shape, _difference(group, replays, candidates))
    fits = [fit for fit in fits if not fit.activities_left and not fit.nodes_left] or fits
    results = []
    for fit in fits:
        try:
            results.append(_aligned(group, replays, fit))
        except NotOrdered as error:
            results.append(_refused(shape, f"{fit.candidate.title}: {error}"))
    label = np.full(shape, UNDECIDED, np.int64)
    agreed = np.zeros(shape[0], np.bool_)
    for result in results:
        possible = np.array([reason is None for reason in result.refused])
        differs = np.where(label == result.label, label, UNDECIDED)
        both = np.where(agreed[:, None], differs, result.label)
        label = np.where(possible[:, None], both, label)
        agreed |= possible
    refused = [None if ok else reason for ok, reason in zip(agreed.tolist(), results[0].refused, strict=True)]
    left, nodes = fits[0].activities_left, fits[0].nodes_left
    note = (
        f"{left:,} of its {shape[1]:,} activities and {nodes:,} nodes of {fits[0].candidate.title} have no "
        "counterpart, or several; all others fit"
    )
    return Outcome(label, refused, note if left or nodes else None)


def _refused(shape: tuple[int, ...], reason: str) -> Outcome:
    return Outcome(np.full(shape, UNDECIDED, np.int64), [reason] * shape[0])


def _fit(group: Group, replays: Replays, candidate: Candidate, signatures: Signatures) -> _Fit | None:
    """Checks whether the activities are those of one or several replays of a graph; None if they are not.

    Memcpys and memsets may be missing on one side.
    """
    variant = replays.variant[group.rows[0]]
    kind = replays.kinds.frame["kind"].to_numpy()[variant]
    leave = np.flatnonzero(candidate.graph.nodes["type"].is_in(ACTIVITIES).to_numpy())
    of_kernel = (candidate.graph.nodes["type"] == "kernel").to_numpy()[leave]
    ran, held = signatures.variants[variant], signatures.nodes[leave]
    is_kernel = kind == "kernel"
    if not of_kernel.any() or not is_kernel.any():
        of_kernel, is_kernel = np.ones(len(leave), np.bool_), np.ones(len(variant), np.bool_)
    times = max(1, round(int(is_kernel.sum()) / max(int(of_kernel.sum()), 1)))
    size = int(max(ran.max(initial=0), held.max(initial=0))) + 1
    of_graph, of_launch = (np.bincount(signature[signature >= 0], minlength=size) for signature in (held, ran))
    equal = of_launch == times * of_graph
    fits, fitting = (held >= 0) & equal[held], (ran >= 0) & equal[ran]
    ran_kernels, held_kernels = (
        np.bincount(signature[(signature >= 0) & kernels], minlength=size)
        for signature, kernels in ((ran, is_kernel), (held, of_kernel))
    )
    common = int(np.minimum(ran_kernels, times * held_kernels).sum())
    most = max(int(is_kernel.sum()), times * int(of_kernel.sum()))
    if not fits.any() or common < MIN_SHARE * most:
        return None
    activities_left, nodes_left = int((~fitting & is_kernel).sum()), int((~fits & of_kernel).sum())
    return _Fit(candidate, signatures, leave[fits], times, activities_left, nodes_left)


def _aligned(group: Group, replays: Replays, fit: _Fit) -> Outcome:
    """Aligns the group to one graph."""
    gpu, rows = replays.tables.gpu, group.rows
    signature = fit.signatures.variants[replays.variant[rows]]
    counts = np.isin(signature, fit.signatures.nodes[fit.nodes])
    launches, nodes = len(rows), fit.nodes
    of_kind = rows[counts].reshape(launches * fit.times, len(nodes))  # one replay per row
    start = gpu["start"].to_numpy()[of_kind]
    end = start + gpu["duration"].to_numpy()[of_kind]
    chosen = signature[counts].reshape(of_kind.shape)
    complete = (np.sort(chosen, axis=1) == np.sort(fit.signatures.nodes[nodes])).all(axis=1)
    pattern = Pattern(fit.candidate.topology, nodes, fit.signatures.nodes[nodes], fit.candidate.label[nodes])
    label = np.full(of_kind.shape, UNDECIDED, np.int64)
    contradicts = ~complete
    aligned = align(pattern, chosen[complete], start[complete], end[complete])
    label[complete] = aligned.label
    contradicts[complete] |= aligned.contradicts
    label[contradicts] = UNDECIDED
    result = np.where(signature < 0, FOREIGN, UNDECIDED)
    result[counts] = label.reshape(-1)
    bad = contradicts.reshape(launches, fit.times).any(axis=1)
    result[bad] = UNDECIDED
    reasons: list[str | None] = [None] * launches
    first = np.full((len(of_kind), 2), -1)
    first[complete] = aligned.first
    for launch in np.flatnonzero(bad).tolist():
        pairs = first[launch * fit.times : (launch + 1) * fit.times]
        reasons[launch] = _contradiction(fit, pairs[(pairs[:, 1] >= 0)])
    return Outcome(result, reasons)


def _contradiction(fit: _Fit, pairs: Int64) -> str:
    title = fit.candidate.title
    if not len(pairs):
        return f"its order contradicts the edges of {title}"
    names, nodes = fit.candidate.kernel_names, fit.nodes
    first, second = (int(x) for x in pairs[0])
    text = f"its order contradicts the edges of {title}: {_node(fit.candidate, names, nodes[second])} began before "
    if first < 0:
        return text + "the nodes that it waits for had ended"
    return text + f"{_node(fit.candidate, names, nodes[first])}, which it waits for"


def _node(candidate: Candidate, names: Sequence[str], row: int) -> str:
    return f"node {candidate.graph.nodes['number'][int(row)]} (`{short_name(names[int(row)])}`)"


def _difference(group: Group, replays: Replays, candidates: Sequence[tuple[Candidate, Signatures]]) -> str:
    """A sentence on where the launches and the most similar graph first differ."""
    variant = replays.variant[group.rows[0]]
    names = replays.kinds.frame["name"].gather(variant).to_list()

    def likeness(pair: tuple[Candidate, Signatures]) -> tuple[int, int]:
        nodes = np.bincount(pair[1].nodes[pair[1].nodes >= 0])
        replayed = pair[1].variants[variant]
        counts = np.bincount(replayed[replayed >= 0], minlength=len(nodes))
        return int(np.minimum(nodes, counts).sum()), -abs(int(nodes.sum()) - len(variant))

    candidate, signatures = max(candidates, key=likeness)
    leave = candidate.graph.nodes["type"].is_in(ACTIVITIES).to_numpy()
    sizes = f"{len(variant)} activities where {candidate.title} has {int(leave.sum())} nodes"
    try:
        place = _first_difference(candidate, signatures, signatures.variants[variant].tolist(), leave)
    except NotOrdered as error:
        return f"{sizes}; {error}"
    position, due = place
    expected = " or ".join(_node(candidate, candidate.kernel_names, row) for row in due[:2])
    if position == len(names):
        return f"{sizes}; they first differ at the end, where {expected} was due"
    actual = f"activity {position} is `{short_name(names[position])}`"
    if not due:
        return f"{sizes}; they first differ after the last node: {actual}"
    return f"{sizes}; they first differ where {expected} was due: {actual}"


def _first_difference(
    candidate: Candidate, signatures: Signatures, activities: Sequence[int], leave: Mask
) -> tuple[int, list[int]]:
    """The number of leading activities that fit the graph, and the nodes that could have come next."""
    topology = candidate.topology
    after: dict[int, list[int]] = defaultdict(list)
    for first, second in topology.edges.tolist():
        after[first].append(second)
    count = len(topology.order)
    waits = np.bincount(topology.edges[:, 1], minlength=count).tolist()
    ready: dict[int, list[int]] = defaultdict(list)

    def done(nodes: Iterable[int]) -> None:
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node < len(leave) and leave[node]:
                ready[int(signatures.nodes[node])].append(node)
                continue
            stack += finished(node)

    def finished(node: int) -> list[int]:
        for later in after[node]:
            waits[later] -= 1
        return [later for later in after[node] if not waits[later]]

    done(node for node in range(count) if not waits[node])
    for position, signature in enumerate(activities):
        if not ready[signature]:
            return position, sorted(node for nodes in ready.values() for node in nodes)
        ready[signature].sort(reverse=True)
        done(finished(ready[signature].pop()))
    return len(activities), sorted(node for nodes in ready.values() for node in nodes)
