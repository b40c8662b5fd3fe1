"""Places command buffers in the schedule by the names of their kernels and the order of a program's graphs.

This is used for graphs whose creation was not recorded and whose thunk has no number, or one that does not fit. They
must be linear: node n is command n of a contiguous part of the schedule. A library call is one node with a child
graph, whose nodes are numbered after all other nodes, call by call.

The first command of a graph is found by kernel names, all of which must match, except that one in eleven may be a
name that no command has; only the node of such a kernel is left without a command. If several positions match, the
order of the program's graphs decides, if it leaves only one of them. The last command is unambiguous unless the last
nodes are copies, which could belong to a library call: they count as commands if otherwise nothing would have run
these commands.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.xla.node_kernels import AFTERWARDS, is_copy, is_library, library_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from thence.attribution.xla.schedules import Schedule

_NAMED_FOR_EACH = 10
"""How many kernels that fit by their name outweigh one whose name no command of the program has."""

NODES = {
    "graph": pl.UInt64,
    "number": pl.UInt64,
    "command": pl.Int64,
    "level": pl.Int64,
    "counted": pl.Boolean,
    "rule": pl.String,
    "detail": pl.String,
}
"""One row for each node: graph and number of the node; command of the schedule, null where it is not known;
level, as in `thence.attribution.xla.node_numbers`; counted, whether the node's number is that of its command;
rule, the code of how it was found or why it was not; detail, a sentence about the graph."""


def placed_by_order(rows: pl.DataFrame, schedule: Schedule) -> pl.DataFrame:
    """The nodes, in the columns of `NODES`, of the graphs of one program on one device.

    Args:
        rows: activities of the program on the device: graph, number, name, kind, hlo, program and start. Those
            with a graph and no hlo are placed; those with an hlo and no graph ran outside of graphs; others are
            not used.
        schedule: of the program.
    """
    inside = rows.filter(pl.col("graph").is_not_null() & pl.col("hlo").is_null())
    graphs = {graph.id: graph for graph in _graphs(inside)}
    executions = _executions(rows)
    fits = _ended({n: _fits(graph, schedule) for n, graph in graphs.items()}, executions, schedule)
    places = _places(executions, fits, schedule)
    nodes = [pl.DataFrame(schema=NODES)]
    for number, graph in graphs.items():
        place = places.get(number)
        if not schedule.names:
            nodes.append(_refused(graph, "command_buffer_no_schedule"))
        elif place is None:
            nodes.append(_refused(graph, *_reason(fits[number])))
        else:
            nodes.append(_instructions(graph, schedule, place, fits[number].length))
    return pl.concat(nodes)


@dataclass(frozen=True)
class _Graph:
    """The nodes of one executable graph that have recorded activities, ascending by number."""

    id: int
    numbers: NDArray[np.int64]
    names: tuple[str, ...]
    kinds: tuple[str, ...]

    def is_copy(self, i: int) -> bool:
        return is_copy(self.names[i], self.kinds[i])

    def is_library(self, i: int) -> bool:
        return not self.is_copy(i) and is_library(self.names[i])


def _graphs(inside: pl.DataFrame) -> Iterator[_Graph]:
    nodes = inside.drop_nulls("number").unique(["graph", "number", "name", "kind"])
    for frame in nodes.sort("graph", "number", "name").partition_by("graph", maintain_order=True):
        columns = frame.select("number", "name", "kind").to_dict()
        yield _Graph(
            int(frame["graph"][0]),
            columns["number"].cast(pl.Int64).to_numpy(),
            tuple(columns["name"]),
            tuple(columns["kind"]),
        )


@dataclass(frozen=True)
class _Fit:
    """Possible positions of a graph in the schedule.

    Attributes:
        places: commands that its node 0 may be.
        length: number of commands that it contains, if it fits.
        fitted: number of kernels that fit at the best place, even if others do not.
        own: number of kernels that had to fit.
    """

    places: NDArray[np.int64]
    length: int
    fitted: int
    own: int


def _fits(graph: _Graph, schedule: Schedule) -> list[_Fit]:
    """The fits of a graph, for every node number at which the nodes inside its library calls may begin.

    If none fits, the only one returned is the one with the most fitting kernels, which has no places.
    """
    named = [name in schedule.classes for name in graph.names]
    library = [not n and graph.is_library(i) for i, n in enumerate(named)]
    others = [not n and not graph.is_copy(i) for i, n in enumerate(named)]
    # Kernels that are not XLA's own, after all that are, are inside a call of some library.
    behind = others if not any(named[_first(others) :]) else library
    first = _first(behind)
    last = int(graph.numbers[-1]) + 1 if first == len(named) else int(graph.numbers[first])
    distinct = len(np.unique(graph.numbers)) == len(named)
    if not any(named) or any(named[first:]) or not distinct:
        return [_Fit(np.empty(0, np.int64), last, 0, library.count(False))]
    lengths = [last]
    # A copy just before the first library kernel can be part of that call.
    while first < len(named) and first > 0 and graph.is_copy(first - 1) and not named[first - 1]:
        first -= 1
        lengths.append(int(graph.numbers[first]))
    fits = [_fit_of_length(graph, schedule, length) for length in lengths]
    placed = [fit for fit in fits if fit.places.size]
    told_apart = [
        fit for fit in placed if any(_library_calls(graph, schedule, p, fit.length) is not None for p in fit.places)
    ]
    return told_apart or placed or [max(fits, key=lambda fit: fit.fitted)]


def _ended(fits: Mapping[int, Sequence[_Fit]], executions: Sequence[_Execution], schedule: Schedule) -> dict[int, _Fit]:
    """The longest fit of each graph; no places if its end is ambiguous.

    Every execution runs every command. So a shorter fit is ruled out if, in some execution, the
    commands that it would leave out ran neither without a graph nor at the start of another graph.
    """
    begins = {g: {int(p) for fit in graph_fits for p in fit.places} for g, graph_fits in fits.items()}

    def leaves_some(graph: int, left: range) -> bool:
        names = {schedule.names[command] for command in left}
        return any(
            graph in execution.graphs
            and names.isdisjoint(execution.alone)
            and all(begins.get(g, set()).isdisjoint(left) for g in execution.graphs if g != graph)
            for execution in executions
        )

    chosen = {}
    for graph, graph_fits in fits.items():
        longest = max(graph_fits, key=lambda fit: fit.length)
        shorter = [fit for fit in graph_fits if fit is not longest]
        certain = all(
            place in longest.places and leaves_some(graph, range(place + fit.length, place + longest.length))
            for fit in shorter
            for place in fit.places.tolist()
        )
        nowhere = np.empty(0, np.int64)
        chosen[graph] = longest if certain else dataclasses.replace(longest, places=nowhere)
    return chosen


def _first(flags: Sequence[bool]) -> int:
    return flags.index(True) if any(flags) else len(flags)


def _fit_of_length(graph: _Graph, schedule: Schedule, length: int) -> _Fit:
    """Where the nodes of a graph with numbers below ``length`` are consecutive commands of the schedule."""
    count = len(schedule.names) - length + 1
    commands = [int(number) for number in graph.numbers if number < length]
    foreign = _foreign(graph, schedule)
    own = [i for i in range(len(commands)) if i not in foreign]
    if len(foreign.intersection(range(len(commands)))) * _NAMED_FOR_EACH > len(own):
        foreign, own = set(), list(range(len(commands)))
    if count <= 0:
        return _Fit(np.empty(0, np.int64), length, 0, len(commands))
    runs = {name: schedule.run_by(name) for name in set(graph.names) & set(schedule.classes)}
    nothing = np.zeros(len(schedule.names), np.bool_)
    hits = np.zeros(count, np.int64)
    for i in own:
        number = commands[i]
        fits = runs.get(graph.names[i], schedule.copies if graph.is_copy(i) else nothing)
        hits += fits[number : number + count]
    # A node without an activity of its own number: a library call, or a copy that was not recorded.
    unseen = schedule.copies | np.array([bool(target) for target in schedule.targets])
    good = hits == len(own)
    for number in set(range(length)) - set(commands):
        good &= unseen[number : number + count]
    return _Fit(np.flatnonzero(good), length, int(hits.max()), len(commands))


def _foreign(graph: _Graph, schedule: Schedule) -> set[int]:
    """Nodes whose kernel is neither named after a command nor from a library that XLA calls."""
    return {
        i
        for i, name in enumerate(graph.names)
        if name not in schedule.classes and not graph.is_copy(i) and not graph.is_library(i)
    }


def _library_calls(graph: _Graph, schedule: Schedule, place: int, length: int) -> NDArray[np.int64] | None:
    """The command of each node inside a library call, or None if the assignment is ambiguous.

    Every call has one main kernel; it may set memory before and reduce parts afterwards.
    """
    seen = {int(number) for number in graph.numbers if number < length}
    calls = [place + n for n in range(length) if n not in seen and schedule.targets[place + n]]
    inside = range(len(seen), len(graph.names))
    main = [graph.is_library(i) and not AFTERWARDS.search(graph.names[i]) for i in inside]
    if not inside:
        return np.empty(0, np.int64)
    if len(calls) == 1:
        call = np.zeros(len(inside), np.int64)
    elif sum(main) == len(calls) > 0:
        before = np.cumsum(main) - main  # main kernels before each node
        later = np.array([graph.is_library(i) and not m for i, m in zip(inside, main, strict=True)])
        call = before - later
    else:
        return None
    fits = all(
        0 <= number < len(calls)
        and (not graph.is_library(i) or library_of(schedule.targets[calls[number]], graph.names[i]))
        and (graph.is_library(i) or graph.is_copy(i))
        for i, number in zip(inside, call.tolist(), strict=True)
    )
    return np.take(calls, call).astype(np.int64) if fits else None


@dataclass(frozen=True)
class _Execution:
    """A kind of execution: its graphs in order, and the instructions that ran outside of graphs."""

    graphs: tuple[int, ...]
    alone: frozenset[str]


def _executions(rows: pl.DataFrame) -> list[_Execution]:
    """The distinct kinds of execution."""
    alone = pl.col("graph").is_null() & pl.col("hlo").is_not_null()
    executions = (
        rows.sort("start")
        .group_by("program", maintain_order=True)
        .agg(
            graphs=pl.col("graph").filter(pl.col("hlo").is_null()).drop_nulls()
            .unique(maintain_order=True),
            alone=pl.col("hlo").filter(alone).unique().sort(),
        )
        .select("graphs", "alone")
        .unique(maintain_order=True)
    )  # fmt: skip
    return [_Execution(tuple(graphs), frozenset(names)) for graphs, names in executions.iter_rows()]


def _places(executions: Sequence[_Execution], fits: Mapping[int, _Fit], schedule: Schedule) -> dict[int, int]:
    """The first command of each graph for which only one position is possible.

    Within one execution the graphs ran in the order of the schedule, and contain neither commands of each other
    nor commands that were launched without a graph.
    """
    commands: dict[int, set[int]] = {}
    for execution in executions:
        outside = np.cumsum([0, *(name in execution.alone for name in schedule.names)])
        order = [g for g in execution.graphs if g in fits and fits[g].places.size]
        choices = [_without_separate_launches(fits[g], outside) for g in order]
        lengths = [fits[g].length for g in order]
        first, last = _earliest(choices, lengths), _latest(choices, lengths)
        for graph, lowest, highest in zip(order, first, last, strict=False):
            if lowest == highest:
                commands.setdefault(graph, set()).add(lowest)
    return {graph: places.pop() for graph, places in commands.items() if len(places) == 1}


def _without_separate_launches(fit: _Fit, outside: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions at which no command of the graph was also launched outside of graphs."""
    apart: NDArray[np.bool_] = outside[fit.places + fit.length] == outside[fit.places]
    return fit.places[apart]


def _earliest(choices: Sequence[NDArray[np.int64]], lengths: Sequence[int]) -> list[int]:
    """The earliest position of each graph if all are in order; empty if that is impossible."""
    places, free = [], 0
    for choice, length in zip(choices, lengths, strict=True):
        i = int(np.searchsorted(choice, free))
        if i == len(choice):
            return []
        places.append(int(choice[i]))
        free = places[-1] + length
    return places


def _latest(choices: Sequence[NDArray[np.int64]], lengths: Sequence[int]) -> list[int]:
    """The latest position of each graph if all are in order; empty if that is impossible."""
    places: list[int] = []
    free = None
    for choice, length in zip(reversed(choices), reversed(lengths), strict=True):
        i = len(choice) if free is None else int(np.searchsorted(choice, free - length, "right"))
        if i == 0:
            return []
        free = int(choice[i - 1])
        places.append(free)
    return places[::-1]


def _instructions(graph: _Graph, schedule: Schedule, place: int, length: int) -> pl.DataFrame:
    commands = graph.numbers[graph.numbers < length]
    inside = _library_calls(graph, schedule, place, length)
    rest = len(graph.numbers) - len(commands)
    calls = [None] * rest if inside is None else inside.tolist()
    rule = "command_buffer_library" if inside is None else "hlo_library_order"
    own = [int(command) for command in commands + place]
    foreign = {i for i in _foreign(graph, schedule) if i < len(own) and not schedule.targets[own[i]]}
    return _nodes(
        graph,
        [*(None if i in foreign else command for i, command in enumerate(own)), *calls],
        [*("command_buffer_foreign" if i in foreign else "hlo_node_order" for i in range(len(own))), *[rule] * rest],
    )


def _refused(graph: _Graph, reason: str, detail: str | None = None) -> pl.DataFrame:
    return _nodes(graph, [None] * len(graph.names), [reason] * len(graph.names), detail)


def _nodes(
    graph: _Graph, commands: Sequence[int | None], rules: Sequence[str], detail: str | None = None
) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "graph": [graph.id] * len(rules),
            "number": graph.numbers,
            "command": commands,
            "level": [0] * len(rules),
            "counted": [rule == "hlo_node_order" for rule in rules],
            "rule": rules,
            "detail": [detail] * len(rules),
        },
        schema=NODES,
    ).unique("number", keep="first")


def _reason(fit: _Fit) -> tuple[str, str | None]:
    """Why a graph has no unique position in the schedule: the code, and a sentence about this graph."""
    if fit.places.size == 0 and fit.fitted == fit.own > 0:
        return "command_buffer_no_end", None
    if fit.places.size == 0:
        return (
            "command_buffer_no_fit",
            f"at most {fit.fitted} of the graph's {fit.own} own kernels fit the HLO schedule",
        )
    if fit.places.size > 1:
        return ("command_buffer_several", f"the graph's kernels fit the HLO schedule at {fit.places.size} places")
    return "command_buffer_order", None
