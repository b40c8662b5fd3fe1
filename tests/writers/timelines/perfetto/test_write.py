"""Written Perfetto traces, decoded with Perfetto's own protos."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

import thence
from collective_jobs import skewed
from helpers import FSDP, LABEL, OP, PAIR, STACK, event, kernel, launch, opened, recording, shared
from perfetto_reading import Decoded, decoded, written_bytes
from thence.writers.timelines.perfetto.tracks import Process, Track

if TYPE_CHECKING:
    from pathlib import Path

ONE_GPU = "GPU 0"
KINDS = (STACK, *map(recording, ("torch_fsdp_rank0", "torch_compile_rank0", "torch-2.12_graph_replay_rank0")))
"""Recordings with what others have not: Python stacks, collectives, compiled code, nodes of graphs."""
END = (pl.col("start") + pl.col("duration")).alias("end")


def of(trace: thence.Trace, *lanes: str, clocks: str = "aligned") -> Decoded:
    """What is written, without the tracks of spans, which have a test of their own."""
    without = dataclasses.replace(trace.timeline(lanes, clocks), spans=None)
    return decoded(written_bytes(without))


def times(result: Decoded, path: str) -> list[tuple[str, int, int]]:
    return [(s.name, s.start, s.end - s.start) for s in result.on(path)]


def test_causes_of_idle_time_and_the_critical_path_are_tracks() -> None:
    trace = shared(recording("torch_compile_rank0"))
    result = decoded(written_bytes(trace.timeline()))
    spans = [s for s in result.slices if s.category == "span"]
    causes = trace.idle().pieces.select(pl.col("cause").cast(pl.String), "start", END)
    idle = [(s.name, s.start, s.end) for s in spans if result.title(s.track) == "why idle"]
    assert Counter(idle) == Counter(causes.rows())
    tiles = trace.critical_path().select("start", END)
    shown = [(s.start, s.end) for s in spans if result.title(s.track) == "critical path"]
    assert Counter(shown) == Counter(tiles.rows())


def test_kernels_are_on_their_stream_with_their_times(tmp_path: Path) -> None:
    result = of(opened(tmp_path, PAIR))
    assert times(result, f"{ONE_GPU} > stream 7") == [("gemm", 40_250, 5_125), ("gemm", 60_000, 5_000)]
    assert times(result, "process 1 > thread 2") == [
        ("train", 1_500, 99_000), ("aten::mm", 10_000, 20_000),
        ("cudaLaunchKernel", 12_001, 1_000), ("cudaLaunchKernel", 50_000, 1_000),
    ]  # fmt: skip
    assert [s.depth for s in result.on("process 1 > thread 2")] == [0, 1, 2, 1]


@pytest.mark.parametrize("path", KINDS, ids=lambda path: path.name)
def test_every_row_of_a_recording_is_there_once_and_flows_are_those_of_its_tables(path: Path) -> None:
    trace = thence.open(path)
    result = of(trace)
    assert_every_row_is_there_once(trace, result)
    assert_flows_connect_launches_with_kernels_and_forward_with_backward(trace, result)


def assert_every_row_is_there_once(trace: thence.Trace, result: Decoded) -> None:
    gpu = trace.tables.gpu.select(
        pl.col("name").cast(pl.String), "start", END,
        "stream", pl.col("correlation"),
    )  # fmt: skip
    on_streams = [
        (s.name, s.start, s.end, s.arguments["stream"], s.arguments["correlation"])
        for s in result.slices
        if result.path(s.track).endswith(f" > stream {s.arguments.get('stream')}")
    ]
    assert Counter(on_streams) == Counter(gpu.rows())
    host = trace.tables.host.select(pl.col("name").cast(pl.String), "start", END, pl.col("category").cast(pl.String))
    kinds = {"kernel", "memcpy", "memset"}
    on_host = [(s.name, s.start, s.end, s.category) for s in result.slices if s.category not in kinds]
    assert Counter(on_host) == Counter(host.rows())


def assert_flows_connect_launches_with_kernels_and_forward_with_backward(trace: thence.Trace, result: Decoded) -> None:
    source = {i: s for s in result.slices for i in s.outgoing}
    target = {i: s for s in result.slices for i in s.incoming}
    assert source.keys() >= target.keys()
    pairs = Counter((source[i].start, s.start, s.category == "op") for i, s in target.items())
    start = trace.tables.host["start"]
    launched = trace.tables.gpu.select("start").hstack(trace.tables.places.select("launch")).drop_nulls()
    backward = trace.tables.host.select("start", "forward").drop_nulls()
    expected = [(start[row], at, False) for at, row in launched.rows() if start[row] <= at]
    expected += [(start[row], at, True) for at, row in backward.rows() if start[row] < at]
    assert pairs == Counter(expected)


def test_one_launch_of_a_graph_leads_to_all_of_its_kernels(tmp_path: Path) -> None:
    call = event("cuda_runtime", "cudaGraphLaunch", 5, 2, args={"correlation": 1})
    trace = opened(tmp_path, [call, *(kernel(1, 10 + 10 * i) for i in range(300))])
    result = of(trace)
    (source,) = [s for s in result.slices if s.name == "cudaGraphLaunch"]
    kernels = result.on(f"{ONE_GPU} > stream 7")
    assert sorted(source.outgoing) == sorted(i for s in kernels for i in s.incoming)
    assert len(set(source.outgoing)) == 300


def test_a_kernel_that_seems_to_start_before_its_launch_is_still_tied_to_it(tmp_path: Path) -> None:
    result = of(opened(tmp_path, [launch(1, 50), kernel(1, 40)]))
    first, second = sorted(result.slices, key=lambda s: s.start)
    assert (first.name, second.name) == ("gemm", "cudaLaunchKernel")
    assert first.outgoing == second.outgoing != []
    assert first.incoming == second.incoming == []


def overlapping() -> list[dict[str, Any]]:
    """On stream 7 two kernels cross, on stream 8 one lies inside another."""
    other = {"args": {"stream": 8}, "tid": 8}
    return [
        kernel(1, 10, 10),
        kernel(2, 15, 10),
        kernel(3, 30, 5),
        kernel(4, 10, 10, **other),
        kernel(5, 12, 3, **other),
    ]


def test_tracks_share_a_merge_key_exactly_where_lanes_were_split(tmp_path: Path) -> None:
    result = of(opened(tmp_path, overlapping()))
    by_name: dict[str, list[Any]] = {}
    for track in result.tracks.values():
        by_name.setdefault(track.name, []).append(track)
    first, second = by_name["stream 7"]
    assert first.sibling_merge_key == second.sibling_merge_key != ""
    assert first.sibling_merge_behavior == 3
    assert first.parent_uuid == second.parent_uuid
    assert first.sibling_order_rank == second.sibling_order_rank
    (alone,) = by_name["stream 8"]
    assert not alone.HasField("sibling_merge_key")
    assert not alone.HasField("sibling_merge_behavior")
    shown = {(s.start, s.end, s.track == first.uuid) for s in result.on(f"{ONE_GPU} > stream 7")}
    assert shown == {(10_000, 20_000, True), (15_000, 25_000, False), (30_000, 35_000, True)}
    assert [s.depth for s in result.on(f"{ONE_GPU} > stream 8")] == [0, 1]


def test_host_ranges_that_cross_get_a_row_below_their_thread(tmp_path: Path) -> None:
    late = event("cuda_runtime", "cudaMalloc", 25, 20, args={"correlation": 9})
    result = of(opened(tmp_path, [OP, late, kernel(1, 90)]))
    assert times(result, "process 1 > thread 2") == [("aten::mm", 10_000, 20_000)]
    below = "process 1 > thread 2 > thread 2, overlapping"
    assert times(result, below) == [("cudaMalloc", 25_000, 20_000)]


def test_slices_without_length_begin_and_end_at_once(tmp_path: Path) -> None:
    result = of(opened(tmp_path, [kernel(1, 10, 0), kernel(2, 10, 5), kernel(3, 15, 0), kernel(4, 15, 0)]))
    assert [(s.start, s.end) for s in result.slices] == [
        (10_000, 15_000),
        (10_000, 10_000),
        (15_000, 15_000),
        (15_000, 15_000),
    ]
    assert [s.depth for s in result.slices] == [0, 1, 0, 1]


def test_arguments_are_typed_and_interned(tmp_path: Path) -> None:
    args = {
        "External id": 5, "grid": [132, 2, 1], "block": [128, 1, 1], "registers per thread": 40,
        "shared memory": 4096, "graph id": 1, "graph node id": (1 << 32) + 7,
    }  # fmt: skip
    result = of(opened(tmp_path, [LABEL, OP, launch(1, 12), kernel(1, 40, args=args), kernel(2, 60)]))
    first, second = result.on(f"{ONE_GPU} > stream 7")
    expected = {
        "stream": ("int_value", 7), "correlation": ("int_value", 1), "external id": ("int_value", 5),
        "grid": ("array", [132, 2, 1]), "block": ("array", [128, 1, 1]),
        "registers per thread": ("int_value", 40), "shared memory bytes": ("int_value", 4096),
        "graph id": ("uint_value", 1), "graph node id": ("uint_value", 4294967303),
        "op": ("string_value_iid", "aten::mm"), "ops": ("string_value_iid", "aten::mm"),
        "label": ("string_value_iid", "train"), "phase": ("string_value_iid", "other"),
    }  # fmt: skip
    assert {k: (first.types[k], v) for k, v in first.arguments.items()} == expected
    assert second.arguments == {"stream": 7, "correlation": 2}
    assert set(result.interned["names"].values()) == {"train", "aten::mm", "cudaLaunchKernel", "gemm"}
    for texts in result.interned.values():
        assert len(set(texts.values())) == len(texts)


def test_lanes_show_kernels_again_beside_the_streams(tmp_path: Path) -> None:
    both = [*PAIR, event("user_annotation", "other", 200, 50), launch(3, 210), kernel(3, 45, 40)]
    result = of(opened(tmp_path, both), "label")
    assert len(result.on(f"{ONE_GPU} > stream 7")) == 3
    assert times(result, f"{ONE_GPU} > labels > train") == [("gemm", 40_250, 5_125), ("gemm", 60_000, 5_000)]
    assert times(result, f"{ONE_GPU} > labels > other") == [("gemm", 45_000, 40_000)]
    (again,) = result.on(f"{ONE_GPU} > labels > other")
    assert again.arguments["correlation"] == 3
    assert again.incoming == []


def test_lanes_by_collective_and_process_group() -> None:
    trace = shared(FSDP[0])
    result = of(trace, "collective", "process-group")
    device = next(result.path(u) for u, t in result.tracks.items() if "GPU 0" in t.process.process_name)
    sent = [s for s in result.slices if result.path(s.track) == f"{device} > process groups > 0 (default_pg)"]
    assert len(sent) == trace.tables.collectives.height == 28
    gathers = result.on(f"{device} > collectives > all-gather")
    scatters = result.on(f"{device} > collectives > reduce-scatter")
    assert len(gathers) + len(scatters) == 28
    assert {s.arguments["collective"] for s in scatters} == {"_reduce_scatter_base"}


def test_counters_of_hand_made_work(tmp_path: Path) -> None:
    copy = kernel(9, 12, 10, cat="gpu_memcpy", name="Memcpy", args={"stream": 8, "bytes": 500})
    result = of(opened(tmp_path, [kernel(1, 10, 5), kernel(2, 15, 5), copy]))
    named = {result.path(uuid): values for uuid, values in result.counters.items()}
    assert named == {
        f"{ONE_GPU} > busy streams": [(10_000, 1), (12_000, 2), (20_000, 1), (22_000, 0)],
        f"{ONE_GPU} > bytes in flight": [(12_000, 500), (22_000, 0)],
    }
    units = {t.name: t.counter.unit_name for t in result.tracks.values() if t.HasField("counter")}
    assert units == {"busy streams": "streams", "bytes in flight": "bytes"}


def test_bus_bandwidth_of_an_all_reduce(tmp_path: Path) -> None:
    args = {
        "Collective name": "allreduce",
        "In msg nelems": 1000,
        "Out msg nelems": 1000,
        "Group size": 4,
        "dtype": "Float",
    }
    result = of(opened(tmp_path, [kernel(1, 10, 2, args=args)]))
    (values,) = [v for u, v in result.counters.items() if result.title(u) == "collective bus bandwidth"]
    # 4000 bytes in 2000 ns are 2 GB/s; 2 (4 - 1) / 4 = 1.5 times that is the bus bandwidth.
    assert values == [(10_000, 3.0), (12_000, 0.0)]


def test_ranks_share_one_clock_and_it_is_said(tmp_path: Path) -> None:
    trace = thence.open(*skewed(tmp_path))
    corrections = dict(trace.alignment.corrections.select("rank", "correction_ns").rows())
    result = of(trace)
    assert any(corrections.values())
    for rank, correction in corrections.items():
        device = next(t for t in result.tracks.values() if t.process.process_name.startswith(f"rank {rank}: GPU"))
        starts = sorted(s.start for s in result.slices if result.tracks[s.track].parent_uuid == device.uuid)
        expected = trace.tables.gpu.filter(pl.col("rank") == rank)["start"] - correction
        assert starts == expected.sort().to_list()
        assert (f"clock moved by {-correction:+,} ns" in device.process.process_labels) == bool(correction)
    facts = {a.key: a for p in result.trace.packet for a in p.trace_attributes.attribute}
    for rank, correction in corrections.items():
        if correction:
            assert facts[f"thence.clock_correction_ns.rank.{rank}"].long_value == correction


def test_clocks_as_recorded_move_nothing(tmp_path: Path) -> None:
    trace = thence.open(*skewed(tmp_path))
    result = of(trace, clocks="recorded")
    starts = sorted(s.start for s in result.slices if s.category in ("kernel", "memcpy", "memset"))
    recorded = trace.tables.gpu["start"].sort()
    assert [start - starts[0] for start in starts] == (recorded - recorded[0]).to_list()
    assert not any("clock_correction" in a.key for p in result.trace.packet for a in p.trace_attributes.attribute)


def test_ranks_with_the_same_process_id_stay_apart(tmp_path: Path) -> None:
    for rank in (0, 1):
        folder = tmp_path / f"rank{rank}"
        folder.mkdir()
        opened(folder, PAIR, distributedInfo={"rank": rank})
    result = of(thence.open(tmp_path / "rank0" / "trace.json", tmp_path / "rank1" / "trace.json"))
    processes = [t.process for t in result.tracks.values() if t.HasField("process")]
    assert [p.process_name for p in processes] == [
        *("rank 0: GPU 0", "rank 1: GPU 0"),
        *("rank 0: process 1", "rank 1: process 1"),
    ]
    assert len({p.pid for p in processes}) == 4
    order = [t.sibling_order_rank for t in result.tracks.values() if t.HasField("process")]
    assert order == sorted(order)


def test_the_clock_is_tied_to_wall_time(tmp_path: Path) -> None:
    result = of(opened(tmp_path, PAIR, baseTimeNanoseconds=1_790_857_026_000_000_000))
    snapshot = result.trace.packet[0].clock_snapshot
    clocks = {clock.clock_id: clock.timestamp for clock in snapshot.clocks}
    assert snapshot.primary_trace_clock == protos.BUILTIN_CLOCK_BOOTTIME == 6
    assert clocks == {6: 1_500, 1: 1_790_857_026_000_001_500}
    assert result.trace.packet[0].trace_packet_defaults.timestamp_clock_id == 6


def test_times_before_the_clock_began_are_counted_from_the_first(tmp_path: Path) -> None:
    result = of(opened(tmp_path, [kernel(1, "-2.500", 1), kernel(2, 3, 1)]))
    assert [s.start for s in result.slices] == [0, 5_500]
    facts = {a.key: a.long_value for p in result.trace.packet for a in p.trace_attributes.attribute}
    assert facts["thence.origin_ns"] == -2_500


def test_odd_names_and_process_ids(tmp_path: Path) -> None:
    name = 'quotes " \\ and Ω\u2028'
    odd = [event("cpu_op", name, 1, 1, pid="tag", tid=-5), kernel(1, 5, name="")]
    result = of(opened(tmp_path, odd))
    assert {s.name for s in result.slices} == {name, ""}
    assert all(0 < t.process.pid < 1 << 31 for t in result.tracks.values() if t.HasField("process"))


def test_an_empty_timeline_is_a_valid_trace() -> None:
    result = of(thence.Trace(shared(FSDP[0]).recorded.__class__()))
    assert result.slices == []


def test_xla_programs_have_a_row_of_their_own() -> None:
    from helpers import DATA

    trace = thence.open(DATA / "jax" / "remat.xplane.pb.gz")
    result = of(trace)
    shown = [s for s in result.slices if result.title(s.track) == "XLA programs"]
    expected = trace.tables.programs.select(pl.col("name").cast(pl.String), "start", END)
    assert not expected.is_empty()
    assert Counter((s.name, s.start, s.end) for s in shown) == Counter(expected.rows())


def test_a_descriptor_says_what_it_stands_for() -> None:
    track = Track(3, "x", 0, 4, Process(12, "rank 0", ("note",)))
    message = protos.TrackDescriptor.FromString(track.descriptor())
    assert (message.process.pid, message.process.process_name) == (12, "rank 0")
    assert (message.process_ordering, message.sibling_order_rank) == (1, 4)
    assert list(message.process.process_labels) == ["note"]
