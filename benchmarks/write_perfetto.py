"""How long a timeline takes to become a Perfetto trace, and how large that is; other ways beside it.

Makes a trace of as many slices (half host ranges, half device activities, each launched by one of
the ranges), then times in this process, on one core:

    thence       ``write_perfetto``: all arguments, flows and counters
    chrome       ``write_chrome``: the same slices as JSON, our own writer
    json.dump    of the same events as dictionaries, which are made before the clock starts
    perfetto     the perfetto package's TraceProtoBuilder, an object per packet, on a part of the
                 kernels, with five arguments and a flow each; the time is scaled up

    python benchmarks/write_perfetto.py [--slices 1000000] [--peer-slices 50000]

Memory is the largest resident set of this process until thence is done, tables included.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from command_line import documented_parser
from thence.analysis.timelines.timeline import timeline
from thence.attribution.attribute import attribute
from thence.model.tables import GPU, HOST, Meta, Tables
from thence.writers.timelines.chrome import write_chrome
from thence.writers.timelines.perfetto.write import write_perfetto

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.model.timeline import Timeline


def synthetic(slices: int) -> Tables:
    """Launches inside ops on one thread; kernels on four streams that overlap in part."""
    random = np.random.default_rng(0)
    kernels = slices // 2
    start = 4_338_138_103_542_675 + np.arange(kernels) * 5_000 + random.integers(0, 900, kernels)
    names = pl.Series([f"void at::native::kernel_{i}<float, 4>(int, float*)" for i in range(500)])
    ops = pl.Series([f"aten::op_{i}" for i in range(100)])
    zeros, ones = np.zeros(kernels, np.int64), np.ones(kernels, np.int64)
    triple = np.stack([random.integers(1, 5_000, kernels), ones, ones], axis=1).astype(np.uint32)
    gpu = GPU.frame(
        {
            "rank": zeros, "device": zeros, "stream": 7 + np.arange(kernels) % 4,
            "kind": pl.repeat("kernel", kernels, eager=True),
            "name": names[random.integers(0, 500, kernels)],
            "start": start + 9_000, "duration": random.integers(1_000, 20_050, kernels),
            "correlation": np.arange(1, kernels + 1), "external": np.arange(1, kernels + 1) // 2,
            "grid": pl.Series(triple, dtype=pl.Array(pl.UInt32, 3)),
            "block": pl.Series(triple[:, [1, 0, 2]], dtype=pl.Array(pl.UInt32, 3)),
            "registers": random.integers(16, 255, kernels), "shared_memory": random.integers(0, 99_000, kernels),
        }
    )  # fmt: skip
    is_op = np.arange(kernels) % 2 == 0
    rows = np.arange(kernels)
    host = HOST.frame(
        {
            "rank": zeros, "process": zeros + 4242, "thread": zeros + 4242,
            "category": pl.Series(np.where(is_op, "op", "runtime")),
            "name": pl.select(pl.when(pl.Series(is_op)).then(ops[random.integers(0, 100, kernels)])
                              .otherwise(pl.lit("cudaLaunchKernel"))).to_series(),
            "start": np.where(is_op, start, np.roll(start, 1) + 1_000),
            "duration": np.where(is_op, 9_000, 3_000),
            "correlation": pl.select(pl.when(pl.Series(~is_op)).then(pl.Series(rows + 1))).to_series(),
            "external": rows // 2,
            "parent": pl.select(pl.when(pl.Series(~is_op)).then(pl.Series(rows - 1))).to_series(),
        }
    )  # fmt: skip
    # Two kernels a launch: the activity and the one before it share their correlation id.
    gpu = gpu.with_columns(correlation=pl.Series((rows | 1) + 1))
    return Tables(gpu=gpu, host=host, meta=Meta(inputs=("synthetic",)))


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = function()
    return time.perf_counter() - begin, result


def json_dumped(view: Timeline) -> tuple[float, int]:
    """json.dump of the same events, read back from our own JSON."""
    text = io.BytesIO()
    write_chrome(view, text)
    document = json.loads(text.getvalue())
    del text
    with tempfile.TemporaryFile("w+") as file:
        seconds, _ = timed(lambda: json.dump(document, file))
        return seconds, file.tell()


def peer(view: Timeline, slices: int) -> float:
    """Seconds per kernel with the perfetto package's own builder: arguments as in ours but for grid and block."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    keys = ["stream", "correlation", "external", "registers", "shared_memory"]
    columns = [pl.col("name").to_physical(), "start", "duration", *keys]
    rows = view.trace.gpu.head(slices).select(columns).rows()

    def build() -> bytes:
        builder = TraceProtoBuilder()
        for number, (name, start, duration, *values) in enumerate(rows):
            packet = builder.add_packet()
            packet.timestamp = start
            packet.trusted_packet_sequence_id = 1
            packet.sequence_flags = 2
            event = packet.track_event
            event.type = TrackEvent.TYPE_SLICE_BEGIN
            event.track_uuid = values[0]
            event.name_iid = name + 1
            event.category_iids.append(1)
            event.terminating_flow_ids.append(number + 1)
            for key, value in enumerate(values):
                annotation = event.debug_annotations.add()
                annotation.name_iid = key + 1
                annotation.int_value = value
            packet = builder.add_packet()
            packet.timestamp = start + duration
            packet.trusted_packet_sequence_id = 1
            packet.track_event.type = TrackEvent.TYPE_SLICE_END
            packet.track_event.track_uuid = values[0]
        return bytes(builder.serialize())

    return timed(build)[0] / len(rows)


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--slices", type=int, default=1_000_000)
    parser.add_argument("--peer-slices", type=int, default=50_000)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tables = synthetic(options.slices)
    attributed, trace = timed(lambda: attribute(tables))
    viewed, view = timed(lambda: timeline(trace))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "trace.pftrace"
        with target.open("wb") as file:
            seconds, _ = timed(lambda: write_perfetto(view, file))
        size = target.stat().st_size
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        chrome = Path(folder) / "trace.json"
        with chrome.open("wb") as file:
            chrome_seconds, _ = timed(lambda: write_chrome(view, file))
        chrome_size = chrome.stat().st_size
    print(
        f"{options.slices:,} slices: attribution {attributed:.2f} s, "
        f"counters {viewed:.2f} s ({len(view.counters):,} values)"
    )
    alone = io.BytesIO()
    write_perfetto(dataclasses.replace(view, counters=view.counters.clear()), alone)
    size_alone = alone.tell()
    memory = f"peak memory {peak:,.0f} MiB; {size_alone / 1e6:.1f} MB without counters"
    show("thence", seconds, size, memory)
    of_size = "times the size of the same events"
    show("chrome", chrome_seconds, chrome_size, f"{chrome_size / size_alone:.2f} {of_size}")
    dumped, dumped_size = json_dumped(view)
    ratios = f"{dumped / seconds:.1f} times the time, {dumped_size / size_alone:.2f} {of_size}"
    show("json.dump", dumped, dumped_size, ratios)
    scaled = peer(view, options.peer_slices) * options.slices
    ratios = f"without grid and block, counters, names; scaled up: {scaled / seconds:.1f} times the time"
    show("perfetto", scaled, 0, ratios)


def show(name: str, seconds: float, size: int, text: str) -> None:
    megabytes = f"{size / 1e6:7.1f} MB" if size else " " * 10
    print(f"{name:10s}  {seconds:6.2f} s  {megabytes}  {text}")


if __name__ == "__main__":
    main()
