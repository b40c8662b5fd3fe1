"""The commands that XLA recorded into each command buffer, from its NVTX ranges around them during recording.

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
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.xla.node_numbers import Command
from thence.model.intervals import NO_ROW, chain_to

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.attribution.xla.schedules import Schedule
    from thence.model.arrays import Int64, Mask
    from thence.model.tables import Tables

_THUNK = r"^(?:TSL:)?Thunk:#(?:[^#]*,)?hlo_op=([^#,]+)"
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
    names = _names(host["name"])
    parent = host["parent"].cast(pl.Int64).fill_null(NO_ROW).to_numpy()
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


def _names(names: pl.Series) -> pl.DataFrame:
    """Classifies host rows by their names; each distinct name is parsed once.

    Returns:
        columns op (of thunks that record or launch one command, else null), captured and instantiates (calls),
        module and thunk (ranges of XLA).
    """
    text = pl.col("name").cast(pl.String)
    op = text.str.extract(_THUNK)
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
