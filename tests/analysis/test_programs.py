"""Programs and warm-up on a trace small enough to work out by hand."""

from __future__ import annotations

import json

import polars as pl
import pytest

from programs_data import trace
from thence.analysis.programs import By, programs
from thence.analysis.warmup import WarmUp, phases
from thence.model.tables import Tables


def test_time_and_idle_of_every_program() -> None:
    result = programs(trace(), WarmUp.KEEP)
    step, init = result.programs.rows(named=True)
    assert step == {
        "program": "step.1",
        "name": "step",
        "executions": 3,
        "gpu_ns_total": 120,
        "gpu_ns_mean": 40.0,
        "gpu_ns_std": pytest.approx((200 / 3) ** 0.5),  # of 50, 30, 40: population
        "thunks_mean": pytest.approx(7 / 3),
        "thunks_std": pytest.approx((2 / 9) ** 0.5),
        "thunk_ns": 50 + 20 + 50,
        "active_ns": 40 + 20 + 40,
        "idle_inside_ns": 20,
        "idle_before_ns": 30 + 20,
        "launch_latency_ns_mean": 5.0,
        "launch_latency_ns_max": 10,
    }
    assert (init["gpu_ns_total"], init["idle_before_ns"]) == (10, 10)
    assert result.devices.rows(named=True) == [
        {
            "rank": 0,
            "device": 0,
            "executions": 4,
            "gpu_ns": 130,
            "active_ns": 110,
            "idle_inside_ns": 20,
            "idle_between_ns": 60,
            "wall_ns": 190,
        }
    ]


def test_json_has_the_agreed_keys() -> None:
    row = json.loads(json.dumps(programs(trace(), WarmUp.KEEP).to_json()))["rows"][0]
    keys = "program executions gpu_ms_total gpu_ms_mean gpu_ms_std thunks_mean thunks_std"
    assert set(keys.split()) <= set(row)
    assert row["gpu_ms_total"] == pytest.approx(120e-6)
    assert (row["program"], row["identity"]) == ("step", "step.1")
    assert row["executions"] == 3


def test_autotuning_is_left_out_and_said() -> None:
    result = programs(trace(), WarmUp.KEEP)
    assert "gemm" not in result.programs["name"]
    assert "1 autotuning" in result.phases.statement


@pytest.mark.parametrize(
    ("rule", "compiled", "communicates", "expected"),
    [
        (WarmUp.KEEP, "step.1", True, [True, True, True, True]),
        (WarmUp.FIRST_COMPILED, None, True, [True, True, True, True]),
        (WarmUp.FIRST_COMPILED, "step.1", True, [False, True, True, True]),
        (WarmUp.FIRST_COMPILED, "step.7", True, [True, True, True, True]),
        (WarmUp.HEURISTIC, None, False, [True, True, True, True]),
        (WarmUp.HEURISTIC, "step.1", False, [False, True, True, True]),
        (WarmUp.HEURISTIC, None, True, [False, False, True, True]),
        (WarmUp.HEURISTIC, "step.1", True, [False, False, False, True]),
    ],
)
def test_warm_up_rules(
    rule: WarmUp, compiled: str | None, communicates: bool, expected: list[bool]
) -> None:
    found = phases(trace(compiled=compiled, communicates=communicates), rule)
    assert found.steady.to_list() == [*expected, False]  # the autotuner never counts
    assert found.phase.to_list()[-1] == "autotuning"
    assert found.statement


def test_where_everything_is_warm_up_all_of_it_counts() -> None:
    tables = trace(communicates=True)
    few = Tables(gpu=tables.gpu, programs=tables.programs.head(2), collectives=tables.collectives)
    found = phases(few, WarmUp.HEURISTIC)
    assert found.steady.to_list() == [True, True]
    assert "all are included" in found.statement


def test_modules_with_one_fingerprint_each_have_a_first_execution() -> None:
    tables = trace(compiled="step.1", communicates=True)
    same = tables.programs.with_columns(
        # As if init.2 had been compiled from the same program: one identity, two modules.
        name=pl.lit("step").cast(pl.Categorical())
    )
    found = phases(Tables(gpu=tables.gpu, host=tables.host, programs=same), WarmUp.FIRST_COMPILED)
    assert found.phase.to_list()[:2] == ["init", "steady"]


def test_a_last_execution_with_too_few_thunks_is_incomplete() -> None:
    tables = trace()
    cut = tables.gpu.filter(~pl.col("start").is_in([200, 250, 260])).vstack(
        tables.gpu.filter(pl.col("start") == 200)
    )
    # Thunks of step.1 are now 3, 2 and 0: mean 2.5, deviation 0.5, and 0 < 2.
    found = phases(Tables(gpu=cut, programs=tables.programs), WarmUp.KEEP)
    assert found.phase.to_list() == ["steady", "steady", "steady", "incomplete", "autotuning"]
    assert "1 incomplete" in found.statement


def test_programs_by_name_merge_different_identities() -> None:
    tables = trace()
    renamed = tables.programs.with_columns(
        program=pl.when(pl.col("start") == 100)
        .then(pl.lit("other"))
        .otherwise(pl.col("program").cast(pl.String))
    ).cast({"program": pl.Categorical()})
    both = Tables(gpu=tables.gpu, programs=renamed)
    assert programs(both, WarmUp.KEEP).programs.height == 3
    merged = programs(both, WarmUp.KEEP, By.NAME).programs
    assert merged.select("program", "executions").rows() == [("step", 3), ("init", 1)]


def test_a_trace_without_programs_gives_empty_results() -> None:
    result = programs(Tables())
    assert result.programs.is_empty()
    assert result.to_json()["rows"] == []
