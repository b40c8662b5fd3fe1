"""Finds which ranks made the others wait in each step, and what they spent more time on than the median rank.

In a collective in which others waited, the late ranks are those that arrived after the median rank, the one that
arrived in the middle of all. Of two ranks that are late by the same amount, only one arrives last, but the others wait
for both. If not all ranks wait for each other (as in a broadcast), only the rank that the others waited for can be
late. Each late rank is compared with the median rank:

    wait        the longest time in which another device waited for it and computed nothing, counted from the arrival of
                the median rank. Who arrived before the median rank was early: that part of its wait is no rank's fault
    stretch     the time before the late arrival that is compared. It begins when both ranks were at the same point:
                at the end of the last earlier collective of the group that held up the late device and most others
                (nothing computed on them when it ended, and almost nothing while they waited for it). (A rank that
                computes while it waits is ahead afterwards: the late rank still has to compute the same.) Without
                such a collective, it begins with the first activities of both ranks, if these began together (at
                most `TOGETHER_SHARE` of the wait apart)
    extra       compute, copies, idle time and communication of the late rank in the stretch, less those of the median
                rank in its own stretch between the same two collectives
    inherited   the extra time in which the late rank itself waited for others, in other groups
    behind      known only if the median rank's host launched the collective before the stretch began, and the late
                rank's host after that: how much longer the late host took between the launches of the two
                collectives, summed with its sign over the step. Two hosts that take equally long are not behind,
                although the GPU of the host that is ahead waits for the other GPU
    own         the wait that the late rank itself caused: wait less inherited; if behind is known, at most behind plus
                the other extra time

The own wait is divided in proportion to the extra compute, copies, idle time and transfers, so that the parts add up
to it. Waits in sends and receives are treated separately, because the schedule of the pipeline causes part of them
(`thence.analysis.ranks.pipelines`).

The wait that a rank caused in a step: for each device that waited for it, the sum of its own waits over the step; the
largest of these sums counts. The own waits of collectives in which another rank arrived later are added; the total is
at most the longest exposed wait of a device in that step.

If the trace lacks a participant of a collective, and that participant may have arrived last
(`thence.analysis.collectives.waits`), no rank is late in it, and all of its exposed time counts as time in which its
devices may have waited, so it is inherited where it delays a later collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.collectives.instances import attached
from thence.analysis.collectives.kinds import JOINT, MESSAGES
from thence.model.thresholds import TOGETHER_SHARE

if TYPE_CHECKING:
    from thence.analysis.ranks.joined import Joined

PARTS = ("compute", "copy", "idle", "transfer")
"""What a late rank can have spent its extra time on."""
_PLACE = ("rank", "device")


@dataclass(frozen=True)
class Lateness:
    """Waits and their causes.

    Attributes:
        late: one row per collective and late device: instance, group, rank and device, key (of the step), last
            (whether it arrived last), recorded (start of its kernel on its own clock), wait_ns (longest exposed wait
            for it), own_ns, host_bound_ns (neither own nor inherited, because the late host was not behind), the parts
            of own_ns: compute_ns, copy_ns, idle_ns, transfer_ns and unknown_ns (all of own_ns if the stretch is unknown
            or has no extra time); median_rank and median_device (null if the stretch is unknown).
        caused: rank, device, key, caused_ns: the wait that each device caused in each step, if not 0.
        ahead: key, wait_ns: the wait of each step that no rank caused, because the hosts of the waiting ranks had
            launched ahead (host_bound_ns), of the device that waited longest for this reason.
        early: key, wait_ns: the wait of each step before the median rank arrived, of the device that has most of it.
        missing: key, wait_ns: the exposed time in each step of collectives in which a rank that the trace lacks may
            have arrived last, of the device that has most of it.
        messages: like caused, but for sends and receives, with whole waits instead of own ones.
        waited: rank, device, key, wait_ns: exposed waits of each device in each step; where a participant is missing,
            until the last arrival that the trace shows; unknown_ns: the rest of the exposed time of such collectives,
            which is wait or transfer.
    """

    late: pl.DataFrame
    caused: pl.DataFrame
    ahead: pl.DataFrame
    early: pl.DataFrame
    missing: pl.DataFrame
    messages: pl.DataFrame
    waited: pl.DataFrame


def step_keys(steps: pl.DataFrame) -> pl.DataFrame:
    """The steps of a summary with a key that is the same on all ranks.

    Returns:
        The same rows with key: the name of the step. If several steps of one device have that name, as all steps of
        a recording do, the number of the step on its device is appended; without a name, the key is the number.
    """
    number = pl.col("step").cast(pl.String)
    shared = steps.filter(pl.struct(*_PLACE, "name").is_duplicated())["name"].drop_nulls().unique()
    name = pl.when(pl.col("name").is_in(shared.implode())).then(pl.concat_str("name", number, separator=" "))
    return steps.with_columns(key=pl.coalesce(name, "name", number))


def lateness(joined: Joined, steps: pl.DataFrame) -> Lateness:
    """Finds the waits in all collectives, and their causes.

    Args:
        joined: the collectives of the job.
        steps: as `step_keys` returns them.
    """
    on = (*_PLACE, "step")
    rows = attached(joined.rows, steps.select(*on, "key"), *on)
    # Select the columns first: a filter copies every column, and this one keeps nearly all rows.
    waits = rows.select(
        *("instance", "collective", "late_rank", "late_device", *_PLACE, "key", "exposed_wait_ns")
    ).filter(pl.col("exposed_wait_ns") > 0, pl.col("late_rank").is_not_null())
    is_message = pl.col("collective").is_in(MESSAGES)
    messages, others = (waits.filter(which).drop("collective") for which in (is_message, ~is_message))
    late = _blamed(rows, others, joined.begins)
    waited = _waited(rows)
    shares = late.filter("last").select(
        "instance", longest="wait_ns",
        **{part: (pl.col(f"{part}_ns") / pl.col("wait_ns")).fill_nan(0) for part in ("own", "host_bound")},
    )  # fmt: skip
    waits = attached(others, shares, "instance")
    since_median = pl.min_horizontal("exposed_wait_ns", pl.col("longest").fill_null(0))
    nobody = {"late_rank": pl.lit(0, pl.Int32), "late_device": pl.lit(0, pl.Int32)}
    ahead, early = (
        _caused(waits.with_columns(**nobody, ns=ns.fill_null(0))).select("key", wait_ns="caused_ns")
        for ns in (since_median * pl.col("host_bound"), pl.col("exposed_wait_ns") - since_median)
    )
    return Lateness(
        late,
        _with_earlier_arrivals(
            _caused(waits.with_columns(ns=(since_median * pl.col("own")).fill_null(0))), late, waited
        ),
        ahead,
        early,
        _missing(rows),
        _caused(messages.with_columns(ns=pl.col("exposed_wait_ns").cast(pl.Float64))),
        waited,
    )


def _explained() -> pl.Expr:
    """Whether it is known for whom the devices waited in a collective: no missing rank may have arrived last."""
    return pl.col("complete") | pl.col("late_rank").is_not_null()


def _waited(rows: pl.DataFrame) -> pl.DataFrame:
    """`Lateness.waited`."""
    wait = pl.col("exposed_wait_ns").fill_null(0)
    rest = pl.when(~pl.col("complete")).then(pl.col("exposed_ns") - wait).otherwise(0)
    return (
        rows.select(*_PLACE, "key", wait_ns=wait, unknown_ns=rest)
        .filter(pl.col("key").is_not_null())
        .group_by(*_PLACE, "key")
        .agg(pl.col("wait_ns", "unknown_ns").sum())
        .sort(*_PLACE, "key")
    )


def _missing(rows: pl.DataFrame) -> pl.DataFrame:
    """`Lateness.missing`."""
    return (
        rows.filter(~_explained(), pl.col("key").is_not_null())
        .group_by(*_PLACE, "key")
        .agg(pl.col("exposed_ns").sum())
        .group_by("key")
        .agg(wait_ns=pl.col("exposed_ns").max())
        .sort("key")
    )


def _caused(waits: pl.DataFrame) -> pl.DataFrame:
    """For each late device and step, the sum of the waits (ns) of the device that waited longest for it."""
    late = {"rank": "late_rank", "device": "late_device"}
    return (
        # Group by codes instead of strings: there may be millions of rows.
        waits.filter(pl.col("key").is_not_null())
        .with_columns(pl.col("key").cast(pl.Categorical()))
        .group_by("late_rank", "late_device", *_PLACE, "key")
        .agg(pl.col("ns").sum())
        .group_by("late_rank", "late_device", "key")
        .agg(caused_ns=pl.col("ns").max().round().cast(pl.Int64))
        .select(**late, key=pl.col("key").cast(pl.String), caused_ns="caused_ns")
        .filter(pl.col("caused_ns") > 0)
        .sort(*_PLACE, "key")
    )


def _with_earlier_arrivals(caused: pl.DataFrame, late: pl.DataFrame, waited: pl.DataFrame) -> pl.DataFrame:
    """Adds to ``caused`` the own waits of collectives in which a late device did not arrive last."""
    earlier = late.filter(~pl.col("last"), pl.col("key").is_not_null())
    longest = waited.group_by("key").agg(longest=pl.col("wait_ns").max())
    return (
        pl.concat([caused, earlier.select(*_PLACE, "key", caused_ns=pl.col("own_ns").round().cast(pl.Int64))])
        .group_by(*_PLACE, "key")
        .agg(pl.col("caused_ns").sum())
        .join(longest, on="key")
        .select(*_PLACE, "key", caused_ns=pl.min_horizontal("caused_ns", "longest"))
        .filter(pl.col("caused_ns") > 0)
        .sort(*_PLACE, "key")
    )


def _blamed(rows: pl.DataFrame, waits: pl.DataFrame, begins: pl.DataFrame) -> pl.DataFrame:
    """`Lateness.late`."""
    # Where a missing rank may have arrived last, all exposed time may be a wait for it.
    wait = pl.when(_explained()).then("exposed_wait_ns").otherwise("exposed_ns").fill_null(0)
    running = rows.with_columns(joint_end_ns=wait.cum_sum().over(*_PLACE, "group")).with_columns(
        joint_start_ns=pl.col("joint_end_ns") - wait,
        # Equal at the start and at the end, because the wait of the collective itself counts as joint.
        waited_start_ns=wait.cum_sum().over(_PLACE) - pl.col("joint_end_ns"),
        waited_end_ns=wait.cum_sum().over(_PLACE) - pl.col("joint_end_ns"),
    )
    longest = waits.group_by("instance", maintain_order=True).agg(longest_ns=pl.col("exposed_wait_ns").max())
    middle = _middle(running, longest)
    late = _late(running, longest, middle)
    begun = _last_together(running, late)
    # All cumulated times of both ranks, at the start of the stretch and at the arrival.
    both = (
        late.join(begun, on=["instance", *_PLACE], how="left", maintain_order="left")
        .join(middle, on="instance", how="left", maintain_order="left")
        .join(
            running.select(
                pl.col("instance").alias("before"), median_rank="rank", median_device="device",
                **{f"middle_{name}_begun": f"{name}_end_ns" for name in _CUMULATED},
                middle_begun="end", middle_launch_begun="launch",
            ),
            on=["before", "median_rank", "median_device"], how="left", maintain_order="left",
        )
    )  # fmt: skip
    both = _from_the_first_activity(both, begins)
    return _divided(both.with_columns(_extra(name) for name in _CUMULATED).with_columns(_span()))


def _late(running: pl.DataFrame, longest: pl.DataFrame, middle: pl.DataFrame) -> pl.DataFrame:
    """The rows of the late devices, with last (whether it arrived last) and wait_ns (the longest wait for it)."""
    # Select the columns first: all ranks of a large job are in every collective.
    found = (
        running.select("instance", "collective", "start", last="awaited", row=pl.int_range(pl.len(), dtype=pl.UInt32))
        .join(longest, on="instance", maintain_order="left")
        .join(middle.select("instance", "middle_start"), on="instance", maintain_order="left")
        .with_columns(last_start=pl.when("last").then("start").max().over("instance"))
        .filter(pl.col("last") | pl.col("collective").is_in(JOINT))
        .with_columns(
            wait_ns=pl.min_horizontal(
                pl.col("longest_ns") - (pl.col("last_start") - pl.col("start")),
                pl.col("start") - pl.col("middle_start"),
            )
        )
        .with_columns(pl.col("wait_ns").clip(lower_bound=0))
        .filter(pl.col("last") | (pl.col("wait_ns") > 0))
    )
    return running[found["row"]].with_columns(found["last", "wait_ns"])


def _from_the_first_activity(both: pl.DataFrame, begins: pl.DataFrame) -> pl.DataFrame:
    """Lets stretches without an earlier collective begin with the first activities, if these began together."""
    middle = begins.select(median_rank="rank", median_device="device", middle_first="begun")
    placed = both.join(begins.rename({"begun": "first"}), on=list(_PLACE), how="left", maintain_order="left").join(
        middle, on=["median_rank", "median_device"], how="left", maintain_order="left"
    )
    apart = (pl.col("first") - pl.col("middle_first")).abs()
    used = pl.col("before").is_null() & (apart <= TOGETHER_SHARE * pl.col("wait_ns"))
    zero = pl.when(used).then(0)
    return placed.with_columns(
        begun=pl.when(used).then("first").otherwise("begun"),
        middle_begun=pl.when(used).then("middle_first").otherwise("middle_begun"),
        **{
            column: zero.otherwise(column)
            for name in _CUMULATED
            for column in (f"{name}_begun", f"middle_{name}_begun")
        },
    )


_CUMULATED = ("compute", "copy", "idle", "waited", "joint")
"""Cumulated times of a device; waited: exposed waits in other groups, joint: in the group of the collective."""


def _last_together(running: pl.DataFrame, late: pl.DataFrame) -> pl.DataFrame:
    """The collective at whose end each late arrival's stretch begins.

    Returns:
        instance, rank, device, before (instance of that collective), begun, launch_begun, and cumulated times.
    """
    ahead = pl.col("wait_ns") - pl.col("exposed_wait_ns")
    together = pl.col("gated") & (ahead <= TOGETHER_SHARE * pl.col("wait_ns")).fill_null(value=True)
    ended = (
        running.select(
            *_PLACE, "group", "end", "gated", before="instance", begun="end", launch_begun="launch",
            together=together, **{f"{name}_begun": f"{name}_end_ns" for name in _CUMULATED},
        )
        .filter("gated", pl.col("together").mean().over("before") > 0.5)
        .drop("gated", "together")
        .sort("end")
    )  # fmt: skip
    arrivals = late.select("instance", *_PLACE, "group", "start").sort("start")
    return arrivals.join_asof(
        ended, left_on="start", right_on="end", by=[*_PLACE, "group"], strategy="backward", check_sortedness=False
    ).drop("start", "group", "end", strict=False)


def _middle(running: pl.DataFrame, waited: pl.DataFrame) -> pl.DataFrame:
    """The median rank of each collective in ``waited``: instance, median_rank, median_device, and its times."""
    place = pl.int_range(pl.len()).over("instance")
    chosen = (
        running.select("instance", "start", *_PLACE, row=pl.int_range(pl.len(), dtype=pl.UInt32))
        .filter(pl.col("instance").is_in(waited["instance"].implode()))
        .sort("instance", "start", *_PLACE)
        .filter(place == (pl.len().over("instance") - 1) // 2)
    )
    return running.select(
        pl.col("instance", "rank", "device", "start", "launch", *(f"{name}_start_ns" for name in _CUMULATED)).gather(
            chosen["row"]
        )
    ).rename(
        {"rank": "median_rank", "device": "median_device", "start": "middle_start", "launch": "middle_launch"}
        | {f"{name}_start_ns": f"middle_{name}" for name in _CUMULATED}
    )


def _extra(name: str) -> pl.Expr:
    """How much more of a cumulated time the late rank has in its stretch than the median rank."""
    ours = pl.col(f"{name}_start_ns") - pl.col(f"{name}_begun")
    others = pl.col(f"middle_{name}") - pl.col(f"middle_{name}_begun")
    return (ours - others).alias(f"extra_{name}")


def _span() -> pl.Expr:
    """How much longer the stretch of the late rank is than that of the median rank."""
    ours = pl.col("start") - pl.col("begun")
    return (ours - (pl.col("middle_start") - pl.col("middle_begun"))).alias("extra")


def _behind() -> pl.Expr:
    """How much longer the late host took between the two launches; null unless only the median host was ahead."""
    ahead = pl.col("middle_launch") < pl.col("middle_begun")
    awaited = pl.col("launch") > pl.col("begun")
    ours = pl.col("launch") - pl.col("launch_begun")
    others = pl.col("middle_launch") - pl.col("middle_launch_begun")
    return pl.when(ahead & awaited).then(ours - others)


def _divided(both: pl.DataFrame) -> pl.DataFrame:
    """`Lateness.late`: the own part of each wait, divided as the module's docstring describes."""
    known = pl.col("extra").is_not_null()
    inherited = pl.when(known).then(pl.col("extra_waited").clip(0, pl.col("wait_ns"))).otherwise(0)
    talked = pl.col("extra") - pl.sum_horizontal(f"extra_{name}" for name in _CUMULATED)
    parts = both.with_columns(own_ns=pl.col("wait_ns") - inherited, extra_transfer=talked)
    positive = {name: pl.col(f"extra_{name}").clip(lower_bound=0) for name in PARTS}
    parts = parts.with_columns(behind=_behind(), **{f"more_{name}": part for name, part in positive.items()})
    # Of equally fast hosts, each is the later one now and then: over a step, these differences cancel out.
    slower = pl.col("behind").clip(lower_bound=0)
    of_step = [*_PLACE, "key"]
    net = pl.col("behind").sum().over(of_step) / slower.sum().over(of_step)
    limited = pl.min_horizontal("more_idle", slower * net.fill_nan(0).clip(0, 1))
    bounded = pl.col("behind").is_not_null()
    parts = parts.with_columns(more_idle=pl.when(bounded).then(limited).otherwise("more_idle"))
    total = pl.sum_horizontal(f"more_{name}" for name in PARTS)
    host_bound = pl.when(bounded).then((pl.col("own_ns") - total).clip(lower_bound=0)).otherwise(0)
    parts = parts.with_columns(host_bound_ns=host_bound).with_columns(pl.col("own_ns") - host_bound)
    scale = pl.when(total > 0).then(pl.col("own_ns") / total)
    shares = parts.with_columns(
        (pl.col(f"more_{name}") * scale).fill_null(0).round().cast(pl.Int64).alias(f"{name}_ns") for name in PARTS
    )
    unknown = pl.when(scale.is_null()).then("own_ns").otherwise(0)
    names = [f"{name}_ns" for name in PARTS]
    return shares.select(
        "instance", "group", *_PLACE, "key", "last", "recorded", "wait_ns", "own_ns", "host_bound_ns", *names,
        unknown_ns=unknown,
        median_rank=pl.when(known).then("median_rank"), median_device=pl.when(known).then("median_device"),
    )  # fmt: skip
