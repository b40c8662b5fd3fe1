"""Calls of collectives that PyTorch's flight recorder kept: one file for each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from thence.model.collectives import NUMBERS, TEXTS

if TYPE_CHECKING:
    from collections.abc import Mapping

CALLS: Mapping[str, pl.DataType] = {
    "record": pl.Int64(),
    "backend": pl.String(),
    "created": pl.Int64(),
    "peers": pl.Boolean(),
    "unfinished": pl.Boolean(),
    "line": pl.String(),
    "bytes": pl.Int64(),
    **dict.fromkeys(TEXTS, pl.String()),
    **dict.fromkeys(NUMBERS, pl.Int64()),
}
"""Columns of `FlightRecord.calls`: the number of the call; the library (``nccl``); Unix time (ns) of the call; whether
it is a send, a receive or a batch of them; whether it had begun and not ended; the user's line that made a call that
had not ended, null for all others; and what describes a collective."""


@dataclass(frozen=True)
class FlightRecord:
    """The calls of one process.

    Attributes:
        source: the file.
        rank: of the process, by the file's name; None if the name holds none.
        calls: in the order in which they were made, in the columns `CALLS`.
    """

    source: str
    rank: int | None
    calls: pl.DataFrame

    @property
    def overwritten(self) -> int:
        """How many calls were made before the first that is left: the recorder keeps only the last ones."""
        return int(self.calls["record"][0]) if self.calls.height else 0

    @property
    def left_out(self) -> bool:
        """Whether calls between its first and its last are missing, as in a dump of unfinished calls only."""
        numbers = self.calls["record"]
        return bool(len(numbers) and numbers[-1] - numbers[0] + 1 > len(numbers))
