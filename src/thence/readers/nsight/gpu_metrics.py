"""The hardware counters of an export: Nsight's GPU metrics (``nsys profile --gpu-metrics-devices``) as amounts.

GPU_METRICS has a row for each sample and metric, with a whole number: a share of the peak in percent, or a clock in
cycles a second (in MHz by older versions). From a share, the clock and what TARGET_INFO_GPU states follow cycles and
bytes, which are then the columns of `COUNTERS`; other metrics are left out. Each amount is uncertain by the half of a
percent of the peak by which Nsight rounds.

A sample is taken to end at its time and to begin with the one before it. The low byte of ``typeId`` is the number of
the GPU. Source of the schema: the exporter schema reference of the Nsight Systems user guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from thence.model.peaks import SUB_PARTITIONS
from thence.model.tables import COUNTERS
from thence.model.thresholds import COUNTER_GAP_RATIO

if TYPE_CHECKING:
    from thence.readers.nsight.store import Store

_METRICS, _NAMES, _GPUS, _USED = "GPU_METRICS", "TARGET_INFO_GPU_METRICS", "TARGET_INFO_GPU", "TARGET_INFO_CUDA_DEVICE"
_CLOCK = "sm_elapsed_cycles"
_READ = {
    "GPC Clock Frequency [MHz]": _CLOCK,
    "SMs Active [Throughput %]": "sm_active_cycles",
    "SM Active [Throughput %]": "sm_active_cycles",
    "Tensor Active [Throughput %]": "tensor_cycles",
    "DRAM Read Bandwidth [Throughput %]": "dram_read_bytes",
    "DRAM Read Throughput [Throughput %]": "dram_read_bytes",
    "DRAM Write Bandwidth [Throughput %]": "dram_write_bytes",
    "DRAM Write Throughput [Throughput %]": "dram_write_bytes",
}
"""Metrics that become counters, and the counter of each."""
_MIN_HZ, _MAX_HZ = 1_000_000, 10_000_000_000
"""A smaller clock is in MHz, a larger one is damaged."""


def gpu_metrics(store: Store, gpu: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, Any]]:
    """The rows of `COUNTERS`, and facts about them as a recording states them; nothing and {} without metrics.

    Args:
        gpu: columns rank, process and device of the activities.

    Raises:
        DamagedInput: a table cannot be read.
    """
    names = store.frame(_NAMES, ("typeId", "metricId"), ("metricName",))
    counter = pl.col("metricName").cast(pl.String).replace_strict(_READ, default=None, return_dtype=pl.String)
    names = (
        names.select("typeId", "metricId", counter=counter).drop_nulls().unique(["typeId", "metricId"], keep="first")
    )
    places = _places(store, gpu)
    if names.is_empty() or places.is_empty():
        return COUNTERS.empty(), {}
    parts = store.parts(
        _METRICS,
        ("timestamp", "typeId", "metricId", "value"),
        lambda part: part.drop_nulls().filter(pl.col("timestamp") >= 0).join(names, on=["typeId", "metricId"]),
    )
    samples = pl.concat(parts).select("timestamp", "counter", "value", id=pl.col("typeId") % (1 << 8))
    samples = samples.join(places, on="id").sort("rank", "device", "timestamp")
    if samples.is_empty():
        return COUNTERS.empty(), {}
    timed, interval_ns = _timed(samples)
    return COUNTERS.frame(_amounts(timed).to_dict()), {
        "counters": {"interval_ns": interval_ns, "trouble": None, "overflowed": 0},
        "counters_left_out": {},
    }


def _places(store: Store, gpu: pl.DataFrame) -> pl.DataFrame:
    """The rank and device of each GPU that has activities, and what it can do.

    Columns id, rank, device, multiprocessors (null: unknown) and memory (bytes/s; null: unknown). A GPU that several
    processes use is counted once, for the lowest rank.
    """
    frame = store.frame(_GPUS, ("id", "cuDevice", "smCount", "memoryBandwidth"))
    gpus = frame.select(
        "id",
        by_number=pl.coalesce("cuDevice", "id"),
        multiprocessors=pl.when(pl.col("smCount") > 0).then("smCount"),
        memory=pl.when(pl.col("memoryBandwidth") > 0).then("memoryBandwidth"),
    ).unique("id", keep="first")
    active = gpu.select("rank", "process", device=pl.col("device").cast(pl.Int64)).unique()
    used = store.frame(_USED, ("gpuId", "cudaId", "pid")).select(
        id="gpuId", device="cudaId", process=pl.col("pid").cast(active.schema["process"], strict=False)
    )
    by_process = used.drop_nulls().unique().join(active, on=["process", "device"]).select("id", "rank", "device")
    by_number = gpus.join(active, left_on="by_number", right_on="device").select("id", "rank", device="by_number")
    places = (by_number if by_process.is_empty() else by_process).sort("rank", "device")
    return places.unique("id", keep="first", maintain_order=True).join(gpus.drop("by_number"), on="id")


def _timed(samples: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """One row for each sample, with start, end and a column for each counter (as written), and the usual interval."""
    keys = ["rank", "device", "multiprocessors", "memory", "timestamp"]
    wide = samples.pivot("counter", index=keys, values="value", aggregate_function="first")
    apart = pl.col("timestamp").diff().over("rank", "device")
    usual = int(wide.select(apart.median().fill_null(0)).item() or 0)
    since = pl.when(apart <= COUNTER_GAP_RATIO * usual).then(apart).otherwise(usual)
    timed = wide.with_columns(start=pl.col("timestamp") - since, end="timestamp", lasting=since)
    return timed.filter(pl.col("lasting") > 0, pl.col("start") >= 0), usual


def _amounts(timed: pl.DataFrame) -> pl.DataFrame:
    """The columns of `COUNTERS` from what was written; null where it is impossible or its peak is unknown."""
    absent = [pl.lit(None, pl.Int64).alias(name) for name in set(_READ.values()) if name not in timed.columns]
    hertz = pl.when(pl.col(_CLOCK) < _MIN_HZ).then(pl.col(_CLOCK) * _MIN_HZ).otherwise(pl.col(_CLOCK))
    cycles = pl.when(hertz.is_between(0, _MAX_HZ, closed="right")).then(hertz) * pl.col("lasting") / 1e9

    def of_peak(name: str, peak: pl.Expr) -> pl.Expr:
        return (pl.when(pl.col(name).is_between(0, 100)).then(pl.col(name)) / 100 * peak).alias(name)

    return timed.with_columns(absent).select(
        "rank", "device", "start", "end", cycles.alias(_CLOCK),
        of_peak("sm_active_cycles", cycles * pl.col("multiprocessors")),
        of_peak("tensor_cycles", cycles * pl.col("multiprocessors") * SUB_PARTITIONS),
        of_peak("dram_read_bytes", pl.col("memory") * pl.col("lasting") / 1e9),
        of_peak("dram_write_bytes", pl.col("memory") * pl.col("lasting") / 1e9),
    )  # fmt: skip
