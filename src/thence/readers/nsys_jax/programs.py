"""Thunks, program executions and compile ranges of one rank, from XLA's NVTX ranges.

Ranges projected on the GPU have three layouts, as nsys has written them:

1. up to nsys 2024.4: columns ``Projected Start``, ``Orig Start``, ..., the domain is part of the name.
2. 2024.5 to 2025: columns ``Text``, ``Start``, ``End``, ...; no domain, no host times.
3. from 2026.1: as 2, with a column ``Domain``.

Rules (those of nsys-jax, generalised): of nested Thunk ranges only the innermost launched work, and a thunk is
part of the innermost XlaModule range around it, whatever other ranges (NCCL, user) are between them.

The names that XLA gives to threads and devices show on which device each thread launches (`launchers`).

Compile ranges are the XlaCompile ranges, XLA's ranges inside them on the same thread, and XLA's ranges on other threads
during an XlaCompile range: XLA compiles with a thread pool, on whose threads the outermost ranges have no parent.
Ranges of other libraries (cuBLAS, NCCL) are left out, so their time counts as time of the XLA range around them.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.errors import DamagedInput
from thence.model.columns import row_numbers
from thence.model.intervals import NO_ROW, chain_to, longest_begun
from thence.model.tables import GPU, HOST_CATEGORIES, PROGRAMS, Device, Tables
from thence.readers.host_ranges import host_order, host_parents
from thence.readers.nsys_jax.archive import as_int64, renamed
from thence.units import listed, several

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.model.arrays import Int64, Mask
    from thence.model.hlo import HloModule


# ---- Ranges projected on the GPU


_LEVELS_LOG2 = 10

_CLASSIC = {
    "name": ("Name",),
    "start": ("Projected Start",),
    "duration": ("Projected Duration",),
    "launch": ("Orig Start", ""),
    "launch_duration": ("Orig Duration", ""),
    "process": ("PID",),
    "thread": ("TID",),
    "range": ("RangeId",),
    "parent": ("ParentId",),
}
_LATER = {
    "name": ("Text",),
    "start": ("Start",),
    "end": ("End",),
    "launch": ("",),
    "launch_duration": ("",),
    "process": ("PID",),
    "thread": ("TID", ""),
    "range": ("Range ID",),
    "parent": ("Parent ID",),
}
_NUMBERS = ("start", "duration", "launch", "launch_duration", "process", "thread", "range", "parent")

THUNK = r"^(?:TSL:)?Thunk:#(?:.*,)?hlo_op=([^#,]+)"
MODULE = r"^(?:TSL:)?XlaModule:#(?:.*,)?hlo_module=([^#,]+)"
PROGRAM_ID = r",program_id=(\d{1,18})#?$"


@dataclass(frozen=True)
class Projection:
    """Device time of thunks and of program executions.

    Attributes:
        thunks: leaf thunks: hlo (instruction), start, duration (ns), process, thread, and module
            (row in ``modules``; null if recording began inside the program).
        modules: executions of programs: name, id (null for programs of the autotuner), start, duration,
            launch, launch_duration (ns; null if the layout lacks host times), process, thread.
        unreadable: rows of thunks or programs that were left out because they have no times.
    """

    thunks: pl.DataFrame
    modules: pl.DataFrame
    unreadable: int


def projection(frame: pl.DataFrame, path: str) -> Projection:
    """Thunks and programs from the content of trace.parquet.

    Args:
        frame: as read, in one of the three layouts.
        path: for messages.

    Raises:
        DamagedInput: a needed column is missing or of another type.
    """
    ranges = _ranges(frame, path)
    named = ranges.with_columns(
        hlo=pl.col("name").str.extract(THUNK),
        module_name=pl.col("name").str.extract(MODULE),
        id=pl.col("name").str.extract(PROGRAM_ID).cast(pl.Int64),
    )
    wanted = pl.col("hlo").is_not_null() | pl.col("module_name").is_not_null()
    timed = pl.col("start").is_not_null() & (pl.col("duration") >= 0)
    unreadable = named.filter(wanted & ~timed.fill_null(value=False)).height
    named = named.filter(timed.fill_null(value=False)).sort("start", "range", maintain_order=True)
    return _placed(named, unreadable)


def _ranges(frame: pl.DataFrame, path: str) -> pl.DataFrame:
    """The ranges of any layout, with the columns name and `_NUMBERS`."""
    if "Projected Start" in frame.columns:
        ranges = renamed(frame, _CLASSIC, path)
    else:
        ranges = as_int64(renamed(frame, _LATER, path), ("start", "end"), path)
        ranges = ranges.with_columns(duration=pl.col("end") - pl.col("start"))
    if ranges.schema["name"] not in (pl.String, pl.Categorical, pl.Null):
        raise DamagedInput(path, f"holds names of type {ranges.schema['name']}; expected text")
    ranges = as_int64(ranges, _NUMBERS, path).with_columns(
        pl.col("name").cast(pl.String), pl.col("thread").fill_null(0), pl.col("process").fill_null(0)
    )
    # Rows without a range id are sums over whole threads, not ranges.
    return ranges.filter(pl.col("range").is_not_null()).unique("range", keep="first", maintain_order=True)


def _placed(named: pl.DataFrame, unreadable: int) -> Projection:
    """Leaf thunks and the innermost program around each of them."""
    parent = _parent_rows(named["range"].to_numpy(), named["parent"])
    is_thunk = named["hlo"].is_not_null().to_numpy()
    is_module = named["module_name"].is_not_null().to_numpy()
    thunks = np.flatnonzero(is_thunk)
    above = chain_to(parent, parent[thunks], is_thunk | is_module)
    outer = above[above >= 0]
    inner = is_thunk.copy()
    inner[outer[is_thunk[outer]]] = False
    module = chain_to(parent, parent[thunks], is_module)
    leaf = inner[thunks]
    # Autotuning runs inside a compile range, and modules nest: only modules that have thunks of their own are kept.
    used = np.unique(module[leaf & (module >= 0)])
    numbers = np.full(named.height + 1, NO_ROW, np.int64)  # the last element is for no module
    numbers[used] = np.arange(len(used))
    place = pl.Series("module", numbers[module[leaf]], pl.Int64)
    columns = ("start", "duration", "process", "thread")
    leaves = named[thunks[leaf]].select("hlo", *columns)
    return Projection(
        thunks=leaves.with_columns(module=place.replace(NO_ROW, None)),
        modules=named[used].select(pl.col("module_name").alias("name"), "id", *columns, "launch", "launch_duration"),
        unreadable=unreadable,
    )


def _parent_rows(ids: Int64, parents: pl.Series) -> Int64:
    """Row of each range's parent, with cycles and deep nesting cut by `bounded_nesting`."""
    rows = pl.DataFrame({"range": ids, "row": np.arange(len(ids), dtype=np.int64)})
    wanted = pl.DataFrame({"range": parents})
    parent_row = wanted.join(rows, on="range", how="left", maintain_order="left")["row"]
    parent = row_numbers(parent_row)
    return bounded_nesting(parent)


def bounded_nesting(parent: Int64) -> Int64:
    """The parents, with those of rows 1024 levels deep or more, or of rows in a cycle, replaced by `NO_ROW`.

    Real ranges nest some 20 deep; a chain of a million would take too long to walk.

    Args:
        parent: parent row of every row, `NO_ROW` for outermost rows.
    """
    far = parent.copy()
    for _ in range(_LEVELS_LOG2):
        far = np.where(far >= 0, far[far], NO_ROW)  # doubles the distance to the ancestor
        if not (far >= 0).any():
            return parent
    return np.where(far >= 0, NO_ROW, parent)


# ---- Rows of gpu and programs


_PLACE = re.compile(
    r"#global=(?P<device>\d{1,9}),local=(?P<local>\d{1,9}),process=(?P<rank>\d{1,9})"
    r",(?:slice|partition)=\d{1,9}#"
)
_GPU = "('TARGET_INFO_GPU', '{}')"
_NVTX_NAME = "('TARGET_INFO_NVTX_CUDA_DEVICE', 'name')"


def device_tables(
    projected: Projection, devices: Launchers, modules: Mapping[int, HloModule]
) -> tuple[Tables, list[str]]:
    """The tables gpu and programs of one rank, and warnings.

    A program is identified by its fingerprint (equal on all ranks that compiled the same program), else by
    name and number, ``jit_step.12``. Programs without a number are programs that the autotuner measures:
    their identity is null. ``execution`` counts the executions of an identity on a device, ``iteration`` the
    occurrences of an instruction within one execution.

    Args:
        projected: thunks and program executions, with times on the device.
        devices: the device on which each thread launches.
        modules: HLO modules by XLA's module number.
    """
    devices, assumed = _by_thread_order(projected.modules, devices)
    warnings = [*assumed, *_warnings(projected, devices, modules)]
    programs = _programs(_on_devices(projected.modules, devices).with_row_index("old"), modules, devices.rank)
    thunks = _thunks(_on_devices(projected.thunks, devices), programs, devices.rank)
    return Tables(
        gpu=GPU.frame(thunks.select(c for c in thunks.columns if c in GPU.schema).to_dict()),
        programs=PROGRAMS.frame(programs.select(c for c in programs.columns if c in PROGRAMS.schema).to_dict()),
    ), warnings


def _warnings(projected: Projection, devices: Launchers, modules: Mapping[int, HloModule]) -> list[str]:
    warnings = []
    if projected.unreadable:
        warnings.append(f"left out: {several(projected.unreadable, 'range')} of thunks or programs without times")
    if outside := projected.thunks["module"].null_count():
        warnings.append(
            f"{several(outside, 'thunk')} without a program: the recording began while a program was running"
        )
    missing = projected.modules.filter(
        pl.col("id").is_not_null() & ~pl.col("id").is_in(pl.Series(list(modules), dtype=pl.Int64).implode())
    )
    if modules and missing.height:
        names = sorted(missing.select(pl.format("{}.{}", "name", "id")).to_series().unique())
        warnings.append(f"no HLO for {listed(names)}, so collectives there are not known")
    threads = projected.modules.select("process", "thread").unique()
    unmapped = sum(pair not in devices.devices for pair in threads.rows())
    if unmapped > 1 or (unmapped and len(set(devices.devices.values())) > 1):
        warnings.append(
            f"{several(unmapped, 'launching thread')} without a device in the name; activities launched there are "
            f"shown on device {devices.first}"
        )
    return warnings


def _programs(rows: pl.DataFrame, modules: Mapping[int, HloModule], rank: int) -> pl.DataFrame:
    """Executions of programs with identity, execution number and row, sorted by device and start."""
    identities = pl.DataFrame(
        [(number, module.fingerprint, place) for place, (number, module) in enumerate(modules.items())],
        schema={"id": pl.Int64, "fingerprint": pl.String, "hlo": pl.Int32},
        orient="row",
    )
    named = pl.when(pl.col("id").is_not_null()).then(pl.format("{}.{}", "name", "id"))
    order = pl.int_range(pl.len(), dtype=pl.Int32)
    return (
        rows.sort("device", "start", maintain_order=True)
        .join(identities, on="id", how="left", maintain_order="left")
        .with_columns(program=pl.coalesce("fingerprint", named), rank=pl.lit(rank, pl.Int32))
        .with_columns(
            # Executions of programs without an identity are counted by name.
            execution=order.over("device", "program", pl.when(pl.col("program").is_null()).then("name"))
        )
        .with_row_index("row")
    )


def _by_thread_order(executions: pl.DataFrame, launching: Launchers) -> tuple[Launchers, list[str]]:
    """The launchers, with devices assumed by the order of thread ids if no thread's name states one; and warnings.

    In archives of 2024 no thread's name states a device. nsys-jax then assumed, for each program, that one thread
    launches on each device, and that the threads in the order of their ids belong to the local devices in their
    order. A program that ran on only one device may have been launched by the main thread, so the device of a
    thread is taken from the program with the most threads.

    Args:
        executions: of programs, with id, process and thread.
        launching: launchers by the names of threads.
    """
    pairs = executions.filter(pl.col("id").is_not_null()).select("id", "process", "thread").unique()
    spread = pairs.group_by("id").len("threads").filter(pl.col("threads") > 1)
    if launching.devices or spread.is_empty():
        return launching, []
    ordered = (
        pairs.sort("id", "process", "thread")
        .with_columns(device=pl.int_range(pl.len()).over("id"), threads=pl.len().over("id"))
        .sort("threads", "id", descending=[True, False])
    )
    chosen = ordered.unique(["process", "thread"], keep="first", maintain_order=True)
    count = int(chosen["device"].max()) + 1  # type: ignore[arg-type] # not empty
    if launching.properties and len(launching.properties) < count:
        text = (
            f"a program was launched by {count} threads, but the archive lists only "
            f"{several(len(launching.properties), 'device')}; all activities are shown on device {launching.first}"
        )
        return launching, [text]
    local = sorted(launching.properties) if len(launching.properties) == count else range(count)
    device_of_thread = {
        (process, thread): local[device]
        for process, thread, device in chosen.select("process", "thread", "device").iter_rows()
    }
    assumed = (
        f"no thread name states a device: the {count} threads that launched a program are assigned to devices in the "
        "order of their ids, as nsys-jax did"
    )
    warnings = [assumed]
    largest = ordered.filter(pl.col("threads") == pl.col("threads").max().over("process", "thread"))
    places = largest.group_by("process", "thread").agg(pl.col("device").n_unique())
    if disagreeing := places.filter(pl.col("device") > 1).height:
        warnings.append(
            f"programs disagree on the device of {several(disagreeing, 'launching thread')}: figures of single "
            "devices are not reliable"
        )
    return dataclasses.replace(launching, devices=device_of_thread), warnings


def _on_devices(rows: pl.DataFrame, devices: Launchers) -> pl.DataFrame:
    """Adds the device; a thread without a known device gets the first device, as in single-device launches."""
    places = pl.DataFrame(
        [(process, thread, device) for (process, thread), device in devices.devices.items()],
        schema={"process": pl.Int64, "thread": pl.Int64, "device": pl.Int32},
        orient="row",
    )
    joined = rows.join(places, on=["process", "thread"], how="left", maintain_order="left")
    return joined.with_columns(pl.col("device").fill_null(devices.first))


def _thunks(rows: pl.DataFrame, programs: pl.DataFrame, rank: int) -> pl.DataFrame:
    """Thunks as rows of `GPU`, with the row of their program and their iteration."""
    numbers = programs.select(pl.col("old").cast(pl.Int64).alias("module"), pl.col("row").alias("program"))
    order = pl.int_range(pl.len(), dtype=pl.Int32)
    return (
        rows.join(numbers, on="module", how="left", maintain_order="left")
        .sort("device", "start", maintain_order=True)
        .with_columns(
            rank=pl.lit(rank, pl.Int32),
            stream=pl.lit(0, pl.Int64),
            kind=pl.lit("thunk"),
            name=pl.col("hlo"),
            iteration=order.over("device", "program", "hlo"),
        )
        .with_row_index("row")
    )


@dataclass(frozen=True)
class Launchers:
    """Threads and the devices they launch on.

    Attributes:
        rank: of the process: XLA's process number, 0 if unknown.
        process: process id of the launching threads, 0 if unknown.
        devices: (process id, thread id) -> device, XLA's local number within the process.
        properties: device -> its known properties.
        warnings: assumptions that were made.
        rank_stated: whether the name of a thread or device states the rank.
    """

    rank: int = 0
    process: int = 0
    devices: Mapping[tuple[int, int], int] = field(default_factory=dict)
    properties: Mapping[int, Device] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    rank_stated: bool = False

    @property
    def first(self) -> int:
        """The device assumed for launches of threads that are not in `devices`."""
        return min([*self.devices.values(), *([] if self.devices else self.properties)], default=0)


def launchers(threads: pl.DataFrame | None, devices: pl.DataFrame | None) -> Launchers:
    """The launchers by the archive's thread and device metadata, either of which may be missing.

    The name of a thread ``XlaLauncher:#global=G,local=L,process=P,slice=S#`` states its device and rank. NVTX
    names of devices (``Xla:#global=...#``) state the rank if no thread does, and the local number of a device.
    """
    places: dict[tuple[int, int], int] = {}
    ranks: list[int] = []
    for process, thread, name in _rows(threads, ("PID", "TID", "Name")):
        match = _PLACE.search(name) if isinstance(name, str) and name.startswith("XlaLauncher:") else None
        if match and _is_id(process) and _is_id(thread):
            places[process, thread] = int(match["local"])
            ranks.append(int(match["rank"]))
    named = [_PLACE.search(str(row[0])) for row in _rows(devices, (_NVTX_NAME,))]
    ranks += [int(match["rank"]) for match in named if match]
    rank = ranks[0] if ranks else 0
    warnings = []
    if not ranks:
        warnings.append("no thread or device name states the rank; rank 0 is assumed")
    elif len(set(ranks)) > 1:
        warnings.append(f"its threads belong to the ranks {sorted(set(ranks))}; shown as rank {rank}")
    process = next(iter(places), (0, 0))[0]
    properties = _properties(devices, rank)
    return Launchers(rank, process, places, properties, tuple(warnings), bool(ranks))


def _rows(frame: pl.DataFrame | None, columns: tuple[str, ...]) -> list[tuple[Any, ...]]:
    if frame is None or not set(columns) <= set(frame.columns):
        return []
    return frame.select(columns).rows()


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 63


def _properties(devices: pl.DataFrame | None, rank: int) -> dict[int, Device]:
    """Properties of each device, by its local number."""
    keys = [_GPU.format(key) for key in ("name", "totalMemory", "smCount", "computeMajor", "computeMinor")]
    properties = {}
    for number, (label, *values) in enumerate(_rows(devices, (_NVTX_NAME, *keys))):
        match = _PLACE.search(str(label))
        device = int(match["local"]) if match else number
        name, memory, multiprocessors, major, minor = values
        has_capability = isinstance(major, int) and isinstance(minor, int)
        properties[device] = Device(
            rank,
            device,
            name if isinstance(name, str) else None,
            memory if isinstance(memory, int) else None,
            multiprocessors if isinstance(multiprocessors, int) else None,
            f"{major}.{minor}" if has_capability else None,
        )
    return properties


# ---- Compile ranges


_PUSHPOP_COLUMNS = {
    "name": ("Name",),
    "start": ("Start (ns)", "Start"),
    "end": ("End (ns)", "End"),
    "process": ("PID", ""),  # dropped by newer wrappers
    "thread": ("TID",),
}
_PUSHPOP_NUMBERS = ("start", "end", "process", "thread")
_COMPILE = r"^(?:TSL:)?XlaCompile(?::#|$)"
_OF_XLA = r"^(?:TSL:)?(?:Xla|Thunk:#)"


def compile_ranges(frame: pl.DataFrame, path: str) -> pl.DataFrame:
    """Compile ranges with columns name, start, duration (ns), process, thread and parent (row).

    Rows are sorted by process, thread and start. A parent is on the same thread; the outermost range of
    a worker thread has none. If the table lacks process ids, process is null.

    Args:
        frame: content of report_nvtx_pushpop_trace, as Parquet or CSV.
        path: for messages.

    Raises:
        DamagedInput: a needed column is missing or of another type.
    """
    ranges = renamed(frame, _PUSHPOP_COLUMNS, path)
    if ranges.schema["name"] not in (pl.String, pl.Categorical, pl.Null):
        raise DamagedInput(path, f"holds names of type {ranges.schema['name']}; expected text")
    ranges = (
        as_int64(ranges, _PUSHPOP_NUMBERS, path)
        .with_columns(pl.col("name").cast(pl.String))
        .filter(pl.col("name").str.contains(_OF_XLA), pl.col("end") >= pl.col("start"))
        .filter(pl.col("thread").is_not_null())
    )
    ranges, parent = _nested(ranges)
    kept = _in_compilation(ranges, parent)
    numbers = np.full(ranges.height + 1, NO_ROW, np.int64)  # the last element is for no parent
    numbers[np.flatnonzero(kept)] = np.arange(kept.sum())
    parents = pl.Series(numbers[parent[kept]], dtype=pl.Int64)
    return ranges.filter(pl.Series(kept)).select(
        pl.col("name").str.strip_prefix("TSL:"),
        "start",
        (pl.col("end") - pl.col("start")).alias("duration"),
        "process",
        "thread",
        parents.replace(NO_ROW, None).alias("parent"),
    )


def _nested(ranges: pl.DataFrame) -> tuple[pl.DataFrame, Int64]:
    """The ranges sorted by process, thread and start, and the parent of each."""
    track = ranges.select(pl.struct("process", "thread").rank("dense")).to_series().to_numpy()
    category = np.full(ranges.height, HOST_CATEGORIES.index("compile"), np.uint8)
    start = ranges["start"].to_numpy()
    duration = ranges["end"].to_numpy() - start
    order = host_order(track, category, start, duration)
    parent = host_parents(track[order], category, start[order], duration[order])
    return ranges[order], bounded_nesting(parent)


def _in_compilation(ranges: pl.DataFrame, parent: Int64) -> Mask:
    """A mask of the ranges below an XlaCompile, and of ranges of other threads that lie inside one in time."""
    is_compile: Mask = ranges["name"].str.contains(_COMPILE).to_numpy()
    rows = np.arange(ranges.height)
    below: Mask = chain_to(parent, rows, is_compile) >= 0
    top = chain_to(parent, rows, parent == NO_ROW)
    start, end = ranges["start"].to_numpy(), ranges["end"].to_numpy()
    compiles = np.flatnonzero(is_compile)
    if len(compiles) == 0:
        return below
    # Of the XlaCompile ranges that began before an outermost range, it is enough to check the one that ends last:
    # if any of them contains the range, so does that one. A range below an XlaCompile is in the mask anyway.
    longest = longest_begun(start[compiles], end[compiles], start[top])
    during = (longest != NO_ROW) & (end[compiles[longest]] >= end[top])
    result: Mask = below | (during & ~is_compile[top])
    return result
