"""The cap on how much larger than its stored size the decompressed content of an input may be.

One stored byte can decompress to a thousand bytes with gzip and to seven thousand with xz, and a few bytes of
Parquet can claim millions of rows. Real traces stay below a ratio of 40, but a repetitive trace may exceed it:
the default cap leaves room for that, and an option raises it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thence.errors import DamagedInput, UsageError

if TYPE_CHECKING:
    import polars as pl

    from thence.units import Bytes

_ALWAYS: Bytes = 64 << 20
"""Decompressed bytes that are accepted whatever the ratio."""


class TooLarge(DamagedInput):
    """An input that decompresses to more than the cap."""


@dataclass(frozen=True)
class Expansion:
    """The cap.

    Attributes:
        ratio: maximum number of decompressed bytes for each stored byte; `_ALWAYS` bytes are accepted in any case.
    """

    ratio: int = 200

    def __post_init__(self) -> None:
        if self.ratio < 1:
            raise UsageError(f"the expansion limit must be at least 1, not {self.ratio}")

    def most(self, stored: Bytes) -> Bytes:
        """Maximum number of decompressed bytes for this many stored bytes."""
        return max(_ALWAYS, self.ratio * stored)

    def check(self, path: str, stored: Bytes, decompressed: Bytes, what: str = "") -> None:
        """Refuses content that is larger than the cap.

        Args:
            path: the input as the user named it.
            stored: compressed bytes.
            decompressed: decompressed bytes, so far or as the input states them.
            what: name of the member of the input, for the message.

        Raises:
            TooLarge: the content is larger than the cap.
        """
        if decompressed <= self.most(stored):
            return
        subject = f"{what}: " if what else ""
        raise TooLarge(
            path,
            f"{subject}decompresses to more than {self.ratio} times its size and {_ALWAYS >> 20} MiB, as damaged or "
            "hostile files do; --max-expansion (max_expansion= in thence.open) sets another limit",
        )


DEFAULT = Expansion()


def decoded_bytes(rows: int, schema: pl.Schema) -> Bytes:
    """A lower bound of the bytes that a table takes in memory; of texts, only the references are counted."""
    import polars as pl

    return rows * sum(16 if dtype in (pl.String, pl.Binary) else 8 for dtype in schema.values())
