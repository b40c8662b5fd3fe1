"""What a store answers is what its files answer, with no more read than is needed."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import thence
from helpers import DATA, FSDP, PAIR, TORCH, kernel, launch, output, shared, written
from stores import kept, stored
from thence.analysis.activity_rooflines import WORK_SUMS
from thence.analysis.ranks import timeline_rows
from thence.errors import DamagedInput, InputError, MissingData, UsageError
from thence.model.places import BY
from thence.store import store as reading
from thence.store.layout import MANIFEST, SUMMARIES
from thence.store.summaries import LATENESS, WINDOWS

if TYPE_CHECKING:
    from pathlib import Path

XLA = DATA / "jax" / "remat.xplane.pb.gz"
ITS_OWN = ("inputs", "notes", "warnings")
"""Members of a report that name the files."""
PARTS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"ranks": (1, 2)}, ("kernel", "rank", "label")),
    ({"steps": "1:3"}, ("rank",)), ({"window": "1ms:20ms"}, ("kernel",)), ({"only": "nccl"}, ("label",)),
    ({"ranks": (3,), "devices": (3,)}, ("label",)),
)  # fmt: skip
"""Selections, and what is asked of them: those of ranks alone are answered by summaries for some."""


@pytest.fixture
def files() -> thence.Trace:
    return shared(*FSDP)


@pytest.fixture
def job() -> Path:
    return kept(FSDP)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A store of one small trace, to be changed."""
    return shutil.copytree(kept((TORCH / "graph_replay_rank0.json.gz",)), tmp_path / "small.store")


def report(trace: thence.Trace, by: str) -> dict[str, Any]:
    try:
        summary = trace.report(by)
    except thence.MissingData as refusal:  # these ranks ran nothing that leads to HLO
        return {"refused": str(refusal).partition(": ")[2]}
    return {k: v for k, v in summary.to_json().items() if k not in ITS_OWN}


def test_a_report_by_anything_is_that_of_the_files() -> None:
    refused, trace, files = set(), thence.open(kept(FSDP[:2])), shared(*FSDP[:2])
    for by in BY:
        expected = report(files, by)
        if by == "shape":  # operators are host ranges, which this store does not keep
            assert "thence ingest --host keeps them" in report(trace, by)["refused"]
            continue
        assert report(trace, by) == expected, by
        if "refused" in expected:
            refused.add(by)
    assert refused == {"program", "hlo", "opcode", "op_name"}


@pytest.mark.parametrize(("part", "asked"), PARTS, ids=[next(iter(part)) for part, _ in PARTS])
def test_parts_are_those_of_the_files(
    job: Path, files: thence.Trace, part: dict[str, Any], asked: tuple[str, ...]
) -> None:
    selected, expected = thence.open(job).select(**part), files.select(**part)
    for by in asked:
        assert report(selected, by) == report(expected, by)


def test_a_report_by_rank_reads_no_table(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a table was read")

    monkeypatch.setattr(reading, "rows_of", refuse)
    trace = thence.open(job)
    assert trace.report("rank").ranks == 4
    assert trace.select(ranks=(1, 3)).report("kernel").ranks == 2
    assert trace.check().sound
    assert trace.sql("select count(*) as n from gpu").item() == 4 * 654
    with pytest.raises(AssertionError):
        trace.report("module")


def test_tables_of_one_rank_alone_are_read(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = reading.rows_of
    monkeypatch.setattr(reading, "rows_of", lambda path, new: read.append(path.name) or original(path, new))
    gpu = thence.open(job).select(ranks=(2,)).tables.gpu
    assert [name[:10] for name in read] == ["rank-00002"]
    assert_frame_equal(gpu, shared(FSDP[2]).tables.gpu, categorical_as_str=True)


def test_other_questions_have_the_same_answers(job: Path, files: thence.Trace) -> None:
    trace = thence.open(job)
    graph, expected = trace.flame(idle="exclude"), files.flame(idle="exclude")
    assert_frame_equal(graph.nodes, expected.nodes, categorical_as_str=True)
    assert trace.collectives().to_json()["rows"] == files.collectives().to_json()["rows"]
    assert trace.check() == files.check()
    trace.self_check()


def test_without_host_ranges_idle_frames_say_no_cause(job: Path, files: thence.Trace) -> None:
    graph = thence.open(job).flame()
    idle = graph.nodes.filter(pl.col("kind").cast(pl.String) == "idle")
    assert idle["total_ns"].to_list() == [files.report().idle_ns]
    assert any("without its causes: the trace holds no host ranges" in note for note in graph.notes)


def test_late_ranks_are_found_from_summaries_as_from_files(
    job: Path, files: thence.Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = files.ranks().to_json()
    monkeypatch.setattr(reading, "rows_of", None)  # no table is read
    found = thence.open(job).ranks().to_json()
    assert len(found["ranks"]) == 4
    for key in expected.keys() - set(ITS_OWN):
        assert found[key] == expected[key], key


def test_a_page_of_many_ranks_reads_the_tables_of_two(
    job: Path, files: thence.Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_rows, "MAX_IN_FULL", 2)
    read: list[str] = []
    original = reading.rows_of
    monkeypatch.setattr(reading, "rows_of", lambda path, new: read.append(path.name) or original(path, new))
    page = thence.open(job).page()
    assert len(set(read)) == 2
    assert "which makes the others wait most, and rank " in page.in_full
    assert page.summary.ranks == page.whole.ranks == 4
    assert page.summary.sum_ns == files.report().sum_ns
    assert page.timeline.lanes["rank"].n_unique() == page.summaries["label"].ranks == 2
    late, steps = page.job.result, page.steps.result
    assert late is not None
    assert late.ranks.height == 4
    assert steps is not None
    mean = files.steps().frame.group_by("step").agg(pl.col("duration").mean())["duration"].sum()
    assert steps.rows.select(pl.sum_horizontal("compute_ns", "exposed_ns", "idle_ns").sum()).item() == pytest.approx(
        mean - steps.too_long["duration_ns"].sum()
    )
    assert page.idle.result is None
    assert page.collectives.result is None  # of two ranks it would say that all others are missing
    assert "of all ranks are not read" in page.collectives.reason


@pytest.mark.parametrize(
    "query",
    [
        "select rank, name, sum(duration) as ns from gpu group by rank, name order by ns desc, rank, name",
        "select label, count(*) as n from activities where kind = 'kernel' group by label order by n, label",
        "select phase, count(*) as n from places group by phase order by phase",
        "select collective, sum(bytes) as b from collectives group by collective order by collective",
    ],
)
def test_sql_over_files_that_are_read_in_batches(
    job: Path, files: thence.Trace, query: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = files.sql(query)
    assert_frame_equal(thence.open(job).sql(query), expected)
    assert expected.height > 1
    printed, _ = output(capsys, "sql", job, query, "--format", "json")
    assert json.loads(printed) == expected.to_dicts()


def test_idle_time_needs_host_ranges_and_is_that_of_the_files_with_them(job: Path) -> None:
    with pytest.raises(MissingData, match="thence ingest --host keeps them"):
        thence.open(job).idle()
    found, expected = (
        trace.select(ranks=(0,)) for trace in (thence.open(kept(FSDP[:2], host=True)), shared(*FSDP[:2]))
    )
    assert found.idle().to_json() == expected.idle().to_json()
    assert_frame_equal(found.flame().nodes, expected.flame().nodes, categorical_as_str=True)
    assert_frame_equal(found.tables.host, expected.tables.host, categorical_as_str=True)
    assert report(found, "shape") == report(expected, "shape")
    assert_frame_equal(found.roofline("shape").rows, expected.roofline("shape").rows, categorical_as_str=True)
    with pytest.raises(MissingData, match="thence roofline --by shape needs; thence ingest --host keeps them"):
        thence.open(job).roofline("shape")


def test_work_of_activities_is_kept_without_host_ranges(job: Path, files: thence.Trace) -> None:
    for part in ({"ranks": (3,)}, {"only": "gemm|nvjet"}):
        found, expected = thence.open(job).select(**part), files.select(**part)
        assert_frame_equal(found.roofline("op").rows, expected.roofline("op").rows)
    rows = thence.open(job).report("rank").rows
    flop = dict(files.roofline("rank").rows.select(pl.col("name").cast(pl.String), "flop").rows())
    assert rows["flop"].to_list() == [flop[f"rank {rank}"] for rank in range(4)]


def test_a_store_of_an_earlier_version_says_that_it_lacks_work(job: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(job, old)
    for path in old.rglob("work.parquet"):
        path.unlink()
    for path in [*old.rglob("summary-report_rows.parquet"), *(old / SUMMARIES / "report_rows").iterdir()]:
        pl.read_parquet(path).drop(WORK_SUMS).write_parquet(path)
    trace = thence.open(old)
    summary = trace.report("kernel")
    assert summary.rows["total_ns"].sum() == summary.sum_ns
    assert summary.rows["flop"].null_count() == summary.rows["headroom_ns"].null_count() == summary.rows.height
    assert any("did not keep FLOP and bytes; the same thence ingest adds them" in note for note in summary.notes)
    with pytest.raises(MissingData, match="thence roofline needs; thence ingest --host keeps them"):
        trace.roofline("op")


def test_xla_programs_and_their_warm_up(tmp_path: Path) -> None:
    stored(tmp_path / "s", [XLA])
    found, expected = thence.open(tmp_path / "s"), shared(XLA)
    for by in ("program", "hlo", "op_name", "source"):
        assert report(found, by) == report(expected, by), by
    assert found.programs().to_json() == expected.programs().to_json()


def test_a_file_with_several_ranks_is_one_part(tmp_path: Path) -> None:
    def process(pid: int, correlation: int) -> list[dict[str, Any]]:
        return [launch(correlation, 10, pid=pid), kernel(correlation, 20 + pid, args={"device": pid % 2})]

    merged = written(tmp_path / "merged.json", process(100, 1) + process(101, 2))
    stored(tmp_path / "s", [merged])
    found, expected = thence.open(tmp_path / "s"), thence.open(merged)
    assert expected.report("rank").ranks == 2
    assert report(found, "rank") == report(expected, "rank")
    assert report(found.select(ranks=(1,)), "rank") == report(expected.select(ranks=(1,)), "rank")


def test_all_ranks_are_not_read_where_they_do_not_fit(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "free_bytes", lambda: 10_000)
    trace = thence.open(job)
    with pytest.raises(UsageError, match="select ranks with --rank"):
        trace.flame()
    assert trace.report("label").ranks == 4  # rank by rank


def test_ranks_that_are_not_there(job: Path) -> None:
    with pytest.raises(UsageError, match="no rank 7; it holds 4 ranks, 0 to 3"):
        thence.open(job).select(ranks=(7,))


def test_a_store_stands_alone(job: Path) -> None:
    with pytest.raises(UsageError, match="cannot be combined with other inputs"):
        thence.open(job, FSDP[0])
    with pytest.raises(UsageError, match="--own and --hlo are options of thence ingest"):
        thence.open(job, own=["transformers"])


@pytest.mark.parametrize(
    ("member", "value", "refusal"),
    [
        ("entries", [{"folder": "../../secret", "source": "x", "ranks": [0], "written": [0], "rows": 1,
                      "memory_bytes": 1}], "names folders that cannot be in a store"),
        ("summaries", ["../../secret"], "names folders that cannot be in a store"),
        ("summaries", ["é" * 200], "names folders that cannot be in a store"),
        ("version", 99, "later version"),
        ("entries", 5, "does not have the structure that thence writes"),
    ],
)  # fmt: skip
def test_a_manifest_from_elsewhere_is_refused(small: Path, member: str, value: Any, refusal: str) -> None:
    path = small / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {member: value}))
    with pytest.raises(InputError, match=refusal):
        thence.open(small)


def test_damage_is_told(small: Path) -> None:
    table = next(small.glob("ranks/*/activities.parquet"))
    table.write_bytes(table.read_bytes()[:200])
    with pytest.raises(DamagedInput, match=r"activities\.parquet: cannot be read"):
        _ = thence.open(small).tables.gpu
    for file in (small / SUMMARIES / "facts").iterdir():
        file.unlink()
    with pytest.raises(DamagedInput, match="run the same thence ingest again to write it"):
        _ = thence.open(small).meta


def test_summaries_without_a_column_of_today_are_read(job: Path, tmp_path: Path) -> None:
    store = tmp_path / "old.store"
    shutil.copytree(job, store)
    for path in (store / SUMMARIES / LATENESS["steps"]).glob("*.parquet"):
        pl.read_parquet(path).drop("host_ns").write_parquet(path)
    found, now = (thence.open(where).ranks() for where in (store, job))
    assert_frame_equal(found.ranks, now.ranks)


def test_steps_of_an_unknown_kind_are_told(job: Path, tmp_path: Path) -> None:
    store = tmp_path / "new.store"
    shutil.copytree(job, store)
    for path in (store / SUMMARIES / LATENESS["devices"]).glob("*.parquet"):
        pl.read_parquet(path).with_columns(step_kind=pl.lit("0")).write_parquet(path)
    with pytest.raises(DamagedInput, match=r"a kind that thence does not know \(0\)"):
        _ = thence.open(store).headline


def test_times_that_are_none_are_refused(job: Path, tmp_path: Path) -> None:
    store = tmp_path / "damaged.store"
    shutil.copytree(job, store)
    part = next(store.glob("ranks/*/activities.parquet")).parent
    wrong = {"rank": [0], "thread": [1], "number": [0], "start": [0], "duration": ["long"], "recorded": [1]}
    pl.DataFrame(wrong | {"counted": [True]}).write_parquet(part / "step_times.parquet")
    with pytest.raises(DamagedInput, match="cannot be read"):
        _ = thence.open(store).headline
    for path in (store / SUMMARIES / WINDOWS).glob("*.parquet"):
        pl.read_parquet(path).with_columns(epoch_ns=pl.lit(1 << 62)).write_parquet(path)
    with pytest.raises(DamagedInput, match="states impossible times"):
        _ = thence.open(store).meta


def test_a_store_that_an_ingest_writes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """Its manifest was read before, its summaries would be those of more ranks."""
    store = tmp_path / "a.store"
    files = [written(tmp_path / f"rank{rank}.json", PAIR, distributedInfo={"rank": rank}) for rank in (0, 1)]
    stored(store, files[:1])
    trace = thence.open(store)
    stored(store, files)
    with pytest.raises(DamagedInput, match="was written to while it was read"):
        trace.report("rank")
    assert len(thence.open(store).report("rank").rows) == 2
