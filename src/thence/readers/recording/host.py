"""Host ranges of a recording (API calls, marks, places, steps, NVTX ranges, overhead) and collectives.

Marks and NVTX ranges are recorded as separate events for opening and closing, which are paired into ranges
here. A range that was open when the recording ended lasts until the last recorded time, except for ranges
of NCCL whose end CUPTI does not report.

A recording has a mark around every collective of PyTorch (`thence.torch.label_collectives`); attribution
finds the kernels that it launched. The table ``collectives`` describes collectives by the serial of their
mark. In recordings of version 1, and for marks that the program made itself, the metadata of the mark
describe the collective instead, and the table has at most its sequence number.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl

from thence.model.collective_columns import described, described_structs
from thence.model.collectives import NUMBERS, TEXTS, split
from thence.model.formats import BACKWARD_OPENED, CLOSED, OPENED, STEP
from thence.model.names import UNNAMED
from thence.model.phases import HOST_STATES, POSITIONS
from thence.model.tables import COLLECTIVES, HOST, HOST_CATEGORIES
from thence.readers.host_ranges import category_of, host_order, host_parents, parent_column
from thence.readers.nsight.ranges import LIBRARIES, NCCL
from thence.readers.recording.counted_launches import boundaries_of, counted_launches, numbers_of, outside_of_ranges
from thence.readers.recording.place_ranges import cells_of, place_ranges
from thence.readers.recording.xla import compile_phases
from thence.units import several

if TYPE_CHECKING:
    from thence.model.collectives import Collective
    from thence.readers.recording.counted_launches import Boundaries
    from thence.readers.recording.folder import Folder

_START, _END = 2, 4
"""CUPTI_ACTIVITY_FLAG_MARKER_START and _END"""
_RUNTIME = 5
"""``api`` in the table calls: CUPTI_ACTIVITY_KIND_RUNTIME; other values are calls of the driver API"""
_THREAD = 2
"""CUPTI_ACTIVITY_OBJECT_THREAD"""
_BACKWARD = "autograd::engine::evaluate_function: "
_OVERHEADS = {
    1: "Driver Compiler",
    1 << 16: "CUPTI Buffer Flush",
    2 << 16: "CUPTI Instrumentation",
    3 << 16: "CUPTI Resource",
    4 << 16: "Runtime Triggered Module Loading",
    5 << 16: "Lazy Function Loading",
    6 << 16: "Command Buffer Full",
    7 << 16: "Activity Buffer Request",
    8 << 16: "Unified Memory Initialisation",
}
"""CUpti_ActivityOverheadKind"""
_CATEGORY = pl.Enum(HOST_CATEGORIES)
_TIMED = pl.all_horizontal(pl.col("start", "end", "thread").is_not_null()) & (pl.col("start") > 0)
_COLUMNS = {
    "thread": pl.Int64(),
    "category": _CATEGORY,
    "name": pl.Categorical(),
    "start": pl.Int64(),
    "end": pl.Int64(),
    "correlation": pl.Int64(),
    "serial": pl.Int64(),
    "of": pl.Int64(),
    "domain": pl.String(),
    "lane": pl.Categorical(),
    "metadata": pl.Categorical(),
    "described": pl.UInt32(),
    "position": pl.Enum(POSITIONS),
    "state": pl.Enum(HOST_STATES),
}


@dataclass(frozen=True)
class HostRanges:
    """Host ranges of one process.

    Attributes:
        table: rows of `HOST`.
        domain: NVTX domain of each.
        serial: of the mark of each range; null for ranges that are not marks.
        described: index in ``collectives`` where the metadata of a mark describe a collective, null elsewhere.
        collectives: the collectives that metadata of marks describe.
    """

    table: pl.DataFrame
    domain: pl.Series
    serial: pl.Series
    described: pl.Series
    collectives: tuple[Collective, ...]


def host_ranges(
    folder: Folder, names: pl.DataFrame, gpu: pl.DataFrame, queued: pl.Series, zero_ns: int, rank: int
) -> HostRanges:
    """All host ranges of one process.

    Args:
        names: number and text (Categorical).
        gpu: rows of `GPU` of the process.
        queued: when the host queued each of them, Unix ns; 0 or null where that is unknown.
        zero_ns: Unix time at which the trace's clock reads 0.
        rank: of the process.
    """
    calls, marks, ranges = map(folder.table, ("calls", "marks", "ranges"))
    boundaries = boundaries_of(folder.table("boundaries"))
    marks = _at_boundaries(marks, boundaries)
    end = pl.col("start") + pl.col("duration") + zero_ns
    ends = gpu.select(end.filter(pl.col("kind") == "kernel").max()).to_series()
    # The last time in the recording.
    times = [marks["time"], ranges["time"], calls["end"], ends, pl.Series(boundaries.time)]
    moments = [folder.description.stopped_ns, *(series.max() for series in times)]
    last = max((int(moment) for moment in moments if moment is not None), default=0)  # type: ignore[arg-type]
    facts = _Facts.of(_names_of_numbers(marks, "metadata", names).cast(pl.String).unique())
    nvtx = _with_all_columns(_nvtx(folder, ranges, names, last))
    parts = [_marks(folder, marks, names, facts, last), _steps(marks, names, last, _borders(folder))]
    named = pl.concat([*map(_with_all_columns, parts), nvtx])
    parts = [named, _calls(calls, names), _overheads(folder)]
    if len(boundaries):
        places = _places(folder.table("places"), names)
        cells = cells_of(folder.table("samples"), calls)
        parts.append(place_ranges(boundaries, places, named.filter(_TIMED), last, cells))
    if boundaries.numbered:
        activities = gpu.select("correlation", "graph", start=pl.col("start") + zero_ns)
        launches = counted_launches(activities, queued, calls["correlation"], boundaries)
        parts.append(_counted(outside_of_ranges(launches, nvtx.filter(_TIMED))))
    combined = pl.concat(_with_all_columns(part) for part in parts)
    timed = combined.filter(_TIMED)
    if timed.height < combined.height:
        folder.warnings.append(f"left out: {several(combined.height - timed.height, 'host range')} without a time")
    frame, domain, serial, described = _nested(timed, folder.description.pid, zero_ns, rank)
    return HostRanges(frame, domain, serial, described, facts.collectives)


def _at_boundaries(marks: pl.DataFrame, boundaries: Boundaries) -> pl.DataFrame:
    """Gives marks the times of the boundaries noted with them, so that both lie between the same launches."""
    if not boundaries.noted.any() or not boundaries.numbered or not (marks["counter"] > 0).any():
        return marks
    rows = marks.with_row_index().filter(pl.col("counter") > 0).sort("time")
    number = numbers_of(rows["counter"].to_numpy(), boundaries.first)
    # Boundaries read from a stack are left out: they can have the number of a noted boundary.
    counter, time = boundaries.counter[boundaries.noted], boundaries.time[boundaries.noted]
    position = np.minimum(np.searchsorted(counter, number), len(counter) - 1)
    is_noted = pl.Series(counter[position] == number)
    moments = rows.select("index", moment=pl.Series(time[position])).filter(is_noted)
    return (
        marks.with_row_index()
        .join(moments, on="index", how="left", maintain_order="left")
        .with_columns(pl.coalesce("moment", "time").alias("time"))
        .drop("index", "moment")
    )


def _places(table: pl.DataFrame, names: pl.DataFrame) -> pl.DataFrame:
    """Places with name and detail as text."""
    return table.with_columns(_text(table, "name", names).alias("name"), _text(table, "detail", names).alias("detail"))


def _counted(launches: pl.DataFrame) -> pl.DataFrame:
    return launches.with_columns(category=pl.lit("runtime"))


@dataclass(frozen=True)
class _Facts:
    """Parsed metadata of marks; each distinct text is parsed once.

    Attributes:
        rest: by the text of metadata, the metadata without the keys that describe a collective, as JSON. Texts
            that are not JSON objects are missing.
        number: by the text of metadata, the index in ``collectives`` of the collective that they describe.
        collectives: the collectives described.
    """

    rest: dict[str, str]
    number: dict[str, int]
    collectives: tuple[Collective, ...]

    @classmethod
    def of(cls, texts: pl.Series) -> _Facts:
        """Parses distinct texts; NaN and Infinity, which JSON does not have, become null."""
        rest: dict[str, str] = {}
        number: dict[str, int] = {}
        collectives: list[Collective] = []
        for text in texts.drop_nulls().to_list():
            # A value that Python's json reads and msgspec cannot encode, such as half a surrogate pair, raises too.
            with suppress(ValueError, OverflowError, RecursionError):
                metadata = json.loads(text, parse_constant=lambda _: None)
                if not isinstance(metadata, dict):
                    continue
                collective, further = split(metadata)
                if further or collective is None:
                    rest[text] = msgspec.json.encode(further).decode()
                if collective is not None:
                    number[text] = len(collectives)
                    collectives.append(collective)
        return cls(rest, number, tuple(collectives))

    def columns(self, texts: pl.Series) -> tuple[pl.Series, pl.Series]:
        """The columns ``metadata`` and ``described`` of marks with these texts of metadata."""
        metadata = texts.replace_strict(self.rest, default=None, return_dtype=pl.String)
        described = texts.replace_strict(self.number, default=None, return_dtype=pl.UInt32)
        return metadata.alias("metadata"), described.alias("described")


def _calls(frame: pl.DataFrame, names: pl.DataFrame) -> pl.DataFrame:
    runtime = pl.col("api") == _RUNTIME
    return frame.with_columns(
        _names_of_numbers(frame, "function", names).fill_null(UNNAMED).alias("name"),
        category=pl.when(runtime).then(pl.lit("runtime")).otherwise(pl.lit("driver")),
    )


def _marks(folder: Folder, marks: pl.DataFrame, names: pl.DataFrame, facts: _Facts, last: int) -> pl.DataFrame:
    """Marks as ranges; nodes of the backward pass as ops that refer to the mark of their forward op."""
    # A recording that samples steps notes open marks at each window anew, because the parts before may be deleted.
    opened = marks.filter(pl.col("what").is_in([OPENED, BACKWARD_OPENED])).unique(
        "serial", keep="first", maintain_order=True
    )
    closed = marks.filter(pl.col("what") == CLOSED).select("serial", end="time")
    frame = opened.join(closed.unique("serial"), on="serial", how="left", maintain_order="left")
    still_open = frame["end"].null_count()
    if still_open:
        folder.warnings.append(f"{several(still_open, 'mark')} still open when the recording ended; shown until then")
    backward = pl.col("what") == BACKWARD_OPENED
    name = _text(frame, "name", names).fill_null(UNNAMED).alias("name")
    # Collectives are marks too, named as PyTorch names its own ranges for them: nccl:allreduce.
    categories = {text: category_of("range", text) for text in name.unique()}
    frame = frame.with_columns(
        name, _names_of_numbers(frame, "lane", names).alias("lane"), *facts.columns(_text(frame, "metadata", names))
    )
    return frame.with_columns(
        pl.col("end").fill_null(last),
        start="time",
        name=pl.when(backward).then(pl.lit(_BACKWARD) + pl.col("name")).otherwise("name"),
        category=pl.when(backward)
        .then(pl.lit("op"))
        .otherwise(pl.col("name").replace_strict(categories, return_dtype=pl.String)),
        of=pl.when(backward & (pl.col("forward") >= 0)).then("forward"),
    )


def _text(frame: pl.DataFrame, column: str, names: pl.DataFrame) -> pl.Series:
    """The names for a column of numbers, as strings; for tables of few rows."""
    return _names_of_numbers(frame, column, names).cast(pl.String)


def _borders(folder: Folder) -> pl.Series:
    """When steps began, of which marks may have been deleted; empty where nothing was deleted."""
    starts = folder.table("steps")["start"] if folder.description.ring is not None else pl.Series([], dtype=pl.Int64())
    return starts.drop_nulls().sort()


def _steps(marks: pl.DataFrame, names: pl.DataFrame, last: int, borders: pl.Series) -> pl.DataFrame:
    """Ranges of the steps that were recorded; none if the program does not count steps."""
    steps = marks.filter(pl.col("what") == STEP).sort("time")
    after = np.append(borders.to_numpy(), last)[borders.search_sorted(steps["time"], side="right").to_numpy()]
    steps = steps.with_columns(
        # Recordings made before have a name for each step.
        name=pl.coalesce(_text(steps, "name", names), pl.format("step {}", "serial")),
        start="time",
        end=pl.min_horizontal(pl.col("time").shift(-1).fill_null(last), pl.Series(after, dtype=pl.Int64())),
        category=pl.lit("step"),
    ).filter(pl.col("forward") == 1)
    if steps.height < 2 and marks.filter(pl.col("what") == STEP).height < 2:
        steps = steps.clear()  # only the beginning of the recording
    return steps.drop("serial", "lane", "metadata")  # with another meaning here


def _nvtx(folder: Folder, ranges: pl.DataFrame, names: pl.DataFrame, last: int) -> pl.DataFrame:
    """NVTX ranges; instantaneous events (nvtxMark) are left out.

    NCCL ends ranges that got a payload, such as ncclCommInitRankConfig, with nvtxRangePopPayload (ncclNvtxRange
    in nccl/src/include/nvtx.h), which CUPTI does not report. So the end of such a range is unknown. It is kept with
    a duration of 0: if it lasted on, everything that the thread does afterwards would be inside of it.
    """
    flags = ranges["flags"]
    started = ranges.filter((flags & _START) != 0)
    ended = ranges.filter((flags & _END) != 0).select("id", end="time").unique("id")
    frame = started.join(ended, on="id", how="left", maintain_order="left")
    domain = _text(frame, "domain", names)
    frame = frame.with_columns(end=pl.when(domain == NCCL).then(pl.coalesce("end", "time")).otherwise("end"))
    still_open = frame["end"].null_count()
    if still_open:
        folder.warnings.append(
            f"{several(still_open, 'NVTX range')} still open when the recording ended; shown until then"
        )
    name = _text(frame, "name", names).fill_null(UNNAMED)
    categories = {text: category_of("range", text) for text in name.unique()}
    of_library = domain.str.contains(LIBRARIES).fill_null(value=False)
    frame = frame.with_columns(
        name.alias("name"),
        domain.alias("domain"),
        of_library.alias("library"),
        pl.col("end").fill_null(last),
        start="time",
    ).with_columns(
        category=pl.when("library")
        .then(pl.lit("framework"))
        .otherwise(pl.col("name").replace_strict(categories, return_dtype=pl.String))
    )
    return frame.with_columns(compile_phases(frame, folder.path.name))


def _overheads(folder: Folder) -> pl.DataFrame:
    frame = folder.table("overheads")
    return frame.with_columns(
        thread=pl.when(pl.col("object_kind") == _THREAD).then("thread").otherwise(0),
        category=pl.lit("overhead"),
        name=pl.col("overhead_kind").replace_strict(_OVERHEADS, default="Overhead", return_dtype=pl.String),
    )


def _with_all_columns(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.select(
        pl.col(c).cast(dtype) if c in frame.columns else pl.lit(None, dtype).alias(c) for c, dtype in _COLUMNS.items()
    )


def _nested(
    frame: pl.DataFrame, pid: int, zero_ns: int, rank: int
) -> tuple[pl.DataFrame, pl.Series, pl.Series, pl.Series]:
    """Rows of `HOST`, and of each row its NVTX domain, serial and index of the described collective."""
    frame = frame.with_columns(duration=pl.max_horizontal(pl.col("end") - pl.col("start"), 0))
    names = ("thread", "category", "start", "duration")
    columns = [frame[name].to_physical().to_numpy() for name in names]
    order = host_order(*columns)
    frame = frame[order]
    parent = host_parents(*(column[order] for column in columns))
    rows = frame.select("serial").with_row_index("forward").drop_nulls().unique("serial")
    forward = frame.select(pl.col("of").alias("serial")).join(rows, on="serial", how="left", maintain_order="left")[
        "forward"
    ]
    more = frame["domain"], frame["serial"], frame["described"]
    frame = frame.select(
        "thread", "category", "name", "correlation", "lane", "metadata",
        pl.lit(rank, pl.Int32()).alias("rank"),
        pl.lit(pid, pl.Int64()).alias("process"),
        (pl.col("start") - zero_ns).alias("start"),
        "duration",
        parent_column(parent),
        "position",
        "state",
        forward.alias("forward"),
    )  # fmt: skip
    shaped = frame.select(
        pl.col(c).cast(dtype) if c in frame.columns else pl.lit(None, dtype).alias(c)
        for c, dtype in HOST.schema.items()
    )
    return shaped, *more


def described_collectives(host: HostRanges, table: pl.DataFrame, names: pl.DataFrame) -> pl.DataFrame:
    """Rows of `COLLECTIVES` whose device activity is still null.

    Args:
        table: the table ``collectives`` of its recording.
        names: number and text (Categorical).
    """
    marks = pl.DataFrame({"serial": host.serial, "described": host.described})
    marks = marks.with_row_index("host").drop_nulls("serial")
    calls = marks.join(table.drop_nulls("serial").unique("serial"), on="serial", how="left")
    return pl.concat([_collectives_from_table(calls, names), _collectives_from_metadata(calls, host)]).sort("host")


def _collectives_from_table(calls: pl.DataFrame, names: pl.DataFrame) -> pl.DataFrame:
    rows = calls.filter(pl.col("collective") > 0)
    raw = {name: _names_of_numbers(rows, name, names).cast(pl.String) for name in TEXTS}
    raw |= {name: rows[name] for name in NUMBERS}
    collectives = COLLECTIVES.frame({"host": rows["host"], **described(raw)})
    return collectives.drop_nulls("collective")  # null where the part with its name is damaged


def _collectives_from_metadata(calls: pl.DataFrame, host: HostRanges) -> pl.DataFrame:
    has_columns = (pl.col("collective") > 0).fill_null(value=False)
    rows = calls.filter(pl.col("described").is_not_null() & ~has_columns)
    frame = described_structs(host.collectives).gather(rows["described"]).struct.unnest()
    sequence = pl.coalesce(rows["sequence"], frame["sequence"])
    return COLLECTIVES.frame({"host": rows["host"], **frame.with_columns(sequence).to_dict()})


def _names_of_numbers(frame: pl.DataFrame, column: str, names: pl.DataFrame) -> pl.Series:
    """The names for a column of numbers, null where there is none; `names` has the columns number and text."""
    return frame.select(pl.col(column).alias("number")).join(names, on="number", how="left", maintain_order="left")[
        "text"
    ]
