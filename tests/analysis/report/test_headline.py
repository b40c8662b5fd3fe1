"""The headline: the typical step first, the rest of the recording in parts, equal in every form of the answer."""

from __future__ import annotations

import json
import re
import statistics
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import DATA, FSDP, STACK, event, kernel, launch, opened, recording, run_thence, shared, unzipped
from stores import kept
from thence.analysis.idle.causes import idle_causes
from thence.analysis.report import headline
from thence.analysis.report.headline import around, sampled_idle
from thence.analysis.selection.select import in_time
from thence.analysis.self_check import checked_references
from thence.analysis.steps.windows import steps
from thence.model import thresholds

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("read_once")

FRONT = (*("verdict", "steps", "no_steps", "plain_step_ns", "no_plain_step"), *("start_up_ns", "run", "late_ranks"))
NSIGHT = DATA / "nsight"


def document(*paths: Path) -> dict[str, Any]:
    """``report --format json``."""
    found: dict[str, Any] = json.loads(run_thence("report", *paths, "--format", "json").stdout)
    return found


def test_a_step_whose_first_kernel_comes_late_was_idle_until_then(tmp_path: Path) -> None:
    """From first to last kernel the GPU was busy for 99 %; of the step it idled for 58.6 %."""
    events = [
        event("user_annotation", "ProfilerStep#3", 0, 1000),
        *(launch(1, 570), kernel(1, 580, 210)),
        *(launch(2, 571), kernel(2, 794, 204)),
    ]
    trace = opened(tmp_path, events)
    summary = trace.report()
    assert summary.busy_ns / summary.span_ns == pytest.approx(0.99, abs=0.001)
    steps = trace.headline.steps
    assert steps is not None
    assert (steps.count, steps.median_ns) == (1, 1_000_000)
    assert steps.idle_share == pytest.approx(0.586)
    assert trace.headline.verdict.code != "gpu_bound"
    assert document(tmp_path / "trace.json")["steps"]["idle_share"] == pytest.approx(0.586)


def loop(count: int, *, start_up: int = 5000, gap: int = 10) -> list[dict[str, Any]]:
    """Start-up with compilation and one kernel, then steps of 100 us with 90 us of work, and a checkpoint after."""
    events = [
        event("cpu_op", "loading", 0, 100),
        event("cpu_op", "dynamo_timed", 200, 4000),
        *(launch(900, 4500), kernel(900, 4510, 50)),
    ]
    for i in range(count):
        at = start_up + 100 * i
        events += [
            event("user_annotation", f"ProfilerStep#{i}", at, 100),
            *(launch(1 + i, at + 2), kernel(1 + i, at + gap, 90)),
        ]
    after = start_up + 100 * count
    saved = event("cpu_op", "save", after, 700)
    return [*events, saved, launch(901, after + 1), kernel(901, after + 5, 20)]


def test_what_came_before_and_after_the_steps_are_parts_with_their_own_time(tmp_path: Path) -> None:
    trace = opened(tmp_path, loop(28))
    found = trace.headline
    assert found.steps is not None
    assert (found.steps.count, found.steps.typical, found.steps.left_out) == (28, 27, {"first": 1})
    assert found.steps.median_ns == 100_000
    assert found.steps.busy_share == pytest.approx(0.9)
    parts = {part.part: part for part in found.run}
    assert {name: part.ns for name, part in parts.items()} == {
        "start_up": 5_000_000, "first": 100_000, "steps": 2_700_000, "between": 0, "after": 700_000,
    }  # fmt: skip
    assert found.start_up_ns == 5_000_000
    assert parts["start_up"].busy_ns == 50_000
    assert parts["after"].busy_ns == 20_000
    assert parts["steps"].busy_ns == 27 * 90_000
    assert "start-up 5.000 ms" in found.rest


def test_parts_of_a_run_add_up_to_its_recorded_time() -> None:
    for paths in ((recording("torch_eager_rank0"),), (NSIGHT / "jax_train.sqlite.gz",), (STACK,)):
        trace = shared(*paths)
        frames = (trace.tables.gpu, trace.tables.host.filter(pl.col("category") != "overhead"))
        begin = min(int(frame["start"].min()) for frame in frames)  # type: ignore[arg-type]
        ends = [(frame["start"] + frame["duration"]).max() for frame in frames]
        assert sum(part.ns for part in trace.headline.run) == max(map(int, ends)) - begin  # type: ignore[arg-type]


def test_start_up_begins_with_the_processes_of_the_ranks_and_not_with_the_profiler() -> None:
    """By SQL: the ranks' first calls, at 7.806 and 8.688 s, are 6.166 and 5.286 s before their steps.

    torchrun's process has a call at 4.338 s, and Nsight lists its own work from 0.013 s on.
    """
    found = shared(NSIGHT / "torch_ddp.sqlite.gz").headline.start_up_ns
    assert found == pytest.approx((6_166_014_121 + 5_285_956_944) / 2, abs=5e5)


def test_figures_are_medians_so_that_a_long_step_changes_no_verdict(tmp_path: Path) -> None:
    """Six of seven steps are busy for 90 %; one waits for ten times as long."""
    events = loop(7)
    pause = next(e for e in events if e["name"] == "ProfilerStep#4")
    at = pause["ts"]
    for e in events:
        if e["ts"] > at:
            e["ts"] += 1000
    pause["dur"] += 1000
    trace = opened(tmp_path, events)
    steps = trace.headline.steps
    assert steps is not None
    durations = trace.steps().frame["duration"].to_list()
    assert max(durations) > 10 * statistics.median(durations)
    assert steps.median_ns == statistics.median(durations[1:]) == 100_000
    assert steps.busy_share == pytest.approx(0.9)
    assert (steps.min_ns, steps.max_ns) == (min(durations[1:]), max(durations[1:]))
    assert trace.headline.verdict.code == "gpu_bound"


def test_figures_of_a_real_trace_are_those_counted_in_its_json() -> None:
    """Its GPU waits for its host, so its steps are those of the host, and each kernel runs in its step."""
    events = json.loads(unzipped(recording("torch_eager_rank0")))["traceEvents"]
    marks = [e for e in events if e.get("name", "").startswith("ProfilerStep")]
    ranges = sorted((e["ts"], e["dur"]) for e in marks if e["cat"] == "user_annotation")[1:]
    work = [(e["ts"], e["dur"]) for e in events if e.get("cat") in ("kernel", "gpu_memset")]
    shares = [sum(ns for start, ns in work if begin <= start < begin + length) / length for begin, length in ranges]
    steps = shared(recording("torch_eager_rank0")).headline.steps
    assert steps is not None
    assert steps.median_ns == pytest.approx(1000 * statistics.median(ns for _, ns in ranges), rel=1e-3)
    assert steps.busy_share == pytest.approx(statistics.median(shares), rel=1e-2)


@pytest.mark.parametrize(
    ("name", "count", "busy", "code"),
    [
        # Warm-up and start-up took 26.4 s of the 26.4 s, "idle >99.9 %".
        ("jax_train.sqlite.gz", 6, 0.988, "gpu_bound"),
        # Nothing annotated but ranges step_0 and step_1, "idle 98.9 %, unknown".
        ("torch_ddp.sqlite.gz", 2, 0.426, "host_bound"),
    ],
)
def test_steps_lead_where_the_recording_is_mostly_start_up(name: str, count: int, busy: float, code: str) -> None:
    found = document(NSIGHT / name)
    assert tuple(found)[: len(FRONT)] == FRONT or tuple(found)[1 : len(FRONT) + 1] == FRONT
    assert found["steps"]["count"] == count
    assert found["steps"]["busy_share"] == pytest.approx(busy, abs=0.001)
    assert found["steps"]["busy_share"] + found["steps"]["idle_share"] == 1
    assert found["verdict"]["code"] == code
    assert found["start_up_ns"] > 5e9
    shown = run_thence("report", NSIGHT / name, COLUMNS="100").stdout.decode().splitlines()
    lead = next(i for i, line in enumerate(shown) if re.search(r"steps? \(of \d+\) of ", line))
    whole = next(i for i, line in enumerate(shown) if line.startswith("whole recording"))
    assert lead < whole


def test_without_steps_the_headline_is_of_the_whole_and_says_why() -> None:
    found = document(DATA / "recording" / "two_ranks")
    assert found["steps"] is None
    assert found["start_up_ns"] is None
    assert found["no_steps"].startswith("nothing marks steps")
    assert "of the time from the first to the last GPU activity (no steps were found)" in found["verdict"]["text"]


def test_the_terminal_the_notebook_the_page_and_json_say_the_same() -> None:
    path = recording("torch_eager_rank0")
    trace = thence.open(path)
    told = document(path)
    text = trace.headline.verdict.text
    assert told["verdict"] == {"code": "launch_bound", "text": text}
    shown = " ".join(run_thence("report", path, COLUMNS="400").stdout.decode().split())
    page, notebook = trace.report_html(), trace._repr_html_()
    for form in (shown, page, notebook):
        assert text in form
    assert trace.headline.steps is not None
    assert trace.headline.steps.text in shown
    assert trace.headline.steps.text in notebook


def test_the_table_is_of_the_typical_steps_and_says_so() -> None:
    trace = thence.open(recording("torch_eager_rank0"))
    found = trace.first_screen("label")
    part = trace.select(steps="typical").report("label")
    assert found.summary.rows.equals(part.rows)
    assert found.whole is not None
    assert found.whole.sum_ns == trace.report().sum_ns > found.summary.sum_ns
    shown = run_thence("report", recording("torch_eager_rank0")).stdout.decode()
    assert "GPU time by label in 2 steps" in shown


def test_a_store_has_the_headline_of_its_files() -> None:
    store, files = document(kept(FSDP)), document(*FSDP)
    for key in ("verdict", "steps", "no_steps", "late_ranks"):
        assert store[key] == files[key]


def test_late_ranks_are_those_of_ranks_with_the_same_share(late_in_backward: Path) -> None:
    trace = thence.open(late_in_backward)
    job = trace.ranks()
    named = job.stragglers["rank"].to_list()
    assert named == [1]
    found = trace.headline
    assert found.verdict.code == "waits_for_rank"
    assert [late.rank for late in found.measured.late] == named
    assert found.late == job.statement
    told = document(late_in_backward)
    assert told["late_ranks"] == job.statement
    (share,) = re.findall(r"rank 1 GPU 1 \((.* %) of a step\)", told["late_ranks"])
    assert told["verdict"]["text"] == f"the other ranks wait for rank 1 ({share} of a step)"


def test_a_trace_that_lacks_work_gets_no_confident_idle_share(tmp_path: Path) -> None:
    """A launch of the second step has no kernel."""
    events = [e for e in loop(6) if not (e["cat"] == "kernel" and e["args"]["correlation"] == 3)]
    path = opened(tmp_path, events)
    assert path.check().work_missing
    found = document(tmp_path / "trace.json")
    assert found["verdict"]["code"] == "not_sound"
    assert found["steps"]["idle_is"] == "at most"
    shown = run_thence("report", tmp_path / "trace.json").stdout.decode()
    assert "idle at most" in shown


def test_a_selection_of_names_does_not_change_the_headline() -> None:
    trace = shared(recording("torch_eager_rank0"))
    assert trace.select(only="attention").headline == trace.headline
    steps = trace.select(steps="1:2").headline.steps
    assert steps is not None
    assert (steps.count, steps.median_ns) == (1, trace.steps().frame["duration"][1])


def test_several_ranks_count_by_the_windows_of_all() -> None:
    frame = shared(*FSDP).steps().frame.filter(pl.col("left_out").is_null())
    steps = shared(*FSDP).headline.steps
    assert steps is not None
    assert (steps.count, steps.typical, frame.height) == (2, 1, 4)
    assert steps.median_ns == statistics.median(frame["duration"])


def test_ranks_that_differ_are_stated_with_their_range_and_not_with_a_median_alone() -> None:
    found = shared(*FSDP).headline
    assert found.steps is not None
    # Busy shares of ranks 0 to 3, from the JSON: 99.8, 35.1, 99.7 and 7.2 %; of two steps the second counts.
    assert found.steps.text.startswith("1 step (of 2) of 40.64 ms: GPU busy 7.2 % to 99.8 % (4 GPUs, median 67.4 %)")
    assert found.steps.busy_spread.mean == pytest.approx((0.998 + 0.351 + 0.997 + 0.072) / 4, abs=0.001)
    assert "for 2.1 % to 93.7 % (4 GPUs, median 61.7 %) of a step the GPU communicates" in found.verdict.text
    assert found.rest.startswith("rest of the recording, mean of 4 GPUs: ")
    one = shared(recording("torch_eager_rank0")).headline
    assert "GPUs" not in "".join(one.lines)


@pytest.mark.parametrize(
    "paths",
    [(recording("torch_eager_rank0"),), (STACK,), (NSIGHT / "jax_train.sqlite.gz",), FSDP],
    ids=lambda paths: paths[0].name,
)
def test_causes_of_a_part_of_the_steps_are_those_of_the_whole_trace(paths: tuple[Path, ...]) -> None:
    """What a long trace is spared: looking at the host ranges of all other steps but the one before."""
    trace = shared(*paths).tables
    windows = steps(trace).frame.filter(rank=0)
    for row in range(1, windows.height):
        one = windows[row]
        part = in_time(trace, *around(windows, one))
        checked_references(part)
        assert part.host.height < trace.host.height
        whole, less = (
            dict(idle_causes(t, one).group_by("cause").agg(pl.col("duration").sum()).rows()) for t in (trace, part)
        )
        for cause in {*whole, *less}:
            allowed = pytest.approx(whole.get(cause, 0), abs=0.01 * one["idle_ns"][0])
            assert less.get(cause, 0) == allowed, cause


def test_the_verdict_of_a_long_trace_is_that_of_some_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = shared(STACK)
    expected = trace.headline.verdict.code
    for module in (headline, thresholds):
        monkeypatch.setattr(module, "MAX_HOST_RANGES", trace.tables.host.height - 1)
    again = thence.open(STACK)
    assert again.quick_idle.result is None
    assert again.headline.verdict.code == expected == "launch_bound"
    assert sampled_idle(again.tables, 10) is None


def test_communication_that_is_waiting_gets_the_verdict_of_the_rank_that_waits_least() -> None:
    """Waits from the JSON: from the start of a rank's kernel to that of the last rank's, in the step that counts."""
    kernels = []
    for path in FSDP:
        events = json.loads(unzipped(path))["traceEvents"]
        found = sorted((e["ts"], e["dur"]) for e in events if e.get("cat") == "kernel" and "nccl" in e["name"])
        kernels.append(found[len(found) // 2 :])
    waits = [[min(max(last - start, 0), length) for start, length in at]
             for at in zip(*kernels, strict=True) for last in [max(start for start, _ in at)]]  # fmt: skip
    share = sum(map(sum, waits)) / sum(length for of_rank in kernels for _, length in of_rank)
    of_rank = [sum(times) for times in zip(*waits, strict=True)]
    for trace in (shared(*FSDP), thence.open(kept(FSDP))):
        measured, verdict = trace.headline.measured, trace.headline.verdict
        assert measured.pace is not None
        assert measured.pace.waits == pytest.approx(share, abs=0.01)
        assert measured.pace.rank == of_rank.index(min(of_rank)) == 3
        # Rank 3 is busy for 7.2 % of the step, above; why it idles is what ``thence idle --rank 3`` says.
        assert verdict.code == "launch_bound"
        assert "on rank 3 GPU 3, which waits least, the GPU is idle for 92.8 % of a step" in verdict.text
        communication = next(f for f in trace.explain().findings if f.kind == "communication")
        assert "% of it waiting for other ranks" in communication.claim


def test_a_rank_alone_names_the_ranks_that_are_missing() -> None:
    """What looks like communication may be waits for ranks that the file does not show."""
    late = shared(FSDP[0]).headline.late
    assert "the trace shows 1 of 4 ranks; missing 1-3" in late
    assert thence.open(kept(FSDP[:1])).headline.late == late
    assert shared(recording("torch_eager_rank0")).headline.late == ""
