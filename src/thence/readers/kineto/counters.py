"""The hardware counters of a file: PyTorch's samples of performance monitors as amounts.

Kineto (``PerformanceMetricsConfig``, category ``hardware_counters``) and Cuspy (``pm_metrics``) write values of CUPTI's
metrics, at the begin of each sample: sums, sums in a second, or shares of a peak in percent. Cuspy replaces the names
of common metrics by shorter ones. A share becomes time, because the files state no clocks.

A sample is taken to end where the next one begins. One of the range profiler (category ``cuda_profiler_range``) is not
read: its times are made up. Readings of the device's state, such as its power, are no counters. Sources of the format:
pytorch/kineto, libkineto/src/CuptiPMSamplingProfiler.cpp and output_json.cpp; pytorch/pytorch,
torch/profiler/_cuspy/trace.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from thence.model.counter_names import COUNTERS as KNOWN
from thence.model.tables import COUNTERS
from thence.model.thresholds import COUNTER_GAP_RATIO

if TYPE_CHECKING:
    from collections.abc import Collection

_SHARES = {
    "sm__cycles_active": "sm_active_ns",
    "sm__pipe_tensor_cycles_active": "tensor_active_ns",
    "TPC.TriageCompute.sm__pipe_tensor_cycles_active_realtime": "tensor_active_ns",
    "gpu__dram_throughput": "dram_busy_ns",
    "dram__throughput": "dram_busy_ns",
    "pcie__throughput": "pcie_busy_ns",
    "nvlrx__bytes": "nvlink_receive_ns",
    "nvltx__bytes": "nvlink_transmit_ns",
}
"""Metrics whose share of the peak becomes a counter, without their roll-up."""
_LABELS = {
    "SM Active (%)": "sm_active_ns",
    "DRAM BW (%)": "dram_busy_ns",
    "HBM BW (%)": "dram_busy_ns",
    "PCIe (%)": "pcie_busy_ns",
    "NVLink RX (%)": "nvlink_receive_ns",
    "NVLink TX (%)": "nvlink_transmit_ns",
}
"""Cuspy's names of the same."""
_READINGS = frozenset(
    (
        "Power (W)", "Temperature (C)", "SM Clock (MHz)", "Memory Clock (MHz)", "Fan Speed (%)",
        "Cycles (Current Kernel)",
    )
)  # fmt: skip
"""Cuspy's readings of the device's state, and what it derives from them for each kernel."""
_SAMPLED = {counter.metric: counter.name for counter in KNOWN if counter.metric is not None}
_ROLL_UPS = ("avg.pct_of_peak_sustained_elapsed", "sum.pct_of_peak_sustained_elapsed")
_READ = {
    **{metric: (name, "amount") for metric, name in _SAMPLED.items()},
    **{f"{metric}.per_second": (name, "per_second") for metric, name in _SAMPLED.items()},
    **{f"{metric}.{roll_up}": (name, "percent") for metric, name in _SHARES.items() for roll_up in _ROLL_UPS},
    **{label: (name, "percent") for label, name in _LABELS.items()},
}
"""The counter that each metric becomes, and what its values are."""
_MAX_PERCENT = 110.0
"""A larger share of the peak is damaged; one a little above 100 is not, because units do not begin at the same time."""
_MAX_LEFT_OUT, _MAX_NAME = 50, 200
"""Names of metrics that are not read: how many are stated, and how many characters of each."""
_LEFT_OUT = "thence has no counter of that kind"


def counters_of(
    values: dict[str, Any], names: pl.Series, used: Collection[tuple[int, int]], rank: int
) -> tuple[pl.DataFrame, dict[str, Any]]:
    """The rows of `COUNTERS`, and facts about them as a recording states them; nothing and {} without counters.

    Args:
        values: columns ``counter.*`` of `thence.readers.kineto.events.decode`.
        names: of the file; ``values["name"]`` has their positions.
        used: rank and device of every device with activities.
        rank: of devices without.
    """
    if not values or not len(values["value"]):
        return COUNTERS.empty(), {}
    frame = pl.DataFrame(values)
    metrics = names.gather(frame["name"].unique(maintain_order=True))
    unread = [name for name in metrics.to_list() if name not in _READINGS and name not in _READ]
    samples = _samples(_with_amounts(frame, names))
    if samples.is_empty() and not unread:
        return COUNTERS.empty(), {}
    lasting = samples["lasting"].median()
    facts = {
        "counters": {"interval_ns": int(lasting) if lasting else None, "trouble": None, "overflowed": 0},  # type: ignore[arg-type]
        "counters_left_out": {name[:_MAX_NAME]: _LEFT_OUT for name in unread[:_MAX_LEFT_OUT]},
    }
    ranks = pl.DataFrame(sorted(used), {"rank": pl.Int32, "device": pl.Int32}, orient="row")
    placed = samples.join(ranks.unique("device", keep="first", maintain_order=True), on="device", how="left")
    placed = placed.with_columns(pl.col("rank").fill_null(rank)).sort("rank", "device", "start")
    return COUNTERS.frame(placed.drop("lasting").to_dict()), facts


def _with_amounts(values: pl.DataFrame, names: pl.Series) -> pl.DataFrame:
    """Columns device, start, lasting (ns), counter and amount, of the values that become counters."""
    numbers = values["name"].unique(maintain_order=True)
    known = zip(numbers.to_list(), map(_READ.get, names.gather(numbers).to_list()), strict=True)
    rows = [(number, *read) for number, read in known if read is not None]
    read = pl.DataFrame(rows, {"name": pl.Int32, "counter": pl.String, "form": pl.String}, orient="row")
    chosen = values.join(read, on="name")
    times = chosen.select("device", "start").unique().sort("device", "start")
    following = pl.col("start").diff().over("device").shift(-1).over("device")
    usual = following.median().over("device").fill_null(0).cast(pl.Int64)
    times = times.with_columns(lasting=pl.when(following <= COUNTER_GAP_RATIO * usual).then(following).otherwise(usual))
    amount = (
        pl.when(pl.col("form") == "amount").then("value")
        .when(pl.col("form") == "per_second").then(pl.col("value") * pl.col("lasting") / 1e9)
        .when(pl.col("value") <= _MAX_PERCENT).then(pl.col("value") / 100 * pl.col("lasting"))
    )  # fmt: skip
    timed = chosen.join(times.filter(pl.col("lasting") > 0), on=["device", "start"])
    return timed.select("device", "start", "lasting", "counter", amount=pl.when(amount >= 0).then(amount))


def _samples(amounts: pl.DataFrame) -> pl.DataFrame:
    """One row for each sample that has all counters of its device."""
    keys = ["device", "start", "lasting"]
    wide = amounts.pivot("counter", index=keys, values="amount", aggregate_function="first")
    held = [pl.col(name) for name in wide.columns if name not in keys]
    complete = [column.is_not_null() | column.is_null().all().over("device") for column in held]
    return wide.filter(*complete).with_columns(end=pl.col("start") + pl.col("lasting"))
