"""The late ranks of a job as text: a sentence for each straggler, and a line with places for each cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from thence.analysis.collectives.waits import NOT_CAUSED
from thence.model.kernel_names import clip, short_names
from thence.units import format_ns, format_share
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.analysis.ranks.job import Job
    from thence.analysis.ranks.reasons import Reasons

MEANINGS = {
    "slower_gpu": "slower GPU",
    "more_work": "more work",
    "compute": "compute",
    "copy": "memcpy",
    "transfer": "transfers of other groups",
    "unknown": "unknown",
}
"""Readable names of causes, except the causes of idle time, which are shown as ``idle: <cause>``."""

GROUPS = {
    "kind": "group",
    "size": "ranks",
    "shown": "shown",
    "collectives": "collectives",
    "exposed_wait_ns": "waits",
    "transfer_ns": "transfers",
    "members": "members",
    "description": "description",
}
"""Columns of `Job.groups` that are shown, with their headings."""
STAGES = {
    "stage": "stage",
    "rank": "rank",
    "device": "GPU",
    "step_ns": "step",
    "own_ns": "own time",
    "bubble_ns": "bubble",
    "bubble_share": "share",
}
"""Columns of `Job.stages` that are shown, with their headings."""
LINKS = {"members": "slow link: ranks", "extra_ns": "longer by (per step)", "low_ns": "at least", "since_step": "since"}
"""Columns of `Job.links` that are shown, with their headings."""


def with_device_names(rows: pl.DataFrame) -> pl.DataFrame:
    """Adds who: the rank and GPU of each row, or if it has none, why no rank is known to have caused its waits."""
    device = pl.format("rank {} GPU {}", "rank", "device")
    return rows.with_columns(who=pl.coalesce(pl.col("code").replace_strict(NOT_CAUSED, default=None), device))


def not_caused(job: Job) -> tuple[pl.DataFrame, dict[str, str]]:
    """The waits that no rank is known to have caused, and the headings of the columns."""
    rows = job.not_caused.select(
        why=pl.col("code").replace_strict(NOT_CAUSED, return_dtype=pl.String),
        per_step_ns=pl.col("wait_ns") / max(len(job.counted), 1),
        share="share",
    )
    headings = {"why": "waits that no rank caused", "per_step_ns": job.per, "share": f"of {job.unit}"}
    return rows, headings


def straggler_lines(job: Job) -> Iterator[tuple[dict[str, Any], str]]:
    """The row of each straggler, with a sentence about it.

    If there is no straggler, the row of the device that caused the most waiting.
    """
    for why in job.reasons:
        row = job.ranks.filter(pl.col("rank") == why.rank, pl.col("device") == why.device).row(0, named=True)
        yield row, _sentence(job, row, why)


def _sentence(job: Job, row: dict[str, Any], why: Reasons) -> str:
    share = format_share(row["late_share"], 1)
    who = f"rank {row['rank']} GPU {row['device']}"
    if not row["straggler"]:
        text = f"the longest waits were for {who}: {format_ns(row['mean_ns'])} {job.per} ({share} of {job.unit})"
    else:
        text = (
            f"{who} makes others wait {format_ns(row['mean_ns'])} per step ({share} of a step) since "
            f"{printable(row['since_step'])}; at least {format_ns(row['low_ns'])} more than random variation explains"
        )
    if why.median_rank is not None:
        text += f". Compared with rank {why.median_rank} GPU {why.median_device}:"
    return text


def reason_rows(why: Reasons) -> pl.DataFrame:
    """One row per cause: cause, per_step_ns, share, where (places with the largest part, the most precise first)."""
    rows = why.rows.with_columns(per_step_ns=pl.col("total_ns") / max(why.steps, 1))
    causes = rows.filter(pl.col("by") == "cause")
    lines = []
    columns = ("cause", "per_step_ns", "share", "detail")
    for cause, per_step, share, detail in causes.select(columns).iter_rows():
        places = rows.filter(pl.col("cause") == cause, pl.col("by") != "cause")
        if (places["by"] == "line").any():  # a line makes the name of its call redundant
            places = places.filter(pl.col("by") != "call")
        where = [_place(by, name) for by, name in places.select("by", "name").iter_rows()]
        text = "; ".join(text for text in (detail, *where) if text)
        lines.append((cause_name(cause), per_step, share, text))
    schema = {"cause": pl.String, "per_step_ns": pl.Float64, "share": pl.Float64, "where": pl.String}
    return pl.DataFrame(lines, schema=schema, orient="row")


def cause_name(cause: str) -> str:
    """The readable name of a cause."""
    return MEANINGS.get(cause, f"idle: {cause}")


def _place(by: str, name: str) -> str:
    if by == "kernel":
        name = clip(short_names([name]).get(name, name), 60)
    return printable(f"{by} {name}")
