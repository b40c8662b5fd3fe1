"""The cuda_gpu_trace CSV: the same report as the export of the same run, in any of nsys's spellings."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import thence
from helpers import shared
from nsight_data import export, report, report_frame, unpacked
from thence.analysis.activity_rooflines import BOUND_SUMS

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = ["name", "kind", "device", "stream", "start", "duration", "correlation", "grid", "block", "registers"]
ROW = (
    "{start},{duration},280,,,,,,,,,,16.777,7197.426,Pageable,Device,NVIDIA H200 (1),1,,7,"
    "[CUDA memcpy Host-to-Device]\n"
)  # fmt: skip
HEADER = (
    "Start ({0}),Duration ({0}),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),"
    "Bytes (MB),Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name\n"
)


def rows(trace: thence.Trace) -> pl.DataFrame:
    text = pl.col("name", "kind").cast(pl.String)
    return trace.tables.gpu.select(COLUMNS).with_columns(text).sort(COLUMNS[:7])


OF_BYTES = ("bytes", "bytes_ns", "gbps", "modelled_ns", "headroom_ns", "peak_share", "bound", *BOUND_SUMS)


def opened(folder: Path, text: str) -> thence.Trace:
    path = folder / "trace.csv"
    path.write_text(text)
    trace = thence.open(path)
    trace.self_check()
    return trace


@pytest.mark.parametrize("name", ["torch_ddp", "torch_graph", "jax_train"])
def test_a_csv_gives_the_report_of_its_export(name: str) -> None:
    csv, full = shared(report(f"{name}_cuda_gpu_trace")), shared(export(name))
    assert_frame_equal(rows(csv), rows(full))
    # A CSV knows no XLA programs, so none of its work is kept apart as warm-up.
    a, b = csv.report(), full.select(warm_up="keep").report()
    assert (a.span_ns, a.busy_ns, a.sum_ns) == (b.span_ns, b.busy_ns, b.sum_ns)
    # A CSV has no exact sizes of copies, so their bytes, and what follows from them, are unknown.
    assert a.rows["bytes"].null_count() == a.rows.height
    assert_frame_equal(a.rows.drop(OF_BYTES), b.rows.drop(OF_BYTES))


@pytest.mark.parametrize("name", ["torch_ddp", "torch_graph"])
def test_kernels_of_a_csv_agree_with_the_sum_that_nsys_made(name: str) -> None:
    gpu = shared(report(f"{name}_cuda_gpu_trace")).tables.gpu.filter(pl.col("kind") == "kernel")
    ours = gpu.group_by(Name=pl.col("name").cast(pl.String)).agg(
        pl.len().cast(pl.Int64).alias("Instances"), pl.col("duration").sum().alias("Total Time (ns)")
    )
    theirs = report_frame(f"{name}_cuda_gpu_kern_sum").select(ours.columns)
    assert_frame_equal(ours.sort(pl.all()), theirs.sort(pl.all()))


@pytest.mark.parametrize(
    ("unit", "start", "duration"),
    [
        ("ns", "8121171110", "2329661"), ("nsec", "8121171110", "2329661"),
        ("us", "8121171.110", "2329.661"), ("usec", "8121171.11", "2329.661"),
        ("ms", "8121.171110", "2.329661"), ("msec", "8121.17111", "2.329661"),
        ("s", "8.121171110", "0.002329661"), ("sec", "8.12117111", "0.002329661"),
    ],
)  # fmt: skip
def test_every_unit_of_time(tmp_path: Path, unit: str, start: str, duration: str) -> None:
    gpu = opened(tmp_path, HEADER.format(unit) + ROW.format(start=start, duration=duration)).tables.gpu
    assert gpu.select("start", "duration", "device", "stream").row(0) == (8121171110, 2329661, 1, 7)
    assert gpu["name"][0] == "Memcpy HtoD (Pageable -> Device)"
    assert gpu["bytes"][0] is None  # 16.777 MB are not a number of bytes


def test_sizes_in_bytes_are_kept(tmp_path: Path) -> None:
    header = HEADER.format("ns").replace("Mem (MB)", "Mem (B)").replace("Bytes (MB)", "Bytes (B)")
    text = header + ROW.format(start=5, duration=6).replace("16.777", "16777216")
    assert opened(tmp_path, text).tables.gpu["bytes"].to_list() == [16777216]


def test_the_stream_column_may_have_its_whole_name(tmp_path: Path) -> None:
    text = HEADER.format("ns").replace("Strm", "Stream") + ROW.format(start=5, duration=6)
    assert opened(tmp_path, text).tables.gpu["stream"].to_list() == [7]


def test_columns_of_2021_between_lines_of_nsys(tmp_path: Path) -> None:
    text = (
        "Processing [x.sqlite] with [gputrace.py]... \n\n"
        "Start(nsec),Duration(nsec),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem(MB),DymSMem(MB),"
        "Bytes(MB),Throughput(MBps),SrcMemKd,DstMemKd,Device,Ctx,Strm,Name\n"
        '100,20,1,2,3,4,32,1,1,16,0.000,0.000,,,,,NVIDIA A100 (0),1,7,"f(int, float)"\n'
        "130,5,2,,,,,,,,,,0.004,1.0,Device,,NVIDIA A100 (0),1,7,[CUDA memset]\n"
        "140,5,3,,,,,,,,,,0.004,1.0,Device,Pinned,NVIDIA A100 (0),1,7,[CUDA memcpy DtoH]\n"
        "\nGenerated: x\n"
    )
    trace = opened(tmp_path, text)
    assert trace.tables.gpu["name"].to_list() == ["f(int, float)", "Memset (Device)", "Memcpy DtoH (Device -> Pinned)"]
    assert trace.tables.gpu["grid"].to_list() == [[2, 3, 4], None, None]
    assert trace.meta.devices[0].name == "NVIDIA A100"


@pytest.mark.parametrize(
    "text",
    [
        HEADER.format("ns"),
        HEADER.format("fortnights") + ROW.format(start=1, duration=2),
        HEADER.format("ns") + ROW.format(start="x", duration="y"),
        HEADER.format("ns").replace("Strm", "Ctx") + ROW.format(start=1, duration=2),
        "a,b\n1,2\n",
    ],
)
def test_what_is_none_gives_one_clear_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(thence.InputError, match=r"trace\.csv: "):
        opened(tmp_path, text)


def test_a_directory_counts_a_run_once(tmp_path: Path) -> None:
    unpacked("torch_graph", tmp_path)
    data = gzip.decompress(report("torch_graph_cuda_gpu_trace").read_bytes())
    (tmp_path / "torch_graph_cuda_gpu_trace.csv").write_bytes(data)
    (tmp_path / "torch_graph.nsys-rep").write_bytes(b"report")
    assert len(thence.open(tmp_path).meta.inputs) == 1


def test_damaged_csv_never_crashes(tmp_path: Path) -> None:
    import random

    data = gzip.decompress(report("torch_graph_cuda_gpu_trace").read_bytes())[:20_000]
    draw = random.Random(4)
    for number in range(40):
        broken = bytearray(data)
        for _ in range(draw.randint(1, 30)):
            broken[draw.randrange(len(broken))] = draw.randrange(256)
        path = tmp_path / "x.csv"
        path.write_bytes(bytes(broken[: draw.randrange(len(broken))]))
        try:
            trace = thence.open(path)
            if number % 8 == 0:
                trace.self_check()
        except thence.InputError:
            continue
