"""Exports of Nsight Systems: against nsys's own reports, plain SQL, and made-up schemas."""

from __future__ import annotations

import functools
import gzip
import random
import shutil
import sqlite3
import stat
import struct
from contextlib import closing
from typing import TYPE_CHECKING

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import thence
from helpers import DATA, shared
from nsight_data import HLO, changed, export, report_frame, thread, unpacked, written
from thence.readers import parquet_probe as probe
from thence.readers.nsight.export import cache_file

if TYPE_CHECKING:
    from pathlib import Path

    from thence.model.tables import Tables

XPLANE = DATA / "jax" / "jax_single_nocb.xplane.pb.gz"
KERNEL = {
    "start": 100, "end": 150, "deviceId": 0, "streamId": 7, "correlationId": 1,
    "globalPid": thread(5, 0), "demangledName": 1, "shortName": 1,
}  # fmt: skip
CALL = {"start": 10, "end": 20, "globalTid": thread(5, 6), "correlationId": 1, "nameId": 2}
STRINGS = [{"id": 1, "value": "kernel(int)"}, {"id": 2, "value": "cudaLaunchKernel_v7000"}]


def opened(path: Path | str, **options: object) -> thence.Trace:
    trace = thence.open(path, **options)
    trace.self_check()
    return trace


@functools.cache
def recorded(name: str) -> thence.Trace:
    """The trace of an export that no test changes, opened once."""
    return opened(export(name))


def tables(path: Path) -> Tables:
    """What is read of an export, before anything is attributed."""
    return thence.open(path).recorded


def sql(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def nvtx(name: str | None, start: int, end: int | None, **more: object) -> dict[str, object]:
    row = {"start": start, "end": end, "eventType": 59, "globalTid": thread(5, 6), "text": name,
           "textId": None, "domainId": None, "endGlobalTid": None, "binaryData": None, "jsonText": None}  # fmt: skip
    return {**row, **more}


@pytest.mark.parametrize("name", ["torch_ddp", "torch_graph"])
def test_every_kernel_agrees_with_nsys(name: str) -> None:
    gpu = recorded(name).tables.gpu.filter(pl.col("kind") == "kernel")
    ours = gpu.group_by(Name=pl.col("name").cast(pl.String)).agg(
        pl.len().cast(pl.Int64).alias("Instances"), pl.col("duration").sum().alias("Total Time (ns)")
    )
    theirs = report_frame(f"{name}_cuda_gpu_kern_sum").select(ours.columns)
    assert_frame_equal(ours.sort(pl.all()), theirs.sort(pl.all()))


def test_rows_agree_with_plain_sql(tmp_path: Path) -> None:
    path = unpacked("torch_ddp", tmp_path)
    trace = recorded("torch_ddp")
    for kind in ("kernel", "memcpy", "memset"):
        ours = trace.tables.gpu.filter(pl.col("kind") == kind)
        table = f"CUPTI_ACTIVITY_KIND_{kind.upper()}"
        expected = sql(path, f"select deviceId, streamId, start, end - start, correlationId from {table}")
        assert sorted(ours.select("device", "stream", "start", "duration", "correlation").rows()) == sorted(expected)
    # The launcher's own process used no device: its correlation ids are left out.
    workers = trace.tables.host["process"].is_in([2428, 2429])
    calls = trace.tables.host.filter(pl.col("category").is_in(["runtime", "driver"]), workers)
    query = (
        "select start, end - start, correlationId, globalTid % 16777216"
        " from CUPTI_ACTIVITY_KIND_RUNTIME where globalTid / 16777216 % 16777216 in (2428, 2429)"
    )
    assert sorted(calls.select("start", "duration", "correlation", "thread").rows()) == sorted(sql(path, query))
    ((copied,),) = sql(path, "select sum(bytes) from CUPTI_ACTIVITY_KIND_MEMCPY")
    assert trace.tables.gpu.filter(pl.col("kind") == "memcpy")["bytes"].sum() == copied
    ((epoch,),) = sql(path, "select utcEpochNs from TARGET_INFO_SESSION_START_TIME")
    assert trace.meta.epoch_ns == epoch
    device = trace.meta.devices[0]
    assert (device.name, device.multiprocessors, device.compute_capability) == ("NVIDIA H200", 132, "9.0")


def test_two_processes_are_two_ranks() -> None:
    trace = recorded("torch_ddp")
    assert trace.recorded.ranks == [0, 1]
    assert trace.tables.gpu.group_by("rank").agg(pl.col("device").unique()).sort("rank")["device"].to_list() == [
        [0],
        [1],
    ]
    assert any("numbered by process id" in text for text in trace.meta.warnings)
    # All work was launched by a call that was recorded.
    assert trace.tables.places["launch"].null_count() == 0


def test_collectives_are_found_from_the_ranges_of_nccl() -> None:
    found = recorded("torch_ddp").tables.collectives
    names = found.group_by(pl.col("collective").cast(pl.String)).len().sort("collective")
    # nvtx_gpu_proj_trace has 34 ncclAllReduce, 8 ncclBroadcast and 2 ncclAllGather.
    assert names.rows() == [("all_gather", 2), ("all_reduce", 34), ("broadcast", 8)]
    assert found["bytes"].null_count() == found.height  # exported without payloads


def test_nodes_of_cuda_graphs(tmp_path: Path) -> None:
    path = unpacked("torch_graph", tmp_path)
    gpu = recorded("torch_graph").tables.gpu.filter(pl.col("node").is_not_null())
    expected = sql(path, "select graphNodeId >> 32, graphNodeId, start from CUPTI_ACTIVITY_KIND_KERNEL"
                         " where graphNodeId is not null")  # fmt: skip
    assert len(expected) == 384
    kernels = gpu.filter(pl.col("kind") == "kernel")
    assert sorted(kernels.select("graph", "node", "start").rows()) == sorted(expected)


def test_ranges_nest_and_those_that_count_steps_have_what_they_launched() -> None:
    trace = recorded("torch_ddp")
    host = trace.tables.host
    steps = host.filter(pl.col("name").cast(pl.String).str.starts_with("step_"))
    assert steps["category"].unique().to_list() == ["step"]
    nccl = host.filter(pl.col("name") == "ncclAllReduce")
    assert nccl["category"].unique().to_list() == ["framework"]
    inside = host.filter(pl.col("parent").is_not_null())
    outer = host[inside["parent"].cast(pl.UInt32)]
    assert (inside["thread"] == outer["thread"]).all()
    assert (inside["start"] >= outer["start"]).all()
    ends = [frame["start"] + frame["duration"] for frame in (inside, outer)]
    assert (ends[0] <= ends[1]).all()
    named = trace.report("label").rows.filter(pl.col("name").is_in(["step_0", "step_1"]))
    assert named.is_empty()
    # 99 operations in each step and process, says nsys.
    launched = trace.tables.host.gather(trace.tables.places["launch"].drop_nulls()).select("parent").to_series()
    assert host.gather(launched.drop_nulls())["name"].is_in(steps["name"].implode()).sum() == 2 * 198


def test_programs_of_xla_and_the_instructions_inside_command_buffers() -> None:
    trace = opened(export("jax_train"), hlo=[str(HLO)])
    step = trace.tables.programs.filter(pl.col("name") == "jit_train_step")
    theirs = report_frame("jax_train_nvtx_gpu_proj_trace").filter(
        pl.col("Name").str.contains("XlaModule.*jit_train_step")
    )
    assert step["start"].to_list() == theirs["Projected Start (ns)"].sort().to_list()
    assert step["duration"].sum() == theirs["Projected Duration (ns)"].sum()
    assert step["launch"].to_list() == theirs["Orig Start (ns)"].sort().to_list()
    assert step["hlo"].null_count() == 0
    assert step["program"].cast(pl.String).str.len_chars().unique().to_list() == [32]  # the fingerprint
    inside = trace.tables.gpu.filter(pl.col("graph").is_not_null(), pl.col("hlo").is_not_null())
    known = set(trace.recorded.hlo[0].instructions["name"])
    assert inside.height > 900
    assert set(inside["hlo"].cast(pl.String)) <= known
    # XLA names its own kernels after the instruction.
    fusions = inside.filter(pl.col("name").cast(pl.String).str.contains("^(loop_|gemm_fusion|fusion)"))
    assert fusions.height > 300
    base = fusions["hlo"].cast(pl.String).str.extract(r"^([a-z_]+?)(?:_dot)?(?:\.\d+)?$")
    assert all(k.startswith(b) for k, b in zip(fusions["name"].cast(pl.String), base, strict=True) if b)
    assert trace.report("source").attributed_ns["source"] > 0.6 * inside["duration"].sum()


def test_times_of_instructions_agree_with_jax_profiler() -> None:
    """The same program, recorded op by op: kernels of XLA's own take as long, within 10 %."""

    def per_step(trace: thence.Trace) -> pl.DataFrame:
        program = trace.tables.programs.select(
            pl.int_range(pl.len(), dtype=pl.Int32).alias("program"), "execution", of="name"
        )
        ran = trace.tables.gpu.drop_nulls("hlo").join(program, on="program").filter(
            pl.col("of") == "jit_train_step", pl.col("execution") > 0
        )  # fmt: skip
        steps = ran["execution"].n_unique()
        return ran.group_by(pl.col("hlo").cast(pl.String)).agg(ns=pl.col("duration").sum() / steps)

    both = per_step(recorded("jax_train")).join(per_step(shared(XPLANE)), on="hlo", suffix="_jax")
    assert both.height > 150
    assert both["ns"].sum() == pytest.approx(both["ns_jax"].sum(), rel=0.1)
    gemms = both.filter(pl.col("hlo").str.starts_with("gemm_fusion"))
    # Each run chose its own tiles for some of them.
    close = gemms.filter((pl.col("ns") / pl.col("ns_jax")).is_between(0.9, 1.1))
    assert close.height >= 0.8 * gemms.height


def test_compile_times_come_from_the_ranges_of_xla(tmp_path: Path) -> None:
    found = recorded("jax_train").compile()
    query = "select sum(end - start) from NVTX_EVENTS where text like 'XlaCompile:#%'"
    ((wall,),) = sql(unpacked("jax_train", tmp_path), query)
    assert found.wall_ns == wall


def test_hlo_of_other_programs_is_said_to_fit_none() -> None:
    other = str(DATA / "jax" / "train_step_fsdp2.hlo.pb.xz")
    trace = thence.open(export("torch_graph"), hlo=[other])
    assert any("no program of the trace matches the 1 HLO module given" in text for text in trace.meta.warnings)


def test_an_export_with_next_to_nothing_in_it(tmp_path: Path) -> None:
    """No StringIds, no enums, no processes, no eventClass: as of 2022, lazily created tables."""
    found = tables(written(tmp_path / "a.sqlite", {"CUPTI_ACTIVITY_KIND_KERNEL": [KERNEL]}))
    assert found.gpu.select("name", "start", "duration").row(0) == ("(unnamed)", 100, 50)
    rows = {"CUPTI_ACTIVITY_KIND_KERNEL": [KERNEL], "CUPTI_ACTIVITY_KIND_RUNTIME": [CALL], "StringIds": STRINGS}
    trace = opened(written(tmp_path / "b.sqlite", rows))
    assert trace.tables.gpu["name"].to_list() == ["kernel(int)"]
    assert trace.tables.host.select("category", "name", "process", "thread").row(0) == (
        "runtime",
        "cudaLaunchKernel",
        5,
        6,
    )


def test_copies_are_named_by_the_enums_or_without_them(tmp_path: Path) -> None:
    copy = {**KERNEL, "bytes": 4096, "copyKind": 1, "srcKind": 1, "dstKind": 2}
    plain = tables(written(tmp_path / "a.sqlite", {"CUPTI_ACTIVITY_KIND_MEMCPY": [copy], "StringIds": STRINGS}))
    assert plain.gpu.select("name", "bytes").row(0) == ("Memcpy HtoD (Pinned -> Device)", 4096)
    enums = {"ENUM_CUDA_MEM_KIND": [{"id": 1, "label": "Pageable"}]}
    rows = {"CUPTI_ACTIVITY_KIND_MEMCPY": [copy], "StringIds": STRINGS, **enums}
    named = tables(written(tmp_path / "b.sqlite", rows))
    assert named.gpu["name"].to_list() == ["Memcpy HtoD (Pageable -> Device)"]


def test_ranges_of_every_style(tmp_path: Path) -> None:
    events = [
        nvtx(None, 0, None, eventType=75, domainId=3, text="mine"),
        nvtx("outer", 0, 100),
        nvtx(None, 10, 50, textId=1, domainId=3),
        nvtx("crosses", 20, 200, eventType=60, endGlobalTid=thread(5, 9)),
        nvtx("open", 60, None),
        nvtx("aten::mm", 70, 80),
        nvtx("the main one", 0, None, eventType=39),
    ]
    trace = opened(written(tmp_path / "a.sqlite", {"NVTX_EVENTS": events, "StringIds": STRINGS}))
    host = trace.tables.host.select("name", "category", "start", "duration", "parent")
    assert host.rows() == [
        ("outer", "range", 0, 100, None),
        ("kernel(int)", "range", 10, 40, 0),
        ("crosses", "range", 20, 180, None),
        ("open", "range", 60, 140, 2),
        ("aten::mm", "op", 70, 10, 3),
    ]
    assert trace.tables.threads["name"].to_list() == ["the main one"]
    assert any("1 NVTX range still open" in text for text in trace.meta.warnings)


SCHEMAS = [
    {"schemaId": 7, "offset": None, "name": "NCCL communicator ID"},
    {"schemaId": 7, "offset": 8, "name": "Message size [bytes]"},
    {"schemaId": 8, "offset": None, "name": "NCCL communicator ID"},
    {"schemaId": 8, "offset": 8, "name": "No. of ranks"},
    {"schemaId": 8, "offset": 12, "name": "Rank"},
]
COMMUNICATOR = (1 << 63) + 5


@pytest.mark.parametrize("form", ["json", "bytes", "bytes with a pointer"])
def test_payloads_of_nccl(tmp_path: Path, form: str) -> None:
    def payload(schema: int, data: bytes, json: str) -> dict[str, object]:
        if form == "json":
            return {"jsonText": json, "binaryData": None}
        pointer = b"\0" * 8 if "pointer" in form else b""
        return {"jsonText": None, "binaryData": struct.pack("<QQ", schema, len(data)) + pointer + data}

    first = payload(
        8, struct.pack("<QIIQ", COMMUNICATOR, 4, 3, 0),
        f'{{"NCCL communicator ID": {COMMUNICATOR}, "No. of ranks": 4, "Rank": 3}}',
    )  # fmt: skip
    second = payload(
        7, struct.pack("<QQQ", COMMUNICATOR, 65536, 0),
        f'{{"payload": {{"NCCL communicator ID": "{COMMUNICATOR}", "Message size [bytes]": 65536}}}}',
    )  # fmt: skip
    events = [
        nvtx("NCCL", 0, None, eventType=75, domainId=1),
        nvtx("ncclCommInitRank", 1, 4, domainId=1, **first),
        nvtx("ncclAllReduce", 5, 30, domainId=1, **second),
    ]
    path = written(tmp_path / "a.sqlite", {
        "NVTX_EVENTS": events, "NVTX_PAYLOAD_SCHEMA_ENTRIES": SCHEMAS, "StringIds": STRINGS,
        "CUPTI_ACTIVITY_KIND_RUNTIME": [CALL], "CUPTI_ACTIVITY_KIND_KERNEL": [KERNEL],
    })  # fmt: skip
    trace = thence.open(path)
    assert trace.recorded.ranks == [3]
    row = trace.tables.collectives.select("gpu", "collective", "bytes", "group_size", "group_name").row(0)
    assert row == (0, "all_reduce", 65536, 4, str(COMMUNICATOR))


def test_launches_of_whole_graphs(tmp_path: Path) -> None:
    row = {**KERNEL, "graphId": 12}
    path = written(tmp_path / "a.sqlite", {"CUPTI_ACTIVITY_KIND_GRAPH_TRACE": [row], "StringIds": STRINGS})
    found = tables(path)
    assert found.gpu.select("name", "graph", "duration").row(0) == ("[CUDA graph 12]", 12, 50)
    assert any("--cuda-graph-trace=node" in text for text in found.meta.warnings)


def test_secrets_are_never_read(tmp_path: Path) -> None:
    secret = "AKIA-SECRET"
    path = changed(
        unpacked("torch_graph", tmp_path),
        f"insert into TARGET_INFO_SYSTEM_ENV values (1, 'x', 'DeviceEnvironment', 1, 'TOKEN={secret}')",
        f"insert into StringIds values (987654321, 'TOKEN={secret}')",
    )
    found = tables(path)
    shown = [found.meta, *(frame.write_ndjson() for frame in (found.host, found.threads))]
    assert not any(secret in str(part) for part in shown)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_folders_of_tables(tmp_path: Path, kind: str) -> None:
    path = unpacked("torch_ddp", tmp_path)
    folder = tmp_path / f"torch_ddp_{kind}dir"
    folder.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        for (table,) in connection.execute("select name from sqlite_master where type = 'table'").fetchall():
            frame = pl.read_database(f"select * from {table}", connection, infer_schema_length=None)
            target = folder / f"{table}.{kind}"
            frame.write_parquet(target) if kind == "parquet" else frame.write_ipc_stream(target)
    found, expected = tables(folder), recorded("torch_ddp").recorded
    assert_frame_equal(found.gpu, expected.gpu, categorical_as_str=True)
    assert_frame_equal(found.host, expected.host, categorical_as_str=True)


def parquet_folder(path: Path) -> Path:
    path.mkdir()
    pl.DataFrame([KERNEL]).write_parquet(path / "CUPTI_ACTIVITY_KIND_KERNEL.parquet")
    pl.DataFrame(STRINGS).write_parquet(path / "StringIds.parquet")
    pl.DataFrame({"value": ["x"]}).write_parquet(path / "TARGET_INFO_SYSTEM_ENV.parquet")
    return path


def test_parquet_that_ends_its_reader_is_damaged_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = parquet_folder(tmp_path / "a[b]*")
    assert tables(folder).gpu["name"].to_list() == ["kernel(int)"]
    (folder / "StringIds.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(thence.DamagedInput, match=r"StringIds\.parquet cannot be read"):
        thence.open(folder)
    monkeypatch.setattr(probe, "_CHILD", "import os; os.write(1, b'r'); os.kill(os.getpid(), 9)")
    with pytest.raises(thence.DamagedInput, match="crashes the process that reads it"):
        thence.open(folder)


def test_only_tables_that_are_read_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = (
        "import sys, os; os.write(1, b'r'); data = sys.stdin.buffer.read(); os._exit(9 if b'SYSTEM_ENV' in data"
        " or b'StringIds.parquet' not in data else 0)"
    )
    monkeypatch.setattr(probe, "_CHILD", child)
    assert tables(parquet_folder(tmp_path / "a")).gpu.height == 1


def test_parquet_that_claims_billions_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thence.readers.nsight.folder.MAX_ROWS", 1)
    with pytest.raises(thence.DamagedInput, match=r"StringIds\.parquet claims 2 rows"):
        thence.open(parquet_folder(tmp_path / "a"))


NSYS = """#!/bin/sh
while [ "$1" != --output ]; do shift; done
echo once >> "{count}"
{work}
"""


def fake_nsys(folder: Path, work: str) -> Path:
    program = folder / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(NSYS.format(count=folder / "count", work=work))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program.parent


def test_a_report_is_exported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written(tmp_path / "run.sqlite", {"CUPTI_ACTIVITY_KIND_KERNEL": [KERNEL], "StringIds": STRINGS})
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{fake_nsys(tmp_path, f'cp {source} $2')}:/usr/bin:/bin")
    first, second = tables(report), tables(report)
    assert_frame_equal(first.gpu, tables(source).gpu)
    assert_frame_equal(second.gpu, first.gpu)
    assert (tmp_path / "count").read_text() == "once\n"
    assert cache_file(str(report)).stat().st_mode & 0o777 & ~0o644 == 0
    assert cache_file(str(report)).parent.stat().st_mode & 0o077 == 0
    before = cache_file(str(report))
    report.write_bytes(b"xy")
    assert cache_file(str(report)) != before


def test_without_nsys_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(thence.ThenceError, match="nsys export --type sqlite"):
        thence.open(report)
    with pytest.raises(thence.InputError, match="cannot be opened"):
        thence.open(tmp_path / "no.nsys-rep")


def test_a_report_that_nsys_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{fake_nsys(tmp_path, 'echo the file is no report; exit 3')}:/usr/bin:/bin")
    with pytest.raises(thence.DamagedInput, match="exit code 3: the file is no report"):
        thence.open(report)
    assert not cache_file(str(report)).exists()


def test_a_database_that_another_program_has_locked(tmp_path: Path) -> None:
    path = unpacked("torch_graph", tmp_path)
    with closing(sqlite3.connect(path)) as other:
        other.execute("begin exclusive")
        assert tables(path).gpu.height == 588
        other.rollback()
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]  # nothing was written


def test_a_path_with_characters_that_mean_something_in_addresses(tmp_path: Path) -> None:
    path = shutil.move(unpacked("torch_graph", tmp_path), tmp_path / "a b?c#d%20.sqlite")
    assert tables(path).gpu.height == 588


def test_what_is_no_export_gives_one_clear_error(tmp_path: Path) -> None:
    foreign = written(tmp_path / "foreign.sqlite", {"people": [{"name": "x"}]})
    with pytest.raises(thence.UnknownFormat, match="not an export of Nsight Systems"):
        thence.open(foreign)
    hollow = written(tmp_path / "hollow.sqlite", {"StringIds": STRINGS})
    with pytest.raises(thence.DamagedInput, match="neither device activities nor host ranges"):
        thence.open(hollow)
    data = gzip.decompress(export("torch_graph").read_bytes())
    for name, content in (("cut", data[: len(data) // 2]), ("head", data[:50]), ("empty", b"")):
        path = tmp_path / f"{name}.sqlite"
        path.write_bytes(content)
        with pytest.raises(thence.InputError, match=f"{name}.sqlite: "):
            thence.open(path)
    packed = tmp_path / "cut.sqlite.gz"
    packed.write_bytes(export("torch_graph").read_bytes()[:30_000])
    with pytest.raises(thence.DamagedInput, match="cannot be read to the end"):
        thence.open(packed)


def test_rows_that_sqlite_would_compute_are_not_read(tmp_path: Path) -> None:
    """Their expressions may take hours; Nsight Systems writes plain tables alone."""
    kernels = "CUPTI_ACTIVITY_KIND_KERNEL"
    slow = "with recursive r(x) as (select 1 union all select x + 1 from r) select x"
    path = written(tmp_path / "a.sqlite", {kernels: [KERNEL], "StringIds": STRINGS})
    blocks = "add gridX as (length(hex(zeroblob(2000000000 + start)))) virtual"
    found = tables(changed(path, f"alter table {kernels} {blocks}"))
    assert found.gpu["name"].to_list() == ["kernel(int)"]
    changed(
        path,
        f"create view CUPTI_ACTIVITY_KIND_RUNTIME as {slow} as start from r",
        "create virtual table CUPTI_ACTIVITY_KIND_MEMCPY using fts5(start, end, deviceId, bytes)",
        "insert into CUPTI_ACTIVITY_KIND_MEMCPY values (1, 2, 0, 8)",
    )
    found = tables(path)
    assert found.gpu.height == 1
    assert found.host.is_empty()


def test_values_of_other_types_and_impossible_times(tmp_path: Path) -> None:
    strange = [
        KERNEL,
        {**KERNEL, "start": None},
        {**KERNEL, "end": 50},
        {**KERNEL, "deviceId": -4, "streamId": None, "correlationId": None, "demangledName": 77},
        {**KERNEL, "start": 1 << 62, "end": (1 << 63) - 1},
    ]
    path = written(tmp_path / "a.sqlite", {"CUPTI_ACTIVITY_KIND_KERNEL": strange, "StringIds": STRINGS})
    trace = opened(path)
    assert trace.tables.gpu["duration"].to_list() == [50, 50, 0]  # the last one begins after the year 2100
    assert len(trace.meta.warnings) == 2
    path = written(tmp_path / "b.sqlite", {"CUPTI_ACTIVITY_KIND_KERNEL": [{**KERNEL, "start": "soon"}]})
    with pytest.raises(thence.DamagedInput, match="CUPTI_ACTIVITY_KIND_KERNEL cannot be read"):
        thence.open(path)


@pytest.mark.parametrize("seed", range(2))
def test_damaged_databases_never_crash(tmp_path: Path, seed: int) -> None:
    data = gzip.decompress(export("torch_graph").read_bytes())
    draw = random.Random(seed)
    path = tmp_path / "x.sqlite"
    messages = []
    for _ in range(10):
        broken = bytearray(data)
        for _ in range(draw.choice([1, 10, 1000])):
            broken[draw.randrange(draw.choice([100, 4096, len(data)]))] = draw.randrange(256)
        path.write_bytes(bytes(broken[: draw.choice([len(data), draw.randrange(len(data))])]))
        try:
            thence.open(path).self_check()
        except thence.InputError as error:
            messages.append(str(error))
    assert all(message.startswith(str(path)) for message in messages)
