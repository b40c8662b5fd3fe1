"""What people do by hand today, step by step, with thence in no more steps and with the same numbers.

Each test names the original, lists its steps, and says which one command or call does them here.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import thence
from helpers import DATA, run_thence, written

# PyTorch's tutorial "CUDA Graph Kernel Annotations and Profiling": 13 kernels in a transformer block, replayed
# five times. Its own table of lanes is 65 on stream 7 before; 10 on 7, 15 on 61 and 40 on 62 after.
BLOCK = [("qkv_proj", None)] + [("attention", 62)] * 8 + [("out_proj", None)] + [("mlp", 61)] * 3
REPLAYS = 5


def tutorial(folder: Path) -> Path:
    """The files that the tutorial's program leaves behind: a raw trace and a pickle beside it."""
    folder.mkdir()
    said = {
        (2 << 32) + node: [{"name": name} | ({} if stream is None else {"stream": stream})]
        for node, (name, stream) in enumerate(BLOCK)
    }
    (folder / "kernel_annotations_rank0_fwd_bwd.pkl").write_bytes(pickle.dumps(said))
    events: list[dict[str, Any]] = []
    for replay in range(REPLAYS):
        at = 1000 * replay
        launch = {"name": "cudaGraphLaunch", "pid": 9, "tid": 9, "args": {"correlation": replay + 1}}
        events.append({"ph": "X", "cat": "cuda_runtime", "ts": at, "dur": 5, **launch})
        for node in range(len(BLOCK)):
            args = {
                "device": 0, "stream": 7, "correlation": replay + 1, "graph id": 2, "graph node id": (2 << 32) + node,
            }  # fmt: skip
            kernel = {"name": f"kernel{node % 5}", "pid": 0, "tid": 7, "ts": at + 20 + 10 * node, "dur": 8}
            events.append({"ph": "X", "cat": "kernel", **kernel, "args": args})
    return written(folder / "trace_raw.json", events)


def test_the_annotation_tutorial_in_one_command(tmp_path: Path) -> None:
    """Original: load trace and pickle, annotate_trace, two cleanups, save, count kernels per lane: six steps."""
    trace = tutorial(tmp_path / "traces")
    done = run_thence("label", trace, "-o", tmp_path / "annotated.json.gz", "--format", "json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert {row["stream"]: row["kernels"] for row in shown["streams"]} == {"7": 65}
    lanes = {row["lane"]: row["kernels"] for row in shown["lanes"]}
    assert lanes == {"62 (attention)": 40, "61 (mlp)": 15, "qkv_proj": 5, "out_proj": 5}
    assert lanes["qkv_proj"] + lanes["out_proj"] == 10  # the tutorial's default lane, by name
    assert shown["labelled"] == 65
    table = run_thence("label", trace).stdout.decode()
    assert "62 (attention)" in table
    again = thence.open(tmp_path / "annotated.json.gz")
    assert (again.tables.places["lane"] == "62").sum() == 40


# A gist for JAX: a Transformer Engine GEMM placed on another stream, proved with nsys's cuda_gpu_trace as CSV.
NSYS = """Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,Device,Ctx,Stream,Name
100,50,1,1,1,1,32,1,1,16,NVIDIA H200 (0),1,{first},nvjet_tst_128x64_64x8_NNT
120,50,2,1,1,1,32,1,1,16,NVIDIA H200 (0),1,{second},ampere_bf16_s16816_tn_128x64_ldg8
180,10,3,1,1,1,32,1,1,16,NVIDIA H200 (0),1,{first},input_dot_fusion
200,10,4,1,1,1,32,1,1,16,NVIDIA H200 (0),1,{first},loop_add_fusion
"""


@pytest.mark.parametrize(("second", "status"), [(18, 0), (7, 1)])
def test_the_proof_of_two_streams_in_one_command(second: int, status: int, tmp_path: Path) -> None:
    """Original: nsys stats to CSV, a script that groups kernels by stream, and reading its table."""
    path = tmp_path / "cuda_gpu_trace.csv"
    path.write_text(NSYS.format(first=7, second=second))
    done = run_thence("streams", path, "--expect", "GEMM>=2", "--format", "json")
    assert done.returncode == status, done.stderr
    (device,) = json.loads(done.stdout)["devices"]
    counts = {one["stream"]: one["groups"]["GEMM"]["count"] for one in device["streams"]}
    assert counts == ({7: 2, 18: 1} if second == 18 else {7: 3})


# The notebook of nsys-jax (Analysis.ipynb): its cells compute tables of modules, thunks and compile phases, pie
# charts, flame graphs written by a Perl script, and four scatter plots and histograms of collectives.
FSDP = DATA / "jax" / "jax_fsdp2.xplane.pb.gz"
COMPILED = DATA / "jax" / "recording"


def rows_of(*arguments: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    done = run_thence(*arguments, "--format", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    return document, document["rows"]


def test_tables_of_the_nsys_jax_notebook_in_one_command_each() -> None:
    """Original: load, drop warm-up, group modules, take those above 1 %, group thunks, look up the HLO."""
    trace = thence.open(FSDP)
    tables = trace.recorded
    spans = sorted(tables.programs.select("duration", "device", "start").rows(), key=lambda r: r[2])
    steady = [r for device in (0, 1) for r in [s for s in spans if s[1] == device][1:]]
    _, (program,) = rows_of("programs", FSDP)
    assert (program["program"], program["executions"], program["share"]) == ("jit_train_step", 8, 1)
    assert program["span_ns_total"] == sum(duration for duration, *_ in steady)
    assert program["thunks_std"] >= 0 < program["thunks_mean"]

    # The first execution on each device is warm-up: it was compiled before, but there are collectives.
    kept: dict[str, int] = {}
    busy: list[tuple[int, int, int]] = []
    # Kernels of command buffers have their instruction from the HLO's schedule.
    for name, device, start, duration in trace.tables.gpu.select("hlo", "device", "start", "duration").rows():
        if any(d == device and at <= start < at + span for span, d, at in steady):
            kept[name] = kept.get(name, 0) + duration
            busy.append((device, start, start + duration))
    document, rows = rows_of("report", FSDP, "--by", "hlo")
    found = {row["name"]: row for row in rows if row["attributed"]}
    assert {name: row["total_ns"] for name, row in found.items()} == kept
    known = dict(tables.hlo[0].instructions.select("name", "op_name").rows())
    said = {name: row["op_name"] for name, row in found.items() if known[name]}
    assert said == {name: known[name] for name in said}
    assert len(said) > 100
    table = run_thence("report", FSDP, "--by", "hlo").stdout.decode()
    assert f" {known['custom-call.22']}" in table

    idle = 0
    for span, device, at in steady:
        reached = at
        for _, start, end in sorted(b for b in busy if b[0] == device and at <= b[1] < at + span):
            idle += max(0, start - reached)
            reached = max(reached, end)
        idle += max(0, at + span - reached)
    document, rows = rows_of("report", FSDP, "--by", "opcode")
    assert document["idle_inside_programs_ns"] == idle > 0
    assert sum(row["total_ns"] for row in rows) == document["sum_ns"]
    assert sum(row["total_ns"] for row in rows if row["attributed"]) == sum(kept.values())
    table = run_thence("report", FSDP, "--by", "opcode").stdout.decode()
    assert "GPU idle inside programs (not in the sum)" in table

    _, phases = rows_of("compile", COMPILED)
    assert {"XlaCompileBackend", "XlaCompileGpuAsm"} <= {row["name"] for row in phases}
    assert "compilation took" in run_thence("compile", COMPILED).stdout.decode()


@pytest.mark.parametrize(("by", "frame"), [("source", "jax_gpt.py:17 attention"), ("op_name", "attention")])
def test_flame_graphs_of_the_nsys_jax_notebook(by: str, frame: str, tmp_path: Path) -> None:
    """Original: write lines of stacks to a file, run flamegraph.pl on it, show the SVG in a frame."""
    target = tmp_path / "flame.svg"
    assert run_thence("flame", FSDP, "--by", by, "-o", target).returncode == 0
    text = target.read_text()
    assert text.startswith("<svg")
    assert frame in text
    assert "inside jit_train_step" in text
    assert "before jit_train_step" in text


def test_pictures_of_the_nsys_jax_notebook() -> None:
    """Original: a cell of matplotlib for each; here a call of the trace for each."""
    trace = thence.open(FSDP)
    instances = trace.collectives().instances
    histogram = trace.plot_wait_histogram()
    assert histogram.to_frame()["count"].sum() == instances["wait_ns"].count()
    clouds = [part.data for part in trace.plot_wait_sizes().series if part.mark == "dot"]
    points = [point for cloud in clouds for point in cloud.select("bytes", "wait_ns").rows()]
    expected = instances.filter(instances["wait_ns"] > 0).select("bytes", "wait_ns").rows()
    assert sorted(points) == sorted(expected)
    for chart in (trace.plot_bandwidth(), trace.plot_spread(), trace.plot_programs()):
        assert chart.to_frame().height
    assert thence.open(COMPILED).plot_compile().to_frame().height
    *_, idle = trace.plot_by("opcode").series
    assert idle.data["total_ns"].to_list() == [trace.report("opcode").idle_inside_ns]


ARCHIVES = os.environ.get("THENCE_NSYS_JAX_ARCHIVES", "")
"""Folder of pax_fsdp4_4proc_proc*.zip, the archives that nsys-jax is tested with; they are not kept here."""


@pytest.mark.skipif(not ARCHIVES, reason="THENCE_NSYS_JAX_ARCHIVES is not set")
def test_the_numbers_of_the_nsys_jax_notebook() -> None:
    """What the notebook of 2024 computes of the first archive; its warm-up is the first run of what was compiled."""
    first = ("--warm-up", "first-compiled")
    archive = Path(ARCHIVES) / "pax_fsdp4_4proc_proc0.zip"
    _, (step, *_) = rows_of("programs", archive, *first)
    assert (step["program"], step["executions"]) == ("pjit__wrapped_step_fn", 4)
    assert step["span_ms_total"] == pytest.approx(524.676778)
    assert step["span_ms_std"] == pytest.approx(6.857673935)
    assert (step["thunks_mean"], step["thunks_std"]) == (2610, 0)
    assert step["idle_inside_ns"] == 13_283_423
    _, rows = rows_of("report", archive, "--by", "hlo", *first)
    thunks = {row["name"]: row["total_ns"] for row in rows}
    # Of its ten longest those that compute; it shows the exposed part of those that communicate.
    longest = {
        "custom-call.219.0": 10_523_565, "input_convert_reduce_fusion.13": 10_089_935, "cublas-gemm.2.0": 9_586_320,
        "custom-call.345.0": 9_487_890, "custom-call.220.0": 9_480_976, "custom-call.348.0": 8_649_045,
        "loop_convert_fusion.20": 3_547_982, "loop_convert_fusion.14": 3_546_766,
    }  # fmt: skip
    assert {name: thunks[name] for name in longest} == longest
    phases = {row["name"]: row["self_ns"] for row in rows_of("compile", archive)[1]}
    assert phases["XlaPass"] == pytest.approx(21_334_683_786)
    assert phases["XlaMemoryScheduler"] == pytest.approx(6_643_068_704)
