"""Why a rank is late: its extra time by cause, and each cause by line, module, label, kernel or call.

Causes of the extra time, in addition to those of idle time (`thence.analysis.idle.host_causes`):

    slower_gpu   most kernels take longer than the same kernels of the same shapes on the median rank
    more_work    kernels ran more often than on the median rank, with other shapes, or only on the late rank
    compute      some kernels take longer on the late rank, most do not
    copy         memcpys and memsets, while nothing computed
    transfer     collectives of other groups moved data for longer
    unknown      the stretch is unknown (as for the first collective of a group) or has no extra time, or extra idle
                 time has no known cause

The time of compute, copy, idle and transfer is taken from the stretches before the late arrivals
(`thence.analysis.ranks.lateness`). It is divided further by comparing the kernels, places and idle time of the late
rank with those of the median rank in the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.ranks.job_collectives import summary_table
from thence.analysis.ranks.lateness import PARTS
from thence.model.thresholds import LISTED_CAUSE_SHARE, NAMED_PLACE_SHARE, SLOWER_GPU_RATIO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.analysis.ranks.lateness import Lateness

    Summaries = Mapping[str, pl.DataFrame | pl.LazyFrame]

REASON = {
    "cause": pl.String(),
    "by": pl.String(),
    "name": pl.String(),
    "total_ns": pl.Int64(),
    "share": pl.Float64(),
    "detail": pl.String(),
}
"""Columns of `Reasons.rows`."""

_CODE = ("source", "module", "label")
_BY = (*_CODE, "hlo", "op", "phase")
_IDLE_BY = (*_CODE, "op", "call", "phase")
_KEY = ("kind", "name", "shape")


@dataclass(frozen=True)
class Reasons:
    """Why a device is late.

    Attributes:
        rank, device: the late device.
        median_rank, median_device: the device that it is compared with; None if it is compared with none.
        steps: number of the compared steps.
        rows: columns `REASON`: for each cause one row by "cause" with its whole time (ns, over the steps) and its
            share of the lateness, then, for each kind of place, the place that has most of this time.
    """

    rank: int
    device: int
    median_rank: int | None
    median_device: int | None
    steps: int
    rows: pl.DataFrame


def reasons_of(
    summaries: Summaries,
    waits: Lateness,
    steps: pl.DataFrame,
    place: tuple[int, int],
    keys: list[str],
    links: pl.DataFrame,
) -> Reasons:
    """Why a device was late in some steps.

    Args:
        summaries: summaries of all ranks.
        waits: of the job.
        steps: as `thence.analysis.ranks.lateness.step_keys` returns them.
        place: rank and device.
        keys: keys of the steps to explain.
        links: as `thence.analysis.ranks.process_groups.slow_links` returns them.
    """
    rank, device = place
    late = waits.late.filter(pl.col("rank") == rank, pl.col("device") == device, pl.col("key").is_in(keys))
    amounts = {name: int(late[f"{name}_ns"].sum()) for name in (*PARTS, "unknown")}
    compared = (
        late.drop_nulls("median_rank")
        .group_by("median_rank", "median_device")
        .agg(pl.col("own_ns").sum())
        .sort("own_ns", "median_rank", "median_device", descending=[True, False, False])
    )
    if compared.is_empty():
        frame = _frame(_unexplained(late), sum(amounts.values()))
        return Reasons(rank, device, None, None, len(keys), frame)
    other = (int(compared["median_rank"][0]), int(compared["median_device"][0]))
    pair = _Pair(summaries, steps, place, other, keys)
    rows = [*_computed(pair, amounts["compute"]), *_copied(pair, amounts["copy"]), *_idled(pair, amounts["idle"])]
    if amounts["transfer"]:
        rows.append(_row("transfer", "cause", None, amounts["transfer"]))
    rows += _unexplained(late)
    slow = links.filter(pl.col("ranks").list.contains(rank))["members"].head(1).to_list()
    rows += [_row("transfer", "group", members, amounts["transfer"]) for members in slow]
    return Reasons(rank, device, *other, len(keys), _frame(rows, sum(amounts.values())))


def _unexplained(late: pl.DataFrame) -> list[tuple[str, str, str | None, int, None, str | None]]:
    """Extra time without a cause, and the reason why there is none."""
    total = int(late["unknown_ns"].sum())
    if not total:
        return []
    unmeasured = pl.col("median_rank").is_null()
    without = int(late.filter(unmeasured)["unknown_ns"].sum())
    reasons = (
        (without, "the first collective of its group in the trace: no earlier one to measure both ranks from"),
        (total - without, "nothing took longer on this rank than on the median rank"),
    )
    detail = "; ".join(reason for amount, reason in reasons if amount)
    return [_row("unknown", "cause", None, total, detail)]


def _row(
    cause: str, by: str, name: str | None, total: float, detail: str | None = None
) -> tuple[str, str, str | None, int, None, str | None]:
    return (cause, by, name, round(total), None, detail)


def _frame(rows: list[tuple[str, str, str | None, int, None, str | None]], total: int) -> pl.DataFrame:
    frame = pl.DataFrame(rows, schema=REASON, orient="row").with_columns(share=pl.col("total_ns") / max(total, 1))
    # Idle time without a cause and unknown stretches are merged into the one cause "unknown".
    frame = frame.group_by("cause", "by", "name", maintain_order=True).agg(
        pl.col("total_ns", "share").sum(), pl.col("detail").drop_nulls().first()
    )
    of_cause = frame.filter(pl.col("by") == "cause").select("cause", whole="total_ns", large="share")
    return (
        frame.with_row_index("at")
        .join(of_cause, on="cause")
        .filter(pl.col("large") >= LISTED_CAUSE_SHARE)
        .sort("whole", "at", descending=[True, False])
        .select(list(REASON))
    )


@dataclass(frozen=True)
class _Pair:
    """The late device and the device that it is compared with."""

    summaries: Summaries
    steps: pl.DataFrame
    late: tuple[int, int]
    other: tuple[int, int]
    keys: list[str]

    def table(self, name: str, by: list[str]) -> pl.DataFrame:
        """Sums of a table over the steps of both devices: by, late_ns and other_ns, late_count and other_count.

        If the devices have different numbers of these steps, the other's sums are scaled to the late device's number.
        """
        rows = summary_table(self.summaries, name, sorted({self.late[0], self.other[0]}))
        keyed = self.steps.filter(pl.col("key").is_in(self.keys)).select("rank", "device", "step")
        sides = []
        counts = []
        for side, (rank, device) in (("late", self.late), ("other", self.other)):
            here = (pl.col("rank") == rank) & (pl.col("device") == device)
            steps_of_side = keyed.filter(here)
            counts.append(max(steps_of_side.height, 1))
            sides.append(
                rows.filter(here)
                .join(steps_of_side, on=["rank", "device", "step"], how="semi")
                .group_by(by)
                .agg(pl.col("total_ns").sum().alias(f"{side}_ns"), pl.col("count").sum().alias(f"{side}_count"))
            )
        scale = counts[0] / counts[1]
        both = sides[0].join(sides[1], on=by, how="full", coalesce=True, nulls_equal=True)
        return both.with_columns(pl.col("late_ns", "late_count", "other_ns", "other_count").fill_null(0)).with_columns(
            pl.col("other_ns", "other_count") * scale
        )


def _named(
    rows: pl.DataFrame, by: str, cause: str, amount: float
) -> list[tuple[str, str, str | None, int, None, str | None]]:
    """A row for the place with most of the extra time, if that is enough; its time is its share of ``amount``."""
    extra = rows.with_columns(more=pl.col("late_ns") - pl.col("other_ns"))
    total = float(extra["more"].sum())
    named = extra.drop_nulls("name").sort("more", "name", descending=[True, False]).head(1)
    if named.is_empty() or total <= 0:
        return []
    more = float(named["more"][0])
    if more < NAMED_PLACE_SHARE * total:
        return []
    return [_row(cause, by, str(named["name"][0]), amount * min(1.0, more / total))]


def _computed(pair: _Pair, amount: int) -> list[tuple[str, str, str | None, int, None, str | None]]:
    """Rows for extra compute: slower_gpu, more_work or compute."""
    if amount <= 0:
        return []
    kernels = pair.table("kernels", list(_KEY)).filter(~pl.col("kind").is_in(["memcpy", "memset"]))
    more = pl.col("late_ns") - pl.col("other_ns")
    # Kernels that are merged into a row without a name count as the same: their count tells nothing.
    same = (pl.col("late_count") - pl.col("other_count")).abs() < 0.5
    same = same | pl.col("name").is_null()
    alike, unlike = kernels.filter(same), kernels.filter(~same)
    slower = float(alike.select(more.sum()).item() or 0)
    added = float(unlike.select(more.sum()).item() or 0)
    detail = None
    if added > max(slower, 0.0):
        cause, rows = "more_work", unlike
        late, other = (int(unlike[f"{side}_count"].sum()) for side in ("late", "other"))
        detail = f"kernels with other shapes or counts: {late:,} here, {other:,} on the median rank"
    else:
        typical, overall = _ratios(alike)
        cause, rows = "compute", alike
        if typical >= max(1 + (overall - 1) / 2, SLOWER_GPU_RATIO):
            cause = "slower_gpu"
            detail = f"the same kernels take {typical:.3f} times as long (median, weighted by time)"
    result = [_row(cause, "cause", None, amount, detail)]
    if cause == "slower_gpu":
        return result
    places = pair.table("places", ["by", "name"])
    for by in _BY:
        result += _named(places.filter(pl.col("by") == by), by, cause, amount)
    by_name = rows.group_by("name").agg(pl.col("late_ns", "other_ns").sum())
    return result + _named(by_name, "kernel", cause, amount)


def _ratios(alike: pl.DataFrame) -> tuple[float, float]:
    """Ratios of the kernels' times, late / other: the median weighted by time, and the ratio of the sums."""
    timed = alike.filter(pl.col("other_ns") > 0).with_columns(ratio=pl.col("late_ns") / pl.col("other_ns"))
    if timed.is_empty():
        return 1.0, 1.0
    ordered = timed.sort("ratio").with_columns(done=pl.col("other_ns").cum_sum())
    half = ordered.filter(pl.col("done") >= pl.col("other_ns").sum() / 2)
    return float(half["ratio"][0]), float(timed["late_ns"].sum()) / float(timed["other_ns"].sum())


def _copied(pair: _Pair, amount: int) -> list[tuple[str, str, str | None, int, None, str | None]]:
    if amount <= 0:
        return []
    copies = pair.table("kernels", list(_KEY)).filter(pl.col("kind").is_in(["memcpy", "memset"]))
    by_name = copies.group_by("name").agg(pl.col("late_ns", "other_ns").sum())
    return [_row("copy", "cause", None, amount), *_named(by_name, "kernel", "copy", amount)]


def _idled(pair: _Pair, amount: int) -> list[tuple[str, str, str | None, int, None, str | None]]:
    """Rows for extra idle time, divided in proportion to how much more of each cause the late device has."""
    if amount <= 0:
        return []
    rows = pair.table("idle", ["cause", "by", "name"]).with_columns(pl.col("cause").cast(pl.String))
    causes = rows.filter(pl.col("by") == "cause").with_columns(
        more=(pl.col("late_ns") - pl.col("other_ns")).clip(lower_bound=0)
    )
    total = float(causes["more"].sum())
    if total <= 0:
        return [_row("unknown", "cause", None, amount, "idle time without a known cause in these steps")]
    result = []
    for cause, more in (
        causes.filter(pl.col("more") > 0).sort("more", descending=True).select("cause", "more").iter_rows()
    ):
        part = amount * more / total
        result.append(_row(cause, "cause", None, part))
        if cause == "unknown":
            continue  # idle time of unknown cause has no place either
        # Summaries of older versions call sources lines.
        rows_of_cause = rows.filter(pl.col("cause") == cause).with_columns(pl.col("by").replace("line", "source"))
        for by in _IDLE_BY:
            result += _named(rows_of_cause.filter(pl.col("by") == by), by, cause, part)
    return result
