"""The numbering of the nodes of a command buffer: the commands that XLA records, as slots of node numbers.

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

from thence.errors import ThenceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.attribution.xla.schedules import Schedule
    from thence.model.arrays import Int64, Mask

_BRANCHES = 8  # the most among which one kernel chooses (kBranchBatchSize)
_MAX_SLOTS = 100_000
_MAX_DEPTH = 50


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
