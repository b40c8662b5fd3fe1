"""What NCCL's Inspector plugin recorded of collectives: one file for each process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Mapping

RECORDS: Mapping[str, pl.DataType] = {
    "collective": pl.String(),
    "bytes": pl.Int64(),
    "group_size": pl.Int32(),
    "channels": pl.Int64(),
    "called": pl.Int64(),
    "seen": pl.Int64(),
    "executed": pl.Int64(),
}
"""Columns of `InspectorRecord.rows`: the collective as NCCL names it; its message size, which is the input of a rank,
or the output for a reduce-scatter; ranks of its communicator; number of channels, each of which is a block of its
kernel; Unix time (ns) at which NCCL noted it, when it had launched the kernel, and at which it saw the kernel run; and
ns from the start of a channel of the kernel to its end, the longest of all channels, null if the GPU's clock was not
read."""


@dataclass(frozen=True)
class InspectorRecord:
    """The collectives of one process that the plugin wrote: not all that there were.

    Attributes:
        source: the file.
        process: its number in the operating system.
        rows: in the order of the file, in the columns `RECORDS`.
        untimed: number of further collectives that were written without times.
    """

    source: str
    process: int
    rows: pl.DataFrame
    untimed: int
