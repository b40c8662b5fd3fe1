"""Finds which ranks made the others wait, what they spent more time on, and which of them are late by more than noise.

**Each step.** In a collective in which others waited, the late ranks are those that arrived after the median rank, the
one that arrived in the middle of all. Of two ranks that are late by the same amount, only one arrives last, but the
others wait for both. If not all ranks wait for each other (as in a broadcast), only the rank that the others waited for
can be late. Each late rank is compared with the median rank:

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

The own wait is divided in proportion to the extra compute, copies, idle time and transfers, so that the parts add up to
it. Waits in sends and receives are treated separately, because the schedule of the pipeline causes part of them.

The wait that a rank caused in a step: for each device that waited for it, the sum of its own waits over the step; the
largest of these sums counts. The own waits of collectives in which another rank arrived later are added; the total is
at most the longest exposed wait of a device in that step. Such a rank caused no more of a wait than the rank that
arrived last caused or inherited: the rest is due to hosts that had launched ahead, and so to no rank.

If the trace lacks a participant of a collective, and that participant may have arrived last
(`thence.analysis.collectives.waits`), no rank is late in it, and all of its exposed time counts as time in which its
devices may have waited, so it is inherited where it delays a later collective.

**Pipelines.** The bubble of a stage is the time in which its device does nothing but wait in sends and receives. The
schedule causes part of it: the pipeline fills and drains. So a stage does not count as late whenever others wait for
it, but only if its own time (compute, copies and idle time: all that is not exposed communication) is longer than that
of the median stage. At most this difference counts as the wait that it caused.

A GPU that waits for its host is idle, and that counts as its stage's own time. In the median stage, whose host may take
as long, the GPU waits for other stages instead. A step cannot be shorter than the time that the host of the median
stage works for it, so extra idle time of a late stage counts only up to the difference between the length of the step
and that time. The rest is due to no late stage.

 **More than noise.** The sample of a device in a step is the wait that it caused, less the mean of the waits that the
other devices caused. Among equal ranks, of which a different one comes last by chance each time, the mean sample is 0.
Stragglers do not count among the other devices: if some are found, all devices are tested again without them, until no
more are found. A device is a straggler if

- it caused waits of more than `LATE_RANK_SHARE` of a step's time on average, and
- the lower bound of its mean sample is above 0. The bounds of all devices hold together with the probability
  `LATE_CONFIDENCE` (Bonferroni's correction for the number of devices, and of the steps since which a device may be
  late): of a hundred jobs without a late rank, a straggler is named in at most one. The bound that is shown holds with
  `SHOWN_CONFIDENCE`.

A single step that takes far longer than all others tells little about the rest, but makes the error of the mean large.
So in addition to the mean of all samples, the mean without the fifth of the samples at either end is tested (Yuen,
1974), and the bounds are corrected for both tests.

A device may become late in a later step. All steps are tried: the step that divides the waits best into two parts
(least squares) is found, and the part since that step is tested, corrected for the number of steps. The device is late
since that step if it was in time before, or if it caused less than half as much in `_MIN_BEFORE` or more earlier steps
(medians).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.collectives.instances import attached
from thence.analysis.student_t import quantile
from thence.model.collective_kinds import JOINT, MESSAGES
from thence.model.thresholds import (
    LATE_CONFIDENCE,
    LATE_RANK_SHARE,
    MIN_STEPS_FOR_LATE_RANKS,
    SHOWN_CONFIDENCE,
    TOGETHER_SHARE,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.analysis.ranks.job_collectives import JobCollectives
    from thence.model.arrays import Float64, Int64


PARTS = ("compute", "copy", "idle", "transfer")
"""What a late rank can have spent its extra time on."""
_PLACE = ("rank", "device")
_OWN_PARTS = ("compute", "copy", "idle")
"""What the own time of a stage of a pipeline is made of."""
_CUMULATED = ("compute", "copy", "idle", "waited", "joint")
"""Cumulated times of a device; waited: exposed waits in other groups, joint: in the group of the collective."""
_MIN_BEFORE = 2
"""Minimum number of steps before a device is late: one may be special, because the late host runs ahead of it."""
_TRIMMED = 5
"""The trimmed mean leaves out 1 of this many samples at either end."""


_CAUSED = pl.DataFrame(schema={"rank": pl.Int32, "device": pl.Int32, "key": pl.String, "caused_ns": pl.Int64})
_LATE = pl.DataFrame(
    schema={
        "instance": pl.Int64, "group": pl.Int32, "rank": pl.Int32, "device": pl.Int32, "key": pl.String,
        "last": pl.Boolean, "recorded": pl.Int64, "wait_ns": pl.Int64, "own_ns": pl.Float64,
        "host_bound_ns": pl.Float64, **{f"{part}_ns": pl.Int64 for part in PARTS}, "unknown_ns": pl.Float64,
        "median_rank": pl.Int32, "median_device": pl.Int32,
    }
)  # fmt: skip
_LATE_STAGES = pl.DataFrame(
    schema={
        name: pl.Int64 if name.endswith("_ns") else dtype
        for name, dtype in _LATE.schema.items()
        if name not in ("instance", "group", "recorded")
    }
)
"""No rows of `Lateness.caused`, of `Lateness.late`, and of what `stage_causes` returns."""


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
        awaited: like caused, with the whole waits for the device that arrived last, whoever caused them.
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
    awaited: pl.DataFrame
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


def lateness(collectives: JobCollectives, steps: pl.DataFrame) -> Lateness:
    """Finds the waits in all collectives, and their causes.

    Args:
        collectives: of the job.
        steps: as `step_keys` returns them.
    """
    on = (*_PLACE, "step")
    rows = attached(collectives.rows, steps.select(*on, "key"), *on)
    # Select the columns first: a filter copies every column, and this one keeps nearly all rows.
    waits = rows.select(
        *("instance", "collective", "late_rank", "late_device", *_PLACE, "key", "exposed_wait_ns")
    ).filter(pl.col("exposed_wait_ns") > 0, pl.col("late_rank").is_not_null())
    if waits.is_empty():
        of_steps = _CAUSED.select("key", wait_ns="caused_ns")
        return Lateness(
            _LATE, _CAUSED, of_steps, of_steps, _missing(rows), messages=_CAUSED, awaited=_CAUSED, waited=_waited(rows)
        )
    whole = pl.col("exposed_wait_ns").cast(pl.Float64)
    awaited = _caused(waits.with_columns(ns=whole))
    is_message = pl.col("collective").is_in(MESSAGES)
    messages, others = (waits.filter(which).drop("collective") for which in (is_message, ~is_message))
    late = _blamed(rows, others, collectives.begins)
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
        _caused(messages.with_columns(ns=whole)),
        awaited,
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
    if waits.is_empty():
        return _CAUSED
    return (
        # Group by codes instead of strings: there may be millions of rows.
        waits.filter(pl.col("key").is_not_null())
        .group_by("late_rank", "late_device", *_PLACE, pl.col("key").cast(pl.Categorical()))
        .agg(pl.col("ns").sum())
        .group_by(pl.col("key").cast(pl.String), rank="late_rank", device="late_device")
        .agg(caused_ns=pl.col("ns").max().round().cast(pl.Int64))
        .select(*_PLACE, "key", "caused_ns")
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
    late = (
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
    return running[late["row"]].with_columns(late["last", "wait_ns"])


def _from_the_first_activity(both: pl.DataFrame, begins: pl.DataFrame) -> pl.DataFrame:
    """Lets stretches without an earlier collective begin with the first activities, if these began together."""
    middle = begins.select(median_rank="rank", median_device="device", middle_first="begun")
    placed = both.join(begins.rename({"begun": "first"}), on=list(_PLACE), how="left", maintain_order="left").join(
        middle, on=["median_rank", "median_device"], how="left", maintain_order="left"
    )
    distance = (pl.col("first") - pl.col("middle_first")).abs()
    used = pl.col("before").is_null() & (distance <= TOGETHER_SHARE * pl.col("wait_ns"))
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
    parts = parts.with_columns(host_bound_ns=host_bound)
    of_last = pl.when("last").then(pl.col("wait_ns") - pl.col("host_bound_ns")).max().over("instance")
    most = pl.min_horizontal("own_ns", of_last)
    host_bound = pl.max_horizontal("host_bound_ns", pl.col("own_ns") - most)
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


def stages(messages: pl.DataFrame, steps: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """One row per device that exchanges messages with others, and step.

    Args:
        messages: rank, device, key, wait_ns: exposed waits in sends and receives.
        steps: the steps that count, as `thence.analysis.ranks.lateness.step_keys` returns them.
        waits: rank, device, stage (place in the pipeline): all devices with sends or receives.

    Returns:
        rank, device, stage, key, step_ns, bubble_ns, own_ns (step less exposed communication).
    """
    return (
        steps.join(waits, on=list(_PLACE))
        .join(messages, on=[*_PLACE, "key"], how="left")
        .select(
            *_PLACE,
            "stage",
            "key",
            step_ns="duration",
            bubble_ns=pl.col("wait_ns").fill_null(0),
            own_ns=pl.col("duration") - pl.col("exposed_ns"),
        )
        .sort("stage", *_PLACE, "key")
    )


def stage_causes(rows: pl.DataFrame, caused: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """The waits that a stage causes in addition to the schedule, with columns of `Lateness.late`.

    A wait is divided in proportion to the compute, copies and idle time by which the stage's own time is longer than
    that of the median stage; host_bound_ns is the part that the median stage's host needs as well.

    Args:
        rows: as `stages` returns them.
        caused: rank, device, key, caused_ns: waits of others in sends and receives, by the device they waited for.
        steps: the steps that count, as `thence.analysis.ranks.lateness.step_keys` returns them.
    """
    if caused.is_empty():
        return _LATE_STAGES
    times = rows.join(
        steps.select(*_PLACE, "key", "host_ns", *(f"{name}_ns" for name in _OWN_PARTS)), on=[*_PLACE, "key"]
    ).sort("key", "own_ns", *_PLACE)
    position = pl.int_range(pl.len()).over("key")
    middle = times.filter(position == (pl.len().over("key") - 1) // 2).select(
        "key", median_rank="rank", median_device="device", middle_ns="own_ns", middle_host="host_ns",
        **{f"middle_{name}": f"{name}_ns" for name in _OWN_PARTS},
    )  # fmt: skip
    late = times.join(caused, on=[*_PLACE, "key"]).join(middle, on="key")
    late = _divided_stages(late.filter(pl.col("own_ns") > pl.col("middle_ns"), pl.col("caused_ns") > 0))
    return late.select(
        *_PLACE, "key", "own_ns", "host_bound_ns", "median_rank", "median_device",
        *(f"{name}_ns" for name in _OWN_PARTS),
        last=pl.lit(value=True), wait_ns="caused_ns", transfer_ns=pl.lit(0, pl.Int64), unknown_ns="unknown_ns",
    )  # fmt: skip


def _divided_stages(late: pl.DataFrame) -> pl.DataFrame:
    """Replaces own_ns by the wait that the stage itself caused; adds host_bound_ns and the parts of own_ns."""
    more = {
        f"more_{name}": (pl.col(f"{name}_ns") - pl.col(f"middle_{name}")).clip(lower_bound=0) for name in _OWN_PARTS
    }
    slower = (pl.col("step_ns") - pl.col("middle_host")).clip(lower_bound=0)
    total = pl.sum_horizontal(f"more_{name}" for name in _OWN_PARTS)
    waited = pl.min_horizontal("caused_ns", pl.col("own_ns") - pl.col("middle_ns"))
    # min_horizontal ignores nulls: if the host's time is unknown, all extra idle time counts.
    parts = late.with_columns(**more).with_columns(waited=waited, more_idle=pl.min_horizontal("more_idle", slower))
    bounded = pl.when(pl.col("middle_host").is_not_null()).then(total)
    parts = parts.with_columns(own_ns=pl.min_horizontal("waited", bounded))
    scale = pl.when(total > 0).then(pl.col("own_ns") / total)
    return parts.with_columns(
        *(
            (pl.col(f"more_{name}") * scale).fill_null(0).round().cast(pl.Int64).alias(f"{name}_ns")
            for name in _OWN_PARTS
        ),
        host_bound_ns=pl.col("waited") - pl.col("own_ns"),
        unknown_ns=pl.when(scale.is_null()).then("own_ns").otherwise(0),
    )  # fmt: skip


def late_since(caused: Float64, step_ns: float) -> pl.DataFrame:
    """Finds which devices are stragglers.

    Args:
        caused: the wait that each device caused in each step, ns, shape (devices, steps), in order of time.
        step_ns: mean time of a step.

    Returns:
        One row per device: straggler, since (number of the first late step, 0 if it is late from the beginning;
        null if it is no straggler), mean_ns (wait caused per step, since then), low_ns (lower bound of the mean
        sample; null with fewer than `MIN_STEPS_FOR_LATE_RANKS` steps), steps (number of steps that mean_ns and low_ns
        are of).
    """
    known = np.zeros(len(caused), np.bool_)
    while True:
        tested = _late_since(caused, step_ns, known)
        late = tested["straggler"].to_numpy()
        if (late == known).all():
            return tested
        known = late


def _late_since(caused: Float64, step_ns: float, known: npt.NDArray[np.bool_]) -> pl.DataFrame:
    """`late_since`, if it is known that some devices are stragglers."""
    devices, steps = caused.shape
    counted = caused * ~known[:, None]
    others = (counted.sum(axis=0) - counted) / np.maximum((~known).sum() - ~known, 1)[:, None]
    # One device has nobody to cause anything.
    sample = caused - others if devices > 1 else caused * 0.0
    begin = _divides_best(caused)
    from_start, parts = np.zeros(devices, np.int64), _candidates(caused, begin, step_ns)
    tests, smallest = 2 * devices, LATE_RANK_SHARE * step_ns
    mean, low, sure = _bounds(sample, caused, from_start, tests)
    late = (mean > smallest) & (sure > 0)
    mean_of_part, low_of_part, sure = _bounds(sample, caused, parts, tests * max(steps, 1))
    late_of_part = (mean_of_part > smallest) & (sure > 0) & (parts > 0)
    # A device that is late over the whole run may still have been in time at first.
    later = late_of_part & (~late | _in_time(caused, parts, step_ns))
    since = np.where(later, parts, 0)
    named = late | later | known
    lows = np.where(later, low_of_part, low)
    return pl.DataFrame(
        {
            "straggler": named,
            "since": pl.Series(since).set(pl.Series(~named), None),
            "mean_ns": np.where(later, mean_of_part, mean),
            "low_ns": pl.Series(lows).fill_nan(None),
            "steps": steps - since,
        }
    )


def _divides_best(values: Float64) -> Int64:
    """For each row, the first column of the second part in the division into two parts whose means fit best."""
    devices, steps = values.shape
    if steps < MIN_STEPS_FOR_LATE_RANKS + 1:
        return np.zeros(devices, np.int64)
    sums = np.cumsum(values, axis=1)
    total = sums[:, -1:]
    before = np.arange(1, steps)
    # The larger this is, the smaller is the sum of squared residuals.
    between = np.square(sums[:, :-1]) / before + np.square(total - sums[:, :-1]) / (steps - before)
    between[:, steps - MIN_STEPS_FOR_LATE_RANKS :] = -np.inf
    result: Int64 = np.argmax(between, axis=1) + 1
    return result


def _candidates(caused: Float64, begin: Int64, step_ns: float) -> Int64:
    """The first step of the later part, if the device is late there and not in the earlier part; else 0."""
    return np.where(_in_time(caused, begin, step_ns), begin, 0)


def _in_time(caused: Float64, begin: Int64, step_ns: float) -> npt.NDArray[np.bool_]:
    """Whether a device caused more than twice as much since a step, and was in time or half as late before it."""
    after = np.arange(caused.shape[1]) >= begin[:, None]
    count = np.maximum(after.sum(axis=1), 1)
    late = (caused * after).sum(axis=1) / count
    early = (caused * ~after).sum(axis=1) / np.maximum((~after).sum(axis=1), 1)
    half = np.array(
        [
            step >= _MIN_BEFORE and 2 * np.median(row[:step]) < np.median(row[step:])
            for row, step in zip(caused, begin, strict=True)
        ],
        np.bool_,
    )
    result: npt.NDArray[np.bool_] = (begin > 0) & ((early < LATE_RANK_SHARE * step_ns) | half) & (late > 2 * early)
    return result


def _bounds(sample: Float64, caused: Float64, begin: Int64, tests: int) -> tuple[Float64, Float64, Float64]:
    """Mean wait caused since a step, and two lower bounds of the mean sample.

    The bounds hold with `SHOWN_CONFIDENCE` and with `LATE_CONFIDENCE`. The larger bound of the plain and the trimmed
    mean counts. Bounds are NaN if there are too few steps.
    """
    counted = np.arange(sample.shape[1]) >= begin[:, None]
    count = counted.sum(axis=1)
    cut = count // _TRIMMED
    # If there are too few samples to trim, both means are equal, and there is one test.
    both = 2 * tests if sample.shape[1] >= _TRIMMED else tests
    plain = _bounds_of_mean(sample, begin, np.zeros_like(count), both)
    trimmed = _bounds_of_mean(sample, begin, cut, both)
    low, sure = (np.maximum(a, b) for a, b in zip(plain, trimmed, strict=True))
    return (caused * counted).sum(axis=1) / np.maximum(count, 1), low, sure


def _bounds_of_mean(sample: Float64, begin: Int64, cut: Int64, tests: int) -> tuple[Float64, Float64]:
    """Lower bounds of each row's mean since a step, with ``cut`` values left out at either end."""
    steps = sample.shape[1]
    counted = np.arange(steps) >= begin[:, None]
    count = counted.sum(axis=1)
    ordered = np.sort(np.where(counted, sample, -np.inf), axis=1)
    first, last = (begin + cut)[:, None], (steps - 1 - cut)[:, None]
    place = np.arange(steps)
    kept = (place >= first) & (place <= last)
    left = np.maximum(kept.sum(axis=1), 1)
    mean = np.where(kept, ordered, 0).sum(axis=1) / left
    # The error of a trimmed mean is computed from the winsorized samples.
    ends = [np.take_along_axis(ordered, np.clip(end, 0, steps - 1), axis=1) for end in (first, last)]
    put = np.where(counted, np.clip(ordered, *ends), 0)
    middle = put.sum(axis=1) / np.maximum(count, 1)
    squares = np.where(counted, np.square(put - middle[:, None]), 0).sum(axis=1)
    error = np.sqrt(squares / left / np.maximum(left - 1, 1))
    enough = left >= MIN_STEPS_FOR_LATE_RANKS
    # `quantile` takes the probability of both tails together.
    low, sure = (
        np.where(enough, mean - quantile(2 * (1 - confidence) / tests, left - 1.0) * error, np.nan)
        for confidence in (SHOWN_CONFIDENCE, LATE_CONFIDENCE)
    )
    return low, sure
