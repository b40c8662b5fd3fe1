"""Host ranges of an Nsight Systems export: NVTX ranges, CUDA API calls and profiler overhead, nested.

NVTX ranges are push/pop and start/end ranges with their names and domains. Those of NCCL have payloads with message
size, communicator and communicator size, which are described by schemas
(nccl/src/include/nvtx_payload_schemas.h). nsys exports a payload as JSON (``jsonText``) with --include-json=true, or
as bytes (``binaryData``) with --include-blobs=true. The bytes are a header and the payload. The header holds schema
id and size (16 bytes), or schema id, size and a pointer (24 bytes); see nvtxPayloadData_t in nvToolsExtPayload.h. The
payload is decoded by the exported schema if its length is the size in the header.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.names import UNNAMED
from thence.model.tables import COLLECTIVES, HOST_CATEGORIES
from thence.readers.host_ranges import category_of, host_order, host_parents, parent_column
from thence.readers.nsight.store import (
    distinct_values,
    gathered,
    lasting,
    left_out,
    names,
    numbered,
    process_of,
    thread_of,
    with_durations,
)
from thence.units import several

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.readers.nsight.processes import Ranks
    from thence.readers.nsight.store import Store, Timed

NCCL = "NCCL"
XLA = "TSL"
"""Domains of ranges that NCCL and XLA open (nccl/src/include/nvtx.h, tsl/profiler/lib/nvtx_utils)."""
LIBRARIES = r"(?i)^(?:NCCL|TSL|XLA|CCCL|NVSHMEM|cu(?:BLAS|DNN|SPARSE|SOLVER|FFT|RAND|TENSOR|DF|ML).*|libcu.*|RAPIDS.*)$"
"""Domains that libraries open for ranges of their own."""
# ENUM_NSYS_EVENT_TYPE of the exporter schema reference.
_THREAD_NAME, _PUSH_POP, _START_END, _DOMAIN = 39, 59, 60, 75
_OPERATOR = r"^(?:aten|c10d|prims|torchvision|autograd)::"  # torch.autograd.profiler.emit_nvtx
_NVTX_COLUMNS = (*("start", "end", "eventType", "globalTid", "endGlobalTid"), *("textId", "domainId", "rangeId"))
_DRIVER = 1  # ENUM_NSYS_EVENT_CLASS: 0 is the CUDA runtime, 1 the driver
_CALL_VERSION = r"^(cuda\w+?)_v\d{4,5}$"  # cudaLaunchKernel_v7000: version of the signature
_CATEGORY = pl.Enum(HOST_CATEGORIES)
_THREAD_BITS = 24  # of a serialised GlobalId: see `store.thread_of`
_PLACE = (1 << 48) - 1  # process and thread in a serialised GlobalId, see `store.process_of`
_RANGE = {
    "kind": pl.UInt32(),
    "start": pl.Int64(),
    "duration": pl.Int64(),
    "correlation": pl.Int64(),
    "nvtx": pl.Int32(),
}
_RANGE_KIND = {"place": pl.Int64(), "category": _CATEGORY, "name": pl.Categorical()}
COLLECTIVE_NAMES = {
    "ncclAllReduce": "all_reduce",
    "ncclAllGather": "all_gather",
    "ncclReduceScatter": "reduce_scatter",
    "ncclBroadcast": "broadcast",
    "ncclBcast": "broadcast",
    "ncclReduce": "reduce",
    "ncclAlltoAll": "all_to_all",
    "ncclAllToAll": "all_to_all",
    "ncclGather": "gather",
    "ncclScatter": "scatter",
    "ncclSend": "send",
    "ncclRecv": "recv",
}
"""NCCL calls that move data, and thence's names of their collectives."""
_PAYLOAD_FIELDS = {
    "communicator": "NCCL communicator ID",
    "bytes": "Message size [bytes]",
    "ranks": "No. of ranks",
    "rank": "Rank",
}
_FIELD_BYTES = {"communicator": 8, "bytes": 8, "ranks": 4, "rank": 4}  # sizes of NCCL's payload fields
_HEADERS = (16, 24)
_MAX_PAYLOAD = 1 << 12


def host_ranges(store: Store, of_nvtx: pl.DataFrame, ranks: Ranks) -> tuple[pl.DataFrame, pl.DataFrame, list[str]]:
    """All host ranges of an export in the order of `HOST`, their threads, and warnings.

    Args:
        of_nvtx: `Nvtx.ranges`.
        ranks: rank of each process that used a device. API calls of other processes launched no device
            work; their correlation ids are dropped, because they may equal ids of processes that did.

    Returns:
        The columns of `HOST` that the export provides, and nvtx, the row in ``of_nvtx``; then rank, process
        and thread of every thread that has ranges, sorted; then warnings.

    Raises:
        DamagedInput: a table cannot be read.
    """
    calls, warnings = _calls(store, list(ranks.of_process))
    overhead, more = lasting(_overhead(store), "overhead range")
    place = pl.col("process") * (1 << _THREAD_BITS) + pl.col("thread")
    nvtx_ranges = of_nvtx.with_columns(place=place, nvtx=pl.int_range(pl.len(), dtype=pl.Int32))
    return *_nested(_concatenated([_RangesByKind.of(nvtx_ranges), *calls, _RangesByKind.of(overhead)]), ranks), [
        *warnings,
        *more,
    ]


def _calls(store: Store, with_device: list[int]) -> tuple[list[_RangesByKind], list[str]]:
    columns = (*("start", "end", "globalTid", "correlationId", "nameId", "eventClass"), "returnValue")
    launching = (pl.col("place") // (1 << _THREAD_BITS)).is_in(with_device)

    def calls_and_kinds(part: pl.DataFrame) -> tuple[Timed, pl.DataFrame]:
        """Calls with the index of their kind; and place, nameId and eventClass of each kind."""
        part = part.with_columns(_place("globalTid"))
        first, kind_of_row = distinct_values(part["place"], part["nameId"], part["eventClass"])
        kinds = part.select("place", "nameId", "eventClass")[first]
        launches = kinds.select(launching).to_series().gather(kind_of_row)
        calls = part.select(
            pl.Series("kind", kind_of_row),
            "start",
            "end",
            # A call that failed launched nothing.
            pl.when(launches & (pl.col("returnValue").fill_null(0) == 0)).then("correlationId").alias("correlation"),
            pl.lit(None, pl.Int32).alias("nvtx"),
        )
        return with_durations(calls), kinds

    parts = store.parts("CUPTI_ACTIVITY_KIND_RUNTIME", columns, calls_and_kinds)
    kinds = _kinds_of_calls(store, pl.concat([kinds_of_part for _, kinds_of_part in parts]))
    before = 0
    calls = []
    for timed, kinds_of_part in parts:
        calls.append(_RangesByKind(timed.frame.select(list(_RANGE)), kinds[before : before + kinds_of_part.height]))
        before += kinds_of_part.height
    return calls, left_out([timed for timed, _ in parts], "API call")


@dataclass(frozen=True)
class _RangesByKind:
    """Some ranges, with each distinct combination of thread, category and name stored once, as a kind.

    Attributes:
        frame: columns of `_RANGE`: kind is a row of ``kinds``, nvtx a row of `Nvtx.ranges`; times in ns.
        kinds: columns of `_RANGE_KIND`: place holds process and thread, 24 bits each.
    """

    frame: pl.DataFrame
    kinds: pl.DataFrame

    @classmethod
    def of(cls, frame: pl.DataFrame) -> _RangesByKind:
        """The ranges of a frame with the columns of `_RANGE_KIND` and `_RANGE`; correlation and nvtx may be absent."""
        kinds = frame.select(pl.col(c).cast(dtype) for c, dtype in _RANGE_KIND.items())
        first, kind_of_row = distinct_values(*kinds.select(pl.all().to_physical().cast(pl.Int64)))
        return cls(
            frame.with_columns(pl.Series("kind", kind_of_row)).select(
                pl.col(c).cast(dtype) if c in ("kind", *frame.columns) else pl.lit(None, dtype).alias(c)
                for c, dtype in _RANGE.items()
            ),
            kinds[first],
        )


def _place(column: str) -> pl.Expr:
    return (pl.col(column).fill_null(0) & _PLACE).alias("place")


def _kinds_of_calls(store: Store, call_kinds: pl.DataFrame) -> pl.DataFrame:
    """Columns of `_RANGE_KIND` from place, nameId and eventClass of API calls."""
    text = pl.col("value").cast(pl.String)
    by_name = pl.col("eventClass").is_null() & ~text.str.starts_with("cuda") & (text != UNNAMED)
    is_driver = (pl.col("eventClass") == _DRIVER).fill_null(value=False) | by_name
    category = pl.when(is_driver).then(pl.lit("driver")).otherwise(pl.lit("runtime"))
    return call_kinds.with_columns(names(store, call_kinds["nameId"]).alias("value")).select(
        "place",
        category.cast(_CATEGORY).alias("category"),
        text.str.replace(_CALL_VERSION, "$1").cast(pl.Categorical()).alias("name"),
    )


def _overhead(store: Store) -> pl.DataFrame:
    frame = store.frame("PROFILER_OVERHEAD", ("start", "end", "globalTid", "nameId"))
    return frame.select(
        "start",
        "end",
        _place("globalTid"),
        names(store, frame["nameId"]),
        pl.lit("overhead", _CATEGORY).alias("category"),
    )


def _nested(ranges: _RangesByKind, ranks: Ranks) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The ranges in the order of `HOST`, with the columns of `HOST` that the export provides; and the threads."""
    kinds = ranges.kinds.select(
        "category", "name", process=pl.col("place") // (1 << _THREAD_BITS), thread=pl.col("place") % (1 << _THREAD_BITS)
    )
    kinds = kinds.with_columns(ranks.column(kinds["process"]))
    of_thread = kinds.select("rank", "process", "thread")
    columns = {name: ranges.frame.drop_in_place(name).rechunk() for name in _RANGE}
    track = numbered(*of_thread.cast(pl.Int64))[columns["kind"].to_numpy()]
    category = kinds["category"].to_physical().to_numpy()[columns["kind"].to_numpy()]
    start, duration = columns["start"].to_numpy(), columns["duration"].to_numpy()
    order = host_order(track, category, start, duration)
    track, category = track[order], category[order]
    del start, duration
    gathered(columns, order)
    del order
    times = (columns[name].to_numpy() for name in ("start", "duration"))
    columns["parent"] = parent_column(host_parents(track, category, *times))
    kind_of = columns.pop("kind")
    columns |= {column.name: column.gather(kind_of) for column in kinds}
    return pl.DataFrame(columns), of_thread.unique().sort(of_thread.columns)


def _concatenated(parts: list[_RangesByKind]) -> _RangesByKind:
    before = 0
    frames = []
    for part in parts:
        frames.append(part.frame.with_columns(pl.col("kind") + before))
        before += part.kinds.height
    return _RangesByKind(pl.concat(frames), pl.concat([part.kinds for part in parts], rechunk=True))


@dataclass(frozen=True)
class Nvtx:
    """The NVTX ranges and thread names of an export.

    Attributes:
        ranges: start, duration (ns), process, thread, name, domain (name; null for the default domain),
            category and row (in NVTX_EVENTS, from 0).
        threads: names of threads: process, thread, name.
        warnings: repairs and assumptions.
    """

    ranges: pl.DataFrame
    threads: pl.DataFrame
    warnings: tuple[str, ...]


def nvtx(store: Store) -> Nvtx:
    """The NVTX ranges of an export.

    A range that was open when recording ended is given the latest start or end of any range as its end.

    Raises:
        DamagedInput: the table cannot be read.
    """
    events = _events_with_names(store).with_columns(
        process=process_of(pl.col("globalTid")), thread=thread_of(pl.col("globalTid"))
    )
    kinds = events["eventType"]
    threads = events.filter(kinds == _THREAD_NAME).select("process", "thread", pl.col("name").cast(pl.String))
    domains = (
        events.filter(kinds == _DOMAIN)
        .select("process", "domainId", pl.col("name").alias("domain"))
        .unique(["process", "domainId"], keep="last", maintain_order=True)
    )
    ranges = events.filter(kinds.is_in([_PUSH_POP, _START_END])).join(
        domains, on=["process", "domainId"], how="left", maintain_order="left"
    )
    ranges, warnings = _end_open_ranges(ranges)
    timed, more = lasting(ranges, "NVTX range")
    return Nvtx(
        timed.select(*("start", "duration", "process", "thread", "name", "domain", "row"), _categories(timed)),
        threads.drop_nulls("name"),
        (*warnings, *more),
    )


def _events_with_names(store: Store) -> pl.DataFrame:
    """Events with row and name; the name is the text of the event itself, or its registered string."""
    events = store.frame("NVTX_EVENTS", _NVTX_COLUMNS, ("text",)).with_row_index("row")
    # Exports write the id 0 of the default domain as null. In StringIds, 0 is the id of an ordinary string.
    domain = pl.col("domainId").fill_null(0)
    texts = store.strings(events["textId"])
    joined = events.with_columns(domain, pl.col("row").cast(pl.Int64)).join(
        texts, left_on="textId", right_on="id", how="left", maintain_order="left"
    )
    unnamed = pl.lit(UNNAMED).cast(pl.Categorical())
    return joined.with_columns(name=pl.coalesce("text", "value", unnamed)).drop("text", "value")


def _end_open_ranges(ranges: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    ranges = ranges.filter(pl.col("globalTid").is_not_null())
    still_open = ranges["end"].null_count()
    if not still_open:
        return ranges, []
    last = ranges.select(pl.max_horizontal(pl.col("start").max(), pl.col("end").max())).item()
    sentence = f"{several(still_open, 'NVTX range')} still open when the recording ended; shown until then"
    return ranges.with_columns(pl.col("end").fill_null(last)), [sentence]


def _categories(ranges: pl.DataFrame) -> pl.Expr:
    """Category of each range: framework for a library's domain, op for an operator's name, else by its name."""
    names = ranges["name"].unique()
    categories = pl.DataFrame(
        {"name": names, "category": [category_of("range", str(name)) for name in names]},
        schema={"name": pl.Categorical(), "category": pl.String},
    )
    by_name = ranges.select("name").join(categories, on="name", how="left", maintain_order="left")["category"]
    return (
        pl.when(pl.col("domain").cast(pl.String).str.contains(LIBRARIES).fill_null(value=False))
        .then(pl.lit("framework"))
        .when(pl.col("name").cast(pl.String).str.contains(_OPERATOR))
        .then(pl.lit("op"))
        .otherwise(pl.lit(by_name))
        .alias("category")
    )


@dataclass(frozen=True)
class Described:
    """Payloads of NCCL's ranges.

    Attributes:
        payloads: row (in NVTX_EVENTS) and the columns of `_PAYLOAD_FIELDS`, Int64; null if unknown.
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
        schema = {"row": pl.Int64(), **dict.fromkeys(_PAYLOAD_FIELDS, pl.Int64())}
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
            for field, name in _PAYLOAD_FIELDS.items()
        ),
    )


def _from_bytes(store: Store, payloads: pl.DataFrame) -> pl.DataFrame:
    entries = store.frame("NVTX_PAYLOAD_SCHEMA_ENTRIES", ("schemaId", "offset"), ("name",))
    entries = entries.with_columns(pl.col("offset").fill_null(0), pl.col("name").cast(pl.String))
    parts = [pl.DataFrame(schema={"row": pl.Int64(), **dict.fromkeys(_PAYLOAD_FIELDS, pl.Int64())})]
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
                parts.append(_payload_fields(data[rows], group["row"].filter(pl.Series(rows)), offsets, header))
    return pl.concat(parts).unique("row", keep="first")


def _payload_fields(
    data: np.ndarray[tuple[int, int], np.dtype[np.uint8]], row: pl.Series, offsets: Mapping[str, int], header: int
) -> pl.DataFrame:
    columns: dict[str, pl.Series] = {"row": row}
    for field, name in _PAYLOAD_FIELDS.items():
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
