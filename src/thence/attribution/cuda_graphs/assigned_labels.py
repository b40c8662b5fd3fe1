"""The labels found for activities of CUDA graphs, while they are being found, and as rows of `GRAPH_PLACES`.

Every method of finding labels (`by_node`, `by_alignment`, `by_sequence`, `by_eager`) stores numbers of labels in one
`AssignedLabels`. The places behind the numbers are those of labels files (`join_labels`), or rows of a `PlaceRows` for
eager runs and captures.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.attribution.cuda_graphs.alignment import CONTRADICTED, FOREIGN, UNDECIDED
from thence.model.attributed import RULE
from thence.model.places import GRAPH_LABELS
from thence.model.reasons import CODES
from thence.model.tables import GRAPH_PLACES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.attribution.cuda_graphs.by_alignment import Outcome
    from thence.attribution.cuda_graphs.replays import Replays
    from thence.model.arrays import Float64, Int64
    from thence.model.tables import Tables

PLACE_COLUMNS = (*GRAPH_LABELS, "position", "lane", "metadata", "operator", "inputs")
CALL_COLUMNS = ("node", "nodes")
"""Columns of numbers: the position of an activity among those of its call, and how many those are."""
_PLACED = [pl.col(name).is_not_null() for name in (*GRAPH_LABELS, "lane", "metadata", "collective")]


@dataclass
class AssignedLabels:
    """The labels found so far: for each row of gpu, the number of its label and how it was found.

    Attributes:
        replays: of the trace.
        number: for each row, the number of its label, -1 where none was open, `UNDECIDED` where several are
            possible, `FOREIGN` where nothing corresponds to the activity, `CONTRADICTED` where label files differ, -3
            where nothing is known.
        rule: for each row, position in `CODES` of the rule, or of the reason where there is no label; -1 where
            nothing is known.
        detail: for each row, index in ``details``, -1 for none.
        confidence: for each row, NaN where no alignment was needed.
        details: sentences about graphs that fit none of the labels.
    """

    replays: Replays
    number: Int64
    rule: Int64
    detail: Int64
    confidence: Float64
    details: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, replays: Replays) -> AssignedLabels:
        """The initial state: no labels."""
        rows = replays.tables.gpu.height
        nothing = np.full(rows, -1)
        return cls(replays, np.full(rows, -3), nothing, nothing.copy(), np.full(rows, np.nan))

    def put(self, rows: Int64, number: Int64, rule: Int64 | int) -> None:
        """Stores labels; where there is none, ``rule`` gets the reason."""
        self.number[rows] = number
        self.rule[rows] = rule
        self.rule[rows[number == -1]] = CODES.index("graph_no_label")
        self.rule[rows[number == UNDECIDED]] = CODES.index("graph_ambiguous")
        self.rule[rows[number == FOREIGN]] = CODES.index("graph_foreign")
        self.rule[rows[number == CONTRADICTED]] = CODES.index("graph_labels_differ")
        self.detail[rows] = -1

    def put_outcome(self, rows: Int64, outcome: Outcome, rule: str) -> list[str]:
        """Stores the outcome of an alignment.

        Returns:
            why launches were refused, one text per refused launch.
        """
        refused = np.array([reason is not None for reason in outcome.refused])
        good, number = rows[~refused], outcome.label[~refused]
        self.put(good.reshape(-1), number.reshape(-1), CODES.index(rule))
        self.confidence[good] = (number > UNDECIDED).mean(axis=1)[:, None]
        reasons = [reason for reason in outcome.refused if reason is not None]
        for launch, reason in zip(np.flatnonzero(refused).tolist(), reasons, strict=True):
            self.refuse(rows[launch], reason)
        return reasons

    def refuse(self, rows: Int64, reason: str) -> None:
        """Stores the reason why activities got no label."""
        self.number[rows] = UNDECIDED
        self.rule[rows] = CODES.index("graph_not_joined")
        if reason not in self.details:
            self.details.append(reason)
        self.detail[rows] = self.details.index(reason)


_FACT = "collective."
"""Begin of the names of columns that hold the facts of collectives one by one."""


@dataclass
class PlaceRows:
    """Rows of places, each with a number.

    Attributes:
        frames: tables of rows; the number of a row is its position in their concatenation.
    """

    frames: list[pl.DataFrame] = field(default_factory=list)

    @property
    def height(self) -> int:
        """The number of rows, which is the next number."""
        return sum(frame.height for frame in self.frames)

    @property
    def frame(self) -> pl.DataFrame:
        """All rows."""
        if len(self.frames) > 1:
            self.frames = [pl.concat(self.frames)]
        return self.frames[0]

    def add(self, frame: pl.DataFrame) -> int:
        """Adds rows; returns the number of the first."""
        first = self.height
        self.frames.append(frame)
        return first

    def shared(self, group: Int64, number: Int64) -> Int64:
        """Adds what several places have in common, for groups of places.

        Args:
            group: ascending, for each place of a group the group.
            number: the number of the place.

        Returns:
            for each group in ascending order the number of the row with the values that all its places have, null
            where they differ; -1 if they have nothing in common.
        """
        chosen = self.frame[number]
        facts = [field.name for field in chosen.schema["collective"].fields]  # type: ignore[attr-defined]
        # A fact of a collective is one of the values: sizes may differ where the process group does not.
        of_collective = pl.col("collective").struct
        rows = chosen.select(
            pl.exclude("collective"),
            *(of_collective.field(name).alias(f"{_FACT}{name}") for name in facts),
            group=pl.Series(group),
        )
        alike = [
            pl.when(pl.col(name).n_unique() == 1).then(pl.col(name).first()).alias(name)
            for name in rows.columns
            if name != "group"
        ]
        common = rows.group_by("group", maintain_order=True).agg(alike).drop("group")
        described = pl.struct(pl.col(f"{_FACT}{name}").alias(name) for name in facts)
        named = pl.col(f"{_FACT}collective").is_not_null()
        common = common.with_columns(pl.when(named).then(described).alias("collective"))
        has_place = pl.any_horizontal(pl.col(*GRAPH_LABELS, "collective").is_not_null())
        placed = common.select(has_place).to_series()
        first = self.add(common.select(self.frame.columns))
        return np.where(placed.to_numpy(), first + np.arange(common.height), -1)


@dataclass(frozen=True)
class JoinedLabels:
    """The result of joining labels.

    Attributes:
        places: rows of `GRAPH_PLACES`: the labelled activities, and others with the reason.
        notes: what was not joined and why, as sentences.
        foreign: labels that were refused because they are of another process or program: the file, and why.
        files: the files that labelled any activities, and how many.
    """

    places: pl.DataFrame = field(default_factory=GRAPH_PLACES.empty)
    notes: tuple[str, ...] = ()
    foreign: tuple[tuple[str, str], ...] = ()
    files: Mapping[str, int] = field(default_factory=dict)

    @property
    def labelled(self) -> int:
        """Number of activities that got a label, or another place."""
        return int(self.places.select(pl.any_horizontal(_PLACED)).to_series().sum())


def joined_rows(assigned: AssignedLabels, places: pl.DataFrame) -> pl.DataFrame:
    """Rows of `GRAPH_PLACES` for all activities with a label or a reason.

    Args:
        assigned: label numbers of the activities.
        places: columns of places, one row for each number.
    """
    rows = np.flatnonzero(assigned.rule >= 0)
    number = pl.Series(assigned.number[rows])
    number = number.set(number < 0, None).cast(pl.UInt32)
    confidence = pl.Series(assigned.confidence[rows]).fill_nan(None)
    detail = pl.Series(assigned.detail[rows])
    detail = detail.set(detail < 0, None).cast(pl.UInt32)
    details = pl.Series(assigned.details, dtype=pl.String).cast(pl.Categorical())
    columns: dict[str, Any] = {name: places[name].cast(pl.Categorical()).gather(number) for name in PLACE_COLUMNS}
    columns |= {name: places[name].gather(number) for name in ("collective", *CALL_COLUMNS)}
    columns |= {
        "gpu": rows,
        "rule": pl.Series(CODES, dtype=RULE).gather(assigned.rule[rows]),
        "confidence": confidence,
        "detail": details.gather(detail),
    }
    return GRAPH_PLACES.frame(columns)


def with_places(tables: Tables, joined: JoinedLabels) -> Tables:
    """The tables with the joined places; activities that already had places keep them where none were found now."""
    new = joined.places
    old = tables.graph_places
    placed = pl.any_horizontal(_PLACED)
    kept = old.filter(~pl.col("gpu").is_in(new.filter(placed)["gpu"].implode()))
    fresh = new.filter(placed | ~pl.col("gpu").is_in(kept["gpu"].implode()))
    return dataclasses.replace(tables, graph_places=pl.concat([kept, fresh]).sort("gpu"))
