"""Pipelines: the bubble of each stage, from matched sends and receives.

The bubble of a stage is the time in which its device does nothing but wait in sends and receives. Part of it is the
schedule's: the first and the last stage fill and drain. So a stage is not late because others wait for it, but
where its own time (compute, copies and idle time, all that is no exposed communication) is longer than that of
the median stage; the others then wait for it by as much, at most.

A GPU that waits for its host is idle, and that counts as its stage's own time; in the median stage, whose host may
take as long, the GPU waits for other stages instead. A step cannot be shorter than the host of the median stage works
for it, so idle time of a late stage counts only by as much as the step is longer. The rest is due to no late stage.
"""

from __future__ import annotations

import polars as pl

__all__ = ["stage_causes", "stages"]

_PLACE = ("rank", "device")
_OWN = ("compute", "copy", "idle")


def stages(messages: pl.DataFrame, steps: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """One row per device that exchanges messages with others, and step.

    Args:
        messages: rank, device, key, wait_ns: exposed waits in sends and receives.
        steps: of `thence.analysis.ranks.lateness.step_keys`, those that count.
        waits: rank, device: all devices with sends or receives, with stage (place in the pipeline).

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
    """What a stage makes the others wait beyond the schedule, in the columns of `Lateness.late`.

    It is divided by what makes the stage's own time longer than that of the median stage; host_bound_ns is the time
    that both hosts take.

    Args:
        rows: of `stages`.
        caused: rank, device, key, caused_ns: waits of others in sends and receives, by whom they waited for.
        steps: of `thence.analysis.ranks.lateness.step_keys`, those that count.
    """
    times = rows.join(
        steps.select(*_PLACE, "key", "host_ns", *(f"{name}_ns" for name in _OWN)),
        on=[*_PLACE, "key"],
    ).sort("key", "own_ns", *_PLACE)
    at = pl.int_range(pl.len()).over("key")
    middle = times.filter(at == (pl.len().over("key") - 1) // 2).select(
        "key", median_rank="rank", median_device="device", middle_ns="own_ns", middle_host="host_ns",
        **{f"middle_{name}": f"{name}_ns" for name in _OWN},
    )  # fmt: skip
    late = times.join(caused, on=[*_PLACE, "key"]).join(middle, on="key")
    late = _divided(late.filter(pl.col("own_ns") > pl.col("middle_ns"), pl.col("caused_ns") > 0))
    return late.select(
        *_PLACE, "key", "own_ns", "host_bound_ns", "median_rank", "median_device",
        *(f"{name}_ns" for name in _OWN),
        wait_ns="caused_ns", transfer_ns=pl.lit(0, pl.Int64), unknown_ns="unknown_ns",
    )  # fmt: skip


def _divided(late: pl.DataFrame) -> pl.DataFrame:
    """With own_ns as what others waited for the stage of its own making, host_bound_ns, and own_ns in parts."""
    more = {
        f"more_{name}": (pl.col(f"{name}_ns") - pl.col(f"middle_{name}")).clip(lower_bound=0)
        for name in _OWN
    }
    slower = (pl.col("step_ns") - pl.col("middle_host")).clip(lower_bound=0)
    total = pl.sum_horizontal(f"more_{name}" for name in _OWN)
    waited = pl.min_horizontal("caused_ns", pl.col("own_ns") - pl.col("middle_ns"))
    # Nulls are ignored: where nothing is known of the host, all idle time counts.
    parts = late.with_columns(**more).with_columns(
        waited=waited, more_idle=pl.min_horizontal("more_idle", slower)
    )
    bounded = pl.when(pl.col("middle_host").is_not_null()).then(total)
    parts = parts.with_columns(own_ns=pl.min_horizontal("waited", bounded))
    scale = pl.when(total > 0).then(pl.col("own_ns") / total)
    return parts.with_columns(
        *((pl.col(f"more_{name}") * scale).fill_null(0).round().cast(pl.Int64).alias(f"{name}_ns") for name in _OWN),
        host_bound_ns=pl.col("waited") - pl.col("own_ns"),
        unknown_ns=pl.when(scale.is_null()).then("own_ns").otherwise(0),
    )  # fmt: skip
