"""nsys-jax archives: small ones built here, with numbers worked out by hand."""

from __future__ import annotations

import io
import lzma
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import polars as pl
import pytest

from protowire import message, pack
from thence.attribution.attribute import attribute
from thence.errors import DamagedInput, InputError, MissingRequirement
from thence.readers import parquet_probe as probe
from thence.readers.nsys_jax.archive import Archive, sniff_archive
from thence.readers.nsys_jax.read import read
from untried_tables import PassingChild

if TYPE_CHECKING:
    from thence.model.tables import Tables

TRACE = "nvtx_gpu_proj_trace/trace.parquet"
PID = 7

# Of each range its name, start, duration, launch, launch duration, thread, number and parent; in ns.
STEP = "TSL:XlaModule:#prefix=jit(Step)/x,hlo_module=jit_Step,program_id=3#"
RANGES = [
    (None, 0, 999, None, None, 1, None, None),  # a sum over a thread, no range
    ("TSL:Thunk:#hlo_op=lost.1#", 50, 5, 40, 2, 1, 9, None),  # before any program
    (STEP, 100, 60, 90, 30, 1, 10, None),
    ("TSL:Thunk:#hlo_op=fusion.1#", 100, 20, 91, 2, 1, 11, 10),
    ("TSL:Thunk:#name=a[axes=(0,)],hlo_op=while.1#", 120, 40, 93, 9, 1, 12, 10),
    ("TSL:Thunk:#hlo_op=all-reduce-start.1#", 120, 10, 94, 2, 1, 13, 12),
    ("NCCL:ncclGroupEnd", 120, 10, 94, 1, 1, 14, 13),
    ("NCCL:ncclGroupStart", 130, 10, 95, 5, 1, 15, 12),
    ("TSL:Thunk:#hlo_op=all-reduce-start.1#", 135, 25, 96, 2, 1, 16, 15),
    (STEP, 200, 30, 180, 10, 1, 20, None),
    ("TSL:Thunk:#hlo_op=fusion.1#", 200, 30, 181, 2, 1, 21, 20),
    ("TSL:XlaModule:#hlo_module=gemm.409#", 300, 5, 290, 3, 2, 30, None),
    ("TSL:Thunk:#hlo_op=dot.1#", 300, 5, 291, 1, 2, 31, 30),
]


def classic() -> pl.DataFrame:
    names = ("Name", "Projected Start", "Projected Duration", "Orig Start", "Orig Duration", "TID", "RangeId")
    columns = dict(zip((*names, "ParentId"), map(list, zip(*RANGES, strict=True)), strict=True))
    floats = ("Orig Start", "Orig Duration", "RangeId", "ParentId")  # as pandas writes them
    return pl.DataFrame(columns, schema_overrides=dict.fromkeys(floats, pl.Float64)).with_columns(
        PID=pl.lit(PID), Style=pl.lit("PushPop"), NumGPUOps=pl.lit(1), Rank=pl.lit(0)
    )


def later(*, domain: bool) -> pl.DataFrame:
    frame = classic().select(
        Text=pl.col("Name").str.replace("^(TSL|NCCL):", ""),
        Start="Projected Start",
        End=pl.col("Projected Start") + pl.col("Projected Duration"),
        PID="PID",
        TID="TID",
    )
    ids = classic().select(
        pl.col("RangeId").cast(pl.Int64).alias("Range ID"), pl.col("ParentId").cast(pl.Int64).alias("Parent ID")
    )
    frame = frame.hstack(ids).filter(pl.col("Range ID").is_not_null())
    return frame.with_columns(Domain=pl.lit("TSL")) if domain else frame


def hlo(number: int, name: str = "jit_Step", fingerprint: str = "f00d") -> bytes:
    """fusion.1, while.1, all-reduce-start.1 of 8 floats among 4 devices."""
    shape = message((2, 11), (3, pack(8)))
    operand = message((1, "p"), (2, "parameter"), (3, shape), (35, 1))
    groups = message((1, pack(0, 1, 2, 3)))
    reduce = message(
        *((1, "all-reduce-start.1"), (2, "all-reduce-start"), (3, shape)),
        *((26, 1), (35, 2), (36, pack(1)), (49, groups)),
    )
    others = [
        message((1, n), (2, o), (3, shape), (35, i), (36, pack(1)))
        for n, o, i in (("fusion.1", "fusion", 3), ("while.1", "tuple", 4))
    ]
    body = message((1, "main"), *((2, i) for i in (operand, reduce, *others)), (5, 1), (6, 4))
    attributes = message((1, message((1, "fingerprint_before_lhs"), (2, fingerprint))))
    module = message((1, name), (2, "main"), (3, body), (5, number), (6, 1), (19, attributes))
    return lzma.compress(message((1, module)))


PUSHPOP = pl.DataFrame(
    [
        ("TSL:XlaCompile:#module=jit_Step,program_id=3#", 1000, 2000, 1),
        ("TSL:XlaPass:#name=dce,module=jit_Step,program_id=3#", 1100, 1200, 1),
        ("cuBLAS:cublasCreate", 1110, 1150, 1),
        ("TSL:XlaEmitLlvmIr", 1300, 1400, 5),  # a worker
        ("TSL:XlaOptimizeLlvmIr", 1310, 1350, 5),
        ("TSL:XlaEmitLlvmIr", 2500, 2600, 5),  # outside any compilation
        ("user range", 900, 2100, 1),
    ],
    schema=["Name", "Start (ns)", "End (ns)", "TID"],
    orient="row",
)


def threads(rank: int = 2, local: int = 1) -> pl.DataFrame:
    launcher = f"XlaLauncher:#global={rank * 4 + local},local={local},process={rank},slice=0#"
    return pl.DataFrame({"Name": ["main", launcher], "PID": [PID, PID], "TID": [1, 77]})


def parquet(frame: pl.DataFrame) -> bytes:
    stream = io.BytesIO()
    frame.write_parquet(stream)
    return stream.getvalue()


def members(trace: pl.DataFrame | None = None, rank: int = 2, fingerprint: str = "f00d") -> dict[str, bytes]:
    return {
        TRACE: parquet(classic() if trace is None else trace),
        "thread-metadata.parquet": parquet(threads(rank)),
        "dump/module_0003.jit_Step.sm_8.0_gpu_after_optimizations.hlo.pb.xz": hlo(3, fingerprint=fingerprint),
        "dump/module_0003.jit_Step.before_optimizations.hlo.pb.xz": b"not read",
        "report_nvtx_pushpop_trace.parquet": parquet(PUSHPOP),
    }


def zipped(path: Path, content: dict[str, bytes]) -> str:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return str(path)


def opened(path: str) -> Tables:
    return read(path, lambda _done: None)


def opened_untried(path: str) -> Tables:
    """The same without the child that tries tables first: it takes longer than all else, and these are sound."""
    with mock.patch.object(probe, "_started", PassingChild):
        return opened(path)


@pytest.mark.parametrize(
    ("trace", "launches"),
    [(classic(), [90, 180, 290]), (later(domain=False), [None] * 3), (later(domain=True), [None] * 3)],
)
def test_all_three_shapes_of_the_trace_give_the_same_tables(
    tmp_path: Path, trace: pl.DataFrame, launches: list[int | None]
) -> None:
    tables = opened(zipped(tmp_path / "a.zip", members(trace)))
    assert tables.gpu.select("hlo", "start", "duration", "program", "iteration").rows() == [
        ("lost.1", 50, 5, None, 0),
        ("fusion.1", 100, 20, 0, 0),
        ("all-reduce-start.1", 120, 10, 0, 0),
        ("all-reduce-start.1", 135, 25, 0, 1),  # its own while is no leaf
        ("fusion.1", 200, 30, 1, 0),
        ("dot.1", 300, 5, 2, 0),
    ]
    assert tables.gpu.select("rank", "device", "stream", "kind").unique().rows() == [(2, 1, 0, "thunk")]
    assert tables.programs.select("program", "name", "execution", "start", "duration").rows() == [
        ("f00d", "jit_Step", 0, 100, 60),
        ("f00d", "jit_Step", 1, 200, 30),
        (None, "gemm.409", 0, 300, 5),
    ]
    assert tables.programs["launch"].to_list() == launches
    assert tables.programs["hlo"].to_list() == [0, 0, None]
    assert any("1 thunk without a program" in text for text in tables.meta.warnings)
    assert any("the stream is always 0" in text for text in tables.meta.warnings)


def test_collectives_are_described_by_the_hlo(tmp_path: Path) -> None:
    tables = opened_untried(zipped(tmp_path / "a.zip", members()))
    found = attribute(tables).collectives
    assert found.select("gpu", "collective", "bytes", "group_size").rows() == [
        (2, "all-reduce", 32, 4),
        (3, "all-reduce", 32, 4),
    ]


def test_compile_ranges_keep_thread_and_parent_and_drop_what_is_not_xla(tmp_path: Path) -> None:
    host = opened_untried(zipped(tmp_path / "a.zip", members())).host
    assert host.select("name", "start", "duration", "process", "thread", "parent").rows() == [
        ("XlaCompile:#module=jit_Step,program_id=3#", 1000, 1000, PID, 1, None),
        ("XlaPass:#name=dce,module=jit_Step,program_id=3#", 1100, 100, PID, 1, 0),
        ("XlaEmitLlvmIr", 1300, 100, PID, 5, None),
        ("XlaOptimizeLlvmIr", 1310, 40, PID, 5, 2),
    ]
    assert host["category"].unique().to_list() == ["compile"]


def test_the_legacy_csv_gives_the_same_compile_ranges(tmp_path: Path) -> None:
    content = members()
    del content["report_nvtx_pushpop_trace.parquet"]
    legacy = PUSHPOP.with_columns(PID=pl.lit(PID)).write_csv().encode()
    content["report_nvtx_pushpop_trace.csv.xz"] = lzma.compress(legacy)
    new = opened_untried(zipped(tmp_path / "a.zip", members())).host
    assert opened_untried(zipped(tmp_path / "b.zip", content)).host.equals(new)


def test_an_unpacked_archive_reads_like_the_zip(tmp_path: Path) -> None:
    folder = tmp_path / "unpacked"
    for name, data in members().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "link.parquet").symlink_to("/etc/passwd")
    tables = opened_untried(str(folder))
    assert tables.gpu.equals(opened_untried(zipped(tmp_path / "a.zip", members())).gpu)
    assert any("link.parquet is a link" in text for text in tables.meta.warnings)


def test_missing_members_are_named_and_not_fatal(tmp_path: Path) -> None:
    tables = opened_untried(zipped(tmp_path / "a.zip", {TRACE: parquet(classic())}))
    text = "\n".join(tables.meta.warnings)
    for word in ("thread-metadata", "device-metadata", "optimized HLO", "pushpop", "rank 0"):
        assert word in text
    assert tables.programs["program"].to_list() == ["jit_Step.3", "jit_Step.3", None]
    assert tables.collectives.is_empty()
    assert tables.host.is_empty()
    assert tables.ranks == [0]


# Launching thread, start and duration of executions of one process with four devices; the main thread, 40,
# launched the program of one device. Threads began in another order than that of their ids.
FOUR = [
    ("jit_Step", 3, 53, 100, 40),
    ("jit_Step", 3, 50, 104, 30),
    ("jit_Step", 3, 52, 108, 20),
    ("jit_Step", 3, 51, 112, 10),
    ("jit_init", 1, 40, 10, 5),
    ("gemm", None, 61, 20, 7),  # tried by the autotuner, on a thread that compiles
]


def of_threads(executions: list[tuple[str, int | None, int, int, int]]) -> pl.DataFrame:
    """A classic trace with one thunk per execution."""
    rows = []
    for number, (name, program, thread, start, duration) in enumerate(executions):
        suffix = "" if program is None else f",program_id={program}"
        module = f"TSL:XlaModule:#hlo_module={name}{suffix}#"
        rows.append((module, start, duration, start - 5, 2, thread, 10 * number, None))
        thunk = "TSL:Thunk:#hlo_op=fusion.1#"
        rows.append((thunk, start, duration, start - 4, 1, thread, 10 * number + 1, 10 * number))
    schema = dict(zip(classic().columns[:8], classic().dtypes[:8], strict=True))
    frame = pl.DataFrame(rows, schema=schema, orient="row")
    return frame.with_columns(PID=pl.lit(PID), Style=pl.lit("PushPop"), NumGPUOps=pl.lit(1), Rank=pl.lit(0))


def busy_of_devices(tables: Tables) -> dict[int, int]:
    return dict(tables.gpu.group_by("device").agg(pl.col("duration").sum()).iter_rows())


def test_without_names_of_threads_the_order_of_their_ids_is_that_of_the_devices(tmp_path: Path) -> None:
    tables = opened_untried(zipped(tmp_path / "a.zip", {TRACE: parquet(of_threads(FOUR))}))
    assert busy_of_devices(tables) == {0: 30 + 5 + 7, 1: 10, 2: 20, 3: 40}
    assert [device.device for device in tables.meta.devices] == [0, 1, 2, 3]
    assert any(
        "the 4 threads that launched a program are assigned to devices in the order of their ids" in text
        for text in tables.meta.warnings
    )
    # With names, the names decide: here they are in the other order.
    named = pl.DataFrame(
        {
            "Name": [f"XlaLauncher:#global={n},local={n},process=0,slice=0#" for n in range(4)],
            "PID": [PID] * 4,
            "TID": [53, 52, 51, 50],
        }
    )
    content = {TRACE: parquet(of_threads(FOUR)), "thread-metadata.parquet": parquet(named)}
    told = opened_untried(zipped(tmp_path / "b.zip", content))
    assert busy_of_devices(told) == {0: 40 + 5 + 7, 1: 20, 2: 10, 3: 30}


def test_a_program_on_few_devices_does_not_move_the_threads_of_the_others(tmp_path: Path) -> None:
    some = [*FOUR, ("jit_half", 2, 53, 300, 3), ("jit_half", 2, 52, 300, 4)]
    tables = opened_untried(zipped(tmp_path / "a.zip", {TRACE: parquet(of_threads(some))}))
    assert busy_of_devices(tables) == {0: 42, 1: 10, 2: 20 + 4, 3: 40 + 3}
    assert not any("disagree" in text for text in tables.meta.warnings)


def test_programs_that_disagree_on_the_order_of_threads_are_said(tmp_path: Path) -> None:
    some = [("a", 1, 51, 0, 3), ("a", 1, 52, 0, 4), ("b", 2, 52, 9, 5), ("b", 2, 53, 9, 6)]
    tables = opened_untried(zipped(tmp_path / "a.zip", {TRACE: parquet(of_threads(some))}))
    assert any("disagree on the device of 1 launching" in text for text in tables.meta.warnings)


def test_threads_are_no_devices_where_the_archive_lists_fewer(tmp_path: Path) -> None:
    name = "('TARGET_INFO_NVTX_CUDA_DEVICE', 'name')"
    one = pl.DataFrame({name: ["Xla:#global=0,local=0,process=0,slice=0#"]})
    keys = ("name", "totalMemory", "smCount", "computeMajor", "computeMinor")
    one = one.with_columns(pl.lit(None).alias(f"('TARGET_INFO_GPU', '{key}')") for key in keys)
    content = {TRACE: parquet(of_threads(FOUR)), "device-metadata.parquet": parquet(one)}
    tables = opened_untried(zipped(tmp_path / "a.zip", content))
    assert busy_of_devices(tables) == {0: 112}
    assert any("the archive lists only 1 device;" in text for text in tables.meta.warnings)


def combined(tmp_path: Path) -> str:
    """Two ranks: different traces and threads, one HLO kept once, one HLO per rank."""
    shared = members()
    content = {}
    for rank, stem in ((0, "first"), (1, "second")):
        own = members(rank=rank, fingerprint="f00d" if rank == 0 else "beef")
        for name in (TRACE, "thread-metadata.parquet", *(n for n in own if "_gpu_after" in n)):
            content[f"{name}/{stem}"] = own[name]
    content["report_nvtx_pushpop_trace.parquet"] = shared["report_nvtx_pushpop_trace.parquet"]
    return zipped(tmp_path / "combined.zip", content)


def test_a_combined_archive_holds_every_rank(tmp_path: Path) -> None:
    tables = opened_untried(combined(tmp_path))
    assert tables.ranks == [0, 1]
    assert tables.gpu.group_by("rank").len().sort("rank").rows() == [(0, 6), (1, 6)]
    assert tables.programs["program"].to_list() == ["f00d", "f00d", None, "beef", "beef", None]
    assert tables.programs["hlo"].to_list() == [0, 0, None, 1, 1, None]
    assert attribute(tables).collectives["gpu"].to_list() == [2, 3, 8, 9]
    assert tables.host.group_by("rank").len().sort("rank").rows() == [(0, 4), (1, 4)]


def test_equal_hlo_of_several_ranks_is_decoded_once(tmp_path: Path) -> None:
    content = {}
    for rank, stem in ((0, "a"), (1, "b")):
        content |= {f"{name}/{stem}": data for name, data in members(rank=rank).items()}
    tables = opened_untried(zipped(tmp_path / "combined.zip", content))
    assert tables.hlo[0] is tables.hlo[1]


def test_archives_are_recognised_by_content(tmp_path: Path) -> None:
    assert sniff_archive(zipped(tmp_path / "a.zip", members()))
    assert sniff_archive(combined(tmp_path))
    assert not sniff_archive(zipped(tmp_path / "other.zip", {"x.txt": b"y"}))
    (tmp_path / "broken.zip").write_bytes(b"PK\x03\x04 no more")
    assert not sniff_archive(str(tmp_path / "broken.zip"))
    assert not sniff_archive(str(tmp_path))
    assert not sniff_archive(str(tmp_path / "absent"))


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/../../b", "C:/x", "..\\evil", "\\x"])
def test_members_outside_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    path = zipped(tmp_path / "a.zip", members() | {name: b""})
    with pytest.raises(DamagedInput, match="outside its folder"):
        opened(path)


def test_sizes_are_limited_by_member_and_in_all(tmp_path: Path) -> None:
    path = zipped(tmp_path / "bomb.zip", {"a": bytes(1000), "b": bytes(1000)})
    with pytest.raises(DamagedInput, match=r"a holds 1,000 bytes; at most 999"):
        Archive.open(path, max_member=999).read("a")
    archive = Archive.open(path, max_total=1500)
    archive.read("a")
    with pytest.raises(DamagedInput, match="more than 1,500 bytes"):
        archive.read("b")


def test_a_member_larger_than_listed_is_damage(tmp_path: Path) -> None:
    data = bytearray(Path(zipped(tmp_path / "a.zip", {"a": bytes(1000)})).read_bytes())
    entry = data.index(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = (10).to_bytes(4, "little")  # uncompressed size
    (tmp_path / "lies.zip").write_bytes(data)
    with pytest.raises(DamagedInput, match="damaged"):
        Archive.open(str(tmp_path / "lies.zip")).read("a")


@pytest.mark.parametrize(
    "damage",
    [
        {TRACE: b"no parquet"},
        {TRACE: parquet(classic())[:-20]},
        {TRACE: parquet(classic().drop("ParentId"))},
        {TRACE: parquet(classic().with_columns(RangeId=pl.lit("x")))},
        {TRACE: parquet(classic().with_columns(Name=pl.lit(3)))},
        {"thread-metadata.parquet": b""},
        {"thread-metadata.parquet": parquet(pl.DataFrame({"PID": ["x"], "TID": [1], "Name": ["y"]}))},
        {"report_nvtx_pushpop_trace.parquet": parquet(PUSHPOP.drop("TID"))},
        {"dump/module_0003.jit_Step.sm_8.0_gpu_after_optimizations.hlo.pb.xz": b"\xfd7zXZ\x00cut"},
    ],
)
def test_damaged_members_are_damaged_input(tmp_path: Path, damage: dict[str, bytes]) -> None:
    path = zipped(tmp_path / "a.zip", members() | damage)
    with pytest.raises(DamagedInput):
        opened(path)


def test_truncated_archives_are_damaged_input(tmp_path: Path) -> None:
    whole = Path(zipped(tmp_path / "a.zip", members())).read_bytes()
    for size in range(0, len(whole), len(whole) // 20):
        (tmp_path / "cut.zip").write_bytes(whole[:size])
        with pytest.raises(DamagedInput):
            opened(str(tmp_path / "cut.zip"))


def test_paths_without_an_archive(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be opened"):
        opened(str(tmp_path / "absent.zip"))
    with pytest.raises(DamagedInput, match="has no member"):
        opened(str(tmp_path))


def test_ranges_that_contain_each_other_in_a_circle_end(tmp_path: Path) -> None:
    circle = classic().with_columns(ParentId=pl.when(pl.col("RangeId") == 10).then(13.0).otherwise("ParentId"))
    tables = opened_untried(zipped(tmp_path / "a.zip", members(circle)))
    # Nothing that leads into the circle has a parent any more; the rest is as it was.
    assert tables.gpu["program"].to_list() == [None, None, None, None, None, 0, 1]


def test_parquet_that_ends_its_reader_is_damaged_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zipped(tmp_path / "a.zip", members())
    monkeypatch.setattr(probe, "_CHILD", "import os; os.write(1, b'r'); os.kill(os.getpid(), 9)")
    with pytest.raises(DamagedInput, match="crashes the process that reads it"):
        opened(path)
    monkeypatch.setattr(probe, "_CHILD", "import time; time.sleep(60)")
    monkeypatch.setattr(probe, "_PATIENCE_S", 0.1)
    with pytest.raises(DamagedInput, match="cannot be read within"):
        opened(path)


def test_archives_are_refused_where_no_process_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = str(tmp_path / "no python")
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setattr(probe, "subprocess", subprocess)  # elsewhere tests fork such processes
    with pytest.raises(MissingRequirement, match=f"{python}: No such file or directory"):
        opened(zipped(tmp_path / "a.zip", members()))
