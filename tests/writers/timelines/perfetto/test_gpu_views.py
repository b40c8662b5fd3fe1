"""What Perfetto's own GPU views read, decoded with Perfetto's own protos against the tables."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

import thence
from helpers import FSDP, PAIR, RECORDINGS, kernel, opened
from perfetto_reading import written_bytes

if TYPE_CHECKING:
    from pathlib import Path

SPECIFICATION = protos.InternedGpuRenderStageSpecification


def packets(trace: thence.Trace, *, gpu_views: bool = True) -> list[Any]:
    timeline = dataclasses.replace(trace.timeline(), gpu_views=gpu_views)
    return list(protos.Trace.FromString(written_bytes(timeline)).packet)


def interned(found: list[Any], kind: str) -> dict[int, Any]:
    return {entry.iid: entry for p in found for entry in getattr(p.interned_data, kind)}


def events(found: list[Any]) -> list[Any]:
    return [p for p in found if p.HasField("gpu_render_stage_event")]


@pytest.mark.parametrize("paths", [RECORDINGS[:1], FSDP[:2]], ids=["one rank", "two ranks"])
def test_every_activity_is_there_once(paths: list[Path]) -> None:
    trace = thence.open(*paths)
    found = packets(trace)
    specifications = interned(found, "gpu_specifications")
    (info,) = [p.gpu_info for p in found if p.HasField("gpu_info")]
    rows = []
    for packet in events(found):
        event = packet.gpu_render_stage_event
        stage, queue = specifications[event.stage_iid], specifications[event.hw_queue_iid]
        arguments = {argument.name: argument.uint_value for argument in event.launch.args}
        grid = event.launch.grid_size
        rows.append(
            (
                stage.description, queue.name, info.gpus[event.gpu_id].name.partition(" (")[0], packet.timestamp,
                event.duration, arguments["device"], arguments["stream"], (grid.x, grid.y, grid.z),
                stage.category == SPECIFICATION.COMPUTE,
            )
        )  # fmt: skip
    several = len(paths) > 1
    expected = [
        (
            name, f"stream {stream}", f"rank {rank}: GPU {device}" if several else f"GPU {device}", start, duration,
            device, stream, tuple(grid) if grid else (0, 0, 0), kind == "kernel",
        )
        for name, stream, rank, device, start, duration, grid, kind in trace.timeline().trace.gpu.select(
            pl.col("name").cast(pl.String), "stream", "rank", "device", "start", "duration", "grid",
            pl.col("kind").cast(pl.String),
        ).rows()
    ]  # fmt: skip
    assert Counter(rows) == Counter(expected)
    ids = [packet.gpu_render_stage_event.event_id for packet in events(found)]
    assert len(set(ids)) == len(ids)


def test_a_context_is_of_the_process_that_the_host_threads_are_of(tmp_path: Path) -> None:
    found = packets(opened(tmp_path, PAIR))
    (context,) = interned(found, "graphics_contexts").values()
    (process,) = {p.track_descriptor.thread.pid for p in found if p.track_descriptor.HasField("thread")}
    assert context.pid == process
    assert context.api == protos.InternedGraphicsContext.CUDA
    assert {p.gpu_render_stage_event.context for p in events(found)} == {context.iid}


def test_a_copy_has_no_grid_and_short_names_are_shown(tmp_path: Path) -> None:
    copy = kernel(2, 30, 5, cat="gpu_memcpy", name="Memcpy HtoD", args={"bytes": 8, "stream": 7, "device": 0})
    long = "void at::native::fill<4, float>(int)"
    found = packets(opened(tmp_path, [kernel(1, 10, 5, name=long), copy]))
    stages = interned(found, "gpu_specifications")
    names = {stages[p.gpu_render_stage_event.stage_iid].name: p for p in events(found)}
    assert set(names) == {"fill", "Memcpy HtoD"}
    assert not names["Memcpy HtoD"].gpu_render_stage_event.launch.HasField("grid_size")


def test_they_are_written_only_when_asked_for(tmp_path: Path) -> None:
    trace = opened(tmp_path, PAIR)
    assert events(packets(trace, gpu_views=False)) == []
    trace.convert(tmp_path / "t.pftrace", gpu_views=True)
    written = protos.Trace.FromString((tmp_path / "t.pftrace").read_bytes())
    assert len(events(list(written.packet))) == trace.tables.gpu.height
