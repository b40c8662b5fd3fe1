"""The GPU commands (thunks) of an XLA program in schedule order, and the kernels that may run each.

XLA turns each scheduled instruction into one command (a thunk), except those that only name a value:
parameters, constants, tuples and bitcasts (xla/service/gpu/thunk_emitter.cc). XLA's own kernels are named
after the instruction, with ``_`` in place of other characters than letters and digits; fusions that compute the
same share the kernel, and the name, of one of them (KernelReuseCache, xla/service/gpu/kernel_reuse_cache.cc).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.model.arrays import Int64, Mask
    from thence.model.hlo import HloModule

_NAMING_ONLY = """
add-dependency after-all bitcast constant domain get-tuple-element opt-barrier parameter tuple
""".split()  # noqa: SIM905 - a list of words reads better
_NESTING = ("async-start", "call", "conditional", "while")
_MOVING = """
bitcast broadcast concatenate constant copy dynamic-slice dynamic-update-slice
get-tuple-element iota pad parameter partition-id replica-id reshape slice transpose tuple
""".split()  # noqa: SIM905 - as above
_SCALAR_BYTES = 8


@dataclass(frozen=True)
class Schedule:
    """The commands of a program in the order of its schedule.

    Work outside of command buffers separates them: none contains commands from before and after it.

    Attributes:
        names: HLO instruction of each command.
        opcodes: of each.
        targets: custom call target of each, or an empty string.
        copies: whether it only moves or fills memory, which a copy or set of the driver can do.
        result_bytes: of each, tuples summed; -1 where unknown.
        called: ids of the computations that each calls.
        by_flag: whether it is a conditional with a predicate, whose branches are true and false.
        sorts: whether it sorts, which takes several kernels and copies.
        custom: whether it is a fusion that XLA runs as a library call or a copy, with a slice that it computes
            (`_custom`).
        sliced: whether it is an asynchronous copy from or to a slice, which XLA puts into a child graph of its own.
        entry: id of the entry computation.
        bodies: by id of a computation, its commands in the order of its schedule.
        number_of: number of the command of each name.
        body_of: id of the computation of each command.
        place_of: position of each in its computation, counted in commands.
        inputs: columns command and input: one row for each command and other command whose result it reads.
        classes: kernel name to the classes of commands that a kernel of this name may run.
        members: the commands of each class.
    """

    names: list[str]
    opcodes: list[str]
    targets: list[str]
    copies: Mask
    result_bytes: Int64
    called: list[list[int]]
    by_flag: Mask
    sorts: Mask
    custom: Mask
    sliced: Mask
    entry: int
    bodies: dict[int, list[int]]
    number_of: dict[str, int]
    body_of: list[int]
    place_of: list[int]
    inputs: pl.DataFrame
    classes: dict[str, list[int]]
    members: dict[int, Int64]

    def run_by(self, kernel: str) -> Mask:
        """For each command, whether a kernel of this name may run it."""
        fits = np.zeros(len(self.names), np.bool_)
        for number in self.classes.get(kernel, ()):
            fits[self.members[number]] = True
        return fits


def schedule_of(module: HloModule) -> Schedule:
    """The commands of a program; none where its HLO holds no schedule."""
    table = module.instructions.with_row_index("row")
    rows = _commands(module, table)
    order = pl.DataFrame({"row": rows}, schema={"row": pl.UInt32}).with_row_index("command")
    commands = order.join(table, on="row", how="left", maintain_order="left")
    inside = _inside(table)
    fused = commands.with_columns(inner=pl.when(pl.col("opcode") == "fusion").then(pl.col("called").list.first())).join(
        inside, left_on="inner", right_on="computation", how="left", maintain_order="left"
    )
    row_text = pl.concat_str(pl.lit("row "), pl.col("row").cast(pl.String))
    same = pl.format("{} {} {} {}", pl.col("fusion_kind").fill_null(""), "work", "result_bytes", "operand_bytes")
    classed = fused.select(
        "command",
        kernel=pl.col("name").str.replace_all(r"[^0-9A-Za-z_]", "_"),
        number=pl.coalesce(same, row_text).rank("dense").cast(pl.Int64),
        runs=~pl.col("opcode").is_in(_NESTING),
    ).filter("runs")
    names = classed.group_by("kernel").agg(pl.col("number").unique())
    members = classed.group_by("number").agg("command")
    moving = pl.coalesce("moves", pl.col("opcode").is_in(_MOVING))
    bodies = commands.group_by("computation", maintain_order=True).agg("command")
    custom, sliced = _custom(fused)
    return Schedule(
        names=commands["name"].to_list(),
        opcodes=commands["opcode"].to_list(),
        result_bytes=commands["result_bytes"].fill_null(-1).to_numpy(),
        called=commands["called"].fill_null([]).to_list(),
        by_flag=_by_flag(table, commands),
        sorts=fused.select(sorts=(pl.col("opcode") == "sort") | pl.col("sorts").fill_null(value=False))[
            "sorts"
        ].to_numpy(),
        custom=custom | sliced,
        sliced=sliced,
        entry=module.entry,
        bodies=dict(bodies.iter_rows()),
        number_of=dict(commands.unique("name", keep="first").select("name", "command").iter_rows()),
        body_of=commands["computation"].to_list(),
        place_of=commands.select(place=pl.int_range(pl.len()).over("computation"))["place"].to_list(),
        targets=commands["custom_call_target"].fill_null("").to_list(),
        copies=fused.select(moving.fill_null(value=False)).to_series().to_numpy() | sliced,
        inputs=_inputs(table, order),
        classes=dict(names.iter_rows()),
        members={n: np.array(m, np.int64) for n, m in members.iter_rows()},
    )


def _commands(module: HloModule, table: pl.DataFrame) -> list[int]:
    """Rows of the instructions that are commands; a container is followed by the commands inside it."""
    scheduled = table.filter(pl.col("step").is_not_null() & ~pl.col("opcode").is_in(_NAMING_ONLY)).sort(
        "computation", "step"
    )
    bodies: dict[int, list[tuple[int, str, list[int]]]] = {}
    columns = scheduled.select("computation", "row", "opcode", "called")
    for computation, row, opcode, called in columns.iter_rows():
        bodies.setdefault(computation, []).append((row, opcode, called))
    rows: list[int] = []
    seen = {module.entry}
    open_bodies: list[Iterator[tuple[int, str, list[int]]]] = [iter(bodies.get(module.entry, ()))]
    while open_bodies:
        following = next(open_bodies[-1], None)
        if following is None:
            open_bodies.pop()
            continue
        row, opcode, called = following
        rows.append(row)
        if opcode in _NESTING:
            new = [c for c in called if c not in seen]
            seen.update(new)
            open_bodies += [iter(bodies.get(c, ())) for c in reversed(new)]
    return rows


def _custom(fused: pl.DataFrame) -> tuple[Mask, Mask]:
    """Which commands are kCustom fusions that run as a library call or a copy, and which copy slices asynchronously.

    XLA makes a DynamicSliceFusion thunk of a copy from or to a slice in an asynchronous computation, such as the
    copies of the values that a scan reads and stacks (xla/service/gpu/thunk_emitter.cc).

    Args:
        fused: the commands, with the columns of `_inside` for the computation that they fuse.
    """
    started = fused.filter(pl.col("opcode") == "async-start")["called"].explode().drop_nulls()
    sliced = pl.col("computation").is_in(started.implode()) & pl.col("slices") & pl.col("places")
    by_kind = (pl.col("fusion_kind") == "kCustom") & (pl.col("moves") | pl.col("calls"))
    flags = fused.select(custom=by_kind.fill_null(value=False), sliced=sliced.fill_null(value=False))
    return flags["custom"].to_numpy(), flags["sliced"].to_numpy()


def _by_flag(table: pl.DataFrame, commands: pl.DataFrame) -> Mask:
    """Which commands are conditionals whose first operand is a predicate, of one byte; an index has four."""
    sizes = table.select(pl.col("id").alias("chosen"), chosen_bytes="result_bytes").unique("chosen", keep="first")
    conditionals = commands.select("opcode", chosen=pl.col("operands").list.first()).join(
        sizes, on="chosen", how="left", maintain_order="left"
    )
    flag = (pl.col("opcode") == "conditional") & (pl.col("chosen_bytes") == 1).fill_null(value=False)
    return conditionals.select(flag=flag).to_series().to_numpy()


def _inside(table: pl.DataFrame) -> pl.DataFrame:
    """For each computation: ``work``, equal for equal ones; whether it only moves data, sorts, slices, or calls.

    ``places`` is like ``moves``, but the computation may also compute scalars, as the position of the data: the
    gradient of a scan does so, because it reads from the end.
    """
    moving = pl.col("opcode").is_in(_MOVING)
    features = pl.struct("opcode", "result_bytes", "operand_bytes", "own_flops")
    return table.group_by("computation").agg(
        work=features.hash().sort().implode().hash().first(),
        moves=moving.all(),
        places=(moving | (pl.col("result_bytes") <= _SCALAR_BYTES)).all(),
        sorts=(pl.col("opcode") == "sort").any(),
        slices=pl.col("opcode").is_in(["dynamic-slice", "dynamic-update-slice"]).any(),
        calls=(pl.col("opcode") == "custom-call").any(),
    )


def _inputs(table: pl.DataFrame, order: pl.DataFrame) -> pl.DataFrame:
    """Data dependencies between commands, followed through instructions that only name a value."""
    row_of = table.select(pl.col("row").alias("source"), pl.col("id").alias("operands"))
    edges = (
        table.select("row", "operands")
        .explode("operands", empty_as_null=True)
        .drop_nulls()
        .join(row_of.unique("operands", keep="first"), on="operands")
        .select("row", "source")
    )
    commands = order.select("row")
    inputs = []
    open_edges = edges.join(commands, on="row", how="semi")
    for _ in range(table.height):
        inputs.append(open_edges.join(commands, left_on="source", right_on="row", how="semi"))
        through_names = open_edges.join(commands, left_on="source", right_on="row", how="anti")
        open_edges = (
            through_names.rename({"source": "via"})
            .join(edges.rename({"row": "via"}), on="via")
            .select("row", "source")
            .unique()
        )
        if open_edges.is_empty():
            break
    positions = order.select("row", "command")
    return (
        pl.concat(inputs)
        .unique()
        .join(positions, on="row")
        .join(positions.rename({"row": "source", "command": "input"}), on="source")
        .select(pl.col("command", "input").cast(pl.Int64))
    )
