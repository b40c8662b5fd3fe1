"""Finds the steps of a program, and the step in which each device activity was launched.

A step is a time on the host: work belongs to the step that is open when it is launched. The steps of a trace are of
one kind (`thence.model.tables.STEP_KINDS`), the first of these that any rank has:

step       ranges that the program or its profiler marks as steps: torch.profiler's step(), thence.step(),
           jax.profiler.StepTraceAnnotation, and the steps that thence's recorder sees. Of ranges inside each other
           on a thread the outermost count; if that is only one, and it is no server's, the ranges inside it
pass       the same if they are passes of an inference server (`thence.attribution.serving`); if other threads of
           the rank have other marked steps, those of which there are more count
range      two or more ranges of the user whose names count steps, iterations or batches ("step 7", "train/iter_7"),
           if at least `STEP_RANGES_SHARE` of the device time that was launched from the first to the last of them was
           launched in them
program    executions of one XLA program on a device, each from its launch to the next launch: of the programs that
           ran at least twice, the one with most device time, if that is `STEP_PROGRAM_SHARE` of the time of all
           programs or more. A trace of XLA programs has none of the kinds below: loops inside a program repeat, too
optimizer  from the end of one step of torch.optim to the end of the next; the first begins with the rank's first
           host row
graph      launches of CUDA graphs, if at least `STEP_RANGES_SHARE` of the device time was launched so
module     calls of modules that are in no other module, and launched work
batch      from one fetch of a batch from a torch DataLoader to the next; what follows the last fetch is in no step

Graphs and modules are sequences of names on one thread: the main thread if it launched such work, else the one that
launched most of it. A sequence repeats with the period p if the share of its names that are equal to the name p
positions later is at least `REPEATED_SHARE`, and there are at least `MIN_REPEATS` periods; the p with the largest share
counts, and of shares that differ by less than `LONGER_PERIOD_SHARE` the smallest p. A step begins at a name that occurs
once in a period, and ends where the next step begins; the last one ends with its last call. So a loop that captured two
graphs has one step for both, and the calls or graphs of layers are no steps, because their names differ. Graphs
without an id have the names of what they ran; layers may have equal ones, so such graphs repeat only if all of them
are equal, or with a period of two or more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.host_rows import gathered
from thence.attribution.serving import server_passes
from thence.model.attributed import RULE
from thence.model.columns import row_numbers
from thence.model.intervals import NO_ROW, last_begun
from thence.model.tables import STEPS
from thence.model.thresholds import (
    LONGER_PERIOD_SHARE,
    MIN_REPEATS,
    REPEATED_SHARE,
    STEP_PROGRAM_SHARE,
    STEP_RANGES_SHARE,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from thence.attribution.host_rows import HostRows
    from thence.model.arrays import Int64, Mask
    from thence.model.tables import Tables


MAX_PERIOD = 256
"""Longest period that is looked for; a model of 80 layers that are graphs of their own has some 81 launches a pass."""
_NUMBER = r"(\d{1,18})\D*$"
_COUNTS = r"(?i)(?:^|[\W_])(?:step|iter|iteration|batch)[\W_]{0,3}\d{1,18}$"
_OPTIMIZER_STEP = r"^Optimizer\.step#"
_FETCH = r"^enumerate\(DataLoader\)#"
_SMALLER = 1 << 24
"""Hashes are divided by this, so that the sum of those of a graph's kernels fits into 64 bits."""


def with_counting_ranges(tables: Tables, host: HostRows) -> tuple[Tables, pl.DataFrame | None]:
    """The tables in which ranges that count steps are steps and no labels, and these steps.

    Without them, or if other ranges are marked as steps, the tables as they are and None.

    Args:
        host: the host table with the launches of the activities.
    """
    if host.of("step").any() or (ranges := _ranges(tables, host)) is None:
        return tables, None
    rows, steps = ranges
    counting = np.zeros(tables.host.height, np.bool_)
    counting[rows] = True
    category = tables.host["category"]
    step = pl.Series(["step"], dtype=category.dtype).new_from_index(0, len(category))
    renamed = step.zip_with(pl.Series(counting), category).alias("category")
    return replace(tables, host=tables.host.with_columns(renamed)), steps


def find_steps(
    tables: Tables, host: HostRows, counting: pl.DataFrame | None = None
) -> tuple[pl.DataFrame, pl.Series, pl.Series, pl.Series]:
    """The steps of a trace, and the step of every activity.

    Args:
        tables: of the trace; with XLA programs, the programs of activities are known.
        host: the host table with the launches of the activities.
        counting: the steps that `with_counting_ranges` found.

    Returns:
        The steps, with the columns of `STEPS`; and for each row of ``gpu`` the columns step, step_rule and step_row.
    """
    steps = _first_kind(tables, host) if counting is None else _numbered(counting)
    row, known = _launched_in(tables, host, steps)
    nowhere = row == NO_ROW
    number = pl.Series("step_row", row).cast(pl.UInt32, strict=False).cast(pl.Int32)
    rules = pl.Series(["launch_time", "outside_steps", "no_launch", "no_steps"], dtype=RULE)
    ranks = np.isin(tables.gpu["rank"].to_numpy(), steps["rank"].to_numpy())
    rule = np.where(nowhere, np.where(ranks, np.where(known, 1, 2), 3), 0)
    name = gathered(steps["name"], row)
    return steps, name.alias("step"), gathered(rules, rule).alias("step_rule"), number


def _first_kind(tables: Tables, host: HostRows) -> pl.DataFrame:
    # Inside an XLA program, loops launch graphs: their rounds are no steps, even if the program ran only once.
    others = (_optimizer_steps, _graph_launches, _module_calls, _fetched_batches)
    for find in (_marked, _executions, *(others if tables.programs.is_empty() else ())):
        steps = find(tables, host)
        if steps is not None and steps.height:
            return _numbered(steps)
    return STEPS.empty()


def _numbered(steps: pl.DataFrame) -> pl.DataFrame:
    """Steps in order with their number, and with the columns of `STEPS`.

    Args:
        steps: rank, device, kind, start, end; name; and numbered, whether the name holds the number.
    """
    group = ("rank", "device")
    position = pl.int_range(pl.len(), dtype=pl.Int64).over(*group)
    number_in_name = pl.when("numbered").then(pl.col("name").str.extract(_NUMBER).cast(pl.Int64))
    all_numbered = (number_in_name.null_count() == 0).over(*group)
    name = pl.when(pl.col("kind").is_in(("step", "pass", "range"))).then("name")
    return (
        steps.with_columns(pl.col("name").cast(pl.String))
        .sort(*group, "start", maintain_order=True)
        .with_columns(number=pl.when(all_numbered).then(number_in_name).otherwise(position))
        .with_columns(
            name=name.otherwise(pl.format("{}#{}", "name", "number")),
            duration=pl.max_horizontal(pl.col("end") - pl.col("start"), 0),
        )
        .select(list(STEPS.schema))
        .cast(STEPS.schema)  # type: ignore[arg-type]
    )


def _frame(kind: str, columns: Mapping[str, object], *, numbered: bool = False) -> pl.DataFrame:
    """Steps of one kind, as `_numbered` takes them."""
    given = {"device": pl.lit(None, pl.Int32())} if "device" not in columns else {}
    return pl.DataFrame(columns).with_columns(**given, kind=pl.lit(kind), numbered=pl.lit(value=numbered))


# ---- Marked steps


def _marked(tables: Tables, host: HostRows) -> pl.DataFrame | None:
    """Ranges that are steps, or passes of a server."""
    step = host.of("step")
    rows = np.flatnonzero(step)
    if not len(rows):
        return None
    names = tables.host["name"].gather(rows)
    of_server = server_passes(tables.host, host.parent)[0][rows]
    around = host.climb(host.parent[rows], step)
    outermost = around == NO_ROW
    ranks = tables.host["rank"].to_numpy()[rows]
    chosen = outermost.copy()
    for rank in np.unique(ranks):
        of_rank = ranks == rank
        alone = np.flatnonzero(of_rank & outermost)
        inner = of_rank & (around == rows[alone[0]]) if len(alone) == 1 else np.zeros(len(rows), np.bool_)
        if inner.sum() > 1 and not of_server[alone[0]]:
            chosen[alone[0]] = False
            chosen |= inner
        passing, marked = of_rank & chosen & of_server, of_rank & chosen & ~of_server
        if passing.any() and marked.any():  # on different threads: the finer steps count
            chosen &= ~(marked if passing.sum() > marked.sum() else passing)
    taken = rows[chosen]
    passes = bool(of_server[chosen].all())
    return _frame(
        "pass" if passes else "step", _times_of(tables, taken) | {"name": names.filter(chosen)}, numbered=not passes
    )


def _times_of(tables: Tables, rows: Int64) -> dict[str, object]:
    """Rank, start and end of host rows."""
    host = tables.host
    start = host["start"].to_numpy()[rows]
    end = start + host["duration"].to_numpy()[rows]
    return {"rank": host["rank"].to_numpy()[rows], "start": start, "end": end}


def _ranges(tables: Tables, host: HostRows) -> tuple[Int64, pl.DataFrame] | None:
    """Outermost ranges of the user whose names count steps: their rows, and the steps."""
    counting = host.named(_COUNTS, "range")
    rows = np.flatnonzero(counting)
    rows = rows[host.climb(host.parent[rows], counting) == NO_ROW]
    if len(rows) < 2:
        return None
    ranges = _frame("range", _times_of(tables, rows) | {"name": tables.host["name"].gather(rows)}, numbered=True)
    first_to_last = ranges.group_by("rank", "device", "kind", "numbered").agg(
        pl.col("start").min(), pl.col("end").max(), pl.col("name").first()
    )
    duration = tables.gpu["duration"].to_numpy()
    inside, between = (
        duration[_launched_in(tables, host, _numbered(frame))[0] != NO_ROW].sum() for frame in (ranges, first_to_last)
    )
    return (rows, ranges) if inside >= max(STEP_RANGES_SHARE * between, 1) else None


# ---- Executions of XLA programs


def _executions(tables: Tables, host: HostRows) -> pl.DataFrame | None:  # noqa: ARG001 - as its siblings
    """Executions of the program of each device that takes most of its time."""
    if tables.programs.is_empty() or (chosen := _main_executions(tables)).is_empty():
        return None
    begin = pl.col("launch").fill_null(pl.col("start"))
    finish = pl.col("start") + pl.col("duration")
    following = pl.col("begin").shift(-1).over("rank", "device")
    steps = chosen.with_columns(begin=begin).sort("rank", "device", "begin", maintain_order=True)
    return _frame(
        "program",
        steps.select(
            "rank", "device", "name", end=following.fill_null(pl.max_horizontal(finish, "begin")), start="begin"
        ).to_dict(),
    )


def _main_executions(tables: Tables) -> pl.DataFrame:
    """The rows of programs whose executions are steps, with their row number; empty if no program repeats."""
    key = ("rank", "device", "program")
    rows = tables.programs.with_row_index("row")
    spent = tables.gpu.group_by(row=pl.col("program").cast(pl.UInt32)).agg(pl.col("duration").sum().alias("ns"))
    executions = rows.filter(pl.col("program").is_not_null()).join(spent, on="row")
    share = pl.col("ns") / pl.col("ns").sum().over("rank", "device")
    main = (
        executions.group_by(key)
        .agg(pl.col("ns").sum(), times=pl.len())
        .with_columns(share=share)
        .filter(pl.col("times") > 1, pl.col("share") >= STEP_PROGRAM_SHARE)
        .sort("ns", "program")
        .group_by("rank", "device", maintain_order=True)
        .agg(pl.col("program").last())
    )
    return executions.join(main, on=key, how="semi", nulls_equal=True, maintain_order="left")


# ---- Steps of the optimizer


def _optimizer_steps(tables: Tables, host: HostRows) -> pl.DataFrame | None:
    """From the end of one optimizer's step to the end of the next."""
    stepping = host.named(_OPTIMIZER_STEP, "op", "range", "framework", "phase")
    rows = np.flatnonzero(stepping)
    rows = rows[host.climb(host.parent[rows], stepping) == NO_ROW]
    times = _times_of(tables, rows)
    rank, end = np.asarray(times["rank"]), np.asarray(times["end"])
    order = np.lexsort((end, rank))
    rank, end, rows = rank[order], end[order], rows[order]
    kept = np.flatnonzero(np.bincount(rank, minlength=1)[rank] >= MIN_REPEATS)
    if not len(kept):
        return None
    rank, end = rank[kept], end[kept]
    begin = np.append(0, end[:-1])
    first = np.append(True, rank[1:] != rank[:-1])
    of_rank, start = tables.host["rank"].to_numpy(), tables.host["start"].to_numpy()
    begin[first] = [int(start[of_rank == number].min()) for number in rank[first]]
    return _frame(
        "optimizer",
        {"rank": rank, "start": begin, "end": end, "name": pl.repeat("optimizer step", len(rank), eager=True)},
    )


# ---- Batches


def _fetched_batches(tables: Tables, host: HostRows) -> pl.DataFrame | None:
    """From the start of one fetch of a batch to the start of the next on the same thread."""
    fetching = host.named(_FETCH, "op", "range", "framework", "phase")
    rows = np.flatnonzero(fetching)
    if not len(rows):
        return None
    rows = rows[host.climb(host.parent[rows], fetching) == NO_ROW]
    columns = ("rank", "process", "thread", "start")
    fetches = tables.host[rows].select(columns).sort(columns)
    end = pl.col("start").shift(-1).over(columns[:3])
    batches = fetches.with_columns(end=end).drop_nulls("end")
    # Several loaders of a rank fetch on one thread, or on threads of which one has the most.
    threads = batches.group_by(columns[:3]).len().sort("len", *columns[:3]).group_by("rank").last()
    chosen = batches.join(threads, on=columns[:3], how="semi", nulls_equal=True)
    chosen = chosen.filter(pl.len().over("rank") >= MIN_REPEATS).sort("rank", "start")
    if chosen.is_empty():
        return None
    return _frame("batch", chosen.select("rank", "start", "end", name=pl.lit("batch")).to_dict())


# ---- Sequences that repeat


@dataclass(frozen=True)
class _Sequence:
    """The host rows of one rank whose repetition makes steps, in order of time, and a number for what each of them is.

    Attributes:
        rows: in host.
        token: equal numbers for equal names.
        sure: whether rows with equal tokens are the same thing.
    """

    rows: Int64
    token: Int64
    sure: bool


def _graph_launches(tables: Tables, host: HostRows) -> pl.DataFrame | None:
    """Launches of CUDA graphs. Launches are alike if they are of one graph, or ran equally named work."""
    duration = tables.gpu["duration"].to_numpy()
    if duration[host.in_graph].sum() < max(STEP_RANGES_SHARE * duration.sum(), 1):
        return None
    launched = pl.DataFrame(
        {
            "row": np.where(host.in_graph, host.launch, NO_ROW),
            "graph": tables.gpu["graph"],
            "name": tables.gpu["name"].to_physical().cast(pl.UInt64),
            "ns": duration,
        }
    ).filter(pl.col("row") != NO_ROW)
    ran = (pl.col("name").hash() // _SMALLER).sum()
    alike = pl.coalesce(pl.col("graph").first(), ran)
    sure = pl.col("graph").first().is_not_null()
    graphs = launched.group_by("row").agg(token=alike, sure=sure, ns=pl.col("ns").sum())
    return _repeating("graph", tables, graphs, pl.lit("graph launch"))


def _module_calls(tables: Tables, host: HostRows) -> pl.DataFrame | None:
    """Calls of modules that are in no other module, and launched work."""
    wanted = host.of("module")
    rows = np.flatnonzero(wanted)
    if not len(rows):
        return None
    top = np.zeros(len(wanted), np.bool_)
    top[rows[host.climb(host.parent[rows], wanted) == NO_ROW]] = True
    launched = pl.DataFrame({"row": host.climb(host.launch, top), "ns": tables.gpu["duration"]}).filter(
        pl.col("row") != NO_ROW
    )
    calls = launched.group_by("row").agg(pl.col("ns").sum())
    token = tables.host["name"].gather(calls["row"]).to_physical().cast(pl.UInt64)
    return _repeating("module", tables, calls.with_columns(token=token, sure=True), pl.col("name"))


def _repeating(kind: str, tables: Tables, calls: pl.DataFrame, name: pl.Expr) -> pl.DataFrame | None:
    """The steps that a sequence of host rows makes by repeating.

    Args:
        kind: of the steps.
        calls: row (in host), token (equal for calls that are alike), sure (whether equal tokens are one thing, not
            two that ran equally named work), ns (device time that it launched).
        name: name of a step, from the columns of host.
    """
    parts = []
    for sequence in _sequences(tables, calls):
        first = _begins(sequence.token, sure=sequence.sure)
        if first is None:
            continue
        rows = sequence.rows[first]
        times = _times_of(tables, rows)
        start = np.asarray(times["start"])
        period = sequence.rows[first[-1] :][: max(int(np.median(np.diff(first))), 1)]
        last = int(np.max(np.asarray(_times_of(tables, period)["end"])))
        names = tables.host[rows].select(name.cast(pl.String).alias("name")).to_series()
        names = names if len(names) == len(rows) else names.new_from_index(0, len(rows))
        parts.append(
            _frame(kind, {"rank": times["rank"], "start": start, "end": np.append(start[1:], last), "name": names})
        )
    return pl.concat(parts) if parts else None


def _sequences(tables: Tables, calls: pl.DataFrame) -> Iterator[_Sequence]:
    """The calls of one thread of each rank: of the main thread, else of the one that launched most."""
    columns = ("rank", "process", "thread", "start")
    launching = calls.with_columns(tables.host.select(columns)[calls["row"].to_numpy()])
    main = (pl.col("process") == pl.col("thread")).first()
    threads = launching.group_by(columns[:3]).agg(pl.col("ns").sum(), main=main)
    chosen = threads.sort("main", "ns", *columns[:3]).group_by("rank").last()
    of_threads = launching.join(chosen, on=columns[:3], how="semi").sort("rank", "start", "row")
    for _, part in of_threads.group_by("rank", maintain_order=True):
        token = part["token"].rank("dense").cast(pl.Int64).to_numpy()
        row = part["row"].cast(pl.Int64).to_numpy()
        yield _Sequence(row, token, bool(part["sure"].all()))


def _begins(token: Int64, *, sure: bool) -> Int64 | None:
    """The positions at which the periods of a sequence begin; None if it does not repeat."""
    periods = range(1, min(len(token) // MIN_REPEATS, MAX_PERIOD) + 1)
    alike = np.array([(token[period:] == token[:-period]).mean() for period in periods])
    if not len(alike) or alike.max() < REPEATED_SHARE:
        return None
    period = int(np.flatnonzero(alike > alike.max() - LONGER_PERIOD_SHARE)[0]) + 1
    if period == 1:
        return np.arange(len(token)) if sure or alike[0] == 1 else None
    values, first = np.unique(token, return_index=True)
    for value in values[np.argsort(first)]:
        begins = np.flatnonzero(token == value)
        if len(begins) >= MIN_REPEATS and (np.diff(begins) == period).mean() >= REPEATED_SHARE:
            return begins
    return None


# ---- Activities


def _launched_in(tables: Tables, host: HostRows, steps: pl.DataFrame) -> tuple[Int64, Mask]:
    """The step of each activity, `NO_ROW` for none, and whether the time of its launch is known.

    An execution of an XLA program is launched when the host begins to launch it, or, if that is not known, when it
    starts; so is its work whose own launch is unknown, and all of its work if executions are the steps.
    """
    gpu, programs = tables.gpu, tables.programs
    known = host.launch != NO_ROW
    time = np.zeros(gpu.height, np.int64)
    time[known] = tables.host["start"].to_numpy()[host.launch[known]]
    execution = row_numbers(gpu["program"])
    executions = bool((steps["kind"] == "program").any())
    by_program = (execution != NO_ROW) & (~known | executions)
    if by_program.any():
        begun = programs["launch"].fill_null(programs["start"]).fill_null(0).to_numpy()
        time[by_program] = begun[execution[by_program]]
        known |= by_program
    row = np.full(gpu.height, NO_ROW, np.int64)
    if steps.is_empty():
        return row, known
    of_device = steps["device"].null_count() == 0
    key = ["rank", "device"] if of_device else ["rank"]
    start = steps["start"].to_numpy()
    end = start + steps["duration"].to_numpy()
    place = dict(_rows_by(steps, key))
    for group, rows in _rows_by(gpu, key):
        if group not in place:
            continue
        launched = rows[known[rows]]
        step_rows = place[group]
        last_step = last_begun(start[step_rows], time[launched])
        inside = (last_step != NO_ROW) & (time[launched] < end[step_rows][last_step])
        row[launched[inside]] = step_rows[last_step[inside]]
    return row, known


def _rows_by(frame: pl.DataFrame, key: list[str]) -> Iterator[tuple[tuple[object, ...], Int64]]:
    """The rows of each group of a table, in order."""
    rows = frame.select(key).with_row_index("row").group_by(key, maintain_order=True).agg("row")
    for *group, own in rows.iter_rows():
        yield tuple(group), np.asarray(own, np.int64)
