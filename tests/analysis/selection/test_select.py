"""A part of a trace: every total is that of the part, and nothing but the part is in it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from helpers import DATA, FSDP, STACK, event, kernel, launch, opened, run_thence, shared
from thence.model.selection import Selection, parse_steps, parse_window

if TYPE_CHECKING:
    from pathlib import Path

JAX = DATA / "jax"


def three_steps() -> list[dict[str, object]]:
    """Steps 3, 4 and 5 with a kernel of 1, 2 and 4 us each, and one of 8 us outside of them."""
    events: list[dict[str, object]] = []
    for number, duration in ((3, 1), (4, 2), (5, 4)):
        at = 100 * number
        events += [
            event("user_annotation", f"ProfilerStep#{number}", at, 50),
            launch(number, at + 1),
            kernel(number, at + 10, duration, name=f"gemm_{number}"),
        ]
    return [*events, launch(9, 900), kernel(9, 910, 8, name="last")]


def test_steps_are_a_half_open_range_of_their_numbers(tmp_path: Path) -> None:
    trace = opened(tmp_path, three_steps())
    assert trace.report().sum_ns == 15_000
    assert trace.select(steps="3:5").report().sum_ns == 3_000
    assert trace.select(steps="4").report().sum_ns == 2_000
    assert trace.select(steps="4:").report().sum_ns == 6_000
    assert trace.select(steps=":4").report().sum_ns == 1_000


def test_a_window_counts_from_the_first_activity_and_takes_what_begins_in_it(tmp_path: Path) -> None:
    trace = opened(tmp_path, three_steps())
    # The kernels begin 0, 100, 200 and 600 us after the first one.
    assert trace.select(window="0ns:100us").report().sum_ns == 1_000
    assert trace.select(window="100us:200.001us").report().sum_ns == 6_000
    assert trace.select(window="0.0006s:").tables.gpu["duration"].to_list() == [8_000]


def test_only_searches_names_and_places(tmp_path: Path) -> None:
    trace = opened(tmp_path, [event("user_annotation", "train/mlp", 0, 150), *three_steps()])
    assert trace.select(only="^gemm_[34]$").report().sum_ns == 3_000
    assert trace.select(only="nothing|last").report().sum_ns == 8_000
    inside = opened(tmp_path, [event("user_annotation", "mlp", 299, 60), *three_steps()])
    assert inside.select(only="^mlp$").tables.gpu["name"].cast(pl.String).to_list() == ["gemm_3"]


def test_conditions_hold_together_and_a_part_checks_itself(tmp_path: Path) -> None:
    part = opened(tmp_path, three_steps()).select(steps="3:6", only="gemm_[45]", window="150us:")
    assert part.tables.gpu["name"].cast(pl.String).to_list() == ["gemm_5"]
    part.self_check()
    assert str(part.selection) == "steps 3:6; window 150.0 us:; only gemm_[45]"


def test_a_rank_of_several_is_the_same_as_that_rank_alone() -> None:
    together = shared(*FSDP).select(ranks=[2])
    alone = shared(FSDP[2])
    together.self_check()
    for by in ("kernel", "label", "op", "collective", "stream"):
        left, right = (t.report(by) for t in (together, alone))
        assert left.rows.equals(right.rows)
        assert left.unattributed == right.unattributed
        assert (left.span_ns, left.busy_ns) == (right.span_ns, right.busy_ns)
    assert together.tables.host.height == alone.tables.host.height
    assert together.tables.host["parent"].equals(alone.tables.host["parent"])
    assert together.collectives().by_size.equals(alone.collectives().by_size)


def test_a_device_of_one_process() -> None:
    whole = shared(JAX / "jax_fsdp2.xplane.pb.gz")
    parts = [whole.select(devices=[device]) for device in (0, 1)]
    assert sum(part.report().sum_ns for part in parts) == whole.report().sum_ns
    assert sum(part.report().span_ns for part in parts) == whole.report().span_ns
    assert sum(part.tables.programs.height for part in parts) == whole.tables.programs.height
    for part in parts:
        part.self_check()
        assert part.programs().devices.height == 1


def test_warm_up_leaves_out_the_autotuner_and_first_executions() -> None:
    whole = shared(JAX / "recording")
    steady = whole.select(warm_up="heuristic")
    of_program = whole.tables.gpu["program"].is_not_null()
    assert steady.report().sum_ns < whole.tables.gpu["duration"].filter(of_program).sum()
    assert "autotuning" not in steady.tables.places["program_rule"].cast(pl.String).to_list()


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"ranks": [7]}, "no rank 7: the inputs hold rank 0"),
        ({"devices": [3]}, "no device 3: the inputs hold device 0"),
        ({"steps": "a:b"}, "write 3:6"),
        ({"steps": ":"}, "write 3:6"),
        ({"window": "3"}, "1.2s:1.4s"),
        ({"window": "1s:2s:3s"}, "1.2s:1.4s"),
        ({"window": ":"}, "1.2s:1.4s"),
        ({"only": "("}, "not a valid regular expression"),
        ({"warm_up": "none"}, "keep, heuristic, first-compiled"),
    ],
)
def test_what_cannot_be_selected_is_said(conditions: dict[str, object], message: str) -> None:
    with pytest.raises(thence.UsageError, match=message):
        shared(STACK).select(**conditions)  # type: ignore[arg-type]


def test_nothing_left_is_no_empty_report() -> None:
    with pytest.raises(thence.MissingData, match=r"the selection \(.*only zzz\) leaves no device activity"):
        shared(STACK).select(only="zzz")
    with pytest.raises(thence.MissingData, match="holds no steps"):
        shared(JAX / "remat.xplane.pb.gz").select(steps="1")


def test_times_and_steps_are_exact() -> None:
    assert parse_window("1.2s:1.4s") == (1_200_000_000, 1_400_000_000)
    assert parse_window("0.000000001s:") == (1, None)
    assert parse_window(":1.5us") == (None, 1_500)
    assert parse_steps("12") == (12, 13)
    assert not Selection()
    assert Selection(only="x")


def test_every_verb_selects_alike() -> None:
    report = run_thence("report", *FSDP, "--rank", "1", "--only", "nccl", "--format", "json")
    summary = json.loads(report.stdout)
    assert summary["selection"] == "rank 1; only nccl"
    rows = shared(FSDP[1]).tables.gpu.filter(pl.col("name").cast(pl.String).str.contains("nccl"))
    assert summary["sum_ns"] == rows["duration"].sum()
    query = "select count(*) as n, sum(duration) as ns from gpu"
    sql = run_thence("sql", *FSDP, query, "--rank", "1", "--only", "nccl", "--format", "json")
    assert json.loads(sql.stdout) == [{"n": rows.height, "ns": rows["duration"].sum()}]
    folded = run_thence("flame", *FSDP, "--rank", "1", "--only", "nccl", "--idle", "exclude", "-o", "-")
    total = sum(int(line.rsplit(" ", 1)[1]) for line in folded.stdout.decode().splitlines())
    assert total == rows["duration"].sum()


def test_a_missing_input_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("no trace at all")
    run = run_thence("report", broken, tmp_path / "missing.json")
    assert run.returncode == 2
    assert b"missing.json: no such file or directory" in run.stderr
    assert b"broken.json" not in run.stderr


def test_own_code_can_be_a_package(tmp_path: Path) -> None:
    frames = [
        event("python_function", "train.py(5): step", 0, 90),
        event("python_function", "site-packages/transformers/llama.py(77): forward", 1, 80),
        event("python_function", "torch/nn/modules/linear.py(114): forward", 2, 70),
        launch(1, 10),
        kernel(1, 20),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": frames}))
    assert thence.open(path).tables.places["source"].to_list() == ["train.py:5 step"]
    for pattern in ("transformers", "*/transformers/*"):
        widened = thence.open(path, own=[pattern])
        (source,) = widened.tables.places["source"].to_list()
        assert source == "site-packages/transformers/llama.py:77 forward"
        stack = [name for name, *_ in widened.flame("source").nodes.select("name").rows()]
        assert stack[1:3] == ["train.py:5 step", source]
