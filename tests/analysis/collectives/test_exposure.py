"""Exposed time: counted nanosecond by nanosecond, and one number in streams and collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import thence
from collective_jobs import NCCL, Job, joint
from helpers import DATA, FSDP, TORCH, examples, recording
from thence.analysis.collectives.exposure import exposure
from thence.attribution.attribute import attribute
from thence.errors import MissingData
from thence.model.tables import COLLECTIVES, GPU, Tables

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ["gemm", "copy", NCCL["allreduce"], "described"]
ACTIVITIES = st.lists(
    st.tuples(st.sampled_from(range(4)), st.integers(0, 60), st.integers(0, 25), st.integers(0, 1)),
    min_size=1,
    max_size=14,
)


def device(rows: list[tuple[int, int, int, int]]) -> Tables:
    """Activities of two devices: (what of `NAMES`, start, duration, device)."""
    count = len(rows)
    gpu = GPU.frame(
        {
            "rank": [0] * count,
            "device": [where for *_, where in rows],
            "kind": ["memcpy" if what == 1 else "kernel" for what, *_ in rows],
            "name": [NAMES[what] for what, *_ in rows],
            "start": [start for _, start, _, _ in rows],
            "duration": [duration for _, _, duration, _ in rows],
        }
    )
    described = [number for number, (what, *_) in enumerate(rows) if what == 3]
    words = {"collective": ["all-reduce"] * len(described)}
    return Tables(gpu=gpu, collectives=COLLECTIVES.frame({"gpu": described, **words}))


@settings(deadline=None, max_examples=examples(40))
@given(ACTIVITIES)
def test_against_counting_every_nanosecond(rows: list[tuple[int, int, int, int]]) -> None:
    found = exposure(attribute(device(rows)))
    charged = {n: [0, 0, 0] for n, (what, *_) in enumerate(rows) if what >= 2}
    exposed = {0: 0, 1: 0}
    for where in (0, 1):
        for time in range(90):
            running = [
                n for n, (_, start, duration, at) in enumerate(rows) if at == where and start <= time < start + duration
            ]
            talking = sorted((n for n in running if rows[n][0] >= 2), key=lambda n: (rows[n][1], n))
            computing = any(rows[n][0] == 0 for n in running)
            exposed[where] += bool(talking) and not computing
            for place, n in enumerate(talking):
                charged[n][1 if computing else 2 if place else 0] += 1
    columns = ("gpu", "exposed_ns", "hidden_ns", "overlapped_ns")
    assert {gpu: rest for gpu, *rest in found.rows.select(columns).rows()} == charged
    assert dict(found.devices.select("device", "exposed_ns").rows()) == {
        where: exposed[where] for where in (0, 1) if any(n[0] >= 2 and n[3] == where for n in rows)
    }


JOBS = (
    (recording("torch_eager_rank0"),),
    (TORCH / "graphs" / "comm_replay_rank0.json.gz",),
    (DATA / "nsight" / "torch_ddp.sqlite.gz",),
    (DATA / "jax" / "jax_fsdp2.xplane.pb.gz",),
    FSDP,
)
"""Each kind of recording, with and without collectives."""


@pytest.mark.parametrize("paths", JOBS, ids=lambda paths: paths[0].name)
def test_streams_and_collectives_agree(paths: tuple[Path, ...]) -> None:
    trace = thence.open(*paths)
    devices = {
        (c.rank, c.device): (c.communication_ns, c.communication_ns - c.hidden_ns)
        for c in trace.streams().concurrency
        if c.communication_ns
    }
    try:
        kept, usual = trace.collectives("keep"), trace.collectives()
    except MissingData:
        assert not devices
        return
    for times in (kept, usual):
        assert {(r, d): tuple(rest) for r, d, *rest in times.devices.rows()} == devices
        assert int(times.rows["exposed_ns"].sum()) + times.left_out["exposed_ns"] == sum(
            exposed for _, exposed in devices.values()
        )
    assert kept.left_out["count"] == 0
    sums = kept.by_size.select("exposed_ns", "hidden_ns", "overlapped_ns", "duration_ns").sum().row(0)
    assert sum(sums[:3]) == sums[3]
    assert sums[0] == sum(exposed for _, exposed in devices.values())


def test_kernels_without_a_description_count(tmp_path: Path) -> None:
    """As ROCm's profiler writes it: 5 of 17 kernels have no description."""
    without = range(1, 14, 3)
    calls = [joint([2_000_000 * n, 2_000_000 * n], 100_000 + 1000 * n, described=n not in without) for n in range(17)]
    compute = [(rank, 2_000_000 * n + 20_000, 30_000) for n in (0, without[0]) for rank in (0, 1)]
    trace = thence.open(*Job(calls, compute=compute).write(tmp_path))
    times = trace.collectives()
    lengths = [call.ends[0] - call.arrivals[0] for call in calls]
    row = times.by_size.filter(~pl.col("described")).row(0, named=True)
    assert (row["collective"], row["kernel"], row["bytes"]) == ("all-reduce", NCCL["allreduce"], None)
    assert row["count"] == 10
    assert row["exposed_ns"] == 2 * (sum(lengths[n] for n in without) - 30_000)
    assert row["hidden_ns"] == 2 * 30_000
    assert times.to_json()["exposed_ns"] == 2 * (sum(lengths) - 60_000)
    (said,) = [note for note in times.notes if "no description" in note]
    share = sum(lengths[n] for n in without) / sum(lengths)
    assert said.startswith(f"10 of 34 kernels that communicate, {100 * share:.1f} %")


def test_nothing_described_is_no_error(tmp_path: Path) -> None:
    calls = [joint([0, 0], 100_000, described=False)]
    times = thence.open(*Job(calls).write(tmp_path)).collectives()
    assert times.by_size["described"].to_list() == [False]
    assert any("torch 2.1" in note for note in times.notes)


def test_overlapping_collectives_are_charged_once(tmp_path: Path) -> None:
    calls = [joint([0], 100_000, 10), joint([40_000], 100_000, 20), joint([60_000], 10_000, 30)]
    times = thence.open(*Job(calls).write(tmp_path)).collectives()
    found = times.rows.sort("start").select("exposed_ns", "overlapped_ns").rows()
    assert found == [(100_000, 0), (40_000, 60_000), (0, 10_000)]
    assert times.devices["exposed_ns"].to_list() == [140_000]
    assert np.all(times.rows["hidden_ns"].to_numpy() == 0)
