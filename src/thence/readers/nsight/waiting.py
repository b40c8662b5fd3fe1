"""Facts in an export about calls that wait, and about CUDA events that are recorded and waited for.

CUPTI_ACTIVITY_KIND_SYNCHRONIZATION holds waits of hosts and streams, CUPTI_ACTIVITY_KIND_CUDA_EVENT the records
of events. A wait is for the record with the same process, eventId and eventSyncId; if the export lists records but
not this one, the event was never recorded. nsys 2025.3 writes cudaStreamSynchronize with the type of
cudaStreamWaitEvent and no event, so the type of a row is not read: the API call with the row's correlation id
determines the kind of the wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.model.waiting import SAID, said_of_calls
from thence.readers.nsight.store import process_of

if TYPE_CHECKING:
    from thence.readers.nsight.processes import Ranks
    from thence.readers.nsight.store import Store

_SYNCHRONIZATIONS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
_RECORDS = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
_COLUMNS = ("globalPid", "correlationId", "deviceId", "streamId", "eventId", "eventSyncId")
_NONE = (1 << 32) - 1
"""Value that the exporter writes if there is no stream, event or record."""


def said_of_waiting(store: Store, ranks: Ranks) -> pl.DataFrame:
    """The facts that an export records about API calls, as `thence.model.waiting.SAID`.

    Raises:
        DamagedInput: a table cannot be read.
    """
    waits = _rows(store, _SYNCHRONIZATIONS)
    records = _rows(store, _RECORDS)
    lists_records = bool(store.columns(_RECORDS))
    made = records.drop_nulls(["event", "record"]).select(
        "process", "event", "record", recorded_by="correlation", recorded_on="stream"
    )
    made = made.unique(["process", "event", "record"], keep="none")
    keys = ["process", "event", "record"]
    waits = waits.join(made, on=keys, how="left", maintain_order="left").with_columns(
        never_recorded=pl.lit(lists_records) & pl.col("event").is_not_null() & pl.col("recorded_by").is_null()
    )
    both = pl.concat([waits, records], how="diagonal")
    return said_of_calls(both.with_columns(ranks.column(both["process"])).select(list(SAID)).to_dict())


def _rows(store: Store, table: str) -> pl.DataFrame:
    frame = store.frame(table, _COLUMNS)

    def known(column: str) -> pl.Expr:
        return pl.when(pl.col(column).is_between(0, _NONE - 1)).then(pl.col(column))

    return frame.select(
        process_of(pl.col("globalPid")).fill_null(0).alias("process"),
        known("correlationId").alias("correlation"),
        pl.when(pl.col("deviceId").is_between(0, (1 << 31) - 1)).then("deviceId").alias("device"),
        known("streamId").alias("stream"),
        known("eventId").alias("event"),
        known("eventSyncId").alias("record"),
    )
