"""Warm-up and the autotuner in tables and flame graphs of XLA traces: separate, said, and never lost."""

from __future__ import annotations

import json

import polars as pl
import pytest

from helpers import DATA, recording, run_thence, shared
from programs_data import trace
from thence.analysis.flame.answer import IDLE, Idle, Split, flame
from thence.model.reasons import text_of
from thence.trace import Trace

TUNED, WARM = (f"[{text_of(code)}]" for code in ("autotuning", "warm_up"))
ITSELF = ("kind", "rank", "device", "stream")
RECORDING = DATA / "jax" / "recording"


def by_hand() -> Trace:
    """Step runs three times, two of them warm-up (thunks of 50 and 20 ns); init once, for 10 ns."""
    return Trace(trace(compiled="step.1", communicates=True))


def times(opened: Trace, by: str) -> dict[str, int]:
    return dict(opened.report(by).rows.select("name", "total_ns").iter_rows())


@pytest.mark.parametrize("by", ["kernel", "program"])
def test_rows_keep_warm_up_and_the_autotuner_apart(by: str) -> None:
    steady = {"kernel": {"x": 50 + 10}, "program": {"step": 50, "init": 10}}[by]
    assert times(by_hand(), by) == {**steady, WARM: 70, TUNED: 10}
    assert by_hand().report(by).separate.rows() == [("warm_up", 2, 5, 70), ("autotuning", 1, 1, 10)]
    (note,) = by_hand().report(by).notes
    assert "warm-up 70.00 ns (50.0 %, 2 executions)" in note.replace("70 ns", "70.00 ns")
    assert "XLA's autotuner 10" in note
    assert "--warm-up keep" in note


def test_keep_divides_all_alike_and_heuristic_leaves_out_and_says_what() -> None:
    mixed = by_hand().select(warm_up="keep")
    assert times(mixed, "kernel") == {"x": 140}
    assert mixed.report().notes == ()
    assert mixed.report().separate.is_empty()
    steady = by_hand().select(warm_up="heuristic").report()
    assert (steady.sum_ns, steady.counts["thunk"]) == (60, 3)
    (note,) = steady.notes
    assert "left out 6 device activities, 80 ns" in note
    assert "2 warm-up executions, 80 ns (step 80 ns)" in note  # spans, with the idle time inside


@pytest.mark.parametrize("by", ["device", "kernel", "op_name", "program", "source"])
def test_totals_and_attribution_are_those_of_the_whole_trace(by: str) -> None:
    whole = shared(RECORDING)
    default, mixed = whole.report(by), whole.select(warm_up="keep").report(by)
    assert default.rows["total_ns"].sum() == default.sum_ns == mixed.sum_ns
    assert (default.span_ns, default.busy_ns) == (mixed.span_ns, mixed.busy_ns)
    assert default.attributed_ns == mixed.attributed_ns
    assert default.unattributed == mixed.unattributed
    assert default.rows.equals(mixed.rows) == (by in ITSELF)
    assert default.separate.is_empty() == (by in ITSELF)


def test_what_is_apart_in_a_real_recording_is_what_its_programs_say() -> None:
    """The autotuner's programs have no number, and nothing else is separate but first executions."""
    opened = shared(RECORDING)
    separate = opened.tables.places["separate"].cast(pl.String)
    number = opened.tables.programs["program"].gather(opened.tables.gpu["program"].cast(pl.UInt32))
    candidates = number.is_null() & opened.tables.gpu["program"].is_not_null()
    assert candidates.any()
    assert (separate.filter(candidates) == "autotuning").all()
    warm = opened.tables.gpu.filter(separate == "warm_up")["program"].unique().cast(pl.UInt32)
    executions = opened.tables.programs.with_columns(
        number=pl.int_range(pl.len()).over("rank", "device", "name", "program", order_by="start"),
        runs=pl.len().over("rank", "device", "name", "program"),
    )
    assert (executions["number"].gather(warm) == 0).all()
    assert (executions["runs"].gather(warm) > 1).all()


def test_a_part_of_a_trace_is_apart_by_what_the_whole_trace_shows() -> None:
    """A window that cuts an execution does not make it incomplete."""
    part = by_hand().select(window=":155ns")  # thunks that begin before 255: of the last run, one of two
    assert times(part, "kernel") == {"x": 40 + 10, WARM: 70}


@pytest.mark.parametrize("split", Split)
def test_flame_frames_hold_what_is_apart(split: Split) -> None:
    opened = shared(RECORDING)
    graph = flame(opened.tables, "op_name", split, Idle.EXCLUDE)
    top = graph.nodes.filter(pl.col("depth") == 1)
    found = dict(top.select("name", "total_ns").iter_rows())
    expected = {f"[{text_of(code)}]": ns for code, _, _, ns in opened.report().separate.iter_rows()}
    assert {name: found[name] for name in expected} == expected
    assert TUNED in expected
    assert graph.total_ns == opened.report().sum_ns
    assert any("in separate rows" in note for note in graph.notes)
    mixed = flame(opened.select(warm_up="keep").tables, "op_name", split, Idle.EXCLUDE)
    assert WARM not in mixed.nodes["name"]


def test_idle_inside_and_between_programs_and_around_warm_up() -> None:
    graph = by_hand().flame("op_name", idle="include")
    names = dict(graph.nodes.select("node", "name").iter_rows())
    found = {}
    for node, parent, name, total in (
        graph.nodes.filter(pl.col("idle") & pl.col("name").str.contains("programs|executions"))
        .select("node", "parent", "name", "total_ns")
        .iter_rows()
    ):
        assert node in names
        found[names[parent], name] = total
    warm = "inside and before first executions"
    assert found == {
        (IDLE, warm): 10 + 10 + 30 + 10,  # in the first step, before init, before and in the second
        (warm, "inside programs"): 10 + 10,
        (warm, "between programs"): 10 + 30,
        (IDLE, "between programs"): 20 + 110,  # before the last step and after it
    }


def test_flame_graphs_leave_idle_around_first_executions_out_and_say_so() -> None:
    graph = by_hand().flame("op_name")
    around = pl.col("idle") & (pl.col("name").str.contains("program|before") | (pl.col("depth") == 1))
    idle = dict(graph.nodes.filter(around).select("name", "total_ns").iter_rows())
    assert idle == {
        IDLE: 130, "between programs": 130, "before step": 20, "after the last program": 110,
    }  # fmt: skip
    assert graph.total_ns == 140 + 130
    (note,) = [note for note in graph.notes if "--idle include" in note]
    assert note.startswith("60 ns of idle time inside and before the first executions")
    kept = by_hand().select(warm_up="keep").flame("op_name")
    assert kept.total_ns == 140 + 60 + 130
    assert not any("--idle include" in note for note in kept.notes)


def test_idle_inside_the_executions_that_count_is_stated_beside_the_sum() -> None:
    opened = by_hand()
    for by, idle in {"program": 0, "kernel": None, "rank": None}.items():
        summary = opened.report(by)
        assert summary.idle_inside_ns == summary.to_json()["idle_inside_programs_ns"] == idle
    kept = opened.select(warm_up="keep")
    assert kept.report("program").idle_inside_ns == 10 + 10  # in the first step and in the second
    assert kept.report("program").rows["total_ns"].sum() == kept.report("program").sum_ns == 140
    # What a search leaves out may have run in the gaps.
    assert kept.select(only="x").report("program").idle_inside_ns is None


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        *(("heuristic", "recording"), ("first-compiled", "jax_single_nocb.xplane.pb.gz")),
        *(("keep", "recording"), ("keep", "jax_fsdp2.xplane.pb.gz")),
    ],
)
def test_idle_inside_programs_is_that_of_the_programs_table(rule: str, name: str) -> None:
    opened = shared(DATA / "jax" / name)
    expected = int(opened.programs(rule).programs["idle_inside_ns"].sum())
    part = opened.select(warm_up=rule)
    assert part.report("opcode").idle_inside_ns == expected > 0
    nodes = part.flame("op_name").nodes
    if rule != "keep":  # the time in which left out work ran is not idle, so idle time is unknown
        assert part.report("opcode").idle_ns is None
        assert not nodes["idle"].any()
        return
    # Frames of idle time inside the executions that count, on each device.
    inside = nodes.filter(pl.col("idle") & (pl.col("name") == "inside programs"))
    assert inside["total_ns"].sum() == expected


def test_the_command_line_says_it_in_a_line_and_in_json() -> None:
    done = run_thence("report", RECORDING, "--by", "hlo")
    assert done.returncode == 0
    assert "XLA's autotuner" in done.stdout.decode()
    document = json.loads(run_thence("report", RECORDING, "--by", "hlo", "--format", "json").stdout)
    assert {row["code"] for row in document["separate"]} >= {"autotuning"}
    for entry in document["separate"]:
        (row,) = [row for row in document["rows"] if row["reason"] == entry["code"]]
        assert (row["count"], row["total_ns"]) == (entry["count"], entry["total_ns"])
    whole = run_thence("report", RECORDING, "--by", "hlo", "--window", "0ns:")
    assert "in separate rows" in whole.stdout.decode()
    kept = run_thence("report", RECORDING, "--by", "hlo", "--warm-up", "keep", "--window", "0ns:")
    assert "in separate rows" not in kept.stdout.decode()


def test_traces_without_xla_programs_keep_nothing_apart() -> None:
    opened = shared(recording("torch_eager_rank0"))
    assert opened.report().separate.is_empty()
    assert opened.tables.places["separate"].null_count() == opened.tables.gpu.height
