"""What recomputing a module in the backward pass would save, and what time it would take.

A checkpoint around a module returns the module's activations after its forward pass, and makes them again when its
backward pass begins. So each of its activations is taken out of the memory over time from the end of the module's
forward pass to the first allocation of its backward pass; the last one, the module's result, stays, because what
follows uses it. In the backward pass, what a checkpoint made again is returned when the backward function that needs it
returns; without a checkpoint the autograd engine keeps it until it has reduced the function's results to their shapes.

What is saved is the peak before less the peak after: less than the activations if the peak moves to another time. The
time is the GPU time of the module's forward pass in the same trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.grouping.kernel_groups import communicates
from thence.analysis.memory.places import DEVICE, next_start
from thence.model.columns import values_or
from thence.model.intervals import NO_ROW, last_begun
from thence.model.phases import Phase

if TYPE_CHECKING:
    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed

_ENGINE = "autograd::engine::evaluate_function: "
"""Begins the names of the engine's ranges, each of which has the range of its backward function inside."""
MAX_MODULES = 40
"""Modules that are tried: those with most bytes at the peak."""
RECOMPUTED = {
    "rank": pl.Int32(), "device": pl.Int32(), "module": pl.String(), "saved_bytes": pl.Int64(),
    "activation_bytes": pl.Int64(), "forward_ns": pl.Int64(),
}  # fmt: skip
"""Columns of `recomputed`."""
_NEVER = np.iinfo(np.int64).max


def recomputed(trace: Attributed, placed: pl.DataFrame, totals: pl.DataFrame, peaks: pl.DataFrame) -> pl.DataFrame:
    """Bytes and time of recomputing each module, in the columns of `RECOMPUTED`; most saved first.

    Args:
        placed: allocations with module, kind, phase and step, and ``live`` (whether they are live at the peak).
        totals: as `thence.analysis.memory.moments.readings` returns them.
        peaks: the peak of each allocator.
    """
    times = _forward_times(trace)
    answers = []
    for rank, device, allocator, row in peaks.select(*DEVICE, "row").iter_rows():
        here = [pl.col(name) == value for name, value in zip(DEVICE, (rank, device, allocator), strict=True)]
        of_device = placed.filter(*here).with_columns(module=pl.col("module").cast(pl.String))
        history = totals.filter(*here)
        first, allocated = int(history["row"][0]), history["allocated"].to_numpy()
        peak = int(allocated[row - first])
        activations = of_device.filter(pl.col("kind") == "activation", pl.col("module").is_not_null())
        activations = activations.with_columns(returned=_returned(trace, activations, history))
        for module in _candidates(activations.filter("live")):
            inside = (pl.col("module") == module) | pl.col("module").str.starts_with(f"{module}/")
            taken, forwards = _taken(
                activations.filter(inside), of_device.filter(inside, pl.col("phase") == Phase.BACKWARD.value)
            )
            opened, closed, size = (
                taken[name].to_numpy() - (0 if name == "bytes" else first) for name in taken.columns
            )
            change = np.zeros(len(allocated) + 1, np.int64)
            np.subtract.at(change, opened, size)
            np.add.at(change, closed, size)
            saved = peak - int((allocated + np.cumsum(change)[:-1]).max())
            bytes_live = int(activations.filter(inside, "live")["bytes"].sum())
            answers.append(
                (rank, device, module, saved, bytes_live, _mean(times.get((rank, device, module)), forwards))
            )
    frame = pl.DataFrame(answers, schema=RECOMPUTED, orient="row")
    return frame.filter(pl.col("saved_bytes") > 0).sort(
        "saved_bytes", "rank", "device", "module", descending=[True, False, False, False]
    )


def _candidates(live: pl.DataFrame) -> list[str]:
    """The modules with most activations at the peak, with those around them; all but the outermost."""
    sums: dict[str, int] = {}
    by_module = live.group_by("module").agg(pl.col("bytes").sum()).sort("module")
    for module, size in by_module.iter_rows():
        parts = module.split("/")
        for length in range(2, len(parts) + 1):
            path = "/".join(parts[:length])
            sums[path] = sums.get(path, 0) + size
    return sorted(sums, key=lambda path: (-sums[path], path))[:MAX_MODULES]


def _taken(activations: pl.DataFrame, backward: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """The parts of activations' lives that recomputation takes out (from row, to row, bytes), and the forward passes.

    Args:
        activations: those of one module and device, with ``returned`` as `_returned` has it.
        backward: what the backward pass of the module allocated.
    """
    begins = np.sort(backward["opened"].drop_nulls().cast(pl.Int64).to_numpy())
    opened = activations["opened"].cast(pl.Int64).to_numpy()
    closed = activations["closed"].cast(pl.Int64).to_numpy()
    again = np.minimum(next_start(begins, opened), closed)
    # Each forward pass of the module is followed by one backward pass; the last one in it is the result.
    order = np.argsort(opened, kind="stable")
    passes = np.searchsorted(begins, opened[order])
    last = np.append(passes[1:] != passes[:-1], True)[: len(order)]
    results = order[last]
    ends = _until(opened, order, last)
    kept = np.ones(len(opened), np.bool_)
    kept[results] = False
    kept &= again > ends
    size, returned = activations["bytes"].to_numpy(), activations["returned"].to_numpy()
    earlier = kept & (returned >= again) & (returned < closed)
    parts = pl.DataFrame(
        {
            "opened": np.concatenate([ends[kept], returned[earlier]]),
            "closed": np.concatenate([again[kept], closed[earlier]]),
            "bytes": np.concatenate([size[kept], size[earlier]]),
        }
    )
    return parts, len(results)


def _returned(trace: Attributed, activations: pl.DataFrame, history: pl.DataFrame) -> pl.Series:
    """The first change after the backward function that uses each activation last; its end if that is not known."""
    closed = activations["closed"].cast(pl.Int64).to_numpy()
    end = activations["end"].to_numpy()
    rank = -1 if activations.is_empty() else int(activations["rank"][0])
    host = trace.host.with_row_index("row").filter(pl.col("rank") == rank, pl.col("category") == "op")
    engine = host.filter(pl.col("name").cast(pl.String).str.starts_with(_ENGINE)).sort("start", maintain_order=True)
    inner = host.join(engine.select(parent=pl.col("row").cast(pl.Int32)), on="parent").sort("start")
    inner = inner.unique("parent", keep="first", maintain_order=True)
    until = engine.select(row=pl.col("row").cast(pl.Int32), begin="start", until=pl.col("start") + pl.col("duration"))
    both = until.join(
        inner.select(row="parent", function_end=pl.col("start") + pl.col("duration")), on="row", maintain_order="left"
    )
    if both.is_empty():
        return pl.Series(closed)
    last = last_begun(both["begin"].to_numpy(), end)
    inside = (last != NO_ROW) & (end <= both["until"].to_numpy()[last])
    changes = int(history["row"][0]) + np.searchsorted(
        history["start"].to_numpy(), values_or(both["function_end"], _NEVER)[last], side="right"
    )
    return pl.Series(np.where(inside, np.minimum(changes, closed), closed))


def _until(opened: Int64, order: Int64, last: Int64) -> Int64:
    """The row at which the last activation of the same forward pass is allocated, for each."""
    ends = np.empty(len(opened), np.int64)
    positions = np.flatnonzero(last)
    ends[order] = opened[order[positions[np.searchsorted(positions, np.arange(len(order)))]]] if len(order) else 0
    return ends


def _forward_times(trace: Attributed) -> dict[tuple[int, int, str], int]:
    """GPU time of all forward passes of each module (ns) without communication, by rank, device and module."""
    work = trace.gpu.select("rank", "device", "duration").with_columns(
        module=trace.places["module"].cast(pl.String),
        phase=trace.places["phase"].cast(pl.String),
        moves=communicates(trace),
    )
    forward = work.filter(~pl.col("moves"), pl.col("phase") == Phase.FORWARD.value, pl.col("module").is_not_null())
    times: dict[tuple[int, int, str], int] = {}
    sums = forward.group_by("rank", "device", "module").agg(pl.col("duration").sum()).sort("rank", "device", "module")
    for rank, device, module, duration in sums.iter_rows():
        parts = module.split("/")
        for length in range(2, len(parts) + 1):
            key = rank, device, "/".join(parts[:length])
            times[key] = times.get(key, 0) + duration
    return times


def _mean(total: int | None, passes: int) -> int | None:
    return None if total is None or not passes else round(total / passes)
