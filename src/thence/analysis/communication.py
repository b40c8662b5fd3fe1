"""Collectives: message size, bandwidth, exposed and hidden time, and waits for other ranks.

Bandwidths follow nccl-tests (doc/PERFORMANCE.md) and nsys-jax: with message size m in bytes, n
devices in the group and duration t in ns, in decimal GB/s (1 GB/s = 1 byte/ns)

    algorithm bandwidth = K m / t       K = n for all-gather and reduce-scatter, else 1
    bus bandwidth       = B K m / t     B = (n-1)/n for all-gather, reduce-scatter, all-to-all;
                                            2 (n-1)/n for all-reduce; else 1

Hidden time is the part of a collective during which at least one compute kernel runs on the same
device (interval union). nsys-jax sums the overlaps instead, so its hidden time can exceed the duration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.clock_sync import Alignment, collective_instances
from thence.analysis.warmup import Phases, WarmUp, phases
from thence.model.intervals import covered_lengths

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

__all__ = ["Collectives", "collectives", "compute_spread", "kind_of"]

_LIBRARY_KERNEL = r"(?i)^(?:nccl|rccl|nvshmem)"
_KINDS = (  # first match decides; names lose case, separators and a leading underscore before
    ("reduce-scatter", "reducescatter"),
    ("all-gather", "allgather"),
    ("all-reduce", "allreduce"),
    ("all-to-all", "alltoall"),
    ("collective-permute", "collectivepermute"),
    ("broadcast", "broadcast"),
)
_SCALED = ("all-gather", "reduce-scatter")
_PARTIAL = ("all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all")


@dataclass(frozen=True)
class Collectives:
    """The collectives of a trace.

    Attributes:
        phases: which executions were counted, and why.
        aligned: whether the clocks of the ranks were aligned; if not, waits of ranks with clocks of
            their own mean nothing.
        by_size: by collective, bytes and group_size: count (kernels, one per device), exposed_ns,
            hidden_ns, algorithm_gbps_mean/std/max, bus_gbps_mean/std/max, and over the instances
            that at least two devices show: instances, wait_ns_mean/max (null if there are none).
            Standard deviations are those of the population.
        rows: one row per kernel: row (in Tables.collectives), gpu, rank, device, program (name),
            instruction, collective, bytes, group_size, start, duration_ns, exposed_ns, hidden_ns,
            algorithm_gbps, bus_gbps, instance.
        instances: one row per instance, for the plots of bandwidth against size, of waits, and of
            relative waits: instance, collective, bytes, group_size, devices (seen), bus_gbps (of the
            fastest device), fastest_ns, wait_ns (last start less first start; null for one device),
            wait_relative (wait_ns / fastest_ns), out_of_step_ns (last end less first start less
            fastest_ns: the "wait" of nsys-jax's notebook), last_rank (the last to start).
            An instance is all devices that ran an instruction together, whatever its replica groups,
            as in nsys-jax: no producer records which device belongs to which replica group.
        stragglers: by rank: instances, last (how often it started last), caused_ns (wait of those
            instances), late_ns_mean and late_ns_max (after the first start).
    """

    phases: Phases
    aligned: bool
    by_size: pl.DataFrame
    rows: pl.DataFrame
    instances: pl.DataFrame
    stragglers: pl.DataFrame

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values: rows of `by_size` and of `stragglers`."""
        return {
            "warm_up": self.phases.rule.value,
            "statement": self.phases.statement,
            "aligned": self.aligned,
            "rows": self.by_size.rows(named=True),
            "stragglers": self.stragglers.rows(named=True),
        }


def collectives(
    trace: Attributed,
    warm_up: WarmUp | Phases = WarmUp.HEURISTIC,
    alignment: Alignment | None = None,
) -> Collectives:
    """Computes sizes, bandwidths, hidden time and waits of all collectives.

    Args:
        trace: attributed. Collectives outside programs are all counted.
        warm_up: rule that says which executions of programs count, or its result.
        alignment: corrections of the ranks' clocks, used for waits only.
    """
    phase = phases(trace, warm_up) if isinstance(warm_up, WarmUp) else warm_up
    rows = _rows(trace, phase)
    seen = _instances(rows, alignment)
    return Collectives(
        phase, alignment is not None, _by_size(rows, seen), rows, seen, _stragglers(rows, alignment)
    )


def kind_of(name: pl.Expr) -> pl.Expr:
    """The kind of a collective, as XLA spells it, from the name its library gives.

    ``_allgather_base`` and ``allgather_into_tensor_coalesced`` become all-gather; a name that is
    none of the known kinds stays as it is.
    """
    plain = name.cast(pl.String).str.to_lowercase().str.replace_all(r"[^a-z0-9]", "")
    kinds = [("ragged-all-to-all", "ragged"), *_KINDS]
    matched = [
        pl.when(plain.str.contains(part, literal=True)).then(pl.lit(kind)) for kind, part in kinds
    ]
    return pl.coalesce(*matched, name.cast(pl.String))


def _rows(trace: Attributed, phase: Phases) -> pl.DataFrame:
    """One row per collective kernel that counts, with its bandwidths."""
    matched = collective_instances(trace)
    described = trace.collectives[matched["row"].to_numpy()]
    kernels = trace.gpu[matched["gpu"].to_numpy()]
    hidden = _hidden(trace, kernels)
    place = kernels["program"]
    steady = pl.DataFrame(
        {"program": pl.int_range(trace.programs.height, dtype=pl.Int32, eager=True)}
    )
    steady = steady.with_columns(
        steady=phase.steady, program_name=trace.programs["name"].cast(pl.String)
    )
    of_program = pl.DataFrame({"program": place}).join(
        steady, on="program", how="left", maintain_order="left"
    )
    rows = matched.select("row", "gpu", "rank", "device").with_columns(
        program=of_program["program_name"],
        instruction=kernels["hlo"].cast(pl.String),
        collective=described.select(kind_of(pl.col("collective"))).to_series(),
        bytes=described["bytes"],
        group_size=described["group_size"],
        start=matched["start"],
        duration_ns=kernels["duration"],
        exposed_ns=kernels["duration"] - hidden,
        hidden_ns=hidden,
        instance=matched["instance"],
        counted=of_program["steady"].fill_null(value=True),
    )
    return rows.filter("counted").drop("counted").with_columns(*_bandwidths())


def _bandwidths() -> tuple[pl.Expr, pl.Expr]:
    kind, n = pl.col("collective"), pl.col("group_size").cast(pl.Float64)
    scale = pl.when(kind.is_in(_SCALED)).then(n).otherwise(1.0)
    bus = (
        pl.when(kind.is_in(_PARTIAL))
        .then((n - 1) / n)
        .when(kind == "all-reduce")
        .then(2 * (n - 1) / n)
        .otherwise(1.0)
    )
    timed = pl.when(pl.col("duration_ns") > 0).then("duration_ns")
    algorithm = scale * pl.col("bytes") / timed
    return algorithm.alias("algorithm_gbps"), (bus * algorithm).alias("bus_gbps")


def _hidden(trace: Attributed, kernels: pl.DataFrame) -> pl.Series:
    """The time, in ns, during which each kernel overlaps computation on its device."""
    is_collective = np.zeros(trace.gpu.height, bool)
    is_collective[trace.collectives["gpu"].drop_nulls().to_numpy()] = True
    library = pl.col("name").cast(pl.String).str.contains(_LIBRARY_KERNEL)
    compute = trace.gpu.filter(~pl.Series(is_collective)).filter(
        pl.col("kind").cast(pl.String).is_in(["kernel", "thunk"]), ~library.fill_null(value=False)
    )
    hidden = np.zeros(kernels.height, np.int64)
    lanes = kernels.select("rank", "device")
    for rank, device in lanes.unique().rows():
        here = (pl.col("rank") == rank) & (pl.col("device") == device)
        chosen = lanes.select(here.arg_true()).to_series().to_numpy()
        ours, theirs = kernels[chosen], compute.filter(here)
        hidden[chosen] = covered_lengths(
            ours["start"].to_numpy(),
            (ours["start"] + ours["duration"]).to_numpy(),
            theirs["start"].to_numpy(),
            (theirs["start"] + theirs["duration"]).to_numpy(),
        )
    return pl.Series(hidden)


def _started(rows: pl.DataFrame, alignment: Alignment | None) -> pl.DataFrame:
    """First start and last end of each instance on each device, on one clock if alignment is given."""
    shift = alignment.shift() if alignment else pl.lit(0)
    moved = rows.with_columns(start=pl.col("start") - shift)
    return moved.group_by("instance", "rank", "device", maintain_order=True).agg(
        pl.col("start").min(),
        end=(pl.col("start") + pl.col("duration_ns")).max(),
        duration_ns=pl.col("duration_ns").sum(),
        bus_gbps=pl.col("bus_gbps").max(),
        **{c: pl.col(c).first() for c in ("collective", "bytes", "group_size")},
    )


def _instances(rows: pl.DataFrame, alignment: Alignment | None) -> pl.DataFrame:
    first, last = pl.col("start").min(), pl.col("start").max()
    return (
        _started(rows, alignment)
        .group_by("instance", maintain_order=True)
        .agg(
            *(pl.col(c).first() for c in ("collective", "bytes", "group_size")),
            devices=pl.len(),
            bus_gbps=pl.col("bus_gbps").max(),
            fastest_ns=pl.col("duration_ns").min(),
            wait_ns=pl.when(pl.len() > 1).then(last - first),
            out_of_step_ns=pl.col("end").max() - first - pl.col("duration_ns").min(),
            last_rank=pl.when(pl.len() > 1).then(pl.col("rank").sort_by("start").last()),
        )
        .with_columns(
            wait_relative=pl.col("wait_ns")
            / pl.when(pl.col("fastest_ns") > 0).then(pl.col("fastest_ns"))
        )
    )


def _by_size(rows: pl.DataFrame, seen: pl.DataFrame) -> pl.DataFrame:
    keys = ["collective", "bytes", "group_size"]
    statistics = [
        getattr(pl.col(f"{which}_gbps"), what)(**options).alias(f"{which}_gbps_{what}")
        for which in ("algorithm", "bus")
        for what, options in (("mean", {}), ("std", {"ddof": 0}), ("max", {}))
    ]
    sizes = rows.group_by(keys).agg(
        pl.len().alias("count"), pl.col("exposed_ns", "hidden_ns").sum(), *statistics
    )
    waits = seen.group_by(keys).agg(
        instances=pl.col("wait_ns").count(),
        wait_ns_mean=pl.col("wait_ns").mean(),
        wait_ns_max=pl.col("wait_ns").max(),
    )
    return sizes.join(waits, on=keys, how="left", nulls_equal=True).sort(keys)


def _stragglers(rows: pl.DataFrame, alignment: Alignment | None) -> pl.DataFrame:
    first, last = pl.col("start").min(), pl.col("start").max()
    late = (
        _started(rows, alignment)
        .with_columns(
            late=(pl.col("start") - first.over("instance")),
            wait=(last - first).over("instance"),
            is_last=(pl.col("start") == last.over("instance")),
            devices=pl.len().over("instance"),
        )
        .filter(pl.col("devices") > 1)
    )
    blamed = pl.col("is_last") & (pl.col("wait") > 0)
    return (
        late.group_by("rank")
        .agg(
            instances=pl.col("instance").n_unique(),
            last=blamed.sum(),
            caused_ns=pl.col("wait").filter(blamed).sum(),
            late_ns_mean=pl.col("late").mean(),
            late_ns_max=pl.col("late").max(),
        )
        .sort("rank")
    )


def compute_spread(trace: Attributed, warm_up: WarmUp | Phases = WarmUp.HEURISTIC) -> pl.DataFrame:
    """How much the durations of the same computation vary, to find noise and uneven ranks.

    Returns:
        By program (name; null outside programs) and operation (HLO instruction, else kernel name):
        program, operation, count, mean_ns, std_ns (population), spread (std / mean); ascending by mean.
        Collectives are left out.
    """
    phase = phases(trace, warm_up) if isinstance(warm_up, WarmUp) else warm_up
    is_compute = np.ones(trace.gpu.height, bool)
    is_compute[trace.collectives["gpu"].drop_nulls().to_numpy()] = False
    programs = pl.DataFrame(
        {
            "program": pl.int_range(trace.programs.height, dtype=pl.Int32, eager=True),
            "program_name": trace.programs["name"].cast(pl.String),
            "steady": phase.steady,
        }
    )
    operation = pl.coalesce(pl.col("hlo").cast(pl.String), pl.col("name").cast(pl.String))
    return (
        trace.gpu.filter(
            pl.Series(is_compute), pl.col("kind").cast(pl.String).is_in(["kernel", "thunk"])
        )
        .select("program", "duration", operation=operation)
        .join(programs, on="program", how="left")
        .filter(pl.col("steady").fill_null(value=True))
        .group_by(pl.col("program_name").alias("program"), "operation")
        .agg(
            count=pl.len(),
            mean_ns=pl.col("duration").mean(),
            std_ns=pl.col("duration").std(ddof=0),
        )
        .with_columns(spread=pl.col("std_ns") / pl.when(pl.col("mean_ns") > 0).then("mean_ns"))
        .sort("mean_ns", "operation")
    )
