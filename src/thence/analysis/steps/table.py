"""``thence steps``: steps in order of time with their idle time by cause, their spread, and outliers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.idle.causes import idle_causes
from thence.analysis.idle.host_threads import Leaves
from thence.analysis.idle.late_starts import Gaps, device_gaps
from thence.analysis.idle.rules import CAUSES
from thence.analysis.steps.windows import STEP, steps
from thence.errors import MissingData
from thence.model.intervals import NEVER, NO_ROW
from thence.model.one_timeline import numbered
from thence.notebook import Form, Shown
from thence.units import format_ns, several

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from thence.analysis.steps.windows import Steps
    from thence.model.attributed import Attributed

    Int64 = npt.NDArray[np.int64]

__all__ = ["StepTable", "step_table"]

_MAD_TO_STD = 1.4826  # of a normal distribution
_DEVIATIONS = 4
_LEAST_EXCESS = 0.05  # share of the median; a step that exceeds the median by less is no outlier


@dataclass(frozen=True)
class StepTable(Shown):
    """The steps of a trace, one row per rank, device and step.

    Attributes:
        steps: the windows, as `thence.analysis.steps.windows.Steps`.
        frame: columns of `STEP`, then ``idle_<cause>_ns`` for each cause that occurs; these add up to idle_ns.
        spread: rank, device, steps (count), mean_ns, median_ns, std_ns (sample standard deviation; null for one step),
            min_ns, max_ns. The first step of each device is left out if there are others.
        outliers: rank, device, step, duration, excess_ns (over the median of its device), because (the part of the
            step that exceeds its own median most: busy, exposed or ``idle_<cause>``), because_ns (by how much). A
            step is an outlier if it exceeds the median by more than 5 % and 4 robust standard deviations.
    """

    steps: Steps
    frame: pl.DataFrame
    spread: pl.DataFrame
    outliers: pl.DataFrame

    def form(self) -> Form:
        """How a notebook displays the result."""
        return Form(
            several(self.frame.height, "step"),
            self.steps.kind,
            self.frame,
            {
                "step": "step", "rank": "rank", "device": "GPU", "duration": "duration", "busy_ns": "busy",
                "idle_ns": "idle",
            },
            "duration",
            notes=(*self._spread_said(), *self._outliers_said()),
        )  # fmt: skip

    def _spread_said(self) -> Iterator[str]:
        columns = ("rank", "device", "steps", "median_ns", "min_ns", "max_ns")
        for rank, device, count, median, least, most in self.spread.select(columns).rows():
            extent = f"median {format_ns(median)}, {format_ns(least)} to {format_ns(most)}"
            yield f"rank {rank} GPU {device}: {count:,} steps, {extent}"

    def _outliers_said(self) -> Iterator[str]:
        columns = ("step", "excess_ns", "because", "because_ns")
        for step, excess, because, grown in self.outliers.select(columns).rows():
            yield f"{step} stands out by {format_ns(excess)}: {because} (+{format_ns(grown)})"

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        tables = {name: frame.to_dicts() for name, frame in self.json_tables().items()}
        return {"kind": self.steps.kind, **tables}

    def json_tables(self) -> dict[str, pl.DataFrame]:
        """The tables of `to_json` as data frames, which take a tenth of the memory of its Python objects."""
        times = {"start": "start_ns", "duration": "duration_ns", "host_start": "host_start_ns"}
        return {
            "steps": self.frame.rename(times),
            "spread": self.spread,
            "outliers": self.outliers.rename({"duration": "duration_ns"}),
        }


def step_table(
    trace: Attributed, numbers: tuple[int | None, int | None] | None = None
) -> StepTable:
    """The steps with their idle time by cause, spread and outliers.

    Args:
        trace: the attributed trace.
        numbers: first number of the selected steps and the number after their last, each None without a limit, as in
            `thence.model.selection.Selection`; None selects all steps.

    Raises:
        MissingData: the trace holds no steps, or none of the selected ones.
    """
    found = steps(trace)
    frame = _with_causes(trace, found.frame)
    first, last = numbers or (None, None)
    if first is not None:
        frame = frame.filter(pl.col("number") >= first)
    if last is not None:
        frame = frame.filter(pl.col("number") < last)
    if frame.is_empty():
        raise MissingData(f"{trace.meta.named}: holds none of the selected steps")
    return StepTable(found, frame, _spread(frame), _outliers(frame))


def _with_causes(trace: Attributed, frame: pl.DataFrame) -> pl.DataFrame:
    """Adds a column of idle time for each cause that occurs."""
    number, devices = numbered(frame, "rank", "device")
    edges = np.searchsorted(number, np.arange(devices.height + 1))
    start = frame["start"].to_numpy()
    end = start + frame["duration"].to_numpy()
    of_device = dict(zip(devices.rows(), itertools.pairwise(edges.tolist()), strict=True))
    spans = {
        key: (int(start[low]), int(end[low:high].max())) for key, (low, high) in of_device.items()
    }
    pieces = idle_causes(trace, _with_ends(trace, spans))
    key, pieces_of = numbered(pieces, "rank", "device")
    piece_edges = np.searchsorted(key, np.arange(pieces_of.height + 1))
    begins = pieces["start"].to_numpy()
    ends = begins + pieces["duration"].to_numpy()
    nothing = np.empty(0, np.int64)
    row: list[Int64] = [nothing]
    piece: list[Int64] = [nothing]
    ns: list[Int64] = [nothing]
    for device, first, last in zip(
        pieces_of.rows(), piece_edges[:-1], piece_edges[1:], strict=True
    ):
        low, high = of_device[device]
        cut = _as_leaves(start[low:high], end[low:high], low).within(
            begins[first:last], ends[first:last]
        )
        row.append(cut.row.astype(np.int64, copy=False))
        piece.append(first + cut.of)
        ns.append(cut.end - cut.start)
    causes = pieces["cause"].cast(pl.String).gather(np.concatenate(piece))
    return frame.hstack(_by_cause(np.concatenate(row), causes, np.concatenate(ns), frame.height))


def _as_leaves(start: Int64, end: Int64, first: int) -> Leaves:
    """The steps of one device over time: their rows, numbered from ``first``, and `NO_ROW` in between."""
    time = np.concatenate([[NEVER], np.stack([start, end], 1).ravel()])
    number = np.arange(first, first + len(start))
    row = np.append(NO_ROW, np.stack([number, np.full(len(start), NO_ROW)], 1).ravel())
    # If a step ends when the next begins, the row of the next step counts from then on.
    last = np.append(time[1:] != time[:-1], np.True_)
    return Leaves(time[last], row[last])


def _by_cause(row: Int64, cause: pl.Series, ns: Int64, rows: int) -> pl.DataFrame:
    """Columns ``idle_<cause>_ns`` with a value for each row."""
    sums = (
        pl.DataFrame({"row": row, "cause": cause, "ns": ns})
        .filter(pl.col("row") != NO_ROW)
        .group_by("row", "cause")
        .agg(pl.col("ns").sum())
    )
    found = set(sums["cause"])
    wide = pl.DataFrame({"row": np.arange(rows)})
    for name in (name for name in CAUSES if name in found):
        of = sums.filter(pl.col("cause") == name).select(
            "row", pl.col("ns").alias(f"idle_{name}_ns")
        )
        wide = wide.join(of, on="row", how="left", maintain_order="left")
    return wide.drop("row").fill_null(0)


def _with_ends(trace: Attributed, spans: dict[tuple[int, int], tuple[int, int]]) -> list[Gaps]:
    """The gaps of devices, with those before the first activity and after the last one that are inside windows.

    Args:
        trace: the attributed trace.
        spans: for each rank and device, the start of its first window and the end of its last one.
    """
    rows = trace.gpu.with_row_index("gpu").select(
        "rank", "device", "start", "gpu", end=pl.col("start") + pl.col("duration")
    )
    activities = {
        (rank, device): (first, last, row)
        for rank, device, first, last, row in rows.group_by("rank", "device")
        .agg(
            pl.col("start").min(),
            pl.col("end").max(),
            row=pl.col("gpu").sort_by("start", maintain_order=True).first(),
        )
        .rows()
    }
    result = []
    for of in device_gaps(trace):
        key = (of.rank, of.device)
        if key not in spans:
            continue
        (begin, finish), (first, last, row) = spans[key], activities[key]
        before, after = [0] * (begin < first), [0] * (finish > last)
        result.append(
            Gaps(
                of.rank,
                of.device,
                np.concatenate([np.full(len(before), begin), of.start, np.full(len(after), last)]),
                np.concatenate([np.full(len(before), first), of.end, np.full(len(after), finish)]),
                np.concatenate(
                    [np.full(len(before), row), of.gpu, np.full(len(after), NO_ROW)]
                ).astype(np.int64),
            )
        )
    return result


def _steady(frame: pl.DataFrame) -> pl.DataFrame:
    """All steps except the first step of each device that has several."""
    several = pl.len().over("rank", "device") > 1
    return frame.filter(~(pl.col("first") & several))


def _spread(frame: pl.DataFrame) -> pl.DataFrame:
    duration = pl.col("duration")
    return (
        _steady(frame)
        .group_by("rank", "device", maintain_order=True)
        .agg(
            steps=pl.len().cast(pl.Int64),
            mean_ns=duration.mean(),
            median_ns=duration.median(),
            std_ns=duration.std(),
            min_ns=duration.min(),
            max_ns=duration.max(),
        )
    )


def _outliers(frame: pl.DataFrame) -> pl.DataFrame:
    """Steps that take much longer than the others of their device, with the part that grew most."""
    causes = [name for name in frame.columns if name not in STEP]
    parts = {
        "busy": pl.col("busy_ns") - pl.col("exposed_ns"),
        "exposed": pl.col("exposed_ns"),
        **{name.removesuffix("_ns"): pl.col(name) for name in causes},
    }
    device = ("rank", "device")
    duration = pl.col("duration")
    grown = {name: part - part.median().over(device) for name, part in parts.items()}
    excess = duration - duration.median().over(device)
    wide = frame.with_columns(excess_ns=excess, **{f"grew {n}": part for n, part in grown.items()})
    deviation = _MAD_TO_STD * pl.col("excess_ns").abs().median().over(device)
    outside = (pl.col("excess_ns") > _LEAST_EXCESS * duration.median().over(device)) & (
        pl.col("excess_ns") > _DEVIATIONS * deviation
    )
    chosen = wide.filter(outside)
    grew = chosen.select(f"grew {name}" for name in parts).to_numpy()
    largest = grew.argmax(axis=1) if len(grew) else np.empty(0, np.int64)
    return chosen.select(
        *device, "step", "duration", pl.col("excess_ns").cast(pl.Int64)
    ).with_columns(
        because=pl.Series(list(parts), dtype=pl.String).gather(largest),
        because_ns=pl.Series(
            grew[np.arange(len(grew)), largest] if len(grew) else [], dtype=pl.Int64
        ),
    )
