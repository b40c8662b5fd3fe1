"""Labels graph replays from an eager run of the same code.

The eager run serves as the captured graph: its kernels in launch order are the nodes, and consecutive
kernels of one stream are joined by edges, as stream capture does. So the same alignment applies. The
iteration to align to is a window of consecutive eager launches with exactly the kernels of a replay;
kernels that no graph ran are dropped first. A window could also straddle two iterations, or lack its last
kernel and match a replay that lost another one. So windows only count if they tile the whole eager run,
or if each holds all launches of a profiler step or an outermost range. If several iterations match, an
activity gets a label only if all of them agree. A graph may hold an iteration several times: then it is
aligned to as many repetitions of one.

Where order proves nothing, a kernel gets what all launches of its name have in common in the eager run,
if that is a single label, by a rule of its own (`thence.attribution.cuda_graphs.by_kernel_name`).
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.cuda_graphs.alignment import UNDECIDED
from thence.attribution.cuda_graphs.by_kernel_name import ByKernelName
from thence.attribution.cuda_graphs.by_order import Candidate, Outcome, aligned_group
from thence.attribution.cuda_graphs.join_labels import Joined, Numbered, joined_rows
from thence.attribution.cuda_graphs.replays import Replays, in_cuda_graph
from thence.attribution.cuda_graphs.signatures import ACTIVITIES, Names, Signatures, short_name
from thence.attribution.launches import launch_rows
from thence.model.graph_labels import NODES, CapturedGraph, Kernel
from thence.model.intervals import NO_ROW
from thence.model.places import GRAPH_LABELS
from thence.model.tables import DESCRIBED, GRAPH_PLACES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from thence.attribution.cuda_graphs.replays import Group
    from thence.model.attributed import Attributed
    from thence.model.tables import Tables

__all__ = ["join_eager"]

_PLACES = (*GRAPH_LABELS, "position", "lane")
_MOST_WINDOWS = 32
_MOST_TIMES = 4096  # that a graph repeats an iteration
_MOST_COMPARED = 20_000


@dataclass(frozen=True)
class _Eager:
    """An eager run as one sequence of launches.

    Attributes:
        tables: of the run.
        rows: its rows of gpu in the order of launch.
        graph: the same as nodes without edges.
        kernels: their names.
        label: number of the places of each.
        places: what the numbers stand for.
        called: ns at which each was launched.
        begins, ends: ns of every profiler step and outermost range.
        names: kernel name of each, for messages.
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
    def of(cls, tables: Attributed, rank: int) -> _Eager:
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
        nodes = nodes.with_columns(**missing).select(
            pl.col(name).cast(dtype) for name, dtype in NODES.items()
        )
        places = _places(tables)[rows]
        distinct_places = places.unique(maintain_order=True).with_row_index("number")
        label = places.join(
            distinct_places, on=places.columns, how="left", nulls_equal=True, maintain_order="left"
        )["number"]
        whole = tables.host.filter(
            (pl.col("rank") == rank)
            & (
                (pl.col("category") == "step")
                | (pl.col("parent").is_null() & (pl.col("category") == "range"))
            )
        )
        return cls(
            tables, rows, CapturedGraph(0, (), None, nodes),
            tuple(Kernel(name) for name in distinct),
            label.cast(pl.Int64).to_numpy(), distinct_places.drop("number"), called[rows],
            whole["start"].to_numpy(), (whole["start"] + whole["duration"]).to_numpy(), names,
        )  # fmt: skip

    def window(self, chosen: NDArray[np.int64], names: Names, title: str) -> Candidate:
        """Launches in order as a captured graph: an edge joins consecutive launches of a stream.

        The launches may repeat.
        """
        stream = self.tables.gpu.select("device", "stream")[self.rows[chosen]]
        order = np.lexsort((np.arange(len(chosen)), stream["stream"], stream["device"]))
        stream_number = (
            stream.select(pl.struct("device", "stream").rank("dense")).to_series().to_numpy()
        )
        same = stream_number[order][1:] == stream_number[order][:-1]
        edges = np.stack([order[:-1][same], order[1:][same]], axis=1)
        nodes = self.graph.nodes[chosen].with_columns(
            number=pl.int_range(len(chosen), dtype=pl.Int64)
        )
        graph = CapturedGraph(0, (), None, nodes, edges)
        return Candidate(
            graph, names, self.label[chosen], title, [self.names[i] for i in chosen.tolist()]
        )


def join_eager(tables: Tables, eager: Attributed) -> Joined:
    """Transfers the places of an eager run to graph replays.

    Args:
        tables: with the replays.
        eager: a run of the same code without graphs.
    """
    replays = Replays.of(tables)
    if not len(replays.rows):
        return Joined()
    notes: list[str] = []
    frames = []
    for rank in tables.gpu["rank"][replays.rows].unique().sort().to_list():
        of_rank = _rank_of(eager, rank)
        if of_rank is None:
            notes.append(f"rank {rank}: the eager trace holds no such rank")
            continue
        labels = Numbered.of(replays)
        run = _Eager.of(eager, of_rank)
        rows = replays.rows[(tables.gpu["rank"] == rank).to_numpy()[replays.rows]]
        by_name = ByKernelName.of(run.kernels, run.graph.nodes, run.label, run.places, replays)
        notes += _join_rank(run, labels, rows, by_name)
        frames.append(joined_rows(labels, by_name.places))
    return Joined(pl.concat(frames) if frames else Joined().places, tuple(dict.fromkeys(notes)))


def _rank_of(eager: Tables, rank: int) -> int | None:
    """The rank of the eager run that a rank of the replays compares to."""
    ranks = eager.gpu["rank"].unique().to_list()
    if rank in ranks:
        return rank
    return int(ranks[0]) if len(ranks) == 1 else None


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
        metadata=pl.lit(None, pl.String),
        collective=structs.gather(row.set(row == NO_ROW, None).cast(pl.UInt32)),
    )


def _join_rank(
    run: _Eager, labels: Numbered, rows: NDArray[np.int64], by_name: ByKernelName
) -> list[str]:
    replays = labels.replays
    traced = replays.kinds.frame["name"].drop_nulls().unique(maintain_order=True)
    names = Names(run.kernels, traced)
    signatures = Signatures.of(run.graph, names, replays.kinds)
    notes = []
    for group in replays.groups(rows):
        outcome, times, note = _aligned(run, names, signatures, group, replays)
        rule = "eager_alignment" if times == 1 else "eager_repetition"
        reasons = labels.put_outcome(group.rows, outcome, rule)
        named = by_name.put(labels, group.rows)
        correlation = replays.tables.gpu["correlation"][int(group.rows[0, 0])]
        where = f"the graph launch with correlation id {correlation}"
        if len(group.rows) > 1:
            where += f", and {len(group.rows) - 1} like it"
        notes += [f"{where}: not labelled from the eager run: {reasons[0]}"] if reasons else []
        notes += [f"{where}: {text}" for text in (note, named) if text]
    return notes


def _aligned(
    run: _Eager, names: Names, signatures: Signatures, group: Group, replays: Replays
) -> tuple[Outcome, int, str | None]:
    """Aligns one group of replays to all matching iterations.

    Returns:
        the outcome, how often a replay holds an iteration, and a note or None.
    """
    variant = replays.variant[group.rows[0]]
    windows, left_out, times = _matching(run, signatures, variant, replays)
    if not windows:
        reason = _difference(run, signatures, variant, replays)
        shape = group.rows.shape
        return Outcome(np.full(shape, UNDECIDED), np.zeros(shape[0]), [reason] * shape[0]), 1, None
    outcomes = []
    for window in windows:
        candidate = run.window(np.tile(window, times), names, "the eager run")
        outcomes.append(aligned_group(group, replays, [(candidate, candidate.signatures(replays))]))
    outcome = _agreed(outcomes)
    notes = []
    if times > 1:
        notes.append(
            f"it holds the kernels of the eager run {times} times; each repetition is labelled alike"
        )
    if left_out:
        notes.append(
            f"{left_out:,} activities of the eager run are left out: no graph ran such kernels there"
        )
    return outcome, times, "; ".join(notes) or None


def _matching(
    run: _Eager, signatures: Signatures, variant: NDArray[np.int64], replays: Replays
) -> tuple[list[NDArray[np.int64]], int, int]:
    """The iterations that a replay consists of, what they leave out, and how often it repeats one."""
    kind = replays.kinds.frame["kind"].to_numpy()[variant]
    for times in _divisors(signatures.variants[variant]):
        for kinds in (ACTIVITIES, ("kernel",)):
            signature, count = np.unique(
                signatures.variants[variant[np.isin(kind, kinds)]], return_counts=True
            )
            if (count % times).any():
                continue
            sequence = np.flatnonzero(run.graph.nodes["type"].is_in(kinds).to_numpy())
            wanted = np.repeat(signature, count // times)
            windows, left_out = _windows(run, signatures.nodes, sequence, wanted)
            if windows:
                return windows, left_out, times
    return [], 0, 1


def _divisors(signature: NDArray[np.int64]) -> list[int]:
    """How often a replay may repeat something, ascending: each kernel occurs a multiple of that."""
    _, count = np.unique(signature, return_counts=True)
    most = int(np.gcd.reduce(count)) if len(count) else 1
    return [times for times in range(1, min(most, _MOST_TIMES) + 1) if most % times == 0]


def _windows(
    run: _Eager,
    signature: NDArray[np.int64],
    sequence: NDArray[np.int64],
    wanted: NDArray[np.int64],
) -> tuple[list[NDArray[np.int64]], int]:
    """Iterations with exactly the wanted signatures, and how many other launches lie in the first one."""
    size = len(wanted)
    if not size or (wanted < 0).any():
        return [], 0
    like = sequence[np.isin(signature[sequence], wanted)]
    if len(like) < size:
        return [], 0
    random = np.random.default_rng(0).integers(0, 1 << 64, int(signature.max()) + 1, np.uint64)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(random[signature[like]])])
    total = random[wanted].sum(dtype=np.uint64)
    begins = np.flatnonzero(sums[size:] - sums[:-size] == total)
    ordered = np.sort(wanted)
    same = [
        bool((np.sort(signature[like[b : b + size]]) == ordered).all()) for b in begins.tolist()
    ]
    begins = begins[np.array(same, np.bool_)]
    tiles = np.arange(0, len(like) - size + 1, size)
    if len(like) % size or not np.isin(tiles, begins).all():
        tiles = begins[_fills_a_step(run, like, begins, size)]
    windows = [like[begin : begin + size] for begin in tiles[:_MOST_WINDOWS].tolist()]
    if not windows:
        return [], 0
    inside = int(((sequence >= windows[0][0]) & (sequence <= windows[0][-1])).sum())
    return windows, inside - size


def _fills_a_step(
    run: _Eager, like: NDArray[np.int64], begins: NDArray[np.int64], size: int
) -> NDArray[np.bool_]:
    """Whether each window holds all launches of such kernels of some step or outermost range."""
    called = run.called[like]
    before = np.concatenate([[np.iinfo(np.int64).min], called])[begins, None]
    after = np.concatenate([called, [np.iinfo(np.int64).max]])[begins + size, None]
    first, last = called[begins, None], called[begins + size - 1, None]
    holds = (run.begins <= first) & (run.ends >= last) & (run.begins > before) & (run.ends < after)
    return np.asarray(holds.any(axis=1), np.bool_)


def _agreed(outcomes: Sequence[Outcome]) -> Outcome:
    """Merges the outcomes of all matching iterations; labels on which they differ are UNDECIDED."""
    possible = np.array([[reason is None for reason in outcome.refused] for outcome in outcomes])
    result = outcomes[0]
    label, confidence = result.label.copy(), np.zeros(len(result.label))
    refused: list[str | None] = []
    for launch in range(len(label)):
        fitting = np.flatnonzero(possible[:, launch])
        refused.append(None if len(fitting) else result.refused[launch])
        if len(fitting):
            proposed = np.array([outcomes[i].label[launch] for i in fitting.tolist()])
            label[launch] = np.where((proposed == proposed[0]).all(axis=0), proposed[0], UNDECIDED)
            confidence[launch] = (label[launch] != UNDECIDED).mean()
    return Outcome(label, confidence, refused)


def _difference(
    run: _Eager, signatures: Signatures, variant: NDArray[np.int64], replays: Replays
) -> str:
    """A sentence on where a replay and the most similar part of the eager run first differ."""
    names = replays.kinds.frame["name"].gather(variant).to_list()
    replayed = signatures.variants[variant]
    for position in np.flatnonzero(replayed < 0).tolist():
        return f"the eager run has no kernel like activity {position} of the replay, `{short_name(names[position])}`"
    eager = signatures.nodes
    if max(len(eager), len(replayed)) > _MOST_COMPARED:
        return "no iteration of the eager run has exactly its kernels"
    position, other = _first_unlike(eager.tolist(), replayed.tolist())
    here = f"`{short_name(names[position])}`" if position < len(names) else "the end"
    there = f"`{short_name(run.names[other])}`" if other < len(run.names) else "the end"
    return (
        f"no iteration of the eager run has exactly its kernels; they first differ at activity {position}: "
        f"{here} in the replay, {there} in the eager run"
    )


def _first_unlike(eager: list[int], replayed: list[int]) -> tuple[int, int]:
    """The first difference: its positions in the replay and in the eager run."""
    position = other = 0
    blocks = SequenceMatcher(None, eager, replayed, autojunk=False).get_matching_blocks()
    for block in blocks:
        # Launches of the eager run before the first common activity do not count as a difference.
        if block.b > position or (block.a > other and position):
            return position, other
        position, other = block.b + block.size, block.a + block.size
    return (position, other) if position < len(replayed) or not blocks[0].a else (0, 0)
