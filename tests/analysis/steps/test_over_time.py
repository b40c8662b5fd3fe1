"""Steps over time: means over devices, steps put together, and those that are too long to be drawn."""

from __future__ import annotations

import polars as pl

from thence.analysis.steps.over_time import MAX_COLUMNS, steps_over_time
from thence.analysis.steps.windows import Steps


def steps(durations: dict[tuple[int, int], list[int]], first: int = 0) -> Steps:
    """Steps one after the other: half of each is idle, a quarter exposed communication."""
    rows = [
        {
            "rank": rank, "device": device, "step": f"step {number}", "start": first + sum(lasted[:number]),
            "duration": ns, "busy_ns": ns // 2, "exposed_ns": ns // 4, "idle_ns": ns - ns // 2,
            "left_out": "first" if number == 0 else None,
        }
        for (rank, device), lasted in durations.items()
        for number, ns in enumerate(lasted)
    ]  # fmt: skip
    return Steps(pl.DataFrame(rows, schema_overrides={"left_out": pl.String}), "step")


def test_steps_are_means_over_the_devices() -> None:
    found = steps_over_time(steps({(0, 0): [800, 400, 400], (1, 0): [800, 800, 400]}, first=5_000))
    assert (found.steps, found.devices) == (3, 2)
    assert found.rows.select("name", "left_out", "start_ns", "end").rows() == [
        ("step 0", "first", 0, 800), ("step 1", None, 800, 1_400), ("step 2", None, 1_400, 1_800),
    ]  # fmt: skip
    assert found.rows.select("compute_ns", "exposed_ns", "idle_ns").rows()[1] == (150, 150, 300)


def test_a_step_that_compiles_is_named_and_not_drawn() -> None:
    found = steps_over_time(steps({(0, 0): [4_001, 1_000, 1_000]}))
    assert found.too_long.rows() == [("step 0", 4_001)]
    assert found.rows["name"].to_list() == ["step 1", "step 2"]
    assert steps_over_time(steps({(0, 0): [4_000, 1_000, 1_000]})).too_long.is_empty()


def test_many_steps_are_put_together() -> None:
    found = steps_over_time(steps({(0, 0): [100, 300] * MAX_COLUMNS}))
    assert found.rows.height == MAX_COLUMNS
    assert found.rows["name"][1] == "mean of step 2 to step 3"
    assert found.rows["idle_ns"].unique().to_list() == [100]
    assert found.rows["end"][-1] == 400 * MAX_COLUMNS
