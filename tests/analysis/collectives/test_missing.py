"""What a trace lacks: descriptions of collectives, and ranks of its job."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

import thence
from helpers import DATA, TORCH
from thence.analysis.collectives.missing import job_ranks, job_size, why_no_collectives
from thence.attribution.attribute import attribute
from thence.model.tables import COLLECTIVES, GPU, Meta, Tables

if TYPE_CHECKING:
    from collections.abc import Iterable


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
    tables = thence.open(TORCH / "graphs" / "comm_eager_rank0.json.gz").recorded
    meta = dataclasses.replace(tables.meta, formats=(form,))
    said = why_no_collectives(attribute(dataclasses.replace(tables, meta=meta)))
    assert said.startswith("describes no collectives, though kernels communicate: ")
    assert way in said
    assert "one GPU" not in said


def test_several_gpus_are_never_called_one() -> None:
    ranks = [thence.open(TORCH / f"torch_fsdp_rank{rank}.json.gz").recorded for rank in (0, 1)]
    several = thence.open(*(TORCH / f"torch_fsdp_rank{rank}.json.gz" for rank in (0, 1))).recorded
    for tables, expected in ((several, "it has 2 GPUs"), (ranks[0], "it is of a single GPU")):
        gpu = tables.gpu.filter(~tables.gpu["name"].cast(str).str.contains("nccl"))
        without = dataclasses.replace(tables, gpu=gpu, collectives=tables.collectives.clear())
        assert expected in why_no_collectives(attribute(without))


def tables(ranks: list[int], size: int | None, members: str | None = None, devices: int = 1, **facts: int) -> Tables:
    """A kernel of each rank and device, with the size of its group and its ranks as the producer wrote them."""
    places = [(rank, device) for rank in ranks for device in range(devices)]
    count = len(places)
    gpu = GPU.frame(
        {"rank": [rank for rank, _ in places], "device": [device for _, device in places]}
        | {"kind": ["kernel"] * count, "name": ["nccl"] * count, "start": range(count), "duration": [1] * count}
    )
    described = {"gpu": range(count), "collective": ["all_reduce"] * count}
    groups = {"group_size": [size] * count, "group_ranks": [members] * count}
    meta = Meta(facts=(facts,) if facts else ())
    return Tables(gpu=gpu, collectives=COLLECTIVES.frame(described | groups), meta=meta)


THIRTY = ", ".join(map(str, range(30)))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(tables([0, 1], None, world_size=8), 8, id="a world size that torch.profiler states"),
        pytest.param(tables([0, 1], 4), 4, id="a communicator of NCCL in Nsight Systems"),
        pytest.param(tables([0], 16, devices=8), 2, id="a communicator of two processes of eight GPUs"),
        pytest.param(tables([0, 1], 512, f"[{THIRTY}, ...]"), 512, id="the first ranks, in a recording"),
        pytest.param(tables([0, 1], 512, f"[{THIRTY[:-4]}, ..., 511]"), 512, id="the first ranks and the last"),
        pytest.param(tables([0, 8], 64, "[0, 8, 16, ..., 504]"), None, id="every eighth rank"),
        pytest.param(tables([6, 7], 2), None, id="a group of two of more ranks"),
        pytest.param(tables([0, 1], 4, "[0, 1, 2, 3]"), None, id="all ranks of a group: the list tells them"),
        pytest.param(tables([0, 1], None), None, id="nothing"),
        pytest.param(tables([0], None, world_size=2_000_000_000), None, id="two billion"),
    ],
)
def test_how_many_ranks_a_job_has_is_what_its_inputs_tell(found: Tables, expected: int | None) -> None:
    assert job_size(found) == expected


def test_xla_programs_tell_the_ranks_by_the_devices_that_they_run_on() -> None:
    whole = thence.open(DATA / "jax" / "jax_fsdp2.xplane.pb.gz").recorded  # one process, two GPUs
    assert [(m.replicas, m.partitions) for m in whole.hlo] == [(1, 2)]
    assert job_size(whole) is None
    meta = dataclasses.replace(whole.meta, devices=whole.meta.devices[:1])
    one = whole.gpu.filter(whole.gpu["device"] == 0)
    assert job_size(dataclasses.replace(whole, gpu=one, meta=meta)) == 2


@pytest.mark.parametrize(
    ("shown", "size", "members", "statement"),
    [
        (range(8), 512, [], "8 of 512 ranks; missing 8-511"),
        ((0, 1, 3), 4, [], "3 of 4 ranks; missing 2"),
        ((1, 5), None, ["[0, 1]", "(4, 5, 6)", None], "2 of 5 ranks; missing 0, 4, 6"),
        ((0, 9), 10, ["[0, 1, ..., 30]"], "2 of 10 ranks; missing 1-8"),
        (range(0, 40, 2), 40, [], "20 of 40 ranks; missing 1, 3, 5, 7, 9, 11, 13, 15 and 12 more"),
        ((0, 1, 2, 3), 4, ["[0, 1, 2, 3]"], ""),
        ((0, 1), None, [], ""),
        ((0,), None, ["[0, 999999999]"], ""),
        ((0,), 2_000_000_000, [], ""),
    ],
)
def test_missing_ranks_are_stated_as_ranges(
    shown: Iterable[int], size: int | None, members: list[str | None], statement: str
) -> None:
    assert job_ranks(shown, size, members).statement == statement
