"""How much larger than what is stored decompressed content may become: the cap of every compressed input.

Gzip makes a thousand bytes of one, xz seven thousand, and a few bytes of Parquet claim millions of rows. Real
traces stay below 40, but may repeat themselves: the cap leaves room, and an option raises it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thence.errors import DamagedInput, UsageError

if TYPE_CHECKING:
    import polars as pl

    from thence.units import Bytes

__all__ = ["DEFAULT", "Expansion", "TooLarge", "decoded_bytes"]

_ALWAYS: Bytes = 64 << 20
"""Decompressed bytes that are accepted whatever the ratio."""


class TooLarge(DamagedInput):
    """An input that decompresses to more than is accepted."""


@dataclass(frozen=True)
class Expansion:
    """The cap.

    Attributes:
        ratio: most decompressed bytes for each stored byte; `_ALWAYS` bytes are accepted in any case.
    """

    ratio: int = 200

    def __post_init__(self) -> None:
        if self.ratio < 1:
            raise UsageError(
                f"decompressed data is at least as large as stored: {self.ratio} is less than 1"
            )

    def most(self, stored: Bytes) -> Bytes:
        """Decompressed bytes that are accepted of so many stored ones."""
        return max(_ALWAYS, self.ratio * stored)

    def check(self, path: str, stored: Bytes, decompressed: Bytes, what: str = "") -> None:
        """Refuses content that is larger than the cap.

        Args:
            path: the input as the user named it.
            stored: bytes, compressed.
            decompressed: bytes, so far or as stated.
            what: the member of the input that it is about.

        Raises:
            TooLarge: it is.
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
    """At least as many bytes as a table of such rows takes in memory; texts count as their references alone."""
    import polars as pl

    return rows * sum(16 if dtype in (pl.String, pl.Binary) else 8 for dtype in schema.values())
