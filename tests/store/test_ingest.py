"""Writing a store: what is read again and what is not, what is left out and why, and what a kill leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import thence
from helpers import DATA, FSDP, PAIR, kernel, launch, output, shared, written
from slow_kineto import SlowTrace
from stores import InProcess, Killed, kept, stored
from thence.errors import InputError, UsageError
from thence.store import workers as workers_module
from thence.store.layout import RANKS, read_manifest
from thence.store.store import open_store

RECORDING = DATA / "recording" / "two_ranks"


def small(folder: Path, rank: int, count: int = 2, name: str | None = None) -> Path:
    """A trace of a rank with some kernels."""
    work = [x for i in range(count) for x in (launch(i + 1, 10 + i), kernel(i + 1, 100 + 10 * i))]
    return written(
        folder / (name or f"rank{rank}.json"), work, distributedInfo={"rank": rank}, baseTimeNanoseconds=10**18
    )


def test_ranks_are_counted_as_from_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    job = kept(FSDP[:2])
    found = json.loads(output(capsys, "report", job, "--by", "rank", "--format", "json")[0])
    slow = [SlowTrace(path) for path in FSDP[:2]]
    assert {row["name"]: (row["count"], row["total_ns"]) for row in found["rows"]} == {
        f"rank {rank}": (len(trace.activities), trace.sum_ns) for rank, trace in enumerate(slow)
    }
    assert found["busy_ns"] == sum(trace.busy_ns for trace in slow)
    assert found["span_ns"] == sum(trace.span_ns for trace in slow)


def test_joined_summaries_are_written_again_only_if_something_changed(tmp_path: Path) -> None:
    files, store, workers = [small(tmp_path, rank) for rank in range(2)], tmp_path / "job.store", InProcess()
    first = stored(store, files).manifest
    written = {path: path.stat().st_ino for path in (store / "summaries").rglob("*.parquet")}
    again = stored(store, files, workers)
    assert again.manifest == first
    assert (again.written, again.kept) == (0, 2)
    assert {path: path.stat().st_ino for path in (store / "summaries").rglob("*.parquet")} == written
    gone = min(written)
    gone.unlink()
    assert stored(store, files, workers).manifest == first
    assert workers.asked == []
    assert gone.exists()


def test_after_a_kill_it_goes_on_where_it_was(tmp_path: Path) -> None:
    files, store = [small(tmp_path, rank) for rank in range(4)], tmp_path / "job.store"
    with pytest.raises(Killed):
        stored(store, files, InProcess(killed_before=2))
    (store / RANKS / ".rank-00002-aaaaaaaaaaaa.1234").mkdir()  # what was being written
    with pytest.raises(InputError, match="its ingest was interrupted; run the same thence ingest again to resume it"):
        thence.open(store)
    workers = InProcess()
    done = stored(store, files, workers)
    assert workers.asked == [path.name for path in files[2:]]
    assert (done.written, done.kept) == (2, 2)
    assert not list((store / RANKS).glob(".*"))
    assert thence.open(store).report("rank").ranks == 4


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    files, store = [small(tmp_path, rank) for rank in range(2)], tmp_path / "s"
    stored(store, files)
    small(tmp_path, 1, count=5)
    workers = InProcess()
    stored(store, files, workers)
    assert workers.asked == ["rank1.json"]
    counts = thence.open(store).sql("select rank, count(*) as n from gpu group by rank order by rank")
    assert counts.rows() == [(0, 2), (1, 5)]


def test_other_settings_read_everything_again(tmp_path: Path) -> None:
    file, store, workers = small(tmp_path, 0), tmp_path / "s", InProcess()
    stored(store, [file])
    stored(store, [file], workers, host=True)
    assert len(workers.asked) == 1
    assert thence.open(store).tables.host.height == 2


def test_a_rank_that_cannot_be_read_is_left_out_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, store = tmp_path / "run", tmp_path / "s"
    run.mkdir()
    small(run, 0)
    small(run, 2)
    (run / "rank1.json").write_text('{"schemaVersion": 1, "traceEvents": [')
    (run / "settings.json").write_text("{}")
    printed, told = output(capsys, "ingest", run, "-o", store, "--workers", "1", code=1)
    assert "2 ranks" in printed
    assert "rank1.json: holds no event that could be read" in told
    manifest = read_manifest(store)
    assert {(one.source.rpartition("/")[2], one.why) for one in manifest.left} == {
        ("rank1.json", "unreadable"),
        ("settings.json", "no_trace"),
    }
    assert any("of the ranks 0 to 2, 1 is missing: 1" in text for text in manifest.warnings)
    shown = json.loads(output(capsys, "report", store, "--format", "json")[0])
    assert any("rank1.json" in text for text in shown["notes"])
    assert any("ranks 0 to 2, 1 is missing: 1" in text for text in shown["warnings"])


def test_what_became_unreadable_is_no_longer_shown(tmp_path: Path) -> None:
    files, store = [small(tmp_path, rank) for rank in range(2)], tmp_path / "s"
    stored(store, files)
    files[1].write_text("{")
    done = stored(store, files)
    assert [entry.ranks for entry in done.manifest.entries] == [(0,)]
    assert thence.open(store).report("rank").ranks == 1


def test_nothing_that_can_be_read_is_an_error(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"traceEvents": [')
    with pytest.raises(InputError, match="holds no event that could be read"):
        stored(tmp_path / "s", [bad])


def test_a_recording_that_grows_is_refreshed(tmp_path: Path) -> None:
    growing, store = tmp_path / "recording", tmp_path / "s"
    shutil.copytree(RECORDING, growing, copy_function=shutil.copyfile)
    late = [*growing.glob("*/*-000002.arrow"), *growing.glob("*/*-000003.arrow")]
    aside = tmp_path / "later"
    aside.mkdir()
    for file in late:
        file.rename(aside / f"{file.parent.name}.{file.name}")
    before = stored(store, [growing])
    assert [entry.ranks for entry in before.manifest.entries] == [(0,), (1,)]
    for file in aside.iterdir():
        folder, _, name = file.name.partition(".")
        file.rename(growing / folder / name)
    workers = InProcess()
    after = stored(store, [growing], workers)
    assert sorted(workers.asked) == sorted(path.name for path in growing.iterdir())
    whole = shared(RECORDING)
    assert sum(entry.rows for entry in after.manifest.entries) == whole.tables.gpu.height
    assert sum(entry.rows for entry in before.manifest.entries) < whole.tables.gpu.height
    counted = thence.open(store).report("rank").rows.rows()
    assert counted == whole.report("rank").rows.rows()


def test_of_two_files_of_one_rank_the_newest_counts(tmp_path: Path) -> None:
    first = small(tmp_path, 1)
    later = written(
        tmp_path / "again.json", [launch(1, 10**9), kernel(1, 10**9 + 5)], distributedInfo={"rank": 1},
        baseTimeNanoseconds=10**18,
    )  # fmt: skip
    done = stored(tmp_path / "s", [first, later])
    assert [entry.source for entry in done.manifest.entries] == [str(later)]
    assert [(one.source, one.why) for one in done.manifest.left] == [(str(first), "duplicate")]
    both = stored(tmp_path / "s", [first, later], add=True)
    assert [entry.ranks for entry in both.manifest.entries] == [(1,), (2,)]
    by_rank = thence.open(tmp_path / "s").sql("select rank, count(*) as n from gpu group by rank order by rank")
    assert by_rank.rows() == [(1, 2), (2, 1)]  # in the order of the inputs, as of files


def test_the_rank_is_what_the_file_says_not_its_name(tmp_path: Path) -> None:
    file = small(tmp_path, 5, name="trace_rank2.json")
    named = written(tmp_path / "trace_rank3.json", PAIR)
    done = stored(tmp_path / "s", [file, named])
    assert [(e.ranks, e.source) for e in done.manifest.entries] == [((3,), str(named)), ((5,), str(file))]


def test_a_folder_with_other_files_is_no_place_for_a_store(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.txt").touch()
    with pytest.raises(UsageError, match="holds other files"):
        stored(tmp_path / "s", FSDP)


def test_sources_are_known_by_the_same_name_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(tmp_path, 0)
    stored(tmp_path / "s", [tmp_path / "rank0.json"])
    monkeypatch.chdir(tmp_path)
    workers = InProcess()
    stored(tmp_path / "s", [os.path.join(".", "rank0.json")], workers)  # noqa: PTH118 - a relative name
    assert workers.asked == []


def test_json_of_an_ingest(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "LocalWorkers", lambda _processes: InProcess())
    file = small(tmp_path, 4)
    printed, _ = output(capsys, "ingest", file, "-o", tmp_path / "s", "--workers", "1", "--format", "json")
    found = json.loads(printed)
    assert [(r["rank"], r["source"], r["activities"]) for r in found["ranks"]] == [(4, str(file), 2)]
    assert (found["written"], found["kept"], found["left_out"]) == (1, 0, [])
    assert found["warnings"] == ["of the ranks 0 to 4, 4 are missing: 0, 1, 2, 3"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_name_that_is_no_text_stops_no_other_rank(tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff1.json.gz"))
    shutil.copy(FSDP[1], odd)
    done = stored(tmp_path / "a.store", [small(tmp_path, 0), odd])
    assert [entry.ranks for entry in done.manifest.entries] == [(0,)]
    (left,) = open_store(tmp_path / "a.store").manifest.left
    assert left.why == "unreadable"
    assert left.source.endswith(r"r\udcff1.json.gz")
    assert "not valid UTF-8" in left.reason
