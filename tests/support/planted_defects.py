"""Plants in the tables of a sound trace what profilers and damaged clocks do, whatever format the trace was read from.

What `faults` plants is counted in Kineto's own records; here each defect is defined on the tables, so that it means the
same in every format. `benchmarks/check_soundness.py --planted` prints which are found in which traces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from faults import changed, launch_ids
from helpers import DATA, FSDP, STACK, recording

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from thence.model.tables import Tables

    Plant = Callable[[Tables], Tables | None]
    """Makes the defective tables; None if the defect cannot be planted in this trace."""

MS = 1_000_000
SHARE = 20  # one of so many kernels is concerned: 5 %
JUMP_NS = 5_000 * MS

TRACES: dict[str, Sequence[Path]] = {
    "eager, torch 2.11": [recording("torch_eager_rank0")],
    "eager, torch 2.12": [recording("torch-2.12_torch_eager_rank0")],
    "torch.compile": [recording("torch_compile_rank0")],
    "with stacks": [STACK],
    "FSDP, one rank": [FSDP[1]],
    "FSDP, four ranks": FSDP,
    "graph replay, torch 2.11": [recording("graph_replay_rank0")],
    "graph replay, torch 2.12": [recording("torch-2.12_graph_replay_rank0")],
    "graph replay of a block": [recording("graphs/block_replay")],
    "recording of two ranks": [DATA / "recording" / "two_ranks"],
    "recording of JAX": [DATA / "jax" / "recording"],
    "Nsight, DDP": [DATA / "nsight" / "torch_ddp.sqlite.gz"],
    "Nsight, graphs": [DATA / "nsight" / "torch_graph.sqlite.gz"],
    "Nsight, JAX": [DATA / "nsight" / "jax_train.sqlite.gz"],
    "xplane": [DATA / "jax" / "jax_single_nocb.xplane.pb.gz"],
    "xplane, graphs, two GPUs": [DATA / "jax" / "jax_fsdp2.xplane.pb.gz"],
}
"""Sound traces of every producer."""


def _some_kernels(tables: Tables) -> pl.DataFrame:
    """One of twenty kernels."""
    kernels = tables.gpu.filter(pl.col("kind") == "kernel")
    chosen = np.random.default_rng(7).permutation(kernels.height)[: kernels.height // SHARE]
    return kernels[np.sort(chosen)]


def _with(tables: Tables, copies: pl.DataFrame) -> Tables:
    """With more activities, in the order that readers give them."""
    gpu = pl.concat([tables.gpu, copies]).sort("rank", "device", "start", maintain_order=True)
    return changed(tables, gpu=gpu)


def exact_duplicates(tables: Tables) -> Tables:
    return _with(tables, _some_kernels(tables))


def shifted_duplicates(tables: Tables) -> Tables:
    """The copies begin when the kernel ended, as if it had run twice."""
    copies = _some_kernels(tables)
    return _with(tables, copies.with_columns(start=pl.col("start") + pl.col("duration")))


def _part(tables: Tables) -> tuple[int, int, int]:
    """Rank, begin and end of a step in the middle; without steps, of the middle fifth of the launches with work."""
    rank = int(tables.gpu["rank"].min())  # type: ignore[arg-type]
    of_rank = pl.col("rank") == rank
    steps = tables.host.filter(of_rank, pl.col("category") == "step").sort("start")
    if steps.height >= 2:
        begin = int(steps["start"][steps.height // 2])
        return rank, begin, begin + int(steps["duration"][steps.height // 2])
    launches = launch_ids(tables).filter(of_rank)["start"]
    low, high = len(launches) * 2 // 5, len(launches) * 3 // 5
    return rank, int(launches[low]), int(launches[high])


def _of_part(tables: Tables) -> tuple[pl.DataFrame, pl.DataFrame, int]:
    """The activities and host rows of `_part`, and its length; activities by their launch where it is recorded."""
    rank, begin, end = _part(tables)
    inside = pl.col("start").is_between(begin, end, closed="left") & (pl.col("rank") == rank)
    host = tables.host.filter(inside)
    calls = tables.host.filter(pl.col("category").is_in(["runtime", "driver"]), pl.col("correlation") > 0)
    launched = tables.gpu.join(calls.select("rank", "correlation"), on=["rank", "correlation"], how="semi")
    if launched.is_empty():
        return tables.gpu.filter(inside), host, end - begin
    mine = calls.filter(inside).select("rank", "correlation").unique()
    gpu = tables.gpu.join(mine, on=["rank", "correlation"], how="semi", maintain_order="left")
    return gpu, host, end - begin


def doubled_step(tables: Tables) -> Tables | None:
    """All records of a step are there twice, the second time later by the length of the step."""
    gpu, host, length = _of_part(tables)
    later = pl.col("start") + length
    copies = host.with_columns(start=later, parent=pl.lit(None, pl.Int32))
    rows = pl.concat([tables.host.with_columns(parent=pl.lit(None, pl.Int32)), copies])
    rows = rows.sort("rank", "process", "thread", "start", maintain_order=True)
    doubled = _with(tables, gpu.with_columns(start=later))
    return changed(doubled, host=rows, events=tables.events.clear(), waits=tables.waits.clear())


def step_without_work(tables: Tables) -> Tables:
    gpu, _, _ = _of_part(tables)
    lost = gpu.select("rank", "device", "stream", "start", "correlation")
    return changed(
        tables, gpu=tables.gpu.join(lost, on=lost.columns, how="anti", maintain_order="left", nulls_equal=True)
    )


def device_clock(offset: int) -> Plant:
    """All device times later by so many ns."""

    def plant(tables: Tables) -> Tables:
        return changed(tables, gpu=tables.gpu.with_columns(start=pl.col("start") + offset))

    plant.__name__ = f"device_clock_{offset // MS:+}_ms"
    return plant


def clock_jump(offset: int) -> Plant:
    """Device times of the second half later by so many ns."""

    def plant(tables: Tables) -> Tables:
        half = pl.col("start") >= pl.col("start").median().over("rank").cast(pl.Int64)
        start = pl.when(half).then(pl.col("start") + offset).otherwise("start")
        return changed(tables, gpu=tables.gpu.with_columns(start=start))

    plant.__name__ = f"clock_jump_{offset // MS:+}_ms"
    return plant


def long_kernel(tables: Tables) -> Tables | None:
    """One kernel takes 1,000 times as long, and longer than the next ten of its stream."""
    kernels = tables.gpu.with_row_index("row").filter(pl.col("kind") == "kernel")
    stream = ["rank", "device", "stream"]
    end = pl.col("start") + pl.col("duration")
    suited = (
        kernels.sort(*stream, "start")
        .with_columns(tenth=end.shift(-10).over(stream))
        .filter(pl.col("start") + 1000 * pl.col("duration") > pl.col("tenth"))
        .sort("rank", "start")
    )
    if suited.is_empty():
        return None
    row = suited["row"][suited.height // 2]
    gpu = tables.gpu.with_row_index("row").with_columns(
        duration=pl.when(pl.col("row") == row).then(1000 * pl.col("duration")).otherwise("duration")
    )
    return changed(tables, gpu=gpu.drop("row"))


def lossy_replays(spared: int) -> Plant:
    """Launches of CUDA graphs, except so many, each lost some of their kernels: 5 %, at least one."""

    def plant(tables: Tables) -> Tables | None:
        random = np.random.default_rng(7)
        replays = tables.gpu.with_row_index("row").filter(
            pl.col("kind") == "kernel", pl.col("correlation") > 0, pl.len().over("rank", "correlation") >= 5
        )
        calls = tables.host.filter(pl.col("name").cast(pl.String).str.contains("GraphLaunch"))
        replays = replays.join(calls.select("rank", "correlation"), on=["rank", "correlation"], how="semi")
        if replays.is_empty():
            return None
        lost: list[int] = []
        launches = replays.partition_by("rank", "correlation", maintain_order=True)
        for launch in launches[spared:]:
            count = max(1, launch.height // SHARE)
            lost += launch["row"].to_numpy()[random.permutation(launch.height)[:count]].tolist()
        gpu = tables.gpu.with_row_index("row").filter(~pl.col("row").is_in(lost)).drop("row")
        return changed(tables, gpu=gpu)

    plant.__name__ = f"lossy_replays_but_{spared}"
    return plant


def divided_by_1000(tables: Tables) -> Tables:
    """As if times in us were taken for times in ns."""
    shorter = [pl.col(name) // 1000 for name in ("start", "duration")]
    return changed(tables, gpu=tables.gpu.with_columns(shorter), host=tables.host.with_columns(shorter))


DEFECTS: tuple[Plant, ...] = (
    exact_duplicates, shifted_duplicates, doubled_step, step_without_work,
    device_clock(MS), device_clock(-MS), device_clock(30 * MS), device_clock(-30 * MS),
    clock_jump(JUMP_NS), clock_jump(-JUMP_NS), long_kernel, lossy_replays(1), lossy_replays(0), divided_by_1000,
)  # fmt: skip
