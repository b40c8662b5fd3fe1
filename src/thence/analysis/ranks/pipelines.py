"""Pipelines: the bubble of each stage, from matched sends and receives.

The bubble of a stage is the time in which its device does nothing but wait in sends and receives. The schedule causes
part of it: the pipeline fills and drains. So a stage does not count as late whenever others wait for it, but only if
its own time (compute, copies and idle time: all that is not exposed communication) is longer than that of the median
stage. At most this difference counts as the wait that it caused.

A GPU that waits for its host is idle, and that counts as its stage's own time. In the median stage, whose host may
take as long, the GPU waits for other stages instead. A step cannot be shorter than the time that the host of the median
stage works for it, so extra idle time of a late stage counts only up to the difference between the length of the step
and that time. The rest is due to no late stage.
"""

from __future__ import annotations

import polars as pl

_PLACE = ("rank", "device")
_OWN = ("compute", "copy", "idle")


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
    times = rows.join(
        steps.select(*_PLACE, "key", "host_ns", *(f"{name}_ns" for name in _OWN)), on=[*_PLACE, "key"]
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
        last=pl.lit(value=True), wait_ns="caused_ns", transfer_ns=pl.lit(0, pl.Int64), unknown_ns="unknown_ns",
    )  # fmt: skip


def _divided(late: pl.DataFrame) -> pl.DataFrame:
    """Replaces own_ns by the wait that the stage itself caused; adds host_bound_ns and the parts of own_ns."""
    more = {f"more_{name}": (pl.col(f"{name}_ns") - pl.col(f"middle_{name}")).clip(lower_bound=0) for name in _OWN}
    slower = (pl.col("step_ns") - pl.col("middle_host")).clip(lower_bound=0)
    total = pl.sum_horizontal(f"more_{name}" for name in _OWN)
    waited = pl.min_horizontal("caused_ns", pl.col("own_ns") - pl.col("middle_ns"))
    # min_horizontal ignores nulls: if the host's time is unknown, all extra idle time counts.
    parts = late.with_columns(**more).with_columns(waited=waited, more_idle=pl.min_horizontal("more_idle", slower))
    bounded = pl.when(pl.col("middle_host").is_not_null()).then(total)
    parts = parts.with_columns(own_ns=pl.min_horizontal("waited", bounded))
    scale = pl.when(total > 0).then(pl.col("own_ns") / total)
    return parts.with_columns(
        *((pl.col(f"more_{name}") * scale).fill_null(0).round().cast(pl.Int64).alias(f"{name}_ns") for name in _OWN),
        host_bound_ns=pl.col("waited") - pl.col("own_ns"),
        unknown_ns=pl.when(scale.is_null()).then("own_ns").otherwise(0),
    )  # fmt: skip
