"""Comparisons of runs whose differences were planted, from the traces on."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest

import thence
from diff_runs import STEP, Work, changed, simulated, trace_file
from helpers import DATA, FSDP
from thence.analysis.diff.answer import Diff, compare
from thence.analysis.diff.gate import judge, parse_bound
from thence.errors import MissingData, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from thence.analysis.diff.sample import Sample


def runs(folder: Path, work: Sequence[Work], seeds: Sequence[int], **more: object) -> list[Sample]:
    return [thence.open(trace_file(folder / f"{seed}.json", seed, work, **more)).sample() for seed in seeds]  # type: ignore[arg-type]


def verdicts(diff: Diff, by: str) -> dict[str, str]:
    rows = diff.rows.filter(pl.col("by") == by)
    return dict(rows.select("name", "verdict").iter_rows())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    return runs(tmp_path_factory.mktemp("base"), STEP, range(3))


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """Runs of the same program."""
    return runs(tmp_path_factory.mktemp("again"), STEP, range(20, 23))


@pytest.fixture(scope="module")
def slower(base: list[Sample], tmp_path_factory: pytest.TempPathFactory) -> Diff:
    """60 us of 1304 more: 4.6 % of the step, 12 % of the label."""
    work = changed(STEP, "sm90_gemm_64x64_nn", us=560)
    return compare(base, runs(tmp_path_factory.mktemp("slower"), work, range(60, 63)))


def test_a_slower_label_is_found_named_and_alone(slower: Diff) -> None:
    diff = slower
    assert diff.total.verdict == "slower"
    assert verdicts(diff, "label") == {
        "forward/mlp": "slower",
        "forward/...": "slower",
        "forward/attention": verdicts(diff, "label")["forward/attention"],
        "optimizer": verdicts(diff, "label")["optimizer"],
    }
    assert {verdicts(diff, "label")[name] for name in ("forward/attention", "optimizer")} <= {"same", "unknown"}
    assert verdicts(diff, "op")["aten::addmm"] == "slower"
    assert verdicts(diff, "kernel")["sm90_gemm_64x64_nn"] == "slower"
    assert diff.explanation[0].partition(": ")[2].startswith("label forward/mlp +")
    row = diff.rows.row(by_predicate=(pl.col("by") == "label") & (pl.col("name") == "forward/mlp"), named=True)
    assert row["low_ns"] < 60e3 * 1.01
    assert row["high_ns"] > 60e3 * 0.99
    assert diff.refusals == ()


def test_figures_are_those_counted_from_the_file(tmp_path: Path) -> None:
    """Sums of kernels by step from the raw JSON, where every step launches and runs the same kernels in order."""
    path = trace_file(tmp_path / "a.json", 1, steps=6)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["cat"] == "kernel"]
    by_name = defaultdict(list)
    for event in events:
        by_name[event["name"]].append(event["dur"] * 1000)
    sample = thence.open(path).sample()
    assert sample.counted == sample.steps.height - 1 == 5
    kernels = sample.rows.filter(pl.col("by") == "kernel")
    for name, times in by_name.items():
        found = kernels.filter(pl.col("name") == name).sort("step")["ns"].to_list()
        assert found == pytest.approx(times[1:])  # one in each step; the first is left out
    whole = {
        by: sample.rows.filter(pl.col("by") == by, pl.col("name") == "all").sort("step")["ns"].to_numpy()
        for by in ("step", "busy", "idle")
    }
    assert whole["busy"] + whole["idle"] == pytest.approx(whole["step"])
    busy = np.add.reduceat([e["dur"] * 1000 for e in events], range(0, len(events), len(STEP)))
    assert whole["busy"] == pytest.approx(busy[1:])
    causes = sample.rows.filter(pl.col("by") == "idle", pl.col("name") != "all")
    assert causes["ns"].sum() == pytest.approx(whole["idle"].sum())


def test_runs_of_the_same_program_show_nothing_for_sure(base: list[Sample], again: list[Sample]) -> None:
    diff = compare(base, again)
    assert {*diff.rows["verdict"], diff.total.verdict} <= {"same", "unknown"}
    unknown = diff.rows.filter(pl.col("verdict") == "unknown")
    assert unknown["more_runs"].null_count() == 0
    assert diff.rows.filter(pl.col("verdict") == "same")["more_runs"].null_count() == diff.rows.height - unknown.height


def test_renamed_kernels_are_one_row_and_new_ones_are_new(base: list[Sample], tmp_path: Path) -> None:
    work = changed(STEP, "sm90_gemm_128x64_tn", kernel="sm90_gemm_256x128_tn")
    work = (*work, Work("optimizer", "aten::clip", "clip_kernel", 90))
    diff = compare(base, runs(tmp_path, work, [30]))
    names = verdicts(diff, "kernel")
    renamed = "sm90_gemm_128x64_tn -> sm90_gemm_256x128_tn"
    assert names[renamed] in ("same", "unknown")
    assert names["clip_kernel"] == "new"
    assert "sm90_gemm_256x128_tn" not in names
    assert diff.rows.filter(pl.col("name") == renamed)["matched"].item() == "place"
    # One that was built anew is no new kernel.
    assert diff.judged([parse_bound("new:kernel>0")])[0].new == ("clip_kernel",)


def test_time_that_moved_between_kernels_is_told(base: list[Sample], tmp_path: Path) -> None:
    work = (*STEP[:1], *(Work("forward/attention", "aten::softmax", f"part_{n}", 60) for n in "abc"), *STEP[2:])
    diff = compare(base, runs(tmp_path, work, [40]))
    (moved,) = diff.moved
    assert (moved["place"], moved["from"]) == ("forward/attention", ["flash_fwd_kernel"])
    assert sorted(moved["to"]) == ["part_a", "part_b", "part_c"]
    assert moved["before_ns"] == pytest.approx(300e3, rel=0.02)
    assert moved["after_ns"] == pytest.approx(180e3, rel=0.02)
    assert verdicts(diff, "kernel")["flash_fwd_kernel"] == "gone"


def test_idle_time_that_grew_is_the_cause(base: list[Sample], tmp_path: Path) -> None:
    work = changed(STEP, "vectorized_add", idle_us=200.0)
    diff = compare(base, runs(tmp_path, work, range(50, 53)))
    assert diff.total.verdict == "slower"
    assert diff.explanation[0].partition(": ")[2].startswith("idle ")
    assert verdicts(diff, "busy")["all"] in ("same", "unknown")


def test_one_run_a_side_says_first_what_it_does_not_know(base: list[Sample]) -> None:
    diff = compare(base[:1], base[1:2])
    assert not diff.between
    assert diff.explanation[0].startswith("one run per side: step ")
    assert "unknown, because runs of one program differ by up to 9 %" in diff.explanation[0]
    assert diff.to_json()["noise"] == "within runs"


def test_of_one_run_a_side_a_host_pause_changes_the_idle_time_alone(tmp_path: Path) -> None:
    """Kernels that differ by 0.3 % from run to run, and by a sixth of that from step to step."""
    quiet = {"steps": 40, "noise": 0.0005, "between": 0.003}
    paused = changed(STEP, "vectorized_add", idle_us=200.0)
    paths = [trace_file(tmp_path / "a.json", 1, STEP, **quiet), trace_file(tmp_path / "b.json", 2, paused, **quiet)]
    diff = compare([thence.open(paths[0]).sample()], [thence.open(paths[1]).sample()])
    told = diff.rows.filter(pl.col("verdict").is_in(["slower", "faster", "same"]))
    assert set(told["by"]) == {"idle"}
    assert verdicts(diff, "idle")["all"] == "slower"
    others = diff.rows.filter(~pl.col("by").is_in(["idle", "communication"]))
    assert set(others["verdict"]) == {"unknown"}
    # The noise within the runs alone would call most of them different.
    assert (others["p"] < 0.001).sum() > others.height / 2
    # 200 us of 1.5 ms are more than the 9 % by which the steps of two runs may differ.
    assert diff.total.verdict == "slower"
    assert "more than the 9 % by which runs of one program differ" in diff.explanation[0]
    assert ": idle " in diff.explanation[0]


@pytest.mark.parametrize(("factor", "verdict"), [(1.12, "unknown"), (1.2, "slower"), (0.8, "faster")])
def test_of_one_run_a_side_a_kernel_must_change_by_more_than_runs_differ(
    tmp_path: Path, factor: float, verdict: str
) -> None:
    """With several runs a side (`slower`) the noise is measured, so that 1.12 is told."""
    kernel = "sm90_gemm_64x64_nn"
    work = changed(STEP, kernel, us=500 * factor)
    samples = [
        thence.open(trace_file(tmp_path / f"{n}.json", n, w, steps=20, noise=0.0005, between=0)).sample()
        for n, w in enumerate((STEP, work))
    ]
    assert verdicts(compare(samples[:1], samples[1:]), "kernel")[kernel] == verdict


def test_versions_that_differ_are_a_note() -> None:
    generator = np.random.default_rng(3)
    one, other = {"torch": "2.10.0", "nccl_version": "2.28.9"}, {"torch": "2.11.0"}
    before, after = (
        [simulated(generator, {"x": 1e6}, versions=versions) for _ in range(2)] for versions in (one, other)
    )
    assert "versions differ: torch 2.10.0 before and 2.11.0 after" in compare(before, after).notes
    assert not compare(before, after).refusals
    assert not any("versions" in note for note in compare(before[:1], before[1:]).notes)


def test_versions_are_those_of_the_recording() -> None:
    """facts of the recording: meta.json of rank 0 says torch 2.11.0+cu130, driver_cuda 13.0."""
    sample = thence.open(DATA / "recording" / "two_ranks").sample()
    versions = sample.conditions.versions
    assert versions["torch"] == "2.11.0+cu130"
    assert versions["driver_cuda"] == "13.0"


def test_a_side_with_one_run_has_the_noise_of_the_other() -> None:
    generator = np.random.default_rng(9)
    before = [simulated(generator, {"x": 1e6}, between=0.02) for _ in range(6)]
    (row,) = compare(before, [simulated(generator, {"x": 1.2e6})]).rows.filter(pl.col("by") == "label").rows(named=True)
    assert row["verdict"] == "slower"
    assert row["high_ns"] - row["low_ns"] > 2e4


def test_ranks_are_averaged_and_communication_is_a_row() -> None:
    trace = thence.open([str(path) for path in FSDP])
    diff = trace.diff(trace)
    exposed = diff.rows.filter(pl.col("by") == "communication").row(0, named=True)
    assert 0 < exposed["before_ns"] < diff.total.before_ns
    busy = diff.rows.filter(pl.col("by") == "busy")["before_ns"].item()
    assert 0 < busy < diff.total.before_ns


def test_a_comparison_needs_two_sides(base: list[Sample]) -> None:
    with pytest.raises(UsageError, match="at least one run"):
        compare(base, [])


# ---- Gates


@pytest.mark.parametrize("window", [{"steps": "0:1"}, {"window": ":50us"}])
def test_a_part_in_which_no_step_counts_is_refused_with_the_reason(window: dict[str, str]) -> None:
    part = thence.open(DATA / "torch/graph_replay_rank0.json.gz").select(**window)
    with pytest.raises(MissingData, match=r"no step of the selected part counts.*the first: rec"):
        part.sample()


def gate(diff: Diff, text: str) -> str:
    return diff.judged([parse_bound(text)])[0].verdict


def test_gates_fail_for_sure_only_beyond_the_whole_interval(slower: Diff) -> None:
    diff = slower
    assert gate(diff, "total>3%") == "exceeded"
    assert gate(diff, "total>7%") == "within"
    assert gate(diff, "label:forward/mlp>10%") == "exceeded"
    assert gate(diff, "label:forward>60us") == "may be exceeded"
    assert gate(diff, "label:forward>30us") == "exceeded"  # with all below it: forward has no kernel of its own
    assert gate(diff, "label:optimizer > 0.1 ms") == "within"
    assert gate(diff, "idle>1ms") == "within"
    maybe = judge(diff.means, *diff.sides, [parse_bound("label:forward>60us")])[0]
    assert maybe.fails(strict=True)
    assert not maybe.fails(strict=False)
    with pytest.raises(MissingData, match="there is forward/attention"):
        gate(diff, "label:forward/att>1%")


def test_a_strict_gate_passes_what_became_faster(base: list[Sample], again: list[Sample], tmp_path: Path) -> None:
    """40 us of 1304 less, one of the runs after as slow as before: the interval reaches above 0, the step does not."""
    faster = changed(STEP, "sm90_gemm_64x64_nn", us=460)
    diff = compare(base, [*runs(tmp_path, faster, range(70, 72)), again[0]])
    step, other = judge(diff.means, *diff.sides, [parse_bound("step>0%"), parse_bound("busy>0%")])
    assert step.after_ns < step.before_ns
    assert [step.verdict, other.verdict] == ["may be exceeded"] * 2
    assert not step.fails(strict=True)
    back = judge(diff.means, *reversed(diff.sides), [parse_bound("step>0%")])[0]
    assert back.fails(strict=True)


def test_gates_judge_kernels_that_no_run_before_has(base: list[Sample], tmp_path: Path) -> None:
    """Two kernels of 30 and 10 us: 40 of 1344 us are 2.98 % of that step, and 3.07 % of the 1304 us before."""
    work = (*STEP, Work("optimizer", "aten::add_", "fallback", 30, idle_us=0.5),
            Work("optimizer", "aten::add_", "second", 10, idle_us=0.5))  # fmt: skip
    diff = compare(base, runs(tmp_path, work, [73]))
    verdicts = {text: gate(diff, f"new:kernel>{text}") for text in ("0", "0 ns", "2.9%", "3.3%", "38us", "42us")}
    assert verdicts == {
        "0": "exceeded", "0 ns": "exceeded", "2.9%": "exceeded", "3.3%": "within", "38us": "exceeded", "42us": "within",
    }  # fmt: skip
    found = diff.judged([parse_bound("new:kernel>0")])[0]
    assert found.new == ("fallback", "second")
    assert found.after_ns == pytest.approx(40e3, rel=0.01)
    assert "(fallback, second)" in str(found)
    assert gate(diff, "new:label>0") == "within"
    gone = judge(diff.means, *reversed(diff.sides), [parse_bound("new:kernel>0")])[0]
    assert (gone.verdict, gone.new) == ("within", ())
    with pytest.raises(MissingData, match="neither side has rows by hlo"):
        gate(diff, "new:hlo>0")


def test_a_kernel_in_the_place_of_another_one_is_new(base: list[Sample], tmp_path: Path) -> None:
    """Both are one row of the comparison, of which the time changes little."""
    work = changed(STEP, "flash_fwd_kernel", kernel="math_attention_kernel")
    found = compare(base, runs(tmp_path, work, [80])).judged([parse_bound("new:kernel>0"), parse_bound("step>5%")])
    assert [one.verdict for one in found] == ["exceeded", "within"]
    assert found[0].new == ("math_attention_kernel",)
    assert found[0].after_ns == pytest.approx(300e3, rel=0.01)


@pytest.mark.parametrize(
    "text",
    ["total", "total>5", "total<5%", "label>5%", "speed>5%", "total>-1%", ">5%", "busy:x>1%", "new>0", "new:thing>0"],
)
def test_bounds_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--fail-on"):
        parse_bound(text)


def test_a_relative_bound_counts_the_noise_of_before() -> None:
    """With noise on the side before alone, 10 % above a noisy mean is as uncertain as 1.1 times that mean."""
    generator = np.random.default_rng(7)
    sides = (
        [simulated(generator, {"x": 1e6}, between=0.03) for _ in range(5)],
        [simulated(generator, {"x": 1.1e6}, between=0.0, within=1e-4) for _ in range(5)],
    )
    diff = compare(*sides)
    (judged,) = judge(diff.means, *diff.sides, [parse_bound("label:x>10%")])
    row = diff.rows.filter(pl.col("name") == "x").row(0, named=True)
    assert judged.low_ns is not None
    assert judged.high_ns is not None
    assert judged.high_ns - judged.low_ns == pytest.approx(1.1 * (row["high_ns"] - row["low_ns"]), rel=1e-3)
