"""In-kernel ranges as events of Chrome JSON: a process for each SM of a launch, a thread for each trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import polars as pl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from thence.model.timeline import Phases

_FIRST_PID = 1_500_000_000
"""Larger than the ids of processes and devices."""
_PIDS_OF_A_LAUNCH = 100_000
_CHUNK_ROWS = 100_000


def inside_lines(
    phases: Phases, number: int, quoted: Callable[[pl.Series], pl.Series], microseconds: Callable[[pl.Expr], pl.Expr]
) -> Iterator[tuple[int, pl.Series]]:
    """Yields the number of rows done and lines of JSON.

    Args:
        phases: the in-kernel ranges of one launch.
        number: number of the launch in the file.
        quoted: converts a column of texts to JSON strings.
        microseconds: converts a column of ns to decimal microseconds.
    """
    yield 0, pl.Series([*_named(phases, number)], dtype=pl.String)
    base = _FIRST_PID + number * _PIDS_OF_A_LAUNCH
    per_block = _per_block(phases)
    arguments = {"SM": "sm", "block": "block", "index": "index", "net ns": "net_ns"}
    written = [
        pl.concat_str(pl.lit(f', "{key}": '), pl.col(column).cast(pl.String)) for key, column in arguments.items()
    ]
    state = pl.when(~pl.col("closed")).then(pl.lit(', "state": "entered, never left"'))
    line = pl.concat_str(
        pl.lit('{"ph": "X", "cat": "in_kernel", "name": '),
        pl.col("name").map_batches(quoted, return_dtype=pl.String),
        pl.lit(', "pid": '), (base + 1 + pl.col("sm").cast(pl.Int64).fill_null(-1)).cast(pl.String),
        pl.lit(', "tid": '),
        (pl.col("block").cast(pl.Int64) * per_block + pl.col("index")).cast(pl.String),
        pl.lit(', "ts": '), microseconds(pl.col("start_ns")),
        pl.lit(', "dur": '), microseconds(pl.col("duration_ns")),
        pl.lit(', "args": {'), pl.concat_str(*written, state, ignore_nulls=True).str.slice(2),
        pl.lit("}}"),
    )  # fmt: skip
    for frame in phases.ranges.iter_slices(_CHUNK_ROWS):
        yield frame.height, frame.select(line).to_series()


def _per_block(phases: Phases) -> int:
    highest = phases.ranges["index"].max()
    return highest + 1 if isinstance(highest, int) else 1


def _named(phases: Phases, number: int) -> Iterator[str]:
    """Yields metadata events with the names of processes and threads."""
    base = _FIRST_PID + number * _PIDS_OF_A_LAUNCH
    per_block = _per_block(phases)
    traces = phases.ranges.select("sm", "block", "index").unique().sort(pl.all(), nulls_last=True)
    for sm in traces["sm"].unique(maintain_order=True).to_list():
        name = f"inside {phases.title}: SM {'unknown' if sm is None else sm}"
        pid = base + 1 + (-1 if sm is None else sm)
        yield _metadata("process_name", pid, 0, {"name": name})
        yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
    for sm, block, index in traces.rows():
        pid = base + 1 + (-1 if sm is None else sm)
        name = f"block {block} {phases.scope} {index}"
        yield _metadata("thread_name", pid, block * per_block + index, {"name": name})


def _metadata(what: str, pid: int, tid: int, arguments: dict[str, object]) -> str:
    event = {"ph": "M", "name": what, "ts": 0.0, "pid": pid, "tid": tid, "args": arguments}
    return msgspec.json.encode(event).decode()
