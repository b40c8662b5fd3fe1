"""Attributes activities of XLA programs by the HLO instruction that each runs.

    op_name  the path that the framework wrote on the instruction: ``jit(step)/jvp(layer1)/mlp/dot_general``
    opcode   of the instruction, such as fusion
    source   ``file.py:12 Block.forward``, the innermost line of the user's own code in the instruction's
             stack, and its function
    stack    all frames of that stack, ``file.py(12): function``, outermost first, separated by ``;``
    label    path of named scopes in op_name: ``layer1/mlp``
    phase    forward, backward ... by the transformations in op_name (`hlo_phases`)

Every kind has a second column, ``<kind>_rule``: the code of how the place was found or, where it is null, of
why not (`thence.model.reasons`).
A fusion does the work of many source lines; `source_shares` divides its time among them.

`with_hlo` merges these places with those from the launches. For an activity with an HLO instruction, the HLO takes
precedence.

What XLA launched while it compiled, to measure kernels and choose between them (autotuning), has that as its reason.
Candidates run as programs without a number. Compiling threads also launch kernels and copies outside of any program,
to fill, compare and copy buffers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.paths import path_tree
from thence.attribution.xla.command_buffers import derived_instructions
from thence.attribution.xla.constituents import constituents_by_cost
from thence.attribution.xla.hlo_phases import instruction_phases
from thence.attribution.xla.op_names import labels
from thence.attribution.xla.origins import origins
from thence.model.attributed import RULE, SHARES
from thence.model.graph_labels import FRAME_SEPARATOR
from thence.model.intervals import NEVER, longest_begun
from thence.model.own_code import OwnCode
from thence.model.phases import Position
from thence.model.places import HLO

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thence.model.attributed import Attributed
    from thence.model.hlo import HloModule
    from thence.model.tables import Tables


PLACES = tuple(kind.name for kind in HLO if kind.name not in ("program", "hlo"))
"""Kinds of places that follow from the instruction; `hlo_places` has a column for each, and one for its rule."""

MAX_STACK_TEXT, MAX_STACK_TEXT_PER_INSTRUCTION = 4_000_000, 500
"""Characters of the distinct stacks of a module, and more for each of its instructions."""
_KEY = ["module", "hlo"]


def instructions(tables: Tables, autotuning: pl.Series) -> pl.DataFrame:
    """The HLO instruction of every row of ``tables.gpu``, in its order.

    Args:
        autotuning: whether each row ran as part of a compilation, as `autotuned` returns it.

    Returns:
        columns hlo (Categorical), the op that the profiler recorded or, inside a command buffer, the
        instruction of the node's command; hlo_rule (`RULE`), how it was found, or why there is none.
    """
    derived = derived_instructions(tables)
    recorded = tables.gpu["hlo"].cast(pl.String)
    reason = pl.when("in_graph").then(pl.lit("command_buffer")).otherwise(pl.lit("no_hlo_op"))
    return (
        derived.rename({"hlo": "derived"})
        .with_columns(
            recorded=recorded,
            autotuning=autotuning,
            in_graph=tables.gpu["graph"].is_not_null() & tables.gpu["program"].is_not_null(),
        )
        .select(
            hlo=pl.coalesce("recorded", "derived").cast(pl.Categorical()),
            hlo_rule=pl.when(pl.col("recorded").is_not_null())
            .then(pl.lit("hlo_recorded"))
            .otherwise(pl.coalesce("rule", pl.when("autotuning").then(pl.lit("autotuning")), reason))
            .cast(RULE),
        )
    )


@dataclass(frozen=True)
class ModuleFacts:
    """What attribution derives from one HLO module; each part is computed when it is first used.

    Attributes:
        module: the module.
        own: which files are the user's own code.
        names: HLO instructions of it that ran, as text.
    """

    module: HloModule
    own: OwnCode
    names: pl.Series

    @cached_property
    def origins(self) -> pl.DataFrame:
        """op_name, source and frame of every instruction: see `thence.attribution.xla.origins`."""
        return origins(self.module, self.own)

    @cached_property
    def parts(self) -> pl.DataFrame:
        """The constituents of every instruction, weighted by cost: see `constituents_by_cost`."""
        return constituents_by_cost(self.module)


@dataclass(frozen=True)
class HloRows:
    """The HLO instruction of every row of ``gpu``, and the modules of the instructions.

    Attributes:
        keys: module (row in ``hlo`` of the tables, null where unknown), hlo (text), and reason: the code of
            why there is no instruction, null where there is one.
        modules: the modules that activities refer to, by their row in ``hlo``.
    """

    keys: pl.DataFrame
    modules: dict[int, ModuleFacts]


def hlo_rows(tables: Tables, hlo_rule: pl.Series, autotuning: pl.Series, own: OwnCode) -> HloRows:
    """The instructions of a trace with their modules.

    Args:
        tables: of the trace, with the instructions that `instructions` found in ``gpu``.
        hlo_rule: how they were found, as `instructions` returns it.
    """
    keys = _keys(tables, hlo_rule, autotuning)
    ran = keys.select("module", "hlo").drop_nulls("module").unique(maintain_order=True)
    modules = {
        int(number): ModuleFacts(tables.hlo[int(number)], own, rows["hlo"].drop_nulls())
        for (number,), rows in sorted(ran.group_by("module"), key=lambda group: group[0])
    }
    return HloRows(keys, modules)


def hlo_places(rows: HloRows) -> pl.DataFrame:
    """The places of every row of ``gpu``, in its order.

    Returns:
        For each kind of `PLACES` the place (Categorical) and its rule (`RULE`).
    """
    placed = rows.keys.join(_module_places(rows), on=_KEY, how="left", maintain_order="left")
    columns = []
    for kind in PLACES:
        rule = pl.coalesce("reason", f"{kind}_rule", pl.lit("no_instruction"))
        columns += [pl.col(kind).cast(pl.Categorical()), rule.cast(RULE).alias(f"{kind}_rule")]
    return placed.select(columns)


def source_shares(rows: HloRows) -> pl.DataFrame:
    """The time of every row of ``gpu``, divided among the source lines that it came from.

    Returns:
        Claims in the columns of `SHARES`, sorted by gpu. The weights of one activity sum to 1; time
        without a source line is a claim with a null place, whose rule is the reason.
    """
    parts = [
        _constituents(facts)
        .group_by("hlo", "place", "rule", maintain_order=True)
        .agg(pl.col("weight").sum())
        .sort("hlo", "weight", descending=[False, True], maintain_order=True)
        .select(pl.lit(number, pl.Int32).alias("module"), "hlo", "place", "weight", "rule")
        for number, facts in rows.modules.items()
    ]
    empty = pl.DataFrame(
        schema={"module": pl.Int32, "hlo": pl.String, "place": pl.String, "weight": pl.Float64, "rule": pl.String}
    )
    claims = rows.keys.with_row_index("gpu").join(
        pl.concat([empty, *parts]), on=_KEY, how="left", maintain_order="left"
    )
    rule = pl.coalesce("reason", "rule", pl.lit("no_instruction"))
    return claims.select("gpu", "place", pl.col("weight").fill_null(1.0), rule.alias("rule")).cast(pl.Schema(SHARES))


def stack_shares(trace: Attributed) -> pl.DataFrame:
    """Divides the time as `source_shares`, with whole source stacks in place of innermost lines.

    Returns:
        columns gpu, module (row in ``trace.hlo``), frame (number in its frames, null where there
        is no stack), weight and rule; weights as in `source_shares`.
    """
    own = OwnCode.of(trace.own, trace.installed)
    rows = hlo_rows(trace, trace.places["hlo_rule"], autotuned(trace), own)
    columns = ["module", "hlo", "frame", "weight", "rule"]
    parts = [
        _constituents(facts)
        .with_columns(pl.lit(number, pl.Int32).alias("module"))
        .group_by("module", "hlo", "frame", "rule", maintain_order=True)
        .agg(pl.col("weight").sum())
        .select(columns)
        for number, facts in rows.modules.items()
    ]
    types = (pl.Int32, pl.String, pl.Int32, pl.Float64, pl.String)
    empty = pl.DataFrame(schema=dict(zip(columns, types, strict=True)))
    rule = pl.coalesce("reason", "rule", pl.lit("no_instruction"))
    return (
        rows.keys.with_row_index("gpu")
        .join(pl.concat([empty, *parts]), on=_KEY, how="left", maintain_order="left")
        .select("gpu", "module", "frame", pl.col("weight").fill_null(1.0), rule.alias("rule"))
    )


def frame_stacks(module: HloModule, frames: Iterable[int | None]) -> dict[int, str]:
    """The stacks that end in some frames of a module, as text.

    Args:
        frames: numbers of frames; None and 0 have no stack.

    Returns:
        For each frame, the frames of its stack as ``file.py(12): function``, outermost first, separated by ``;``,
        which names of frames have as U+FF1B; very deep stacks are shortened as other paths are.
    """
    table = module.frames
    if not table.height:
        return {}
    parent = table["parent"].cast(pl.Int64).to_numpy() - 1
    names = table.select(
        pl.format("{}({}): {}", "file", "line", "function").str.replace_all(";", "\uff1b", literal=True)
    ).to_series()
    numbers = np.unique([f for f in frames if f and f <= table.height]).astype(np.int64)
    everywhere = np.ones(len(parent), np.bool_)
    tree, node = path_tree(parent, names.cast(pl.Categorical()), numbers - 1, everywhere)
    limit = MAX_STACK_TEXT + MAX_STACK_TEXT_PER_INSTRUCTION * module.instructions.height
    used, of_frame = np.unique(node, return_inverse=True)
    texts = replace(tree, max_text=limit).texts(used, FRAME_SEPARATOR).to_list()
    return {f: texts[i] for f, i in zip(numbers.tolist(), of_frame.tolist(), strict=True)}


def _keys(tables: Tables, hlo_rule: pl.Series, autotuning: pl.Series) -> pl.DataFrame:
    """For every gpu row: module, hlo, and the reason why there is no instruction, or null."""
    modules = tables.programs.select(
        pl.int_range(pl.len(), dtype=pl.Int32).alias("program"), pl.col("hlo").alias("module")
    )
    return (
        tables.gpu.select("program", pl.col("hlo").cast(pl.String))
        .hstack([hlo_rule.cast(pl.String).alias("hlo_rule"), autotuning.alias("autotuned")])
        .join(modules, on="program", how="left", maintain_order="left")
        .with_columns(
            reason=pl.when(pl.col("module").is_null() & pl.col("autotuned")).then(pl.lit("autotuning"))
            .when(pl.col("program").is_null()).then(pl.lit("no_program"))
            .when(pl.col("hlo").is_null()).then("hlo_rule")
            .when(pl.col("module").is_null()).then(pl.lit("no_hlo"))
        )
        .select("module", "hlo", "reason")
    )  # fmt: skip


def _module_places(rows: HloRows) -> pl.DataFrame:
    """The places of every instruction that ran: one row per module and name."""
    schema = dict.fromkeys(("hlo", *(f"{k}{s}" for k in PLACES for s in ("", "_rule"))), pl.String)
    parts = [pl.DataFrame(schema={"module": pl.Int32, **schema})]
    for number, facts in rows.modules.items():
        instructions = (
            facts.module.instructions.with_row_index("row")
            .filter(pl.col("name").is_in(facts.names.implode()))
            .unique("name", keep="first", maintain_order=True)
        )
        places = _places(facts, instructions)
        parts.append(places.select(pl.lit(number, pl.Int32).alias("module"), *schema))
    return pl.concat(parts)


def module_places(module: HloModule, own: OwnCode) -> pl.DataFrame:
    """The places of every instruction of a module, whether or not it ran: hlo, and each of `PLACES` with its rule."""
    every = module.instructions.select("name", "opcode").with_row_index("row")
    return _places(ModuleFacts(module, own, every["name"]), every)


def _places(facts: ModuleFacts, instructions: pl.DataFrame) -> pl.DataFrame:
    """The places of the instructions that ran; columns hlo, and each of `PLACES` with its rule."""
    module = facts.module
    phases = instruction_phases(module, facts.origins, facts.parts)
    phase, origin = phases[instructions["row"]], facts.origins[instructions["row"]]
    names = labels([name for name in origin["op_name"].to_list() if name is not None])
    frames = origin["frame"].to_list()
    stacks = frame_stacks(module, frames)
    op_names = origin["op_name"].to_list()
    lacking = (None, "no_op_name")
    label = [names[name] if name else lacking for name in op_names]
    text = pl.String()
    return instructions.select(
        pl.col("name").alias("hlo"), "opcode", opcode_rule=pl.lit("hlo_instruction")
    ).with_columns(
        op_name=origin["op_name"],
        op_name_rule=origin["op_name_rule"],
        source=origin["source"],
        source_rule=origin["source_rule"],
        stack=pl.Series([stacks.get(frame) for frame in frames], dtype=text),
        stack_rule=origin["source_rule"],
        label=pl.Series([path for path, _ in label], dtype=text),
        label_rule=pl.Series([rule for _, rule in label], dtype=text),
        phase=phase["phase"],
        phase_rule=phase["phase_rule"],
    )


def _constituents(facts: ModuleFacts) -> pl.DataFrame:
    """Constituents of every executed instruction: hlo, weight, place, frame (null: none), rule."""
    rows = facts.module.instructions.select(pl.col("name").alias("hlo"))
    chosen = (
        rows.with_row_index("instruction")
        .filter(pl.col("hlo").is_in(facts.names.implode()))
        .unique("hlo", keep="first")
    )
    columns = ("source", "source_rule", "frame")
    origin = facts.origins.select(columns).with_row_index("constituent")
    unsplit = origin.rename(
        {"constituent": "instruction", "source": "own", "source_rule": "own_rule", "frame": "own_frame"}
    )
    parts = chosen.join(facts.parts, on="instruction")
    undivided = chosen.join(facts.parts, on="instruction", how="anti").with_columns(
        constituent=pl.col("instruction"), weight=pl.lit(1.0)
    )  # an instruction without parts is its own constituent
    return (
        pl.concat([parts, undivided.select(parts.columns)])
        .join(origin, on="constituent", how="left")
        .join(unsplit, on="instruction", how="left")
        .select(
            "hlo",
            "weight",
            place=pl.coalesce("source", "own"),
            frame=pl.when(pl.col("source").is_not_null())
            .then("frame")
            .when(pl.col("own").is_not_null())
            .then("own_frame"),
            rule=pl.when(pl.col("source").is_not_null() | pl.col("own").is_null())
            .then("source_rule")
            .when(pl.col("own_rule") == "hlo_instruction")
            .then(pl.lit("hlo_fusion"))
            .otherwise("own_rule"),
        )
    )


# ---- Merged with the places from launches


_BOTH = tuple(kind.name for kind in HLO if kind.origin == "both")
_FROM_HLO = tuple(kind.name for kind in HLO if kind.origin == "hlo")


def with_hlo(tables: Tables, of_launch: pl.DataFrame, own: OwnCode) -> tuple[Tables, pl.DataFrame, pl.DataFrame | None]:
    """Merges the places from the HLO of a trace with those from its launches.

    Args:
        of_launch: the places of every activity by its launch, as `launch_places` returns them.

    Returns:
        The tables, ``gpu`` with the HLO instruction of every activity; the merged places; and the shares of an
        instruction's time among source lines, None without any HLO.
    """
    autotuning = autotuned(tables)
    columns = instructions(tables, autotuning)
    tables = dataclasses.replace(tables, gpu=tables.gpu.with_columns(columns["hlo"]))
    rows = hlo_rows(tables, columns["hlo_rule"], autotuning, own)
    of_hlo = hlo_places(rows).with_columns(*_programs(tables, autotuning), columns["hlo"], columns["hlo_rule"])
    places = of_launch.with_columns(
        *(column for kind in _BOTH for column in _merged(of_launch, of_hlo, kind)),
        *(of_hlo[name] for kind in _FROM_HLO for name in (kind, f"{kind}_rule")),
        _position(of_launch, of_hlo),
    )
    return tables, places, source_shares(rows) if tables.hlo else None


def _programs(tables: Tables, autotuning: pl.Series) -> tuple[pl.Series, pl.Series]:
    """The name of the XLA program that each activity is part of, and the rule."""
    name = tables.programs["name"].gather(tables.gpu["program"].cast(pl.UInt32))
    codes = pl.Series(["hlo_recorded", "no_program", "autotuning"], dtype=RULE)
    rule = codes.gather(name.is_null().cast(pl.UInt32) * (1 + autotuning.cast(pl.UInt32)))
    return name.alias("program"), rule.alias("program_rule")


def _position(of_launch: pl.DataFrame, of_hlo: pl.DataFrame) -> pl.Series:
    """The `Position` of the merged sources: those from the HLO are lines."""
    by_hlo = ~_by_launch(of_launch, of_hlo, "source") & of_hlo["source"].is_not_null()
    line = pl.Series([Position.LINE.value], dtype=of_launch["position"].dtype)
    return line.new_from_index(0, len(by_hlo)).zip_with(by_hlo, of_launch["position"]).alias("position")


def _merged(of_launch: pl.DataFrame, of_hlo: pl.DataFrame, kind: str) -> tuple[pl.Series, pl.Series]:
    """Merges the places of HLO and launch: HLO for activities of XLA programs, launch for all others.

    An activity without a place in the HLO gets that of its launch, if there is one. Activities of the
    autotuner belong to no program; without a place they keep the reason "autotuning", not the launch's.
    """
    rule = f"{kind}_rule"
    by_launch = _by_launch(of_launch, of_hlo, kind)
    return (
        of_launch[kind].zip_with(by_launch, of_hlo[kind]).alias(kind),
        of_launch[rule].zip_with(by_launch, of_hlo[rule]).alias(rule),
    )


def _by_launch(of_launch: pl.DataFrame, of_hlo: pl.DataFrame, kind: str) -> pl.Series:
    """Which activities have the place of their launch.

    A phase found by the rule ``outside_autograd`` is not used: PyTorch's autograd has no part in XLA programs.
    """
    autotuning = (of_hlo[f"{kind}_rule"] == "autotuning").fill_null(value=False)
    no_program = of_hlo["program"].is_null() & ~autotuning
    placed = of_launch[kind].is_not_null() & (of_launch[f"{kind}_rule"] != "outside_autograd")
    return of_hlo[kind].is_null() & placed | no_program


# ---- Autotuning


_COMPILE = r"^XlaCompile(?::#|$)"
_THREAD = ["rank", "process", "thread"]


def autotuned(tables: Tables) -> pl.Series:
    """Whether each row of ``tables.gpu`` ran as part of a compilation, if the trace shows it."""
    count = tables.gpu.height
    compiling = tables.host.filter(pl.col("category") == "compile")
    if compiling.is_empty():
        return pl.Series("autotuned", [False]).new_from_index(0, count)
    unnumbered = tables.programs["program"].is_null()
    of_program = tables.gpu["program"]
    candidate = unnumbered.gather(of_program.cast(pl.UInt32)).fill_null(value=False)
    calls = (
        tables.gpu.with_row_index("row")
        .filter(pl.col("program").is_null() & (pl.col("correlation") != 0))
        .select("row", "rank", "correlation")
        .join(
            tables.host.filter(pl.col("correlation").is_not_null())
            .unique(["rank", "correlation"], keep="none")
            .select(*_THREAD, "correlation", pl.col("start").alias("launched")),
            on=["rank", "correlation"],
        )
        .join(compiling.select(_THREAD).unique(), on=_THREAD, how="semi")
    )
    mask = candidate.to_numpy().copy()
    for (rank,), part in calls.group_by("rank"):
        ranges = compiling.filter((pl.col("rank") == rank) & pl.col("name").cast(pl.String).str.contains(_COMPILE))
        end = (ranges["start"] + ranges["duration"]).to_numpy()
        launched = part["launched"].to_numpy()
        around = longest_begun(ranges["start"].to_numpy(), end, launched)
        ends = np.append(end, NEVER)[around]  # the last entry is for `NO_ROW`
        mask[part["row"].to_numpy()] = launched <= ends
    return pl.Series("autotuned", mask)
