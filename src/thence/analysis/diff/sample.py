"""`Sample`: the data of one run for a comparison, its steps and how the time of each step was spent.

All figures are means over the devices of the run (the ranks, if a rank has one device), so that runs of jobs of
any size can be compared. A sample holds sums by step and no activities, so many runs fit into memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.collectives.exposure import exposure
from thence.analysis.diff.hardware import HARDWARE, hardware_of
from thence.analysis.diff.memory import MEMORY, memory_of
from thence.analysis.diff.streams import streams_of
from thence.analysis.diff.work import WORK, work_of
from thence.analysis.grouping.time_by_place import time_by_place
from thence.analysis.selection.windows import windows_at
from thence.analysis.steps.answer import step_table
from thence.analysis.steps.windows import OUTLIER, RULES, selected_steps
from thence.errors import MissingData
from thence.model.collectives import whole_number
from thence.model.intervals import NO_ROW, union_lengths
from thence.model.names import TO_DEVICE, matching
from thence.model.places import COMPARED
from thence.model.thresholds import MAX_HOST_RANGES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from thence.analysis.diff.streams import Streams
    from thence.analysis.soundness.findings import Soundness
    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed


PROFILER_OPTIONS = ("record_shapes", "with_stack", "profile_memory", "with_modules", "with_flops", "xla_flags")
"""Facts of an input that record options of its profiler or compiler."""
_VERSIONS = (
    *("cuda_driver_version", "cuda_runtime_version", "driver_cuda", "nccl_version"),
    *("hip_driver_version", "hip_runtime_version", "jax_version", "jaxlib_version"),
)
_CLOCKS = ("gpu_clock_mhz", "memory_clock_mhz")


@dataclass(frozen=True)
class Conditions:
    """The conditions under which a run was recorded.

    Attributes:
        identity: equal for two samples of the same recording.
        gpus: model, multiprocessors and compute capability of each different GPU, as text; empty where unknown.
        clocks: name of a clock of the GPUs to MHz, as far as the inputs record clocks.
        ranks: number of ranks that have device work.
        world_size: world size of the job; None if the inputs do not record it.
        devices: number of GPUs that have work.
        formats: formats of the inputs.
        options: name to value of the profiler's options that the inputs record.
        versions: name to version of drivers and libraries.
        unsound: why the figures of the trace cannot be trusted, as one line; None for a sound trace.
        copied_bytes: bytes copied from the host to a device, per step and device.
        grids: kernel (name), grid (as text), count and ns per step and device.
    """

    identity: tuple[object, ...]
    gpus: tuple[str, ...]
    clocks: Mapping[str, str]
    ranks: int
    world_size: int | None
    devices: int
    formats: tuple[str, ...]
    options: Mapping[str, str]
    versions: Mapping[str, str]
    unsound: str | None
    copied_bytes: float
    grids: pl.DataFrame


def conditions(trace: Attributed, soundness: Soundness, step: pl.Series, shared_by: int) -> Conditions:
    """Determines the conditions of a run.

    Args:
        trace: attributed; of one run.
        step: for each row of gpu, the number of its counted step; `NO_ROW` for none.
        shared_by: number of steps times number of devices, by which sums are divided.
    """
    meta, gpu = trace.meta, trace.gpu
    sizes = [size for facts in meta.facts if (size := whole_number(facts.get("world_size"))) is not None]
    copies = trace.gpu.filter(pl.col("kind") == "memcpy", step != NO_ROW).select("name", "bytes")
    from_host = copies.filter(pl.lit(matching(copies["name"], TO_DEVICE)))
    return Conditions(
        identity=(meta.epoch_ns, gpu.height, gpu["start"].min(), int(gpu["duration"].sum())),
        gpus=tuple(sorted({_model(*d) for d in _described(trace)} - {""})),
        clocks=_facts(trace, _CLOCKS),
        ranks=gpu["rank"].n_unique(),
        world_size=max(sizes, default=None),
        devices=gpu.select("rank", "device").n_unique(),
        formats=tuple(sorted(set(meta.formats))),
        options=_facts(trace, PROFILER_OPTIONS),
        versions=_facts(trace, _VERSIONS) | _imported(trace),
        unsound=soundness.statement,
        copied_bytes=float(from_host["bytes"].fill_null(0).sum()) / shared_by,
        grids=_grids(gpu.filter(step != NO_ROW), shared_by),
    )


def _described(trace: Attributed) -> list[tuple[str | None, int | None, str | None]]:
    used = {(rank, device) for rank, device in trace.gpu.select("rank", "device").unique().rows()}
    return [(d.name, d.multiprocessors, d.compute_capability) for d in trace.meta.devices if (d.rank, d.device) in used]


def _model(name: str | None, processors: int | None, capability: str | None) -> str:
    about = ", ".join(
        text
        for text in (
            f"{processors} multiprocessors" if processors else "",
            f"compute capability {capability}" if capability else "",
        )
        if text
    )
    return f"{name or 'unnamed'} ({about})" if about else name or ""


def _facts(trace: Attributed, wanted: tuple[str, ...]) -> dict[str, str]:
    """The values of the wanted facts in the inputs; different values of a fact are joined by commas."""
    values_of = {
        name: sorted({str(facts[name]) for facts in trace.meta.facts if facts.get(name) is not None}) for name in wanted
    }
    return {name: ", ".join(values) for name, values in values_of.items() if values}


def _imported(trace: Attributed) -> dict[str, str]:
    """The versions of Python packages that recordings of thence hold; different versions are joined by commas."""
    imported: dict[str, set[str]] = {}
    for facts in trace.meta.facts:
        versions = facts.get("versions")
        for name, version in versions.items() if isinstance(versions, dict) else ():
            imported.setdefault(str(name), set()).add(str(version))
    return {name: ", ".join(sorted(versions)) for name, versions in imported.items()}


def _grids(gpu: pl.DataFrame, shared_by: int) -> pl.DataFrame:
    """Count and time of the kernels by name and grid, as `Conditions.grids`."""
    axes = [pl.col("grid").arr.get(axis).cast(pl.Int64).alias(f"grid_{axis}") for axis in range(3)]
    return (
        gpu.lazy()
        .filter(pl.col("grid").is_not_null())
        .select("name", "duration", *axes)
        .group_by("name", "grid_0", "grid_1", "grid_2")
        .agg(count=pl.len() / shared_by, ns=pl.col("duration").sum() / shared_by)
        .select(
            kernel=pl.col("name").cast(pl.String),
            grid=pl.format("{}x{}x{}", "grid_0", "grid_1", "grid_2"),
            count="count",
            ns="ns",
        )
        .collect()
    )


WHOLE_TRACE = "the whole trace"
"""`RunSteps.what` of a trace without steps."""
IDLE_CAUSE = r"^idle_(.+)_ns$"
"""Pattern of the columns of `RunSteps.times` with idle time by cause."""
_WINDOW = ("rank", "device", "start", "duration", "row")
_TIMES = ("busy_ns", "idle_ns", "communication_ns", "exposed_ns")


@dataclass(frozen=True)
class RunSteps:
    """The steps of a run.

    Attributes:
        what: what the steps are, in words.
        times: one row per step, in order of time: name, start_ns (on the first device to begin it), and means over the
            devices that have the step of total_ns, busy_ns, idle_ns, communication_ns, exposed_ns, and
            ``idle_<cause>_ns`` of each cause that occurs; and left_out, why it is not typical (a key of
            `thence.analysis.steps.windows.RULES`), null if it is.
        of_activity: row in ``times`` of the step of each row of gpu, `NO_ROW` for none.
        windows: rank, device, start, duration and row (in ``times``) of the window of each step on each device.
    """

    what: str
    times: pl.DataFrame
    of_activity: Int64
    windows: pl.DataFrame


def run_steps(trace: Attributed, *, causes: bool = True) -> RunSteps:
    """The steps of a trace, and the step of every activity.

    Args:
        causes: whether to divide idle time by cause, which takes most of the time.
    """
    try:
        steps = selected_steps(trace)
    except MissingData:
        return _one_step(trace)
    keys = ("step", "occurrence")
    divided = step_table(trace).frame if causes else steps.frame
    frame = divided.with_columns(occurrence=pl.int_range(pl.len()).over("rank", "device", "step"), total_ns="duration")
    by_cause = [name for name in frame.columns if name.startswith("idle_") and name != "idle_ns"]
    times = (
        frame.group_by(keys, maintain_order=True)
        .agg(
            pl.col("start").min().alias("start_ns"),
            pl.col("total_ns", *_TIMES, *by_cause).cast(pl.Float64).mean(),
            left_out=pl.when(pl.col("left_out").null_count() == 0).then(pl.col("left_out").first()),
        )
        .sort("start_ns", maintain_order=True)
    )
    numbers = times.select(keys).with_row_index("row")  # `number` is the step's own
    windows = frame.drop("row").join(numbers, on=keys, how="left", maintain_order="left")
    return RunSteps(
        "steps" if steps.kind == "step" else f"steps ({steps.what})",
        times.rename({"step": "name"}).drop("occurrence"),
        _in_windows(trace, windows),
        windows.select(_WINDOW),
    )


def _in_windows(trace: Attributed, windows: pl.DataFrame) -> Int64:
    """For each activity, the step in whose window on the activity's device it begins; `NO_ROW` for none."""
    row = windows["row"].to_numpy().astype(np.int64)
    return np.append(row, NO_ROW)[windows_at(trace.gpu, windows)]


def _one_step(trace: Attributed) -> RunSteps:
    """The whole trace as one step, whose idle time is not divided by cause."""
    gpu = trace.gpu.select("rank", "device", "start", end=pl.col("start") + pl.col("duration"))
    device = gpu.select(pl.struct("rank", "device").rank("dense").cast(pl.Int64) - 1).to_series()
    spans = gpu.group_by("rank", "device", maintain_order=True).agg(
        pl.col("start").min(), duration=pl.col("end").max() - pl.col("start").min()
    )
    start, end = gpu["start"].to_numpy(), gpu["end"].to_numpy()
    total = float(spans["duration"].mean() or 0)  # type: ignore[arg-type]
    busy = float(union_lengths(device.to_numpy(), start, end, max(1, spans.height)).mean())
    talking = exposure(trace).devices
    per_device = {
        name: float(talking[name].sum()) / max(1, spans.height) for name in ("communication_ns", "exposed_ns")
    }
    times = pl.DataFrame(
        {"name": ["all"], "start_ns": [gpu["start"].min()], "total_ns": [total], "busy_ns": [busy]}
    ).with_columns(
        idle_ns=pl.lit(total - busy), **{k: pl.lit(v) for k, v in per_device.items()}, left_out=pl.lit(None, pl.String)
    )
    windows = spans.with_columns(row=pl.lit(0, pl.UInt32)).select(_WINDOW)
    return RunSteps(WHOLE_TRACE, times, np.zeros(trace.gpu.height, np.int64), windows)


STEP, BUSY, IDLE, COMMUNICATION = "step", "busy", "idle", "communication"
"""Values of ``by`` in addition to the kinds of place: the whole step, and parts of it."""
ALL, EXPOSED = "all", "exposed"
"""Name of the row of the whole by step, busy or idle, and name of the row by communication."""
UNATTRIBUTED = "[no place known]"
"""Name of the row with the time that has no place of a kind."""

_ROWS = pl.Schema(
    {"by": pl.String(), "name": pl.String(), "step": pl.Int32(), "ns": pl.Float64(), "count": pl.Float64()}
)
PLACED = (*("label", "module"), *("op_name", "op"))
"""Kinds of place (columns of places) by which kernels are matched."""


@dataclass(frozen=True)
class Sample:
    """One run.

    Attributes:
        inputs: the inputs of the run.
        what: what its steps are; see `RunSteps.what`.
        steps: one row per step in order of time: name, total_ns (its length), left_out (why it does not
            count, null if it counts).
        rows: by, name, step (number among the counted steps), ns and count (of activities) in that step, per
            device. by is one of `STEP`, `BUSY`, `IDLE`, `COMMUNICATION` or a kind of place; a step in which a
            place has no time has no row.
        kernels: name, label, module, op_name, op, and ns and count per step and device of the kernels launched there.
        conditions: the conditions of the run, which two sides must share.
        outside_share: share of the device time that belongs to no step.
        idle_is_total: whether idle time was not divided by cause, because that takes long.
        streams: what ran on which stream, and at the same time; None if that is not known.
        work: as `thence.analysis.diff.work.work_of` returns it.
        memory: as `thence.analysis.diff.memory.memory_of` returns it.
        hardware: as `thence.analysis.diff.hardware.hardware_of` returns it.
    """

    inputs: tuple[str, ...]
    what: str
    steps: pl.DataFrame
    rows: pl.DataFrame
    kernels: pl.DataFrame
    conditions: Conditions
    outside_share: float
    idle_is_total: bool = False
    streams: Streams | None = None
    work: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=WORK))
    memory: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=MEMORY))
    hardware: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=HARDWARE))

    @property
    def counted(self) -> int:
        """Number of steps that count."""
        return self.steps["left_out"].null_count()


def sample(trace: Attributed, soundness: Soundness, *, outliers: bool = False, causes: bool | None = None) -> Sample:
    """The sample of a run.

    Args:
        trace: attributed; of one run.
        outliers: whether outlying steps count.
        causes: whether to divide idle time by cause; None to do so if it takes little time.

    Raises:
        MissingData: no step counts, because the selected part of the trace has left-out ones only.
    """
    if causes is None:
        causes = trace.host.height <= MAX_HOST_RANGES
    steps = run_steps(trace, causes=causes)
    codes = steps.times["left_out"]
    if outliers:
        codes = codes.replace(OUTLIER, None)
    counted = codes.is_null().to_numpy()
    if not counted.any():
        reasons = "; ".join(RULES[code] for code in codes.unique(maintain_order=True).drop_nulls())
        raise MissingData(
            f"{', '.join(trace.meta.inputs)}: no step of the selected part counts in a comparison ({reasons}); "
            "select a part with other steps"
        )
    number = np.where(counted, np.cumsum(counted) - 1, NO_ROW)
    of_activity = np.append(number, NO_ROW)[steps.of_activity]
    devices = max(1, trace.gpu.select("rank", "device").n_unique())
    step = pl.Series("step", of_activity, dtype=pl.Int32)
    shared_by = devices * max(1, int(counted.sum()))
    rows = [
        *_whole(steps.times.filter(pl.Series(counted))),
        *(_by_place(trace, kind, step, devices) for kind in COMPARED),
    ]
    duration = trace.gpu["duration"]
    outside = duration.filter(pl.Series(steps.of_activity == NO_ROW)).sum()
    return Sample(
        trace.meta.inputs,
        steps.what,
        steps.times.select("name", "total_ns", left_out=codes),
        pl.concat(rows),
        _kernels(trace, step, shared_by),
        conditions(trace, soundness, step, shared_by),
        float(outside) / max(1.0, float(duration.sum())),
        idle_is_total=not causes,
        streams=streams_of(trace, steps.windows, number, PLACED),
        work=work_of(trace, step, shared_by),
        memory=memory_of(trace),
        hardware=hardware_of(trace),
    )


def _whole(times: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Rows of the whole step and its parts; idle time by cause where the causes are known."""
    yield _of_steps(STEP, ALL, times["total_ns"])
    yield _of_steps(BUSY, ALL, times["busy_ns"])
    yield _of_steps(IDLE, ALL, times["idle_ns"])
    if times["communication_ns"].sum():
        yield _of_steps(COMMUNICATION, EXPOSED, times["exposed_ns"])
    for column in times.columns:
        if cause := re.fullmatch(IDLE_CAUSE, column):
            yield _of_steps(IDLE, cause[1], times[column])


def _of_steps(by: str, name: str, ns: pl.Series) -> pl.DataFrame:
    """One row per step for the whole step or a part of it, with a count of 0."""
    frame = pl.DataFrame({"step": np.arange(len(ns)), "ns": ns})
    named = frame.with_columns(by=pl.lit(by), name=pl.lit(name), count=pl.lit(0.0))
    return named.select(*_ROWS).cast(_ROWS)


def _by_place(trace: Attributed, kind: str, step: pl.Series, devices: int) -> pl.DataFrame:
    """Time and activities of each place in each step; no rows if the trace has no place of the kind."""
    parts = time_by_place(trace, kind)
    if parts["place"].null_count() == parts.height:
        return pl.DataFrame(schema=_ROWS)
    rows = parts["gpu"]
    aligned = rows.len() == len(step)  # one row for each activity, in its order
    return (
        parts.lazy()
        .select("place", "duration", step=step if aligned else step.gather(rows))
        .filter(pl.col("step") != NO_ROW)
        .group_by("place", "step")
        .agg(ns=pl.col("duration").sum() / devices, count=pl.len() / devices)
        .select(
            by=pl.lit(kind),
            name=pl.col("place").cast(pl.String).fill_null(UNATTRIBUTED),
            step="step",
            ns="ns",
            count="count",
        )
        .cast(_ROWS)
        .collect()
    )


def _kernels(trace: Attributed, step: pl.Series, shared_by: int) -> pl.DataFrame:
    """Time and count of each kernel by the place of its launch, as `Sample.kernels`."""
    places = [pl.lit(trace.places[kind]).alias(kind) for kind in PLACED]
    keys = ("name", *PLACED)
    return (
        trace.gpu.select("name", "duration", step, *places)
        .lazy()
        .filter(pl.col("step") != NO_ROW)
        .group_by(keys)
        .agg(ns=pl.col("duration").sum() / shared_by, count=pl.len() / shared_by)
        .with_columns(pl.col(keys).cast(pl.String))
        .collect()
    )
