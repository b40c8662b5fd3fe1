"""The XSpace reader: sums are read from the bytes by protowire, or built by hand."""

from __future__ import annotations

import functools
import gzip
import io
import lzma
import re
import shutil
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from helpers import DATA
from protowire import every, first, message, pack
from thence.attribution.attribute import attribute
from thence.errors import DamagedInput, InputError
from thence.model.tables import COLLECTIVES, GPU, HOST, PROGRAMS, THREADS, Tables
from thence.readers.jax import sniffing, xplane
from thence.readers.jax.hlo_dump import hlo_dump_modules
from thence.readers.source import Source

if TYPE_CHECKING:
    from pathlib import Path

JAX = DATA / "jax"
SINGLE = "jax_single_nocb.xplane.pb.gz"
MOVED = "streams_moved.xplane.pb"
SHARDED = "jax_fsdp2.xplane.pb.gz"


def read(path: Path | str) -> Tables:
    with Source.open(str(path)) as source:
        return xplane.read(source, lambda _done: None)


def of_bytes(data: bytes, name: str = "x.xplane.pb") -> Tables:
    return xplane.read(Source(name, io.BytesIO(data), 0, plain=False), lambda _done: None)


def content(name: str) -> bytes:
    data = (JAX / name).read_bytes()
    return gzip.decompress(data) if name.endswith(".gz") else data


def planes(data: bytes) -> dict[str, bytes]:
    return {first(plane)[2].decode(): plane for plane in every(data, 1)}


@functools.cache
def device_events(data: bytes, device: int = 0) -> list[tuple[int, int, dict[str, Any]]]:
    """(stream, duration in ps, stats by name) of every event of one GPU."""
    plane = planes(data)[f"/device:GPU:{device}"]
    names = {first(e)[1]: first(first(e)[2]).get(2, b"").decode() for e in every(plane, 5)}
    rows = []
    for line in every(plane, 3):
        for event in every(line, 4):
            stats = {}
            for stat in map(first, every(event, 4)):
                value = next((v for k, v in stat.items() if k != 1), 0)
                stats[names[stat[1]]] = names[value] if 7 in stat else value
            rows.append((first(line)[1], first(event).get(3, 0), stats))
    return rows


# --- the recorded files -------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[SINGLE, MOVED, "streams_default.xplane.pb"])
def recorded(request: pytest.FixtureRequest) -> tuple[Tables, bytes]:
    return read(JAX / request.param), content(request.param)


def test_schemas(recorded: tuple[Tables, bytes]) -> None:
    tables, _ = recorded
    frames = (tables.gpu, tables.host, tables.programs, tables.collectives, tables.threads)
    for table, frame in zip((GPU, HOST, PROGRAMS, COLLECTIVES, THREADS), frames, strict=True):
        assert dict(frame.schema) == table.schema


def test_sums_per_instruction_and_stream(recorded: tuple[Tables, bytes]) -> None:
    tables, data = recorded
    expected: dict[tuple[int, str], int] = {}
    for stream, duration, stats in device_events(data):
        key = (stream, stats["hlo_op"])
        expected[key] = expected.get(key, 0) + duration // 1000
    found = tables.gpu.group_by("stream", pl.col("hlo").cast(pl.String)).agg(pl.col("duration").sum())
    assert {(s, h): d for s, h, d in found.rows()} == expected


def test_kinds_are_those_of_the_details(recorded: tuple[Tables, bytes]) -> None:
    tables, data = recorded
    stats = [stats for _, _, stats in device_events(data)]
    counts = dict(tables.gpu["kind"].value_counts().rows())
    assert counts["kernel"] == sum("kernel_details" in s for s in stats)
    assert counts.get("memcpy", 0) == sum("memcpy_details" in s for s in stats)
    assert counts.get("memset", 0) == sum("memset_details" in map(str.lower, s) for s in stats)


def test_device_rows_are_in_order_and_point_to_their_execution(recorded: tuple[Tables, bytes]) -> None:
    tables, _ = recorded
    order = tables.gpu.select("rank", "device", "start", "stream")
    assert order.equals(order.sort("rank", "device", "start", "stream"))
    runs = tables.programs.select(run=pl.int_range(pl.len(), dtype=pl.Int32), begin="start", length="duration")
    inside = tables.gpu.join(runs, left_on="program", right_on="run", how="left")
    end = pl.col("start") + pl.col("duration")
    extent = inside.group_by("program").agg(
        pl.col("begin", "length").first(), low=pl.col("start").min(), high=end.max()
    )
    assert extent.filter(
        (pl.col("begin") != pl.col("low")) | (pl.col("begin") + pl.col("length") != pl.col("high"))
    ).is_empty()
    assert tables.gpu["program"].null_count() == 0


def test_executions_of_the_training_step() -> None:
    """The workload ran five steps, all of the same 200 activities; each was launched from a step."""
    tables = read(JAX / SINGLE)
    assert tables.programs["execution"].to_list() == [0, 1, 2, 3, 4]
    assert set(tables.programs["name"]) == {"jit_train_step"}
    assert tables.gpu["program"].value_counts()["count"].to_list() == [200] * 5
    steps = tables.host.filter(pl.col("category") == "step")
    assert steps["name"].to_list() == [f"train#{i}" for i in range(5)]
    ends = steps["start"] + steps["duration"]
    launches = tables.programs["launch"]
    assert all(launches >= steps["start"])
    assert all(launches + tables.programs["launch_duration"] <= ends)
    assert tables.programs["program"].unique().to_list() == [tables.hlo[0].fingerprint]


def test_twenty_calls_on_three_streams() -> None:
    tables = read(JAX / MOVED)
    assert tables.programs.height == 20
    per_call = tables.gpu.group_by("program").agg(pl.col("stream").n_unique(), pl.len())
    assert per_call.select("stream", "len").unique().rows() == [(2, 3)]
    # The profiled program names its calls matmul_add_0 to matmul_add_19.
    named = tables.host.filter(pl.col("category") == "range")["name"].to_list()
    assert sorted(named) == sorted(f"matmul_add_{i}" for i in range(20))


def test_host_rows_nest(recorded: tuple[Tables, bytes]) -> None:
    tables, data = recorded
    host = tables.host.with_row_index("row").with_columns(end=pl.col("start") + pl.col("duration"))
    order = host.select("rank", "process", "thread", "start")
    assert order.equals(order.sort(order.columns, maintain_order=True))
    parents = host.select(
        pl.col("row").cast(pl.Int32).alias("parent"),
        outer_start="start", outer_end="end", outer_thread="thread",
    )  # fmt: skip
    nested = host.join(parents, on="parent").filter(pl.col("category") != "driver")
    assert nested.filter(
        (pl.col("outer_start") > pl.col("start"))
        | (pl.col("outer_end") < pl.col("end"))
        | (pl.col("outer_thread") != pl.col("thread"))
    ).is_empty()
    assert host.height == sum(len(every(x, 4)) for x in every(planes(data)["/host:CPU"], 3))


def test_every_activity_has_its_api_call(recorded: tuple[Tables, bytes]) -> None:
    tables, _ = recorded
    calls = tables.host.filter(pl.col("category") == "driver")["correlation"]
    assert set(tables.gpu["correlation"]) <= set(calls)


def test_python_frames_read_like_those_of_torch(recorded: tuple[Tables, bytes]) -> None:
    tables, _ = recorded
    frames = tables.host.filter(pl.col("category") == "python")["name"].cast(pl.String).unique()
    assert "profiler.py(271): stop_trace" in frames
    assert not frames.str.starts_with("$").any()


def test_facts(recorded: tuple[Tables, bytes]) -> None:
    tables, _ = recorded
    (device,) = tables.meta.devices
    assert (device.name, device.compute_capability) == ("NVIDIA H200", "9.0")
    assert tables.meta.facts[0]["jax_version"] == "0.11.2"
    assert tables.meta.epoch_ns is not None
    assert 1_795_000_000 < tables.meta.epoch_ns / 1e9 < 1_796_000_000
    assert tables.meta.warnings == ()


@pytest.fixture(scope="module")
def sharded() -> tuple[Tables, list[list[tuple[int, int, dict[str, Any]]]]]:
    data = content(SHARDED)
    return read(JAX / SHARDED), [device_events(data, device) for device in (0, 1)]


def test_two_devices_with_command_buffers(sharded: tuple[Tables, list[list[Any]]]) -> None:
    tables, truth = sharded
    for device, events in enumerate(truth):
        rows = tables.gpu.filter(pl.col("device") == device)
        assert rows.height == len(events) > 1000
        assert set(rows["stream"]) == {stream for stream, _, _ in events}
        in_graphs = [e for e in events if e[2]["hlo_op"].startswith("command_buffer_")]
        without = rows.filter(pl.col("hlo").is_null())
        assert without["duration"].sum() == sum(duration // 1000 for _, duration, _ in in_graphs)
        assert without.select("graph", "node").null_count().row(0) == (0, 0)
    assert any("74 % of device time" in warning for warning in tables.meta.warnings)
    assert tables.programs.select("device", "execution").rows() == [
        (device, execution) for device in (0, 1) for execution in range(5)
    ]


def test_collectives_of_a_sharded_step(sharded: tuple[Tables, list[list[Any]]]) -> None:
    """Each NCCL kernel, and XLA's own all-reduce of one number; all among both GPUs."""
    tables, truth = sharded
    kernels = [e[2]["hlo_op"] for events in truth for e in events]
    expected = sum(re.match(r"(all-gather|reduce-scatter|all-reduce)\.", k) is not None for k in kernels)
    table = attribute(tables).collectives
    assert table.height == expected == 90
    assert set(table["group_size"]) == {2}
    names = tables.gpu["name"].gather(table["gpu"]).cast(pl.String)
    of_nccl = table.filter(names.str.starts_with("ncclDevKernel"))
    assert of_nccl.height == 80
    sizes = dict(table.group_by("collective").agg(pl.col("bytes").unique().sort()).rows())
    assert sizes["all-reduce"] == [4]
    assert sizes["all-gather"] == [2097152, 4456448, 12591104, 15728640]


# --- sniffing, ranks and damage -----------------------------------------------------------------


@pytest.mark.parametrize("name", [SINGLE, MOVED, "streams_default.xplane.pb"])
def test_sniffs_recorded_files(name: str) -> None:
    assert sniffing.sniff(content(name)[:65536])


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b'{"traceEvents": []}',
        b"SQLite format 3\0",
        lzma.decompress((JAX / "train_step_fsdp2.hlo.pb.xz").read_bytes())[:65536],
        (JAX / "train_step.thunk_metadata.pb").read_bytes(),
        message((1, message((2, "some other message")))),
    ],
)
def test_sniffs_nothing_else(head: bytes) -> None:
    assert not sniffing.sniff(head)


def test_ranks_count_the_hosts_of_a_log_directory(tmp_path: Path) -> None:
    folder = tmp_path / "plugins" / "profile" / "2026_11_20"
    folder.mkdir(parents=True)
    for host in ("b", "a", "c"):
        shutil.copy(JAX / MOVED, folder / f"{host}.xplane.pb")
    ranks = {host: read(folder / f"{host}.xplane.pb").ranks for host in "abc"}
    assert ranks == {"a": [0], "b": [1], "c": [2]}
    shutil.copy(JAX / MOVED, tmp_path / "z.xplane.pb")
    assert read(tmp_path / "z.xplane.pb").ranks == [0]


def test_a_cut_file_is_one_error(tmp_path: Path) -> None:
    data = (JAX / SINGLE).read_bytes()
    cut = tmp_path / "cut.xplane.pb.gz"
    cut.write_bytes(data[: len(data) // 2])
    with pytest.raises(DamagedInput, match="cut or damaged"):
        read(cut)
    with pytest.raises(DamagedInput, match=r"^x\.xplane\.pb"):
        of_bytes(content(MOVED)[:-100])


# --- files built by hand ------------------------------------------------------------------------

NAMES = {
    1: "correlation_id", 2: "hlo_op", 3: "hlo_module", 4: "program_id", 5: "scope_range_id",
    6: "kernel_details", 7: "jit_loop", 8: "body.1", 9: "regs:8 grid:1,1,1 block:32,1,1",
    10: "kernel_a", 11: "Hlo Proto", 12: "jit_loop(9)", 13: "cuLaunchKernel",
    14: "GpuExecutable::ExecuteThunks", 15: "command_buffer_1", 16: "cuda_graph_id", 17: "entry.1",
}  # fmt: skip


def stat(number: int, value: int, field: int = 3) -> bytes:
    return message((1, number), (field, value))


def plane(name: str, *lines: bytes, more: tuple[Any, ...] = ()) -> bytes:
    entries = [message((1, k), (2, message((1, k), (2, v)))) for k, v in NAMES.items()]
    both = [(field, entry) for entry in entries for field in (4, 5)]
    return message((2, name), *((3, line) for line in lines), *both, *more)


def line(number: int, *events: bytes) -> bytes:
    return message((1, number), *((4, event) for event in events))


def event(name: int, start_ns: int, length_ns: int, *stats: bytes) -> bytes:
    times = ((2, start_ns * 1000), (3, length_ns * 1000))
    return message((1, name), *times, *((4, s) for s in stats))


def kernel(start: int, correlation: int, op: int, scope: int | None, *more: bytes) -> bytes:
    stats = [stat(1, correlation), stat(2, op, 7), stat(3, 7, 7), stat(4, 9), stat(6, 9, 7), *more]
    if scope is not None:
        stats.append(stat(5, scope))
    return event(10, start, 10, *stats)


def space(*parts: bytes, more: tuple[Any, ...] = ()) -> bytes:
    return message(*((1, part) for part in parts), *more)


def loop_module() -> bytes:
    """A HloProto: entry.1, then a while whose body holds body.1."""

    def instruction(number: int, name: str, opcode: str, *more: tuple[int, Any]) -> bytes:
        return message((1, name), (2, opcode), (35, number), *more)

    body = message((1, "body"), (5, 1), (6, 11), (2, instruction(11, "body.1", "add")))
    entry = message(
        (1, "main"), (5, 2), (6, 22), (2, instruction(21, "entry.1", "add")),
        (2, instruction(22, "while.1", "while", (38, pack(1, 1)))),
    )  # fmt: skip
    return message((1, message((1, "jit_loop"), (5, 9), (6, 2), (3, body), (3, entry))))


def metadata_plane(proto: bytes) -> bytes:
    about = message((1, 99), (2, "jit_loop(9)"), (5, message((1, 11), (6, proto))))
    return plane("/host:metadata", more=((4, message((1, 99), (2, about))),))


def looping(*, scopes: bool, launches: bool) -> bytes:
    """Two executions: entry.1, then body.1 three times, of two kernels each."""
    kernels, calls = [], []
    correlation = scope = 0
    for execution in range(2):
        begin = execution * 1000
        runs = [(17, 1), (8, 2), (8, 2), (8, 2)]
        for op, count in runs:
            scope += 1
            for _ in range(count):
                correlation += 1
                at = begin + 100 + 20 * correlation
                kernels.append(kernel(at, correlation, op, scope if scopes else None))
                calls.append(event(13, begin + correlation, 1, stat(1, correlation)))
        calls.append(event(14, begin, 90))
    host = [plane("/host:CPU", line(5, *calls))] if launches else []
    return space(plane("/device:GPU:0", line(7, *kernels)), metadata_plane(loop_module()), *host)


@pytest.mark.parametrize("launches", [True, False])
def test_runs_of_a_loop_body_are_numbered(launches: bool) -> None:
    tables = of_bytes(looping(scopes=True, launches=launches))
    assert tables.gpu["iteration"].to_list() == [0, 0, 0, 1, 1, 2, 2] * 2
    assert tables.gpu["program"].to_list() == [0] * 7 + [1] * 7
    assert tables.programs["execution"].to_list() == [0, 1]
    assert tables.programs["program"].to_list() == ["9", "9"]
    assert tables.programs["launch"].to_list() == ([0, 1000] if launches else [None, None])
    assert tables.hlo[0].name == "jit_loop"
    assert any("not recorded" in w for w in tables.meta.warnings) is not launches


def test_without_run_numbers_a_kernel_of_the_same_name_is_the_next_run() -> None:
    tables = of_bytes(looping(scopes=False, launches=True))
    assert tables.gpu["iteration"].to_list() == [0, 0, 1, 2, 3, 4, 5] * 2


def test_graph_kernels_have_no_hlo_op() -> None:
    inside = kernel(10, 1, 15, 1, stat(16, 77))
    tables = of_bytes(space(plane("/device:GPU:0", line(7, inside, kernel(30, 2, 8, 2)))))
    assert tables.gpu["hlo"].to_list() == [None, "body.1"]
    assert tables.gpu["graph"].to_list() == [77, None]
    assert tables.gpu["iteration"].to_list() == [None, 0]
    (warning,) = [w for w in tables.meta.warnings if "CUDA graphs" in w]
    assert "1 activity, 50 % of device time" in warning


def test_hlo_dumps_beside_the_trace_stand_in(tmp_path: Path) -> None:
    trace = tmp_path / "t.xplane.pb"
    trace.write_bytes(space(plane("/device:GPU:0", line(7, kernel(10, 1, 8, 1)))))
    assert any("no HLO for jit_loop" in w for w in read(trace).meta.warnings)
    (tmp_path / "m.gpu_after_optimizations.hlo.pb.xz").write_bytes(lzma.compress(loop_module()))
    (tmp_path / "m.before_optimizations.hlo.pb").write_bytes(b"not looked at")
    tables = read(trace)
    assert [module.name for module in tables.hlo] == ["jit_loop"]
    assert tables.programs["hlo"].to_list() == [0]
    assert not any("no HLO for" in w for w in tables.meta.warnings)


def test_dump_modules_of_files_directories_and_globs(tmp_path: Path) -> None:
    file = tmp_path / "m.hlo.pb"
    file.write_bytes(loop_module())
    for path in (file, tmp_path, tmp_path / "*.pb"):
        assert [m.name for m in hlo_dump_modules(str(path))] == ["jit_loop"]
    for path in (tmp_path / "none.hlo.pb", tmp_path / "*.xz"):
        with pytest.raises(InputError):
            hlo_dump_modules(str(path))
    file.write_bytes(b"nonsense")
    with pytest.raises(DamagedInput):
        hlo_dump_modules(str(file))


def test_damaged_hlo_is_a_warning_with_its_consequence() -> None:
    data = space(plane("/device:GPU:0", line(7, kernel(10, 1, 8, 1))), metadata_plane(b"\xff\xff\xff"))
    warnings = " ".join(of_bytes(data).meta.warnings)
    assert "is damaged" in warnings
    assert "has no source lines" in warnings


def test_negative_durations_count_as_nothing() -> None:
    backwards = event(10, 50, -20, stat(1, 1), stat(2, 8, 7), stat(4, 9), stat(6, 9, 7))
    tables = of_bytes(space(plane("/device:GPU:0", line(7, backwards))))
    assert tables.gpu["duration"].to_list() == [0]
    assert any("1 device activity with a negative duration" in w for w in tables.meta.warnings)


def test_long_reports_of_the_profiler_are_cut_and_stay_on_a_line() -> None:
    parts = [(2, "one\ntwo " + "x" * 5000), *[(3, f"dropped {n}") for n in range(50)]]
    warnings = of_bytes(space(plane("/host:CPU"), more=parts)).meta.warnings
    assert len(warnings) == 1 + 20 + 1 + 1
    assert "one two xxx" in warnings[0]
    assert max(map(len, warnings)) < 600
    assert any("and 30 more messages, not shown" in one for one in warnings)


def test_what_the_profiler_reports_is_passed_on() -> None:
    parts = ((2, "could not start"), (3, "dropped 5 events"))
    tables = of_bytes(space(plane("/host:CPU"), more=parts))
    assert [re.sub(r"^x\.xplane\.pb: ", "", w) for w in tables.meta.warnings] == [
        "the profiler reports an error: could not start",
        "the profiler reports: dropped 5 events",
        "holds no data of a GPU: only host ranges can be shown",
    ]
    assert tables.gpu.is_empty()
