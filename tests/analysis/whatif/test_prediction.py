"""What changes gain: planted programs whose answer can be worked out by hand, and exactness on recordings."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import DATA, FSDP, TORCH, event, kernel, launch, opened, output, written
from thence.analysis.whatif.answer import FREEABLE, suggestions, what_if
from thence.analysis.whatif.changes import parse_change
from thence.analysis.whatif.critical_path import path_summary
from thence.analysis.whatif.graph import program_graph
from thence.analysis.whatif.prediction import health
from thence.analysis.whatif.simulation import simulated
from thence.errors import MissingData, UsageError

if TYPE_CHECKING:
    from pathlib import Path

STEPS, LOAD, HOST, ATTENTION, MLP = 10, 300, 100, 400, 600


def call(name: str, start: float, duration: float, **rest: Any) -> dict[str, Any]:
    return event("cuda_runtime", name, start, duration, args={"correlation": int(start) + 10**6}, **rest)


def trained(folder: Path, load: int, *, item: bool = True) -> thence.Trace:
    """Each step loads, launches attention and mlp (us), and waits for both or does not."""
    events, time, free = [], 1000, 0
    for step in range(STEPS):
        begin = time
        events.append(event("user_annotation", "enumerate(DataLoader)#it.__next__", time, load))
        time += load
        for number, (name, took) in enumerate([("attention", ATTENTION), ("mlp", MLP)]):
            correlation = 2 * step + number + 1
            events += [event("user_annotation", name, time, 50), launch(correlation, time + 40)]
            start = max(time + 45, free + 1)
            free = start + took
            events.append(kernel(correlation, start, took, name=name))
            time += 50
        if item:
            events.append(event("cpu_op", "aten::item", time, free + 5 - time))
            events.append(call("cudaStreamSynchronize", time + 1, free + 4 - time))
            time = free + 10
        events.append(event("user_annotation", f"ProfilerStep#{step}", begin, time - begin))
    return opened(folder, events)


def gain_us(trace: thence.Trace, action: str, text: str, part: str = "") -> float:
    """Microseconds that each step gains."""
    found = what_if(trace.whole, program_graph(trace.whole), [parse_change(action, text)])
    row = next(row for row in found.rows.iter_rows(named=True) if row["part"] == part)
    return float(row["gain_ns"]) / 1000


def test_what_is_waited_for_in_turn_gains_what_it_takes(tmp_path: Path) -> None:
    trace = trained(tmp_path, LOAD)
    assert gain_us(trace, "free", "cause:loader") == pytest.approx(LOAD, abs=2)
    assert gain_us(trace, "free", "label:attention", "kernels") == pytest.approx(ATTENTION - 50, abs=15)
    assert gain_us(trace, "scale", "kernel:mlp=0.5") == pytest.approx(MLP / 2, abs=2)
    assert gain_us(trace, "scale", "kernel:mlp=2") == pytest.approx(-MLP, abs=2)


def test_without_its_wait_the_device_is_the_limit(tmp_path: Path) -> None:
    trace = trained(tmp_path, LOAD)
    step = what_if(trace.whole, program_graph(trace.whole), [parse_change("no-wait", "item")]).rows.row(0, named=True)
    assert step["after_ns"] / 1000 == pytest.approx(ATTENTION + MLP, rel=0.05)
    assert gain_us(trace, "no-wait", "stream") == pytest.approx(gain_us(trace, "no-wait", "all"))


def test_what_a_launch_does_before_its_first_kernel_is_hidden_by_a_device_that_works(tmp_path: Path) -> None:
    """A launch of a graph calls for 300 us, its kernel begins after 200 and takes 400, and the host waits for it."""
    events = []
    for step, begin in enumerate(range(1000, 1000 + STEPS * 610, 610)):
        events.append(event("user_annotation", f"ProfilerStep#{step}", begin, 610))
        events.append(event("cuda_runtime", "cudaGraphLaunch", begin, 300, args={"correlation": step + 1}))
        events.append(kernel(step + 1, begin + 200, 400))
        events.append(call("cudaDeviceSynchronize", begin + 301, 303))
    trace = opened(tmp_path, events)
    step_us = gain_us(trace, "no-wait", "device")
    assert step_us == pytest.approx(610 - 400, abs=5)


def test_a_step_of_jax_that_waits_for_none_takes_as_long_as_its_device_works() -> None:
    """From bytes, in us: the host begins the steps at 2620.0; their graphs run from 3217.3, 4765.5 until 5677.1.

    The one before them ends at 2360.1. Without waiting, the host is ahead: 1645.8 and 1533.6 us less 892 and 898 us.
    """
    trace = thence.open(DATA / "jax" / "memory.xplane.pb.gz")
    works = (4128.5 - 3217.3) + (5677.1 - 4765.5)
    gain = ((5677.1 - 2620.0) - works) / 2
    assert gain_us(trace, "free", "cause:sync") == pytest.approx(gain, abs=2)


def test_where_the_device_is_the_limit_the_loader_gains_nothing(tmp_path: Path) -> None:
    trace = trained(tmp_path, LOAD, item=False)
    row = what_if(trace.whole, program_graph(trace.whole), [parse_change("free", "cause:loader")]).rows.row(
        0, named=True
    )
    assert row["gain_ns"] <= LOAD * 1000 / STEPS + 1  # of the first step alone
    assert row["verdict"] == "noise"


@pytest.mark.parametrize("load", [100, 8000])
def test_an_interval_is_wider_the_more_of_the_step_the_host_decides(tmp_path: Path, load: int) -> None:
    trace = trained(tmp_path, load)
    row = what_if(trace.whole, program_graph(trace.whole), [parse_change("scale", "kernel:mlp=1")]).rows.row(
        0, named=True
    )
    half = (row["high_share"] - row["low_share"]) / 2
    # The loader, the launch of attention and what follows the wait; then the device works, and the host waits.
    of_host = (load + 40 + 10) / (load + 45 + ATTENTION + MLP + 10)
    expected = pytest.approx((0.04**2 + (0.08 * of_host) ** 2) ** 0.5, rel=0.03)
    assert half == expected
    assert health(trace.whole, program_graph(trace.whole)).noise == expected


def test_the_thread_of_autograd_begins_after_what_gave_it_its_work(tmp_path: Path) -> None:
    events, time = [], 1000
    for step in range(STEPS):
        begin = time
        events.append(event("user_annotation", "load", time, LOAD))
        events.append(event("cpu_op", "aten::loss", time + LOAD, 50))
        backward = time + LOAD + 50 + 600  # until then autograd looks at the graph, which no row tells of
        other = {"tid": 77}
        events.append(event("cpu_op", "autograd::engine::evaluate_function: A", backward, 40) | other)
        events.append(launch(step + 1, backward + 10) | other)
        events.append(kernel(step + 1, backward + 20, 30))
        events.append(event("cpu_op", "aten::item", backward + 45, 30))
        events.append(call("cudaStreamSynchronize", backward + 46, 20))
        time = backward + 80
        events.append(event("user_annotation", f"ProfilerStep#{step}", begin, time - begin))
    assert gain_us(opened(tmp_path, events), "free", "cause:loader") == pytest.approx(LOAD, abs=5)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    whole = trained(tmp_path, LOAD).whole
    rows = what_if(whole, program_graph(whole), [parse_change("free", "module:nothing")]).rows
    assert set(rows["verdict"]) == {"absent"}
    assert rows["gain_ns"].null_count() == rows.height


def test_work_inside_of_a_graph_is_refused() -> None:
    trace = thence.open(TORCH / "torch-2.12_graph_replay_rank0.json.gz")
    name = trace.tables.gpu["name"].cast(pl.String)[0]
    found = what_if(trace.whole, program_graph(trace.whole), [parse_change("free", f"kernel:{name[:6]}")])
    assert found.rows["verdict"].to_list() == ["refused"]
    graphed = trace.tables.gpu.filter(pl.col("graph").is_not_null())["duration"].sum()
    share = graphed / trace.tables.gpu["duration"].sum()
    assert share > 0.9
    assert found.health.opaque == pytest.approx(share)
    assert any(text.startswith(f"refused: {100 * share:.1f} %") for text in found.remarks())
    path = {row["kind"]: row["share"] for row in trace.whatif().path.iter_rows(named=True)}
    assert path["graph"] > 0.5


def test_a_trace_that_explains_too_little_is_refused(tmp_path: Path) -> None:
    events = [launch(1, 1), kernel(1, 5, 10), launch(2, 6), kernel(2, 900, 10)]
    trace = opened(tmp_path, events)
    with pytest.raises(MissingData, match="record the waits between streams"):
        what_if(trace.whole, program_graph(trace.whole), [])


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ("free", "attention"), ("free", "nothing:x"), ("free", "cause:weather"), ("free", "label:("),
        ("free", "label:"), ("scale", "kernel:x"), ("scale", "kernel:x=-1"), ("scale", "kernel:x=many"),
        ("on-time", "3"), ("on-time", "rank:x"),
    ],
)  # fmt: skip
def test_changes_that_cannot_be_read(action: str, text: str) -> None:
    with pytest.raises(UsageError):
        parse_change(action, text)


RECORDED = (
    [TORCH / "torch_compile_rank0.json.gz"],
    [TORCH / "torch_eager_rank0.json.gz"],
    list(FSDP[:2]),
    [DATA / "nsight" / "torch_ddp.sqlite.gz"],
)


@pytest.mark.parametrize("paths", RECORDED[:2], ids=lambda paths: paths[0].name)
def test_without_changes_the_largest_gains_of_all_are_answered(paths: list[Path]) -> None:
    """What cannot gain enough is not replayed then, so all of them are, one by one, and sorted here."""
    trace = thence.open(paths)
    changes = suggestions(trace.whole, frozenset(FREEABLE))
    each = what_if(trace.whole, program_graph(trace.whole, *trace._of_ranks), changes).rows
    gaining = [row for row in each.rows(named=True) if row["verdict"] == "gain"]
    gaining.sort(key=lambda row: (-row["gain_ns"], row["change"]))
    found = what_if(trace.whole, program_graph(trace.whole, *trace._of_ranks), []).rows.rows(named=True)
    assert found == gaining[:10]
    assert found
    assert len(gaining) < each.height


@pytest.mark.parametrize("paths", RECORDED, ids=lambda paths: paths[0].name)
def test_replay_is_exact_and_the_critical_path_tiles_every_step(paths: list[Path]) -> None:
    trace = thence.open(paths)
    program = program_graph(trace.whole, *trace._of_ranks)
    assert (simulated(program.graph) == program.graph.time).all()
    assert (program.graph.delay >= 0).all()
    tiles = trace.critical_path()
    end = (tiles["start"] + tiles["duration"]).to_numpy()
    assert (end[:-1] == tiles["start"].to_numpy()[1:]).all()
    steps = trace.tables.host.filter(pl.col("category") == "step", pl.col("rank") == min(trace.whole.ranks)).sort(
        "start"
    )
    of_step = dict(tiles.group_by("step").agg(pl.col("duration").sum()).rows())
    begins = steps["start"].to_list()
    for number, (begin, after) in enumerate(itertools.pairwise(begins)):
        if len(paths) == 1:  # the clocks of several ranks are moved
            assert of_step[number] == after - begin
    assert int(path_summary(trace.whole, tiles)["total_ns"].sum()) == int(tiles["duration"].sum())


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    trained(tmp_path, LOAD)
    path = tmp_path / "trace.json"
    document = json.loads(output(capsys, "whatif", path, "--format", "json")[0])
    assert document["of"] == "the profiled program"
    assert document["steps"] == STEPS - 1  # without the first
    assert len(document["rows"]) <= 10
    gains = [row["gain_ns"] for row in document["rows"]]
    assert gains == sorted(gains, reverse=True)
    asked = json.loads(output(capsys, "whatif", path, "--free", "label:mlp", "--format", "json")[0])
    assert [row["part"] for row in asked["rows"]] == ["kernels", "with host work"]
    for verb in ("idle", "steps", "whatif"):
        shown, _ = output(capsys, verb, path)
        assert "loader" in shown
        assert max(map(len, shown.splitlines())) <= 80


def test_a_rank_without_a_step_that_counts_has_no_typical_steps(tmp_path: Path) -> None:
    paths = []
    for rank, count in enumerate((1, 4)):
        events = []
        for step in range(count):
            at = 1000 + 100 * step
            events += [event("user_annotation", f"ProfilerStep#{step}", at, 90), launch(step + 1, at + 10)]
            events.append(kernel(step + 1, at + 20, 60))
        paths.append(written(tmp_path / f"rank{rank}.json", events, distributedInfo={"rank": rank, "world_size": 2}))
    program = program_graph(thence.open(paths).whole)
    assert len(program.typical) == 0
    assert list(program.until) == [1]
