"""Collectives of a recording: marks whose metadata say what was moved.

``thence.torch.label_collectives()`` makes such a mark around every collective of PyTorch; the kernels
that it launched are found by the attribution.
"""

from __future__ import annotations

from typing import Any

import msgspec
import polars as pl

from thence.model.tables import COLLECTIVES
from thence.readers.kineto.collectives import described_by_metadata

__all__ = ["described_collectives"]

_NAME = '"Collective name"'


def described_collectives(metadata: pl.Series) -> pl.DataFrame:
    """Rows of `COLLECTIVES` without a device activity.

    Args:
        metadata: JSON of the mark behind each host row, null where there is none. What is no object
            is passed over.
    """
    rows = metadata.to_frame("text").with_row_index("host")
    rows = rows.filter(pl.col("text").str.contains(_NAME, literal=True).fill_null(value=False))
    texts = rows["text"].unique(maintain_order=True)
    known = {text: facts for text in texts if (facts := _facts(text)) is not None}
    rows = rows.filter(pl.col("text").is_in(list(known)))
    if rows.is_empty():
        return COLLECTIVES.empty()
    described = described_by_metadata(rows["host"], [known[text] for text in rows["text"]])
    return described.with_columns(host=pl.col("gpu"), gpu=pl.lit(None, pl.Int32()))


def _facts(text: str) -> dict[str, Any] | None:
    try:
        facts = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return (
        facts if isinstance(facts, dict) and isinstance(facts.get("Collective name"), str) else None
    )
