"""Separates waits from transfers: who waited for whom in a collective, and how long the transfer took.

    arrival of a participant   start of its kernel
    wait of a participant      from its own arrival to the arrival of the last participant whose data it needs
    wait of an instance        the longest wait of its participants
    transfer of an instance    for kinds that end together, from the last arrival to the end of that same kernel, so
                               that both times are from one clock; else the longest time from when a participant and
                               all that it needs had arrived to the participant's end

Which participants a participant needs depends on the kind (`thence.model.collective_kinds`): in an all-reduce
and similar kinds, all; in a broadcast or scatter, the root; in a reduce or gather, the root needs all others,
which wait for nobody; in a send or receive, the peer. Except for kinds that end together, a kernel that ended before
the other arrived did not wait for it: a small message stays in a buffer until then. Kineto does not record the root:
without a source rank, the root is the first to end in a broadcast or scatter, and the last to end in a reduce or
gather.

The kernel of a batch needs the other ends of all its messages (`thence.analysis.collectives.instances`). Only its own
wait counts in its instance; the waits of its peers count in their instances.

The transfer is known only if the trace shows every participant; for a kernel of a batch, all peers must also have
begun before it ended.

If the trace lacks a participant, a wait is counted to the arrival of the last participant that the trace shows, so it
is a lower bound, and that participant need not be the last to arrive. It is taken as the last only if the collective
ended so soon after its arrival that whichever participant is missing arrived at almost the same time or earlier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.collectives.instances import NO_PEERS
from thence.model.collective_kinds import FROM_ROOT, JOINT, MESSAGES, PEERS, TO_ROOT, bandwidths
from thence.model.thresholds import TOGETHER_SHARE

if TYPE_CHECKING:
    from thence.analysis.collectives.clock_sync import Alignment

_KEY = ("instance", "rank", "device")
NOT_CAUSED = {
    "launched_ahead": "no rank: hosts had launched ahead",
    "early": "no rank: before the median rank",
    "not_all_shown": "unknown: participants are missing",
}
"""Why no rank is known to have caused a wait, in a few words.

launched_ahead: the hosts of the ranks that waited had launched ahead. They need as long for the step as the host of the
rank that arrived last, so the steps are host-bound. early: the wait of a device before the median rank arrived.
not_all_shown: communication in collectives in which a participant that the trace does not show, or that could not be
matched, may have arrived last; at most this much of it is waiting."""


def participants(rows: pl.DataFrame, alignment: Alignment | None, peers: pl.DataFrame = NO_PEERS) -> pl.DataFrame:
    """One row per instance and device, with its wait.

    Args:
        rows: described kernels: instance, rank, device, collective, bytes, group_size, source_rank, start,
            duration_ns, bus_gbps, unmatched.
        alignment: corrections of the ranks' clocks; None for none.
        peers: as `thence.analysis.collectives.instances.Instances` holds them.

    Returns:
        instance, rank, device, start, end (ns, corrected), duration_ns, bus_gbps, collective, bytes,
        group_size, known (whether it is matched with another device), wait_ns (null where not known),
        awaited (whether it is the participant that the others waited for; false for all participants if a
        participant that the trace lacks may have arrived later), complete (whether the trace shows all participants),
        moving_ns (from when all that it needs had arrived to its end; null where it needs no other), own (false for
        the peers of a batch's kernel, whose waits and transfers are counted in their own instances).
    """
    shift = alignment.shift() if alignment else pl.lit(0)
    start = pl.col("start")
    first = ("collective", "bytes", "group_size", "source_rank")
    others = peers.select(*_KEY, "start", "all_shown", duration_ns=pl.col("end") - start, own=pl.lit(value=False)).join(
        rows.select("instance", *first), on="instance"
    )
    moved = (
        pl.concat([rows.with_columns(own=pl.lit(value=True)), others], how="diagonal_relaxed")
        .with_columns(start=start - shift)
        .sort("instance", "start", "rank", "device")
    )
    places = moved.group_by(*_KEY, maintain_order=True).agg(
        start.min(),
        end=(start + pl.col("duration_ns")).max(),
        duration_ns=pl.col("duration_ns").sum(),
        bus_gbps=pl.col("bus_gbps").max(),
        matched=pl.col("unmatched").is_null().all(),
        own=pl.col("own").all(),
        all_shown=pl.col("all_shown").all(),
        **{name: pl.col(name).first() for name in first},
    )
    size = pl.when(pl.col("collective").is_in(PEERS)).then(2).otherwise("group_size")
    batch = ~pl.col("own").all().over("instance")
    places = places.with_columns(
        known=(pl.len() > 1).over("instance") & pl.col("matched").all().over("instance"),
        complete=pl.when(batch)
        .then(pl.col("all_shown").all().over("instance"))
        .otherwise(
            (pl.len().over("instance") >= size).fill_null(value=True) & pl.col("matched").all().over("instance")
        ),
        number=pl.int_range(pl.len()),
    )
    helpers = ("matched", "all_shown", "source_rank", "root", "number")
    return _last_if_certain(_waits(_roots(places))).drop(helpers)


def _last_if_certain(places: pl.DataFrame) -> pl.DataFrame:
    """Clears ``awaited`` in instances in which a participant that the trace lacks may have arrived later."""
    if places["complete"].all():
        return places
    awaited = pl.col("awaited")
    ends = _over_instance(
        places, own_end=pl.when("own").then("end"), arrival=pl.when(awaited).then("start"), wait=pl.col("wait_ns")
    )
    rest = pl.col("most_own_end") - pl.col("most_arrival")
    certain = pl.col("complete") | (rest <= TOGETHER_SHARE * pl.col("most_wait")).fill_null(value=False)
    return ends.with_columns(awaited & certain).select(places.columns)


def _roots(places: pl.DataFrame) -> pl.DataFrame:
    """Adds which participant is the root, as the module docstring defines it."""
    kind, number, end = pl.col("collective"), pl.col("number"), pl.col("end")
    named = (pl.col("rank") == pl.col("source_rank")).fill_null(value=False)
    ends = _over_instance(places, named=named, first=end, last=end)
    first = pl.when(end == pl.col("least_first")).then(number)
    last = pl.when(end == pl.col("most_last")).then(number)
    ends = _over_instance(ends, first_number=first, last_number=last)
    root = (
        pl.when(~kind.is_in((*FROM_ROOT, *TO_ROOT)))
        .then(pl.lit(value=False))
        .when("most_named")
        .then("named")
        .when(kind.is_in(FROM_ROOT))
        .then(number == pl.col("least_first_number"))
        .otherwise(number == pl.col("most_last_number"))
    )
    return ends.select(*places.columns, root=root)


def _over_instance(places: pl.DataFrame, **columns: pl.Expr) -> pl.DataFrame:
    """Adds columns with the least and the largest value of each within the instance: ``least_<name>``, ``most_<name>``.

    The least of booleans is whether all are true, the largest whether any is. The columns are added first because
    window functions of anything but a plain column are slow for hundreds of thousands of instances.
    """
    return places.with_columns(**columns).with_columns(
        window
        for name in columns
        for window in (
            pl.col(name).min().over("instance").alias(f"least_{name}"),
            pl.col(name).max().over("instance").alias(f"most_{name}"),
        )
    )


def _waits(places: pl.DataFrame) -> pl.DataFrame:
    """Adds the wait of each participant, and whether it is the one that the others waited for."""
    kind, number, start = pl.col("collective"), pl.col("number"), pl.col("start")
    # A batch that ended before its peer began did not need it.
    ends = _over_instance(places, own_end=pl.when("own").then("end"))
    before_end = pl.col("own") | (start <= pl.col("most_own_end"))
    needed = (
        pl.when(kind.is_in(FROM_ROOT))
        .then("root")
        .when(kind.is_in(TO_ROOT))
        .then(~pl.col("root"))
        .otherwise(before_end)
    )
    # The last participant to arrive among those that others need; numbers are in order of arrival in each instance.
    arrivals = _over_instance(
        ends,
        last=pl.when(needed).then(number),
        arrival=pl.when(needed).then(start),
        covered=before_end & pl.col("all_shown"),
    )
    last, arrival = number == pl.col("most_last"), pl.col("most_arrival")
    waits = pl.when(kind.is_in(FROM_ROOT)).then(~pl.col("root")).when(kind.is_in(TO_ROOT)).then("root").otherwise(~last)
    takes = pl.when(kind.is_in((*FROM_ROOT, *TO_ROOT))).then(waits).otherwise(pl.col("own") & pl.col("least_covered"))
    buffered = ~kind.is_in(JOINT) & (pl.col("end") < arrival)
    wait = pl.when(waits & pl.col("own") & ~buffered).then((arrival - start).clip(lower_bound=0))
    return arrivals.select(
        *places.columns,
        awaited=pl.col("known") & last,
        wait_ns=pl.when("known").then(wait.otherwise(pl.lit(0))),
        moving_ns=pl.when(takes).then(pl.col("end") - pl.max_horizontal(arrival, "start")),
    )


def instance_times(places: pl.DataFrame) -> pl.DataFrame:
    """One row per instance, from `participants`.

    Returns:
        instance, collective, bytes, group_size, devices (in the trace), bus_gbps (of the fastest device's whole
        kernel), fastest_ns (the shortest duration), wait_ns (the longest wait), device_wait_ns (sum of the waits of all
        devices), wait_relative (wait_ns / fastest_ns), out_of_step_ns (last end - first start - fastest_ns: the "wait"
        of nsys-jax's notebook), last_rank, last_device (the device that was waited for), transfer_ns,
        transfer_algorithm_gbps, transfer_bus_gbps. Waits are null if only one device shows the instance, transfers if
        the trace does not show all participants.
    """
    start, end = pl.col("start"), pl.col("end")
    whole = pl.col("known").all() & pl.col("complete").all()
    joint = pl.col("collective").is_in(JOINT).first()
    own = end.sort_by(start).last() - start.max()
    moving = pl.when(joint).then(own).otherwise(pl.col("moving_ns").max())
    fastest = pl.col("duration_ns").filter("own").min()
    times = places.group_by("instance", maintain_order=True).agg(
        *(pl.col(name).first() for name in ("collective", "bytes", "group_size")),
        devices=pl.len(),
        bus_gbps=pl.col("bus_gbps").max(),
        fastest_ns=fastest,
        wait_ns=pl.col("wait_ns").max(),
        device_wait_ns=pl.when(pl.col("known").all()).then(pl.col("wait_ns").sum()),
        out_of_step_ns=end.max() - start.min() - fastest,
        last_rank=pl.col("rank").filter("awaited").first(),
        last_device=pl.col("device").filter("awaited").first(),
        transfer_ns=pl.when(whole & (moving > 0)).then(moving),
    )
    divisor = pl.when(pl.col("fastest_ns") > 0).then("fastest_ns")
    algorithm, bus = bandwidths("transfer_ns")
    return times.with_columns(
        wait_relative=pl.col("wait_ns") / divisor, transfer_algorithm_gbps=algorithm, transfer_bus_gbps=bus
    )


def last_arrivals(places: pl.DataFrame, launched_ahead: pl.DataFrame | None = None) -> pl.DataFrame:
    """How often each device arrived last, and how long the others waited then; from `participants`.

    Except for sends and receives, a wait begins with the arrival of the median device of the collective: the time that
    a device waited before that is in the row of the code early. The table does not tell who is late:
    `thence.analysis.ranks` decides it.

    Args:
        places: as `participants` returns them.
        launched_ahead: instance and share: the part of its wait, from 0 to 1, for which the hosts of the waiting ranks
            had launched ahead.

    Returns:
        rank, device, code (null for devices), instances (number of matched instances that it took part in), last
        (number of instances in which others waited for it), waited_ns (the longest wait of each of these instances,
        summed), waited_device_ns (the waits of all other devices in them, summed), late_ns_mean and late_ns_max (its
        start minus the first start); the largest waited_ns first. Then the waits that no device is known to have
        caused, without rank and device, as far as there are any: rows with the codes of `NOT_CAUSED`, whose last is
        the number of instances with such waits. Those of the code not_all_shown are at most as long as stated.
    """
    late = pl.col("start") - pl.col("start").min().over("instance")
    known = places.filter("known").with_columns(late=late)
    devices = known.group_by("rank", "device").agg(
        instances=pl.col("instance").n_unique(), late_ns_mean=pl.col("late").mean(), late_ns_max=pl.col("late").max()
    )
    parts = _by_cause(_instance_waits(known), launched_ahead)
    sums = parts.group_by("rank", "device", "code").agg(
        last=pl.len(), waited_ns=pl.col("longest").sum(), waited_device_ns=pl.col("every").sum()
    )
    of_devices = devices.join(sums.filter(pl.col("code").is_null()), on=["rank", "device"], how="left")
    others = sums.filter(pl.col("code").is_not_null())
    figures = pl.col("last", "waited_ns", "waited_device_ns")
    order = (pl.col("code").is_not_null(), "waited_ns", "rank", "device")
    return (
        pl.concat([of_devices, others], how="diagonal_relaxed")
        .with_columns(figures.fill_null(0).round().cast(pl.Int64))
        .sort(*order, descending=[False, True, False, False])
        .select(
            *("rank", "device", "code", "instances", "last", "waited_ns", "waited_device_ns"),
            *("late_ns_mean", "late_ns_max"),
        )
    )


def _instance_waits(known: pl.DataFrame) -> pl.DataFrame:
    """One row per matched instance in which a device waited, with its waits.

    Returns:
        instance, rank and device (that arrived last; null if a missing participant may have), longest and every (the
        longest wait, and the sum of all waits, ns; of whole kernels if rank is null, because all of their time may be
        waiting), longest_since and every_since (the same of the waits since the median device arrived; since their
        begin for sends and receives; null if rank is null).
    """
    start = pl.col("start")
    arrival = pl.when("awaited").then("start").max().over("instance")
    median = start.sort().get((pl.len() - 1) // 2).over("instance")
    since = pl.min_horizontal("wait_ns", (arrival - median).clip(lower_bound=0))
    since = pl.when(pl.col("collective").is_in(MESSAGES)).then("wait_ns").otherwise(since)
    told = arrival.is_not_null()
    return (
        known.with_columns(
            since=pl.when(told).then(since),
            waited=pl.when(told | pl.col("complete")).then("wait_ns").otherwise("duration_ns"),
        )
        .group_by("instance")
        .agg(
            **{name: pl.col(name).filter("awaited").first() for name in ("rank", "device")},
            longest=pl.col("waited").max(),
            every=pl.col("waited").sum(),
            longest_since=pl.col("since").max(),
            every_since=pl.when(pl.col("since").count() > 0).then(pl.col("since").sum()),
        )
        .filter(pl.col("longest") > 0)
    )


def _by_cause(waits: pl.DataFrame, launched_ahead: pl.DataFrame | None) -> pl.DataFrame:
    """The waits of each instance by who caused them: rank, device, code, longest and every (ns).

    Args:
        waits: as `_instance_waits` returns them.
        launched_ahead: as `last_arrivals` takes it.
    """
    share: pl.Expr = pl.lit(0.0)
    if launched_ahead is not None:
        waits = waits.join(launched_ahead, on="instance", how="left")
        share = pl.col("share").fill_null(0.0)
    has_cause = pl.col("rank").is_not_null()
    amounts: dict[str | None, list[pl.Expr]] = {code: [] for code in (None, "launched_ahead", "early", "not_all_shown")}
    for name in ("longest", "every"):
        whole, since = pl.col(name), pl.col(f"{name}_since").fill_null(0)
        amounts[None].append(since * (1 - share))
        amounts["launched_ahead"].append(since * share)
        amounts["early"].append(pl.when(has_cause).then(whole - since).otherwise(0))
        amounts["not_all_shown"].append(pl.when(has_cause).then(0).otherwise(whole))
    nobody = pl.lit(None, pl.Int32)
    parts = [
        waits.select(
            rank="rank" if code is None else nobody,
            device="device" if code is None else nobody,
            code=pl.lit(code, pl.String),
            longest=longest.cast(pl.Float64),
            every=every.cast(pl.Float64),
        )
        for code, (longest, every) in amounts.items()
    ]
    # A device arrived last even if it caused nothing; of the other rows, those of less than 1 ns say nothing.
    return pl.concat([parts[0].filter(has_cause), *(part.filter(pl.col("longest") >= 1) for part in parts[1:])])
