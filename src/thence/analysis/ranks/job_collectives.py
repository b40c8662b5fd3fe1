"""The collectives of a job, from the summaries of its ranks: matched across ranks, on aligned clocks, with their waits.

The rules are those for whole traces (`thence.analysis.collectives.instances`, `thence.analysis.collectives.clock_sync`,
`thence.analysis.collectives.waits`): the collectives of the summaries are converted to the tables of a trace that holds
nothing else, and these rules are applied to it.

**Clocks.** Offset and drift of the ranks' clocks are estimated from the collectives that the ranks share.

    offset    as `thence.analysis.collectives.clock_sync` estimates it: the median difference between the ends of
              collectives on a rank and the mean ends of these collectives over all ranks
    drift     slope of a straight line, fitted by least squares to the residuals after the offset, in ns per second;
              again to what is left until it settles, where not all ranks share all collectives

A drift is applied only if, over the time of the rank's shared collectives, it moves the rank by more than 1 us and by
more than `CLOCK_DRIFT_RATIO` times the scatter of the residuals (their 90th percentile) about the line, and if the line
halves that scatter. Otherwise the slope may be due to noise or to an outlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.collectives.clock_sync import Alignment, aligned, quantiles
from thence.analysis.collectives.instances import NO_PEERS, Instances, attached, collective_instances, unmatched_reasons
from thence.analysis.collectives.waits import participants
from thence.analysis.ranks.nodes import with_links
from thence.analysis.ranks.summary import COLLECTIVES as SUMMARISED
from thence.analysis.ranks.summary import SUMMARY
from thence.model.attributed import Attributed
from thence.model.columns import values_or
from thence.model.tables import COLLECTIVES, GPU, GRAPH_PLACES, HOST, PROGRAMS
from thence.model.thresholds import CLOCK_DRIFT_RATIO, CLOCK_SCATTER_QUANTILE, MIN_CLOCK_SAMPLES, TIMESTAMP_NS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from thence.model.arrays import Float64, Int64


_PASSES = 200
"""Upper bound on the times that lines are fitted."""
_SETTLED_NS = 0.5
"""Lines have settled when none moves its rank by more within the time of its collectives."""


@dataclass(frozen=True)
class Clocks:
    """The clocks of the ranks.

    Attributes:
        rows: rank, offset_ns (to be subtracted from the rank's times; null if it shares no collective with any
            other rank), drift_ns_per_s (null if it shares too few), drift_applied, instances (number of shared
            collectives), cluster (ranks of one cluster are aligned with each other), residual_median_ns,
            residual_p90_ns (of the ends of its collectives after the correction; null if it shares none).
        alignment: as `align_clocks` returns it.
        middle: time (ns) at which the correction of drifts is 0.
    """

    rows: pl.DataFrame
    alignment: Alignment
    middle: float

    @property
    def unaligned(self) -> list[int]:
        """Ranks that share no collective with any other rank, so that their waits are unknown."""
        return self.rows.filter(pl.col("offset_ns").is_null())["rank"].to_list()

    @property
    def statements(self) -> list[str]:
        """The corrections that were made, and ranks for which none was possible, one sentence each."""
        if self.rows.height < 2:
            return []
        sentences = [self.alignment.statement]
        drifting = self.rows.filter("drift_applied")
        if not drifting.is_empty():
            most = float(np.abs(drifting["drift_ns_per_s"].to_numpy()).max())
            sentences.append(
                f"clock drift of {drifting.height:,} rank{'s' if drifting.height > 1 else ''} corrected: up to "
                f"{most:,.0f} ns per second"
            )
        alone = self.unaligned
        if alone and self.alignment.matched:
            shown = ", ".join(map(str, alone[:8])) + (", ..." if len(alone) > 8 else "")
            sentences.append(
                f"rank{'s' if len(alone) > 1 else ''} {shown}: no collective is shared with another rank, so waits "
                "there are unknown"
            )
        return sentences

    def shift(self, rank: npt.NDArray[np.int32], time: Int64) -> Int64:
        """The ns to subtract from each time, given its rank."""
        known = self.rows["rank"].to_numpy()
        row = np.searchsorted(known, rank)
        offset = values_or(self.rows["offset_ns"], 0)[row]
        drifts = self.rows.select(
            pl.when("drift_applied").then("drift_ns_per_s").otherwise(0.0).fill_null(0.0)
        ).to_series()
        moved = drifts.to_numpy()[row] * (time - self.middle) / 1e9
        result: Int64 = offset + np.rint(moved).astype(np.int64)
        return result

    def to_json(self) -> dict[str, Any]:
        """The clocks as JSON values."""
        return {"statements": self.statements, "ranks": self.rows.to_dicts()}


def clocks_of(instances: Instances, ranks: list[int]) -> Clocks:
    """Offsets and drifts of the ranks.

    Args:
        instances: the collectives of all ranks; their times may have any origin.
        ranks: all ranks of the job, ascending; ranks without collectives are not aligned.
    """
    alignment = aligned(instances, instances.rows["rank"].unique().sort().to_list())
    ends = instances.rows.group_by("instance").agg(end=pl.col("end").mean())
    skews = alignment.skews.join(ends, on="instance").sort("rank", "end", "instance")
    time, skew = skews["end"].to_numpy(), skews["skew_ns"].to_numpy().astype(np.float64)
    middle = float(np.mean(time)) if len(time) else 0.0
    present, place, count = np.unique(skews["rank"].to_numpy(), return_inverse=True, return_counts=True)
    instance = skews["instance"].rank("dense").to_numpy().astype(np.int64) - 1
    slope, intercept, span, fitted = _joint_lines(place, instance, (time - middle) / 1e9, skew, len(present))
    scatter = quantiles(place, np.abs(fitted), len(present), CLOCK_SCATTER_QUANTILE)
    moved = np.abs(slope) * span
    before = quantiles(place, np.abs(skew), len(present), CLOCK_SCATTER_QUANTILE)
    applied = (count >= MIN_CLOCK_SAMPLES) & (moved > np.maximum(CLOCK_DRIFT_RATIO * scatter, TIMESTAMP_NS))
    applied &= scatter < before / 2
    left = np.where(applied[place], fitted, skew)
    # A line through the residuals also changes the offset: by its intercept.
    extra = np.where(applied, np.rint(intercept), 0).astype(np.int64)
    of_ranks = pl.DataFrame(
        {
            "rank": pl.Series(present, dtype=pl.Int32),
            "extra": extra,
            "drift_ns_per_s": np.where(count >= MIN_CLOCK_SAMPLES, slope, np.nan),
            "drift_applied": applied,
            "residual_median_ns": quantiles(place, np.abs(left), len(present), 0.5),
            "residual_p90_ns": quantiles(place, np.abs(left), len(present), CLOCK_SCATTER_QUANTILE),
        }
    ).with_columns(pl.col("drift_ns_per_s").fill_nan(None))
    every = pl.DataFrame({"rank": pl.Series(ranks, dtype=pl.Int32)})
    rows = (
        every.join(alignment.corrections, on="rank", how="left", maintain_order="left")
        .join(of_ranks, on="rank", how="left", maintain_order="left")
        .select(
            "rank",
            (pl.col("correction_ns") + pl.col("extra").fill_null(0)).alias("offset_ns"),
            "drift_ns_per_s",
            pl.col("drift_applied").fill_null(value=False),
            pl.col("instances").fill_null(0),
            "cluster",
            "residual_median_ns",
            "residual_p90_ns",
        )
    )
    return Clocks(rows, alignment, middle)


def _joint_lines(
    rank: Int64, instance: Int64, time: Float64, skew: Float64, count: int
) -> tuple[Float64, Float64, Float64, Float64]:
    """The line of each rank that fits best if all are corrected: slope, value at time 0, span; and what is left.

    Skews are distances from the mean end of an instance, and correcting one rank moves the means of its instances.
    Where not every rank has every instance, such as in groups of a node whose ranks share a drift, lines are fitted
    again to what is left until they settle.
    """
    slope, intercept, left = np.zeros(count), np.zeros(count), skew
    many = np.maximum(np.bincount(instance), 1)
    span = np.zeros(count)
    for _ in range(_PASSES):
        more, line_time, span = _lines(rank, time, left, count)
        slope, intercept = slope + more, intercept + line_time
        left = left - line_time[rank] - more[rank] * time
        left = left - (np.bincount(instance, left) / many)[instance]
        if (np.abs(more) * span).max(initial=0.0) < _SETTLED_NS:
            break
    return slope, intercept, span, left


def _lines(rank: Int64, time: Float64, value: Float64, count: int) -> tuple[Float64, Float64, Float64]:
    """The least-squares line of each rank: slope, value at time 0, and the time from its first to its last point."""
    many = np.maximum(np.bincount(rank, minlength=count), 1)
    mean_time = np.bincount(rank, time, minlength=count) / many
    mean_value = np.bincount(rank, value, minlength=count) / many
    away = time - mean_time[rank]
    spread = np.bincount(rank, away * away, minlength=count)
    shared = np.bincount(rank, away * (value - mean_value[rank]), minlength=count)
    slope = np.divide(shared, spread, out=np.zeros(count), where=spread > 0)
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, rank, time)
    np.maximum.at(high, rank, time)
    return slope, mean_value - slope * mean_time, np.where(many > 1, high - low, 0.0)


_INSTANCE = ["instance", "rank", "device"]
_DESCRIBED = (*("collective", "bytes", "element_type", "group_size", "sequence"), *("source_rank", "destination_rank"))

_KEPT = (
    *("rank", "device", "step", "start", "duration", "bytes", "group_size", "source_rank"),
    *("job", "first_call", "launch", "exposed_ns", "exposed_start", "exposed_end"),
)
"""Columns of the summaries' collectives that are needed after the match ..."""
_TIMES = ("_start_ns", "_end_ns")
"""... in addition to columns with these suffixes."""
_NO_ROWS = pl.DataFrame(
    schema={
        "instance": pl.Int64, "rank": pl.Int32, "device": pl.Int32, "end": pl.Int64, "collective": pl.String,
        "bytes": pl.Int64, "group_size": pl.Int32, "known": pl.Boolean, "complete": pl.Boolean, "awaited": pl.Boolean,
        "wait_ns": pl.Int64, "moving_ns": pl.Int64, "late_rank": pl.Int32, "late_device": pl.Int32, "step": pl.Int32,
        "launch": pl.Int64, "exposed_ns": pl.Int64, "start": pl.Int64,
        **{name: SUMMARISED.schema[name] for name in SUMMARISED.schema if name.endswith(_TIMES)},
        "exposed_wait_ns": pl.Int64, "gated": pl.Boolean, "group": pl.Int32, "recorded": pl.Int64,
    }
)  # fmt: skip


@dataclass(frozen=True)
class JobCollectives:
    """The collectives of a job.

    Attributes:
        rows: one row per device and instance that it took part in, sorted by rank, device and start: rank, device,
            step (on its device; -1: none), instance, collective (kind), bytes, group (number of the process group,
            equal on all ranks), group_size, launch (null if unknown), start and end (ns since `origin`, on the
            common clock), recorded (start on the rank's own clock), exposed_ns, wait_ns (null if unknown; to the last
            arrival that the trace shows), exposed_wait_ns (the part of the wait in which nothing computed, estimated
            from the exposed time and its longest piece; null if unknown), awaited (whether the others waited for this
            device), late_rank and late_device (for which device they waited; null if unknown, also if a rank that the
            trace lacks may have arrived last), known (whether it is matched), complete (whether the trace shows all
            participants), moving_ns, gated (whether nothing computed when the collective ended, so that the device
            continued only then), and compute_start_ns ... idle_end_ns as in the summary.
        groups: group, name, description, members (text), ranks (list; null if they are not listed), nodes and link (as
            `thence.analysis.ranks.nodes.with_links` returns them).
        begins: rank, device, begun (start of the device's first activity, ns, on the same clock as start).
        clocks: clocks of the ranks.
        origin: time 0 of the other times: ns since 1970, or since the zero of the summaries' clocks.
        notes: what a reader of the numbers must know.
    """

    rows: pl.DataFrame
    groups: pl.DataFrame
    begins: pl.DataFrame
    clocks: Clocks
    origin: int
    notes: tuple[str, ...]


def summary_table(
    summaries: Mapping[str, pl.DataFrame | pl.LazyFrame], name: str, ranks: list[int] | None = None
) -> pl.DataFrame:
    """A table of the summaries, or only its rows of ``ranks``; other rows are not read.

    Raises:
        ValueError: a required column is null in one of the rows.
    """
    frame = summaries[name]
    if ranks is not None:
        frame = frame.filter(pl.col("rank").is_in(ranks))
    return SUMMARY[name].complete(frame if isinstance(frame, pl.DataFrame) else frame.collect())


def job_collectives(
    summaries: Mapping[str, pl.DataFrame | pl.LazyFrame], nodes: Mapping[int, int] = MappingProxyType({})
) -> JobCollectives:
    """Matches the collectives of all ranks, aligns the clocks, and finds which device waited for which.

    First calls, in which a communicator is made, are left out, and a note states their number.

    Args:
        nodes: number of the node of each rank, as `thence.analysis.ranks.nodes.nodes_of` returns it.
    """
    groups, numbers = _groups(summaries["groups"].lazy())
    devices = summary_table(summaries, "devices").select("rank", "device", begun="start")
    ranks = sorted(devices["rank"].unique())
    rows, peers, clocks, origin = _matched(summaries, groups, numbers, ranks)
    devices = devices.with_columns(pl.col("begun") - origin)
    shift = clocks.shift(devices["rank"].to_numpy(), devices["begun"].to_numpy())
    begins = devices.with_columns(pl.col("begun") - pl.Series(shift))
    rows, notes = _timed(rows, peers, clocks)
    return JobCollectives(rows, with_links(_members(groups), nodes), begins, clocks, origin, notes)


def _sorted(rows: pl.DataFrame, by: tuple[str, ...]) -> pl.DataFrame:
    """The rows sorted by numeric columns without nulls. Most summaries are sorted already, and are not gathered."""
    order = np.lexsort([rows[name].to_numpy() for name in reversed(by)])
    # Rechunk: operations on columns whose chunks differ in size would copy them each time.
    return rows.rechunk() if (np.diff(order) == 1).all() else rows[order]


def _matched(
    summaries: Mapping[str, pl.DataFrame | pl.LazyFrame], groups: pl.DataFrame, numbers: pl.DataFrame, ranks: list[int]
) -> tuple[pl.DataFrame, pl.DataFrame, Clocks, int]:
    """The collectives with instance, unmatched and kind; the peers of the instances; the clocks; and the origin.

    This is a function of its own so that the tables built for the match, which are larger than the rows, are freed
    when it returns.
    """
    rows = _sorted(summary_table(summaries, "collectives"), ("rank", "device", "start", "number"))
    if rows.is_empty():
        return rows, NO_PEERS, clocks_of(Instances(), ranks), 0
    origin = int(rows["start"].min() or 0)  # type: ignore[arg-type] # an integer
    moments = ("start", "launch", "exposed_start", "exposed_end")
    rows = rows.with_columns(pl.col(name) - origin for name in moments)
    rows = _with_groups(rows, numbers)
    parts = _with_groups(summary_table(summaries, "parts"), numbers)
    instances = collective_instances(_as_trace(rows, parts, groups))
    matched = instances.rows.select("instance", "unmatched", kind="collective")
    kept = [name for name in rows.columns if name in _KEPT or name.endswith(_TIMES)]
    rows = rows.select(kept).hstack(matched)
    return rows, instances.peers, clocks_of(instances, ranks), origin


def _groups(groups: pl.LazyFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The distinct process groups with a number (job); and rank, group and job of the groups of every rank.

    In large jobs every rank lists thousands of members, so lists are compared by hash, and each is kept once.
    """
    key = ["name", "description", "hash"]
    hashed = groups.with_columns(hash=pl.col("members").hash())
    once = hashed.unique(key).select(*key, "members").collect(engine="streaming")
    job = pl.struct("name", "description", "members").rank("dense").cast(pl.Int32) - 1
    once = once.with_columns(job=job).sort("job")
    every = hashed.select("rank", "group", *key).collect(engine="streaming")
    numbers = every.join(once.drop("members"), on=key, nulls_equal=True)
    return once.drop("hash"), numbers.select("rank", "group", "job").sort("rank", "group")


def _with_groups(rows: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    return attached(rows, groups.select("rank", "group", "job"), "rank", "group")


def _as_trace(rows: pl.DataFrame, parts: pl.DataFrame, groups: pl.DataFrame) -> Attributed:
    """A trace that holds nothing but the collectives of the summaries."""
    texts = groups.select("job", group_ranks="members")
    executions = (
        rows.filter(pl.col("execution").is_not_null())
        .select("rank", "execution", name="program")
        .unique(["rank", "execution"])
        .sort("rank", "execution")
        .with_columns(row=pl.int_range(pl.len(), dtype=pl.Int32))
    )
    numbered = attached(
        rows.with_columns(gpu=pl.int_range(pl.len(), dtype=pl.Int32)),
        executions.select("rank", "execution", "row"),
        "rank",
        "execution",
    )
    described = _in_groups(numbered, texts)
    messages = _in_groups(parts.join(numbered.select("rank", "number", "gpu"), on=["rank", "number"]), texts)
    gpu = GPU.frame(
        {
            **{name: numbered[name] for name in ("rank", "device", "start", "duration", "hlo")},
            "correlation": numbered["correlation"],
            "program": numbered["row"],
            "kind": pl.Series(["kernel"]).new_from_index(0, rows.height),
            "name": numbered["collective"],
            "stream": pl.Series([0]).new_from_index(0, rows.height),
        }
    )
    launched = numbered.select("rank", "launch").filter(pl.col("launch").is_not_null())
    launch = pl.when(pl.col("launch").is_not_null()).then(pl.col("launch").is_not_null().cum_sum() - 1)
    keys = ["gpu", *_DESCRIBED, "group_name", "group_ranks"]
    return Attributed(
        gpu=gpu,
        host=HOST.frame({"rank": launched["rank"], "start": launched["launch"]}),
        collectives=COLLECTIVES.frame({key: described[key] for key in keys}),
        programs=PROGRAMS.frame({"rank": executions["rank"], "name": executions["name"]}),
        graph_places=GRAPH_PLACES.frame({"gpu": numbered.select("gpu", "replayed").filter("replayed")["gpu"]}),
        places=numbered.select(launch=launch.cast(pl.UInt32)),
        collective_parts=COLLECTIVES.frame(
            {key: messages[key] for key in keys} | {"host": messages["order"].cast(pl.Int32)}
        ),
    )


def _in_groups(rows: pl.DataFrame, texts: pl.DataFrame) -> pl.DataFrame:
    """Adds group_name (the group's number), and group_ranks where the row names a peer by its place in the group.

    Other rows do not need the ranks, which may be thousands.
    """
    peers = pl.col("source_rank").is_not_null() | pl.col("destination_rank").is_not_null()
    named = rows.with_columns(group_name=pl.col("job").cast(pl.String))
    if not rows.select(peers.any()).item():
        return named.with_columns(group_ranks=pl.lit(None, pl.String))
    return attached(named, texts, "job").with_columns(group_ranks=pl.when(peers).then("group_ranks"))


def _timed(rows: pl.DataFrame, peers: pl.DataFrame, clocks: Clocks) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """`JobCollectives.rows`, with waits on the common clock, and notes."""
    if rows.is_empty():
        return _NO_ROWS, ()
    shift = clocks.shift(rows["rank"].to_numpy(), rows["start"].to_numpy())
    common = rows.with_columns(start=pl.col("start") - pl.Series(shift), shift=pl.Series(shift))
    if not peers.is_empty():
        moved = clocks.shift(peers["rank"].to_numpy(), peers["start"].to_numpy())
        peers = peers.with_columns(pl.col(name) - pl.Series(moved) for name in ("start", "end"))
    # All ranks of a communicator make it together, so the whole instance is left out.
    made = common.filter("first_call")["instance"].unique()
    left = common["instance"].is_in(made.implode())
    counted = common.filter(~left)
    notes = list(unmatched_reasons(counted))
    if left.any():
        notes.append(f"{int(left.sum()):,} kernels of first calls, which create communicators, are left out")
    every = _exposed(_waits(counted, peers), counted)
    return every.sort("rank", "device", "start", "instance"), tuple(notes)


def _waits(counted: pl.DataFrame, peers: pl.DataFrame) -> pl.DataFrame:
    """The rows of `participants`, with late_rank and late_device: the device that the others waited for."""
    places = participants(
        counted.select(
            *("instance", "rank", "device", "bytes", "group_size", "source_rank", "start", "unmatched"),
            collective="kind", duration_ns="duration", bus_gbps=pl.lit(0.0),
        ),
        None,
        peers,
    )  # fmt: skip
    late = places.filter("awaited").unique("instance", keep="first", maintain_order=True)
    return places.filter("own").join(
        late.select("instance", late_rank="rank", late_device="device"),
        on="instance", how="left", maintain_order="left",
    )  # fmt: skip


def _exposed(places: pl.DataFrame, counted: pl.DataFrame) -> pl.DataFrame:
    """Adds the columns of the summaries' kernels, and how much of each wait is exposed."""
    columns = (
        *("step", "job", "launch", "exposed_ns", "exposed_start", "exposed_end", "start", "duration", "shift"),
        *(name for name in SUMMARISED.schema if name.endswith(_TIMES)),
    )
    kernels = counted
    if places.height < counted.height:  # several kernels of one device are one collective
        kernels = counted.unique(_INSTANCE, keep="first", maintain_order=True)
    every = places.drop("start", "duration_ns", "bus_gbps", "own").join(
        kernels.select(*_INSTANCE, *columns), on=_INSTANCE, maintain_order="left"
    )
    begin, finish = (pl.col(f"exposed_{name}") - pl.col("shift") for name in ("start", "end"))
    arrived = pl.col("start") + pl.col("wait_ns")
    piece = pl.min_horizontal(finish, arrived) - pl.max_horizontal(begin, "start")
    # The exposed time after the last arrival is at most the rest of the kernel; what exceeds it was exposed wait.
    rest = pl.col("duration") - pl.col("wait_ns")
    alone = pl.min_horizontal("wait_ns", pl.max_horizontal(piece, pl.col("exposed_ns") - rest, 0))
    return every.with_columns(
        exposed_wait_ns=pl.when(pl.col("wait_ns").is_not_null()).then(alone),
        launch=pl.col("launch") - pl.col("shift"),
        gated=(finish == pl.col("start") + pl.col("duration")) & (pl.col("exposed_ns") > 0),
        group="job",
        recorded=pl.col("start") + pl.col("shift"),
    ).drop("exposed_start", "exposed_end", "shift", "duration", "job")


def _members(groups: pl.DataFrame) -> pl.DataFrame:
    """The distinct groups of the job, with their ranks where the text lists all of them."""
    texts = pl.col("members").str.strip_chars("[]() ")
    listed = pl.col("members").str.contains(r"^\s*\[\s*\d+(\s*,\s*\d+)*\s*\]\s*$")
    ranks = pl.when(listed).then(texts.str.replace_all(" ", "").str.split(",")).cast(pl.List(pl.Int32))
    return groups.select("name", "description", "members", group="job", ranks=ranks)
