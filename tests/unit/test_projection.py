"""Projection of host ranges on the GPU: against nsys's own report, and against a plain loop."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from nsight_data import export, report_frame
from polars.testing import assert_frame_equal

import thence
from thence.analysis.projection import project
from thence.model.tables import GPU, HOST, Tables

KEYS = ["name", "start", "duration", "launched", "lasted", "process", "thread", "operations"]


@pytest.mark.parametrize("name", ["torch_ddp", "jax_train"])
def test_agrees_with_nsys_to_the_nanosecond(name: str) -> None:
    trace = thence.open(export(name))
    ranges = project(trace.tables).ranges
    host = trace.host[ranges["host"].cast(pl.UInt32)]
    ours = ranges.select(
        pl.col("name").cast(pl.String), "start", "duration", launched=host["start"],
        lasted=host["duration"], process=host["process"], thread=host["thread"],
        operations="launches",
    )  # fmt: skip
    theirs = report_frame(f"{name}_nvtx_gpu_proj_trace").select(
        name=pl.col("Name").str.replace("^[A-Za-z]*:", ""),
        start="Projected Start (ns)", duration="Projected Duration (ns)",
        launched="Orig Start (ns)", lasted="Orig Duration (ns)", process="PID", thread="TID",
        operations="NumGPUOps",
    )  # fmt: skip
    assert theirs.height >= 10
    assert_frame_equal(ours.sort(KEYS), theirs.sort(KEYS))


def test_the_streams_of_a_range_make_up_the_whole() -> None:
    found = project(thence.open(export("torch_ddp")).tables)
    streams = found.streams.with_columns(end=pl.col("start") + pl.col("duration"))
    whole = streams.group_by("host").agg(
        pl.col("start").min(), end=pl.col("end").max(), activities=pl.col("activities").sum()
    )
    expected = found.ranges.select(
        "host", "start", (pl.col("start") + pl.col("duration")).alias("end"), "activities"
    )
    assert_frame_equal(whole.sort("host"), expected.sort("host"))
    assert found.streams["stream"].n_unique() > 1


def random_tables(seed: int) -> Tables:
    """Ranges that overlap in every way on two threads, calls among them, one to three activities a call."""
    random = np.random.default_rng(seed)
    count = 60
    host = pl.DataFrame(
        {
            "rank": 0, "process": 1, "thread": random.integers(0, 2, count),
            "category": random.choice(["range", "runtime"], count), "name": "x",
            "start": random.integers(0, 100, count), "duration": random.integers(0, 30, count),
        }
    ).sort("thread", "start", "duration", descending=[False, False, True])  # fmt: skip
    calls = pl.col("category") == "runtime"
    host = host.with_columns(correlation=pl.when(calls).then(pl.int_range(pl.len())))
    launched = random.choice(host["correlation"].drop_nulls().to_numpy(), 70)
    gpu = pl.DataFrame(
        {
            "rank": 0, "device": 0, "stream": random.integers(0, 3, 70), "kind": "kernel",
            "name": "k", "correlation": launched, "start": random.integers(0, 500, 70),
            "duration": random.integers(1, 40, 70),
        }
    )  # fmt: skip
    return Tables(gpu=GPU.frame(gpu.to_dict()), host=HOST.frame(host.to_dict()))


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_a_loop_over_ranges_that_do_not_nest(seed: int) -> None:
    tables = random_tables(seed)
    host, gpu = tables.host.rows(named=True), tables.gpu.rows(named=True)
    expected = []
    for row, outer in enumerate(host):
        if outer["category"] != "range":
            continue
        end = outer["start"] + max(outer["duration"], 1)
        inside = {
            call["correlation"] for place, call in enumerate(host)
            if call["category"] == "runtime" and call["thread"] == outer["thread"]
            and place > row and outer["start"] <= call["start"] < end
        }  # fmt: skip
        ran = [g for g in gpu if g["correlation"] in inside]
        if ran:
            first = min(g["start"] for g in ran)
            last = max(g["start"] + g["duration"] for g in ran)
            calls = len({g["correlation"] for g in ran})
            expected.append((row, first, last - first, calls, len(ran)))
    found = project(tables).ranges.select("host", "start", "duration", "launches", "activities")
    assert found.rows() == expected


def test_nothing_to_project() -> None:
    assert project(Tables()).ranges.is_empty()
    assert project(Tables()).streams.is_empty()
