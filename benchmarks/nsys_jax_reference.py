"""Compares thence with numbers that nsys-jax's 2024 notebook gave for the same archives.

    python benchmarks/nsys_jax_reference.py ARCHIVE... --expected FILE

FILE holds, under notebook_2024 and the part of the archive's name after the last underscore, what the
notebook computed. Its conventions are switched on: warm-up is the first execution of every compiled
program, programs are told apart by module number, and one bug is repeated, marked "as there": the
children of the first XlaAutotunerMeasurement are dropped without their time going to it. Integers must
agree exactly, other numbers to 1e-6.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from command_line import documented_parser
from thence.analysis.collectives.answer import Collectives, collectives
from thence.analysis.collectives.clock_sync import align_clocks
from thence.analysis.programs.answer import By, Programs, programs
from thence.analysis.programs.compilation import LIBRARY_LOADING, compilation
from thence.analysis.programs.warmup import Phases, WarmUp, module_keys, phases
from thence.attribution.attribute import attribute
from thence.attribution.xla.constituents import constituents_by_place
from thence.model.concat_tables import concat
from thence.readers.nsys_jax.read import read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from thence.model.attributed import Attributed
    from thence.model.tables import Tables

TOLERANCE = 1e-6
MEASUREMENT = "XlaAutotunerMeasurement"
ACTIVE = "[GPU active]"
UNKNOWN = f"{ACTIVE};[Unknown]"
IDLE_INSIDE = "GPU idle during modules"

Ours = dict[str, Any]


def main() -> int:
    parser = documented_parser(__doc__)
    parser.add_argument("archives", nargs="+", type=Path)
    parser.add_argument("--expected", required=True, type=Path)
    options = parser.parse_args()
    expected = json.loads(options.expected.read_text())["notebook_2024"]
    agree = differ = 0
    parts = []
    for archive in options.archives:
        part = archive.stem.rpartition("_")[2]
        parts.append(read(str(archive), lambda _bytes: None))
        ours = computed(attribute(parts[-1]))
        for name, mine, theirs in pairs(ours, expected[part], part):
            same = equal(mine, theirs)
            agree, differ = agree + same, differ + (not same)
            print(f"{'agree ' if same else 'DIFFER'} {name}: {mine} | {theirs}")
    if len(parts) > 1:
        show_alignment(attribute(concat(parts)))
    print(f"{agree} quantities agree, {differ} differ")
    return 1 if differ else 0


def show_alignment(tables: Attributed) -> None:
    """There is nothing to compare with: nsys-jax refuses to align a subset of the ranks."""
    found = align_clocks(tables)
    for rank, correction, shared, _cluster in found.corrections.rows():
        print(f"clock of rank {rank}: {correction} ns, from {shared} shared collectives")
    print(f"left: median {found.residual_median_ns} ns, largest {found.residual_max_ns} ns")


def pairs(mine: Any, theirs: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """The single numbers and words of two equal structures, with their place."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in [*theirs, *(key for key in mine if key not in theirs)]:
            yield from pairs(mine.get(key), theirs.get(key), f"{name}.{key}")
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            yield from pairs(one, other, f"{name}[{number}]")
    else:
        yield name, mine, theirs


def equal(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, float) and isinstance(theirs, (int, float)):
        return math.isclose(mine, theirs, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(mine, int) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(mine == theirs)


def computed(tables: Attributed) -> Ours:
    """Everything the notebook shows, computed by thence."""
    by_name = programs(tables, as_nsys_jax(phases(tables, WarmUp.FIRST_COMPILED)), By.NAME)
    communication = collectives(tables, by_name.phases)
    executions = by_name.executions.with_columns(
        id=module_keys(tables)[by_name.executions["row"]].str.extract(r"\.(\d+)$").cast(pl.Int64)
    )
    top_ids = top_modules(executions)
    top = executions.filter(pl.col("id").is_in(top_ids))
    thunks = exposed_thunks(tables, communication, top)
    summary = thunks.group_by("id", "hlo").agg(pl.col("ns").sum())
    active, in_modules = int(summary["ns"].sum()), int(top["duration"].sum())
    end = pl.col("start") + pl.col("duration")
    wall = top.group_by("rank", "device").agg(wall=end.max() - pl.col("start").min())["wall"].sum()
    best = summary.sort("ns", "id", "hlo", descending=[True, False, False]).head(10)
    sources = flames(tables, summary, in_modules - active, int(wall) - in_modules)
    return {
        "all_thunks_active_ns": active,
        "all_modules_active_ns": in_modules,
        "all_modules_wall_ns": int(wall),
        "top_module_ids": sorted(top_ids),
        **compile(tables),
        "op_runtime_ns": op_runtime(tables, summary, active, in_modules),
        "n_distinct_thunks_in_top_modules": summary.height,
        "top10_thunks_ns": [list(row) for row in best.select("id", "hlo", "ns").rows()],
        "modules": module_rows(by_name),
        **communication_numbers(communication),
        **sources,
    }


def as_nsys_jax(found: Phases) -> Phases:
    """Without the executions of programs that have no other, which nsys-jax leaves out."""
    return dataclasses.replace(found, phase=found.phase.cast(pl.String).replace("only", "init"))


def top_modules(executions: pl.DataFrame) -> list[int]:
    """Modules left when the smallest ones, up to 1 % of the time together, are left out."""
    totals = executions.group_by("id").agg(pl.col("duration").sum()).sort("duration")
    share = pl.col("duration").cum_sum() / pl.col("duration").sum()
    return totals.filter(share > 0.01)["id"].to_list()


def exposed_thunks(tables: Tables, communication: Collectives, top: pl.DataFrame) -> pl.DataFrame:
    """Thunks of the top modules: id, hlo and ns, of collectives only the exposed time."""
    exposed = communication.rows.select(pl.col("gpu").cast(pl.UInt32), "exposed_ns")
    place = top.select(pl.col("row").cast(pl.Int32).alias("program"), "id")
    return (
        tables.gpu.with_row_index("gpu")
        .select("gpu", "program", pl.col("hlo").cast(pl.String), "duration")
        .join(place, on="program", how="inner")
        .join(exposed, on="gpu", how="left")
        .select("id", "hlo", ns=pl.coalesce("exposed_ns", "duration"))
    )


def op_runtime(tables: Tables, summary: pl.DataFrame, active: int, in_modules: int) -> dict[str, int]:
    opcodes = pl.concat(
        module.instructions.select(pl.lit(module.id).alias("id"), pl.col("name").alias("hlo"), "opcode")
        for module in tables.hlo
    )
    by_opcode = summary.join(opcodes, on=["id", "hlo"], how="left").group_by("opcode").agg(pl.col("ns").sum())
    return {**dict(by_opcode.rows()), "_total": in_modules, IDLE_INSIDE: in_modules - active}


def module_rows(result: Programs) -> list[dict[str, Any]]:
    return [
        {
            "Name": row["program"],
            "instances": row["executions"],
            "gpu_ms_total": row["gpu_ms_total"],
            "gpu_ms_mean": row["gpu_ms_mean"],
            "gpu_ms_std0": row["gpu_ms_std"],
            "thunks_mean": row["thunks_mean"],
            "thunks_std0": row["thunks_std"],
        }
        for row in result.to_json()["rows"]
    ]


def compile(tables: Attributed) -> Ours:
    rows = compilation(tables).phases
    times = dict(rows.select("name", pl.col("self_ns").round().cast(pl.Int64)).rows())
    times["[non-leaf time in 0th XlaCompile range]"] = times.pop(LIBRARY_LOADING)
    times[MEASUREMENT] -= first_measurement_children(tables)  # as there
    return {"total_compile_time": sum(times.values()), "compile_summary_DurNonChildNs": times}


def first_measurement_children(tables: Tables) -> int:
    host = tables.host.with_row_index("row")
    first = host.filter(pl.col("name").cast(pl.String).str.starts_with(MEASUREMENT)).sort("start").head(1)
    return int(host.filter(pl.col("parent").cast(pl.UInt32).is_in(first["row"].implode()))["duration"].sum())


def communication_numbers(result: Collectives) -> Ours:
    alone = pl.col("exposed_ns") + pl.col("overlapped_ns")  # nsys-jax charges each collective for itself
    described = result.rows.filter("described")
    sizes = result.by_size.filter("described").select(
        pl.col("collective").alias("Collective"),
        pl.col("group_size").alias("CollectiveSize"),
        pl.col("bytes").alias("MessageSize"),
        pl.col("count").alias("n"),
        alone.alias("exposed_ns"),
        "hidden_ns",
        pl.col("bus_gbps_max").alias("bus_max_GBps"),
        pl.col("bus_gbps_mean").alias("bus_mean_GBps"),
    )
    waits = result.instances.group_by("collective").agg(
        n=pl.len(),
        sum=pl.col("out_of_step_ns").sum(),
        median=pl.col("out_of_step_ns").median(),
        max=pl.col("out_of_step_ns").max(),
    )
    by_collective = {row.pop("collective"): row for row in waits.rows(named=True)}
    return {
        "comm_rows": described.height,
        "comm_exposed_ns": int(described.select(alone.sum()).item()),
        "comm_hidden_ns": int(described["hidden_ns"].sum()),
        "comm_by_size": sizes.rows(named=True),
        "wait_ns_by_collective": by_collective,
        "wait_ns_by_collective_fixed_with_ThunkExecution": by_collective,
    }


def flames(tables: Tables, summary: pl.DataFrame, idle_inside: int, idle_between: int) -> Ours:
    """Distinct stacks of the notebook's two flame graphs, and the five largest innermost lines."""
    places = shares(tables, summary)
    stacks = places.select("frames", "op_name").unique().height
    lines = dict(places.group_by("line").agg(pl.col("ns").sum()).rows())
    lines["[GPU idle during module execution]"] = float(idle_inside)
    lines["[GPU idle between module executions]"] = float(idle_between)
    largest = sorted(lines.items(), key=lambda item: -item[1])[:5]
    return {
        "src_flame_distinct_stacks": stacks + 2,
        "op_name_flame_distinct_stacks": op_names(tables, summary) + 2,
        "top5_leaf_lines_ns": [list(item) for item in largest],
    }


def shares(tables: Tables, summary: pl.DataFrame) -> pl.DataFrame:
    """Time of each thunk divided among its places: frames, op_name, line (innermost) and ns."""
    parts = []
    for module in tables.hlo:
        times = summary.filter(pl.col("id") == module.id)
        if times.is_empty():
            continue
        rows = module.instructions.with_row_index("row").select("row", "name", "frame", "op_name")
        named = times.join(rows, left_on="hlo", right_on="name").rename({"row": "instruction"})
        divided = named.select("instruction", "ns").join(constituents_by_place(module), on="instruction")
        placed = divided.join(rows, left_on="constituent", right_on="row")
        lines = {frame: stack_text(module.stack, frame) for frame in placed["frame"].unique()}
        parts.append(
            placed.select(
                "op_name",
                frames=pl.col("frame").replace_strict({f: ";".join(s) for f, s in lines.items()}),
                line=pl.col("frame").replace_strict({f: s[-1] if s else UNKNOWN for f, s in lines.items()}),
                ns=pl.col("ns") * pl.col("weight"),
            )
        )
    return pl.concat(parts)


def stack_text(stack: Callable[[int], tuple[Any, ...]], frame: int) -> list[str]:
    return [f"{f.file}:{f.line}{f':{f.column}' if f.column else ''}[{f.function}]" for f in stack(frame)]


def op_names(tables: Tables, summary: pl.DataFrame) -> int:
    """How many different op_names the thunks and what they call directly have, with "unknown"."""
    names: set[str | None] = set()
    for module in tables.hlo:
        instructions = module.instructions
        ran = instructions.filter(pl.col("name").is_in(summary.filter(pl.col("id") == module.id)["hlo"].implode()))
        inside = instructions.select("computation", inner="op_name")
        called = (
            ran.select("name", pl.col("called"))
            .explode("called")
            .join(inside, left_on="called", right_on="computation")
        )
        pairs_ = pl.concat([ran.select("name", inner="op_name"), called.select("name", "inner")])
        known = pairs_.filter(pl.col("inner").is_not_null())
        names |= set(known["inner"])
        if known["name"].n_unique() < ran.height:
            names.add(None)
    return len(names)


if __name__ == "__main__":
    sys.exit(main())
