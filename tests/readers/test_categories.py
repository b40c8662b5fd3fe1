"""Which host ranges are labels: those that somebody named, however they were recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import FSDP, TORCH, opened, recording
from thence.readers.categories import ranges_among_ops

if TYPE_CHECKING:
    from pathlib import Path


def labels_of(trace: thence.Trace) -> set[str]:
    ranges = trace.tables.host.filter(pl.col("category") == "range")
    return set(ranges["name"].cast(pl.String).to_list())


@pytest.mark.parametrize("shapes", [0, 1])
def test_ranges_that_pytorch_records_as_operators_are_labels_and_nothing_else_is(shapes: int) -> None:
    """Recorded by torch 2.13: attention and mlp by _RecordFunctionFast, F is an autograd.Function,
    mine::op a custom operator; torch.compile names its phases in the same way as the user."""
    trace = thence.open(TORCH / "ranges" / f"torch-2.13_cpu_shapes{shapes}.json.gz")
    assert labels_of(trace) == {"attention", "mlp", "user", "classic"}
    ops = trace.tables.host.filter(pl.col("category") == "op")["name"].cast(pl.String).unique().to_list()
    assert {"F", "detach", "mine::op", "aten::linear", "AddmmBackward0"} <= set(ops)


def test_recordings_without_such_ranges_keep_their_labels() -> None:
    user = {"forward", "backward", "optimizer", "attention", "mlp"}
    assert labels_of(thence.open(recording("torch_compile_rank0"))) == {"forward", "backward", "optimizer"}
    for path in (recording("torch_eager_rank0"), FSDP[0]):
        assert labels_of(thence.open(path)) == user


def op(name: str, ts: int, dur: int, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}


def test_kernels_get_such_a_label_and_keep_their_operator(tmp_path: Path) -> None:
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 14, "dur": 2}
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 20, "dur": 5}
    trace = opened(
        tmp_path,
        [
            op("attention", 10, 10, **{"External id": 1, "Record function id": 0}),
            op("aten::mm", 12, 6, **{"External id": 2}),
            launch | {"args": {"correlation": 5}},
            kernel | {"args": {"correlation": 5, "device": 0, "stream": 7}},
        ],
    )
    assert trace.tables.places.select("label", "op").cast(pl.String).rows() == [("attention", "aten::mm")]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("attention", True),
        ("layer0/mlp", True),
        ("gc", False),  # a phase of the compiler: gc_data lies beside
        ("detach", False),  # inside aten::detach
        ("MyFunction", False),  # PyTorch recorded a sequence number with it
        ("AddmmBackward0", False),
        ("triton_poi_fused_add_0", False),
        ("record_param_comms", False),
        ("build_guards (dynamo_timed)", False),
        ("Torch-Compiled Region: 0/0", False),
    ],
)
def test_names_among_operators(name: str, *, label: bool) -> None:
    ops = {name, "aten::detach", "aten::add"}
    found = ranges_among_ops(ops, {"MyFunction", "aten::add"}, {"gc_data: compile_id=0/0"})
    assert found == ({name} if label else set())
