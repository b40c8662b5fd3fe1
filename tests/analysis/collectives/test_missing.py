"""What is said where a trace describes no collectives."""

from __future__ import annotations

import dataclasses

import pytest

import thence
from helpers import TORCH
from thence.analysis.collectives.missing import why_no_collectives
from thence.attribution.attribute import attribute


@pytest.mark.parametrize(
    ("form", "way"),
    [
        ("thence recording", "thence.torch.collective"),
        ("torch.profiler (Kineto JSON)", "thence label"),
        ("Nsight Systems export", "--trace cuda,nvtx"),
        ("jax.profiler (XSpace)", "--hlo"),
        ("nsys-jax archive", "torch.profiler"),
    ],
)
def test_kernels_of_nccl_are_never_denied(form: str, way: str) -> None:
    tables = thence.open(TORCH / "graphs" / "comm_eager_rank0.json.gz").tables
    meta = dataclasses.replace(tables.meta, formats=(form,))
    said = why_no_collectives(attribute(dataclasses.replace(tables, meta=meta)))
    assert said.startswith("describes no collectives, though kernels communicate: ")
    assert way in said
    assert "one GPU" not in said


def test_several_gpus_are_never_called_one() -> None:
    ranks = [thence.open(TORCH / f"torch_fsdp_rank{rank}.json.gz").tables for rank in (0, 1)]
    several = thence.open(*(TORCH / f"torch_fsdp_rank{rank}.json.gz" for rank in (0, 1))).tables
    for tables, expected in ((several, "it has 2 GPUs"), (ranks[0], "it is of a single GPU")):
        gpu = tables.gpu.filter(~tables.gpu["name"].cast(str).str.contains("nccl"))
        without = dataclasses.replace(tables, gpu=gpu, collectives=tables.collectives.clear())
        assert expected in why_no_collectives(attribute(without))
