"""The first answers about a trace, against the analyses that answer each question alone, and its files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import polars as pl
import pytest

import thence
from helpers import DATA, FSDP, event, kernel, launch, opened, recording, shared
from slow_kineto import SlowTrace
from thence.analysis.grouping.time_by_place import default_kind
from thence.analysis.soundness.findings import Finding, Soundness
from thence.model.places import BY, FLAME_KINDS, FLAMES, TABLE_KINDS, By, FlameBy
from thence.trace import Trace

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def eager() -> thence.Trace:
    return shared(recording("torch_eager_rank0"))


@pytest.fixture(scope="module")
def ranks() -> thence.Trace:
    return shared(*FSDP)


def test_types_of_by_are_the_kinds() -> None:
    assert get_args(By) == BY
    assert set(get_args(FlameBy)) == set(FLAMES)
    assert set(TABLE_KINDS) <= set(BY)
    assert set(FLAME_KINDS) <= set(FLAMES)


def test_causes_and_phases_add_up(eager: thence.Trace) -> None:
    found, slow = eager.first_screen(), SlowTrace(recording("torch_eager_rank0"))
    assert found.whole is not None
    assert (found.whole.span_ns, found.whole.busy_ns) == (slow.span_ns, slow.busy_ns)
    assert found.idle.result is not None
    typical = eager.steps().frame.filter(pl.col("left_out").is_null())
    assert found.idle.result.causes["total_ns"].sum() == typical["idle_ns"].sum()
    assert found.phases["total_ns"].sum() == found.summary.sum_ns < slow.sum_ns
    assert found.communication_ns == found.exposed_ns == 0
    timed = eager.select(window="0ns:").first_screen()  # no steps are chosen for a selected time
    assert timed.idle.result is not None
    assert timed.idle.result.causes["total_ns"].sum() == slow.span_ns - slow.busy_ns
    assert timed.phases["total_ns"].sum() == slow.sum_ns


def test_shares_of_phases_say_that_they_hold_what_the_table_keeps_apart() -> None:
    trace = shared(DATA / "jax" / "recording")
    found = trace.select(window="0ns:").first_screen("phase")
    assert trace.first_screen("phase").summary.separate.is_empty()  # typical steps hold none of it
    codes = set(found.summary.separate["code"])
    assert codes == {"warm_up", "autotuning"}
    ((_, phases),) = [answer for answer in found.answers if answer[0] == "phases"]
    assert phases[-1] == "warm-up and autotuning included"
    ((_, kept),) = [
        a for a in trace.select(warm_up="keep", window="0ns:").first_screen("phase").answers if a[0] == "phases"
    ]
    assert kept == phases[:-1]


def test_warm_up_that_is_kept_leaves_no_work_out() -> None:
    trace = shared(DATA / "jax" / "recording")
    assert trace.select(warm_up="keep").first_screen().idle.result is not None
    assert trace.select(warm_up="heuristic").first_screen().idle.result is None


def test_communication_is_that_of_the_streams(ranks: thence.Trace) -> None:
    part = ranks.select(steps="typical")
    found, devices = ranks.first_screen(), part.streams().concurrency
    assert found.communication_ns == sum(device.communication_ns for device in devices) > 0
    assert found.exposed_ns == sum(d.communication_ns - d.hidden_ns for d in devices)
    assert [step.verb for step in found.next_steps] == ["idle", "ranks", "collectives"]


def test_a_part_without_work_in_between_says_nothing_of_idle_time(eager: thence.Trace) -> None:
    found = eager.select(only="gemm|nvjet").first_screen()
    assert found.idle.result is None
    assert "other work ran between" in found.summary.idle_unknown
    assert "idle because of" not in dict(found.answers)


@pytest.mark.parametrize(
    ("path", "verb", "by"),
    [
        (recording("torch_eager_rank0"), "idle", "label"),
        (recording("torch-2.12_graph_replay_rank0"), "flame", "kernel"),
        (DATA / "jax" / "jax_single_nocb.xplane.pb.gz", "idle", "source"),
    ],
    ids=["idle", "graphs", "jax"],
)
def test_the_next_question_and_the_rows_fit_the_trace(path: Path, verb: str, by: str) -> None:
    found = thence.open(path).first_screen()
    assert found.next_step.verb == verb
    assert found.summary.by == by


def test_what_makes_a_trace_unsound_comes_first(eager: thence.Trace) -> None:
    finding = Finding("launch_without_work", 0, 0, 3, 0, 0.0, "3 launches have no device work")
    wrong = Trace(eager.recorded)
    vars(wrong)["_soundness"] = Soundness((finding,))
    vars(wrong)["typical"] = wrong
    found = wrong.first_screen()
    assert found.headline.verdict.code == "not_sound"
    assert found.next_step.verb == "check"
    assert ("sound", ["no: 1 finding (thence check)"]) in found.answers
    assert eager.first_screen().next_step.verb == "idle"


def places(tmp_path: Path, modules: int, labels: int) -> Any:
    """100 kernels, so many of them in modules of two names and in two labels."""
    ranges = [
        *(event("python_function", f"nn.Module: Block_{i % 2}", 100 * i, 50, tid=2) for i in range(modules)),
        *(event("user_annotation", f"part{i % 2}", 100 * i - 10, 80, tid=2) for i in range(labels)),
    ]  # fmt: skip
    work = [e for i in range(100) for e in (launch(i + 1, 100 * i + 10), kernel(i + 1, 100 * i + 60, 5))]
    return opened(tmp_path, [*ranges, *work]).tables


@pytest.mark.parametrize(
    ("modules", "labels", "kind"),
    [(80, 100, "module"), (40, 100, "label"), (50, 30, "module"), (0, 0, "kernel"), (0, 1, "kernel")],
)
def test_the_first_kind_that_covers_two_thirds_is_chosen_else_the_best(
    tmp_path: Path, modules: int, labels: int, kind: str
) -> None:
    attributed = places(tmp_path, modules, labels)
    covered = {
        name: attributed.gpu["duration"].filter(attributed.places[name].is_not_null()).sum() / 500_000
        for name in ("module", "label")
    }
    assert covered == pytest.approx({"module": modules / 100, "label": labels / 100})
    assert default_kind(attributed, TABLE_KINDS, "kernel") == kind


def test_a_kind_that_is_asked_for_is_kept(eager: thence.Trace) -> None:
    assert eager.first_screen("op").summary.by == "op"
    assert eager.first_screen("op").summary.rows.equals(eager.typical.report("op").rows)


def test_json_of_a_report_is_by_kernel_whatever_says_most(eager: thence.Trace) -> None:
    assert eager.default_kind == "label"
    assert eager.report().by == "kernel"
    assert isinstance(eager.report().rows, pl.DataFrame)
