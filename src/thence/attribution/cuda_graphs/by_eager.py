"""Labels graph replays from an eager run of the same code.

The eager run serves as the captured graph: its kernels in launch order are the nodes, and consecutive
kernels of one stream are joined by edges, as in stream capture. So the same alignment applies. The
iteration to align to is a window of consecutive eager launches with exactly the kernels of a replay;
kernels that the replay does not contain are dropped first. A window could also straddle two iterations, or
lack its last kernel and match a replay that lost another one. So windows only count if they tile the whole
eager run, or if each holds all launches of a profiler step or an outermost range. If several iterations match,
an activity gets a label only if all of them agree. A graph may hold an iteration several times: then it is
aligned to that many repetitions of the iteration.

If the order proves nothing, a kernel gets the places that all launches of its name in the eager run have in
common, provided that these have a single label (`thence.attribution.cuda_graphs.by_kernel_name`). This has a
rule of its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.cuda_graphs.alignment import UNDECIDED
from thence.attribution.cuda_graphs.by_capture import ByCapture
from thence.attribution.cuda_graphs.by_kernel_name import ByKernelName
from thence.attribution.cuda_graphs.by_order import Outcome, aligned_group
from thence.attribution.cuda_graphs.captures import Captures
from thence.attribution.cuda_graphs.eager_run import EagerRun
from thence.attribution.cuda_graphs.join_labels import Joined, Numbered, joined_rows
from thence.attribution.cuda_graphs.place_book import PlaceBook
from thence.attribution.cuda_graphs.replays import Group, Replays
from thence.attribution.cuda_graphs.signatures import ACTIVITIES, Names, Signatures, short_name
from thence.units import format_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from thence.model.attributed import Attributed
    from thence.model.tables import Tables

__all__ = ["join_eager"]

_MOST_WINDOWS = 32
_MOST_TIMES = 4096  # repetitions of an iteration in a graph
_MOST_COMPARED = 20_000


def join_eager(tables: Tables, eager: Sequence[Attributed]) -> Joined:
    """Transfers the places of runs without graphs, and of captures, to graph replays.

    Args:
        tables: with the replays.
        eager: runs of the same code without graphs, or traces of the captures.
    """
    replays = Replays.of(tables)
    if not len(replays.rows):
        return Joined()
    notes: list[str] = []
    frames = []
    for rank in tables.gpu["rank"][replays.rows].unique().sort().to_list():
        of_rank = _of_rank(eager, rank)
        if not of_rank:
            notes.append(f"rank {rank}: the eager trace does not contain this rank")
            continue
        sources = _Sources.of(of_rank, replays)
        rows = replays.rows[(tables.gpu["rank"] == rank).to_numpy()[replays.rows]]
        labels = Numbered.of(replays)
        notes += _join_rank(sources, labels, rows)
        notes += _order_notes(sources, labels, rows)
        if sources.book.frames:
            frames.append(joined_rows(labels, sources.book.frame))
    return Joined(pl.concat(frames) if frames else Joined().places, tuple(dict.fromkeys(notes)))


def _of_rank(eager: Sequence[Attributed], rank: int) -> list[tuple[Attributed, int]]:
    """The traces that a rank of the replays is compared to, and the rank to use in each."""
    ranks = [(trace, trace.ranks) for trace in eager]
    holding = [(trace, rank) for trace, held in ranks if rank in held]
    return holding or [(trace, held[0]) for trace, held in ranks if len(held) == 1]


@dataclass(frozen=True)
class _Sources:
    """The sources from which the replays of a rank can be labelled.

    Attributes:
        runs: runs without graphs, with device work.
        captures: captures of the traces; None where there are none.
        book: the places by number.
        by_name: the kernel names of each run, then of the captures of each trace that names all their kernels.
    """

    runs: list[_Run]
    captures: ByCapture | None
    book: PlaceBook
    by_name: list[ByKernelName]

    @classmethod
    def of(cls, traces: Sequence[tuple[Attributed, int]], replays: Replays) -> _Sources:
        book = PlaceBook()
        runs, by_name = [], []
        found = [c for trace, rank in traces if (c := Captures.of(trace, rank)) is not None]
        for trace, rank in traces:
            eager = EagerRun.of(trace, rank)
            if len(eager.rows):
                runs.append(_Run.of(eager, replays, book))
                by_name.append(_named(eager, runs[-1].run.label, replays, book))
        captures = None
        if found:
            captures = ByCapture.of(found, [trace for trace, _ in traces], replays, book)
            for capture in found:
                if capture.named.all():
                    places = capture.run.label + book.add(capture.run.places)
                    by_name.append(_named(capture.run, places, replays, book))
        return cls(runs, captures, book, by_name)


@dataclass(frozen=True)
class _Run:
    """One run without graphs, prepared for the replays.

    Attributes:
        run: the run; its places are numbered as in the book.
        names: numbers of kernel names in it and in the replays.
        signatures: of its launches and of the replays.
    """

    run: EagerRun
    names: Names
    signatures: Signatures

    @classmethod
    def of(cls, run: EagerRun, replays: Replays, book: PlaceBook) -> _Run:
        traced = replays.kinds.frame["name"].drop_nulls().unique(maintain_order=True)
        names = Names(run.kernels, traced)
        numbered = dataclasses.replace(run, label=run.label + book.add(run.places))
        return cls(numbered, names, Signatures.of(run.graph, names, replays.kinds))


def _named(
    run: EagerRun, place: NDArray[np.int64], replays: Replays, book: PlaceBook
) -> ByKernelName:
    """The kernel names of a run; adds the places that all launches of a name have in common to the book."""
    by_name = ByKernelName.of(run.kernels, run.graph.nodes, place, book.frame, replays)
    book.add(by_name.places[book.height :])
    return by_name


def _join_rank(sources: _Sources, labels: Numbered, rows: NDArray[np.int64]) -> list[str]:
    notes = []
    for group in labels.replays.groups(rows):
        reasons, said = _join_group(sources, labels, group)
        named = [by_name.put(labels, group.rows) for by_name in sources.by_name]
        correlation = labels.replays.tables.gpu["correlation"][int(group.rows[0, 0])]
        where = f"the graph launch with correlation id {correlation}"
        if len(group.rows) > 1:
            where += f", and {len(group.rows) - 1} like it"
        notes += [f"{where}: not labelled from {'; nor from '.join(reasons)}"] if reasons else []
        notes += [f"{where}: {text}" for text in (*said, *named) if text]
    return notes


def _join_group(
    sources: _Sources, labels: Numbered, group: Group
) -> tuple[list[str], list[str | None]]:
    """Labels a group of launches from the strongest source first.

    The sources are, in this order: captures with kernel names, eager runs, the order of captures.

    Returns:
        why launches got no label, one sentence for each eager run and one for the captures; and notes.
    """
    left, captures = group.rows, sources.captures
    reasons: list[str] = []
    said: list[str | None] = []
    if captures is not None:
        left = left[~captures.by_names(labels, left)]
    for run in sources.runs:
        if not len(left):
            break
        outcome, times, note = _aligned(
            run.run, run.names, run.signatures, Group(left), labels.replays
        )
        refused = labels.put_outcome(
            left, outcome, "eager_alignment" if times == 1 else "eager_repetition"
        )
        reasons += [f"the eager run: {refused[0]}"] if refused else []
        said.append(note)
        left = left[np.array([reason is not None for reason in outcome.refused])]
    if captures is not None and len(left):
        done, why = captures.by_order(labels, left)
        left = left[~done]
        reasons += [f"the captures: {why[0]}"] if why else []
    if not len(left):
        return [], said
    for launch in left:
        labels.refuse(launch, "; ".join(text.partition(": ")[2] for text in reasons))
    return reasons, said


def _order_notes(sources: _Sources, labels: Numbered, rows: NDArray[np.int64]) -> list[str]:
    """A note on the activities labelled by order alone, with their share of the time in graphs."""
    captures = sources.captures
    if captures is None or not captures.ordered:
        return []
    duration = labels.replays.tables.gpu["duration"].to_numpy()
    alone = np.concatenate(captures.ordered)
    share = duration[alone].sum() / max(int(duration[rows].sum()), 1)
    text = (
        f"{len(alone):,} activities, {format_share(float(share), 1)} of the time in CUDA graphs, are labelled by "
        f"their order alone: the trace of the capture does not name the kernels. Of {captures.kernels:,} kernels "
        f"among them, {captures.confirmed:,} have a name that fits the operator, and none contradicts it"
    )
    return [text]


def _aligned(
    run: EagerRun, names: Names, signatures: Signatures, group: Group, replays: Replays
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
            f"it repeats the kernels of the eager run {times} times; every repetition gets the same labels"
        )
    if left_out:
        notes.append(
            f"{left_out:,} activities of the eager run are ignored: the graph has no such kernels there"
        )
    return outcome, times, "; ".join(notes) or None


def _matching(
    run: EagerRun, signatures: Signatures, variant: NDArray[np.int64], replays: Replays
) -> tuple[list[NDArray[np.int64]], int, int]:
    """Finds the iterations of the run that match a replay.

    Returns:
        the launches of each, how many launches in between are left out of the first one, and how often the replay
        repeats an iteration.
    """
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
    """How often a replay may repeat an iteration, ascending: the common divisors of the counts of its kernels."""
    _, count = np.unique(signature, return_counts=True)
    most = int(np.gcd.reduce(count)) if len(count) else 1
    return [times for times in range(1, min(most, _MOST_TIMES) + 1) if most % times == 0]


def _windows(
    run: EagerRun,
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
    run: EagerRun, like: NDArray[np.int64], begins: NDArray[np.int64], size: int
) -> NDArray[np.bool_]:
    """Whether each window holds all launches of these kernels in some step or outermost range."""
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
    run: EagerRun, signatures: Signatures, variant: NDArray[np.int64], replays: Replays
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
