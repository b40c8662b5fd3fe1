"""Finds where in the schedule a command buffer begins, by the thunk number in its name.

XLA numbers the thunks of a program while it emits them: those of a while after the while, its condition before
its body; those of the branches before their conditional (xla/service/gpu/thunk_emitter.cc). The thunk that
launches a graph is called command_buffer_N, where N is the number of the first thunk in the graph
(xla/backends/gpu/transforms/command_buffer_conversion_pass.cc). A sort, and a fusion that XLA runs as a library
call or a copy, take several numbers: after one of these, the number of a thunk is at least the number counted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.xla.node_matching import Verdict, verdicts
from thence.attribution.xla.node_numbers import Level, Role, Slots, TooManyNodes, planned, slots_of
from thence.model.intervals import NO_ROW, chain_to

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from thence.attribution.xla.node_matching import Nodes
    from thence.attribution.xla.schedules import Schedule
    from thence.model.tables import Tables

COMMAND_BUFFER = r"^(?:(?:TSL:)?Thunk:#(?:[^#]*,)?hlo_op=)?command_buffer_(\d{1,9})(?:[,#]|$)"
"""Host range of the thunk that launches a graph; the group is the number of its first thunk."""

_MAX_DEPTH = 50


def thunk_numbers(tables: Tables, launches: pl.DataFrame) -> pl.DataFrame:
    """The thunk that launched each graph.

    Args:
        launches: columns rank, device, graph and launch (host row), one or more rows per graph.

    Returns:
        The launches with thunk (host row) and first (number of the graph's first thunk); null where unknown.
    """
    names = tables.host["name"]
    first_of_name = (
        names.unique()
        .drop_nulls()
        .to_frame("name")
        .with_columns(first=pl.col("name").cast(pl.String).str.extract(COMMAND_BUFFER).cast(pl.Int64))
    )
    first = names.to_frame("name").join(first_of_name, on="name", how="left", maintain_order="left")["first"]
    thunk = chain_to(
        tables.host["parent"].cast(pl.Int64).fill_null(NO_ROW).to_numpy(),
        launches["launch"].to_numpy(),
        first.is_not_null().to_numpy(),
    )
    row = pl.Series("thunk", thunk, pl.Int64).replace(NO_ROW, None)
    return launches.with_columns(row, first.gather(row.cast(pl.UInt32)).alias("first"))


def possible_slots(schedule: Schedule, first: int, alone: AbstractSet[int], nodes: Nodes) -> Iterator[Slots]:
    """The slots of every graph that begins with the thunk of this number and may have these nodes.

    Args:
        first: number of the graph's first thunk.
        alone: commands that ran outside of graphs, so that no graph contains them.

    Raises:
        TooManyNodes: the module is damaged.
    """
    starts = _with_number(schedule, first)
    search = _Search(schedule, nodes) if starts else None
    for command in starts:
        body = schedule.bodies[schedule.body_of[command]]
        following = body[schedule.place_of[command] :]
        for length in search.lengths(following, alone) if search else ():
            yield slots_of(schedule, planned(schedule, following[:length]))


class _Search:
    """Searches for lengths that a graph can have, without creating the slots for each length."""

    def __init__(self, schedule: Schedule, nodes: Nodes) -> None:
        self.schedule = schedule
        self.nodes = nodes
        self.begun = len(np.unique(nodes.number[nodes.begun]))
        count = len(schedule.names)
        zeros = np.zeros(count, np.int64)
        leaves = Slots(np.arange(count), np.full(count, Role.LEAF), zeros, (Level(-1, -1),))
        table, of_entry = verdicts(schedule, leaves, nodes)
        self._fits = table != Verdict.CONTRADICTS
        self._activity = dict(zip(nodes.number.tolist(), of_entry.tolist(), strict=True))
        self._parts: dict[int, _Part] = {}

    def lengths(self, following: Sequence[int], alone: AbstractSet[int]) -> Iterator[int]:
        """How many of these commands the graph can contain, the fewest first.

        Every node that is certain to run must have an activity. Two plain commands in a row that the kernels at
        their node numbers contradict rule out all further lengths.
        """
        needed = slots = wrong = 0
        place: int | None = 0  # number of the next command's first node, while that is known
        exact = True
        for length, command in enumerate(following, 1):
            if command in alone:
                return
            part = self._part(command)
            needed, slots, exact = needed + part.needed, slots + part.slots, exact and part.exact
            if place is not None and part.plain and place in self._activity:
                wrong = 0 if self._fits[self._activity[place], command] else wrong + 1
            if needed > self.begun or wrong > 1:
                return
            place = None if place is None or part.width is None else place + part.width
            if not exact or slots > self.nodes.last:
                yield length

    def _part(self, command: int) -> _Part:
        if command not in self._parts:
            slots = slots_of(self.schedule, planned(self.schedule, [command]))
            self._parts[command] = _Part.of(self.schedule, slots)
        return self._parts[command]


@dataclass(frozen=True)
class _Part:
    """What one command adds to a graph.

    Attributes:
        slots: number of all slots.
        needed: number of slots of the graph itself that must have an activity.
        exact: whether each slot is one node.
        plain: whether it is one kernel or copy.
        width: number of nodes of the graph itself, without those inside them; None if that is unknown.
    """

    slots: int
    needed: int
    exact: bool
    plain: bool
    width: int | None

    @classmethod
    def of(cls, schedule: Schedule, slots: Slots) -> _Part:
        own = slots.level == 0
        needed = own & slots.is_(Role.LEAF, Role.CHOICE, Role.MAIN)
        needed &= ~schedule.copies[slots.command] | (slots.role == Role.CHOICE)
        in_place = own & ~slots.is_(Role.BEFORE, Role.MAIN, Role.AFTER, Role.SEVERAL)
        in_place[1:] &= slots.role[:1] != Role.CALL  # nodes inside its node are numbered later
        several = bool((slots.role[:1] == Role.SEVERAL).any())
        return cls(
            slots=len(slots.command),
            needed=int(needed.sum()),
            exact=slots.exact,
            plain=slots.role.tolist() == [Role.LEAF],
            width=None if several else int(in_place.sum()),
        )


def _with_number(schedule: Schedule, number: int) -> list[int]:
    """Commands whose thunk may have this number, the likeliest first."""
    counted, certain_until = _counted(schedule)
    exactly = [command for command, n in counted if n == number]
    if exactly and number <= certain_until:
        return exactly
    return [command for command, n in reversed(counted) if certain_until < n <= number]


def _counted(schedule: Schedule) -> tuple[list[tuple[int, int]], int]:
    """Each command with the number of its thunk, and the number up to which this count is certain."""
    counted: list[tuple[int, int]] = []
    certain_until: list[int] = []

    def number(command: int) -> None:
        counted.append((command, len(counted) + 1))
        if schedule.sorts[command] or schedule.custom[command]:
            certain_until.append(len(counted))

    def count(computation: int, depth: int) -> None:
        if depth > _MAX_DEPTH or len(counted) > len(schedule.names):
            raise TooManyNodes("the computations of an HLO module call each other in a cycle")
        for command in schedule.bodies.get(computation, ()):
            opcode, called = schedule.opcodes[command], schedule.called[command]
            if opcode == "conditional":
                for branch in called:
                    count(branch, depth + 1)
                number(command)
            else:
                number(command)
                # The proto of a while lists its body first.
                inside = called[::-1] if opcode == "while" else called
                for inner in inside if opcode in ("while", "call", "async-start") else ():
                    count(inner, depth + 1)

    count(schedule.entry, 0)
    return counted, min(certain_until, default=len(counted))
