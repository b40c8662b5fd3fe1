"""Collectives of a recording: marks whose metadata say what was moved.

A recording has such a mark around every collective of PyTorch (`thence.torch.label_collectives`); the
kernels that it launched are found by the attribution. Which collective of its group each one is stands
in a table of its own, ``collectives``, by the serial of the mark; older recordings have it in the
metadata.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from thence.model.tables import COLLECTIVES
from thence.readers.kineto.collectives import described_by_metadata

if TYPE_CHECKING:
    from thence.readers.recording.host import HostRanges

__all__ = ["described_collectives"]

_NAME = '"Collective name"'


def described_collectives(host: HostRanges, numbers: pl.DataFrame) -> pl.DataFrame:
    """Rows of `COLLECTIVES` without a device activity.

    Metadata that are no object are passed over.

    Args:
        host: of the process.
        numbers: the table ``collectives`` of its recording.
    """
    rows = host.table.select(text=pl.col("metadata").cast(pl.String)).with_row_index("host")
    rows = rows.filter(pl.col("text").str.contains(_NAME, literal=True).fill_null(value=False))
    texts = rows["text"].unique(maintain_order=True)
    known = {text: facts for text in texts if (facts := _facts(text)) is not None}
    rows = rows.filter(pl.col("text").is_in(list(known)))
    if rows.is_empty():
        return COLLECTIVES.empty()
    # Few texts describe many calls: each is read once.
    places = pl.Series(range(len(known)), dtype=pl.Int64)
    described = described_by_metadata(places, list(known.values()))
    which = rows["text"].replace_strict(list(known), places, return_dtype=pl.UInt32)
    sequence = (
        host.serial[rows["host"]]
        .to_frame()
        .join(
            numbers.drop_nulls().unique("serial"), on="serial", how="left", maintain_order="left"
        )["sequence"]
    )
    return described[which].with_columns(
        host=rows["host"].cast(pl.Int32),
        gpu=pl.lit(None, pl.Int32()),
        sequence=pl.coalesce(sequence, "sequence"),
    )


def _facts(text: str) -> dict[str, Any] | None:
    try:
        facts = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return (
        facts if isinstance(facts, dict) and isinstance(facts.get("Collective name"), str) else None
    )
