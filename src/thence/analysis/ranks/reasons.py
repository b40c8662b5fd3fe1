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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from thence.analysis.ranks.job_collectives import summary_table
from thence.analysis.ranks.lateness import PARTS
from thence.model.thresholds import LISTED_CAUSE_SHARE, NAMED_PLACE_SHARE, SLOWER_GPU_RATIO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


_Row = tuple[str, str, str | None, int, None, str | None]
"""A row of `REASON`; `_frame` computes its share."""
_PLACE = ["rank", "device"]
_AMOUNTS = (*PARTS, "unknown", "unmeasured")
_SIDES = (True, False)
_SUMMED = (("total_ns", "ns"), ("count", "count"))


def reasons_of(
    summaries: Summaries,
    waits: Lateness,
    steps: pl.DataFrame,
    explained: Sequence[tuple[tuple[int, int], list[str]]],
    links: pl.DataFrame,
) -> tuple[Reasons, ...]:
    """Why devices were late in some steps.

    Args:
        waits: of the job.
        steps: as `thence.analysis.ranks.lateness.step_keys` returns them.
        explained: rank and device of each late device, and the keys of the steps to explain.
        links: as `thence.analysis.ranks.process_groups.slow_links` returns them.
    """
    if not explained:
        return ()
    asked = pl.DataFrame(
        [(pair, *place, keys) for pair, (place, keys) in enumerate(explained)],
        schema={"pair": pl.Int64, "rank": pl.Int32, "device": pl.Int32, "key": pl.List(pl.String)},
        orient="row",
    ).explode("key")
    late = waits.late.join(asked, on=[*_PLACE, "key"])
    amounts = _amounts(late)
    compared = _compared(late)
    devices = {pair: (explained[pair][0], other) for pair, other in compared.items()}
    pairs = _Pairs.of(summaries, steps, asked, devices) if devices else None
    slow = links.select("ranks", "members").rows()
    reasons = []
    for pair, ((rank, device), keys) in enumerate(explained):
        of_pair = amounts.get(pair, dict.fromkeys(_AMOUNTS, 0))
        rows = []
        if pairs is not None and pair in compared:
            rows += [
                *pairs.computed(pair, of_pair["compute"]),
                *pairs.copied(pair, of_pair["copy"]),
                *pairs.idled(pair, of_pair["idle"]),
            ]
            if of_pair["transfer"]:
                rows.append(_row("transfer", "cause", None, of_pair["transfer"]))
        rows += _unexplained(of_pair["unknown"], of_pair["unmeasured"])
        if pair in compared:
            members = [members for ranks, members in slow if rank in ranks][:1]
            rows += [_row("transfer", "group", member, of_pair["transfer"]) for member in members]
        frame = _frame(rows, sum(of_pair[name] for name in (*PARTS, "unknown")))
        other_rank, other_device = compared.get(pair, (None, None))
        reasons.append(Reasons(rank, device, other_rank, other_device, len(keys), frame))
    return tuple(reasons)


def _amounts(late: pl.DataFrame) -> dict[int, dict[str, int]]:
    """Extra time of each pair by part, ns; unmeasured: the unknown part for which there is no median rank."""
    unmeasured = pl.col("unknown_ns").filter(pl.col("median_rank").is_null())
    amounts = (*(pl.col(f"{name}_ns") for name in (*PARTS, "unknown")), unmeasured.alias("unmeasured_ns"))
    sums = late.group_by("pair").agg(amount.sum() for amount in amounts)
    return {pair: dict(zip(_AMOUNTS, map(int, row), strict=True)) for pair, *row in sums.rows()}


def _compared(late: pl.DataFrame) -> dict[int, tuple[int, int]]:
    """The rank and device that each pair is compared with: the median device of most of the extra time."""
    other = ("median_rank", "median_device")
    sums = late.drop_nulls("median_rank").group_by("pair", *other).agg(pl.col("own_ns").sum())
    rows = sorted((pair, -own, rank, device) for pair, rank, device, own in sums.rows())
    return {pair: (rank, device) for pair, _, rank, device in reversed(rows)}


def _unexplained(total: int, unmeasured: int) -> list[_Row]:
    """Extra time without a cause, and the reason why there is none."""
    if not total:
        return []
    reasons = (
        (unmeasured, "the first collective of its group in the trace: no earlier one to measure both ranks from"),
        (total - unmeasured, "nothing took longer on this rank than on the median rank"),
    )
    detail = "; ".join(reason for amount, reason in reasons if amount)
    return [_row("unknown", "cause", None, total, detail)]


def _row(cause: str, by: str, name: str | None, total: float, detail: str | None = None) -> _Row:
    return (cause, by, name, round(total), None, detail)


def _frame(rows: list[_Row], total: int) -> pl.DataFrame:
    """The rows with their shares of ``total``, the causes with most time first, without small causes."""
    # Idle time without a cause and unknown stretches are merged into the one cause "unknown".
    merged: dict[tuple[str, str, str | None], tuple[int, float, str | None]] = {}
    of_total = 1 / max(total, 1)
    for cause, by, name, amount, _, detail in rows:
        before, share, said = merged.get((cause, by, name), (0, 0.0, None))
        merged[cause, by, name] = (before + amount, share + amount * of_total, detail if said is None else said)
    whole = {
        cause: amount
        for (cause, by, _), (amount, share, _) in merged.items()
        if by == "cause" and share >= LISTED_CAUSE_SHARE
    }
    listed = [(*key, *values) for key, values in merged.items() if key[0] in whole]
    return pl.DataFrame(sorted(listed, key=lambda row: -whole[row[0]]), schema=REASON, orient="row")


class _Largest(NamedTuple):
    """Of rows of one kind: their extra time, and the name with most of it (ns)."""

    total: float
    name: str | None
    most: float | None

    def rows(self, by: str, cause: str, amount: float) -> list[_Row]:
        """A row for the name, if it has enough of the extra time; its time is its share of ``amount``."""
        if self.name is None or self.most is None or self.total <= 0 or self.most < NAMED_PLACE_SHARE * self.total:
            return []
        return [_row(cause, by, self.name, amount * min(1.0, self.most / self.total))]


_NOTHING = _Largest(0.0, None, None)


def _largest(rows: pl.DataFrame, keys: tuple[str, ...]) -> dict[tuple[object, ...], _Largest]:
    """`_Largest` of the rows for each value of the keys; rows: name, late_ns, other_ns."""
    extra = rows.with_columns(more=pl.col("late_ns") - pl.col("other_ns"))
    largest = (
        extra.sort("more", "name", descending=[True, False])
        .group_by(keys)
        .agg(
            pl.col("more").sum().alias("total"),
            pl.col("name").drop_nulls().first(),
            most=pl.col("more").filter(pl.col("name").is_not_null()).first(),
        )
    )
    return {row[: len(keys)]: _Largest(*row[len(keys) :]) for row in largest.rows()}


def _compared_steps(
    steps: pl.DataFrame, asked: pl.DataFrame, devices: dict[int, tuple[tuple[int, int], tuple[int, int]]]
) -> pl.DataFrame:
    """The steps of both devices of each pair: pair, late (which device), rank, device, step and scale.

    If the devices have different numbers of these steps, the other's sums times scale are for the late device's number.
    The arguments are those of `_Pairs.of`.
    """
    sides = pl.DataFrame(
        [
            (pair, is_late, *place)
            for pair, both in devices.items()
            for is_late, place in zip(_SIDES, both, strict=True)
        ],
        schema={"pair": pl.Int64, "late": pl.Boolean, "rank": pl.Int32, "device": pl.Int32},
        orient="row",
    )
    compared = (
        sides.join(asked.select("pair", "key"), on="pair")
        .join(steps.select(*_PLACE, "step", "key"), on=[*_PLACE, "key"])
        .unique(["pair", "late", "step"])
    )
    counts = {(pair, late): count for pair, late, count in compared.group_by("pair", "late").len().rows()}
    scale = {pair: max(counts.get((pair, True), 0), 1) / max(counts.get((pair, False), 0), 1) for pair in devices}
    return compared.drop("key").with_columns(scale=pl.col("pair").replace_strict(scale, return_dtype=pl.Float64))


@dataclass(frozen=True)
class _Pairs:
    """Late devices, each with the device that it is compared with: sums over the same steps of both.

    Attributes:
        kernels: by pair, kind, name and shape: late_ns and other_ns, late_count and other_count; what: copy, or of
            kernels whether they are alike or unlike.
        of_kernels: the names by pair and what.
        of_places: the places by pair and kind of place.
        of_idle: the places of idle time by pair, cause and kind of place.
    """

    kernels: pl.DataFrame
    of_kernels: dict[tuple[object, ...], _Largest]
    of_places: dict[tuple[object, ...], _Largest]
    of_idle: dict[tuple[object, ...], _Largest]

    @classmethod
    def of(
        cls,
        summaries: Summaries,
        steps: pl.DataFrame,
        asked: pl.DataFrame,
        devices: dict[int, tuple[tuple[int, int], tuple[int, int]]],
    ) -> _Pairs:
        """The sums of each pair.

        Args:
            steps: rank, device, step and key.
            asked: pair and key: the steps to compare.
            devices: of each pair the late device and the other one.
        """
        compared = _compared_steps(steps, asked, devices)
        ranks = sorted(set(compared["rank"]))

        def sums(name: str, by: tuple[str, ...], *changed: pl.Expr) -> pl.DataFrame:
            """Sums of a table by pair: late_ns and other_ns, late_count and other_count."""
            rows = summary_table(summaries, name, ranks).with_columns(changed)
            return (
                rows.join(compared, on=[*_PLACE, "step"])
                .group_by("pair", *by)
                .agg(
                    *(pl.col(what).filter("late").sum().alias(f"late_{unit}") for what, unit in _SUMMED),
                    *(
                        (pl.col(what).filter(~pl.col("late")).sum() * pl.col("scale").first()).alias(f"other_{unit}")
                        for what, unit in _SUMMED
                    ),
                )
            )

        # Kernels that are merged into a row without a name count as the same: their count tells nothing.
        alike = ((pl.col("late_count") - pl.col("other_count")).abs() < 0.5) | pl.col("name").is_null()
        what = pl.when(pl.col("kind").is_in(["memcpy", "memset"])).then(pl.lit("copy"))
        kernels = sums("kernels", ("kind", "name", "shape")).with_columns(
            what=what.when(alike).then(pl.lit("alike")).otherwise(pl.lit("unlike"))
        )
        by_name = kernels.group_by("pair", "what", "name").agg(pl.col("late_ns", "other_ns").sum())
        # Summaries of older versions call sources lines.
        renamed = pl.col("by").replace("line", "source")
        return cls(
            kernels,
            _largest(by_name, ("pair", "what")),
            _largest(sums("places", ("by", "name")), ("pair", "by")),
            _largest(sums("idle", ("cause", "by", "name"), renamed), ("pair", "cause", "by")),
        )

    def computed(self, pair: int, amount: int) -> list[_Row]:
        """Rows for extra compute: slower_gpu, more_work or compute."""
        if amount <= 0:
            return []
        slower, added = (self.of_kernels.get((pair, what), _NOTHING).total for what in ("alike", "unlike"))
        kernels = self.kernels.filter(pl.col("pair") == pair)
        detail = None
        if added > max(slower, 0.0):
            cause, what = "more_work", "unlike"
            unlike = kernels.filter(pl.col("what") == what)
            late, other = (int(unlike[f"{side}_count"].sum()) for side in ("late", "other"))
            detail = f"kernels with other shapes or counts: {late:,} here, {other:,} on the median rank"
        else:
            cause, what = "compute", "alike"
            typical, overall = _ratios(kernels.filter(pl.col("what") == what))
            if typical >= max(1 + (overall - 1) / 2, SLOWER_GPU_RATIO):
                cause = "slower_gpu"
                detail = f"the same kernels take {typical:.3f} times as long (median, weighted by time)"
        result = [_row(cause, "cause", None, amount, detail)]
        if cause == "slower_gpu":
            return result
        for by in _BY:
            result += self.of_places.get((pair, by), _NOTHING).rows(by, cause, amount)
        return result + self.of_kernels.get((pair, what), _NOTHING).rows("kernel", cause, amount)

    def copied(self, pair: int, amount: int) -> list[_Row]:
        """Rows for extra copies."""
        if amount <= 0:
            return []
        named = self.of_kernels.get((pair, "copy"), _NOTHING)
        return [_row("copy", "cause", None, amount), *named.rows("kernel", "copy", amount)]

    def idled(self, pair: int, amount: int) -> list[_Row]:
        """Rows for extra idle time, divided in proportion to how much more of each cause the late device has."""
        if amount <= 0:
            return []
        more = {
            str(cause): largest.total
            for (of_pair, cause, by), largest in self.of_idle.items()
            if of_pair == pair and by == "cause" and largest.total > 0
        }
        if not more:
            return [_row("unknown", "cause", None, amount, "idle time without a known cause in these steps")]
        result = []
        for cause in sorted(more, key=lambda cause: (-more[cause], cause)):
            part = amount * more[cause] / sum(more.values())
            result.append(_row(cause, "cause", None, part))
            if cause == "unknown":
                continue  # idle time of unknown cause has no place either
            for by in _IDLE_BY:
                result += self.of_idle.get((pair, cause, by), _NOTHING).rows(by, cause, part)
        return result


def _ratios(alike: pl.DataFrame) -> tuple[float, float]:
    """Ratios of the kernels' times, late / other: the median weighted by time, and the ratio of the sums."""
    late, other = (alike[f"{side}_ns"].to_numpy() for side in ("late", "other"))
    late, other = late[other > 0], other[other > 0]
    if not len(other):
        return 1.0, 1.0
    ratio = late / other
    order = np.argsort(ratio)
    half = np.searchsorted(np.cumsum(other[order]), other.sum() / 2)
    return float(ratio[order][half]), float(late.sum()) / float(other.sum())
