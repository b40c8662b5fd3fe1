"""Losses that Nsight Systems reports in the diagnostics of its recording."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.model.losses import Loss, says_lost

if TYPE_CHECKING:
    from thence.readers.nsight.store import Store

_TABLE = "DIAGNOSTIC_EVENT"
_WARNING, _ERROR = 2, 3  # ENUM_DIAGNOSTIC_SEVERITY_LEVEL
_MOST = 20


def diagnosed(store: Store) -> tuple[Loss, ...]:
    """Losses for the recording's warnings and errors that report missing records; at most the 20 most frequent.

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
