"""A recorded FSDP2 job in which nothing is annotated: its parts by the arithmetic of the model, and its late rank.

What was planted is told in tests/data/recording/ORIGIN.md.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import polars as pl
import pytest

from recording_data import recorded_job

if TYPE_CHECKING:
    import thence

STEPS, RANKS, LAYERS, LATE, SINCE, SLEEP = 7, 2, 4, 1, 3, 50e6
WRAPPED = "layers.2.layer"
"""Where the layer that the fault wraps is."""
LINEARS = {
    f"{WRAPPED if n == 2 else f'layers.{n}'}.{part}"
    for n in range(LAYERS)
    for part in (*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down")))
} | {"head"}
"""Every linear layer of the model, none of which has a bias."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> thence.Trace:
    return recorded_job("fsdp2_late_forward", tmp_path_factory.mktemp("fsdp2"))


@pytest.fixture(scope="module")
def rows(trace: thence.Trace) -> pl.DataFrame:
    """Activities with their places as text."""
    places = trace.tables.places.select(pl.col("module", "source", "phase", "step").cast(pl.String))
    return trace.tables.gpu.select("rank", "kind", "duration", pl.col("name").cast(pl.String)).hstack(places)


def test_each_linear_layer_has_one_product_forward_and_two_backward(rows: pl.DataFrame) -> None:
    products = rows.filter(pl.col("name").str.starts_with("nvjet"))
    found = Counter(products.select("rank", "module", "phase").rows())
    assert found == {
        (rank, module, phase): STEPS * times
        for rank in range(RANKS)
        for module in LINEARS
        for phase, times in (("forward", 1), ("backward", 2))
    }


def test_collectives_are_those_of_fully_sharded_layers(trace: thence.Trace) -> None:
    """Layers and the model gather before forward; layers, freed since, again before backward; all reduce after it."""
    kinds = trace.tables.collectives["collective"].cast(pl.String)
    gathers, reductions = (LAYERS + 1) + LAYERS, LAYERS + 1
    assert kinds.str.contains("gather").sum() == STEPS * RANKS * gathers
    assert kinds.str.contains("reduce_scatter").sum() == STEPS * RANKS * reductions
    assert trace.tables.collectives.height == STEPS * RANKS * (gathers + reductions)


def test_nearly_all_time_has_a_line_a_phase_and_a_step(rows: pl.DataFrame) -> None:
    total = rows["duration"].sum()
    for kind in ("source", "phase", "step"):
        assert rows.filter(pl.col(kind).is_not_null())["duration"].sum() > 0.99 * total, kind
    computed = rows.filter(pl.col("phase").is_in(["forward", "backward"]), ~pl.col("name").str.contains("nccl"))
    inside = computed.filter(pl.col("module").is_not_null())
    assert inside["duration"].sum() > 0.95 * computed["duration"].sum()  # the loss is in no module


def test_the_rank_that_sleeps_in_forward_is_named(trace: thence.Trace) -> None:
    job = trace.ranks()
    (late,) = job.stragglers.iter_rows(named=True)
    assert (late["rank"], late["since_step"]) == (LATE, f"step {SINCE}")
    assert late["mean_ns"] == pytest.approx(SLEEP, rel=0.1)
    (why,) = job.reasons
    assert why.rows["cause"][0] == "host"  # the recording has no samples, which would say sleep
    named = dict(why.rows.filter(cause="host").select("by", "name").iter_rows())
    assert named["source"].endswith("job_faults.py Late.forward")  # a line that launches nothing
    assert (named["module"], named["phase"]) == ("layers.2", "forward")
