"""The summary of a rank: the data from which to find which rank is late, since when, and why.

The summaries of many ranks fit into memory even if their traces do not. Each is made from its rank alone. Results that
need several ranks (which kernels are one collective, clocks, waits) are computed from the summaries.

Its tables are small: collectives are the only activities with rows of their own, and the other tables have at most a
few hundred rows per step of a rank. Times are ns on the clock of the rank's machine (since 1970 if the trace tells when
its clock read 0), so that ranks that were read one by one can be compared.

For every kernel of a collective, the summary holds how long the device had computed, copied and been idle since its
first activity, when the kernel began and when it ended. A difference of two such values is the compute, copy or idle
time between two kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.collectives.exposure import exposure
from thence.analysis.collectives.first_calls import first_calls_of_ranks
from thence.analysis.collectives.instances import collective_instances
from thence.analysis.collectives.missing import job_size
from thence.analysis.grouping.kernel_groups import communicates, computes
from thence.analysis.idle.causes import idle_causes
from thence.analysis.idle.host_causes import CAUSES
from thence.analysis.idle.places import names_of_contexts
from thence.analysis.rank_tables import concatenated, rank_table
from thence.analysis.selection.select import select
from thence.analysis.selection.windows import windows_at
from thence.analysis.steps.windows import STEP, selected_steps
from thence.errors import MissingData
from thence.model.columns import nullable
from thence.model.grouped_intervals import GroupedTimes, GroupedUnion, in_order, numbered, numbered_together
from thence.model.intervals import NEVER, NO_ROW, Intervals, reached_before
from thence.model.places import COMPARED
from thence.model.places import PLACES as PLACES_OF_LAUNCHES
from thence.model.selection import Selection
from thence.model.tables import Column
from thence.model.thresholds import FULL_QUEUE_CALL_NS, FULL_QUEUE_CALL_RATIO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed


MAX_ROWS = 150
"""Maximum number of rows with a name for one step, device and kind of place: those with the most time. The others are
merged into rows without a name."""

_DEVICE_COLUMN = Column("device", pl.Int32(), "device index within the process")
_STEP_COLUMN = Column("step", pl.Int32(), "row of the step among those of its rank and device, in order")
_COUNT_COLUMN = Column("count", pl.Int64(), "activities, or pieces of idle time")
_TOTAL_COLUMN = Column("total_ns", pl.Int64(), "plain sum of their durations, ns")
_NAME_COLUMN = Column("name", pl.String(), "null: the sum of all names without a row of their own")

DEVICES = rank_table(
    "devices",
    "one device of one rank",
    (
        _DEVICE_COLUMN,
        Column("name", pl.String(), "name of the GPU; null where the trace does not state it"),
        Column("start", pl.Int64(), "ns: start of its first activity"),
        Column("end", pl.Int64(), "ns: end of its last activity"),
        Column("busy_ns", pl.Int64(), "union of its activities"),
        Column("step_kind", pl.String(), "how steps were found, as in STEP_KINDS; null: the whole trace is one step"),
        Column("undescribed", pl.Int64(), "kernels that communicate without a description"),
        Column("epoch_known", pl.Boolean(), "whether times count from 1970"),
        Column(
            "job_ranks",
            pl.Int32(),
            "ranks of the job, see `thence.analysis.collectives.missing`; null where the rank's trace does not tell",
        ),
    ),
    required=("device", "start", "end", "busy_ns", "undescribed", "epoch_known"),
)
STEPS = rank_table(
    "steps",
    "one step on one device, as `thence.analysis.steps.windows` finds it",
    (
        _DEVICE_COLUMN,
        _STEP_COLUMN,
        Column("name", pl.String(), "name of the step; null where the whole trace is one step"),
        Column("number", pl.Int64(), "number at the end of the name; null without one"),
        Column("start", pl.Int64(), "ns"),
        Column("duration", pl.Int64(), "ns; busy_ns and idle_ns add up to it"),
        Column("busy_ns", pl.Int64(), "union of the activities"),
        Column("idle_ns", pl.Int64(), "the rest"),
        Column("compute_ns", pl.Int64(), "union of all kernels that do not communicate"),
        Column("copy_ns", pl.Int64(), "time of memcpys and memsets in which nothing computed"),
        Column("exposed_ns", pl.Int64(), "time of communication in which nothing computed, whether or not copies ran"),
        Column(
            "host_ns",
            pl.Int64(),
            "ns that its host worked for the step, see `thence.analysis.ranks.summary`; null where not known",
        ),
        Column("first", pl.Boolean(), "whether it is the first step on its device"),
    ),
    required=(
        "device",
        "step",
        "start",
        "duration",
        "busy_ns",
        "idle_ns",
        "compute_ns",
        "copy_ns",
        "exposed_ns",
        "first",
    ),
)
COLLECTIVES = rank_table(
    "collectives",
    "one kernel of a collective that its library described",
    (
        _DEVICE_COLUMN,
        Column("number", pl.Int32(), "row among the collectives of its rank"),
        Column("step", pl.Int32(), "step that launched it; -1 without one"),
        Column("start", pl.Int64(), "ns: when it arrived"),
        Column("duration", pl.Int64(), "ns"),
        Column("launch", pl.Int64(), "ns: begin of its launch; null where unknown"),
        Column("correlation", pl.Int64(), "correlation id of its launch"),
        Column("replayed", pl.Boolean(), "whether it ran in a CUDA graph"),
        Column(
            "first_call",
            pl.Boolean(),
            "whether it created its communicator, see `thence.analysis.collectives.first_calls`",
        ),
        Column("execution", pl.Int32(), "execution of an XLA program, numbered within the rank"),
        Column("program", pl.String(), "name of that program"),
        Column("hlo", pl.String(), "HLO instruction"),
        Column("collective", pl.String(), "as its library names it"),
        Column("bytes", pl.Int64(), "message size"),
        Column("element_type", pl.String(), "as the library spells it"),
        Column("group_size", pl.Int32(), "ranks that take part"),
        Column("group", pl.Int32(), "row in groups of the same rank"),
        Column("sequence", pl.Int64(), "sequence number in its group"),
        Column("source_rank", pl.Int32(), "source of broadcasts, sends and receives"),
        Column("destination_rank", pl.Int32(), "destination of sends and receives"),
        Column("exposed_ns", pl.Int64(), "exposed time charged to it, see `thence.analysis.collectives.exposure`"),
        Column("exposed_start", pl.Int64(), "ns: begin of the longest piece of that time"),
        Column("exposed_end", pl.Int64(), "ns: end of that piece"),
        *(
            Column(f"{what}_{when}_ns", pl.Int64(), f"{of} from the device's first activity to its {when}")
            for when in ("start", "end")
            for what, of in (
                ("compute", "time in which something computed,"),
                ("copy", "time of copies in which nothing computed,"),
                ("idle", "time in which nothing ran,"),
            )
        ),
    ),
    required=("device", "number", "step", "start", "duration", "replayed", "first_call", "collective", "group"),
)
PARTS = rank_table(
    "parts",
    "one message of a kernel that sends and receives several",
    (
        Column("number", pl.Int32(), "row in collectives of the same rank"),
        Column("order", pl.Int64(), "position among the messages of its kernel"),
        *(
            column
            for column in COLLECTIVES.columns
            if column.name
            in (
                *("collective", "bytes", "element_type", "group_size", "group", "sequence"),
                *("source_rank", "destination_rank"),
            )
        ),
    ),
    required=("number", "order"),
)
GROUPS = rank_table(
    "groups",
    "one process group of one rank",
    (
        Column("group", pl.Int32(), "number within the rank"),
        Column("name", pl.String(), "as the library names it; null where it does not"),
        Column("description", pl.String(), "as the library describes it"),
        Column("members", pl.String(), "its ranks, as the producer wrote them"),
    ),
    required=("group",),
)
KERNELS = rank_table(
    "kernels",
    "kernels that compute, and copies, of one step and device, by name and shape",
    (
        _DEVICE_COLUMN,
        _STEP_COLUMN,
        Column("kind", pl.String(), "kernel, thunk, memcpy or memset"),
        _NAME_COLUMN,
        Column("shape", pl.String(), "grid and block, or bytes of copies; null where not known"),
        _COUNT_COLUMN,
        _TOTAL_COLUMN,
    ),
    required=("device", "step", "kind", "count", "total_ns"),
)
PLACES = rank_table(
    "places",
    "where the kernels that compute, and copies, of one step and device came from",
    (
        _DEVICE_COLUMN,
        _STEP_COLUMN,
        Column("by", pl.String(), "source, module, label, op, phase or hlo"),
        Column("name", pl.String(), "the place; null: no place, or the sum of all places without a row of their own"),
        _COUNT_COLUMN,
        _TOTAL_COLUMN,
    ),
    required=("device", "step", "by", "count", "total_ns"),
)
IDLE = rank_table(
    "idle",
    "idle time that began in a step of a device, by cause and place",
    (
        _DEVICE_COLUMN,
        _STEP_COLUMN,
        Column("cause", pl.Enum(CAUSES), "as `thence.analysis.idle.causes` finds it"),
        Column("by", pl.String(), "line, module, label, op, call, phase or cause (all of it)"),
        Column("name", pl.String(), "the place; null: no place, or the sum of all places without a row of their own"),
        _COUNT_COLUMN,
        _TOTAL_COLUMN,
    ),
    required=("device", "step", "cause", "by", "count", "total_ns"),
)

SUMMARY = {table.name: table for table in (DEVICES, STEPS, COLLECTIVES, PARTS, GROUPS, KERNELS, PLACES, IDLE)}
"""Every table of a summary, by name."""


def host_work(trace: Attributed, steps: pl.DataFrame) -> pl.Series:
    """The length of each step on its host, less calls that waited for the device and launches that waited for room.

    Args:
        steps: rank, host_start and host_ns, as `thence.analysis.steps.windows` returns them.

    Returns:
        ns, in the order of the steps; null if the step has no times on the host, or the rank no launch.
    """
    waited = _waited(trace)
    timed = steps.select("rank", "host_start", "host_ns").with_row_index("at").drop_nulls()
    rank, rank_waited, ranks = numbered_together(timed, waited, "rank")
    begin, length = timed["host_start"].to_numpy(), timed["host_ns"].to_numpy()
    start, end, waits = (waited[name].to_numpy() for name in ("start", "end", "waits"))
    waiting = GroupedUnion.of(rank_waited[waits], start[waits], end[waits], ranks)
    launching = np.zeros(ranks, np.bool_)
    launching[rank_waited] = True
    row = timed["at"].to_numpy()
    work, known = np.zeros(steps.height, np.int64), np.zeros(steps.height, np.bool_)
    work[row], known[row] = length - waiting.covered(rank, begin, begin + length), launching[rank]
    return nullable(work, ~known).alias("host_ns")


def _waited(trace: Attributed) -> pl.DataFrame:
    """Launches, and calls that wait for the device: rank, start, end, and waits (whether it waited for the device)."""
    columns = ("rank", "start", "duration")
    rows = trace.places["launch"].drop_nulls().unique()
    launches = trace.host[rows.cast(pl.UInt32)].select(columns)
    usual = pl.col("duration").median().over("rank")
    slow = (pl.col("duration") > FULL_QUEUE_CALL_RATIO * usual) & (pl.col("duration") > FULL_QUEUE_CALL_NS)
    waits = trace.host[trace.waits["host"].cast(pl.UInt32)].select(columns)
    every = pl.concat([launches.with_columns(waits=slow), waits.with_columns(waits=pl.lit(value=True))])
    return every.with_columns(end=pl.col("start") + pl.col("duration")).sort("rank", "start")


_GROUP_COLUMNS = {"name": "group_name", "description": "group_description", "members": "group_ranks"}
_LATEST = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class Coverage:
    """The unions of the activities of every device.

    Attributes:
        devices: rank and device, by number.
        span: from the first start to the last end on each device.
        busy_ns: length of `every` on each device.
        every, compute, compute_or_copy, compute_or_communication: unions of activities, by number of the device.
    """

    devices: pl.DataFrame
    span: Intervals
    busy_ns: Int64
    every: GroupedUnion
    compute: GroupedUnion
    compute_or_copy: GroupedUnion
    compute_or_communication: GroupedUnion

    @classmethod
    def of(cls, work: pl.DataFrame) -> Coverage:
        """The unions of activities with columns rank, device, start, end, communicates and computes."""
        start, end, talks, computes = (work[name].to_numpy() for name in ("start", "end", "communicates", "computes"))
        kinds = np.ones(len(start), np.bool_), computes, ~talks, talks | computes
        number, devices = numbered(work, *_DEVICE)
        span = Intervals(np.full(devices.height, _LATEST), np.full(devices.height, NEVER))
        np.minimum.at(span.start, number, start)
        np.maximum.at(span.end, number, end)
        every, *unions = (GroupedUnion.of(number[kind], start[kind], end[kind], devices.height) for kind in kinds)
        busy = every.covered(np.arange(devices.height), span.start, span.end)
        return cls(devices, span, busy, every, *unions)

    def device(self, frame: pl.DataFrame) -> Int64:
        """The number of the device of each row of a frame with the columns rank and device."""
        number, devices = numbered(frame, *_DEVICE)
        known = {key: number for number, key in enumerate(self.devices.rows())}
        return np.array([known[key] for key in devices.rows()], np.int64)[number]


def collective_tables(
    trace: Attributed, coverage: Coverage, work: pl.DataFrame, step: Int64
) -> dict[str, pl.DataFrame]:
    """The tables collectives, parts and groups of a summary.

    Args:
        work: its activities, in the order of ``trace.gpu``, with start, end, rank, device and communicates.
        step: step of each activity, -1 for none.
    """
    described = trace.collectives.with_row_index("of").filter(pl.col("gpu").is_not_null())
    rank = trace.gpu["rank"]
    of_rank = described.select("gpu", rank=rank.gather(described["gpu"].cast(pl.UInt32)))
    numbers = of_rank.select("gpu", number=pl.int_range(pl.len(), dtype=pl.Int32).over("rank"))
    parts = trace.collective_parts.join(numbers, on="gpu")
    keys = list(_GROUP_COLUMNS.values())
    # In large jobs a group lists thousands of ranks, so each group is stored once.
    used = pl.concat(
        [
            rows.select(pl.col(key).cast(pl.String) for key in keys).with_columns(
                rank=rank.gather(rows["gpu"].cast(pl.UInt32))
            )
            for rows in (described, parts)
        ]
    )
    groups = used.unique().sort("rank", *keys).with_columns(group=pl.int_range(pl.len(), dtype=pl.Int32).over("rank"))
    rows = _collective_kernels(trace, described, groups, step)
    return {
        "collectives": _between(trace, rows, coverage, work).select(list(COLLECTIVES.schema)),
        "parts": _grouped(parts.with_columns(rank=rank.gather(parts["gpu"].cast(pl.UInt32))), groups)
        .with_columns(order=pl.int_range(pl.len()).over("rank", "number"))
        .sort("rank", "number", "host", maintain_order=True)
        .with_columns(order=pl.int_range(pl.len()).over("rank", "number"))
        .select(list(PARTS.schema)),
        "groups": groups.select("rank", "group", **_GROUP_COLUMNS).select(list(GROUPS.schema)),
    }


def _grouped(rows: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """Adds the number of the group, and casts texts to String."""
    keys = list(_GROUP_COLUMNS.values())
    texts = rows.with_columns(pl.col(*keys, "collective", "element_type").cast(pl.String))
    return texts.join(groups, on=["rank", *keys], how="left", nulls_equal=True, maintain_order="left")


def _collective_kernels(trace: Attributed, described: pl.DataFrame, groups: pl.DataFrame, step: Int64) -> pl.DataFrame:
    """The columns that identify the collective of a kernel; and gpu, the kernel's row."""
    gpu_row = described["gpu"].to_numpy()
    host = trace.places["launch"].gather(described["gpu"].cast(pl.UInt32)).cast(pl.UInt32)
    gpu = trace.gpu[gpu_row]
    program = gpu["program"]
    replayed = described["gpu"].is_in(trace.graph_places["gpu"].implode())
    first = first_calls_of_ranks(trace, collective_instances(trace).rows)
    rows = described.with_columns(
        gpu.select("rank", "device", "start", "duration", "correlation", pl.col("hlo").cast(pl.String)),
        step=pl.Series(step[gpu_row], dtype=pl.Int32),
        launch=trace.host["start"].gather(host),
        replayed=replayed,
        first_call=pl.col("of").is_in(first.cast(pl.UInt32).implode()),
        execution=program,
        program=trace.programs["name"].cast(pl.String).gather(program.cast(pl.UInt32)),
    )
    return _grouped(rows, groups).with_columns(
        number=pl.int_range(pl.len(), dtype=pl.Int32).over("rank"),
        # Executions are numbered within their rank.
        execution=pl.col("execution") - pl.col("execution").min().over("rank"),
    )


def _between(trace: Attributed, rows: pl.DataFrame, coverage: Coverage, work: pl.DataFrame) -> pl.DataFrame:
    """Adds exposed time, and the times that the device had computed, copied and been idle at start and end."""
    charged = exposure(trace).rows.select("gpu", "exposed_ns")
    charged_rows = rows.with_row_index("at").with_columns(pl.col("gpu").cast(pl.UInt32))
    charged_rows = charged_rows.join(charged, on="gpu", how="left", maintain_order="left")
    pieces = _longest_exposed(work, coverage)
    charged_rows = charged_rows.with_columns(
        exposed_start=pieces["exposed_start"].gather(charged_rows["gpu"]),
        exposed_end=pieces["exposed_end"].gather(charged_rows["gpu"]),
    )
    start = charged_rows["start"].to_numpy()
    times = {"start": start, "end": start + charged_rows["duration"].to_numpy()}
    device = coverage.device(charged_rows)
    columns: dict[str, pl.Series] = {}
    for when, time in times.items():
        since = Intervals(coverage.span.start[device], time)
        compute, working, busy = (
            union.covered(device, since.start, since.end)
            for union in (coverage.compute, coverage.compute_or_copy, coverage.every)
        )
        of_time = {"compute": compute, "copy": working - compute, "idle": since.duration - busy}
        columns |= {f"{what}_{when}_ns": pl.Series(values) for what, values in of_time.items()}
    return charged_rows.with_columns(**columns)


def _longest_exposed(work: pl.DataFrame, coverage: Coverage) -> pl.DataFrame:
    """For every activity that communicates, the longest piece of exposed time that is charged to it."""
    device = coverage.device(work)
    start, end = work["start"].to_numpy(), work["end"].to_numpy()
    talking = np.flatnonzero(work["communicates"].to_numpy())
    talking = talking[in_order(device[talking], start[talking], coverage.devices.height)]
    group, ends = device[talking], end[talking]
    charged = Intervals(np.minimum(np.maximum(start[talking], reached_before(ends, group)), ends), ends)
    result = {name: np.zeros(work.height, np.int64) for name in ("exposed_start", "exposed_end")}
    overlap = _longest_outside(group, charged, coverage.compute)
    result["exposed_start"][talking], result["exposed_end"][talking] = overlap.start, overlap.end
    return pl.DataFrame(result)


def _longest_outside(group: Int64, intervals: Intervals, union: GroupedUnion) -> Intervals:
    """The longest part of each interval that does not touch the union of its group.

    If the union covers an interval, the result is empty at the interval's start.
    """
    start, end = intervals.start, intervals.end
    # The parts of a group that are outside: before, between and after its intervals.
    numbers = np.arange(union.groups)
    free = Intervals(
        np.insert(union.end, np.searchsorted(union.group, numbers), -_LATEST),
        np.insert(union.start, np.searchsorted(union.group, numbers, side="right"), _LATEST),
    )
    first = union.starts.search(group, start, "right") + group
    union_ends = GroupedTimes.of(union.group, union.end, union.groups)
    last = union_ends.search(group, end, "left") + group + 1
    count = np.maximum(last - first, 0)
    interval = np.repeat(np.arange(len(start)), count)
    piece = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + first[interval]
    begin, finish = np.maximum(free.start[piece], start[interval]), np.minimum(free.end[piece], end[interval])
    order = np.lexsort((finish - begin, interval))
    longest = order[np.flatnonzero(np.diff(interval[order], append=len(start)))]
    begins, ends = start.copy(), start.copy()
    begins[interval[longest]], ends[interval[longest]] = begin[longest], finish[longest]
    return Intervals(begins, ends)


_MAX_BATCH_ROWS = 60_000  # activities and host ranges of ranks that are summarised together
_BY = (*(kind for kind in COMPARED if kind in PLACES_OF_LAUNCHES), "phase")
_IDLE_BY = ("source", "module", "label", "op", "call")
_DEVICE = ("rank", "device")
_OF_STEP = ("rank", "device", "step")


def summarise_rank(trace: Attributed, *, explain: bool = True) -> dict[str, pl.DataFrame]:
    """The summary of one rank.

    Args:
        trace: the attributed trace of one rank, or of several, which are summarised as if each were alone. Of
            several, either all must have steps or none.
        explain: whether kernels, places and idle are wanted, from which the reasons of late ranks are found; without
            them the summary takes a fraction of the time.

    Returns:
        A frame for each table of `thence.analysis.ranks.summary.SUMMARY`, with exactly its columns and
        types; without rows if the trace holds no device activity.
    """
    if trace.gpu.is_empty():
        return {name: table.empty() for name, table in SUMMARY.items()}
    talking = communicates(trace)
    work = trace.gpu.select("rank", "device", "start", "duration").with_columns(
        end=pl.col("start") + pl.col("duration"), communicates=talking, computes=computes(trace, talking)
    )
    coverage = Coverage.of(work)
    frame, kind = _steps(trace, coverage)
    step = _step_of(trace, work, frame, kind)
    epoch = trace.meta.epoch_ns or 0
    tables = {"devices": _devices(trace, work, coverage, kind), "steps": _step_rows(trace, frame, coverage)}
    if trace.collectives["gpu"].null_count() < trace.collectives.height:
        tables |= collective_tables(trace, coverage, work, step)
    if explain:
        worked = _worked(work, step)
        tables["kernels"] = _kernels(trace, worked)
        tables["places"] = _places(trace, worked)
        tables["idle"] = _idle(trace, frame)
    moments = ("start", "end", "launch", "exposed_start", "exposed_end")
    return {
        name: tables[name].select(
            (pl.col(c.name) + epoch if c.name in moments else pl.col(c.name)).cast(c.dtype) for c in table.columns
        )
        if name in tables
        else table.empty()
        for name, table in SUMMARY.items()
    }


def summarise_ranks(trace: Attributed, *, explain: bool = True) -> dict[str, pl.DataFrame]:
    """The summaries of all ranks of a trace, concatenated; that of a rank does not depend on the other ranks.

    Small ranks are summarised together: a summary takes hundreds of array operations, however few its rows are.
    """
    if len(trace.ranks) < 2:
        return summarise_rank(trace, explain=explain)
    parts = (part for batch in _batches(trace) for part in _summarised(trace, batch, explain=explain))
    return {name: frame.sort("rank", maintain_order=True) for name, frame in concatenated(parts, SUMMARY).items()}


def _batches(trace: Attributed) -> Iterator[tuple[int, ...]]:
    """The ranks with device work, in batches of limited size; in a batch, all ranks have steps, or none has."""
    stepping = trace.host.filter(pl.col("category") == "step")["rank"].unique()
    host = trace.host.group_by("rank").len("ranges")
    rows = trace.gpu.group_by("rank").len("rows").join(host, on="rank", how="left").sort("rank")
    rows = rows.select(
        "rank", rows=pl.col("rows") + pl.col("ranges").fill_null(0), steps=pl.col("rank").is_in(stepping.implode())
    )
    for part in rows.partition_by("steps", maintain_order=True):
        batch: list[int] = []
        size = 0
        for rank, count, _ in part.rows():
            if batch and size + count > _MAX_BATCH_ROWS:
                yield tuple(batch)
                batch, size = [], 0
            batch.append(rank)
            size += count
        yield tuple(batch)


def _summarised(trace: Attributed, ranks: tuple[int, ...], *, explain: bool) -> Iterator[dict[str, pl.DataFrame]]:
    """The summary of a batch of ranks; a rank of which others have steps and it has none has one of its own."""
    # What was found of the activities of the whole trace is there already.
    part = trace if list(ranks) == trace.ranks else select(trace, Selection(ranks=ranks))
    summary = summarise_rank(part, explain=explain)
    without = sorted(set(ranks) - set(summary["steps"]["rank"]))
    if not without or len(ranks) == 1:
        yield summary
        return
    yield {name: frame.filter(~pl.col("rank").is_in(without)) for name, frame in summary.items()}
    for rank in without:
        yield summarise_rank(select(trace, Selection(ranks=(rank,))), explain=explain)


def _steps(trace: Attributed, coverage: Coverage) -> tuple[pl.DataFrame, str | None]:
    """The steps with their number on the device (row), and their kind; without steps, the whole trace as one step."""
    try:
        selected = selected_steps(trace)
    except MissingData:
        start, busy_ns, duration = coverage.span.start, coverage.busy_ns, coverage.span.duration
        frame = coverage.devices.with_columns(
            start=start, duration=duration, busy_ns=busy_ns, idle_ns=duration - busy_ns, first=pl.lit(value=True)
        )
        missing = {name: dtype for name, dtype in STEP.items() if name not in frame.columns}
        frame = frame.with_columns(pl.lit(None, dtype).alias(n) for n, dtype in missing.items())
        kind = None
    else:
        frame, kind = selected.frame.rename({"row": "row_of_step"}), selected.kind
    frame = frame.sort(*_DEVICE, "start", maintain_order=True).with_columns(
        row=pl.int_range(pl.len(), dtype=pl.Int32).over(*_DEVICE)
    )
    return frame, kind


def _step_of(trace: Attributed, work: pl.DataFrame, frame: pl.DataFrame, kind: str | None) -> Int64:
    """The step of each activity: the one that launched it, else the one in whose window it began."""
    inside = windows_at(work, frame)
    if kind is not None:
        step = frame.select(*_DEVICE, step_row="row_of_step", at=pl.int_range(pl.len()))
        launched = trace.places.select(pl.col("step_row").cast(pl.Int64))
        launched_in = pl.concat([work.select(*_DEVICE), launched], how="horizontal").join(
            step, on=[*_DEVICE, "step_row"], how="left", maintain_order="left"
        )
        inside = launched_in["at"].fill_null(pl.Series(inside)).to_numpy()
    return np.append(frame["row"].to_numpy(), NO_ROW)[inside]


def _devices(trace: Attributed, work: pl.DataFrame, coverage: Coverage, kind: str | None) -> pl.DataFrame:
    names = {(device.rank, device.device): device.name for device in trace.meta.devices}
    undescribed = work["communicates"].to_numpy().copy()
    undescribed[trace.collectives["gpu"].drop_nulls().to_numpy()] = False
    silent = np.bincount(coverage.device(work)[undescribed], minlength=coverage.devices.height)
    return coverage.devices.with_columns(
        name=pl.Series([names.get(device) for device in coverage.devices.rows()], dtype=pl.String),
        start=coverage.span.start,
        end=coverage.span.end,
        busy_ns=coverage.busy_ns,
        step_kind=pl.lit(kind, pl.String),
        undescribed=silent,
        epoch_known=pl.lit(trace.meta.epoch_ns is not None),
        job_ranks=pl.lit(job_size(trace), pl.Int32),
    )


def _step_rows(trace: Attributed, frame: pl.DataFrame, coverage: Coverage) -> pl.DataFrame:
    start = frame["start"].to_numpy()
    end = start + frame["duration"].to_numpy()
    device = coverage.device(frame)
    compute, working, talking = (
        union.covered(device, start, end)
        for union in (coverage.compute, coverage.compute_or_copy, coverage.compute_or_communication)
    )
    every = frame.with_columns(compute_ns=compute, copy_ns=working - compute, exposed_ns=talking - compute)
    every = every.rename({"step": "name", "row": "step"})
    every = every.with_columns(host_work(trace, every))
    return every.select(column.name for column in STEPS.columns)


def _summed(rows: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """Count and time of rows by step, device and further columns; faster if names are Categorical."""
    return rows.group_by(*_OF_STEP, *by).agg(count=pl.len().cast(pl.Int64), total_ns=pl.col("duration").sum())


def _without_shorter(
    sums: pl.DataFrame, keys_within: list[str], names: list[str], kept: tuple[str, ...]
) -> pl.DataFrame:
    """Keeps the `MAX_ROWS` longest sums of each step, device and ``of``, and merges the others.

    The merged sums are one row without a name for each value of ``kept``.
    """
    within = [*_OF_STEP, *keys_within]
    sums = sums.with_columns(pl.col(*kept, *names).cast(pl.String))
    keys = [*within, "total_ns", *kept, *names]
    order = sums.sort(*keys, descending=[name == "total_ns" for name in keys])
    largest = pl.int_range(pl.len()).over(within) < MAX_ROWS
    return (
        order.with_columns(pl.when(largest).then(name).alias(name) for name in names)
        .group_by(*within, *kept, *names, maintain_order=True)
        .agg(pl.col("count", "total_ns").sum())
    )


def _worked(work: pl.DataFrame, step: Int64) -> pl.DataFrame:
    """Activities in a step that compute or copy: rank, device, step, duration, gpu (row)."""
    numbered = work.with_row_index("gpu").with_columns(step=pl.Series(step, dtype=pl.Int32))
    chosen = numbered.filter(~pl.col("communicates"), pl.col("step") != NO_ROW)
    return chosen.select(*_OF_STEP, "duration", "gpu")


def _kernels(trace: Attributed, worked: pl.DataFrame) -> pl.DataFrame:
    facts = trace.gpu.select("kind", "name", "grid", "block", "bytes")[worked["gpu"].to_numpy()]
    shape = (
        pl.when(pl.col("grid").is_not_null())
        .then(pl.format("grid {} block {}", _dimensions("grid"), _dimensions("block")))
        .when(pl.col("bytes").is_not_null())
        .then(pl.format("{} bytes", "bytes"))
    )
    sums = _summed(worked.hstack(facts), ["kind", "name", "grid", "block", "bytes"])
    sums = sums.with_columns(shape=shape)
    by_shape = sums.group_by(*_OF_STEP, "kind", "name", "shape").agg(pl.col("count", "total_ns").sum())
    kept = _without_shorter(by_shape, [], ["name", "shape"], ("kind",))
    return kept.select(list(KERNELS.schema))


def _dimensions(name: str) -> pl.Expr:
    """Numbers of blocks or threads in x, y and z as text, such as 1x2x3."""
    axes = [pl.col(name).arr.get(axis).cast(pl.String) for axis in range(3)]
    return pl.concat_str(axes, separator="x").alias(name)


def _places(trace: Attributed, worked: pl.DataFrame) -> pl.DataFrame:
    places = trace.places.select(_BY)[worked["gpu"].to_numpy()]
    # Activities of one place by one kind have few places by the others, so they are summed once for all kinds.
    sums = _by_kind(_summed(worked.hstack(places), list(_BY)), list(_OF_STEP), _BY)
    named = sums.filter(pl.col("name").is_not_null().any().over("rank", "by"))
    return _without_shorter(named, ["by"], ["name"], ()).select(list(PLACES.schema))


def _by_kind(sums: pl.DataFrame, keys: list[str], kinds: tuple[str, ...]) -> pl.DataFrame:
    """Sums (count, total_ns) by the keys, and for each kind (by) by its places (name)."""
    amounts = pl.col("count", "total_ns").sum()
    parts = (sums.group_by(*keys, name=kind).agg(amounts, by=pl.lit(kind)) for kind in kinds)
    return pl.concat(parts)


def _idle(trace: Attributed, frame: pl.DataFrame) -> pl.DataFrame:
    pieces = idle_causes(trace)
    window = windows_at(pieces, frame)
    context, names = names_of_contexts(trace, pieces, _IDLE_BY)
    phase = trace.around.places["phase"].gather(pieces["gpu"].cast(pl.UInt32))
    inside = np.flatnonzero(window != NO_ROW)
    part = window[inside] * len(CAUSES) + pieces["cause"].to_physical().to_numpy()[inside]
    # Hundreds of pieces share window, cause, context and phase, so they are summed before names are looked up.
    sums = (
        pl.DataFrame(
            {"part": part, "context": context[inside], "phase": phase[inside], "duration": pieces["duration"][inside]}
        )
        .group_by("part", "context", "phase")
        .agg(count=pl.len().cast(pl.Int64), total_ns=pl.col("duration").sum())
    )
    every = pl.DataFrame(names)
    places = pl.concat([every, every.clear(1)])[sums["context"].to_numpy()]  # NO_ROW is the last row
    named = _by_kind(sums.hstack(places), ["part"], (*_IDLE_BY, "phase")).filter(pl.col("name").is_not_null())
    whole = sums.group_by("part").agg(pl.col("count", "total_ns").sum(), by=pl.lit("cause"))
    rows = pl.concat([named, whole], how="diagonal")
    of_window, cause = np.divmod(rows["part"].to_numpy(), len(CAUSES))
    rows = rows.hstack(frame.select(*_DEVICE, step="row")[of_window]).with_columns(
        cause=pl.Series(CAUSES, dtype=pieces.schema["cause"]).gather(cause)
    )
    return _without_shorter(rows, ["by"], ["name"], ("cause",)).select(list(IDLE.schema))
