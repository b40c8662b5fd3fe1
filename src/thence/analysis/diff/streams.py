"""What ran on which stream in the counted steps of a run, and what ran at the same time.

`thence.analysis.diff.moved_streams` decides from both sides which work moved to another stream, so a run keeps what
that needs for any choice: for each step, how long each set of rows ran at the same time. These times and the idle
time add up to the step exactly.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.grouped_intervals import numbered, rows_of_groups
from thence.model.intervals import NO_ROW, last_begun, levels, unions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed


SHAPE = ("x", "y", "z", "bytes")
"""Columns that tell launches of one kernel apart: the grid, and the bytes of copies."""
OWN_STREAM = "own stream"
"""Placement of instructions that run in the order of their program."""
_SEED = 39  # fixed, so that every run of thence gives the same result


@dataclass(frozen=True)
class Streams:
    """Streams and concurrency in the counted steps of a run.

    Attributes:
        rows: what is told apart: name, the places of `streams_of`, the columns of `SHAPE`, stream (number), xla
            (whether a kernel of XLA), and for those source (line) and placement (in HLO: `OWN_STREAM` or the column
            ``placement`` of its instruction; null where the trace has no HLO of it).
        on: stream (number), device (number), row (of ``rows``), ns and count: sums over the steps, divided by the
            number of steps and devices.
        together: pairs of numbers of streams of one device that had work in the same step: one, other.
        sets: step (number among the counted steps), set (number), ns per device: how long exactly the rows of this
            set ran.
        members: set, row: the rows of each set.
    """

    rows: pl.DataFrame
    on: pl.DataFrame
    together: pl.DataFrame
    sets: pl.DataFrame
    members: pl.DataFrame


def streams_of(trace: Attributed, windows: pl.DataFrame, number: Int64, kinds: tuple[str, ...]) -> Streams:
    """The streams of a run.

    Args:
        trace: attributed; all work of its ranks and devices counts, selected or not.
        windows: of the steps: rank, device, start, duration and row (of the step).
        number: the number among the counted steps of each step, `NO_ROW` for steps that do not count.
        kinds: kinds of place that tell rows apart.
    """
    gpu, places = trace.around.gpu, trace.around.places
    grid = [pl.col("grid").arr.get(n).alias(name) for n, name in enumerate(SHAPE[:3])]
    stream, _ = numbered(gpu, "rank", "device", "stream")
    xla = places["hlo"].is_not_null()
    told = gpu.select(pl.col("name").cast(pl.String), *grid, "bytes").with_columns(
        *(places[kind].cast(pl.String).alias(kind) for kind in kinds),
        pl.Series("stream", stream),
        xla.alias("xla"),
        pl.when(xla).then(places["source"].cast(pl.String)).alias("source"),
        _placements(trace.around),
    )
    row, rows = numbered(told, "name", *kinds, *SHAPE, "stream", "xla", "source", "placement")
    devices = pl.concat([table.select("rank", "device") for table in (windows, gpu)])
    device, named = numbered(devices, "rank", "device")
    step = number[windows["row"].to_numpy().astype(np.int64)]
    begin, length = windows["start"].to_numpy(), windows["duration"].to_numpy()
    counted = (step != NO_ROW) & (length > 0)
    having = np.bincount(step[counted], minlength=max(1, int(number.max(initial=NO_ROW)) + 1))
    of_activity = np.full(gpu.height, NO_ROW, np.int64)
    start, end = gpu["start"].to_numpy(), (gpu["start"] + gpu["duration"]).to_numpy()
    # A set of rows that run at once is known by the sum of their weights, by which sets are compared over all steps.
    weight = np.random.default_rng(_SEED).integers(-(2**62), 2**62, rows.height)
    theirs = rows_of_groups(device[: windows.height], named.height)
    ours = rows_of_groups(device[windows.height :], named.height)

    def of_devices() -> Iterator[tuple[Int64, ...]]:
        for of_device, activities in zip(theirs, ours, strict=True):
            chosen = of_device[counted[of_device]]
            chosen = chosen[np.argsort(begin[chosen], kind="stable")]
            if not len(chosen) or not len(activities):
                continue
            window = _Windows(begin[chosen], begin[chosen] + length[chosen], step[chosen])
            of_activity[activities] = window.steps_at(start[activities])
            yield _concurrency(window, row[activities], start[activities], end[activities], weight)

    sets, members = _numbered_sets(_joined(of_devices()), having)
    return Streams(
        rows, *_on(gpu, (device[windows.height :], stream, row, of_activity), int(having.sum())), sets, members
    )


def _placements(trace: Attributed) -> pl.Series:
    """The placement of the HLO instruction of each activity."""
    schema = {"module": pl.Int32, "hlo": pl.String, "placement": pl.String}
    instructions = [
        module.instructions.select(
            pl.lit(number, pl.Int32).alias("module"),
            hlo="name",
            placement=pl.col("placement").cast(pl.String).fill_null(OWN_STREAM),
        ).unique("hlo", keep="first")
        for number, module in enumerate(trace.hlo)
    ]
    module = trace.programs["hlo"].gather(trace.gpu["program"].cast(pl.UInt32))
    ran = pl.DataFrame({"module": module, "hlo": trace.places["hlo"].cast(pl.String)})
    of_module = pl.concat([pl.DataFrame(schema=schema), *instructions])
    return ran.join(of_module, on=["module", "hlo"], how="left", maintain_order="left")["placement"]


@dataclass(frozen=True)
class _Windows:
    """The windows of the counted steps of one device, in order of time: starts, ends, and numbers of the steps."""

    begin: Int64
    end: Int64
    step: Int64

    def steps_at(self, times: Int64) -> Int64:
        """The number of the step in whose window each time lies, `NO_ROW` for none."""
        window = last_begun(self.begin, times)
        inside = (window != NO_ROW) & (times < self.end[window])
        return np.where(inside, self.step[window], np.int64(NO_ROW))


def _concurrency(
    windows: _Windows, row: Int64, start: Int64, end: Int64, weight: Int64
) -> tuple[Int64, Int64, Int64, Int64, Int64]:
    """The time of each set of rows in the steps of one device.

    Args:
        windows: of the steps.
        row: of each activity.
        start: of each activity.
        end: of each activity.
        weight: a random number for each row; the sum of those of a set is its code.

    Returns:
        Step, code and ns of each time; and code and row: the rows of each set.
    """
    group, opens, closes = unions(row, start, end)
    pieces = levels(
        np.concatenate([opens, windows.begin]),
        np.concatenate([closes, windows.end]),
        np.concatenate([weight[group], np.zeros(len(windows.begin), np.int64)]),
    )
    step = windows.steps_at(pieces[0])
    kept = (pieces[2] != 0) & (step != NO_ROW)
    code = pieces[2][kept]
    members = _members(code, pieces[0][kept], (group, opens, closes))
    return step[kept], code, (pieces[1] - pieces[0])[kept], *members


def _members(code: Int64, when: Int64, open_rows: tuple[Int64, Int64, Int64]) -> tuple[Int64, Int64]:
    """Code and row: the rows of each distinct set, those whose work is going on at a time when the set runs."""
    codes, example = np.unique(code, return_index=True)
    times = when[example]
    order = np.argsort(times, kind="stable")
    row, opens, closes = open_rows
    low = np.searchsorted(times[order], opens, side="left")
    count = np.searchsorted(times[order], closes, side="left") - low
    which = np.repeat(low - np.cumsum(count) + count, count) + np.arange(count.sum())
    return codes[order][which], np.repeat(row, count)


def _joined(parts: Iterator[tuple[Int64, ...]]) -> list[Int64]:
    """Parts of equally many arrays, one after the other. There may be a hundred thousand, whose objects are large."""
    joined = [np.empty(0, np.int64)] * 5
    while some := list(itertools.islice(parts, 1000)):
        joined = [np.concatenate(arrays) for arrays in zip(joined, *some, strict=True)]
    return joined


def _numbered_sets(sets: list[Int64], having: Int64) -> tuple[pl.DataFrame, pl.DataFrame]:
    """`Streams.sets` and `Streams.members`, with numbers of sets in place of codes.

    Args:
        sets: of all devices, as `_concurrency` returns them.
        having: number of devices that have each step.
    """
    step, code, ns, code_of_member, row = sets
    times = pl.DataFrame({"step": step, "code": code, "ns": ns / having[step]})
    times = times.group_by("step", "code").agg(pl.col("ns").sum()).sort("step", "code")
    rows = pl.DataFrame({"code": code_of_member, "row": row}).unique().sort("code", "row")
    numbers = pl.int_range(pl.len(), dtype=pl.Int64).alias("set")
    codes = rows.select("code").unique(maintain_order=True).with_columns(numbers)
    return (
        times.join(codes, on="code", maintain_order="left").select("step", "set", "ns"),
        rows.join(codes, on="code", maintain_order="left").select("set", "row"),
    )


def _on(gpu: pl.DataFrame, columns: tuple[Int64, Int64, Int64, Int64], steps: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """`Streams.on` and `Streams.together`.

    Args:
        columns: device, stream, row and step of each.
        steps: number of steps that count, summed over the devices.
    """
    names = ("device", "stream", "row", "step")
    inside = gpu.select("duration").with_columns(
        pl.Series(name, values) for name, values in zip(names, columns, strict=True)
    )
    inside = inside.filter(pl.col("step") != NO_ROW)
    on = inside.group_by("stream", "device", "row").agg(
        ns=pl.col("duration").sum() / max(1, steps), count=pl.len() / max(1, steps)
    )
    present = inside.select("device", "step", "stream").unique()
    together = (
        present.join(present, on=["device", "step"], suffix="_other")
        .select(one="stream", other="stream_other")
        .filter(pl.col("one") != pl.col("other"))
        .unique()
    )
    return on.sort("stream", "row"), together.sort("one", "other")
