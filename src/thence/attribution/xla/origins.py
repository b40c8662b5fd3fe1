"""The op_name and source of every instruction of an HLO module, its own or inherited.

An instruction that only moves data, such as a collective or a copy, was often inserted by the compiler and
has no op_name or source line. It inherits them from the nearest producer along its operands that has
them; if there is none, as for parameters, from the nearest user of its result. An instruction that still has
none, whether it moves or computes, inherits them from the innermost instruction around it that has them: the
conditional, while or fusion whose computation it is part of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.optimizers import is_optimizer_file
from thence.model.columns import row_numbers
from thence.model.hlo import Frame
from thence.model.intervals import NO_ROW, chain_to

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from thence.model.arrays import Int64, Mask
    from thence.model.hlo import HloModule
    from thence.model.own_code import OwnCode


_COLLECTIVES = """
all-gather all-gather-done all-gather-start all-reduce all-reduce-done all-reduce-start all-to-all
collective-broadcast collective-permute collective-permute-done collective-permute-start
ragged-all-to-all recv recv-done reduce-scatter send send-done
"""
_MOVERS = """
async-done async-start async-update bitcast concatenate copy copy-done copy-start dynamic-slice
dynamic-update-slice get-tuple-element opt-barrier pad parameter reshape slice transpose tuple
"""
_MOVING = (*_COLLECTIVES.split(), *_MOVERS.split())
_WRAPPERS = ("async-start", "call", "fusion")
_AROUND = (*_WRAPPERS, "conditional", "while")
_ROUNDS = 64  # operands followed upwards or users downwards, one step each round
_NESTED = 4  # wrappers in wrappers; XLA creates two

_RULES = ("hlo_instruction", "hlo_inside", "hlo_moved", "hlo_user", "hlo_around")
_INSIDE, _MOVED, _USER, _ENCLOSING = range(1, 5)


def origins(module: HloModule, own: OwnCode) -> pl.DataFrame:
    """Op_name and source of each instruction, in the module's order.

    Args:
        own: which files are the user's own code: the source is the innermost line of these files in the stack, or
            the innermost line if there is none.

    Returns:
        columns op_name, op_name_rule, frame (number in ``module.frames`` of the innermost frame, 0: none),
        source (``file.py:12 function``) and source_rule; where there is no place, the rule column has the reason.
    """
    table = module.instructions
    links = _Links(module)
    named = table["op_name"].is_not_null().to_numpy()
    # An argument of the program has its name as op_name, but no source line.
    placed = (table["frame"] > 0).to_numpy()
    name_from, name_rule = links.nearest(named)
    frame_from, frame_rule = links.nearest(placed)
    op_name = table["op_name"].gather(pl.Series(name_from))
    frame = table["frame"].gather(pl.Series(frame_from))
    written = source_frames(module, own)
    known = frame.is_between(1, written.height)  # 0 is none
    row = (frame - 1).set(~known.fill_null(value=False), None).cast(pl.UInt32)
    source = written["source"].gather(row)
    source_rule = _rules(frame_rule, source, "no_source")
    of_library = (~written["own"].gather(row) & source.is_not_null()).fill_null(value=False)
    library = pl.Series(["library_frame"]).new_from_index(0, len(source))
    return pl.DataFrame(
        {
            "op_name": op_name,
            "op_name_rule": _rules(name_rule, op_name, "no_op_name"),
            "frame": frame,
            "source": source,
            "source_rule": library.zip_with(of_library, source_rule),
        }
    )


def _rules(rule: NDArray[np.int8], place: pl.Series, reason: str) -> pl.Series:
    texts = pl.Series(_RULES, dtype=pl.String).gather(pl.Series(rule))
    return texts.zip_with(place.is_not_null(), pl.Series([reason]).new_from_index(0, len(place)))


class _Links:
    """Edges between instructions as row numbers: contained instructions, operands and users."""

    def __init__(self, module: HloModule) -> None:
        table = module.instructions.with_row_index("row")
        self.count = table.height
        self.moving = table["opcode"].is_in(_MOVING).to_numpy()
        row_of = table.select("id", pl.col("row").alias("other")).unique("id", keep="first")
        self.inner = self._inner(table, _WRAPPERS)
        self.edges = self._edges(table, row_of)
        self.held = table.join(self.inner, on="computation").select("caller", "row", "is_root", "opcode")
        self.moving |= self._only_moves()
        self.around = self._around(table)

    def _edges(self, table: pl.DataFrame, row_of: pl.DataFrame) -> pl.DataFrame:
        """Edges (row, other): operands, and for a parameter the argument of the caller."""
        operands = (
            table.select("row", operand=pl.col("operands"))
            .filter(pl.col("operand").list.len() > 0)
            .explode("operand")
            .with_columns(position=pl.int_range(pl.len()).over("row"))
            .join(row_of, left_on="operand", right_on="id")
            .select("row", "position", "other")
        )
        given = (
            table.filter(pl.col("parameter").is_not_null())
            .join(self.inner, on="computation")
            .join(operands, left_on=["caller", "parameter"], right_on=["row", "position"])
            .select("row", "other")
        )
        return pl.concat([operands.select("row", "other"), given])

    def _inner(self, table: pl.DataFrame, opcodes: tuple[str, ...]) -> pl.DataFrame:
        """Pairs (caller row, computation) for computations that run as part of an instruction of these opcodes."""
        wraps = table.filter(pl.col("opcode").is_in(opcodes) & (pl.col("called").list.len() > 0))
        return (
            wraps.select(pl.col("row").alias("caller"), pl.col("called").alias("computation"))
            .explode("computation")
            .unique("computation", keep="first", maintain_order=True)
        )

    def _around(self, table: pl.DataFrame) -> Int64:
        """The row of the instruction around each one, -1 for those of the entry computation."""
        callers = self._inner(table, _AROUND)
        rows = table.select("computation").join(callers, on="computation", how="left", maintain_order="left")["caller"]
        return row_numbers(rows)

    def _only_moves(self) -> Mask:
        """Fusions and calls that contain no instruction that computes."""
        moves = pl.col("opcode").is_in([*_MOVING, "constant"])
        rows = (
            self.held.with_columns(moves=moves).group_by("caller").agg(pl.col("moves").all()).filter("moves")["caller"]
        )
        result = np.zeros(self.count, np.bool_)
        result[rows.to_numpy()] = True
        return result

    def nearest(self, has: Mask) -> tuple[Int64, NDArray[np.int8]]:
        """The row that each instruction takes its place from, and the number of the rule."""
        origin = np.where(has, np.arange(self.count), -1)
        rule = np.zeros(self.count, np.int8)
        self._from_inside(origin, rule)
        self._spread(origin, rule, "row", _MOVED)
        self._spread(origin, rule, "other", _USER)
        self._from_around(origin, rule)
        return np.where(origin < 0, np.arange(self.count), origin), rule

    def _from_around(self, origin: Int64, rule: NDArray[np.int8]) -> None:
        """Instructions without a place inherit that of the innermost instruction around them that has one."""
        placed = (origin >= 0) & (rule != _ENCLOSING)
        outer = self.around.copy()
        for _ in range(_ROUNDS):
            climbing = (origin < 0) & (outer >= 0)
            if not climbing.any():
                return
            reached = climbing & placed[outer]
            origin[reached] = origin[outer[reached]]
            rule[reached] = _ENCLOSING
            outer[climbing] = self.around[outer[climbing]]

    def _from_inside(self, origin: Int64, rule: NDArray[np.int8]) -> None:
        """A wrapper without a place inherits that of its root, or of the last instruction with one."""
        for _ in range(_NESTED):
            has = pl.Series(origin >= 0)
            contents = self.held.filter(has.gather(self.held["row"]) & ~has.gather(self.held["caller"]))
            if contents.is_empty():
                return
            chosen = contents.sort("is_root", "row").unique("caller", keep="last")
            caller = chosen["caller"].to_numpy()
            origin[caller] = origin[chosen["row"].to_numpy()]
            rule[caller] = _INSIDE

    def _spread(self, origin: Int64, rule: NDArray[np.int8], to: str, number: int) -> None:
        """Propagates places along the edges to instructions that only move data."""
        target = self.edges[to].to_numpy()
        source = self.edges["other" if to == "row" else "row"].to_numpy()
        for _ in range(_ROUNDS):
            ready = (origin[target] < 0) & self.moving[target] & (origin[source] >= 0)
            edges = np.flatnonzero(ready)[::-1]  # of several, the first operand wins: it is written last
            if not len(edges):
                return
            origin[target[edges]] = origin[source[edges]]
            rule[target[edges]] = number


# ---- Frames of the module's stacks


def source_frames(module: HloModule, own: OwnCode) -> pl.DataFrame:
    """The source place of each stack of a module.

    Returns:
        one row per frame, in the order of ``module.frames``: ``shown``, number of the innermost frame of the
        user's own code in the stack that ends in this frame, else of the innermost frame with a file, else 0;
        ``source`` (as `Frame.place`) of that frame, null if there is none; ``own``, whether it is the user's.
    """
    by_user = _nearest(module, frames_with_file(module, own))
    by_name = _nearest(module, frames_with_file(module, bool))
    shown = np.where(by_user == NO_ROW, by_name, by_user)
    row = pl.Series(shown).replace(NO_ROW, None).cast(pl.UInt32)
    source = frame_places(module).gather(row).cast(pl.String)
    return pl.DataFrame({"shown": shown + 1, "source": source, "own": by_user != NO_ROW})


def frame_places(module: HloModule) -> pl.Series:
    """Each frame of a module as a place (`Frame.place`), Categorical."""
    columns = ["file", "line", "column", "function"]
    places = [Frame(*row).place for row in module.frames.select(columns).iter_rows()]
    return pl.Series(places, dtype=pl.Categorical())


def frames_in_optimizers(module: HloModule) -> Mask:
    """Which stacks hold a frame of a library's optimizers, by number of their innermost frame; False for 0."""
    inside: Mask = _nearest(module, frames_with_file(module, is_optimizer_file)) != NO_ROW
    return np.append([False], inside)


def frames_with_file(module: HloModule, wanted: Callable[[str], bool]) -> Mask:
    """Which frames have a file for which ``wanted`` returns true."""
    files = module.frames["file"]
    chosen = [file for file in files.unique() if wanted(file or "")]
    return files.is_in(pl.Series(chosen, dtype=pl.Categorical()).implode()).fill_null(value=False).to_numpy()


def _nearest(module: HloModule, wanted: Mask) -> Int64:
    """Row of the innermost wanted frame in the stack that ends in each frame, `NO_ROW` without one."""
    parent = module.frames["parent"].cast(pl.Int64).to_numpy() - 1
    return chain_to(parent, np.arange(len(parent)), wanted)
