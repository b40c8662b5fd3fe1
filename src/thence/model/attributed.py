"""`Attributed`: a trace with attributed device time, the input of every analysis and every writer."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import wraps
from typing import TYPE_CHECKING, TypeVar

import polars as pl

from thence.model.concat_tables import concat, moved, row_offsets
from thence.model.reasons import CODES
from thence.model.selection import Selection
from thence.model.tables import COLLECTIVES, Tables

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

RULE = pl.Enum(CODES)
"""Type of every ``<kind>_rule`` column."""

SHARES: Mapping[str, pl.DataType] = {
    "gpu": pl.Int32(),  # row in gpu
    "place": pl.Categorical(),  # file.py:12 function; null: this part of the time has no source line
    "weight": pl.Float64(),  # share of the activity's time, from 0 to 1
    "rule": RULE,  # how the place was found, or why it was not
}
"""Columns of `Attributed.shares`."""

_Found = TypeVar("_Found")
_OfActivities = TypeVar("_OfActivities", pl.Series, pl.DataFrame)


@dataclass(frozen=True)
class Attributed(Tables):
    """The tables of a trace, completed by the attribution, and the places that each row of ``gpu`` came from.

    `thence.attribution.attribute` makes it once for each trace. Column ``hlo`` of ``gpu`` holds the instruction of
    every activity whose instruction is known, including activities of XLA's command buffers. Each row of
    ``collectives`` refers to its device activity.

    Attributes:
        places: one row per row of ``gpu``, in the same order. Columns: ``launch`` (host row, null where unknown);
            ``step_row`` (row of ``steps``: the step in which it was launched; null outside of steps);
            for each kind of `thence.model.places.PLACES` the place (Categorical, null where there is none) and
            ``<kind>_rule`` (`RULE`); ``position``, what the line number of the source refers to (`Position`, null
            without a line number); ``lane`` and ``metadata`` of the marks;
            ``detail``, a sentence about a CUDA graph that could not be matched, null almost everywhere;
            ``separate`` (`RULE`), why tables of an XLA trace show the activity in a separate row: warm_up, incomplete
            or autotuning; null for all other work, and everywhere unless the selection's warm_up is "separate".
        collective_parts: the individual sends and receives of kernels that do several of them (batches), in the
            columns of ``collectives``, where each such kernel has one row with the sum of their bytes.
        host_collectives: collectives as host ops describe them, in the columns of ``collectives`` with a null
            ``gpu``, whether or not a kernel describes the same collective.
        shares: how the time of each activity divides among source lines, in the columns of `SHARES`, sorted
            by gpu; the weights of one activity sum to 1. None if every activity has at most one line, the one in
            ``places``.
        selection: the part of the trace that this is; an empty selection is the whole trace.
        unselected: the trace of the same ranks and devices with all of their work, if only a part of it is selected
            here (steps, a time, names ...). Time in which other work ran is not idle, and only the whole work shows
            where steps begin and end. None if nothing but ranks and devices is selected.
        part_of: the whole trace that this is a part of, and the row in its ``gpu`` of each row of ``gpu``; None of a
            whole trace. `of_each_activity` uses it.
        work: work of each row of ``gpu`` as a store keeps it (`thence.attribution.work.activity_work`), because host
            ranges may be missing there; None: it is computed when an analysis asks.
        own: patterns of further files that count as the user's own code (`thence.model.own_code.OwnCode`).
        installed: packages that the trace itself shows to be installed.
    """

    places: pl.DataFrame = field(default_factory=pl.DataFrame)
    collective_parts: pl.DataFrame = field(default_factory=COLLECTIVES.empty)
    host_collectives: pl.DataFrame = field(default_factory=COLLECTIVES.empty)
    shares: pl.DataFrame | None = None
    own: tuple[str, ...] = ()
    installed: tuple[str, ...] = ()
    selection: Selection = field(default_factory=Selection)
    unselected: Attributed | None = field(default=None, repr=False)
    part_of: tuple[Attributed, pl.Series] | None = field(default=None, repr=False)
    work: pl.DataFrame | None = field(default=None, repr=False)

    @property
    def around(self) -> Attributed:
        """All work of the same ranks and devices: `unselected`, or this trace if there is no such."""
        return self if self.unselected is None else self.unselected

    @property
    def labels_joined(self) -> bool:
        """Whether any label of a CUDA graph was joined."""
        return self.graph_places["label"].null_count() < self.graph_places.height


def once_per_trace(compute: Callable[[Attributed], _Found]) -> Callable[[Attributed], _Found]:
    """A function of a trace that does its work once: several parts of one answer ask the same.

    A report asks eight times for the steps.

    Args:
        compute: its result is kept as long as the trace, and nobody changes it; an error is not kept.
    """
    name = f"{compute.__module__}.{compute.__qualname__}"

    @wraps(compute)
    def found(trace: Attributed) -> _Found:
        kept = vars(trace)
        if name not in kept:
            kept[name] = compute(trace)
        result: _Found = kept[name]
        return result

    return found


def of_each_activity(compute: Callable[[Attributed], _OfActivities]) -> Callable[[Attributed], _OfActivities]:
    """As `once_per_trace`, of a function that computes something of each row of ``gpu``.

    Of a part of a trace it returns rows of what the whole trace has. What an activity is does not depend on what else
    is selected: the work of a call is divided among all of its kernels, also if only one of them is in the part.

    Args:
        compute: returns one row for each row of ``gpu``, in its order.
    """

    @wraps(compute)
    def of_part(trace: Attributed) -> _OfActivities:
        if trace.part_of is None:
            return compute(trace)
        whole, rows = trace.part_of
        every = once(whole)
        return every if len(rows) == len(every) else every[rows]

    once: Callable[[Attributed], _OfActivities] = once_per_trace(of_part)
    return once


def concat_attributed(parts: Sequence[Attributed]) -> Attributed:
    """Concatenates attributed traces of several ranks as `thence.model.concat_tables.concat` does their tables.

    Args:
        parts: whole traces, in which nothing is selected.
    """
    if len(parts) == 1:
        return parts[0]
    tables = concat(parts)
    offsets = row_offsets(parts)

    def joined(name: str, **references: str) -> pl.DataFrame:
        return pl.concat(
            [
                moved(getattr(part, name), 0, {c: offsets[table][i] for c, table in references.items()})
                for i, part in enumerate(parts)
            ]
        )

    shares = None
    if any(part.shares is not None for part in parts):
        divided = [_shares(part) for part in parts]
        shares = pl.concat([moved(s, 0, {"gpu": offsets["gpu"][i]}) for i, s in enumerate(divided)])
    works = [part.work for part in parts if part.work is not None]
    return Attributed(
        **{field.name: getattr(tables, field.name) for field in fields(Tables)},
        places=joined("places", launch="host", step_row="steps"),
        collective_parts=joined("collective_parts", gpu="gpu", host="host"),
        host_collectives=joined("host_collectives", host="host"),
        shares=shares,
        own=parts[0].own,
        work=pl.concat(works) if len(works) == len(parts) else None,
        installed=tuple(sorted({package for part in parts for package in part.installed})),
    )


def _shares(part: Attributed) -> pl.DataFrame:
    """``shares`` of a part, made from ``places`` if each of its activities has at most one line."""
    if part.shares is not None:
        return part.shares
    places = part.places.select(
        gpu=pl.int_range(pl.len(), dtype=pl.Int32), place="source", weight=pl.lit(1.0), rule="source_rule"
    )
    return places.cast(SHARES)  # type: ignore[arg-type]
