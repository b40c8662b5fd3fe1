"""Reads a Kineto file into the tables of a trace: the columns of all pieces are joined, repaired, sorted and nested.

A lane is one (pid, tid) pair of the file; a track is a host thread in the order of the host table. Losses are the
records that the file reports as missing, and the events that the reader left out or replaced.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.errors import DamagedInput
from thence.model.losses import Loss, says_lost
from thence.model.tables import HOST_CATEGORIES, Meta, Tables
from thence.model.waiting import with_waiting
from thence.parallel import give_back_memory
from thence.readers.host_ranges import IS_API_CALL, category_of, host_order, ranges_among_ops
from thence.readers.kineto import metadata as describe
from thence.readers.kineto.collecting import collected
from thence.readers.kineto.counters import counters_of
from thence.readers.kineto.early_start import Begun
from thence.readers.kineto.envelope import INLINE_ANNOTATED
from thence.readers.kineto.event_structs import MISSING
from thence.readers.kineto.events import RECORDED_CATEGORIES
from thence.readers.kineto.memory import memory_tables
from thence.readers.kineto.processes import PIECE_BYTES
from thence.readers.kineto.ranks import Lanes, gpu_ranks, lanes_of
from thence.readers.kineto.sniffing import NAME
from thence.readers.kineto.tables import (
    Written,
    collective_frame,
    gpu_frame,
    graph_places,
    host_frame,
    threads_frame,
    waiting_calls,
    waiting_facts,
)
from thence.units import several

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from thence.model.arrays import Array, Mask
    from thence.readers.kineto.envelope import Envelope
    from thence.readers.source import Source

_LOG_LEVELS = ("ERROR", "WARNING")
"""Keys of the metadata under which Kineto stores its log messages."""
Arrays = dict[str, Any]


def losses(envelope: Envelope, counts: Mapping[str, Any], unusable: int) -> tuple[Loss, ...]:
    """The losses of one file.

    Args:
        envelope: of the file, which is read to its end.
        counts: numbers of events: events (all), damaged, timeless.
        unusable: device activities without a usable duration.
    """
    return tuple(_losses(envelope, counts, unusable))


def _losses(envelope: Envelope, counts: Mapping[str, Any], unusable: int) -> Iterator[Loss]:
    name = envelope.source.name
    for text in envelope.cuts:
        yield Loss("cut", name, 1, text)
    if damaged := counts["damaged"]:
        text = f"{name}: {damaged:,} of {counts['events']:,} events could not be read"
        yield Loss("unreadable", name, damaged, text)
    if timeless := counts["timeless"]:
        yield Loss("no_times", name, timeless, f"{name}: {several(timeless, 'event')} without a start time")
    if unusable:
        text = f"{name}: {several(unusable, 'device activity')} without a duration, or with a negative one"
        yield Loss("repaired", name, unusable, text)
    for message in _logged(envelope.metadata):
        yield Loss("dropped", name, 1, f"{name}: the profiler logged: {message}")


def _logged(metadata: Mapping[str, Any]) -> Iterator[str]:
    """The profiler's log messages about records that it lost."""
    for level in _LOG_LEVELS:
        messages = metadata.get(level)
        for message in messages if isinstance(messages, list) else [messages]:
            if isinstance(message, str) and says_lost(message):
                yield message.strip()


def read(source: Source, progress: Callable[[int], None]) -> Tables:
    """The tables of one Kineto file.

    Args:
        progress: called with the number of stored bytes consumed so far.

    Raises:
        DamagedInput: nothing in the file could be read.
    """
    begun = Begun.of(source)
    envelope, columns = begun.envelope, _decoded_columns(begun, progress)
    of_table = _tables(columns)
    gpu, host = of_table.pop("gpu"), of_table.pop("host")
    metadata = envelope.metadata
    names = pl.Series("name", columns["names"], pl.String)

    annotated = _choose_device_and_stream(gpu, columns["lanes"], columns["said"], inline=INLINE_ANNOTATED in metadata)
    host["category"] = _categories(host, columns["names"])
    launches = _launches(host, gpu, columns["lanes"])
    rank = (stated := describe.rank_of(metadata, source.name)) or 0
    lanes = lanes_of(columns["lanes"], np.unique(launches["lane"]).tolist(), rank)
    gpu["rank"] = gpu_ranks(lanes, gpu, launches, rank)

    lost = losses(envelope, columns, int((gpu["duration"] < 0).sum()))
    warnings = [
        *envelope.warnings,
        *(loss.text for loss in lost if loss.code == "dropped"),
        *(f"{source.name}: {text}" for text in _warnings(columns, gpu, host, lanes)),
    ]
    gpu_order, host_order = _gpu_order(gpu), _host_order(host, lanes)
    flows, threads, moved = (of_table.pop(name, {}) for name in ("flow", "thread", "collective"))
    places, sentences = graph_places(of_table.pop("joined", {}), annotated, gpu_order)
    on_host = _occurring(host["lane"], len(columns["lanes"]))
    calls = waiting_calls(host, host_order, columns["names"])
    of_memory, more = memory_tables(of_table.pop("memory", {}), lanes)
    warnings += [f"{source.name}: {text}" for text in (*sentences, *more)]
    ran_on = describe.accelerator(metadata, columns["categories"], columns["names"])
    counters, counted = counters_of(of_table.pop("counter", {}), names, used := _used_devices(gpu, gpu_order), rank)
    tables = Tables(
        gpu=gpu_frame(gpu, gpu_order, names),
        host=host_frame(host, host_order, lanes, names, flows),
        collectives=collective_frame(moved, gpu_order, host_order),
        threads=threads_frame(threads, on_host, lanes),
        graph_places=places,
    )
    meta = Meta(
        inputs=(source.name,),
        formats=(NAME,),
        epoch_ns=describe.epoch_ns(metadata, _earliest(tables)),
        facts=(describe.facts(metadata) | ran_on | counted,),
        devices=describe.described_devices(metadata, used, describe.node_of(source.name)),
        process_groups=describe.process_groups(metadata),
        warnings=tuple(warnings),
        losses=lost,
        ranks_stated=stated is not None,
    )
    said = waiting_facts(of_table.pop("waiting", {}), np.unique(gpu["rank"]).tolist())
    _give_back(source)
    return with_waiting(dataclasses.replace(tables, meta=meta, counters=counters, **of_memory), said, calls)


def _decoded_columns(begun: Begun, progress: Callable[[int], None]) -> Arrays:
    """The columns of all events; raises `DamagedInput` if none could be read."""
    source = begun.source
    columns = collected(begun.columns, lambda: progress(source.consumed), source.expected_bytes / PIECE_BYTES)
    if columns["events"] == columns["damaged"]:
        expected = "holds no event that could be read; expected a torch.profiler trace"
        raise DamagedInput(source.name, source.damage or expected)
    _give_back(source)
    return columns


def _give_back(source: Source) -> None:
    """Of a large file, the threads that decode it and that sort its columns have each freed some 100 MB."""
    if source.expected_bytes > PIECE_BYTES:
        give_back_memory()


def _tables(columns: Arrays) -> dict[str, Arrays]:
    """Removes the columns of all tables, and returns those of each that has any, so that they are freed after use."""
    tables: dict[str, Arrays] = {}
    for key in list(columns):
        table, dot, name = key.partition(".")
        if dot:
            tables.setdefault(table, {})[name] = columns.pop(key)
    return tables


def _choose_device_and_stream(gpu: Arrays, lanes: list[tuple[Any, Any]], said: list[str], *, inline: bool) -> Written:
    """Sets the device and stream of each activity, in place.

    They come from the arguments; an argument that is missing is replaced by the lane's pid (device) or tid (stream).
    An activity that was moved to another lane has its real stream in the argument ``original_stream``.

    Returns:
        Annotations and streams as written in the file.
    """
    lane_device = np.array([_lane_number(pid) for pid, _ in lanes], np.int64)
    lane_stream = np.array([_lane_number(tid) for _, tid in lanes], np.int64)
    written = Written(
        gpu.pop("annotation"), said, gpu["node"], gpu["stream"], gpu["original_stream"],
        lane_stream[gpu["lane"]], MISSING, inline,
    )  # fmt: skip
    gpu["stream"] = written.recorded_stream
    gpu["device"] = _first_known(gpu["device"], gpu["from_device"], lane_device[gpu["lane"]])
    gpu["stream"] = _first_known(gpu["original_stream"], gpu["stream"], lane_stream[gpu["lane"]])
    return written


def _lane_number(value: int | str) -> int:
    return value if isinstance(value, int) and abs(value) < 1 << 62 else 0


def _first_known(*choices: Array) -> Array:
    result = choices[-1]
    for choice in reversed(choices[:-1]):
        result = np.where(choice == MISSING, result, choice)
    return result


def _categories(host: Arrays, names: list[str]) -> Array:
    """Index in HOST_CATEGORIES of each host row, by its recorded category and, for some categories, its name."""
    recorded, name = host["category"], host["name"]
    numbers: Array = np.array([HOST_CATEGORIES.index(c) for c in RECORDED_CATEGORIES], np.uint8)
    result: Array = numbers.take(recorded)
    for category in ("range", "python"):
        rows = recorded == RECORDED_CATEGORIES.index(category)
        used = _distinct(name[rows], len(names))
        finer = np.zeros(len(names), np.uint8)
        finer[used] = [HOST_CATEGORIES.index(category_of(category, names[i])) for i in used]
        result[rows] = finer.take(name[rows])
    labels = _labels_among_ops(host, names)
    if labels.any():
        rows = (recorded == RECORDED_CATEGORIES.index("op")) & labels.take(name)
        result[rows] = HOST_CATEGORIES.index("range")
    return result


def _distinct(numbers: Array, count: int) -> Array:
    """The distinct numbers, all below ``count``, ascending; much faster than `np.unique` for many rows."""
    return np.flatnonzero(_occurring(numbers, count))


def _occurring(numbers: Array, count: int) -> Mask:
    """Which numbers below ``count`` occur."""
    occurs = np.zeros(count, np.bool_)
    occurs[numbers] = True
    return occurs


def _labels_among_ops(host: Arrays, names: list[str]) -> Array:
    """A mask of the names that are a user's ranges, recorded as operators."""

    def used(rows: Array) -> list[str]:
        return [names[i] for i in _distinct(host["name"][rows], len(names)).tolist()]

    ops = host["category"] == RECORDED_CATEGORIES.index("op")
    known = ops & ((host["sequence"] != MISSING) | host.pop("is_kernel"))
    ranges = host["category"] == RECORDED_CATEGORIES.index("range")
    labels = ranges_among_ops(used(ops), used(known), used(ranges))
    return np.array([text in labels for text in names], np.bool_)


def _launches(host: Arrays, gpu: Arrays, lanes: list[tuple[Any, Any]]) -> Arrays:
    """Lane and correlation of the API calls that launched device work; empty if one process made all API calls."""
    calls: Array = IS_API_CALL.take(host["category"])
    lane = host["lane"][calls]
    if len({lanes[number][0] for number in _distinct(lane, len(lanes)).tolist()}) < 2:
        return {"lane": lane[:0], "correlation": host["correlation"][:0]}
    correlation = host["correlation"][calls]
    launched = np.isin(correlation, gpu["correlation"]) & (correlation != MISSING)
    return {"lane": lane[launched], "correlation": correlation[launched]}


def _warnings(columns: Arrays, gpu: Arrays, host: Arrays, lanes: Lanes) -> list[str]:
    """Warnings about rows left out or repaired; also replaces unusable durations by 0, in place."""
    warnings = list(lanes.warnings)
    if not len(gpu["start"]) and not len(host["start"]):
        warnings.append(
            f"none of {several(columns['events'], 'event')} is of torch.profiler; other programs write such JSON, too"
        )
    if columns["damaged"]:
        warnings.append(f"{columns['damaged']:,} of {columns['events']:,} events could not be read; left out")
    if columns["unpaired"]:
        warnings.append(
            f"left out: {several(columns['unpaired'], 'begin/end event')}; torch.profiler writes complete events only"
        )
    if columns["timeless"]:
        warnings.append(f"left out: {several(columns['timeless'], 'event')} without a start time")
    for what, table in (("device activity", gpu), ("host range", host)):
        unusable = table["duration"] < 0
        if unusable.any():
            table["duration"] = np.where(unusable, 0, table["duration"])
            warnings.append(
                f"{several(int(unusable.sum()), what)} without a duration, or with a negative one; counted as 0"
            )
    return warnings


def _gpu_order(gpu: Arrays) -> Array:
    order: Array = np.lexsort((gpu["stream"], gpu["start"], gpu["device"], gpu["rank"]))
    return order


def _used_devices(gpu: Arrays, order: Array) -> set[tuple[int, int]]:
    """Rank and device of every device that has activities.

    Args:
        gpu: columns of the file.
        order: from `_gpu_order`, in which the rows of a device are contiguous.
    """
    rank, device = gpu["rank"][order], gpu["device"][order]
    first = np.ones(len(order), np.bool_)
    first[1:] = (rank[1:] != rank[:-1]) | (device[1:] != device[:-1])
    return set(zip(rank[first].tolist(), device[first].tolist(), strict=True))


def _host_order(host: Arrays, lanes: Lanes) -> Array:
    """Row numbers sorted by rank, process and thread, then by start with outer rows before inner rows."""
    track = np.lexsort((lanes.thread, lanes.process, lanes.rank))
    position = np.empty(len(track), np.uint16 if len(track) <= 1 << 16 else np.int64)
    position[track] = np.arange(len(track))
    return host_order(position[host["lane"]], host["category"], host["start"], host["duration"])


def _earliest(tables: Tables) -> int | None:
    starts = (table["start"].min() for table in (tables.gpu, tables.host))
    return min((start for start in starts if isinstance(start, int)), default=None)
