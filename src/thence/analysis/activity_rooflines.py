"""The roofline of every device activity: the shortest time that its device allows for its work.

It is the longest of FLOP / peak of the data type, bytes / bandwidth of memory and, for communication and copies between
devices or with the host, bytes / bandwidth of the link; at most the activity's own time. Williams, Waterman, Patterson:
"Roofline" (2009).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.grouping.kernel_groups import communicates
from thence.attribution.work.activity_work import activity_work
from thence.errors import MissingData
from thence.model.attributed import of_each_activity
from thence.model.collective_kinds import bandwidths, kind_of
from thence.model.columns import at_once
from thence.model.grouped_intervals import numbered
from thence.model.names import BETWEEN_DEVICES, FROM_DEVICE, TO_DEVICE, matching
from thence.model.peaks import DTYPES, measured_peaks_of, peaks_at_clock, peaks_of
from thence.model.thresholds import MAX_OVER_PEAK, SHORT_KERNEL_NS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from thence.model.attributed import Attributed
    from thence.model.peaks import Peaks

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "no_operator": "it was launched by no operator whose inputs are recorded: torch.profiler records them with "
        "record_shapes=True; in CUDA graphs, thence record and thence.save_labels() take them at capture, and thence "
        "label --eager from a run without graphs or a trace of the capture",
        "no_instruction": "its HLO instruction is not known",
        "no_program": "it is part of no XLA program, such as what the autotuner runs to compare results",
        "no_model": "the operator's inputs are recorded, but nothing says how many bytes it moves, or they are lists "
        "whose shapes are not recorded",
        "communication": "it communicates, and the trace does not say how much",
        "link": "it copies over a link whose bandwidth is not known",
        "no_peak": "the peak of its data type on this device is not known",
        "exceeds": "its FLOP or bytes in its time are more than the device allows, so they are counted wrong",
    }
)
"""Why an activity has no roofline, by code."""
BOUNDS = ("compute", "memory", "link", "cache", "latency")
"""What decides the roofline of an activity. cache: its bytes in its time exceed the memory's bandwidth, because they
come from the cache. latency: it is too short for any (`thence.model.thresholds.SHORT_KERNEL_NS`)."""
_SCHEMA = {
    "rank": pl.Int32(), "device": pl.Int32(), "duration": pl.Int64(), "reason": pl.String(), "dtype": pl.String(),
    "flop": pl.Float64(), "bytes": pl.Float64(), "compute_ns": pl.Float64(), "roofline_ns": pl.Float64(),
    "bound": pl.String(), "work_rule": pl.String(),
}  # fmt: skip


STATE_PEAKS = (
    "--peak bfloat16=989 --bandwidth 3350 states them (TFLOP/s without sparsity, and GB/s), and "
    "thence roofline --measure-peaks measures them"
)
"""What to do about unknown peaks."""


def known_peaks(trace: Attributed, given: Peaks | None) -> dict[tuple[int, int], Peaks]:
    """The peaks of each device by rank and device; devices of unknown peaks are left out.

    Raises:
        MissingData: the peaks of none of the devices are known.
    """
    names = _names_of_devices(trace)
    if given is not None:
        return dict.fromkeys(names, given)
    named = _peaks_by_name(names)
    if not named:
        unknown = sorted({name or "a device without a name" for name in names.values()})
        raise MissingData(f"{trace.meta.named}: the peaks of {', '.join(unknown)} are not known; {STATE_PEAKS}")
    return named


def attainable_peaks(trace: Attributed) -> dict[tuple[int, int], Peaks]:
    """What each device attains, by rank and device; devices of which the trace does not tell it are left out.

    It is what was measured on the machine before it was recorded, else the peaks at the clock that was sampled.
    """
    measured = [fact["measured_peaks"] for fact in trace.meta.facts if fact.get("measured_peaks")]
    result = {}
    for device in trace.meta.devices:
        name = device.name or ""
        every = [peaks for kept in measured if (peaks := measured_peaks_of(name, kept)) is not None]
        at_clock = None if device.clock_mhz is None else peaks_at_clock(name, device.clock_mhz)
        peaks = every[0] if every else at_clock
        if peaks is not None:
            result[device.rank, device.device] = peaks
    return result


def _names_of_devices(trace: Attributed) -> dict[tuple[int, int], str]:
    """The name of each device with activities, by rank and device; empty where it is not known."""
    names = {(device.rank, device.device): device.name or "" for device in trace.meta.devices}
    _, devices = numbered(trace.gpu, "rank", "device")
    return {pair: names.get(pair, "") for pair in devices.rows()}


def _peaks_by_name(names: Mapping[tuple[int, int], str]) -> dict[tuple[int, int], Peaks]:
    return {pair: peaks for pair, name in names.items() if (peaks := peaks_of(name)) is not None}


@of_each_activity
def rooflines_of_known_devices(trace: Attributed) -> pl.DataFrame:
    """As `activity_rooflines`, with the peaks that thence knows; activities of other devices have no roofline."""
    return activity_rooflines(trace, _peaks_by_name(_names_of_devices(trace)))


BOUND_SUMS = tuple(f"{bound}_bound_ns" for bound in BOUNDS)
"""Time of the work that each of `BOUNDS` decides."""
LINKS_WAIT = "the headroom of work bound by a link includes waits of collectives for other ranks"
WORK_SUMS = ("flop", "flop_ns", "bytes", "bytes_ns", "modelled_ns", "headroom_ns", *BOUND_SUMS)
"""Columns of `work_of_parts`. They add up over parts, activities and ranks."""
USE = ("tflops", "gbps", "peak_share", "bound")
"""Columns of `use_of_sums`."""


def work_of_parts(trace: Attributed, parts: pl.DataFrame) -> pl.DataFrame:
    """What is known of the work of each part of an activity at a place, in whole numbers.

    Args:
        parts: as `thence.analysis.grouping.time_by_place.time_by_place` returns them.

    Returns:
        columns flop (Int128: a part may have more than 64 bits hold), flop_ns (time of the part if its FLOP are known),
        bytes, bytes_ns (time of the part if its bytes are known), modelled_ns (time of the part if it has a roofline),
        headroom_ns (time beyond it) and `BOUND_SUMS`, one row for each part; null where unknown.
    """
    rated = rooflines_of_known_devices(trace)[["duration", "flop", "bytes", "roofline_ns", "bound", "reason"]]
    part, whole = pl.col("part"), pl.col("duration")
    share = pl.when(whole > 0).then(part / whole).otherwise(0.0)
    sums = {
        "flop": pl.col("flop") * share,
        "flop_ns": pl.when(pl.col("flop").is_not_null()).then(part),
        "bytes": pl.col("bytes") * share,
        "bytes_ns": pl.when(pl.col("bytes").is_not_null()).then(part),
        "modelled_ns": pl.when(pl.col("reason").is_null()).then(part),
        "headroom_ns": part - pl.col("roofline_ns") * share,
        **{name: pl.when(pl.col("bound") == bound).then(part) for name, bound in zip(BOUND_SUMS, BOUNDS, strict=True)},
    }
    return (
        rated[parts["gpu"].cast(pl.UInt32)]
        .hstack([parts["duration"].alias("part")])
        .select(sums[name].round().cast(pl.Int128 if name == "flop" else pl.Int64).alias(name) for name in WORK_SUMS)
    )


def summed_work(known: Collection[str] = WORK_SUMS) -> list[pl.Expr]:
    """The sums of `WORK_SUMS` in groups, null if nothing is known; exact until FLOP are rounded to Float64.

    Args:
        known: the columns of which something is known in any group. The others are null, and need not exist: a million
            groups take 20 MB for each column.
    """
    types = {name: pl.Float64() if name == "flop" else pl.Int64() for name in WORK_SUMS}
    return [
        pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).cast(pl.Int128).sum().cast(dtype)).alias(name)
        if name in known
        else pl.lit(None, dtype).alias(name)
        for name, dtype in types.items()
    ]


def use_of_sums() -> list[pl.Expr]:
    """What follows from the sums `WORK_SUMS`: the columns `USE`, null where nothing is known.

    tflops (10^12 FLOP/s in the time of the work with known FLOP), gbps (10^9 bytes/s in that with known bytes),
    peak_share (roofline / time of the work with a roofline) and bound (what decides the roofline of most of that time).
    """
    modelled = pl.when(pl.col("modelled_ns") > 0)
    return [
        pl.when(pl.col("flop_ns") > 0).then(pl.col("flop") / pl.col("flop_ns") / 1e3).alias("tflops"),
        pl.when(pl.col("bytes_ns") > 0).then(pl.col("bytes") / pl.col("bytes_ns")).alias("gbps"),
        modelled.then(1 - pl.col("headroom_ns") / pl.col("modelled_ns")).alias("peak_share"),
        modelled.then(most_of(BOUND_SUMS)).alias("bound"),
    ]


def most_of(times: Sequence[str]) -> pl.Expr:
    """The name of what decides the most time, of `BOUNDS`, whose times these columns are, in their order."""
    largest = pl.max_horizontal(times)
    pairs = zip(times, BOUNDS, strict=True)
    return pl.coalesce(pl.when(pl.col(time) == largest).then(pl.lit(bound)) for time, bound in pairs)


def activity_rooflines(trace: Attributed, peaks: Mapping[tuple[int, int], Peaks]) -> pl.DataFrame:
    """Work and roofline of each row of ``gpu``.

    Args:
        peaks: as `known_peaks` returns them.

    Returns:
        columns rank, device, duration, reason (of `REASONS`; null where there is a roofline), and, null where there is
        none: dtype (of the FLOP), flop, bytes, compute_ns (FLOP / peak), roofline_ns, bound (of `BOUNDS`), work_rule.
    """
    activities = (
        trace.gpu[["rank", "device", "kind", "duration", "name", "program"]]
        .hstack([communicates(trace).alias("communicates"), *activity_work(trace), _link_bytes(trace)])
        .lazy()
        .cast({"dtype": pl.String})
        .join(_ceilings(peaks).lazy(), on=["rank", "device"], how="left", maintain_order="left")
    )
    rated = _with_times(_in_tf32(activities), trace.gpu)
    known = pl.col("reason").is_null()
    of_xla = not trace.programs.is_empty() and trace.host["inputs"].null_count() == trace.host.height
    ideal = pl.max_horizontal("compute_ns", "bytes_ns")
    shown = {
        "dtype": pl.when(pl.col("flop").is_not_null()).then("dtype"),
        "roofline_ns": pl.min_horizontal(ideal, pl.col("duration").cast(pl.Float64)),
        "bound": _bound(ideal),
        **{column: pl.col(column) for column in ("flop", "bytes", "compute_ns", "work_rule")},
    }
    return (
        rated.with_columns(reason=_reason(of_xla=of_xla))
        .select("rank", "device", "duration", "reason", **{n: pl.when(known).then(e) for n, e in shown.items()})
        .select(pl.col(column).cast(dtype) for column, dtype in _SCHEMA.items())
        .pipe(at_once)
    )


def _with_times(rated: pl.LazyFrame, gpu: pl.DataFrame) -> pl.LazyFrame:
    """Adds links (whether its bytes pass over a link), and the times that FLOP and bytes take at the ceilings."""
    copies = gpu["kind"] == "memcpy"
    ways = (f"{TO_DEVICE}|{FROM_DEVICE}", BETWEEN_DEVICES)
    over_host, over_gpu = (pl.lit(copies & matching(gpu["name"], way) if copies.any() else copies) for way in ways)
    links = pl.col("communicates") | over_host | over_gpu
    link = pl.when(over_host).then("host_link").otherwise("gpu_link")
    moved = pl.when("communicates").then("link_bytes").otherwise("bytes")
    return rated.with_columns(
        links=links,
        bytes=moved,
        flop=pl.when(~links).then("flop"),
        compute_ns=pl.when(~links).then(pl.col("flop") / pl.col("tflops") / 1e3),  # FLOP / (TFLOP/s) = 1e-12 s
        bytes_ns=moved / pl.when(links).then(link).otherwise("gbps"),
    )


def _reason(*, of_xla: bool) -> pl.Expr:
    """Why an activity has no roofline; null if it has one.

    Args:
        of_xla: whether work comes from XLA programs, not from operators.
    """
    most = MAX_OVER_PEAK * pl.max_horizontal("duration", 1)
    stated = pl.col("cache").is_not_null()  # peaks that the user gives may be lower than what the device can do
    exceeds = stated & (
        (pl.col("compute_ns") > most)
        | ((pl.col("bytes_ns") > most) & (pl.col("links") | (pl.col("bytes") > pl.col("cache"))))
    )
    unknown = pl.col("flop").is_null() & pl.col("bytes").is_null()
    return (
        pl.when(pl.col("communicates") & pl.col("bytes").is_null()).then(pl.lit("communication"))
        .when(pl.col("links") & pl.col("bytes_ns").is_null()).then(pl.lit("link"))
        .when(pl.col("links") & exceeds).then(pl.lit("exceeds"))
        .when("links").then(None)
        .when(unknown & ~pl.col("called") & pl.col("program").is_not_null()).then(pl.lit("no_instruction"))
        .when(unknown & ~pl.col("called")).then(pl.lit("no_program" if of_xla else "no_operator"))
        .when(unknown).then(pl.lit("no_model"))
        .when((pl.col("flop").is_not_null() & pl.col("tflops").is_null()) | pl.col("gbps").is_null())
        .then(pl.lit("no_peak"))
        .when(exceeds).then(pl.lit("exceeds"))
    )  # fmt: skip


def _bound(ideal: pl.Expr) -> pl.Expr:
    """What decides the roofline, one of `BOUNDS`."""
    return (
        pl.when("links").then(pl.lit("link"))
        .when((pl.col("duration") <= SHORT_KERNEL_NS) & (ideal < pl.col("duration") / 2)).then(pl.lit("latency"))
        .when(pl.col("compute_ns").fill_null(0) >= pl.col("bytes_ns").fill_null(0)).then(pl.lit("compute"))
        .when(pl.col("bytes_ns") > pl.col("duration")).then(pl.lit("cache"))
        .otherwise(pl.lit("memory"))
    )  # fmt: skip


def _ceilings(peaks: Mapping[tuple[int, int], Peaks]) -> pl.DataFrame:
    """A row for each device: its TFLOP/s by data type, and its GB/s."""
    rows = [
        {"rank": rank, "device": device, "gbps": most.gbps, "cache": most.cache_bytes, "gpu_link": most.gpu_link,
         "host_link": most.host_link, **{f"peak_{dtype}": most.tflops.get(dtype) for dtype in DTYPES}}
        for (rank, device), most in peaks.items()
    ]  # fmt: skip
    numbers = ("gbps", "cache", "gpu_link", "host_link", *(f"peak_{dtype}" for dtype in DTYPES))
    return pl.DataFrame(rows, {"rank": pl.Int32(), "device": pl.Int32(), **dict.fromkeys(numbers, pl.Float64())})


def _in_tf32(activities: pl.LazyFrame) -> pl.LazyFrame:
    """Adds ``tflops``, the peak of the data type. Float32 that is faster than its peak was computed in TF32."""
    fast = pl.col("flop") / pl.col("duration") / 1e3 > pl.col("peak_float32")
    dtype = pl.when((pl.col("dtype") == "float32") & fast).then(pl.lit("tf32")).otherwise("dtype")
    peak = [pl.when(pl.col("dtype") == dtype).then(f"peak_{dtype}") for dtype in DTYPES]
    return activities.with_columns(dtype=dtype).with_columns(tflops=pl.coalesce(peak))


def _link_bytes(trace: Attributed) -> pl.Series:
    """Bytes that each collective must move over a device's link, as bus bandwidth counts them; null for all others."""
    if trace.collectives.is_empty():
        return pl.Series("link_bytes", [None], dtype=pl.Float64).new_from_index(0, trace.gpu.height)
    described = trace.collectives.select(
        "gpu", "bytes", "group_size", collective=kind_of(pl.col("collective")), once=pl.lit(1.0)
    ).unique("gpu", keep="first")
    _, bus = bandwidths("once")
    rows = pl.select(gpu=pl.int_range(trace.gpu.height, dtype=pl.Int32))
    moved = described.drop_nulls("gpu").select("gpu", link_bytes=bus)
    return rows.join(moved, on="gpu", how="left", maintain_order="left")["link_bytes"]
