"""A timeline as Chrome JSON, in the form that torch.profiler (Kineto) writes.

HTA, TensorBoard, chrome://tracing and thence itself read this form. If the input was a Kineto file, reading the
output again gives equal tables. Categories and argument names are those of pytorch/kineto
(libkineto/src/output_json.cpp). Times are microseconds with three decimals, computed with integers. With several
ranks in one file, each process id has a tag in front, ``[rank 01] 5176``, as in merged traces. In-kernel ranges have
a process for each SM of a launch, and a thread for each trace.
"""

from __future__ import annotations

from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

import msgspec
import numpy as np
import polars as pl

from thence.model.collectives import whole_number
from thence.model.grouped_intervals import distinct
from thence.model.json_fields import NotAsWritten, decoded
from thence.model.places import GRAPH_LABELS, STATED
from thence.writers.timelines.label_arguments import annotations_of, collective_arguments, graph_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from thence.model.timeline import Phases, Timeline

_FIRST_PID = 1_500_000_000
"""Larger than the ids of processes and devices."""
_PIDS_OF_A_LAUNCH = 100_000
_CHUNK_ROWS = 100_000  # rows whose text is in memory at a time
_GPU_CATEGORIES = {"kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset", "thunk": "kernel"}
_HOST_CATEGORIES = {
    "step": "user_annotation",
    "phase": "user_annotation",
    "module": "python_function",
    "python": "python_function",
    "range": "user_annotation",
    "framework": "user_annotation",
    "op": "cpu_op",
    "compile": "user_annotation",
    "sample": "sample",
    "runtime": "cuda_runtime",
    "driver": "cuda_driver",
    "overhead": "overhead",
}
_GPU_NUMBERS = {
    "device": "device",
    "stream": "stream",
    "correlation": "correlation",
    "external": "External id",
    "bytes": "bytes",
    "registers": "registers per thread",
    "shared_memory": "shared memory",
    "graph": "graph id",
    "node": "graph node id",
}
_HOST_NUMBERS = {"external": "External id", "correlation": "correlation", "sequence": "Sequence number"}
_INPUTS = {"dims": '"Input Dims"', "types": '"Input type"', "strides": '"Input Strides"', "values": '"Concrete Inputs"'}
_PLACES = (*(kind for kind in STATED if kind in GRAPH_LABELS), "lane")
_FIRST_DEVICE_SORT_INDEX = 5_000_000  # Kineto's, so that devices come after processes
_IN_GROUPS = ("backend", "world_size", "nccl_version")


def inside_lines(
    phases: Phases, number: int, quoted: Callable[[pl.Series], pl.Series], microseconds: Callable[[pl.Expr], pl.Expr]
) -> Iterator[tuple[int, pl.Series]]:
    """Yields the number of rows done and lines of JSON.

    Args:
        number: number of the launch in the file.
        quoted: converts a column of texts to JSON strings.
        microseconds: converts a column of ns to decimal microseconds.
    """
    yield 0, pl.Series([*_inside_metadata(phases, number)], dtype=pl.String)
    base = _FIRST_PID + number * _PIDS_OF_A_LAUNCH
    per_block = _per_block(phases)
    arguments = {"SM": "sm", "block": "block", "index": "index", "net ns": "net_ns"}
    written = [
        pl.concat_str(pl.lit(f', "{key}": '), pl.col(column).cast(pl.String)) for key, column in arguments.items()
    ]
    state = pl.when(~pl.col("closed")).then(pl.lit(', "state": "entered, never left"'))
    line = pl.concat_str(
        pl.lit('{"ph": "X", "cat": "in_kernel", "name": '),
        pl.col("name").map_batches(quoted, return_dtype=pl.String),
        pl.lit(', "pid": '), (base + 1 + pl.col("sm").cast(pl.Int64).fill_null(-1)).cast(pl.String),
        pl.lit(', "tid": '),
        (pl.col("block").cast(pl.Int64) * per_block + pl.col("index")).cast(pl.String),
        pl.lit(', "ts": '), microseconds(pl.col("start_ns")),
        pl.lit(', "dur": '), microseconds(pl.col("duration_ns")),
        pl.lit(', "args": {'), pl.concat_str(*written, state, ignore_nulls=True).str.slice(2),
        pl.lit("}}"),
    )  # fmt: skip
    for frame in phases.ranges.iter_slices(_CHUNK_ROWS):
        yield frame.height, frame.select(line).to_series()


def _per_block(phases: Phases) -> int:
    highest = phases.ranges["index"].max()
    return highest + 1 if isinstance(highest, int) else 1


def _inside_metadata(phases: Phases, number: int) -> Iterator[str]:
    """Yields metadata events with the names of processes and threads."""
    base = _FIRST_PID + number * _PIDS_OF_A_LAUNCH
    per_block = _per_block(phases)
    traces = phases.ranges.select("sm", "block", "index").unique().sort(pl.all(), nulls_last=True)
    for sm in traces["sm"].unique(maintain_order=True).to_list():
        name = f"inside {phases.title}: SM {'unknown' if sm is None else sm}"
        pid = base + 1 + (-1 if sm is None else sm)
        yield _inside_metadata_event("process_name", pid, 0, {"name": name})
        yield _inside_metadata_event("process_sort_index", pid, 0, {"sort_index": pid})
    for sm, block, index in traces.rows():
        pid = base + 1 + (-1 if sm is None else sm)
        name = f"block {block} {phases.scope} {index}"
        yield _inside_metadata_event("thread_name", pid, block * per_block + index, {"name": name})


def _inside_metadata_event(what: str, pid: int, tid: int, arguments: dict[str, object]) -> str:
    event = {"ph": "M", "name": what, "ts": 0.0, "pid": pid, "tid": tid, "args": arguments}
    return msgspec.json.encode(event).decode()


def write_chrome(
    timeline: Timeline, stream: IO[bytes], progress: Callable[[int, int], None] = lambda _done, _all: None
) -> None:
    """Writes a timeline as Chrome JSON.

    Args:
        timeline: the timeline to write; its counters and lanes are left out, because the format has none.
        stream: binary stream; not closed.
        progress: called with the number of rows written so far, and the number of all rows.
    """
    trace = timeline.trace
    total = sum([trace.host.height, trace.gpu.height, *(p.ranges.height for p in timeline.inside)])
    head = msgspec.json.encode(_metadata(timeline))
    stream.write(head[:-1] + b',\n"traceEvents": [')
    before = b"\n"
    done = 0
    for rows, lines in _events(timeline):
        if len(lines):
            stream.write(before + lines.str.join(",\n")[0].encode())
            before = b",\n"
        done += rows
        progress(done, total)
    stream.write(b"\n]}\n")


def _metadata(timeline: Timeline) -> dict[str, Any]:
    """The top-level keys of Kineto files, as far as their values are known, and thence's facts under ``thence``."""
    meta = timeline.trace.meta
    facts: dict[str, Any] = {}
    for of_input in reversed(meta.facts):
        facts |= of_input
    metadata: dict[str, Any] = {"schemaVersion": 1}
    metadata |= {key: value for key, value in facts.items() if key not in _IN_GROUPS}
    metadata["deviceProperties"] = _devices(timeline)
    group: dict[str, Any] = {key: facts[key] for key in _IN_GROUPS if key in facts}
    ranks = timeline.trace.ranks
    if len(ranks) == 1 and (group or ranks[0] or meta.ranks_stated):
        group["rank"] = ranks[0]
    if meta.process_groups:
        names = {"name": "pg_name", "description": "pg_desc", "size": "pg_size", "ranks": "ranks"}
        # Every rank describes the groups that it is in; equal descriptions are written once.
        distinct = {repr(g): g for g in meta.process_groups}.values()
        group["pg_config"] = [{names.get(k, k): v for k, v in g.items()} for g in distinct]
    if group:
        metadata["distributedInfo"] = group
    metadata["displayTimeUnit"] = "ms"
    if meta.epoch_ns is not None:
        metadata["baseTimeNanoseconds"] = meta.epoch_ns
    metadata["thence"] = {
        "inputs": meta.inputs,
        "clock_corrections_ns": {str(rank): ns for rank, ns in timeline.corrections.items()},
        "clocks": list(timeline.notes),
        "warnings": meta.warnings,
    }
    return metadata


def _devices(timeline: Timeline) -> list[dict[str, Any]]:
    described: dict[int, dict[str, Any]] = {}
    for device in timeline.trace.meta.devices:
        major, _, minor = (device.compute_capability or "").partition(".")
        values = {
            "id": device.device,
            "name": device.name,
            "totalGlobalMem": device.memory_bytes,
            "computeMajor": whole_number(major),
            "computeMinor": whole_number(minor),
            "numSms": device.multiprocessors,
        }
        properties = {key: value for key, value in values.items() if value is not None}
        described.setdefault(device.device, properties)
    return list(described.values())


def _events(timeline: Timeline) -> Iterator[tuple[int, pl.Series]]:
    """Yields the number of rows done and JSON lines, in table order, because readers keep it for equal times."""
    yield 0, _named_lanes(timeline)
    of_host = _described(timeline, "host")
    for frame in timeline.trace.host.with_row_index("row").iter_slices(_CHUNK_ROWS):
        yield frame.height, _host_lines(frame, timeline, of_host)
    of_gpu = _described(timeline, "gpu")
    numbered = timeline.trace.gpu.with_row_index("row").hstack(
        timeline.trace.places.select(*_PLACES, "launch", "metadata")
    )
    numbered = _with_graph_labels(numbered, timeline)
    for frame in numbered.iter_slices(_CHUNK_ROWS):
        yield frame.height, _gpu_lines(frame, timeline, of_gpu)
    yield 0, _arrows(timeline)
    yield 0, _memory_lines(timeline)
    for number, phases in enumerate(timeline.inside):
        yield from inside_lines(phases, number, _quoted, _microseconds)


def _memory_lines(timeline: Timeline) -> pl.Series:
    """Events about memory, as `thence.readers.kineto.memory` reads them; without those of unknown addresses."""
    trace = timeline.trace
    columns = ("process", "thread", "address", "bytes")
    memory = trace.memory.filter(pl.col("address").is_not_null()).select("opened", "closed", *columns)
    changes = pl.concat(
        [
            memory.select(*columns, row="opened"),
            memory.select("process", "thread", "address", -pl.col("bytes"), row="closed"),
        ]
    ).drop_nulls("row")
    totals = trace.memory_totals.with_row_index("row").cast({"row": pl.Int32})
    changed = totals.join(changes, on="row", maintain_order="left").with_columns(name=pl.lit("[memory]"))
    failed = trace.memory_failures.with_columns(name=pl.lit("[OutOfMemory]"))
    both = pl.concat([changed, failed], how="diagonal").with_columns(
        # Who returned memory that was handed out before the trace is not known: it is said to be any thread.
        pl.col("process", "thread").fill_null(pl.col("process", "thread").max().over("rank")).fill_null(0)
    )
    of_host = pl.col("device").is_null()
    numbers = {
        "Total Reserved": pl.col("reserved").fill_null(0),
        "Total Allocated": pl.col("allocated"),
        "Bytes": pl.col("bytes"),
        "Device Id": pl.col("device").fill_null(-1),
        "Device Type": pl.when(of_host).then(0).otherwise(1),
        "Addr": pl.col("address"),
    }
    members = [pl.concat_str(pl.lit(f', "{key}": '), value.cast(pl.String)) for key, value in numbers.items()]
    line = pl.concat_str(
        pl.lit('{"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "'),
        pl.col("name"),
        pl.lit('", "pid": '),
        _pid(timeline, pl.col("process")),
        pl.lit(', "tid": '),
        pl.col("thread").cast(pl.String),
        pl.lit(', "ts": '),
        _microseconds(pl.col("start")),
        pl.lit(', "args": {'),
        pl.concat_str(members, ignore_nulls=True).str.slice(2),
        pl.lit("}}"),
    )
    return both.select(line).to_series()


def _with_graph_labels(rows: pl.DataFrame, timeline: Timeline) -> pl.DataFrame:
    """Adds the arguments of joined labels to rows, where they replace the arguments for places and metadata."""
    if timeline.trace.graph_places.is_empty():
        return rows.with_columns(joined=pl.lit(None, pl.String))
    arguments = graph_arguments(timeline.trace, collectives=False)
    joined = rows.join(arguments, on="row", how="left", maintain_order="left")
    return joined.rename({"text": "joined"}).with_columns(
        pl.when(pl.col("joined").is_null()).then(pl.col(place)).alias(place) for place in (*_PLACES, "metadata")
    )


def _described(timeline: Timeline, table: str) -> pl.DataFrame:
    """Arguments of the collectives that rows of a table describe: columns row and described (JSON members)."""
    chosen = timeline.trace.host_collectives.filter(pl.col("host").is_not_null())
    if table == "gpu":  # collectives that a host op describes are written with that op
        chosen = timeline.trace.collectives.filter(pl.col("host").is_null())
    once = chosen.unique(table, keep="first", maintain_order=True)
    return once.select(pl.col(table).cast(pl.UInt32).alias("row"), collective_arguments(once).alias("described"))


def _quoted(values: pl.Series) -> pl.Series:
    """Each text as JSON; distinct texts are encoded once."""
    texts = values.cast(pl.String)
    distinct = texts.drop_nulls().unique()
    encoded = [msgspec.json.encode(text).decode() for text in distinct.to_list()]
    return texts.replace_strict(distinct, pl.Series(encoded, dtype=pl.String), default=None, return_dtype=pl.String)


def _json_text(column: pl.Expr, key: str) -> pl.Expr:
    quoted = column.map_batches(_quoted, return_dtype=pl.String)
    return pl.concat_str(pl.lit(f', "{key}": '), quoted)


def _number(column: str, key: str) -> pl.Expr:
    return pl.concat_str(pl.lit(f', "{key}": '), pl.col(column).cast(pl.String))


def _triple(column: str) -> pl.Expr:
    values = (pl.col(column).arr.get(i).cast(pl.String) for i in range(3))
    return pl.concat_str(pl.lit(f', "{column}": ['), pl.concat_str(*values, separator=", "), pl.lit("]"))


def _microseconds(ns: pl.Expr) -> pl.Expr:
    """Nanoseconds as decimal microseconds, exact because only integers are used."""
    size = ns.abs()
    decimals = (size % 1000).cast(pl.String).str.zfill(3)
    sign = pl.when(ns < 0).then(pl.lit("-")).otherwise(pl.lit(""))
    return pl.concat_str(sign, (size // 1000).cast(pl.String), pl.lit("."), decimals)


def _pid(timeline: Timeline, process: pl.Expr, rank: str = "rank") -> pl.Expr:
    """The process id; with several ranks, after a tag that sorts in the order of the ranks."""
    ranks = timeline.trace.ranks
    if len(ranks) < 2:
        return process.cast(pl.String)
    digits = len(str(max(ranks)))
    number = pl.col(rank).cast(pl.String).str.zfill(digits)
    return pl.concat_str(pl.lit('"[rank '), number, pl.lit("] "), process.cast(pl.String), pl.lit('"'))


def _complete(category: pl.Expr, name: pl.Expr, pid: pl.Expr, tid: pl.Expr, args: list[pl.Expr]) -> pl.Expr:
    """A complete event (phase X) for each row."""
    duration = _microseconds(pl.col("duration"))
    arguments = pl.concat_str(*args, ignore_nulls=True).str.slice(2)
    return pl.concat_str(
        pl.lit('{"ph": "X", "cat": "'), category, pl.lit('", "name": '), name,
        pl.lit(', "pid": '), pid, pl.lit(', "tid": '), tid,
        pl.lit(', "ts": '), _microseconds(pl.col("start")), pl.lit(', "dur": '), duration,
        pl.lit(', "args": {'), arguments, pl.lit("}}"),
    )  # fmt: skip


def _host_lines(frame: pl.DataFrame, timeline: Timeline, described: pl.DataFrame) -> pl.Series:
    category = pl.col("category").cast(pl.String)
    prefix = pl.when(category == "module").then(pl.lit("nn.Module: ")).otherwise(pl.lit(""))
    name = pl.concat_str(prefix, pl.col("name").cast(pl.String)).fill_null("")
    facts = pl.col("metadata").cast(pl.String)
    args = [
        *(_number(column, key) for column, key in _HOST_NUMBERS.items()),
        pl.col("described"),
        _json_text(pl.col("kernel"), "kernel"),
        _json_text(pl.col("state").cast(pl.String), "state"),
        # Facts of a Triton kernel are a JSON object: write its members without the braces.
        pl.when(facts.str.starts_with('{"kernel_')).then(", " + facts.str.slice(1).str.head(-1)),
        pl.col("inputs").map_batches(_inputs, return_dtype=pl.String),
    ]
    line = _complete(
        category.replace_strict(_HOST_CATEGORIES),
        name.map_batches(_quoted, return_dtype=pl.String),
        _pid(timeline, pl.col("process")),
        pl.col("thread").cast(pl.String),
        args,
    )
    joined = frame.join(described, on="row", how="left", maintain_order="left")
    return joined.select(line).to_series()


def _inputs(values: pl.Series) -> pl.Series:
    """The inputs of operators as arguments of Kineto, each after a comma; null for none and for damaged text."""
    written = {}
    for text in values.cast(pl.String).unique().drop_nulls():
        with suppress(NotAsWritten):
            inputs = decoded(text, dict[str, list[Any]])
            members = (msgspec.json.encode(inputs.get(name, [])).decode() for name in _INPUTS)
            written[text] = "".join(f", {key}: {value}" for key, value in zip(_INPUTS.values(), members, strict=True))
    return values.cast(pl.String).replace_strict(written, default=None, return_dtype=pl.String)


def _gpu_lines(frame: pl.DataFrame, timeline: Timeline, described: pl.DataFrame) -> pl.Series:
    places = [_json_text(pl.col(place), place) for place in _PLACES]
    args = [
        *(_number(column, key) for column, key in _GPU_NUMBERS.items()),
        *(_triple(column) for column in ("grid", "block")),
        pl.col("described"),
        pl.col("joined"),
        *places,
        pl.col("metadata").map_batches(annotations_of, return_dtype=pl.String),
    ]
    line = _complete(
        pl.col("kind").cast(pl.String).replace_strict(_GPU_CATEGORIES),
        pl.col("name").fill_null("").map_batches(_quoted, return_dtype=pl.String),
        _pid(timeline, pl.col("device")),
        pl.col("stream").fill_null(0).cast(pl.String),
        args,
    )
    joined = frame.join(described, on="row", how="left", maintain_order="left")
    return joined.select(line).to_series()


def _arrows(timeline: Timeline) -> pl.Series:
    """Flow events from launch to activity and from forward to backward op.

    A graph launch has one flow start for all its activities.
    """
    host, gpu = timeline.trace.host, timeline.trace.gpu
    launch = timeline.trace.places["launch"]
    rows = np.flatnonzero(launch.is_not_null().to_numpy())
    calls = launch.drop_nulls().cast(pl.Int64).to_numpy()
    begun = distinct(calls)
    on_thread = (_pid(timeline, pl.col("process")), pl.col("thread"))
    on_stream = (_pid(timeline, pl.col("device")), pl.col("stream").fill_null(0))
    backward = np.flatnonzero((host["forward"].is_not_null() & host["sequence"].is_not_null()).to_numpy())
    forward = host["forward"][backward].cast(pl.Int64).to_numpy()
    # Flow ids: the row of the launch; for ops, the row of the backward op plus the number of rows.
    after = host.height
    parts = (
        _flow("s", "ac2g", host[begun].with_columns(id=begun), on_thread),
        _flow("f", "ac2g", gpu[rows].with_columns(id=calls), on_stream),
        _flow("s", "fwdbwd", host[forward].with_columns(id=after + backward), on_thread),
        _flow("f", "fwdbwd", host[backward].with_columns(id=after + backward), on_thread),
    )
    return pl.concat(parts)


def _flow(phase: str, category: str, frame: pl.DataFrame, lane: tuple[pl.Expr, pl.Expr]) -> pl.Series:
    pid, tid = lane
    fixed = f'{{"ph": "{phase}", "cat": "{category}", "name": "{category}", "bp": "e", "id": '
    line = pl.concat_str(
        pl.lit(fixed), pl.col("id").cast(pl.String), pl.lit(', "pid": '), pid,
        pl.lit(', "tid": '), tid.cast(pl.String), pl.lit(', "ts": '), _microseconds(pl.col("start")), pl.lit("}"),
    )  # fmt: skip
    return frame.select(line).to_series().alias("line")


def _named_lanes(timeline: Timeline) -> pl.Series:
    """Metadata events: names and order of processes, threads, devices and streams."""
    trace = timeline.trace
    several = len(trace.ranks) > 1
    pids = {}
    for what, frame in (("process", trace.host), ("device", trace.gpu)):
        lanes = frame.select("rank", what).unique().sort("rank", what)
        texts = lanes.select(_pid(timeline, pl.col(what))).to_series().to_list()
        pids[what] = dict(zip(lanes.rows(), texts, strict=True))
    events = []
    for (rank, process), pid in pids["process"].items():
        label = f"rank {rank}: CPU" if several else "CPU"
        events += _named_process(pid, f"process {process}", label, process)
    for (rank, device), pid in pids["device"].items():
        label = f"rank {rank}: GPU {device}" if several else f"GPU {device}"
        events += _named_process(pid, label, label, _FIRST_DEVICE_SORT_INDEX + device)
    for rank, process, thread, name in trace.threads.rows():
        if (rank, process) in pids["process"]:
            events.append(_named("thread_name", pids["process"][rank, process], thread, {"name": name}))
    streams = trace.gpu.select("rank", "device", pl.col("stream").fill_null(0)).unique()
    for rank, device, stream in streams.sort(pl.all()).rows():
        pid = pids["device"][rank, device]
        events.append(_named("thread_name", pid, stream, {"name": f"stream {stream}"}))
        events.append(_named("thread_sort_index", pid, stream, {"sort_index": stream}))
    return pl.Series(events, dtype=pl.String)


def _named_process(pid: str, name: str, label: str, place: int) -> list[str]:
    return [
        _named("process_name", pid, 0, {"name": name}),
        _named("process_labels", pid, 0, {"labels": label}),
        _named("process_sort_index", pid, 0, {"sort_index": place}),
    ]


def _named(what: str, pid: str, tid: int, args: Mapping[str, Any]) -> str:
    text = msgspec.json.encode(args).decode()
    return f'{{"ph": "M", "name": "{what}", "ts": 0.000, "pid": {pid}, "tid": {tid}, "args": {text}}}'
