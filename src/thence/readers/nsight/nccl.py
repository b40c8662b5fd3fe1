"""Message size, communicator and communicator size of collectives, from the payloads of NCCL's NVTX ranges.

NCCL describes its payloads by schemas (nccl/src/include/nvtx_payload_schemas.h). nsys exports a
payload as JSON (``jsonText``) with --include-json=true, or as bytes (``binaryData``) with
--include-blobs=true. The bytes are a header and the payload. The header holds schema id and size (16 bytes), or
schema id, size and a pointer (24 bytes); see nvtxPayloadData_t in nvToolsExtPayload.h. The payload is decoded
by the exported schema if its length is the size in the header.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.tables import COLLECTIVES
from thence.readers.nsight.ranges import NCCL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.readers.nsight.store import Store

COLLECTIVE_NAMES = {
    "ncclAllReduce": "all_reduce", "ncclAllGather": "all_gather", "ncclReduceScatter": "reduce_scatter",
    "ncclBroadcast": "broadcast", "ncclBcast": "broadcast", "ncclReduce": "reduce",
    "ncclAlltoAll": "all_to_all", "ncclAllToAll": "all_to_all", "ncclGather": "gather",
    "ncclScatter": "scatter", "ncclSend": "send", "ncclRecv": "recv",
}  # fmt: skip
"""NCCL calls that move data, and thence's names of their collectives."""

_FIELDS = {
    "communicator": "NCCL communicator ID",
    "bytes": "Message size [bytes]",
    "ranks": "No. of ranks",
    "rank": "Rank",
}
_FIELD_BYTES = {"communicator": 8, "bytes": 8, "ranks": 4, "rank": 4}
_HEADERS = (16, 24)
_MAX_PAYLOAD = 1 << 12


@dataclass(frozen=True)
class Described:
    """Payloads of NCCL's ranges.

    Attributes:
        payloads: row (in NVTX_EVENTS) and the columns of `_FIELDS`, Int64; null if unknown.
    """

    payloads: pl.DataFrame

    def ranks(self, ranges: pl.DataFrame) -> Mapping[int, int]:
        """Rank of each process in its largest communicator.

        Args:
            ranges: process and row of NVTX ranges.
        """
        with_rank = self.payloads.filter(pl.col("rank").is_between(0, 1 << 30) & (pl.col("ranks") > 0))
        joined = with_rank.join(ranges.select("process", "row"), on="row").sort("ranks", "row")
        return dict(joined.select("process", "rank").rows())

    def collectives(self, ranges: pl.DataFrame) -> pl.DataFrame:
        """Rows of `COLLECTIVES` by host range; attribution adds the kernels that the ranges launched.

        Args:
            ranges: the NVTX ranges: host (row in the host table), name, domain and row (in NVTX_EVENTS).
        """
        names = pl.col("name").cast(pl.String)
        calls = (
            ranges.filter(pl.col("domain") == NCCL)
            .filter(names.is_in(list(COLLECTIVE_NAMES)))
            .select("host", "row", collective=names.replace_strict(COLLECTIVE_NAMES, default=None))
        )
        sizes = self.payloads.filter(pl.col("ranks") > 0).select("communicator", group_size="ranks")
        sizes = sizes.drop_nulls().unique("communicator", keep="first", maintain_order=True)
        described_calls = calls.join(self.payloads, on="row", how="left", maintain_order="left").join(
            sizes, on="communicator", how="left", maintain_order="left"
        )
        name = pl.format("{}", pl.col("communicator").cast(pl.UInt64, wrap_numerical=True))
        return COLLECTIVES.frame(
            described_calls.select("host", "collective", "bytes", "group_size", group_name=name).to_dict()
        )


def described(store: Store) -> Described:
    """The decoded payloads of an export; an empty table if it holds none.

    Raises:
        DamagedInput: a table cannot be read.
    """
    payloads = store.payloads()
    if payloads.is_empty():
        schema = {"row": pl.Int64(), **dict.fromkeys(_FIELDS, pl.Int64())}
        return Described(pl.DataFrame(schema=schema))
    fields = _from_json(payloads)
    if payloads["binary"].null_count() < payloads.height:
        fields = fields.update(_from_bytes(store, payloads), on="row", how="left")
    return Described(fields)


def _from_json(payloads: pl.DataFrame) -> pl.DataFrame:
    """The fields, found by searching the JSON text for their keys, whose nesting differs between versions."""
    return payloads.select(
        "row",
        *(
            pl.col("json")
            .str.extract(rf'"{name.replace("[", chr(92) + "[").replace(".", chr(92) + ".")}"\s*:\s*"?(\d{{1,20}})"?')
            .cast(pl.UInt64, strict=False)
            .cast(pl.Int64, wrap_numerical=True)
            .alias(field)
            for field, name in _FIELDS.items()
        ),
    )


def _from_bytes(store: Store, payloads: pl.DataFrame) -> pl.DataFrame:
    entries = store.frame("NVTX_PAYLOAD_SCHEMA_ENTRIES", ("schemaId", "offset"), ("name",))
    entries = entries.with_columns(pl.col("offset").fill_null(0), pl.col("name").cast(pl.String))
    parts = [pl.DataFrame(schema={"row": pl.Int64(), **dict.fromkeys(_FIELDS, pl.Int64())})]
    sized = payloads.select("row", "binary", size=pl.col("binary").bin.size()).drop_nulls()
    sized = sized.filter(pl.col("size").is_between(_HEADERS[0], _MAX_PAYLOAD))
    for (size,), group in sized.group_by("size"):
        count = int(str(size))
        data = np.frombuffer(b"".join(group["binary"]), np.uint8).reshape(-1, count)
        schema, length = _words(data, 0, 8), _words(data, 8, 8)
        for header in _HEADERS:
            for number in np.unique(schema[length == count - header]).tolist():
                rows = (schema == number) & (length == count - header)
                layout = entries.filter(pl.col("schemaId") == number).unique("name")
                offsets = dict(layout.select("name", "offset").drop_nulls().rows())
                parts.append(_fields(data[rows], group["row"].filter(pl.Series(rows)), offsets, header))
    return pl.concat(parts).unique("row", keep="first")


def _fields(
    data: np.ndarray[tuple[int, int], np.dtype[np.uint8]], row: pl.Series, offsets: Mapping[str, int], header: int
) -> pl.DataFrame:
    columns: dict[str, pl.Series] = {"row": row}
    for field, name in _FIELDS.items():
        offset, width = header + offsets.get(name, 0), _FIELD_BYTES[field]
        fits = name in offsets and header <= offset <= data.shape[1] - width
        values = _words(data, offset, width) if fits else [None] * len(row)
        columns[field] = pl.Series(field, values, pl.Int64)
    return pl.DataFrame(columns)


def _words(
    data: np.ndarray[tuple[int, int], np.dtype[np.uint8]], offset: int, width: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Little-endian signed integers of ``width`` bytes at a byte offset of every row, as int64."""
    words = np.ascontiguousarray(data[:, offset : offset + width]).view(f"<i{width}").ravel()
    return words.astype(np.int64)
