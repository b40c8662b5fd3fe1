"""Collectives: message size, bandwidth, exposed and hidden time, and waits for other ranks.

The bandwidth of a whole kernel includes the wait for other ranks, the bandwidth of the transfer does not: see
`thence.analysis.collectives.waits`; the formulas are in `thence.model.collective_kinds`. Exposed and hidden time
are those of `thence.analysis.collectives.exposure`. nsys-jax sums the overlaps instead of taking their union, so its
hidden time can exceed the duration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.analysis.collectives.exposure import Exposure, exposure
from thence.analysis.collectives.first_calls import NONE, FirstCalls, first_calls
from thence.analysis.collectives.instances import Instances, collective_instances, unmatched_reasons
from thence.analysis.collectives.links import NOT_DESCRIBED, links_of, unknown_links
from thence.analysis.collectives.missing import undescribed_kernels
from thence.analysis.collectives.waits import NOT_CAUSED, instance_times, last_arrivals, participants
from thence.analysis.programs.warmup import Phases, WarmUp, phases
from thence.analysis.ranks.nodes import UNKNOWN
from thence.model.answer import Answer, Lines, TableView
from thence.model.collective_kinds import bandwidths, kind_of_kernel
from thence.model.totals import must
from thence.units import format_ns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.analysis.collectives.clock_sync import Alignment
    from thence.analysis.ranks.answer import Job
    from thence.model.attributed import Attributed


_LAST = {
    "who": "last arrivals",
    "last": "collectives",
    "instances": "of",
    "waited_ns": "others waited",
    "waited_device_ns": "summed over GPUs",
    "late_ns_mean": "mean after first",
}
_SIZES = {
    "collective": "collective",
    "bytes": "message",
    "group_size": "ranks",
    "link": "link",
    "count": "count",
    "exposed_ns": "exposed",
    "wait_ns_mean": "mean longest wait",
    "wait_ns_max": "longest",
    "transfer_bus_gbps_max": "best bus GB/s",
    "transfer_bus_gbps_median": "median",
    "transfer_bus_gbps_std": "std",
    "bus_gbps_mean": "whole kernel GB/s",
    "transfer_ns_median": "transfer",
    "hidden_ns": "hidden",
    "overlapped_ns": "overlapped",
}
_PARTS = ("exposed_ns", "hidden_ns", "overlapped_ns")
_KEYS = ("collective", "bytes", "group_size", "link", "link_unknown", "described", "kernel")


@dataclass(frozen=True)
class Collectives(Answer):
    """The collectives of a trace.

    Attributes:
        phases: which executions of programs were counted, and why.
        first: first calls of communicators, left out as warm-up.
        aligned: whether the ends of shared collectives show how far the ranks' clocks are apart; if not, waits
            between ranks are meaningful only if the ranks have the same clock.
        clocks: what is known about the ranks' clocks, one sentence; empty for one rank.
        devices: rank, device, communication_ns, exposed_ns of all communication, including what was left out as
            warm-up; equal to the times of `thence.analysis.streams`.
        left_out: count, duration_ns, exposed_ns of the kernels that were left out.
        by_size: by collective, bytes, group_size, link and link_unknown (as
            `thence.analysis.collectives.links.links_of` adds them), described, and kernel (name of kernels without a
            description, whose bytes and group_size are null): count (kernels, one per device), duration_ns,
            exposed_ns, hidden_ns, overlapped_ns (they add up to duration_ns),
            algorithm_gbps_mean/std/max and bus_gbps_mean/std/max of whole kernels; over the instances
            that at least two devices show: instances, wait_ns_mean/max/sum (of the longest wait of each instance),
            device_wait_ns_sum (all waits); and over the instances that all participants show: transfers,
            transfer_ns_mean/median/min, transfer_algorithm_gbps_ and transfer_bus_gbps_max/median/std (null
            if there are none). Standard deviations are those of the population.
        rows: one row per kernel: row (in Tables.collectives; null without a description), gpu, rank, device,
            program (name), instruction, kernel (as in by_size), collective (null if there is no description and the
            kernel's name does not contain the kind), bytes, group_size, link, link_unknown, source_rank, described,
            start, duration_ns, exposed_ns, hidden_ns, overlapped_ns, algorithm_gbps, bus_gbps, instance, unmatched
            (why it has no partner).
        instances: one row per instance, as `thence.analysis.collectives.waits.instance_times` returns them.
            An instance is one collective on all devices that took part, or one kernel of batched sends and receives.
        last_arrivals: by rank and device, as `thence.analysis.collectives.waits.last_arrivals` returns them.
        job: which ranks are late, without the reasons; None if that was not decided.
        notes: caveats that are needed to read the numbers, one sentence each.
        single_clock: whether several devices of one process, which share a clock, have device work.
    """

    phases: Phases
    first: FirstCalls
    aligned: bool
    clocks: str
    devices: pl.DataFrame
    left_out: dict[str, int]
    by_size: pl.DataFrame
    rows: pl.DataFrame
    instances: pl.DataFrame
    last_arrivals: pl.DataFrame
    job: Job | None
    notes: tuple[str, ...]
    single_clock: bool = False

    @property
    def statement(self) -> str:
        """One sentence on what was left out as warm-up, as text for the user."""
        if not self.first.kernels:
            return self.phases.statement
        return "; ".join(([self.phases.statement] if len(self.phases.phase) else []) + [self.first.statement])

    @property
    def verdict(self) -> str:
        """Which ranks are late, as `thence ranks` states it; empty if that was not decided."""
        return "" if self.job is None else f"thence ranks: {self.job.statement}"

    @property
    def _stragglers(self) -> pl.DataFrame:
        """The rows of `last_arrivals` of the devices that are late."""
        place = ["rank", "device"]
        late = self.last_arrivals.clear() if self.job is None else self.job.stragglers
        rows = late.select(place).join(self.last_arrivals, on=place, how="left", maintain_order="left")
        return rows.rename({"waited_ns": "caused_ns", "waited_device_ns": "caused_device_ns"}).drop("code")

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        whole, exposed = (int(self.devices[name].sum()) for name in ("communication_ns", "exposed_ns"))
        return (f"communication {format_ns(whole)}, {format_ns(exposed)} of it exposed (nothing computed meanwhile)",)

    def views(self) -> tuple[TableView | Lines, ...]:
        """The last arrivals, the collectives by size, and totals of each device."""
        sizes = self.by_size.with_columns(
            collective=pl.when("described")
            .then("collective")
            .otherwise(
                pl.concat_str(
                    pl.col("collective").fill_null("unknown"),
                    pl.lit(" (no description) "),
                    pl.col("kernel").str.replace(r"\(.*", "").fill_null(""),
                )
            )
        )
        empty = {name for name in _SIZES if sizes[name].null_count() == sizes.height}
        if not sizes["overlapped_ns"].sum():
            empty.add("overlapped_ns")
        if (sizes["link"] == UNKNOWN).all():
            empty.add("link")
        headings = {name: heading for name, heading in _SIZES.items() if name not in empty}
        return (*self._arrivals(), TableView(sizes, headings, bar="duration_ns"), *self._totals())

    def _arrivals(self) -> Iterator[TableView | Lines]:
        """The devices that others waited for, if there was anything to wait for."""
        last = self.last_arrivals.filter(pl.col("waited_ns") > 0)
        if last.height:
            yield TableView(with_device_names(last), _LAST)
        elif self.last_arrivals.height:
            yield Lines((("no device waited for another", ""),))

    def _totals(self) -> Iterator[Lines]:
        """Communication of each device."""
        lines = tuple(
            (f"rank {rank} GPU {device}: communication {format_ns(communication)}, {format_ns(exposed)} exposed", "")
            for rank, device, communication, exposed in self.devices.iter_rows()
        )
        if len(lines) > 1:
            yield Lines(((f"times of the collectives above are summed over {len(lines):,} GPUs", ""),))
        yield Lines(lines, limited=True, at_least=100, counted="devices", apart=len(lines) < 2)

    def remarks(self) -> Iterator[str]:
        """Which ranks are late, what was left out, caveats, and what is known of the ranks' clocks."""
        if self.verdict:
            yield self.verdict
        yield self.statement
        yield from self.notes
        if self.clocks:
            yield self.clocks
        elif self.single_clock:
            yield "waits are between devices of one process, which share a clock"

    def known(self) -> dict[str, float]:
        """See `Answer`."""
        described = int(self.by_size.filter("described")["duration_ns"].sum())
        return {"described": described / max(int(self.by_size["duration_ns"].sum()), 1)}

    def to_frame(self) -> pl.DataFrame:
        """`last_arrivals`, then `by_size`; the first column, table, is ``last_arrivals`` or ``sizes``."""
        last = self.last_arrivals.with_columns(pl.lit("last_arrivals").alias("table"))
        sizes = self.by_size.with_columns(pl.lit("sizes").alias("table"))
        return pl.concat([last, sizes], how="diagonal").select("table", pl.exclude("table"))

    def self_check(self) -> None:
        """See `Answer`."""
        rows, sizes = self.rows, self.by_size
        summed = ("duration_ns", *_PARTS)
        agree = sizes.select(pl.col("count", *summed).sum()).row(0) == (
            rows.height,
            *rows.select(pl.col(summed).sum()).row(0),
        )
        must(self.caveats.inputs, agree, "the rows by size do not add up to all collectives")
        exposed = int(rows["exposed_ns"].sum()) + self.left_out["exposed_ns"]
        agree = exposed == int(self.devices["exposed_ns"].sum())
        must(self.caveats.inputs, agree, "exposed times of collectives do not add up to those of the devices")

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values: rows of `by_size` and of `last_arrivals`, totals, and which ranks are late."""
        job = self.job
        return {
            "warm_up": self.phases.rule.value,
            "statement": self.statement,
            "aligned": self.aligned,
            "clocks": self.clocks,
            "communication_ns": int(self.devices["communication_ns"].sum()),
            "exposed_ns": int(self.devices["exposed_ns"].sum()),
            "devices": self.devices.rows(named=True),
            "left_out": self.left_out,
            "rows": self.by_size.rows(named=True),
            "last_arrivals": self.last_arrivals.rows(named=True),
            "late_ranks": None if job is None else job.statement,
            "stragglers": self._stragglers.to_dicts(),
            "missing_ranks": [] if job is None else job.shown.missing_ranks,
        }


def with_device_names(rows: pl.DataFrame) -> pl.DataFrame:
    """Adds who: the rank and GPU of each row, or if it has none, why no rank is known to have caused its waits."""
    device = pl.format("rank {} GPU {}", "rank", "device")
    return rows.with_columns(who=pl.coalesce(pl.col("code").replace_strict(NOT_CAUSED, default=None), device))


def collectives(
    trace: Attributed,
    warm_up: WarmUp | Phases = WarmUp.HEURISTIC,
    alignment: Alignment | None = None,
    instances: Instances | None = None,
    job: Job | None = None,
) -> Collectives:
    """Computes sizes, bandwidths, exposed time and waits of all communication.

    Args:
        trace: attributed. Collectives outside programs are counted, except first calls of communicators.
        warm_up: rule that decides which executions of programs count, or its result.
        alignment: corrections of the ranks' clocks, used for waits only.
        instances: as `collective_instances` returns them for this trace; None computes them.
        job: which ranks are late; it also tells which waits no rank caused. None if that is not needed.
    """
    phase = phases(trace, warm_up) if isinstance(warm_up, WarmUp) else warm_up
    matched = instances or collective_instances(trace)
    first = NONE if phase.rule is WarmUp.KEEP else first_calls(trace, matched.rows)
    exposed = exposure(trace)
    every = _rows(trace, phase, first, matched, exposed)
    rows = every.filter("counted").drop("counted")
    places = participants(rows.filter("described"), alignment, matched.peers)
    seen = instance_times(places)
    aligned = alignment is not None and alignment.matched > 0
    return Collectives(
        phases=phase,
        first=first,
        aligned=aligned,
        clocks="" if alignment is None else alignment.statement,
        devices=exposed.devices,
        left_out=_sums(every.filter(~pl.col("counted"))),
        by_size=_by_size(rows, seen),
        rows=rows,
        instances=seen,
        last_arrivals=last_arrivals(places, None if job is None else _launched_ahead(trace, rows, job)),
        job=job,
        notes=tuple(_notes(trace, every, rows, seen)),
        single_clock=alignment is None and trace.gpu.select("rank", "device").n_unique() > 1,
    )


def _rows(trace: Attributed, phase: Phases, first: FirstCalls, matched: Instances, exposed: Exposure) -> pl.DataFrame:
    """One row per kernel that communicates, with its bandwidths and whether it counts."""
    links = links_of(trace, matched.rows).select(
        *("row", "collective", "bytes", "group_size", "link", "link_unknown", "source_rank", "instance", "unmatched"),
        gpu=pl.col("gpu").cast(pl.UInt32),
        described=pl.lit(value=True),
    )
    steady = pl.DataFrame({"program": pl.int_range(trace.programs.height, dtype=pl.Int32, eager=True)}).with_columns(
        steady=phase.steady, program_name=trace.programs["name"].cast(pl.String)
    )
    kernels = trace.gpu[exposed.rows["gpu"].to_numpy()].select(
        *("rank", "device", "start", "program"),
        duration_ns="duration",
        name=pl.col("name").cast(pl.String),
        instruction=pl.col("hlo").cast(pl.String),
    )
    joined = (
        exposed.rows.hstack(kernels)
        .join(links, on="gpu", how="left", maintain_order="left")
        .join(steady, on="program", how="left", maintain_order="left")
        .with_columns(pl.col("described").fill_null(value=False), pl.col("link").fill_null(UNKNOWN))
        .with_columns(link_unknown=pl.when("described").then("link_unknown").otherwise(pl.lit(NOT_DESCRIBED)))
    )
    algorithm, bus = bandwidths("duration_ns")
    return (
        joined.with_columns(
            collective=pl.when("described").then("collective").otherwise(kind_of_kernel(pl.col("name"))),
            kernel=pl.when(~pl.col("described")).then("name"),
            counted=pl.col("steady").fill_null(value=True)
            & ~pl.col("row").is_in(first.row.implode()).fill_null(value=False),
        )
        .with_columns(algorithm_gbps=algorithm, bus_gbps=bus)
        .select(
            *("row", "gpu", "rank", "device"),
            pl.col("program_name").alias("program"),
            *("instruction", "kernel", "collective", "bytes", "group_size", "link", "link_unknown", "source_rank"),
            *("described", "start", "duration_ns", "exposed_ns", "hidden_ns", "overlapped_ns"),
            *("algorithm_gbps", "bus_gbps", "instance", "unmatched", "counted"),
        )
    )


def _launched_ahead(trace: Attributed, rows: pl.DataFrame, job: Job) -> pl.DataFrame:
    """Instance and share: the part of its wait for which hosts had launched ahead, as `Job.arrivals` states it."""
    place = ["rank", "device", "start"]
    kernels = rows.filter("described").select("instance", *place)
    on_clock = kernels.with_columns(pl.col("start") + (trace.meta.epoch_ns or 0))
    arrivals = on_clock.join(job.arrivals.cast({"start": pl.Int64}), on=place)
    return arrivals.select("instance", share="launched_ahead").unique("instance")


def _sums(rows: pl.DataFrame) -> dict[str, int]:
    columns = ("duration_ns", "exposed_ns")
    return {"count": rows.height, **{name: int(rows[name].sum()) for name in columns}}


def _by_size(rows: pl.DataFrame, seen: pl.DataFrame) -> pl.DataFrame:
    statistics = [
        getattr(pl.col(f"{which}_gbps"), what)(**options).alias(f"{which}_gbps_{what}")
        for which in ("algorithm", "bus")
        for what, options in (("mean", {}), ("std", {"ddof": 0}), ("max", {}))
    ]
    sums = pl.col("duration_ns", "exposed_ns", "hidden_ns", "overlapped_ns").sum()
    sizes = rows.group_by(_KEYS).agg(pl.len().alias("count"), sums, *statistics)
    wait, moving = pl.col("wait_ns"), pl.col("transfer_ns")
    transfers = [
        getattr(pl.col(f"transfer_{which}_gbps"), what)(**options).alias(f"transfer_{which}_gbps_{what}")
        for which in ("algorithm", "bus")
        for what, options in (("max", {}), ("median", {}), ("std", {"ddof": 0}))
    ]
    # Sender and receiver have separate rows by size, and share their instances.
    shared = rows.filter("described").select(*_KEYS, "instance").unique()
    waits = (
        shared.join(seen.drop("collective", "bytes", "group_size"), on="instance")
        .group_by(_KEYS)
        .agg(
            wait.count().alias("instances"),
            *(getattr(wait, what)().alias(f"wait_ns_{what}") for what in ("mean", "max")),
            pl.when(wait.count() > 0).then(wait.sum()).alias("wait_ns_sum"),
            pl.when(wait.count() > 0).then(pl.col("device_wait_ns").sum()).alias("device_wait_ns_sum"),
            moving.count().alias("transfers"),
            *(getattr(moving, what)().alias(f"transfer_ns_{what}") for what in ("mean", "median", "min")),
            *transfers,
        )
    )
    joined = sizes.join(waits, on=_KEYS, how="left", nulls_equal=True)
    return joined.sort("described", *(name for name in _KEYS if name != "described"), descending=[True] + [False] * 6)


def _notes(trace: Attributed, every: pl.DataFrame, rows: pl.DataFrame, seen: pl.DataFrame) -> list[str]:
    """The caveats that are needed to read the numbers."""
    notes: list[str] = []
    if not every["described"].all():
        notes.append(undescribed_kernels(trace, every))
    notes += unmatched_reasons(rows)
    notes += unknown_links(rows)
    described = rows.filter("described")
    if not described.is_empty() and not seen["transfer_ns"].count():
        notes.append(
            "transfers are unknown: no collective has all its participants in this trace"
            if seen["wait_ns"].count()
            else "waits and transfers are unknown: no collective is in the trace for more than one rank or device"
        )
    elif partial := int((seen["wait_ns"].is_not_null() & seen["transfer_ns"].is_null()).sum()):
        notes.append(
            f"the transfers of {partial:,} of {seen.height:,} collectives are unknown: not all of their participants "
            "are in the trace, or one began after another had ended"
        )
    left = every.height - rows.height
    if left:
        time = format_ns(int(every.filter(~pl.col("counted"))["exposed_ns"].sum()))
        kernels = "1 kernel" if left == 1 else f"{left:,} kernels"
        notes.append(f"left out as warm-up in total: {kernels}, {time} of exposed time")
    return notes


_STEPS = (1, 2, 5)
_MIN_BIN_NS = 1_000
_DECADES = 8  # up to 1000 s
_EDGES = tuple(_MIN_BIN_NS * 10**decade * step for decade in range(_DECADES + 1) for step in _STEPS)


def wait_histogram(instances: pl.DataFrame) -> pl.DataFrame:
    """Counts instances by collective and wait.

    Args:
        instances: columns collective and wait_ns of `thence.analysis.collectives.answer.Collectives`.

    Returns:
        columns collective, from_ns, to_ns (a bin holds waits of at least from_ns and below to_ns; the first
        bin begins at 0, the last has no end: null) and count; ordered by bin and collective. All collectives have
        the same bins: empty bins between others have a count of 0, empty bins at the ends are left out.
    """
    begins = pl.Series([0, *_EDGES], dtype=pl.Int64)
    bins = pl.DataFrame({"from_ns": begins, "to_ns": begins.shift(-1)}).with_row_index("bin")
    known = instances.filter(pl.col("wait_ns").is_not_null())
    number = begins.search_sorted(known["wait_ns"], side="right").cast(pl.UInt32) - 1
    counted = known.select("collective", bin=number).group_by("collective", "bin").agg(count=pl.len().cast(pl.Int64))
    held = bins.filter(pl.col("bin").is_between(counted["bin"].min(), counted["bin"].max()))
    return (
        counted.select("collective")
        .unique()
        .join(held, how="cross")
        .join(counted, on=["collective", "bin"], how="left", nulls_equal=True)
        .sort("bin", "collective")
        .select("collective", "from_ns", "to_ns", pl.col("count").fill_null(0))
    )
