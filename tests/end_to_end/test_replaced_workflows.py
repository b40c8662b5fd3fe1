"""What people do by hand today, step by step, with thence in no more steps and with the same numbers.

Each test names the original, lists its steps, and says which one command or call does them here.
"""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest

import thence
from helpers import run_thence, written

if TYPE_CHECKING:
    from pathlib import Path

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
        launch = {
            "name": "cudaGraphLaunch",
            "pid": 9,
            "tid": 9,
            "args": {"correlation": replay + 1},
        }
        events.append({"ph": "X", "cat": "cuda_runtime", "ts": at, "dur": 5, **launch})
        for node in range(len(BLOCK)):
            args = {
                "device": 0, "stream": 7, "correlation": replay + 1, "graph id": 2, "graph node id": (2 << 32) + node,
            }  # fmt: skip
            kernel = {
                "name": f"kernel{node % 5}",
                "pid": 0,
                "tid": 7,
                "ts": at + 20 + 10 * node,
                "dur": 8,
            }
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
    assert (again.places["lane"] == "62").sum() == 40


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
