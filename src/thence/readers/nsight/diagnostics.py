"""What Nsight Systems says of its own recording: errors, and records that it lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.model.losses import Loss, says_lost

if TYPE_CHECKING:
    from thence.readers.nsight.store import Store

__all__ = ["diagnosed"]

_TABLE = "DIAGNOSTIC_EVENT"
_WARNING, _ERROR = 2, 3  # ENUM_DIAGNOSTIC_SEVERITY_LEVEL
_MOST = 20


def diagnosed(store: Store) -> tuple[Loss, ...]:
    """Warnings and errors of the recording that say that records are missing.

    Raises:
        DamagedInput: the table cannot be read.
    """
    events = store.frame(_TABLE, ("severity",), ("text",)).filter(
        pl.col("severity").is_in([_WARNING, _ERROR]), pl.col("text").is_not_null()
    )
    texts = events["text"].cast(pl.String)
    counted = texts.filter(texts.map_elements(says_lost, pl.Boolean)).value_counts(sort=True)
    return tuple(
        Loss("dropped", store.name, int(n), f"{store.name}: Nsight Systems reports: {text.strip()}")
        for text, n in counted.head(_MOST).rows()
    )
