"""Describes collective kernels by the calls that PyTorch's flight recorder kept of their rank.

The kernels of NCCL that a rank launched outside of CUDA graphs, and those of each replay of a graph, are sequences in
the order of their launch or capture. Such a sequence can be any stretch of consecutive calls that could have launched
its kernels, one by one: by the kind of collective and the element type in the name of the kernel, and by what is known
of it otherwise. A fact is taken only if all these stretches give it, so what several steps share is known though the
step is not. This is a proof only if the true stretch is among them:

- A graph may have been captured at any time, so the recorder must not have overwritten calls.
- Kernels outside of graphs must have been launched after the first call that is left, and the last of them within
  `_LATE_NS` of its call, by the clock of both.

What the trace itself, or a label, says about a kernel stays; the calls only fill what is unknown. Sends, receives and
batches of them are not described, and a sequence that has any other kernel of NCCL more or less stays as it is.
Libraries that call NCCL themselves are in no flight recorder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from thence.attribution.cuda_graphs.replays import Replays, in_cuda_graph
from thence.model.collective_kinds import can_launch, kernels_of_nccl, kind_of
from thence.model.columns import values_or
from thence.model.intervals import NO_ROW
from thence.model.names import matching
from thence.model.tables import COLLECTIVES, DESCRIBED
from thence.units import listed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from thence.model.arrays import Int64, Mask
    from thence.model.flight_records import FlightRecord
    from thence.model.tables import Meta, Tables

_FACTS = tuple(
    name for name in DESCRIBED if name not in ("in_splits", "out_splits", "source_rank", "destination_rank", "sequence")
)
"""Columns that calls fill. Numbers of calls are not: collectives of ranks are matched by their numbers where they
have them, and by their order elsewhere, so a number that only one rank has would part them."""
_KNOWN = ("bytes", "group_name", "group_size")
"""Columns in which a call must not contradict what is known of the kernel."""
_LATE_NS = 2_000_000_000
"""ns between a call and the launch of its kernel. NCCL makes a communicator in its first call, which takes longer."""
_MAX_COMPARED = 50_000_000
"""Kernels times stretches that are compared."""
_LISTED = 3  # names in a note
_UNKNOWN_ORDER = (
    "collectives of a CUDA graph ran on several streams, and its nodes have no numbers: the order of its capture is "
    "unknown"
)
_SEVERAL, _NOTHING = -2, -1
_PEERS = {"send", "recv", "coalesced"}


def with_flight_records(tables: Tables, collectives: pl.DataFrame, launch: Int64) -> tuple[pl.DataFrame, list[str]]:
    """The table of collectives, completed by calls of flight recorders, and notes on what they say.

    Args:
        tables: of the trace, with the flight recorders' calls.
        collectives: every described kernel, in the columns of `COLLECTIVES`.
        launch: host row that launched each row of ``tables.gpu``, `NO_ROW` where unknown.
    """
    described, used = [], []
    kernels = np.zeros(tables.gpu.height, np.bool_)
    reasons: dict[str, None] = {}
    nccl = (matching(tables.gpu["name"], "(?i)^(?:nccl|rccl)") & (tables.gpu["kind"] == "kernel")).to_numpy()
    ranks = tables.ranks
    records = {record.source: record for record in tables.flight_records}.values()
    for record in records:
        rank = ranks[0] if record.rank is None and len(ranks) == 1 else record.rank
        of_rank = nccl & (tables.gpu["rank"] == rank).to_numpy()
        if rank is None or not of_rank.any():
            continue
        used.append(Path(record.source).name)
        kernels |= of_rank
        calls = _Calls.of(record, tables.meta, rank)
        for rows, launched in _sequences(tables, of_rank, launch):
            if isinstance(rows, str):
                reasons[rows] = None
                continue
            facts, reason = calls.facts(tables, collectives, rows, launched)
            if reason:
                reasons[reason] = None
            of_replays = facts[np.tile(np.arange(facts.height), len(rows))]
            described.append(of_replays.with_columns(gpu=pl.Series(rows.reshape(-1), dtype=pl.Int32)))
    facts = _agreed(described)
    notes = [*_unfinished(records), *_behind(records)]
    if used:
        why = f"; {listed(list(reasons), _LISTED)}" if reasons else ""
        notes.append(
            f"flight recorders ({listed(used, _LISTED)}) give facts of {facts.height:,} of {kernels.sum():,} "
            f"collective kernels of their ranks{why}"
        )
    return filled(collectives, facts), notes


def _agreed(described: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """One row for each kernel of which size or group is known, with the facts that all recorders of its rank share."""
    empty = COLLECTIVES.empty().select("gpu", *_FACTS)
    all_facts = pl.concat(
        [
            empty,
            *(frame.select(pl.col(name).cast(dtype) for name, dtype in empty.schema.items()) for frame in described),
        ]
    )
    known = [pl.col(name).drop_nulls() for name in _FACTS]
    agreed = (
        pl.when(fact.n_unique() == 1).then(fact.first()).alias(name) for name, fact in zip(_FACTS, known, strict=True)
    )
    facts = all_facts.group_by("gpu", maintain_order=True).agg(agreed)
    return facts.filter(pl.col("bytes").is_not_null() | pl.col("group_name").is_not_null())


def _unfinished(records: Iterable[FlightRecord]) -> list[str]:
    """A sentence on the calls that had begun and not ended when the recorders were written."""
    names = [
        f"{name} number {number} of process group {group} in {Path(record.source).name}"
        + (f", called at {line}" if line else "")
        for record in records
        for name, number, group, line in record.calls.filter("unfinished")
        .select("collective", "sequence", "group_name", "line")
        .iter_rows()
    ]
    return [f"had begun and not ended: {listed(names, _LISTED)}"] if names else []


def _behind(records: Collection[FlightRecord]) -> list[str]:
    """A sentence for each process group in which some ranks made fewer collective calls than others."""
    last = [
        record.calls.filter(~pl.col("peers"))
        .group_by("group_name", "group_description")
        .agg(pl.col("sequence").max(), rank=pl.lit(record.rank, pl.Int32))
        for record in records
        if record.rank is not None
    ]
    if len(last) < 2:
        return []
    most = pl.col("sequence").max().over("group_name", "group_description")
    behind = (
        pl.concat(last)
        .with_columns(most=most)
        .filter(pl.col("sequence") < pl.col("most"))
        .sort("group_name", "sequence", "rank")
    )
    return [
        f"in process group {name} ({text}), "
        + listed([f"rank {row[3]} made {row[2]:,}" for row in part.iter_rows()], _LISTED)
        + f" collective calls, another rank {part['most'][0]:,}, until their flight recorders were written"
        for (name, text), part in behind.group_by("group_name", "group_description", maintain_order=True)
    ]


def filled(collectives: pl.DataFrame, facts: pl.DataFrame) -> pl.DataFrame:
    """A table of collectives with nulls filled by facts, and with rows for kernels that it did not describe.

    Args:
        collectives: in the columns of `COLLECTIVES`.
        facts: gpu (row, unique) and some of these columns.
    """
    names = [name for name in facts.columns if name != "gpu"]
    joined = collectives.join(facts, on="gpu", how="left", suffix="_fact", maintain_order="left")
    known = joined.with_columns(
        pl.coalesce(pl.col(name), pl.col(f"{name}_fact").cast(COLLECTIVES.schema[name])) for name in names
    ).select(collectives.columns)
    new = facts.filter(~pl.col("gpu").is_in(collectives["gpu"].implode()))
    return pl.concat([known, COLLECTIVES.frame(new.to_dict())]).sort("gpu", maintain_order=True)


def _sequences(tables: Tables, kernels: Mask, launch: Int64) -> Iterator[tuple[Int64 | str, Int64 | None]]:
    """The kernels of a rank in the order of their calls: rows of gpu, (replays, kernels), or why it is not known.

    Yields:
        The rows; and the time (ns) of each launch, None for replays of graphs.
    """
    graphed = in_cuda_graph(tables, launch)
    eager = np.flatnonzero(kernels & ~graphed)
    if len(eager) and (launch[eager] == NO_ROW).any():
        yield "the launches of its kernels outside of CUDA graphs are not recorded", None
    elif len(eager):
        called = tables.host["start"].to_numpy()[launch[eager]]
        order = np.argsort(called, kind="stable")
        yield eager[order][None, :], called[order]
    replays = Replays.of(tables)
    inside = replays.rows[np.isin(replays.rows, np.flatnonzero(kernels & graphed))]
    ranks = tables.gpu["rank"].to_numpy()
    rows = replays.rows[np.isin(ranks[replays.rows], np.unique(ranks[inside]))]
    stream = tables.gpu["stream"].to_numpy()
    for group in replays.groups(rows):
        for alike in replays.sequences(group.rows):
            chosen = alike.rows[:, kernels[alike.rows[0]]]
            if not chosen.shape[1]:
                continue
            streams = stream[chosen]
            if alike.numbered or (streams == streams[:, :1]).all():
                yield chosen, None
            else:
                yield _UNKNOWN_ORDER, None


class _Diagonal(NamedTuple):
    """Kernels ``begin`` to ``end`` of a sequence, of which kernel k is paired with call ``offset + k``."""

    offset: int
    begin: int
    end: int


class _Alignment(NamedTuple):
    """One way to pair the kernels of a sequence with consecutive calls, with one difference at most.

    Attributes:
        diagonals: for all places where the difference can be.
        unpaired: the kernels that may have no call.
    """

    diagonals: list[_Diagonal]
    unpaired: slice = slice(0)


class _Calls:
    """The calls of one rank, prepared for its kernels.

    Attributes:
        frame: the calls that launch kernels, with what describes them.
        record: the recorder.
        created: Unix time (ns) of each call.
        usable: which calls describe the kernel that they launch: not sends and receives, nor calls in a process group
            that is none of the rank's, if the trace lists those.
    """

    def __init__(self, frame: pl.DataFrame, record: FlightRecord, epoch_ns: int | None) -> None:
        self.frame = frame
        self.record = record
        self.created = values_or(frame["created"], 0)
        self.epoch_ns = epoch_ns
        self.usable = (~frame["peers"] & ~frame["kind"].is_in(_PEERS) & frame["of_rank"]).to_numpy()
        self._codes = np.stack([frame[name].rank("dense").fill_null(0).cast(pl.Int64).to_numpy() for name in _FACTS])
        pairs = frame.select("kind", "element_type")
        self._pairs = pairs.unique(maintain_order=True)
        number = self._pairs.with_row_index("number")
        self._pair = pairs.join(
            number, on=["kind", "element_type"], how="left", nulls_equal=True, maintain_order="left"
        )["number"].to_numpy()

    @classmethod
    def of(cls, record: FlightRecord, meta: Meta, rank: int) -> _Calls:
        """The calls of a recorder that launched kernels of NCCL; the trace may list the members of their groups."""
        calls = record.calls.filter(pl.col("backend") == "nccl")
        layout = _layout(meta, rank)
        joined = calls.join(layout, on=["group_name", "group_description"], how="left", maintain_order="left")
        frame = joined.with_columns(
            pl.coalesce("group_ranks", "members"),
            pl.coalesce("group_size", "count").cast(pl.Int32),
            kind=kind_of(pl.col("collective")),
            of_rank=pl.lit(layout.is_empty()) | pl.col("members").is_not_null(),
        )
        # A process group of one rank launches no kernel.
        return cls(frame.filter(pl.col("group_size").ne_missing(1)), record, meta.epoch_ns)

    def facts(
        self, tables: Tables, collectives: pl.DataFrame, rows: Int64, launched: Int64 | None
    ) -> tuple[pl.DataFrame, str]:
        """What all possible calls of each kernel of a sequence say, in the columns `_FACTS`, and why nothing is known.

        Args:
            collectives: what is known.
            rows: of gpu, (replays, kernels).
            launched: time (ns) of each launch; None for replays.
        """
        count = rows.shape[1]
        nothing = self.frame.clear().select(_FACTS)
        unknown = pl.DataFrame({n: [None] * count for n in _FACTS}, schema=nothing.schema)
        reason = self._unproved(launched)
        if reason:
            return unknown, reason
        if (len(self.created) + 2) * count > _MAX_COMPARED:
            return unknown, "it holds too many calls for a sequence that long"
        known = self._known(collectives, rows)
        agreed = np.full((len(_FACTS), count), _NOTHING)
        call = np.zeros(count, np.int64)
        opened = np.zeros(count, np.bool_)
        alignments = self._alignments(tables, rows[0], launched)
        exact = any(
            len(alignment.diagonals) == 1 and alignment.diagonals[0][1:] == (0, count) for alignment in alignments
        )
        for alignment in alignments:
            if any(self._contradicted(known, diagonal) for diagonal in alignment.diagonals):
                continue
            opened[alignment.unpaired] |= not exact
            for offset, begin, end in alignment.diagonals:
                codes = self._codes[:, offset + begin : offset + end]
                before = agreed[:, begin:end]
                new = before == _NOTHING
                call[begin:end] = np.where(new[0], np.arange(begin, end) + offset, call[begin:end])
                agreed[:, begin:end] = np.where(new | (before == codes), codes, _SEVERAL)
                opened[begin:end] |= ~self.usable[offset + begin : offset + end]
        if (agreed[0] == _NOTHING).all():
            return unknown, f"no {count:,} consecutive calls fit the kernels of a sequence"
        of_kernel = kernels_of_nccl(tables.gpu["name"][rows[0]])["kind"]
        opened |= of_kernel.is_null().to_numpy()
        kept = (agreed > 0) & ~opened
        values = self.frame.select(_FACTS)[call]
        kind = pl.when(~pl.Series(opened)).then(of_kernel)
        return values.select(
            pl.when(pl.Series(kept[place])).then(name).otherwise(kind if name == "collective" else None).alias(name)
            for place, name in enumerate(_FACTS)
        ), ""

    def _contradicted(self, known: Int64, diagonal: _Diagonal) -> bool:
        """Whether calls contradict what is known of kernels."""
        offset, begin, end = diagonal
        known_codes, codes = known[:, begin:end], self._codes[:, offset + begin : offset + end]
        return bool(((known_codes != _NOTHING) & (codes != 0) & (codes != known_codes)).any())

    def _unproved(self, launched: Int64 | None) -> str:
        """Why the true calls of a sequence may not be among those that are left; empty if they are."""
        if self.frame.is_empty():
            return "it holds no calls of NCCL"
        if self.record.left_out:
            return "it holds only some of its calls"
        lost = self.record.overwritten
        if launched is None and lost:
            return (
                f"it has overwritten its first {lost:,} calls, which may be those of a CUDA graph's capture: set "
                "TORCH_FR_BUFFER_SIZE higher"
            )
        if launched is not None and self.epoch_ns is None:
            return "the trace does not state the Unix time of its clock"
        if lost and launched is not None and launched[0] + self.epoch_ns < self.created[0]:
            return f"it has overwritten its first {lost:,} calls"
        return ""

    def _alignments(self, tables: Tables, rows: Int64, launched: Int64 | None) -> list[_Alignment]:
        """All ways to pair these kernels with consecutive calls, with one difference at most.

        The difference is a call without a kernel, a kernel without a call, or one of each in the same place.
        """
        count = len(rows)
        names = kernels_of_nccl(tables.gpu["name"][rows])
        distinct = names.unique(maintain_order=True)
        numbers = names.join(
            distinct.with_row_index("number"), on=names.columns, how="left", nulls_equal=True, maintain_order="left"
        )["number"].to_numpy()
        pairs = [*self._pairs.iter_rows(), None]
        fits = np.array(
            [
                [pair is not None and can_launch(kind, type_, *pair) for kind, type_ in distinct.iter_rows()]
                for pair in pairs
            ]
        )
        calls = len(self._pair)
        if calls + 1 < count:
            return []
        beyond = len(pairs) - 1  # a call before the first, or after the last
        padded = np.concatenate([[beyond], self._pair, [beyond]])
        fit = fits[np.lib.stride_tricks.sliding_window_view(padded, count), numbers]
        complete = fit.all(axis=1)
        before = np.where(complete, count, fit.argmin(axis=1))
        after = np.where(complete, count, fit[:, ::-1].argmin(axis=1))
        places = np.arange(len(fit))
        in_time = self._in_time(places - 1 + count - 1, tables, rows, launched)
        alignments = [
            _Alignment([_Diagonal(place - 1, 0, count)]) for place in np.flatnonzero(complete & in_time).tolist()
        ]
        for place in np.flatnonzero(~complete & in_time & (before + after == count - 1)).tolist():
            first = int(before[place])
            around = [_Diagonal(place - 1, 0, first), _Diagonal(place - 1, first + 1, count)]
            alignments.append(_Alignment(around, slice(first, first + 1)))
        # Kernels before the difference are paired on one diagonal, those after it on the next or the one before.
        for step, gap in ((1, 0), (-1, 1)):
            begins = places[max(-step, 0) : len(fit) - max(step, 0)]
            low = np.maximum(count - gap - after[begins + step], 0)
            high = np.minimum(before[begins], count - gap)
            for index in np.flatnonzero((low <= high) & in_time[begins + step]).tolist():
                first, last, place = int(low[index]), int(high[index]), int(begins[index])
                diagonals = [_Diagonal(place - 1, 0, last), _Diagonal(place - 1 + step, first + gap, count)]
                alignments.append(_Alignment(diagonals, slice(first, last + gap) if gap else slice(0)))
        return alignments

    def _in_time(self, last: Int64, tables: Tables, rows: Int64, launched: Int64 | None) -> Mask:
        """Which calls can be that of the last kernel, by their times."""
        made = self.created[np.clip(last, 0, len(self.created) - 1)]
        if self.epoch_ns is None:
            return np.ones(len(last), np.bool_)
        if launched is not None:
            return np.asarray(np.abs(made - launched[-1] - self.epoch_ns) <= _LATE_NS)
        end = int(tables.gpu["start"].to_numpy()[rows].max()) + self.epoch_ns
        return np.asarray(made <= end + _LATE_NS)

    def _known(self, collectives: pl.DataFrame, rows: Int64) -> Int64:
        """The codes of what is known of the kernels, `_NOTHING` where nothing is, `_SEVERAL` where no call says it."""
        known = np.full((len(_FACTS), rows.shape[1]), _NOTHING)
        of_row = pl.DataFrame({"gpu": pl.Series(rows[0], dtype=pl.Int32)}).join(
            collectives.unique("gpu", keep="first"), on="gpu", how="left", maintain_order="left"
        )
        for name in _KNOWN:
            place = _FACTS.index(name)
            values = of_row[name].cast(self.frame.schema[name])
            codes = pl.DataFrame({"value": self.frame[name], "code": self._codes[place]}).unique()
            code_of_value = values.to_frame("value").join(
                codes.drop_nulls(), on="value", how="left", maintain_order="left"
            )["code"]
            stated = values.is_not_null().to_numpy()
            known[place] = np.where(stated, values_or(code_of_value, _SEVERAL), _NOTHING)
        return known


def _layout(meta: Meta, rank: int) -> pl.DataFrame:
    """Members of the process groups of a rank that the inputs list, where name and description are of one group."""
    listed_groups = {
        (str(group["name"]), str(group.get("description") or ""), str(list(group["ranks"])), len(group["ranks"]))
        for group in meta.process_groups
        if isinstance(group.get("ranks"), list) and rank in group["ranks"]
    }
    schema = {"group_name": pl.String(), "group_description": pl.String(), "members": pl.String(), "count": pl.Int32()}
    frame = pl.DataFrame(sorted(listed_groups), schema=schema, orient="row")
    return frame.unique(["group_name", "group_description"], keep="none")
