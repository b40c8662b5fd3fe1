"""Analyses a job from the summaries of its ranks: which ranks made others wait, how long, since which step, and why."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.diff.counted_steps import left_out
from thence.analysis.ranks.groups import group_rows, slow_links
from thence.analysis.ranks.joined import Joined, joined, table_of
from thence.analysis.ranks.lateness import MESSAGES, Lateness, lateness, step_keys
from thence.analysis.ranks.pipelines import stage_causes, stages
from thence.analysis.ranks.reasons import Reasons, reasons_of
from thence.analysis.ranks.stragglers import CONFIDENCE, FEWEST_STEPS, LEAST_SHARE, late_since
from thence.errors import MissingData
from thence.units import format_ns, format_share

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from thence.analysis.ranks.clocks import Clocks

__all__ = ["Job", "job_of"]

_PLACE = ["rank", "device"]
_EXPLAINED = 8
"""Maximum number of stragglers that are explained: those that caused the longest waits."""
_UNUSUAL = 4
"""A step in which a straggler caused more than this many times its median is left out of the explanation: its cause
may be another than that of the other steps."""


@dataclass(frozen=True)
class Job:
    """The devices of a job, and which of them are late.

    Attributes:
        ranks: one row per device, the device that caused the longest waits first: rank, device, times_last (number
            of collectives in which others waited for it), wait_caused_ns (in each step, the wait that it caused for
            the device that waited longest for it; summed over the steps that count), caused_share (of the time of
            these steps), straggler, mean_ns (wait caused per step, since it is late), low_ns (lower bound of mean_ns
            less the mean of what the other devices cause; null with too few steps), since_step, and as means per
            step, in ns: step_ns, busy_ns, compute_ns, copy_ns, exposed_wait_ns, transfer_ns, idle_ns; steps,
            steps_per_second.
        reasons: why stragglers are late; without stragglers, the reasons of the device that caused the longest waits,
            if it caused any.
        groups: as `thence.analysis.ranks.groups.group_rows` returns them.
        links: as `thence.analysis.ranks.groups.slow_links` returns them.
        stages: rank, device, stage, and means per step: step_ns, own_ns, bubble_ns, bubble_share; empty without
            sends and receives.
        cells: one row per device and step: rank, device, key, start (ns, on the clock of the summaries), step_ns,
            wait_ns (exposed), compute_ns, caused_ns.
        keys: keys of the steps, in order.
        counted: keys of the steps that count, in order.
        step_ns: mean time of the steps that count.
        clocks: clocks of the ranks.
        notes: what a reader of the numbers must know, one sentence each.
    """

    ranks: pl.DataFrame
    reasons: tuple[Reasons, ...]
    groups: pl.DataFrame
    links: pl.DataFrame
    stages: pl.DataFrame
    cells: pl.DataFrame
    keys: tuple[str, ...]
    counted: tuple[str, ...]
    step_ns: float
    clocks: Clocks
    notes: tuple[str, ...] = field(default=())

    @property
    def stragglers(self) -> pl.DataFrame:
        """The rows of `ranks` that are stragglers."""
        return self.ranks.filter("straggler")

    @property
    def statement(self) -> str:
        """One sentence on whether there is a straggler."""
        count = len(self.counted)
        if self.ranks.height < 2:
            return "one device, so no device waits for another"
        if count < FEWEST_STEPS:
            return (
                f"too few steps to distinguish a late rank from chance: {count} count{'s' if count == 1 else ''}, and "
                f"{FEWEST_STEPS} are needed"
            )
        found = self.stragglers.height
        if found:
            return f"{found} straggler{'s' if found > 1 else ''} among {self.ranks.height:,} devices, {count:,} steps"
        most = self.ranks.row(0, named=True)
        return (
            f"no straggler: in {count:,} steps none of {self.ranks.height:,} devices makes others wait for more than "
            f"{format_share(LEAST_SHARE, 1)} of a step and more than random variation explains; most: "
            f"rank {most['rank']} GPU {most['device']}, {format_share(most['caused_share'], 1)}"
        )

    def reasons_for(self, rank: int, device: int) -> Reasons | None:
        """Why a device is late; None if it was not explained."""
        return next((r for r in self.reasons if (r.rank, r.device) == (rank, device)), None)

    def to_json(self) -> dict[str, Any]:
        """The job as JSON values."""
        rows = []
        for row in self.ranks.to_dicts():
            why = self.reasons_for(row["rank"], row["device"])
            row |= {"compared_with": None, "reasons": []}
            if why is not None:
                row["compared_with"] = {"rank": why.median_rank, "device": why.median_device}
                row["reasons"] = why.rows.to_dicts()
            rows.append(row)
        return {
            "statement": self.statement,
            "stragglers": self.stragglers.select(*_PLACE).to_dicts(),
            "least_share": LEAST_SHARE,
            "confidence": CONFIDENCE,
            "steps": len(self.keys),
            "counted_steps": len(self.counted),
            "step_ns": self.step_ns,
            "ranks": rows,
            "groups": self.groups.to_dicts(),
            "slow_links": self.links.to_dicts(),
            "stages": self.stages.to_dicts(),
            "clocks": self.clocks.to_json(),
            "notes": list(self.notes),
        }


def job_of(summaries: Mapping[str, pl.DataFrame | pl.LazyFrame]) -> Job:
    """Finds which ranks are late, since when, and why.

    Args:
        summaries: the tables of `thence.analysis.ranks.summary_tables.SUMMARY` with the rows of all ranks; if they
            are lazy, kernels, places and idle are read only for the ranks that are explained or compared.

    Raises:
        MissingData: there is no device activity.
    """
    devices = table_of(summaries, "devices").sort(_PLACE)
    if devices.is_empty():
        raise MissingData("the ranks have no device activity")
    together = joined(summaries)
    steps = step_keys(table_of(summaries, "steps"))
    keys, counted, said = _counted(steps, devices)
    found = lateness(together, steps)
    used = steps.filter(pl.col("key").is_in(counted))
    step_ns = float(used["duration"].mean() or 0)  # type: ignore[arg-type] # a number
    messages = _stages(together, used)
    beyond = stage_causes(messages, found.messages, used)
    found = replace(found, late=pl.concat([found.late, beyond], how="diagonal_relaxed"))
    caused = (
        pl.concat([found.caused, beyond.select(*_PLACE, "key", caused_ns="own_ns")])
        .group_by(*_PLACE, "key")
        .agg(pl.col("caused_ns").sum())
    )
    late = _late(devices, caused, counted, step_ns)
    ranks = _rows(late, used, together, found)
    named = ranks.filter("straggler").head(_EXPLAINED)
    if named.is_empty():
        named = ranks.head(1).filter(pl.col("wait_caused_ns") > 0)
    places = list(named.select(_PLACE).iter_rows())
    since = [counted[counted.index(key) if key in counted else 0 :] for key in named["since_step"]]
    usual = [
        _usual(caused, place, late_keys, step_ns)
        for place, late_keys in zip(places, since, strict=True)
    ]
    said += _left_out_of_causes(places, since, usual)
    said += _host_bound_notes(found.late, counted, step_ns)
    links = slow_links(together, steps, counted, step_ns)
    return Job(
        ranks=ranks,
        reasons=tuple(
            reasons_of(summaries, found, steps, place, late_keys, links)
            for place, late_keys in zip(places, usual, strict=True)
        ),
        groups=group_rows(together, devices["rank"].n_unique()),
        links=links,
        stages=_per_stage(messages),
        cells=_cells(steps, found, caused),
        keys=tuple(keys),
        counted=tuple(counted),
        step_ns=step_ns,
        clocks=together.clocks,
        notes=(*said, *together.clocks.statements, *together.notes, *_undescribed(devices)),
    )


def _counted(steps: pl.DataFrame, devices: pl.DataFrame) -> tuple[list[str], list[str], list[str]]:
    """The keys of the steps in order, the keys of those that count, and notes on the others."""
    order = (
        steps.group_by("key")
        .agg(pl.col("start", "duration", "compute_ns").median(), pl.len())
        .sort("start", "key")
    )
    keys = order["key"].to_list()
    if devices["step_kind"].null_count() == devices.height:
        return keys, keys, ["the traces have no steps: the whole recording counts as one step"]
    last = np.zeros(len(keys), np.bool_)
    compute = order["compute_ns"].to_numpy()
    # The last step of a recording holds what ran after the last optimizer step, and ends with the recording.
    rest = compute[-1] < np.median(compute) / 2
    last[-1] = rest or bool((devices["step_kind"] == "program").any())
    codes = left_out(order["duration"].to_numpy(), last, outliers=True)
    counted = [key for key, code in zip(keys, codes, strict=True) if code is None]
    said = []
    if len(counted) < len(keys):
        names = [key for key, code in zip(keys, codes, strict=True) if code is not None]
        said.append(
            f"steps left out as warm-up or incomplete: {', '.join(names[:6])}"
            + (", ..." if len(names) > 6 else "")
        )
    missing = order["len"].max() != order["len"].min()
    if missing:
        said.append(
            "some steps are missing on some devices: a missing step counts as a step without waits"
        )
    return keys, counted, said


def _late(
    devices: pl.DataFrame, caused: pl.DataFrame, counted: list[str], step_ns: float
) -> pl.DataFrame:
    """For every device: the result of `late_since`, with since_step, wait_caused_ns and caused_share of `Job.ranks`."""
    matrix = _matrix(devices, caused, counted)
    found = late_since(matrix, step_ns)
    names = pl.Series(counted, dtype=pl.String)
    return devices.select(_PLACE).hstack(
        [
            *found.drop("since", "steps").get_columns(),
            names.gather(found["since"].cast(pl.UInt32)).alias("since_step"),
            pl.Series("wait_caused_ns", np.rint(matrix.sum(axis=1)).astype(np.int64)),
            pl.Series("caused_share", matrix.sum(axis=1) / max(step_ns * len(counted), 1.0)),
        ]
    )


def _matrix(devices: pl.DataFrame, rows: pl.DataFrame, keys: list[str]) -> npt.NDArray[np.float64]:
    """caused_ns by device and step, 0 where there is no row."""
    at = devices.select(*_PLACE, at=pl.int_range(pl.len()))
    step = pl.DataFrame(
        {"key": keys, "step": range(len(keys))}, schema={"key": pl.String, "step": pl.Int64}
    )
    placed = rows.join(at, on=_PLACE).join(step, on="key")
    matrix = np.zeros((devices.height, len(keys)))
    matrix[placed["at"].to_numpy(), placed["step"].to_numpy()] = placed["caused_ns"].to_numpy()
    return matrix


def _usual(
    caused: pl.DataFrame, place: tuple[int, int], keys: list[str], step_ns: float
) -> list[str]:
    """The steps except those in which a device caused far more than its median; all if that is below `LEAST_SHARE`."""
    rows = caused.filter(
        pl.col("rank") == place[0], pl.col("device") == place[1], pl.col("key").is_in(keys)
    )
    of = dict(rows.select("key", "caused_ns").iter_rows())
    median = float(np.median([of.get(key, 0) for key in keys])) if keys else 0.0
    if median < LEAST_SHARE * step_ns:
        return keys
    return [key for key in keys if of.get(key, 0) <= _UNUSUAL * median]


def _host_bound_notes(late: pl.DataFrame, counted: list[str], step_ns: float) -> list[str]:
    """A note on waits for ranks whose hosts are as fast as those of the others; empty if these waits are short."""
    rows = late.filter(pl.col("key").is_in(counted))
    waited = float(rows["host_bound_ns"].sum() or 0) / max(len(counted), 1)
    if waited < LEAST_SHARE * step_ns:
        return []
    text = (
        f"{format_ns(waited)} of waits per step are not caused by a late rank: the hosts of the waiting ranks had "
        "launched ahead and need that time anyway, so the steps are host-bound"
    )
    return [text]


def _left_out_of_causes(
    places: list[tuple[int, int]], every: list[list[str]], usual: list[list[str]]
) -> list[str]:
    """Notes on the steps that are left out of the search for causes."""
    said = []
    for (rank, device), keys, kept in zip(places, every, usual, strict=True):
        names = [key for key in keys if key not in kept]
        if names:
            shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            said.append(
                f"rank {rank} GPU {device} made others wait more than {_UNUSUAL} times as long as usual in {shown}; "
                "the causes shown do not include those of these steps"
            )
    return said


def _rows(
    late: pl.DataFrame, used: pl.DataFrame, together: Joined, found: Lateness
) -> pl.DataFrame:
    """`Job.ranks`."""
    times = used.group_by(_PLACE).agg(
        pl.len().alias("steps"),
        pl.col("duration").mean().alias("step_ns"),
        *(pl.col(f"{what}_ns").mean() for what in ("busy", "compute", "copy", "exposed", "idle")),
    )
    waited = found.waited.join(used.select(*_PLACE, "key"), on=[*_PLACE, "key"], how="semi")
    waits = waited.group_by(_PLACE).agg(waited=pl.col("wait_ns").sum())
    last = (
        together.rows.select("late_rank", "late_device", "instance", "exposed_wait_ns")
        .filter(pl.col("exposed_wait_ns") > 0)
        .group_by(rank="late_rank", device="late_device")
        .agg(times_last=pl.col("instance").n_unique())
    )
    exposed_wait = pl.col("waited").fill_null(0) / pl.col("steps")
    return (
        late.join(times, on=_PLACE, how="left")
        .join(waits, on=_PLACE, how="left")
        .join(last, on=_PLACE, how="left")
        .with_columns(exposed_wait_ns=exposed_wait, times_last=pl.col("times_last").fill_null(0))
        .select(
            *_PLACE, "times_last", "wait_caused_ns", "caused_share", "straggler", "mean_ns", "low_ns", "since_step",
            "steps", "step_ns", "busy_ns", "compute_ns", "copy_ns", "exposed_wait_ns",
            (pl.col("exposed_ns") - pl.col("exposed_wait_ns")).clip(lower_bound=0).alias("transfer_ns"),
            "idle_ns",
            steps_per_second=1e9 / pl.col("step_ns"),
        )
        .sort("wait_caused_ns", *_PLACE, descending=[True, False, False])
    )  # fmt: skip


def _stages(together: Joined, used: pl.DataFrame) -> pl.DataFrame:
    """`thence.analysis.ranks.pipelines.stages` for the devices that send or receive."""
    rows = together.rows.filter(pl.col("collective").is_in(MESSAGES))
    groups = together.groups.select("group", "ranks")
    listed = rows.select(*_PLACE, "group").unique().join(groups, on="group", how="left")
    exploded = listed.explode("ranks")
    place = exploded.with_columns(place=pl.int_range(pl.len()).over(*_PLACE, "group")).filter(
        pl.col("ranks") == pl.col("rank")
    )
    of = (
        listed.select(_PLACE)
        .unique()
        .join(place.group_by(_PLACE).agg(stage=pl.col("place").min()), on=_PLACE, how="left")
        .with_columns(stage=pl.col("stage").fill_null(pl.col("rank").cast(pl.Int64)))
    )
    waits = (
        rows.join(used.select(*_PLACE, "step", "key"), on=[*_PLACE, "step"])
        .group_by(*_PLACE, "key")
        .agg(wait_ns=pl.col("exposed_wait_ns").sum())
    )
    return stages(waits, used, of)


def _per_stage(rows: pl.DataFrame) -> pl.DataFrame:
    means = rows.group_by("stage", *_PLACE).agg(pl.col("step_ns", "own_ns", "bubble_ns").mean())
    share = pl.col("bubble_ns") / pl.col("step_ns")
    return means.with_columns(bubble_share=share).sort("stage", *_PLACE)


def _cells(steps: pl.DataFrame, found: Lateness, caused: pl.DataFrame) -> pl.DataFrame:
    on = [*_PLACE, "key"]
    return (
        steps.select(*on, "start", "compute_ns", step_ns="duration")
        .join(found.waited, on=on, how="left")
        .join(caused, on=on, how="left")
        .select(
            *on,
            "start",
            "step_ns",
            pl.col("wait_ns").fill_null(0),
            "compute_ns",
            pl.col("caused_ns").fill_null(0),
        )
        .sort(on)
    )


def _undescribed(devices: pl.DataFrame) -> list[str]:
    count = int(devices["undescribed"].sum())
    if not count:
        return []
    kernels = "1 kernel communicates" if count == 1 else f"{count:,} kernels communicate"
    return [f"{kernels} without a description (message size, group), so waits there are unknown"]
