"""Programs and warm-up on a trace small enough to work out by hand."""

from __future__ import annotations

import dataclasses
import json

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from programs_data import trace
from thence.analysis.programs.answer import By, programs
from thence.analysis.programs.warmup import WarmUp, phases
from thence.model.tables import GPU, PROGRAMS, Tables


def test_time_and_idle_of_every_program() -> None:
    result = programs(trace(), WarmUp.KEEP)
    step, init = result.programs.rows(named=True)
    assert step == {
        "program": "step.1",
        "name": "step",
        "executions": 3,
        "span_ns_total": 120,
        "span_ns_mean": 40.0,
        "span_ns_std": pytest.approx((200 / 3) ** 0.5),  # of 50, 30, 40: population
        "busy_ns_total": 40 + 20 + 40,
        "thunks_mean": pytest.approx(7 / 3),
        "thunks_std": pytest.approx((2 / 9) ** 0.5),
        "thunk_ns": 50 + 20 + 50,
        "idle_inside_ns": 20,
        "idle_between_ns": 30 + 20,
        "launch_latency_ns_mean": 5.0,
        "launch_latency_ns_max": 10,
        "share": 120 / 130,
    }
    assert (init["share"], result.large) == (10 / 130, 2)
    assert (init["span_ns_total"], init["idle_between_ns"]) == (10, 10)
    assert result.devices.rows(named=True) == [
        {
            "rank": 0,
            "device": 0,
            "executions": 4,
            "span_ns": 130,
            "busy_ns": 110,
            "idle_inside_ns": 20,
            "idle_between_ns": 60,
            "wall_ns": 190,
        }
    ]


@pytest.mark.parametrize(("spans", "large"), [([990, 10], 2), ([991, 9], 1), ([500, 3, 497], 2), ([1] * 200, 1)])
def test_programs_of_one_percent_have_a_row_of_their_own(spans: list[int], large: int) -> None:
    count = len(spans)
    table = PROGRAMS.frame(
        {
            "rank": [0] * count,
            "device": [0] * count,
            "name": [f"p{number}" for number in range(count)],
            "program": [f"p{number}.{number}" for number in range(count)],
            "start": [1000 * number for number in range(count)],
            "duration": spans,
        }
    )
    found = programs(Tables(programs=table), WarmUp.KEEP)
    assert found.large == large
    assert found.programs["share"].sum() == pytest.approx(1)


def test_json_has_the_agreed_keys() -> None:
    row = json.loads(json.dumps(programs(trace(), WarmUp.KEEP).to_json()))["rows"][0]
    keys = "program executions gpu_ms_total gpu_ms_mean gpu_ms_std thunks_mean thunks_std"
    newer = "span_ms_total span_ms_mean span_ms_std busy_ms_total idle_inside_ms idle_between_ms"
    assert {*keys.split(), *newer.split()} <= set(row)
    assert row["gpu_ms_total"] == row["span_ms_total"] == pytest.approx(120e-6)
    assert row["busy_ms_total"] == pytest.approx(100e-6)
    assert row["idle_inside_ms"] == pytest.approx(20e-6) == row["idle_inside_ns"] / 1e6
    assert row["idle_between_ms"] == pytest.approx(50e-6) == row["idle_between_ns"] / 1e6
    assert row["launch_latency_ms_max"] == pytest.approx(10e-6)
    assert (row["program"], row["identity"]) == ("step", "step.1")
    assert row["executions"] == 3


def test_between_is_the_gap_less_what_else_the_device_did_in_it() -> None:
    tables = trace()
    other = {"rank": [0] * 3, "device": [0, 0, 1], "kind": ["memcpy"] * 3, "name": ["c"] * 3}
    copies = GPU.frame({**other, "start": [175, 180, 172], "duration": [10, 8, 20]})
    both = dataclasses.replace(tables, gpu=tables.gpu.vstack(copies))
    step, init = programs(both, WarmUp.KEEP).programs.rows(named=True)
    assert init["idle_between_ns"] == 10
    assert step["idle_between_ns"] == (30 - 13) + 20  # 175 to 188; the copy of device 1 is not here


def test_executions_that_are_left_out_still_end_the_gap() -> None:
    left = programs(trace(compiled="step.1"), WarmUp.FIRST_COMPILED)
    step, init = left.programs.rows(named=True)
    assert (step["executions"], step["idle_between_ns"]) == (2, 30 + 20)
    assert init["idle_between_ns"] == 10  # since the execution of step that is left out
    tables = trace()
    # Now the autotuner runs from 172 to 182, between init and step.
    trial = pl.col("program").is_null()
    moved = tables.programs.with_columns(
        start=pl.when(trial).then(172).otherwise("start"), duration=pl.when(trial).then(10).otherwise("duration")
    )
    trying = dataclasses.replace(tables, programs=moved, gpu=tables.gpu.filter(pl.col("start") < 400))
    step, _ = programs(trying, WarmUp.KEEP).programs.rows(named=True)
    assert step["idle_between_ns"] == (200 - 182) + 20


@given(
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 12)), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 9)), max_size=12),
)
def test_idle_before_by_brute_force(executions: list[tuple[int, int]], work: list[tuple[int, int]]) -> None:
    executions = sorted(executions, key=lambda each: each[0])
    table = PROGRAMS.frame(
        {
            "rank": [0] * len(executions),
            "device": [0] * len(executions),
            "name": ["p"] * len(executions),
            "program": ["p.1"] * len(executions),
            "start": [at for at, _ in executions],
            "duration": [length for _, length in executions],
        }
    )
    gpu = GPU.frame(
        {
            "rank": [0] * len(work),
            "device": [0] * len(work),
            "kind": ["kernel"] * len(work),
            "name": ["k"] * len(work),
            "start": [at for at, _ in work],
            "duration": [length for _, length in work],
        }
    )
    found = programs(Tables(gpu=gpu, programs=table), WarmUp.KEEP).executions["idle_before_ns"]
    busy = {ns for at, length in work for ns in range(at, at + length)}
    expected: list[int | None] = [None]
    for number in range(1, len(executions)):
        before = max(at + length for at, length in executions[:number])
        expected.append(len(set(range(before, executions[number][0])) - busy))
    assert found.to_list() == expected


def test_a_program_that_ran_once_is_never_hidden_as_warm_up() -> None:
    result = programs(trace(communicates=True), WarmUp.HEURISTIC)
    assert dict(result.programs.select("name", "executions").iter_rows()) == {"step": 2, "init": 1}
    assert "1 execution of programs without a steady-state execution is included" in result.phases.counted_statement
    both = programs(trace(compiled="step.1", communicates=True), WarmUp.HEURISTIC)
    assert dict(both.programs.select("name", "executions").iter_rows()) == {"step": 1, "init": 1}
    assert both.phases.steady.sum() == 1  # measurements of speed still leave it out
    assert "left out: 1 warm-up execution, 50 ns (step 50 ns)" in result.phases.statement
    assert result.phases.statement.endswith("1 execution of programs without a steady-state execution")
    assert result.to_json()["statement"] == result.phases.counted_statement


def test_what_is_left_out_is_named_with_its_count_and_time() -> None:
    result = programs(trace(compiled="step.1", communicates=True), WarmUp.HEURISTIC)
    assert result.phases.left_out.rows() == [("init", "step", 2, 50 + 30), ("autotuning", "gemm", 1, 10)]
    assert "2 warm-up executions, 80 ns (step 80 ns)" in result.phases.statement
    assert "1 autotuning execution, 10 ns (gemm 10 ns)" in result.phases.statement
    left_out = result.to_json()["left_out"]
    assert [row["span_ms_total"] for row in left_out] == pytest.approx([80e-6, 10e-6])


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
def test_warm_up_rules(rule: WarmUp, compiled: str | None, communicates: bool, expected: list[bool]) -> None:
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
    cut = tables.gpu.filter(~pl.col("start").is_in([200, 250, 260])).vstack(tables.gpu.filter(pl.col("start") == 200))
    # Thunks of step.1 are now 3, 2 and 0: mean 2.5, deviation 0.5, and 0 < 2.
    found = phases(Tables(gpu=cut, programs=tables.programs), WarmUp.KEEP)
    assert found.phase.to_list() == ["steady", "steady", "steady", "incomplete", "autotuning"]
    assert "1 incomplete" in found.statement


def test_programs_by_name_merge_different_identities() -> None:
    tables = trace()
    renamed = tables.programs.with_columns(
        program=pl.when(pl.col("start") == 100).then(pl.lit("other")).otherwise(pl.col("program").cast(pl.String))
    ).cast({"program": pl.Categorical()})
    both = Tables(gpu=tables.gpu, programs=renamed)
    assert programs(both, WarmUp.KEEP).programs.height == 3
    merged = programs(both, WarmUp.KEEP, By.NAME).programs
    assert merged.select("program", "executions").rows() == [("step", 3), ("init", 1)]


def test_a_trace_without_programs_gives_empty_results() -> None:
    result = programs(Tables())
    assert result.programs.is_empty()
    assert result.to_json()["rows"] == []
