"""Processes, threads and devices of an export, and the rank of each process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from thence.model.tables import Device
from thence.readers.kineto.metadata import rank_of
from thence.readers.nsight.store import process_of, thread_of
from thence.readers.nsys_jax.programs import launchers
from thence.units import listed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.readers.nsight.store import Store


@dataclass(frozen=True)
class Ranks:
    """Ranks of the processes.

    Attributes:
        of_process: process id to rank, for processes that used a device.
        warnings: assumptions that were made about ranks.
    """

    of_process: Mapping[int, int]
    warnings: tuple[str, ...]

    def column(self, process: pl.Series) -> pl.Series:
        """Rank of each process; processes that used no device get the lowest rank."""
        first = min(self.of_process.values(), default=0)
        return process.replace_strict(
            list(self.of_process), list(self.of_process.values()), default=first, return_dtype=pl.Int32
        ).alias("rank")


def ranks(used: list[int], named: pl.DataFrame, of_nccl: Mapping[int, int], file_name: str) -> Ranks:
    """The rank of each process that used a device.

    Sources in order of preference: the names of XLA's launching threads, NCCL's communicators, and, for
    a single process, the file name. If a rank is missing or occurs twice, processes are numbered in the order of
    their ids.

    Args:
        used: ids of the processes that used a device.
        named: names of threads: process, thread, name.
        of_nccl: rank of each process in NCCL's largest communicator.
        file_name: the input as the user named it.
    """
    rank_by_process = {}
    for process in used:
        launching_threads = named.filter(pl.col("process") == process)
        launching_threads = launching_threads.filter(pl.col("name").str.starts_with("XlaLauncher:"))
        if launching_threads.height:
            columns = {"process": "PID", "thread": "TID", "name": "Name"}
            rank_by_process[process] = launchers(launching_threads.rename(columns), None).rank
        elif process in of_nccl:
            rank_by_process[process] = of_nccl[process]
    if not rank_by_process and len(used) == 1:
        rank_by_process[used[0]] = rank_of({}, file_name) or 0
    if len(rank_by_process) == len(used) and len(set(rank_by_process.values())) == len(used):
        return Ranks(rank_by_process, ())
    counted = {process: number for number, process in enumerate(sorted(used))}
    shown = listed([f"{rank} is process {process}" for process, rank in counted.items()])
    return Ranks(counted, (f"does not name the ranks of its processes; numbered by process id: {shown}",))


def threads(store: Store, of_nvtx: pl.DataFrame) -> pl.DataFrame:
    """Names of threads: process, thread, name (String); names given through NVTX take precedence.

    Args:
        of_nvtx: names that the program gave through NVTX, in the same columns.
    """
    frame = store.frame("ThreadNames", ("nameId", "globalTid"))
    texts = store.strings(frame["nameId"])
    recorded = frame.join(texts, left_on="nameId", right_on="id", maintain_order="left").select(
        process_of(pl.col("globalTid")).alias("process"),
        thread_of(pl.col("globalTid")).alias("thread"),
        pl.col("value").cast(pl.String).alias("name"),
    )
    return (
        pl.concat([of_nvtx.reverse(), recorded])
        .drop_nulls()
        .unique(["process", "thread"], keep="first", maintain_order=True)
    )


def devices(store: Store, gpu: pl.DataFrame) -> tuple[Device, ...]:
    """Properties of every device that has activities.

    Args:
        gpu: columns rank and device, which is CUDA's device number.
    """
    numbers = ("id", "cuDevice", "totalMemory", "smCount", "computeMajor", "computeMinor")
    frame = store.frame("TARGET_INFO_GPU", numbers, ("name",))
    properties = {}
    for number, cuda, memory, multiprocessors, major, minor, name in frame.rows():
        capability = None if major is None else f"{major}.{minor or 0}"
        properties[number if cuda is None else cuda] = (name, memory, multiprocessors, capability)
    used = gpu.select("rank", "device").unique().sort("rank", "device").rows()
    nothing = (None, None, None, None)
    return tuple(Device(rank, device, *properties.get(device, nothing)) for rank, device in used)
