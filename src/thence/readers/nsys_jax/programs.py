"""Thunks and program executions of one rank as rows of the tables gpu and programs.

The names that XLA gives to threads and devices show on which device each thread launches (`launchers`).
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.model.tables import GPU, PROGRAMS, Device, Tables
from thence.units import listed, several

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.model.hlo import HloModule
    from thence.readers.nsys_jax.projection import Projection

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
    found = {
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
    return dataclasses.replace(launching, devices=found), warnings


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
