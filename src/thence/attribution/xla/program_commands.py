"""The GPU commands (thunks) of an XLA program in schedule order, and the numbers of the nodes that they add to a graph.

XLA turns each scheduled instruction into one command (a thunk), except those that only name a value:
parameters, constants, tuples and bitcasts (xla/service/gpu/thunk_emitter.cc). XLA's own kernels are named
after the instruction, with ``_`` in place of other characters than letters and digits; fusions that compute the
same share the kernel, and the name, of one of them (KernelReuseCache, xla/service/gpu/kernel_reuse_cache.cc).

XLA adds nodes to a CUDA graph command by command, and CUPTI numbers them in the lower half of their id: first
the nodes of the graph itself in the order in which they were created, then, depth first and in the same
order, the nodes inside each of them. One command adds

    a kernel or a copy       1 node
    a conditional            for each 8 branches, a kernel that chooses among them (set_case_condition), and
                             for each branch, 1 node that holds the commands of the branch
    a while in the graph     the commands of its condition, a kernel that decides (set_while_condition), and
                             1 node that holds the commands of body and condition, and such a kernel
    a captured call          1 node that holds what the library launched (a child graph)
    an asynchronous copy     from or to a slice: 1 node that holds the copy
    a sort                   several kernels and copies
    the end of an asynchronous command, or a copy of no bytes: none

XLA implements a conditional with a predicate like one with an index, where false is 0, but the HLO lists the
branch for true first. So the branches of a predicate are created in reverse order, those of an index in order.
(xla/backends/gpu/runtime/command_buffer_cmd.cc, cuda_command_buffer.cc)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.errors import ThenceError
from thence.model.columns import values_or

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from thence.model.arrays import Int64, Mask
    from thence.model.hlo import HloModule


# ---- Commands in schedule order


_NAMING_ONLY = """
add-dependency after-all bitcast constant domain get-tuple-element opt-barrier parameter tuple
""".split()  # noqa: SIM905 - a list of words reads better
_NESTING = ("async-start", "call", "conditional", "while")
_MOVING = """
bitcast broadcast concatenate constant copy dynamic-slice dynamic-update-slice
get-tuple-element iota pad parameter partition-id replica-id reshape slice transpose tuple
""".split()  # noqa: SIM905 - as above
_SCALAR_BYTES = 8  # such as the position at which data are read or written


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
        result_bytes=values_or(commands["result_bytes"], -1),
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


# ---- Numbers of nodes


_BRANCHES = 8  # the most among which one kernel chooses (kBranchBatchSize)
_MAX_SLOTS = 100_000  # of one graph: a damaged module may claim any number
_MAX_DEPTH = 50  # of calls of computations: those of a damaged module may form a cycle


class TooManyNodes(ThenceError):
    """A plan that no graph can have, because the computations of a damaged module call each other in a cycle."""


class Role(IntEnum):
    """What the node of a slot is; a slot can stand for several nodes."""

    LEAF = 0
    """the kernel or copy of a command"""
    CHOICE = 1
    """the kernel that chooses a branch or decides on another iteration of a loop"""
    HOLDER = 2
    """a node that only contains other nodes and never has an activity of its own"""
    CALL = 3
    """a custom call or custom fusion: its kernel, or a holder"""
    SEVERAL = 4
    """any number of kernels and copies of one command, possibly none"""
    BEFORE = 5
    """memcpys and memsets at the beginning of a library call, possibly none"""
    MAIN = 6
    """the main kernel of a library call"""
    AFTER = 7
    """kernels that combine the parts of a matrix product, possibly none"""
    LAUNCHED = 8
    """one launch of a captured call, if the recording shows how many there are"""


MANY = (Role.SEVERAL, Role.BEFORE, Role.AFTER)
"""Roles of slots with any number of nodes; a slot of any other role is exactly one node."""


@dataclass(frozen=True)
class Command:
    """A command as XLA records it.

    Attributes:
        number: of the command in the schedule.
        bodies: commands inside the nodes of a conditional, in the order of creation; condition and body of a while.
        branches: number of nodes for the branches of a conditional, empty ones included; 1 for a while, else 0.
        launches: number of API calls that were captured while it was recorded; 0 if none are known.
        decides: whether it is the kernel at the end of a loop's body that decides on another iteration.
    """

    number: int
    bodies: tuple[tuple[Command, ...], ...] = ()
    branches: int = 0
    launches: int = 0
    decides: bool = False


@dataclass(frozen=True)
class Level:
    """A sequence of commands that run all or not at all: the graph itself, or a branch.

    Attributes:
        parent: number of the level that holds it; -1 for the graph itself.
        conditional: command that decides whether it runs; -1 for the graph itself.
        loops: whether it is the body of a while.
    """

    parent: int
    conditional: int
    loops: bool = False


@dataclass(frozen=True)
class Slots:
    """The slots of a graph's nodes, in the order of the node numbers.

    Attributes:
        command: for each slot, the number of its command in the schedule.
        role: for each slot, a `Role`.
        level: for each slot, a position in ``levels``.
        levels: of the graph.
    """

    command: Int64
    role: Int64
    level: Int64
    levels: tuple[Level, ...]

    @property
    def exact(self) -> bool:
        """Whether every slot is one number, so that slot n is node n."""
        return not self.is_(*MANY).any()

    def is_(self, *roles: Role) -> Mask:
        """Whether each slot has one of these roles; for so few roles, numpy.isin takes fifty times as long."""
        result: Mask = self.role == roles[0]
        for role in roles[1:]:
            result |= self.role == role
        return result


def planned(schedule: Schedule, numbers: Sequence[int]) -> tuple[Command, ...]:
    """The commands that XLA records for a part of a program's schedule, with their bodies.

    Args:
        numbers: commands of one computation, in order.

    Raises:
        TooManyNodes: the module is damaged.
    """
    return _Planning(schedule).commands(numbers, 0)


class _Planning:
    """Plans each computation once, however often a module calls it."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._bodies: dict[int, tuple[Command, ...]] = {}

    def commands(self, numbers: Sequence[int], depth: int) -> tuple[Command, ...]:
        """The commands of a computation; depth: of the calls that led to it."""
        if depth > _MAX_DEPTH:
            raise TooManyNodes("the computations of an HLO module call each other in a cycle")
        schedule = self._schedule
        commands: list[Command] = []
        for number in numbers:
            opcode, called = schedule.opcodes[number], schedule.called[number]
            if opcode in ("conditional", "while"):
                # The proto of a while lists the body first.
                backwards = opcode == "while" or schedule.by_flag[number]
                order = called[::-1] if backwards else called
                bodies = tuple([self._body(computation, depth) for computation in order])
                branches = 1 if opcode == "while" else len(order)
                commands.append(Command(number, bodies, branches))
            elif opcode in ("async-start", "call") and called:
                for computation in called:
                    commands += self._body(computation, depth)
            elif not _adds_nothing(schedule, number):
                commands.append(Command(number))
            if len(commands) > _MAX_SLOTS:
                raise _too_many()
        return tuple(commands)

    def _body(self, computation: int, depth: int) -> tuple[Command, ...]:
        if computation not in self._bodies:
            numbers = self._schedule.bodies.get(computation, ())
            self._bodies[computation] = self.commands(numbers, depth + 1)
        return self._bodies[computation]


def _too_many() -> TooManyNodes:
    return TooManyNodes("the commands of an HLO module have more nodes than any CUDA graph")


def _adds_nothing(schedule: Schedule, number: int) -> bool:
    opcode = schedule.opcodes[number]
    return opcode.endswith("-done") or (opcode == "copy" and schedule.result_bytes[number] == 0)


def slots_of(schedule: Schedule, commands: Sequence[Command]) -> Slots:
    """The slots of a graph that consists of these commands.

    Raises:
        TooManyNodes: there are more than any graph has.
    """
    numbering = _Numbering(schedule)
    numbering.add(commands, 0)
    table = np.array(numbering.rows, np.int64).reshape(-1, 3)
    return Slots(table[:, 0], table[:, 1], table[:, 2], tuple(numbering.levels))


class _Numbering:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.rows: list[tuple[int, Role, int]] = []
        self.levels = [Level(-1, -1)]

    def add(self, commands: Sequence[Command], level: int) -> None:
        """Adds the slots of one sequence of commands, and then those of the contents of its nodes."""
        inside: list[tuple[Sequence[Command] | Sequence[Role], int, int]] = []
        self._sequence(commands, level, inside)
        for contents, number, of_level in inside:
            roles = [(number, role, of_level) for role in contents if isinstance(role, Role)]
            self.rows += roles
            if not roles:
                self.add([c for c in contents if isinstance(c, Command)], of_level)

    def _sequence(
        self, commands: Sequence[Command], level: int, inside: list[tuple[Sequence[Command] | Sequence[Role], int, int]]
    ) -> None:
        for command in commands:
            if command.branches and self.schedule.opcodes[command.number] == "while":
                self._loop(command, level, inside)
            elif command.branches:
                self._conditional(command, level, inside)
            else:
                role, held = _roles(self.schedule, command)
                self.rows.append((command.number, role, level))
                if held:
                    inside.append((held, command.number, level))
            if len(self.rows) > _MAX_SLOTS:
                raise _too_many()

    def _conditional(
        self, command: Command, level: int, inside: list[tuple[Sequence[Command] | Sequence[Role], int, int]]
    ) -> None:
        for first in range(0, command.branches, _BRANCHES):
            self.rows.append((command.number, Role.CHOICE, level))
            held = min(_BRANCHES, command.branches - first)
            self.rows += [(command.number, Role.HOLDER, level)] * held
        for body in command.bodies:
            self.levels.append(Level(level, command.number))
            inside.append((body, command.number, len(self.levels) - 1))

    def _loop(
        self, command: Command, level: int, inside: list[tuple[Sequence[Command] | Sequence[Role], int, int]]
    ) -> None:
        condition, body = (*command.bodies, (), ())[:2]
        self._sequence(condition, level, inside)
        self.rows.append((command.number, Role.CHOICE, level))
        self.rows.append((command.number, Role.HOLDER, level))
        self.levels.append(Level(level, command.number, loops=True))
        inner = len(self.levels) - 1
        again = Command(command.number, decides=True)
        inside.append(((*body, *condition, again), command.number, inner))


def _roles(schedule: Schedule, command: Command) -> tuple[Role, Sequence[Role]]:
    """The role of a command's own node, and the roles of the nodes inside it."""
    if command.decides:
        return Role.CHOICE, ()
    if command.launches:
        return Role.HOLDER, [Role.LAUNCHED] * command.launches
    number = command.number
    if schedule.sorts[number]:
        return Role.SEVERAL, ()
    if schedule.targets[number].startswith(("__cublas", "__cudnn")):
        return Role.HOLDER, (Role.BEFORE, Role.MAIN, Role.AFTER)
    if schedule.opcodes[number] == "custom-call" or schedule.custom[number]:
        return Role.CALL, (Role.LEAF if schedule.sliced[number] else Role.SEVERAL,)
    return Role.LEAF, ()
