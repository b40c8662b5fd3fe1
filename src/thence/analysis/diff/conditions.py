"""The conditions of a run, which must be the same on two sides for their times to be comparable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from thence.model.intervals import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.analysis.soundness.findings import Soundness
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
        soundness: soundness of the whole trace.
        step: for each row of gpu, the number of its counted step; `NO_ROW` for none.
        shared_by: number of steps times number of devices, by which sums are divided.
    """
    meta, gpu = trace.meta, trace.gpu
    sizes = [int(f["world_size"]) for f in meta.facts if _whole(f.get("world_size"))]
    copies = trace.gpu.filter(pl.col("kind") == "memcpy", step != NO_ROW).select("name", "bytes")
    from_host = copies.filter(pl.col("name").cast(pl.String).str.contains(r"(?i)HtoD|Host.*-> ?Device"))
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


def _whole(value: object) -> bool:
    return isinstance(value, int) or (isinstance(value, str) and value.isdigit())


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
    found = {
        name: sorted({str(facts[name]) for facts in trace.meta.facts if facts.get(name) is not None}) for name in wanted
    }
    return {name: ", ".join(values) for name, values in found.items() if values}


def _imported(trace: Attributed) -> dict[str, str]:
    """The versions of Python packages that recordings of thence hold; different versions are joined by commas."""
    found: dict[str, set[str]] = {}
    for facts in trace.meta.facts:
        versions = facts.get("versions")
        for name, version in versions.items() if isinstance(versions, dict) else ():
            found.setdefault(str(name), set()).add(str(version))
    return {name: ", ".join(sorted(versions)) for name, versions in found.items()}


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
