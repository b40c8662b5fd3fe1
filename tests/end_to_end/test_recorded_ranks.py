"""A recording of two ranks from two GPUs, against what torch.profiler wrote of the same program.

See tests/data/recording/ORIGIN.md.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import polars as pl
import pytest

import thence
from helpers import DATA, run_thence

RECORDED = DATA / "recording"
STEPS, REDUCTIONS = 20, 15
"""Of the program."""


@pytest.fixture(scope="module")
def trace() -> thence.Trace:
    return thence.open(RECORDED / "two_ranks")


def profiled(rank: int) -> Counter[tuple[Any, ...]]:
    """Name, elements in and out, element type and group size of the collectives, as profiled."""
    known: Counter[tuple[Any, ...]] = Counter()
    document = json.loads((RECORDED / "two_ranks_profile.json").read_text())
    for name, *facts, splits, kernels in document["ranks"][str(rank)]:
        # This PyTorch says all_to_allv also where nothing is split unevenly.
        even = name == "all_to_allv" and splits == "[]"
        known["all_to_all" if even else name, *facts] += kernels
    return known


@pytest.mark.parametrize("rank", [0, 1])
def test_collectives_are_described_as_by_the_profiler(trace: thence.Trace, rank: int) -> None:
    ranks = trace.tables.gpu["rank"].gather(trace.tables.collectives["gpu"])
    facts = ("in_elements", "out_elements", "element_type", "group_size")
    ours = trace.tables.collectives.filter(ranks == rank).select(
        pl.col("collective", "element_type").cast(pl.String), *set(facts) - {"element_type"}
    )
    assert Counter(ours.select("collective", *facts).rows()) == profiled(rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_reductions_of_ddp_belong_to_the_backward_pass(trace: thence.Trace, rank: int) -> None:
    rows = trace.activities.with_columns(pl.col("name", "label", "phase").cast(pl.String))
    nccl = rows.filter((pl.col("rank") == rank) & pl.col("name").str.contains("AllReduce"))
    found = Counter(nccl.select("label", "phase").rows())
    # One bucket with all of the gradients in the first step, two in every other one.
    assert found["forward", "backward"] == 1 + 2 * (STEPS - 1)
    assert found["reduce", None] == REDUCTIONS


def test_the_collectives_align_the_clocks(trace: thence.Trace) -> None:
    """Broadcasts need not end together for all: they are shared, but no clock is compared by them."""
    shared = sum(count for call, count in (profiled(0) & profiled(1)).items() if "broadcast" not in call[0])
    assert trace.alignment.matched == shared
    assert trace.alignment.residual_median_ns is not None
    assert trace.alignment.residual_median_ns < 2_000
    done = run_thence("collectives", str(RECORDED / "two_ranks"))
    assert f"the ends of {shared} shared collectives" in " ".join(done.stdout.decode().split())


def test_nothing_of_nccl_stays_open(trace: thence.Trace) -> None:
    assert trace.meta.warnings == ()
    labels = set(trace.activities["label"].cast(pl.String).drop_nulls())
    assert {"forward", "update", "reduce"} <= labels
    assert not any(label.startswith("ncclCommInit") for label in labels)
