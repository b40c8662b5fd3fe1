"""Which commands a command buffer has: from the ranges around them when it was created, or from its first thunk.

XLA opens a range around every command that it records into a CUDA graph (CommandExecutor::RecordCreate in
xla/backends/gpu/runtime/command_executor.cc); the ranges of a branch are inside that of their conditional. It
records a graph before its first launch: all graphs of a program when the program is first executed or, if they were
destroyed since, each inside the thunk that launches it. Nothing launched inside such a range runs: the calls were
captured, and each became a node of a child graph. Other thunks, such as those of collectives, may copy and set memory
while they are initialised, before graphs are created: those calls are not in the range of a thunk, but directly in
that of the program.

The ranges of several graphs follow one another. A new graph begins after a call that instantiates the previous
one, if the recording has these calls; a new graph also begins where the commands come from another computation, or
are not neighbours in the schedule. CUDA numbers executable graphs in the order in which they are instantiated.

Without these ranges, the number of a thunk shows where in the schedule a graph begins. XLA numbers the thunks of a
program while it emits them: those of a while after the while, its condition before its body; those of the branches
before their conditional (xla/service/gpu/thunk_emitter.cc). The thunk that launches a graph is called
command_buffer_N, where N is the number of the first thunk in the graph
(xla/backends/gpu/transforms/command_buffer_conversion_pass.cc). A sort, and a fusion that XLA runs as a library call
or a copy, take several numbers: after one of these, the number of a thunk is at least the number counted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.xla.node_matching import Verdict, verdicts
from thence.attribution.xla.program_commands import Command, Level, Role, Slots, TooManyNodes, planned, slots_of
from thence.model.columns import row_numbers
from thence.model.intervals import NO_ROW, chain_to

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from thence.attribution.xla.node_matching import Nodes
    from thence.attribution.xla.program_commands import Schedule
    from thence.model.arrays import Int64, Mask
    from thence.model.tables import Tables


# ---- XLA's ranges at the creation of a graph


_RECORDED_THUNK = r"^(?:TSL:)?Thunk:#(?:[^#]*,)?hlo_op=([^#,]+)"
MODULE = r"^(?:TSL:)?XlaModule:#"
_GRAPH_THUNK = r"^command_buffer(?:_\d+)?$"
_CAPTURED = r"^cu(?:da)?(?:Launch|Memcpy|Memset)"
_INSTANTIATE = "GraphInstantiate"


class Creation:
    """The ranges of one execution of a program, or of one thunk, in which graphs were created.

    Attributes:
        ranges: columns row, parent, op (null for API calls), name and start, sorted by start: thunks that
            launched nothing, calls that were captured inside them, and calls that instantiate a graph.
    """

    def __init__(self, ranges: pl.DataFrame) -> None:
        self.ranges = ranges
        rows = ranges.select("row", "parent", "op", "name").rows()
        self._of_row = {row: (op, name) for row, _, op, name in rows}
        self._inside: dict[int, list[int]] = {}
        self._top: list[int] = []
        for row, parent, _, _ in rows:
            inside = self._inside.setdefault(parent, []) if parent in self._of_row else self._top
            inside.append(row)

    def blocks(self, schedule: Schedule) -> list[tuple[Command, ...]]:
        """The commands of each graph, in the order of creation; ranges of other programs are ignored."""
        blocks: list[list[Command]] = [[]]
        starts = _starts(schedule)
        for row in self._top:
            op, name = self._of_row[row]
            if op is None and _INSTANTIATE in name:
                blocks.append([])
            recorded = self._recorded(row, schedule)
            if recorded and blocks[-1]:
                ends = blocks[-1][-1].number, recorded[0].number
                if not _neighbours(schedule, *(starts.get(number, number) for number in ends)):
                    blocks.append([])
            blocks[-1] += recorded
        return [tuple(block) for block in blocks if block]

    def _recorded(self, row: int, schedule: Schedule) -> list[Command]:
        """The command of a range, with the commands recorded and the number of calls captured inside it.

        A range that is neither a while nor a conditional, but contains commands, gives these commands instead.
        """
        op, _ = self._of_row[row]
        number = schedule.number_of.get(op or "")
        if number is None:
            return []
        inside = self._inside.get(row, [])
        nested = [command for kid in inside for command in self._recorded(kid, schedule)]
        opcode = schedule.opcodes[number]
        if opcode == "while":
            return [Command(number, _by_body(schedule, nested)[:2], 1)]
        if opcode == "conditional":
            return [Command(number, _by_body(schedule, nested), len(schedule.called[number]))]
        if nested:
            return nested
        calls = [name for kid in inside for thunk, name in [self._of_row[kid]] if thunk is None]
        return [Command(number, launches=sum(_INSTANTIATE not in name for name in calls))]


def _by_body(schedule: Schedule, commands: Sequence[Command]) -> tuple[tuple[Command, ...], ...]:
    """Groups consecutive commands of the same computation."""
    bodies = groupby(commands, key=lambda command: schedule.body_of[command.number])
    return tuple(tuple(body) for _, body in bodies)


def _starts(schedule: Schedule) -> dict[int, int]:
    """For each command in an asynchronous computation, the command that starts it."""
    return {
        command: start
        for start, opcode in enumerate(schedule.opcodes)
        if opcode == "async-start"
        for body in schedule.called[start]
        for command in schedule.bodies.get(body, ())
    }


def _neighbours(schedule: Schedule, previous: int, number: int) -> bool:
    """Whether one graph can contain both commands, one right after the other."""
    body = schedule.body_of[previous]
    if schedule.body_of[number] != body:
        return False
    place = schedule.place_of
    between = schedule.bodies[body][place[previous] + 1 : place[number]]
    return place[number] >= place[previous] and all(
        schedule.opcodes[c].endswith("-done") or schedule.result_bytes[c] == 0 for c in between
    )


def creations(tables: Tables, launches: Int64, wanted: Int64) -> dict[int, Creation]:
    """The ranges in which graphs were created, by the host row of the program or thunk around them.

    Args:
        launches: host rows that launched something that ran.
        wanted: host rows of program executions and of thunks that first launched a graph.
    """
    host = tables.host
    names = _classified_names(host["name"])
    parent = row_numbers(host["parent"])
    active = _with_ancestors(parent, launches[launches != NO_ROW])
    around = np.zeros(host.height, np.bool_)
    around[wanted[wanted != NO_ROW]] = True
    of_thunk = (names["op"].is_not_null()).to_numpy()
    call = (names["captured"] | names["instantiates"]).to_numpy()
    rows = np.flatnonzero((of_thunk | call) & ~active)
    context = chain_to(parent, parent[rows], around)
    # A foreign function opens ranges of its own, or the recorder opens ranges for lines; their calls are the thunk's.
    holds = around | names["thunk"].to_numpy()
    frame = pl.DataFrame(
        {
            "row": rows,
            "parent": chain_to(parent, parent[rows], holds),
            "context": context,
            "op": names["op"].gather(rows),
            "name": host["name"].cast(pl.String).gather(rows),
            "start": host["start"].gather(rows),
        }
    ).filter(pl.col("context") != NO_ROW)
    calls = np.flatnonzero(host["category"].is_in(["runtime", "driver"]).to_numpy() & active)
    holder = chain_to(parent, parent[calls], holds)
    modules = names["module"].to_numpy()
    # Calls directly in the range of a program are made while thunks are initialised.
    active[calls[(holder != NO_ROW) & modules[holder]]] = False
    first = _first_active(host, parent, active, around)
    frame = frame.join(first, on="context", how="left", maintain_order="left").filter(
        pl.col("start") < pl.col("first").fill_null(np.iinfo(np.int64).max)
    )
    parts = frame.sort("context", "start", "row").partition_by("context", maintain_order=True)
    return {int(part["context"][0]): Creation(part.drop("first", "context")) for part in parts}


def _classified_names(names: pl.Series) -> pl.DataFrame:
    """Classifies host rows by their names; each distinct name is parsed once.

    Returns:
        columns op (of thunks that record or launch one command, else null), captured and instantiates (calls),
        module and thunk (ranges of XLA).
    """
    text = pl.col("name").cast(pl.String)
    op = text.str.extract(_RECORDED_THUNK)
    classified = (
        names.unique()
        .drop_nulls()
        .to_frame("name")
        .with_columns(
            op=pl.when(~op.str.contains(_GRAPH_THUNK)).then(op),
            captured=text.str.contains(_CAPTURED) & ~text.str.contains("HostFunc"),
            instantiates=text.str.contains(_INSTANTIATE, literal=True),
            module=text.str.contains(MODULE),
            thunk=op.is_not_null(),
        )
    )
    return (
        names.to_frame("name")
        .join(classified, on="name", how="left", maintain_order="left")
        .with_columns(pl.col("captured", "instantiates", "module", "thunk").fill_null(value=False))
    )


def _with_ancestors(parent: Int64, rows: Int64) -> Mask:
    """A mask of the given rows and all their ancestors."""
    marked = np.zeros(len(parent), np.bool_)
    rows = np.unique(rows)
    while len(rows):
        marked[rows] = True
        up = parent[rows]
        up = np.unique(up[up != NO_ROW])
        rows = up[~marked[up]]
    return marked


def _first_active(host: pl.DataFrame, parent: Int64, active: Mask, around: Mask) -> pl.DataFrame:
    """For each program or thunk (context), when the first active range or call inside it began."""
    rows = np.flatnonzero(active)
    rows = rows[parent[rows] != NO_ROW]
    context = chain_to(parent, parent[rows], around)
    return (
        pl.DataFrame({"context": context, "start": host["start"].gather(rows)})
        .filter(pl.col("context") != NO_ROW)
        .group_by("context")
        .agg(pl.col("start").min().alias("first"))
    )


# ---- The number of the first thunk


COMMAND_BUFFER = r"^(?:(?:TSL:)?Thunk:#(?:[^#]*,)?hlo_op=)?command_buffer_(\d{1,9})(?:[,#]|$)"
"""Host range of the thunk that launches a graph; the group is the number of its first thunk."""

_MAX_DEPTH = 50  # of calls of computations: those of a damaged module may form a cycle


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
    thunk = chain_to(row_numbers(tables.host["parent"]), launches["launch"].to_numpy(), first.is_not_null().to_numpy())
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
