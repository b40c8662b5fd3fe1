"""Finds the launches to which a buffer of in-kernel events can belong: by kernel, grid, block, device and process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from thence.errors import MissingData

if TYPE_CHECKING:
    from thence.inside.decoding import Decoded
    from thence.model.timeline import Timeline


class KernelLaunches:
    """The kernel launches of a trace, looked up by kernel name and cached for all buffers.

    Attributes:
        recorded: the trace.
    """

    def __init__(self, recorded: Timeline) -> None:
        self.recorded = recorded
        self._named: dict[str, pl.DataFrame] = {}

    def of(self, name: str, decoded: Decoded) -> pl.DataFrame:
        """The launches of a buffer's kernel in order of start.

        Args:
            name: name of the buffer, for the error message.
            decoded: content of the buffer.

        Returns:
            id (row of gpu), rank, device, duration, corrected (start on the timeline), and, on the clock as
            recorded, start (of the kernel) and call (start of the launch call; the kernel's start if there is none).

        Raises:
            MissingData: the trace has no such launch.
        """
        description = decoded.description
        pid = description.launch.get("pid")
        chosen = _of_process(self.recorded, self._of_kernel(description.kernel), pid)
        for column, size in (("grid", description.grid), ("block", description.block)):
            wanted = pl.lit(list(size), pl.Array(pl.UInt32, 3))
            if size != (1, 1, 1):
                chosen = chosen.filter((pl.col(column) == wanted).fill_null(value=True))
        if knows_device(decoded):
            of_device = chosen.filter(pl.col("device") == description.device)
            chosen = chosen if of_device.is_empty() else of_device
        if chosen.is_empty():
            what = f"of {description.kernel!r}" if description.kernel else "of a kernel"
            raise MissingData(
                f"{name}: the trace has no launch {what} with grid {description.grid} and block"
                f" {description.block}, so its ranges cannot be drawn"
            )
        correction = pl.lit(0, pl.Int64)
        for rank, ns in self.recorded.corrections.items():
            correction = pl.when(pl.col("rank") == rank).then(ns).otherwise(correction)
        return (
            chosen.select(
                "id", "rank", "device", "duration", corrected="start", start=pl.col("start") + correction,
                call=pl.coalesce("call", "start") + correction,
            )
            .sort("start")
        )  # fmt: skip

    def _of_kernel(self, kernel: str) -> pl.DataFrame:
        """Rows of gpu with this kernel, on the timeline's clock, with the start of their launch call."""
        if kernel not in self._named:
            self._named[kernel] = _with_calls(self.recorded, _named(self.recorded, kernel))
        return self._named[kernel]


def _with_calls(recorded: Timeline, launches: pl.DataFrame) -> pl.DataFrame:
    calls = (
        recorded.trace.host.filter(pl.col("category").is_in(["runtime", "driver"]))
        .join(launches, on=["rank", "correlation"], how="semi")
        .group_by("rank", "correlation")
        .agg(call=pl.col("start").min())
    )
    return launches.join(calls, on=["rank", "correlation"], how="left", maintain_order="left")


def _named(recorded: Timeline, kernel: str) -> pl.DataFrame:
    """Rows of gpu whose kernel has this name, exactly or as a word of a longer name; all kernels if it is empty."""
    gpu = recorded.trace.gpu.with_row_index("id").filter(pl.col("kind") == "kernel")
    full = pl.col("name").cast(pl.String)
    if not kernel:
        return gpu
    chosen = gpu.filter(full == kernel)
    word = pl.escape_regex(kernel)
    if chosen.is_empty():  # with its return type and parameters, as demanglers write it
        pattern = rf"(^|[^A-Za-z0-9_]){word}([^A-Za-z0-9_]|$)"
        chosen = gpu.filter(full.str.contains(pattern))
    if chosen.is_empty():  # as Mosaic GPU names it
        pattern = rf"(^|[^A-Za-z0-9]){word}([^A-Za-z0-9]|$)"
        chosen = gpu.filter(full.str.contains(pattern) & full.str.contains("mosaic", literal=True))
    return chosen


def _of_process(recorded: Timeline, launches: pl.DataFrame, process: Any) -> pl.DataFrame:
    """The launches of the ranks with this process id; all launches if the trace does not have it."""
    process = positive_or_none(process)
    if process is None or launches["rank"].n_unique() < 2:
        return launches
    ranks = recorded.trace.host.filter(pl.col("process") == process)["rank"].unique()
    return launches.filter(pl.col("rank").is_in(ranks.implode())) if len(ranks) else launches


def knows_device(decoded: Decoded) -> bool:
    """Whether a buffer's description tells on which device its kernel ran."""
    return not isinstance(decoded.description.launch.get("device"), str)  # "one of 8"


def positive_or_none(value: Any) -> int | None:
    """The value if it is a positive int below 2^62, else None: descriptions may hold anything."""
    return value if type(value) is int and 0 < value < 1 << 62 else None
