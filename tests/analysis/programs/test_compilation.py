"""Compile time by phase, on ranges small enough to work out by hand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.analysis.programs.compilation import LIBRARY_LOADING, Autotuning, compilation
from thence.model.concat_tables import concat
from thence.model.tables import HOST, Tables

# name, start, end, thread, parent. Sorted by thread and start, as the table is.
RANGES = [
    ("XlaCompile:#module=a,program_id=1#", 0, 1000, 1, None),
    ("XlaPassPipeline:#name=p,module=a#", 100, 300, 1, 0),
    ("XlaPass:#name=q,module=a#", 150, 250, 1, 1),
    ("XlaCompileBackend:#module=a,program_id=1#", 400, 900, 1, 0),
    ("XlaEmitLlvmIr", 420, 440, 1, 3),  # before the workers begin
    ("XlaCompile:#module=b#", 2000, 2100, 1, None),
    ("XlaAutotunerCompilation:#x#", 2010, 2080, 1, 5),
    ("XlaEmitLlvmIr", 2020, 2060, 1, 6),
    # Two workers from 500 to 800: 300 ns of wall time, 400 of work.
    ("XlaOptimizeLlvmIr:#module=split_module#", 500, 800, 2, None),
    ("XlaEmitGpuAsm:#module=split_module#", 600, 700, 2, 8),
    ("XlaEmitGpuAsm:#module=split_module#", 600, 700, 3, None),
]


def host(ranges: list[tuple[str, int, int, int, int | None]], rank: int = 0) -> Tables:
    names, starts, ends, threads, parents = map(list, zip(*ranges, strict=True))
    count = len(ranges)
    return Tables(
        host=HOST.frame(
            {
                "rank": [rank] * count,
                "process": [7] * count,
                "category": ["compile"] * count,
                "name": names,
                "thread": threads,
                "parent": parents,
                "start": starts,
                "duration": [end - start for start, end in zip(starts, ends, strict=True)],
            }
        )
    )


def self_times(tables: Tables, autotuning: Autotuning = Autotuning.BLOCK) -> dict[str, float]:
    return dict(compilation(tables, autotuning).phases.select("name", "self_ns").rows())


def test_parts_add_up_to_wall_time_although_workers_run_in_parallel() -> None:
    assert self_times(host(RANGES)) == {
        LIBRARY_LOADING: 1000 - 200 - 500,
        "XlaPass": 200,  # pipelines and passes together
        "XlaCompileBackend": 500 - 20 - 300,
        "XlaEmitLlvmIr": 20,
        "XlaOptimizeLlvmIr": 300 * 200 / 400,
        "XlaEmitGpuAsm": 300 * 200 / 400,
        "XlaCompile": 100 - 70,
        "XlaAutotunerCompilation": 70,
    }
    result = compilation(host(RANGES))
    assert result.wall_ns == 1100
    assert result.phases["self_ns"].sum() == pytest.approx(1100)
    assert result.phases["share"].sum() == pytest.approx(1)


def test_autotuning_in_detail() -> None:
    times = self_times(host(RANGES), Autotuning.DETAIL)
    assert times["XlaAutotunerCompilation"] == 30
    assert times["XlaEmitLlvmIr"] == 20 + 40
    assert sum(times.values()) == pytest.approx(1100)


def test_workers_of_the_autotuner_are_part_of_the_block() -> None:
    worker = ("XlaEmitGpuAsm", 2065, 2075, 4, None)
    block = self_times(host([*RANGES, worker]))
    assert block == self_times(host(RANGES))
    detail = self_times(host([*RANGES, worker]), Autotuning.DETAIL)
    assert detail["XlaAutotunerCompilation"] == 20
    assert detail["XlaEmitGpuAsm"] == 150 + 10


def test_time_by_program() -> None:
    rows = compilation(host(RANGES)).programs.rows(named=True)
    assert rows == [
        {"rank": 0, "program": "a", "start": 0, "total_ns": 1000, "autotuning_ns": 0, "parallel_ns": 300},
        {"rank": 0, "program": "b", "start": 2000, "total_ns": 100, "autotuning_ns": 70, "parallel_ns": 0},
    ]


def test_ranks_that_share_thread_ids_are_counted_once_each() -> None:
    both = compilation(concat([host(RANGES, 0), host(RANGES, 1)]))
    one = self_times(host(RANGES))
    assert both.wall_ns == 2200
    assert dict(both.phases.select("name", "self_ns").rows()) == {n: 2 * t for n, t in one.items()}


def test_totals_contain_what_is_inside() -> None:
    totals = dict(compilation(host(RANGES)).phases.select("name", "total_ns").rows())
    assert totals["XlaPass"] == 200 + 100
    assert totals["XlaCompileBackend"] == 500
    assert totals["XlaOptimizeLlvmIr"] == 300 * 300 / 400


def test_a_trace_without_compilation() -> None:
    result = compilation(Tables())
    assert result.wall_ns == 0
    assert result.phases.is_empty()
    assert json.loads(json.dumps(result.to_json()))["rows"] == []


def test_json_has_the_agreed_keys() -> None:
    rows = json.loads(json.dumps(compilation(host(RANGES)).to_json()))["rows"]
    assert {"name", "self_ns", "share", "total_ns"} <= set(rows[0])


WORKERS = st.lists(st.tuples(st.integers(410, 880), st.integers(1, 100), st.integers(2, 5)), min_size=0, max_size=8)


@settings(max_examples=examples(50), deadline=None)
@given(WORKERS)
def test_parts_always_add_up(workers: list[tuple[int, int, int]]) -> None:
    main = RANGES[:8]
    rows = [("XlaEmitGpuAsm", start, min(start + length, 899), thread, None) for start, length, thread in workers]
    for way in Autotuning:
        result = compilation(host([*main, *rows]), way)
        assert result.phases["self_ns"].sum() == pytest.approx(result.wall_ns)
        assert (result.phases["self_ns"] >= 0).all()


def test_ranks_are_apart_although_the_phases_are_added() -> None:
    """Rank 1 compiles the second program of rank 0 alone: 100 ns, of which 70 autotuning."""
    alone = [(name, start, end, 1, None if parent is None else parent - 5)
             for name, start, end, _, parent in RANGES[5:7]]  # fmt: skip
    times = compilation(concat([host(RANGES), host(alone, rank=1)]))
    assert times.ranks.rows() == [(0, 1100), (1, 100)]
    by_phase = {row["name"]: row for row in times.phases.to_dicts()}
    tuning = by_phase["XlaAutotunerCompilation"]
    assert (tuning["self_ns"], tuning["self_ns_min"], tuning["self_ns_max"]) == (140, 70, 70)
    backend = by_phase["XlaCompileBackend"]
    assert (backend["self_ns_min"], backend["self_ns_max"]) == (0, 500 - 20 - 300)
    loading = by_phase[LIBRARY_LOADING]
    assert (loading["self_ns_min"], loading["self_ns_max"]) == (30, 1000 - 200 - 500)


def test_the_longest_phases_that_cover_a_share() -> None:
    """Of 1,100 ns: library loading 300, XlaPass 200, XlaCompileBackend 180 and others."""
    times = compilation(host(RANGES))
    assert [times.covering(share) for share in (0.0, 0.27, 0.28, 0.45, 0.46)] == [1, 1, 2, 2, 3]
    assert times.covering(1.0) == times.phases.height
    assert compilation(host(RANGES[:0] or [("XlaPass", 0, 0, 1, None)])).covering(0.99) == 0
