"""Reads a recording into the tables of a trace; activities are named as PyTorch's profiler names them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from thence.errors import DamagedInput, InputError
from thence.model.concat_tables import concat
from thence.model.counter_names import COUNTERS_TABLE
from thence.model.formats import ACTIVITIES, LABELS_FILE, MEASURED_PEAKS_FILE
from thence.model.json_fields import Count, NotAsWritten, decoded, field
from thence.model.losses import says_lost
from thence.model.names import UNNAMED
from thence.model.stall_reasons import STALLS_TABLE
from thence.model.tables import COUNTERS, GPU, KINDS, STALLS, STEP_TIMES, THREADS, Device, Meta, Tables
from thence.readers.expansion import DEFAULT, Expansion
from thence.readers.label_files import read_labels
from thence.readers.recording.folder import Folder
from thence.readers.recording.host import described_collectives, host_ranges
from thence.readers.recording.memory import with_memory
from thence.readers.recording.sniffing import NAME, process_folders
from thence.readers.recording.xla import with_xla
from thence.units import several

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.model.graph_labels import GraphLabels
    from thence.readers.recording.folder import Description

# CUpti_ActivityMemcpyKind and CUpti_ActivityMemoryKind of cupti_activity.h, in their order.
_DIRECTIONS = (*("Unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"),)
_MEMORIES = (*("Unknown", "Pageable", "Pinned", "Device", "Array", "Managed"), *("Device Static", "Managed Static"))
_UNENDED = "without an end, because the recording ended first"
_MAX_LINE = (1 << 31) - 1
_MAX_SAMPLES = 1 << 40
"""Of one row; sums of all rows that a part may hold fit int64."""
_MAX_REQUESTS = 10
"""Windows that were asked for, and are named."""
_UNTIMED = (
    "without start and end, because CUPTI could not record the times; this happens to work in conditional nodes of "
    "CUDA graphs that were created before the recording began"
)


def activities(folder: Folder, names: pl.DataFrame, zero_ns: int, rank: int) -> tuple[pl.DataFrame, pl.Series]:
    """Rows of `GPU`, sorted by device and start, and when the host queued each (Unix ns; 0 or null: unknown).

    Args:
        names: number and text (Categorical).
        zero_ns: Unix time at which the trace's clock reads 0.
        rank: of the process.
    """
    parts = [_kernels(folder, names), _copies(folder), _sets(folder)]
    shaped = [_as_gpu_rows(part, zero_ns, rank) for part in parts]
    rows = pl.concat(shaped)
    has_times = pl.col("start").is_not_null() & (pl.col("duration") >= 0) & pl.col("device").is_not_null()
    timed, rest = rows.filter(has_times), rows.filter(~has_times.fill_null(value=False))
    # cupti_activity.h: 0 for both means that timestamp information could not be collected.
    untimed = rest.filter(pl.col("start").is_null() & (pl.col("duration") == 0)).height
    _lose(folder, untimed, _UNTIMED)
    _lose(folder, rest.height - untimed, _UNENDED)
    timed = timed.sort("device", "start", "stream", maintain_order=True)
    return timed.drop("queued"), timed["queued"]


def _lose(folder: Folder, count: int, why: str) -> None:
    """Notes a loss for activities that are left out because they have no times, if there are any."""
    if count:
        folder.lose("no_times", count, f"left out: {several(count, 'activity')} {why}")


def _kernels(folder: Folder, names: pl.DataFrame) -> pl.DataFrame:
    frame = folder.table("kernels")
    named = frame.select(pl.col("name").alias("number")).join(names, on="number", how="left", maintain_order="left")
    return frame.with_columns(
        named.select(pl.col("text").fill_null(pl.lit(UNNAMED).cast(pl.Categorical())).alias("name")).to_series(),
        _sizes("grid").alias("grid"),
        _sizes("block").alias("block"),
        kind=pl.lit("kernel"),
        shared_memory=pl.col("static_shared") + pl.col("dynamic_shared"),
    )


def _sizes(name: str) -> pl.Expr:
    columns = [pl.col(f"{name}_{axis}").cast(pl.UInt32, strict=False) for axis in "xyz"]
    return pl.concat_arr(columns)


def _copies(folder: Folder) -> pl.DataFrame:
    text = pl.format(
        "Memcpy {} ({} -> {})",
        _enum_text("copy_kind", _DIRECTIONS),
        _enum_text("source_memory", _MEMORIES),
        _enum_text("destination_memory", _MEMORIES),
    )
    return folder.table("copies").with_columns(name=text, kind=pl.lit("memcpy"))


def _sets(folder: Folder) -> pl.DataFrame:
    text = pl.format("Memset ({})", _enum_text("memory", _MEMORIES))
    return folder.table("sets").with_columns(name=text, kind=pl.lit("memset"))


def _enum_text(column: str, words: tuple[str, ...]) -> pl.Expr:
    return pl.col(column).replace_strict(dict(enumerate(words)), default="Unknown", return_dtype=pl.String)


def _as_gpu_rows(frame: pl.DataFrame, zero_ns: int, rank: int) -> pl.DataFrame:
    inside = pl.col("graph") != 0
    frame = frame.select(
        pl.lit(rank, pl.Int32()).alias("rank"),
        "device",
        "stream",
        pl.col("kind").cast(pl.Enum(KINDS)),
        pl.col("name").cast(pl.Categorical()),
        pl.when(pl.col("start") > 0).then(pl.col("start") - zero_ns).alias("start"),
        (pl.col("end") - pl.col("start")).alias("duration"),
        "correlation",
        pl.when(inside).then(pl.col("graph")).alias("graph"),
        pl.when(inside).then(pl.col("node")).alias("node"),
        *(c for c in ("grid", "block", "registers", "shared_memory", "bytes", "queued") if c in frame.columns),
    )
    return frame.select(
        pl.col(c).cast(dtype, strict=False) if c in frame.columns else pl.lit(None, dtype).alias(c)
        for c, dtype in (GPU.schema | {"queued": pl.Int64()}).items()
    )


def read(name: str, progress: Callable[[int], None], expansion: Expansion = DEFAULT) -> Tables:
    """The tables of a recording: of one process, or of every process of a job.

    Args:
        progress: called with the bytes read so far.
        expansion: how much larger than their stored size its tables may be.

    Raises:
        DamagedInput: nothing of it can be read.
    """
    parts = []
    done = 0
    for path in process_folders(Path(name)):
        folder = Folder(path, expansion)
        parts.append(_tables(folder))
        done += folder.bytes
        progress(done)
    useful = [part for part in parts if part.gpu.height or part.host.height]
    if not useful:
        reasons = "; ".join(dict.fromkeys(w for part in parts for w in part.meta.warnings))
        raise DamagedInput(name, f"nothing of the recording can be read: {reasons or 'it is empty'}")
    useful.sort(key=lambda part: part.ranks[0])
    return concat(useful).with_warnings(_disjoint_runs_warning(name, useful))


def _tables(folder: Folder) -> Tables:
    about = folder.description
    rank = about.rank or 0
    table = folder.table("names").drop_nulls("number").unique("number", keep="first")
    names = table.select("number", text=pl.coalesce("demangled", "name").cast(pl.Categorical()))
    zero = about.began_ns or 0
    gpu, queued = activities(folder, names, zero, rank)
    host = host_ranges(folder, names, gpu, queued, zero, rank)
    tracks = host.table.select("rank", "process", "thread").unique(maintain_order=True)
    _recorder_losses(folder, gpu)
    tables = Tables(
        gpu=gpu,
        host=host.table,
        collectives=described_collectives(host, folder.table("collectives"), names),
        threads=THREADS.frame(
            tracks.with_columns(
                name=pl.col("thread").cast(pl.String).replace_strict(about.threads, default=None)
            ).to_dict()
        ),
        graph_labels=_labels(folder),
        step_times=_step_times(folder, zero, rank),
        counters=_counters(folder, zero, rank),
        stalls=_stalls(folder, names, rank),
    )
    meta = Meta(
        inputs=(str(folder.path),),
        formats=(NAME,),
        epoch_ns=zero,
        facts=(_facts(folder),),
        devices=_devices(folder, gpu, rank),
        warnings=tuple(f"{folder.path.name}: {text}" for text in (*folder.warnings, *_recorder_warnings(folder))),
        notes=tuple(f"{folder.path.name}: {text}" for text in _of_sampling(folder.description)),
        losses=tuple(folder.losses),
        ranks_stated=about.rank is not None,
    )
    tables, warnings = with_xla(dataclasses.replace(tables, meta=meta), host.domain, folder.path)
    tables = with_memory(tables, folder, names, zero, rank)
    return tables.with_warnings(f"{folder.path.name}: {text}" for text in warnings)


def _step_times(folder: Folder, zero_ns: int, rank: int) -> pl.DataFrame:
    steps = folder.table("steps").sort("start").drop_nulls()
    since = field(folder.description.plain_steps, "since_ns", Count) or 0
    times = steps.with_columns(
        pl.col("start") - zero_ns,
        pl.col("duration").clip(0),
        pl.col("recorded").cast(pl.Boolean),
        counted=pl.col("counted").cast(pl.Boolean) & (pl.col("start") >= since),
        rank=pl.lit(rank),
    )
    return STEP_TIMES.frame(times.to_dict())


def _counters(folder: Folder, zero_ns: int, rank: int) -> pl.DataFrame:
    samples = folder.table(COUNTERS_TABLE).drop_nulls(["device", "start", "end"])
    samples = samples.sort("device", "start")
    times = samples.with_columns(pl.col("start", "end") - zero_ns, pl.selectors.float().fill_nan(None))
    return COUNTERS.frame(times.with_columns(rank=pl.lit(rank)).to_dict())


def _stalls(folder: Folder, names: pl.DataFrame, rank: int) -> pl.DataFrame:
    rows = folder.table(STALLS_TABLE).filter(pl.col("samples") > 0).drop_nulls("device")
    for column in ("kernel", "file", "reason"):
        texts = names.select(pl.col("number").alias(column), pl.col("text").alias(f"{column}_text"))
        rows = rows.join(texts, on=column, how="left", maintain_order="left")
    place = ("device", "kernel", "file", "line", "reason")
    named = rows.select(
        "device",
        pl.col("kernel_text").fill_null(pl.lit(UNNAMED).cast(pl.Categorical())).alias("kernel"),
        pl.col("file_text").alias("file"),
        pl.when(pl.col("file_text").is_not_null()).then(pl.col("line").clip(0, _MAX_LINE)).alias("line"),
        pl.col("reason_text").alias("reason"),
        pl.col("samples").clip(0, _MAX_SAMPLES),
    )
    sums = named.drop_nulls("reason").group_by(place, maintain_order=True).agg(pl.col("samples").sum())
    ordered = sums.sort("device", "samples", descending=[False, True], maintain_order=True)
    return STALLS.frame(ordered.with_columns(rank=pl.lit(rank)).to_dict())


def _about_counters(about: Description) -> dict[str, Any]:
    """Facts about hardware counters, if they were asked for: what `thence.analysis.counters` says beside figures."""
    counters = about.counters
    if counters is None:
        return {}
    overflowed = sum(window.overflow for window in counters.windows)
    facts = {"interval_ns": counters.interval_ns, "trouble": counters.trouble, "overflowed": overflowed}
    return {"counters": facts, "counters_left_out": dict(counters.left_out)}


def _of_sampling(about: Description) -> list[str]:
    """Sentences about a recording that sampled steps: which steps it has, what that cost, and what was deleted."""
    sampling, ring = about.sampling, about.ring
    if sampling is None:
        return []
    cost = "" if sampling.cost_share is None else f", which cost {100 * sampling.cost_share:.2g} % of the time"
    windows = f"{several(sampling.windows, 'window')} of {several(sampling.steps, 'step')}"
    texts = [f"{windows} were recorded, one in {several(sampling.interval, 'step')}{cost}"]
    if ring is not None and ring.windows:
        kernels = ring.rows.get("kernels", 0)
        texts.append(
            f"windows up to number {ring.windows:,} were deleted, without those that were asked for, with "
            f"{several(kernels, 'kernel')}"
        )
    if ring is not None and ring.asked:
        texts.append(f"windows that were asked for were deleted, too, up to number {ring.asked:,}, for lack of room")
    texts += [f"recorded out of turn from step {r.step} on: {r.why}" for r in sampling.requests[:_MAX_REQUESTS]]
    more = max(len(sampling.requests), sampling.requested) - _MAX_REQUESTS
    return [*texts, f"{more:,} more windows were recorded out of turn"] if more > 0 else texts


def _labels(folder: Folder) -> tuple[GraphLabels, ...]:
    path = folder.path / LABELS_FILE
    if not path.is_file():
        return ()
    try:
        return (read_labels(path, folder.expansion),)
    except InputError as error:
        folder.warnings.append(f"the labels of its CUDA graphs cannot be read: {error}")
        return ()


def _facts(folder: Folder) -> dict[str, Any]:
    about = folder.description
    return {
        "producer": "thence record",
        "thence": about.thence,
        "host": about.host,
        "pid": about.pid,
        "program": about.program,
        "python": about.python,
        "driver_cuda": about.driver_cuda,
        "versions": about.versions,
        "xla_flags": about.xla_flags,
        "finished": about.finished,
        "calls": about.calls,
        "plain_steps": about.plain_steps,
        "measured_peaks": _measured_peaks(folder),
        **_about_counters(about),
        **({} if about.stalls is None else {"stalls": msgspec.structs.asdict(about.stalls)}),
    }


def _devices(folder: Folder, gpu: pl.DataFrame, rank: int) -> tuple[Device, ...]:
    """The devices, each with the median of the clocks that were sampled between its first and its last activity."""
    about = folder.description
    zero, clocks = about.began_ns or 0, {}
    for samples in about.clocks:
        ran = gpu.filter(device=samples.device).select(
            first=pl.col("start").min(), last=(pl.col("start") + pl.col("duration")).max()
        )
        first, last = ran.row(0)
        taken = zip(samples.times_ns, samples.mhz, strict=False)
        inside = [mhz for time, mhz in taken if first is not None and first <= time - zero <= last and mhz]
        clocks[samples.device] = float(median(inside)) if inside else None
    return tuple(
        Device(rank=rank, **msgspec.structs.asdict(device), clock_mhz=clocks.get(device.device), node=about.host)
        for device in about.devices
    )


def _measured_peaks(folder: Folder) -> dict[str, Any] | None:
    """What ``thence record --with peaks`` measured before the program ran; None if it did not."""
    path = folder.path.parent / MEASURED_PEAKS_FILE
    try:
        return decoded(path.read_bytes(), dict[str, str | float])
    except FileNotFoundError:
        return None
    except (OSError, NotAsWritten) as error:
        folder.warnings.append(f"{MEASURED_PEAKS_FILE} cannot be read ({error})")
        return None


def _recorder_losses(folder: Folder, gpu: pl.DataFrame) -> None:
    """Notes the losses that the recorder stated in the description of the recording."""
    about = folder.description
    for text in filter(says_lost, about.warnings):
        folder.lose("dropped", 1, f"while recording: {text}")
    if not about.finished:
        folder.lose("cut", 1, _cut(about, gpu))
    if about.dropped:
        folder.lose(
            "dropped",
            about.dropped,
            f"the recorder dropped {several(about.dropped, 'record')}: they came faster than it could write them",
        )
    for table, rows in about.lost.items():
        folder.lose("dropped", rows, f"{several(rows, 'row')} of the table {table} could not be written")


def _recorder_warnings(folder: Folder) -> list[str]:
    """The recorder's warnings in the description that are not about losses."""
    about = folder.description
    warnings = [f"while recording: {text}" for text in about.warnings if not says_lost(text)]
    warnings += [
        f"skipped {several(count, 'record')} of CUPTI's kind {kind}, which thence does not know"
        for kind, count in about.unknown_kinds.items()
    ]
    return warnings


def _cut(about: Description, gpu: pl.DataFrame) -> str:
    """The text for a recording that its process did not finish; times in `gpu` count from ``began_ns``."""
    text = "the recording was cut: the process ended before it could finish the recording; the last records are missing"
    if about.written_ns is None or about.began_ns is None:
        return text
    if about.version > 2 and not any(about.counts.values()):
        return "the recording was cut: the process ended before anything was written: all records are missing"
    if about.flush_seconds is None:
        return f"{text}: while XLA launches graphs, only full buffers are written, and the last buffers were not full"
    seconds = (about.written_ns - about.began_ns) / 1e9
    lost = f"{text}: work later than {seconds:.1f} s after the recording began was not written"
    if not 0 < about.flush_seconds < 1e6:
        return lost
    lost += f", normally at most {about.flush_seconds:.1g} s of it"
    rate = sum(about.counts.get(table, 0) for table in ACTIVITIES) / max(seconds, 1e-3)
    lately = gpu.filter(pl.col("start") / 1e9 > seconds - about.flush_seconds).height
    count = max(round(rate * about.flush_seconds), lately)
    return f"{lost}, about {several(count, 'activity')} at the rate until then"


def _disjoint_runs_warning(name: str, parts: list[Tables]) -> list[str]:
    """A warning if the device work of some processes ended before that of the others began."""
    spans = sorted(
        (int(zero + table["start"].min()), int(zero + (table["start"] + table["duration"]).max()))  # type: ignore[operator]
        for part in parts
        for zero, table in [(part.meta.epoch_ns or 0, part.gpu)]
        if table.height
    )
    until = spans[0][1] if spans else 0
    for start, end in spans:
        if start > until:
            return [f"{name}: holds recordings of different times, perhaps of several runs of a program"]
        until = max(until, end)
    return []
