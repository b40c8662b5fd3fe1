"""Launches without device work, and work without launches: every planted one is found, none else."""

from __future__ import annotations

import gzip
import itertools
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from faults import changed, launch_ids, without_work
from helpers import DATA, event, kernel, launch, opened, recording
from nsight_data import changed as changed_export
from nsight_data import unpacked
from thence.analysis.soundness.check import check
from thence.readers.registry import read

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from thence.analysis.soundness.findings import Finding, Soundness
    from thence.model.tables import Tables

WITH_LAUNCHES = {
    "torch.profiler": recording("torch_eager_rank0"),
    "several ranks": DATA / "recording" / "two_ranks",
    "thence record, JAX": DATA / "jax" / "recording",
    "Nsight Systems": DATA / "nsight" / "torch_ddp.sqlite.gz",
}


@pytest.fixture(scope="module")
def tables() -> Callable[[str], Tables]:
    known: dict[str, Tables] = {}
    return lambda name: known.setdefault(name, read([WITH_LAUNCHES[name]]))


def found(soundness: Soundness, code: str) -> list[Finding]:
    return [finding for finding in soundness.findings if finding.code == code]


@pytest.mark.parametrize("name", WITH_LAUNCHES)
@pytest.mark.parametrize("every", [2, 7])
def test_dropped_kernels_are_counted_in_their_rank(tables: Callable[[str], Tables], name: str, every: int) -> None:
    whole = tables(name)
    launches = launch_ids(whole)
    lost = launches.with_row_index().filter(pl.col("index") % every == 1)
    last = launches.group_by("rank").agg(pl.col("start").max())
    lost = lost.join(last, on=["rank", "start"], how="anti")  # a recording may end within that
    findings = found(check(without_work(whole, lost)), "launch_without_work")
    expected = dict(lost.group_by("rank").len().rows())
    assert {f.rank: f.count for f in findings} == expected
    assert all(0 < f.span_share <= 1 for f in findings)
    work = whole.gpu.join(lost, on=["rank", "correlation"], how="semi")
    for finding in findings:  # the time of what is missing lies within the time that is named
        assert finding.span_ns >= int(work.filter(pl.col("rank") == finding.rank)["duration"].max())


@pytest.mark.parametrize(
    "path",
    [DATA / "jax" / "jax_single.xplane.pb.gz", DATA / "nsight" / "jax_train.sqlite.gz"],
    ids=["xplane", "Nsight Systems"],
)
def test_launches_of_command_buffers_are_checked(path: Path) -> None:
    tables = read([path])
    launches = launch_ids(tables, "GraphLaunch")
    lost = launches[1:-1:2]
    (finding,) = found(check(without_work(tables, lost)), "launch_without_work")
    assert finding.count == lost.height
    assert f"{lost.height} of {launches.height} launches of CUDA graphs" in finding.text


def test_dropped_launches_are_counted(tables: Callable[[str], Tables]) -> None:
    whole = tables("torch.profiler")
    names = whole.gpu.group_by("name").len().filter(pl.col("len") > 20)["name"]
    often = whole.gpu.filter(pl.col("name").is_in(names.implode()), pl.col("kind") == "kernel")
    ids = often["correlation"].sort()[5::10]
    host = whole.host.filter(~pl.col("correlation").is_in(ids.implode()).fill_null(value=False))
    (finding,) = found(check(changed(whole, host=host)), "work_without_launch")
    assert (finding.rank, finding.device, finding.count) == (0, 0, len(ids))


def test_kernels_whose_launch_is_never_recorded_are_a_note(tmp_path: Path) -> None:
    events = [x for i in range(1, 6) for x in (launch(i, 10 * i), kernel(i, 10 * i + 4))]
    events += [kernel(100 + i, 100 + 10 * i, name="by another call") for i in range(5)]
    soundness = opened(tmp_path, events).check()
    assert soundness.sound
    assert [(note.code, note.count) for note in soundness.notes] == [("work_without_launch", 5)]


def test_work_launched_before_the_recording_began_is_in_order(tmp_path: Path) -> None:
    events = [x for i in range(11, 16) for x in (launch(i, 10 * i), kernel(i, 10 * i + 4))]
    early = [kernel(i, 20 + 10 * i) for i in range(1, 5)]
    assert opened(tmp_path, [*early, *events]).check().sound


def call(name: str, correlation: int, start: int, **rest: Any) -> dict[str, Any]:
    return event("cuda_runtime", name, start, 1, args={"correlation": correlation}, **rest)


def test_captured_launches_have_no_work(tmp_path: Path) -> None:
    """Launches of other threads of the process, too: autograd has its own."""
    captured = [launch(i, 30 + i) for i in range(3, 6)]
    captured += [launch(i, 30 + i) | {"tid": 3} for i in range(6, 9)]
    events = [
        *(launch(1, 10), kernel(1, 15)),
        *(call("cudaStreamBeginCapture", 2, 30), *captured, call("cudaStreamEndCapture", 20, 50)),
        *(call("cudaGraphLaunch", 21, 60), kernel(21, 65), kernel(21, 70)),
        call("cudaDeviceSynchronize", 22, 80),
    ]
    assert opened(tmp_path, events).check().sound
    outside = launch(30, 55)
    (finding,) = opened(tmp_path, [*events, outside]).check().findings
    assert (finding.code, finding.count) == ("launch_without_work", 1)
    assert "1 of 8 launches of kernels" in finding.text


def test_copies_and_sets_of_nothing_have_no_work(tmp_path: Path) -> None:
    events = [launch(1, 10), kernel(1, 15), launch(9, 50), kernel(9, 55)]
    events += [call("cudaMemsetAsync", 2, 20), call("cudaMemcpyAsync", 3, 30)]
    assert opened(tmp_path, events).check().sound


def test_a_driver_call_inside_a_runtime_call_is_one_launch(tmp_path: Path) -> None:
    outer = event("cuda_runtime", "cudaLaunchKernel", 10, 6, args={"correlation": 1})
    inner = event("cuda_driver", "cuLaunchKernel", 12, 2, args={"correlation": 2})
    rest = [launch(5, 30), kernel(5, 35), call("cudaDeviceSynchronize", 6, 50)]
    assert opened(tmp_path, [outer, inner, kernel(2, 20), *rest]).check().sound
    assert opened(tmp_path, [outer, inner, kernel(1, 20), *rest]).check().sound
    (finding,) = opened(tmp_path, [outer, inner, *rest]).check().findings
    assert finding.count == 1


def test_the_end_of_a_window_may_cut_work_unless_the_host_waited_for_it(tmp_path: Path) -> None:
    events = [x for i in range(1, 6) for x in (launch(i, 10 * i), kernel(i, 10 * i + 4, 9))]
    late = [launch(8, 58), launch(9, 60)]
    cut = opened(tmp_path, [*events, *late]).check()
    assert cut.sound
    assert [(note.code, note.count) for note in cut.notes] == [("launch_without_work", 2)]
    waited = [*events, *late, call("cudaDeviceSynchronize", 10, 70)]
    (finding,) = opened(tmp_path, waited).check().findings
    assert finding.count == 2
    long_after = [*events, launch(8, 60_000_000)]  # a minute on an idle device
    assert not opened(tmp_path, long_after).check().sound


def test_the_end_of_a_window_may_cut_the_queue_of_one_stream(tmp_path: Path) -> None:
    """While another stream goes on; a launch that should have run long before is lost."""
    events = [x for i in range(1, 61) for x in (launch(i, 10 * i), kernel(i, 10 * i + 64, 9))]
    queued = [launch(70, 597), launch(71, 599)]  # before the last launch with work, at 600 us
    soundness = opened(tmp_path, [*events, *queued]).check()
    assert soundness.sound
    assert [(note.code, note.count) for note in soundness.notes] == [("launch_without_work", 2)]
    (finding,) = opened(tmp_path, [*events, *queued, launch(72, 55)]).check().findings
    assert finding.count == 3


def test_ids_that_never_correspond_are_not_judged(tmp_path: Path) -> None:
    events = [x for i in range(1, 6) for x in (launch(i, 10 * i), kernel(1000 + i, 10 * i + 4))]
    soundness = opened(tmp_path, events).check()
    assert soundness.sound
    assert "launch_without_work" in {entry.code for entry in soundness.not_checked}


def test_captures_that_a_recorder_does_not_show_are_told_by_the_graph_that_follows() -> None:
    """XLA captures 10 library calls before each of the first four launches of its graph of 30 nodes."""
    soundness = check(read([DATA / "jax" / "recording"]))
    assert soundness.sound
    (reason,) = [x.text for x in soundness.not_checked if x.code == "launch_without_work"]
    assert reason.startswith("40 launches")


def test_without_launches_the_rule_says_so_and_what_the_ids_show() -> None:
    path = DATA / "nsight" / "torch_ddp_cuda_gpu_trace.csv.gz"
    soundness = thence.open(path).check()
    assert soundness.sound
    reasons = {x.code: x.text for x in soundness.not_checked}
    assert {"launch_without_work", "work_without_launch", "broken_order"} <= set(reasons)
    ids = thence.open(path).tables.gpu["correlation"].drop_nulls().unique().sort().diff().drop_nulls()
    assert ids.n_unique() > 1
    assert "correlation ids" in reasons["launch_without_work"]


def test_launches_that_are_named_by_their_kernels_are_judged() -> None:
    """As jax.profiler names them; where it also creates graphs, launches without work may have been captured."""
    tables = read([DATA / "jax" / "jax_single_nocb.xplane.pb.gz"])
    kernels = tables.gpu.filter(pl.col("kind") == "kernel").sort("start")
    lost = kernels[100:140]["correlation"]
    gpu = tables.gpu.filter(~pl.col("correlation").is_in(lost.implode()))
    (finding,) = found(check(changed(tables, gpu=gpu)), "launch_without_work")
    assert finding.count == 40
    with_graphs = read([DATA / "jax" / "jax_fsdp2.xplane.pb.gz"])
    soundness = check(with_graphs)
    (reason,) = [x.text for x in soundness.not_checked if x.code == "launch_without_work"]
    calls = with_graphs.host.filter(pl.col("category") == "driver", pl.col("correlation") > 0)
    named = calls["name"].is_in(with_graphs.gpu["name"].unique().implode())
    without = ~calls["correlation"].is_in(with_graphs.gpu["correlation"].implode())
    assert reason.startswith(f"{(named & without).sum()} launches without device work")


def test_the_largest_jump_of_the_ids_is_that_of_the_file() -> None:
    """Against the ids of the CSV itself."""
    path = DATA / "nsight" / "torch_graph_cuda_gpu_trace.csv.gz"
    frame = pl.read_csv(gzip.decompress(path.read_bytes()), infer_schema_length=None)
    ids = sorted({int(x) for x in frame["CorrId"].drop_nulls()})
    most = max(b - a for a, b in itertools.pairwise(ids))
    (reason,) = [x.text for x in thence.open(path).check().not_checked if x.code == "launch_without_work"]
    assert f"and once by {most:,}, " in reason


@pytest.mark.parametrize(("result", "sound"), [(0, False), (1, True)], ids=["done", "failed"])
def test_a_call_that_failed_launched_nothing(tmp_path: Path, result: int, *, sound: bool) -> None:
    path = unpacked("torch_graph", tmp_path)
    kernels = "(select correlationId from CUPTI_ACTIVITY_KIND_KERNEL where graphNodeId is null limit 1 offset 40)"
    path = changed_export(
        path,
        f"update CUPTI_ACTIVITY_KIND_RUNTIME set returnValue = {result} where correlationId = {kernels}",
        f"delete from CUPTI_ACTIVITY_KIND_KERNEL where correlationId = {kernels}",
    )
    assert check(read([path])).sound is sound
