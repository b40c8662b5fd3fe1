"""Nothing in a store is taken on trust: special files, bombs and tables of other types are told in one sentence."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import forking
import thence
from helpers import DATA, FSDP, PAIR, output, shared, written
from stores import InProcess, kept, stored
from thence.errors import DamagedInput, InputError
from thence.parquet_files import write_table
from thence.store.ingest import sources_of
from thence.store.layout import FACTS, MANIFEST, PART, SUMMARIES

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = 1_000_000
RECORDING = DATA / "recording" / "two_ranks"


@pytest.fixture
def sound() -> Path:
    return kept(FSDP[:2], host=True)


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "job.store")


def table(store: Path, name: str) -> Path:
    return min(store.glob(f"ranks/*/{name}.parquet"))


@pytest.mark.skipif(sys.platform == "win32", reason="there are no FIFOs")
@pytest.mark.parametrize("name", [FACTS, "activities.parquet"])
def test_a_fifo_in_a_part_is_told_and_not_waited_for(store: Path, name: str) -> None:
    file = min(store.glob(f"ranks/*/{name}"))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(DamagedInput, match=f"{name}: is a special file"):
        _ = thence.open(store).tables.gpu


@pytest.mark.skipif(sys.platform == "win32", reason="there are no FIFOs")
def test_a_fifo_as_manifest_or_description_is_not_waited_for(tmp_path: Path) -> None:
    trace, store, workers = written(tmp_path / "rank0.json", PAIR), tmp_path / "job.store", InProcess()
    stored(store, [trace])
    part = min(store.glob(f"ranks/*/{PART}"))
    part.unlink()
    os.mkfifo(part)
    stored(store, [trace], workers)
    assert workers.asked == ["rank0.json"]
    (store / MANIFEST).unlink()
    os.mkfifo(store / MANIFEST)
    with pytest.raises(InputError):
        thence.open(store)


def test_no_pattern_in_a_name_is_followed(sound: Path, tmp_path: Path) -> None:
    place = tmp_path / "run[1]*"
    store = shutil.copytree(sound, place / "job.store")
    found, expected = thence.open(store), shared(*FSDP[:2])
    assert found.tables.gpu.height == expected.tables.gpu.height
    assert found.report("rank").sum_ns == expected.tables.gpu["duration"].sum()
    recording = shutil.copytree(RECORDING, place / RECORDING.name)
    assert thence.open(recording).tables.gpu.height == shared(RECORDING).tables.gpu.height > 0
    assert len(sources_of([str(recording)]).names) == 2
    stored(place / "of.store", [written(place / "rank0.json", PAIR)])


def claimed(path: Path) -> None:
    """A few bytes that claim as many rows as fill gigabytes."""
    columns = pl.read_parquet(path).columns
    one = pl.repeat(1, ROWS, dtype=pl.Int64, eager=True)
    pl.DataFrame(dict.fromkeys(columns, one)).write_parquet(path, row_group_size=ROWS)
    assert path.stat().st_size * 200 < ROWS * 8 * len(columns)


def as_text(path: Path) -> None:
    pl.read_parquet(path).with_columns(pl.all().is_null().cast(pl.String)).write_parquet(path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def without_columns(path: Path) -> None:
    pl.read_parquet(path).select(value=pl.first()).write_parquet(path)


def nested(path: Path) -> None:
    frame = pl.read_parquet(path).head(1)
    deep = functools.reduce(lambda cells, _: [cells], range(60), 1)
    frame.with_columns(pl.Series(frame.columns[0], [deep] * frame.height)).write_parquet(path)


@pytest.mark.parametrize("spoil", [claimed, as_text, cut, without_columns, nested])
def test_a_spoilt_table_is_told_in_one_sentence(
    store: Path, spoil: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(table(store, "activities"))
    told = [output(capsys, "streams", store, code=2)[1]]
    for summary in sorted((store / SUMMARIES).iterdir()):
        file = next(summary.iterdir())
        if summary.name in ("report_totals", "ranks_devices"):
            spoil(file)
    told += [output(capsys, verb, store, code=2)[1] for verb in ("report", "ranks")]
    for text in told:
        assert len(text.splitlines()) == 1, text
        assert "job.store" in text
        assert "should not happen" not in text


CUT = """
import os, sys
import polars as pl
from thence.cli import main

store, *files = sys.argv[1:]
collect = pl.LazyFrame.collect

def cut(frame, *arguments, **options):
    while files:
        os.truncate(files.pop(), 8)
    return collect(frame, *arguments, **options)

pl.LazyFrame.collect = cut
main(["streams", store])
"""
"""Tables that become shorter after Polars has opened the first: in a process of its own, which the system could end."""


@pytest.mark.skipif(sys.platform == "win32", reason="no process is forked")
def test_a_table_that_is_cut_while_it_is_read_is_told_in_one_sentence(store: Path) -> None:
    done = forking.run(["-c", CUT, str(store), *map(str, sorted(store.glob("ranks/*/activities.parquet")))])
    (told,) = done.stderr.decode().splitlines()
    assert told.startswith(f"thence: {store}/ranks/")
    assert "activities.parquet: cannot be read" in told
    assert done.returncode == 2


@pytest.mark.parametrize("name", ["a%20b", "100%", "a+b c#d", "é[1]*?"])
def test_no_name_is_read_as_a_url(sound: Path, tmp_path: Path, name: str) -> None:
    rows = thence.open(shutil.copytree(sound, tmp_path / name)).sql("select count(*) as n from gpu")
    assert rows["n"].to_list() == [shared(*FSDP[:2]).tables.gpu.height]


def edited(path: Path, change: Callable[[Any], None]) -> None:
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "ranks", [[1], [-1], [1 << 31], [10**30], [], [0, 2]], ids=["twice", "negative", "large", "larger", "none", "more"]
)
def test_ranks_that_no_job_has(store: Path, ranks: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    edited(store / MANIFEST, lambda manifest: manifest["entries"][0].update(ranks=ranks))
    told = output(capsys, "report", store, code=2)[1]
    where = f"{store / MANIFEST}: does not have the structure that thence writes (Expected `int` "
    out_of_range = told.startswith(f"thence: {where}") and "`$.entries[0].ranks[" in told
    listed = f"thence: {store}: manifest.json lists ranks that are listed twice or without a part\n"
    assert out_of_range if any(not 0 <= rank < 1 << 31 for rank in ranks) else told == listed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("devices", [{"a": 1}]), ("losses", [7]), ("epoch_ns", 1 << 63), ("epoch_ns", True), ("inputs", [3]),
        ("facts", [{"world_size": 1 << 64}]), ("process_groups", [{"ranks": [[1]]}]),
        ("losses", [{"code": "cut", "input": "x", "count": 1 << 64, "text": ""}]),
        ("facts", [{"measured_peaks": True}]), ("facts", [{"calls": 1}]), ("facts", [{"plain_steps": "no"}]),
        ("facts", [{"counters": {"interval_ns": "1"}}]), ("facts", [{"counters_left_out": {"warps": [1]}}]),
        ("facts", [{"stalls": {"samples": 1}}]), ("process_groups", [{"ranks": [0, 1]}]),
    ],
)  # fmt: skip
def test_facts_of_other_types(store: Path, name: str, value: object) -> None:
    edited(min(store.glob(f"ranks/*/{FACTS}")), lambda facts: facts["meta"].update({name: value}))
    with pytest.raises(DamagedInput, match="its facts do not have the structure that thence writes"):
        _ = thence.open(store).tables.gpu


def test_a_device_whose_name_is_no_text(store: Path) -> None:
    edited(min(store.glob(f"ranks/*/{FACTS}")), lambda facts: facts["meta"]["devices"][0].update(name={"a": 1}))
    with pytest.raises(DamagedInput, match="its facts do not have the structure that thence writes"):
        _ = thence.open(store).tables.gpu


def test_a_compute_capability_that_is_no_number_is_left_out(store: Path, tmp_path: Path) -> None:
    facts = min(store.glob(f"ranks/*/{FACTS}"))
    edited(facts, lambda written: written["meta"]["devices"][0].update(compute_capability="².0"))
    thence.open(store).convert(tmp_path / "a.json")
    device = json.loads((tmp_path / "a.json").read_bytes())["deviceProperties"][0]
    assert (device.get("computeMajor"), device["computeMinor"]) == (None, 0)


@pytest.mark.parametrize("start", [-(1 << 63), (1 << 63) - 1])
def test_times_that_no_clock_shows(store: Path, start: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(store, "activities")
    pl.read_parquet(path).with_columns(start=pl.lit(start, pl.Int64)).write_parquet(path)
    told = output(capsys, "streams", store, code=2)[1]
    assert "with an impossible time" in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "column", "told"),
    [
        ("activities", "rank", "has rows of the table gpu without rank"),
        ("collectives", "gpu", "collectives without an activity"),
        ("host", "duration", "has rows of the table host without duration"),
    ],
)
def test_rows_that_lack_what_every_row_has(store: Path, name: str, column: str, told: str) -> None:
    path = table(store, name)
    lacking = pl.when(pl.int_range(pl.len()) > 0).then(column).alias(column)
    pl.read_parquet(path).with_columns(lacking).write_parquet(path)
    with pytest.raises(DamagedInput, match=told):
        _ = thence.open(store).tables.gpu


def test_a_table_without_a_column_of_places(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(store, "activities")
    pl.read_parquet(path).drop("phase").write_parquet(path)
    told = output(capsys, "report", "--by", "collective", store, code=2)[1]
    assert "cannot be read" in told
    assert "phase" in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("summary", "column", "arguments"),
    [
        ("ranks_steps", "step", ("ranks", "-o", "OUT")),
        ("ranks_devices", "start", ("ranks",)),
        ("report_totals", "sum_ns", ("report", "--by", "kernel")),
        ("windows", "end", ("report",)),
    ],
)
def test_summaries_that_lack_what_every_row_has(
    store: Path,
    tmp_path: Path,
    summary: str,
    column: str,
    arguments: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for path in (store / SUMMARIES / summary).glob("*.parquet"):
        frame = pl.read_parquet(path)
        frame.with_columns(pl.lit(None, frame.schema[column]).alias(column)).write_parquet(path)
    words = [str(tmp_path / "ranks.json") if word == "OUT" else word for word in arguments]
    told = output(capsys, *words, store, code=2)[1]
    assert f"cannot be read (rows of the table {summary.removeprefix('ranks_').removeprefix('report_')} " in told
    assert f"without {column})" in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("row", [-1, 1 << 30])
def test_references_to_rows_that_are_not_there(store: Path, row: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(store, "collectives")
    pl.read_parquet(path).with_columns(gpu=pl.lit(row, pl.Int32)).write_parquet(path)
    told = output(capsys, "report", "--only", "kernel", store, code=2)[1]
    assert "has tables that refer to rows that do not exist" in told
    assert len(told.splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("height", [1, 100_000])  # what is told when the file is closed, and before
def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, height: int) -> None:
    (tmp_path / "a.parquet").symlink_to("/dev/full")
    rows = pl.DataFrame({"a": range(height)})
    with pytest.raises(OSError, match="No space left on device") as told:
        write_table(rows, tmp_path / "a.parquet")
    assert told.value.filename == str(tmp_path / "a.parquet")
