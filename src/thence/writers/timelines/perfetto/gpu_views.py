"""Device activities for Perfetto's own GPU views, as GpuRenderStageEvent packets.

Perfetto's UI shows them under "GPU" and, by device and stream, under their process; its compute tabs list them.
They duplicate the slices on thence's own tracks, so they are written only on request.

Field numbers: protos/perfetto/trace/gpu/gpu_render_stage_event.proto (event, specification, context, launch),
system_info/gpu_info.proto, trace_packet.proto (fields 53 and 128) and interned_data.proto (fields 23 and 24).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.columns import values_or
from thence.model.kernel_names import short_names
from thence.writers.timelines.perfetto.packets import constant, delimited, joined, only_where, varint_column
from thence.writers.wire_format import VARINT, bytes_field, field_tag, text_field, uint_field

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from thence.model.arrays import Int64, UInt8
    from thence.model.timeline import Timeline
    from thence.writers.timelines.perfetto.layout import Layout
    from thence.writers.timelines.perfetto.packets import Part


_CHUNK_ROWS = 8192  # rows encoded at a time: their data stays in the CPU caches
_OTHER, _COMPUTE = 0, 2  # InternedGpuRenderStageSpecification.RenderStageCategory
_CUDA, _HIP = 4, 5  # InternedGraphicsContext.Api
_EVENT, _GPU_INFO, _TIMESTAMP = 53, 128, 8  # fields of TracePacket
_CONTEXTS, _SPECIFICATIONS = 23, 24  # fields of InternedData
_EVENT_ID, _DURATION, _CONTEXT, _GPU, _QUEUE, _STAGE, _LAUNCH = 1, 2, 5, 11, 13, 14, 21  # fields of GpuRenderStageEvent
_GRID, _BLOCK, _ARGUMENT = 1, 2, 3  # fields of ComputeKernelLaunch
_SEQUENCE_AND_STATE = uint_field(10, 1) + uint_field(13, 2)  # as `_SEQUENCE` and `_NEEDS_STATE` of packets.py


@dataclass(frozen=True)
class GpuViews:
    """The data of one file for Perfetto's GPU views.

    Attributes:
        interned: InternedData messages with contexts, queues and stages.
        info: content of the packet that describes the GPUs.
        rows: int64 columns event (its id), start and duration (ns), gpu, context, queue and stage (numbers), one
            row per activity.
        launches: device and stream of each activity (int64, -1 for none), and grid and block (shape (n, 3), 0 for
            none).
    """

    interned: Sequence[bytes]
    info: bytes
    rows: Mapping[str, Int64]
    launches: Mapping[str, Int64]

    def packets(self) -> Iterator[UInt8]:
        """Yields packets, one for each activity, in the order of the table."""
        for low in range(0, len(self.rows["start"]), _CHUNK_ROWS):
            chosen = slice(low, low + _CHUNK_ROWS)
            rows = {name: values[chosen] for name, values in self.rows.items()}
            launches = {name: values[chosen] for name, values in self.launches.items()}
            yield _encoded(rows, launches)


def gpu_views(timeline: Timeline, made: Layout) -> GpuViews:
    """The activities of a timeline for Perfetto's GPU views.

    Args:
        made: its layout, which has the process of each rank.
    """
    gpu = timeline.trace.gpu
    device, devices = _numbered(gpu.select("rank", "device"))
    queue, queues = _numbered(gpu.select("rank", "device", "stream"))
    stage, stages = _numbered(gpu.select(pl.col("kind").cast(pl.String), pl.col("name").cast(pl.String)))
    start = gpu["start"].to_numpy() - made.origin_ns
    rows = {
        "event": np.arange(1, gpu.height + 1),
        "start": start,
        "duration": gpu["duration"].to_numpy(),
        "gpu": device,
        "context": device + 1,
        "queue": queue + 1,
        "stage": stage + 1 + len(queues),
    }
    launches = {
        "device": values_or(gpu["device"], -1).astype(np.int64),
        "stream": values_or(gpu["stream"], -1),
        "grid": _three(gpu["grid"]),
        "block": _three(gpu["block"]),
    }
    names = _device_names(timeline, devices)
    specifications = (*_queues(queues), *_stages(stages))
    contexts = [
        bytes_field(_CONTEXTS, uint_field(1, i + 1) + uint_field(2, _pid(made, key)) + uint_field(3, _api(timeline)))
        for i, key in enumerate(devices)
    ]  # fmt: skip
    interned = [
        *contexts,
        *(bytes_field(_SPECIFICATIONS, uint_field(1, i) + text) for i, text in enumerate(specifications, 1)),
    ]
    info = bytes_field(_GPU_INFO, b"".join(bytes_field(1, text_field(1, name)) for name in names))
    return GpuViews(interned, info, rows, launches)


def _numbered(frame: pl.DataFrame) -> tuple[Int64, list[tuple[object, ...]]]:
    """A number from 0 for each row's combination of values, and the distinct combinations in that order."""
    distinct = frame.unique(maintain_order=True).sort(frame.columns, nulls_last=True)
    numbers = frame.join(
        distinct.with_row_index("number"), on=frame.columns, how="left", nulls_equal=True, maintain_order="left"
    )
    return numbers["number"].cast(pl.Int64).to_numpy(), distinct.rows()


def _three(values: pl.Series) -> Int64:
    """The three numbers of each row as shape (n, 3); 0 for null."""
    columns = [values.arr.get(i).fill_null(0).cast(pl.Int64).to_numpy() for i in range(3)]
    return np.stack(columns, axis=1)


def _device_names(timeline: Timeline, devices: Sequence[tuple[object, ...]]) -> list[str]:
    models = {(d.rank, d.device): d.name for d in timeline.trace.meta.devices if d.name}
    several = len(timeline.trace.ranks) > 1
    return [
        f"{f'rank {rank}: ' if several else ''}GPU {device}"
        + (f" ({models[rank, device]})" if (rank, device) in models else "")  # type: ignore[index]
        for rank, device in devices
    ]


def _queues(keys: Sequence[tuple[object, ...]]) -> Iterator[bytes]:
    """Yields specifications of queues, one for each stream of each device."""
    for rank, device, stream in keys:
        name = "no stream" if stream is None else f"stream {stream}"
        yield (text_field(2, name) + text_field(3, f"rank {rank} GPU {device}") + uint_field(4, _COMPUTE))


def _stages(keys: Sequence[tuple[object, ...]]) -> Iterator[bytes]:
    """Yields specifications of stages, one for each kind and name of activities, with short and full name."""
    short = short_names(str(name) for _, name in keys)
    for kind, name in keys:
        category = _COMPUTE if kind == "kernel" else _OTHER
        yield text_field(2, short[str(name)]) + text_field(3, str(name)) + uint_field(4, category)


def _pid(made: Layout, key: tuple[object, ...]) -> int:
    """The id of the process that uses a device: the first process of its rank, else the device's own track."""
    rank = int(str(key[0]))
    if rank in made.pids:
        return made.pids[rank]
    track = made.tracks.all[made.devices[rank, int(str(key[1]))] - 1]
    return track.of.pid if track.of is not None else 0


def _api(timeline: Timeline) -> int:
    return _HIP if "rocm" in timeline.trace.meta.accelerators else _CUDA


def _encoded(rows: Mapping[str, Int64], launches: Mapping[str, Int64]) -> UInt8:
    count = len(rows["start"])
    fields = {
        _EVENT_ID: "event", _DURATION: "duration", _GPU: "gpu", _CONTEXT: "context", _QUEUE: "queue", _STAGE: "stage",
    }  # fmt: skip
    event: list[Part] = []
    for number, name in fields.items():
        event += [constant(field_tag(number, VARINT), count), varint_column(rows[name])]
    event += delimited(_LAUNCH, _launch(launches))
    content = [
        constant(_SEQUENCE_AND_STATE + field_tag(_TIMESTAMP, VARINT), count),
        varint_column(rows["start"]),
        *delimited(_EVENT, event),
    ]
    return joined(delimited(1, content))


def _launch(launches: Mapping[str, Int64]) -> list[Part]:
    """Grid, block, device and stream of each launch, as far as the activity has them."""
    parts: list[Part] = []
    for number, name in ((_GRID, "grid"), (_BLOCK, "block")):
        sizes = launches[name]
        inside = [
            part
            for axis in range(3)
            for part in (constant(field_tag(axis + 1, VARINT), len(sizes)), varint_column(sizes[:, axis]))
        ]
        parts += only_where(delimited(number, inside), np.asarray(sizes.any(axis=1)))
    for name in ("device", "stream"):
        values = launches[name]
        inside = [
            constant(text_field(2, name) + field_tag(4, VARINT), len(values)),
            varint_column(np.maximum(values, 0)),
        ]
        parts += only_where(delimited(_ARGUMENT, inside), values >= 0)
    return parts
