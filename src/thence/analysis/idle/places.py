"""Names of pieces of idle time: by place of the host row that determined the cause, by step, kernel, and so on.

Programs repeat themselves, and so do host rows. Two host rows have the same context if they and the rows around them
have the same names, categories and metadata, and so do the forward operators that they belong to. All rows of a
context have the same places, so places are looked up once per context: millions of rows have hundreds of contexts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.idle.host_causes import REASONS
from thence.analysis.steps.windows import steps
from thence.attribution.host_rows import gathered
from thence.attribution.launch_places import places_of_rows
from thence.errors import MissingData
from thence.model.columns import name_codes, not_null, row_numbers
from thence.model.grouped_intervals import numbered as numbered_rows
from thence.model.intervals import NO_ROW, chain_to
from thence.model.own_code import OwnCode
from thence.model.tables import HOST_CATEGORIES
from thence.model.trees import numbered, trie

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed

    Numbers = npt.NDArray[np.int32] | Int64

_PREFERRED = ("source", "label", "module", "op")


@dataclass(frozen=True)
class PieceNames:
    """The name of each piece of idle time. Names may occur more than once.

    Attributes:
        number: number of the name of each piece.
        by: kind of each name.
        name: each name; null for no name.
    """

    number: Numbers
    by: pl.Series
    name: pl.Series

    def columns(self) -> pl.DataFrame:
        """The columns by and name of each piece, String."""
        return self.columns_of(self.number)

    def columns_of(self, number: Numbers) -> pl.DataFrame:
        """The columns by and name of these numbers, String."""
        return pl.DataFrame({"by": self.by, "name": self.name})[number]


@dataclass(frozen=True)
class Contexts:
    """The contexts of host rows.

    Attributes:
        number: context of each row of host, with `NO_ROW` appended, so that index `NO_ROW` gives `NO_ROW`.
        row: the first row of each context.
    """

    number: Numbers
    row: Int64

    @classmethod
    def of(cls, host: pl.DataFrame) -> Contexts:
        """The contexts of all host rows; ``host`` as `thence.model.tables.HOST`."""
        number, row = _contexts(host)
        return cls(np.append(number, NO_ROW).astype(np.int32), row)

    def at(self, rows: pl.Series) -> Numbers:
        """The context of each of these host rows, `NO_ROW` for null."""
        numbers: Numbers = self.number[row_numbers(rows)]
        return numbers

    def table(self, host: pl.DataFrame) -> pl.DataFrame:
        """A host table with the first row of each context, whose row references are numbers of contexts."""
        rows = host[self.row]
        references = {name: self.at(rows[name]) for name in ("parent", "forward")}
        return rows.with_columns(
            pl.when(pl.lit(pl.Series(number)) != NO_ROW).then(pl.lit(pl.Series(number))).alias(name)
            for name, number in references.items()
        )


@dataclass(frozen=True)
class HostPlaces:
    """The places of host rows, by context.

    Attributes:
        contexts: contexts of the host rows.
        names: for each kind of place, the name of each context; null also for contexts of rows that were not asked for.
    """

    contexts: Contexts
    names: dict[str, pl.Series]

    @classmethod
    def of(cls, trace: Attributed, contexts: Contexts, asked: Sequence[pl.Series], kinds: Sequence[str]) -> HostPlaces:
        """The places of some host rows.

        Args:
            contexts: contexts of all host rows of the trace.
            asked: the rows of host to look up, null for none.
            kinds: kinds of places.
        """
        mentioned = np.zeros(len(contexts.row) + 1, np.bool_)
        for rows in asked:
            mentioned[contexts.at(rows)] = True
        used = np.flatnonzero(mentioned[:-1])
        position = np.full(len(contexts.row), NO_ROW)
        position[used] = np.arange(len(used))
        own = OwnCode.of(trace.own, trace.installed)
        tables = replace(trace, host=contexts.table(trace.host))
        names_of_used = places_of_rows(tables, used, own, list(dict.fromkeys(kinds)))
        return cls(contexts, {kind: gathered(names, position) for kind, names in names_of_used.items()})


def _contexts(host: pl.DataFrame) -> tuple[Int64, Int64]:
    """The context of each host row, and the first row of each context."""
    parent, forward = (row_numbers(host[name]) for name in ("parent", "forward"))
    of_forward = forward != NO_ROW
    category = host["category"].to_physical().to_numpy()
    code = (name_codes(host["name"]) * len(HOST_CATEGORIES) + category) * 2 + of_forward
    if host["metadata"].null_count() < host.height:
        metadata = name_codes(host["metadata"])
        code = numbered(code)[0] * (int(metadata.max()) + 1) + metadata
    node, first = trie(parent, code)
    if not of_forward.any():
        return node, first
    # Whether a row around them, and which, belongs to a forward operator is the same for all rows of a node.
    above = np.where(parent[first] == NO_ROW, NO_ROW, node[parent[first]])
    below = chain_to(above, np.arange(len(first)), of_forward[first]) != NO_ROW
    rows = np.flatnonzero(below[node])
    around = node[forward[chain_to(parent, rows, of_forward)]]
    # Usually all rows of a node belong to forward operators of one node: then they have one context.
    alike = np.empty(len(node), np.int64)
    alike[rows] = around
    others = np.flatnonzero(alike[rows] != alike[first[node[rows]]])
    pair, first_of_pair = numbered(node[rows[others]] * len(first) + around[others])
    node[rows[others]] = pair + len(first)
    return node, np.concatenate([first, rows[others[first_of_pair]]])


def kinds_of(by: str) -> list[str]:
    """The kinds of places of host rows that are needed for names by ``by``."""
    return list(_PREFERRED) if by == "place" else [by] if by in _PREFERRED else []


def piece_names(trace: Attributed, pieces: pl.DataFrame, by: str, places: HostPlaces) -> PieceNames:
    """The name of each piece of idle time.

    Args:
        pieces: as `thence.analysis.idle.causes.idle_causes` returns them.
        by: one of `thence.model.places.IDLE_BY`. By place, the name is of the first kind in `_PREFERRED` that the
            host row has, else the name of the row itself (by step or call); without a name, it is the reason, else
            null by call.
        places: places of the host rows of these pieces.
    """
    if by == "place":
        return _by_place(trace, pieces, places)
    number, name = _numbered_names(trace, pieces, by, places)
    name = name.cast(pl.String).extend_constant(None, 1)  # the last element is for NO_ROW
    return PieceNames(np.where(number == NO_ROW, len(name) - 1, number), pl.repeat(by, len(name), eager=True), name)


def _by_place(trace: Attributed, pieces: pl.DataFrame, places: HostPlaces) -> PieceNames:
    """The names by place: names of contexts, then reasons, then null."""
    row, category = (trace.host[name][places.contexts.row] for name in ("name", "category"))
    step = pl.select(pl.when(category == "step").then(row)).to_series()
    by_kind = {by: places.names[by] for by in _PREFERRED} | {"step": step, "call": row}
    of_contexts = pl.DataFrame({by: name.cast(pl.String) for by, name in by_kind.items()}).select(
        by=pl.coalesce(*(pl.when(pl.col(by).is_not_null()).then(pl.lit(by)) for by in by_kind)),
        name=pl.coalesce(*by_kind),
    )
    reasons = list(REASONS)
    rest = pl.DataFrame({"by": ["call"] + ["reason"] * len(reasons), "name": [None, *reasons]})
    every = pl.concat([of_contexts, rest])
    number = places.contexts.at(pieces["host"])
    unnamed = np.append(~not_null(of_contexts["name"]), True)[number]
    number[unnamed] = of_contexts.height + name_codes(pieces["reason"])[unnamed].astype(np.int32)
    return PieceNames(number, every["by"], every["name"])


def _numbered_names(trace: Attributed, pieces: pl.DataFrame, by: str, places: HostPlaces) -> tuple[Numbers, pl.Series]:
    """The number of the name of each piece, `NO_ROW` for none, and the names, which may contain nulls."""
    if by in _PREFERRED or by in ("call", "wait"):
        number = places.contexts.at(pieces["wait" if by == "wait" else "host"])
        return number, _names_by_context(trace, by, places)
    if by == "step":
        return _steps(trace, pieces)
    if by == "device":
        number, devices = numbered_rows(pieces, "rank", "device")
        return number, devices.select(pl.format("rank {} device {}", *devices.columns)).to_series()
    if by == "kernel":
        name = trace.around.gpu["name"].gather(pieces["gpu"].cast(pl.UInt32))
        number, first = numbered(name_codes(name))
    else:
        name = pieces[by]
        number, first = numbered(row_numbers(name.to_physical()))
    return number, name.gather(first)


def _steps(trace: Attributed, pieces: pl.DataFrame) -> tuple[Int64, pl.Series]:
    """For each piece, the number of the step in whose window on the device it begins, and the names of steps."""
    try:
        frame = steps(trace).frame
    except MissingData:
        return np.full(pieces.height, NO_ROW), pl.Series([], dtype=pl.String)
    windows = frame.select("rank", "device", "start", end=pl.col("start") + pl.col("duration")).with_row_index("window")
    begun = (
        pieces.select("rank", "device", "start")
        .with_row_index("piece")
        .sort("start")
        .join_asof(
            windows.sort("start", maintain_order=True),
            on="start",
            by=["rank", "device"],
            check_sortedness=False,  # Polars cannot check it within groups
        )
        .sort("piece")
    )
    window = begun.select(pl.when(pl.col("start") < pl.col("end")).then("window")).to_series()
    return row_numbers(window), frame["step"]


def names_of_contexts(
    trace: Attributed, pieces: pl.DataFrame, kinds: Sequence[str]
) -> tuple[Numbers, dict[str, pl.Series]]:
    """The names of pieces of idle time by several kinds that depend only on the host row, once for each context.

    Args:
        pieces: as `thence.analysis.idle.causes.idle_causes` returns them.
        kinds: kinds of `thence.model.places.IDLE_BY` among source, module, label, op, call.

    Returns:
        the context of each piece, `NO_ROW` for none; for each kind the name of every context, Categorical, null
        for none.
    """
    needed = [kind for by in kinds for kind in kinds_of(by)]
    places = HostPlaces.of(trace, Contexts.of(trace.host), [pieces["host"]], needed)
    names = {by: _names_by_context(trace, by, places).cast(pl.Categorical()) for by in kinds}
    return places.contexts.at(pieces["host"]), names


def _names_by_context(trace: Attributed, by: str, places: HostPlaces) -> pl.Series:
    """The name of each context by a kind of place, or the name of its rows."""
    if by in _PREFERRED:
        return places.names[by]
    return trace.host["name"].gather(places.contexts.row)
