"""What may not be compared is refused, each for its own reason."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import thence
from diff_runs import CONDITIONS, GPU, STEP, simulated, trace_file
from thence.analysis.diff.comparability import not_checked, refusals

if TYPE_CHECKING:
    from pathlib import Path

    from thence.analysis.diff.sample import Sample


def made(**conditions: Any) -> Sample:
    return simulated(np.random.default_rng(1), {"x": 1e6}, identity=(str(conditions),), **conditions)


def codes(*runs: Sample) -> list[str]:
    return [refusal.code for refusal in refusals(runs[:1], runs[1:])]


DIFFERENT = {
    "gpu": {"gpus": ("NVIDIA H200",)},
    "clocks": {"clocks": {"gpu_clock_mhz": "1200"}},
    "world_size": {"world_size": 8},
    "format": {"formats": ("Nsight",)},
    "profiler_options": {"options": {"with_stack": "1"}},
    "unsound": {"unsound": "this trace is not sound: kernels are missing"},
}


@pytest.mark.parametrize("code", DIFFERENT)
def test_each_condition_is_refused_by_its_name(code: str) -> None:
    same = {"clocks": {"gpu_clock_mhz": "1980"}, "world_size": 4}
    assert codes(made(**same), made(**same)) == []
    assert codes(made(**same), made(**(same | DIFFERENT[code]))) == [code]


def test_a_run_of_the_same_side_counts_too() -> None:
    other = made(gpus=("NVIDIA A100",))
    assert [r.code for r in refusals([made(), other], [made()])] == ["gpu"]


def test_what_only_one_side_says_is_no_difference() -> None:
    assert codes(made(gpus=()), made()) == []
    assert codes(made(world_size=4), made()) == []
    assert [entry.code for entry in not_checked([made(gpus=())], [made()])][:2] == ["gpu", "clocks"]


def test_options_that_are_off_need_not_be_said() -> None:
    assert codes(made(options={"with_stack": "0"}), made()) == []


def test_one_recording_is_one_run() -> None:
    one = made()
    assert [r.code for r in refusals([one, one], [made(world_size=2)])] == ["duplicate"]
    assert codes(one, one) == []  # against itself: nothing differs


def sample(folder: Path, name: str, grid: int, seed: int, **metadata: Any) -> Sample:
    work = [replace(part, grid=(grid, 1, 1), us=part.us * grid / 8) for part in STEP]
    return thence.open(trace_file(folder / name, seed, work, steps=4, **metadata)).sample()


def test_inputs_of_other_shapes_are_seen_in_the_grids(tmp_path: Path) -> None:
    small, again, large = (sample(tmp_path, f"{n}.json", g, n) for n, g in enumerate((8, 8, 16)))
    assert codes(small, again) == []
    assert codes(small, large) == ["shapes"]


def test_one_changed_kernel_is_no_other_shape(tmp_path: Path) -> None:
    work = [replace(part, grid=(9, 1, 1)) if part.op == "aten::add_" else part for part in STEP]
    runs = [thence.open(trace_file(tmp_path / f"{n}.json", n, w, steps=4)).sample() for n, w in enumerate((STEP, work))]
    assert codes(*runs) == []


def test_facts_are_those_of_the_file(tmp_path: Path) -> None:
    other = {**GPU, "name": "NVIDIA A100"}
    runs = [
        sample(tmp_path, "a.json", 8, 1, with_stack=1, distributedInfo={"world_size": 4, "rank": 0}),
        sample(tmp_path, "b.json", 8, 2, deviceProperties=[other], distributedInfo={"world_size": 8, "rank": 0}),
    ]
    assert codes(*runs) == ["gpu", "world_size", "profiler_options"]


@pytest.mark.parametrize("size", ["²", "9" * 5000, "-1", 1 << 62])
def test_a_size_of_the_job_that_is_no_number_is_unknown(tmp_path: Path, size: object) -> None:
    run = sample(tmp_path, "a.json", 8, 1, distributedInfo={"world_size": size, "rank": 0})
    assert run.conditions.world_size is None


def test_one_factor_for_all_kernels_hints_at_the_clock(tmp_path: Path) -> None:
    work = [replace(p, kernel=f"{p.kernel}_{n}", us=p.us / 4) for n in range(3) for p in STEP]
    slow = [replace(part, us=part.us * 1.15) for part in work]
    runs = [
        thence.open(trace_file(tmp_path / f"{n}.json", n, w, steps=4, between=0.0005)).sample()
        for n, w in enumerate((work, slow))
    ]
    clocks = next(entry for entry in not_checked(runs[:1], runs[1:]) if entry.code == "clocks")
    assert "times as long" in clocks.text
    assert "1.1" in clocks.text
    assert CONDITIONS.clocks == {}
