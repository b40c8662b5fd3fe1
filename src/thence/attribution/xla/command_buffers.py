"""Finds the HLO instruction of each activity of an XLA command buffer, if it can be proved.

XLA runs parts of a program as CUDA graphs (command buffers), and profilers then record no HLO op. The nodes of a
graph are numbered by a rule (`program_commands`), so the command of each node follows from the list of the graph's
commands. For each graph of each device, this list is found by the first of these that succeeds:

1. ``hlo_creation``: XLA's NVTX ranges around the commands while it created the graph (`graph_commands`).
2. ``hlo_thunk_number``: the number of the thunk that launches it, which shows where in the schedule the graph
   begins (`graph_commands`); a node gets a command only if all lengths of the list that fit give it the same.

If XLA_FLAGS make XLA record commands in another order than that of the schedule, only the first is used.

Kernel names and sizes must fit (`node_matching`), and the launches must not contradict the result
(`contradicted`). If something does not fit, only its node or its branch is left without an instruction. Every
activity has the code of the rule or of the reason.

In one launch, either all commands of a sequence run or none, whether the sequence is the graph's own or that of a
branch. A branch runs only if its conditional does, and never together with another branch of that conditional. No
activity starts before one whose result it reads. Nodes for which the launches contradict these rules get no
instruction.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.host_rows import launch_rows
from thence.attribution.xla.graph_commands import MODULE, creations, possible_slots, thunk_numbers
from thence.attribution.xla.node_matching import LOW, Comparison, Verdict, match, nodes_of
from thence.attribution.xla.program_commands import TooManyNodes, schedule_of, slots_of
from thence.model.columns import mask_of, row_numbers
from thence.model.intervals import NO_ROW, chain_to
from thence.model.launches import launch_correlations
from thence.model.thresholds import CONTRADICTING_LAUNCHES_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from thence.attribution.xla.graph_commands import Creation
    from thence.attribution.xla.node_matching import Match, Nodes
    from thence.attribution.xla.program_commands import Level, Schedule, Slots
    from thence.model.tables import Tables


_GRAPH = ["rank", "device", "graph"]
_NODES = {
    "graph": pl.UInt64,
    "number": pl.UInt64,
    "command": pl.Int64,
    "level": pl.Int64,
    "counted": pl.Boolean,
    "rule": pl.String,
}
"""One row for each node: graph and number of the node; command of the schedule, null where it is not known;
level, as in `thence.attribution.xla.program_commands`; counted, whether the node's number is that of its command;
rule, the code of how it was found or why it was not."""
_REORDERS = re.compile(
    r"command_buffer_scheduling_mode=CONCURRENT_REGIONS|graph_enable_concurrent_region=true", re.IGNORECASE
)
"""XLA_FLAGS with which the order of a graph's nodes is not that of the schedule (xla/debug_options_flags.cc)."""


def derived_instructions(tables: Tables) -> pl.DataFrame:
    """The HLO instruction of every row of ``tables.gpu`` that a command buffer launched.

    Returns:
        One row per row of gpu, in its order: hlo (String), null where it was not found; and rule, the code of
        how it was found or why it was not. Both are null where the profiler recorded the op, and outside of the
        graphs of XLA programs.
    """
    rows = _activities(tables)
    inside = rows.filter(pl.col("graph").is_not_null() & pl.col("hlo").is_null())
    none = pl.DataFrame(schema={"row": pl.UInt32, "derived": pl.String, "rule": pl.String})
    parts = [none]
    origin = _Origins.of(tables, inside) if inside.height else None
    for module in inside["module"].drop_nulls().unique().sort():
        schedule = schedule_of(tables.hlo[module])
        of_module = rows.filter(pl.col("module") == module)
        devices = of_module.partition_by("rank", "device", maintain_order=True)
        parts += [_of_device(part, schedule, origin) for part in devices if origin]
    return (
        tables.gpu.select(pl.int_range(pl.len(), dtype=pl.UInt32).alias("row"))
        .join(pl.concat(parts), on="row", how="left", maintain_order="left")
        .select(pl.col("derived").alias("hlo"), "rule")
    )


def _activities(tables: Tables) -> pl.DataFrame:
    modules = tables.programs.select(
        pl.int_range(pl.len(), dtype=pl.Int32).alias("program"), pl.col("hlo").alias("module")
    )
    return (
        tables.gpu.with_columns(launched=launch_correlations(tables.gpu))
        .with_row_index("row")
        .filter(pl.col("program").is_not_null())
        .join(modules, on="program", how="left", maintain_order="left")
        .select(
            *("row", "rank", "device", "program", "graph", "correlation", "launched", "start"),
            *("bytes", "module"),
            pl.col("name", "kind", "hlo").cast(pl.String),
            number=pl.col("node") & LOW,
        )
    )


@dataclass(frozen=True)
class _Origins:
    """Where the graphs come from, by the host ranges.

    Attributes:
        launches: one row per graph: rank, device, graph, thunk and module (host rows around its first launch,
            null where unknown), and first, the number of its first thunk.
        created: by the host row of a thunk or of a program's execution, the graphs created in it.
        in_order: whether commands are recorded in the order of the schedule.
    """

    launches: pl.DataFrame
    created: dict[int, Creation]
    in_order: bool

    @classmethod
    def of(cls, tables: Tables, inside: pl.DataFrame) -> _Origins:
        launch = launch_rows(tables)
        firsts = (
            inside.select(*_GRAPH, "start", launch=pl.Series(launch).gather(inside["row"]))
            .filter(pl.col("launch") != NO_ROW)
            .sort("start")
            .unique(_GRAPH, keep="first", maintain_order=True)
        )
        names = tables.host["name"]
        used = names.unique().drop_nulls()
        is_module = names.is_in(used.filter(used.cast(pl.String).str.contains(MODULE)).implode())
        parent = row_numbers(tables.host["parent"])
        module = chain_to(parent, firsts["launch"].to_numpy(), mask_of(is_module))
        launches = thunk_numbers(tables, firsts).with_columns(
            module=pl.Series(module, dtype=pl.Int64).replace(NO_ROW, None)
        )
        around = pl.concat([launches["thunk"], launches["module"]]).drop_nulls().unique().to_numpy()
        flags = [str(facts.get("xla_flags") or "") for facts in tables.meta.facts]
        in_order = not any(map(_REORDERS.search, flags))
        return cls(launches, creations(tables, launch, around), in_order)


@dataclass(frozen=True)
class _PlacedGraph:
    """The nodes of one graph, and how they were found.

    Attributes:
        nodes: of the graph.
        rule: code of how its commands were found.
        match: of its nodes to its commands.
        levels: of its commands.
    """

    nodes: Nodes
    rule: str
    match: Match
    levels: tuple[Level, ...]


def _of_device(rows: pl.DataFrame, schedule: Schedule, origin: _Origins) -> pl.DataFrame:
    """Columns row, derived and rule of the activities of one program's graphs on one device."""
    inside = rows.filter(pl.col("graph").is_not_null() & pl.col("hlo").is_null())
    launches = inside.select(_GRAPH).unique().join(origin.launches, on=_GRAPH, how="left")
    # The producer recorded the instructions of some nodes, which help to place the others.
    activities = rows.filter(pl.col("graph").is_in(inside["graph"].unique().implode()))
    graphs = nodes_of(activities)
    placed: dict[int, _PlacedGraph] = {}
    # A damaged module has no plan to compare with.
    with suppress(TooManyNodes):
        placed = _by_creation(graphs, launches, origin, schedule)
        if origin.in_order:
            rest = [nodes for nodes in graphs if nodes.graph not in placed]
            placed |= _by_thunk(rest, launches, _outside_of_graphs(rows, schedule), schedule)
    other = _recorded_otherwise(placed, activities, schedule)
    agreeing = [placed_graph for graph, placed_graph in placed.items() if graph not in other]
    refused = [_refused(placed[graph].nodes, "command_buffer_contradicted") for graph in other]
    rest = [nodes for nodes in graphs if nodes.graph not in placed]
    unplaced = [_refused(nodes, _why_unplaced(nodes, launches, origin, schedule)) for nodes in rest]
    nodes = [pl.DataFrame(schema=_NODES), *map(_nodes, agreeing), *refused, *unplaced]
    names = pl.DataFrame({"command": np.arange(len(schedule.names)), "derived": schedule.names})
    keyed = (
        inside.join(pl.concat(nodes), on=["graph", "number"], how="left", maintain_order="left")
        .join(names.cast({"derived": pl.String}), on="command", how="left", maintain_order="left")
        .with_columns(pl.col("rule").fill_null("command_buffer"), correlation="launched")
    )
    known = keyed.filter(pl.col("command").is_not_null())
    against = contradicted(known, _levels(agreeing), schedule)
    return keyed.join(against, on=["graph", "level", "command"], how="left", maintain_order="left").select(
        "row", derived=pl.when(pl.col("reason").is_null()).then("derived"), rule=pl.coalesce("reason", "rule")
    )


def _why_unplaced(nodes: Nodes, launches: pl.DataFrame, origin: _Origins, schedule: Schedule) -> str:
    """The code of why the commands of a graph were not found."""
    if not schedule.names:
        return "command_buffer_no_schedule"
    if not origin.in_order:
        return "command_buffer_reordered"
    launch = launches.filter(graph=nodes.graph)
    created = {*launch["thunk"].drop_nulls(), *launch["module"].drop_nulls()} & origin.created.keys()
    numbered = launch["first"].null_count() < launch.height
    return "command_buffer_no_fit" if created or numbered else "command_buffer_no_origin"


def _recorded_otherwise(placed: Mapping[int, _PlacedGraph], activities: pl.DataFrame, schedule: Schedule) -> list[int]:
    """Graphs with a node whose instruction differs from the one that the producer recorded."""
    recorded = activities.drop_nulls(["hlo", "number"]).select("graph", "number", "hlo").unique()
    other = {
        graph
        for graph, number, name in recorded.iter_rows()
        if graph in placed and placed[graph].match.command[number] not in (-1, schedule.number_of.get(name))
    }
    return sorted(other)


def _outside_of_graphs(rows: pl.DataFrame, schedule: Schedule) -> set[int]:
    """Commands that ran outside of graphs."""
    names = rows.filter(pl.col("graph").is_null())["hlo"].drop_nulls().unique()
    return {schedule.number_of[name] for name in names if name in schedule.number_of}


def _by_creation(
    graphs: Sequence[Nodes], launches: pl.DataFrame, origin: _Origins, schedule: Schedule
) -> dict[int, _PlacedGraph]:
    """The graphs whose creation was recorded, by id.

    A graph is created inside the thunk that first launches it, or together with the program's other graphs; the ids
    of these are in the order of creation.
    """
    placed: dict[int, _PlacedGraph] = {}
    of_graph = {nodes.graph: nodes for nodes in graphs}
    for place in ("thunk", "module"):
        waiting = launches.filter(~pl.col("graph").is_in(list(placed))).drop_nulls(place)
        for (row,), part in waiting.sort("graph").group_by(place, maintain_order=True):
            creation = origin.created.get(row)
            if creation is None:
                continue
            blocks = [slots_of(schedule, block) for block in creation.blocks(schedule)]
            created = [of_graph[graph] for graph in part["graph"] if graph in of_graph]
            for nodes, slots, matched in _paired(created, blocks, schedule):
                placed[nodes.graph] = _PlacedGraph(nodes, "hlo_creation", matched, slots.levels)
    return placed


def _paired(
    graphs: Sequence[Nodes], blocks: Sequence[Slots], schedule: Schedule
) -> Iterator[tuple[Nodes, Slots, Match]]:
    """Pairs each graph with the only block that fits it; if there are as many blocks as graphs, in order."""
    free = list(range(len(blocks)))
    for place, nodes in enumerate(graphs):
        possible = [place] if len(blocks) == len(graphs) else free
        matches = [(block, match(schedule, blocks[block], nodes)) for block in possible]
        fitting = [(block, matched) for block, matched in matches if matched is not None]
        if len(fitting) == 1:
            block, matched = fitting[0]
            free.remove(block)
            yield nodes, blocks[block], matched


def _by_thunk(
    graphs: Sequence[Nodes], launches: pl.DataFrame, alone: set[int], schedule: Schedule
) -> dict[int, _PlacedGraph]:
    """The graphs that fit the schedule from the first thunk that their launch names, by id."""
    placed = {}
    first_of = dict(launches.drop_nulls("first").select("graph", "first").iter_rows())
    for nodes in graphs:
        if nodes.graph not in first_of:
            continue
        possible = list(possible_slots(schedule, first_of[nodes.graph], alone, nodes))
        if not possible:
            continue
        compared = Comparison.of(schedule, possible, nodes)
        matches = [(slots, match(schedule, slots, nodes, compared)) for slots in possible]
        fitting = [(matched, slots) for slots, matched in matches if matched is not None and matched.proofs]
        if fitting:
            agreed = fitting[0][0].agreeing([matched for matched, _ in fitting[1:]])
            levels = fitting[0][1].levels
            placed[nodes.graph] = _PlacedGraph(nodes, "hlo_thunk_number", agreed, levels)
    return placed


def _nodes(placed: _PlacedGraph) -> pl.DataFrame:
    """The nodes of a graph in the columns of `_NODES`."""
    matched, numbers = placed.match, np.unique(placed.nodes.number)
    columns = (matched.command, matched.level, matched.counted, matched.verdict)
    command, level, counted, verdict = (pl.Series(column[numbers]) for column in columns)
    reason = (
        pl.when(pl.col("command") < 0).then(pl.lit("command_buffer_library"))
        .when(pl.col("verdict") == Verdict.CONTRADICTS).then(pl.lit("command_buffer_contradicted"))
        .when((pl.col("verdict") == Verdict.FOREIGN) & (placed.rule != "hlo_creation"))
        .then(pl.lit("command_buffer_foreign"))
    )  # fmt: skip
    rule = pl.when("counted").then(pl.lit(placed.rule)).otherwise(pl.lit("hlo_library_order"))
    return (
        pl.DataFrame({"number": numbers, "command": command, "level": level, "counted": counted, "verdict": verdict})
        .with_columns(reason=reason)
        .select(
            graph=pl.lit(placed.nodes.graph),
            number="number",
            command=pl.when(pl.col("reason").is_null()).then("command"),
            level="level",
            counted="counted",
            rule=pl.coalesce("reason", rule),
        )
        .cast(_NODES)  # type: ignore[arg-type]
    )


def _refused(nodes: Nodes, reason: str) -> pl.DataFrame:
    """The nodes of a graph that have no instruction, in the columns of `_NODES`."""
    rows = [(nodes.graph, number, None, None, False, reason) for number in np.unique(nodes.number).tolist()]
    return pl.DataFrame(rows, _NODES, orient="row")


def _levels(placed: Sequence[_PlacedGraph]) -> pl.DataFrame:
    rows = [
        (graph.nodes.graph, number, level.parent, level.conditional, level.loops)
        for graph in placed
        for number, level in enumerate(graph.levels)
    ]
    return pl.DataFrame(rows, LEVELS, orient="row")


# ---- Checks against the launches


LEVELS = {"graph": pl.UInt64, "level": pl.Int64, "parent": pl.Int64, "conditional": pl.Int64, "loops": pl.Boolean}
"""One row for each level of each graph, as `thence.attribution.xla.program_commands.Level` describes it."""

_LAUNCHED = ["program", "graph", "correlation"]
_LEVEL_OF_GRAPH = ["graph", "level"]


def contradicted(rows: pl.DataFrame, levels: pl.DataFrame, schedule: Schedule) -> pl.DataFrame:
    """The commands of graphs that their launches contradict.

    Args:
        rows: activities that have a command: program, graph, correlation (of the launch), number, start,
            command, level and counted.
        levels: columns of `LEVELS`.

    Returns:
        columns graph, command, level and reason, a code; each of graph, command and level occurs once.
    """
    rows = rows.with_columns(pl.col("correlation").fill_null(-1))
    nodes = rows.select(*_LEVEL_OF_GRAPH, "command", "counted").unique()
    branches = _wrong_levels(rows, levels).join(nodes, on=_LEVEL_OF_GRAPH)
    early = _too_early(rows, schedule)
    uncounted = early.join(nodes.filter(~pl.col("counted")), on=["graph", "command"], how="semi")
    of_libraries = nodes.filter(~pl.col("counted")).join(uncounted, on="graph", how="semi")
    late = pl.concat([early.join(nodes, on=["graph", "command"]).select(of_libraries.columns), of_libraries])
    reasons = [
        part.select(*_LEVEL_OF_GRAPH, "command", reason=pl.lit(reason))
        for part, reason in ((branches, "command_buffer_branch"), (late, "command_buffer_too_early"))
    ]
    return pl.concat(reasons).unique([*_LEVEL_OF_GRAPH, "command"], keep="first", maintain_order=True)


def _wrong_levels(rows: pl.DataFrame, levels: pl.DataFrame) -> pl.DataFrame:
    """Columns graph and level: the levels for which too many launches contradict the rules for branches."""
    seen = rows.group_by(_LEVEL_OF_GRAPH).agg(nodes=pl.col("number").n_unique())
    ran = rows.group_by(*_LAUNCHED, "level").agg(ran=pl.col("number").n_unique(), activities=pl.len())
    facts = ran.join(seen, on=_LEVEL_OF_GRAPH).join(levels.unique(_LEVEL_OF_GRAPH), on=_LEVEL_OF_GRAPH, how="left")
    around = ran.select(*_LAUNCHED, pl.col("level").alias("parent"), again=pl.col("activities") > pl.col("ran"))
    facts = facts.join(around, on=[*_LAUNCHED, "parent"], how="left")
    siblings = pl.len().over(*_LAUNCHED, "parent", "conditional")
    inside = pl.col("parent") >= 0
    wrong = (
        (pl.col("ran") < pl.col("nodes"))
        | (inside & pl.col("again").is_null())
        # In a loop inside the graph a conditional can take another branch in each round.
        | (inside & ~pl.col("again").fill_null(value=True) & (siblings > 1) & ~pl.col("loops"))
    )
    return (
        facts.with_columns(wrong=wrong.fill_null(value=False))
        .group_by(_LEVEL_OF_GRAPH)
        .agg(pl.col("wrong").sum(), launches=pl.len())
        .filter(pl.col("wrong") > pl.max_horizontal(1, pl.col("launches") * CONTRADICTING_LAUNCHES_SHARE))
        .select(_LEVEL_OF_GRAPH)
    )


def _too_early(rows: pl.DataFrame, schedule: Schedule) -> pl.DataFrame:
    """Columns graph and command: both commands of each pair of which one started before the other, which it reads."""
    starts = rows.group_by(*_LAUNCHED, "command").agg(pl.col("start").min())
    written = starts.rename({"command": "input", "start": "written"})
    early = (
        starts.join(schedule.inputs, on="command")
        .join(written, on=[*_LAUNCHED, "input"])
        .filter(pl.col("start") < pl.col("written"))
    )
    ends = [early.select("graph", command=end) for end in ("command", "input")]
    return pl.concat(ends).unique()
