"""Tables and timelines of in-kernel ranges, alone and under the slices of their kernels."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest

import thence
from helpers import kernel, launch, run_thence, written
from inside_data import (
    COMPUTE,
    EPOCH,
    INSTANT,
    LOAD,
    RECORDED,
    START,
    STORE,
    Trace,
    description,
    launched,
    mosaic_buffer,
    ranges,
    recording,
    thence_buffer,
)
from perfetto_reading import decoded as perfetto
from thence.inside import Decoded, Description, decode, save
from thence.inside.timeline import standalone

if TYPE_CHECKING:
    from pathlib import Path

RATE = {"ns": 10_000, "cycles": 20_000}


def uneven() -> Decoded:
    """Four blocks on two SMs: SM 4 runs two, one after another; SM 9 two at once, and is done early."""
    blocks = [
        Trace(ranges((LOAD, 0, 2000), (COMPUTE, 2000, 20_000)), sm=4, start=START, **RATE),
        Trace(ranges((LOAD, 0, 6000)), sm=9, start=START + 100, **RATE),
        Trace([*ranges((LOAD, 0, 2000)), (INSTANT, STORE, 2500)], sm=9, start=START + 200, **RATE),
        Trace([*ranges((LOAD, 0, 4000)), (0, COMPUTE, 5000)], sm=4, start=START + 20_000, **RATE),
    ]
    about = description(4, 8, overhead_cycles=0, launch={"multiprocessors": 132})
    return decode(thence_buffer(blocks, 8), about)


def test_summary_by_range() -> None:
    rows = thence.inside.Inside(uneven(), "k.npz").summary().rows
    assert rows.select("name", "count", "total_ns", "recorded_ns", "unclosed").rows() == [
        ("compute", 1, 9000.0, 9000, 1), ("load", 4, 7000.0, 7000, 0),
    ]  # fmt: skip
    load = rows.row(1, named=True)
    durations = [1000, 1000, 2000, 3000]
    assert load["mean_ns"] == np.mean(durations)
    assert (load["min_ns"], load["max_ns"]) == (1000, 3000)
    for column, q in (("p50_ns", 50), ("p90_ns", 90), ("p99_ns", 99)):
        assert load[column] == pytest.approx(np.percentile(durations, q))
    assert load["share"] == pytest.approx(7000 / 40_000)  # of four traces of 10 us
    assert (load["sm_low_ns"], load["sm_high_ns"], load["sms"]) == (1500, 2000, 2)


def test_summary_of_the_load_of_the_sms() -> None:
    summary = thence.inside.Inside(uneven(), "k.npz").summary()
    assert summary.span_ns == 30_000
    assert summary.trace_ns == 40_000
    assert summary.start_spread_ns == 20_000
    assert summary.sms.rows() == [(4, 2, 2, 20_000, 10_000, 0, 30_000), (9, 2, 2, 10_100, 19_900, 100, 10_200)]
    assert summary.tail_ns == 30_000 - 10_200
    assert summary.tail_idle == 0.5  # SM 9 all of it, SM 4 none
    assert summary.waves == 4 / 3  # three blocks at once at most
    assert summary.imbalance == 20_000 / 15_050
    assert summary.idle_sms == 130
    assert summary.instants.rows() == [("store", 1)]
    assert summary.states == {"complete": 4}
    assert summary.clock_ghz == 2.0
    document = json.loads(json.dumps(summary.to_json()))
    assert document["rows"][0]["name"] == "compute"
    assert document["idle_sms"] == 130


def test_notebooks_get_escaped_html() -> None:
    about = Description(("<b>",), (1, 1, 1), (32, 1, 1), 1, 2, "k<int>")
    profile = thence.inside.Inside(decode(thence_buffer([Trace(ranges((0, 0, 10)))], 2), about), "<p>")
    html = profile._repr_html_()
    assert "&lt;b&gt;" in html
    assert "k&lt;int&gt;" in html
    assert "<b>:" not in html


def perfetto_of(timeline: Any, path: Path) -> Any:
    from thence.writers.timelines.write import write_timeline

    write_timeline(timeline, path)
    return perfetto(path.read_bytes())


def test_perfetto_has_a_track_for_each_sm_block_and_warpgroup(tmp_path: Path) -> None:
    events = [ranges((LOAD, 0, 100 * (n + 1))) for n in range(4)]
    traces = [Trace(e, sm=7 if n < 2 else 3, **RATE) for n, e in enumerate(events)]
    about = description(2, 4, traces_per_block=2, overhead_cycles=10)
    part = decode(thence_buffer(traces, 4, per_block=2), about)
    result = perfetto_of(standalone([("k.npz", part)]), tmp_path / "k.pftrace")
    shown = {result.path(s.track): (s.name, s.start, s.end, s.arguments["net ns"]) for s in result.slices}
    assert shown == {
        f"GPU 0 > inside gemm > SM {sm} > block {block} > warpgroup {index}": ("load", 0, ns, ns - 5.0)
        for sm, block, index, ns in ((7, 0, 0, 50), (7, 0, 1, 100), (3, 1, 0, 150), (3, 1, 1, 200))
    }
    clocks = {c.clock_id: c.timestamp for c in result.trace.packet[0].clock_snapshot.clocks}
    assert clocks[1] == START  # wall time where the trace begins


def test_perfetto_shows_crossing_and_unclosed_ranges_and_instants(tmp_path: Path) -> None:
    events = [
        (0, LOAD, 0),
        (0, COMPUTE, 100),
        (1, LOAD, 200),
        (1, COMPUTE, 400),
        (INSTANT, STORE, 420),
        (0, STORE, 500),
    ]
    part = decode(thence_buffer([Trace(events, sm=1, **RATE)], 8), description(1, 8))
    result = perfetto_of(standalone([("k.npz", part)]), tmp_path / "k.pftrace")
    found = sorted((s.name, s.start, s.end, s.arguments.get("state")) for s in result.slices)
    assert found == [
        ("compute", 50, 200, None), ("load", 0, 100, None), ("store", 210, 210, None),
        ("store", 250, 10_000, "entered, never left"),
    ]  # fmt: skip


def test_launches_of_one_kernel_have_tracks_of_their_own(tmp_path: Path) -> None:
    timeline = standalone([("a", launched(START)), ("b", launched(START + 50_000))])
    result = perfetto_of(timeline, tmp_path / "k.pftrace")
    paths = {result.path(s.track).split(" > ")[1] for s in result.slices}
    assert paths == {"inside gemm #1", "inside gemm #2"}


def test_chrome_json_reads_back_as_before(tmp_path: Path) -> None:
    trace = recording(tmp_path, (1_000_000, 30_800))
    part = launched(EPOCH + 1_000_400 + 60_300)
    profile = thence.inside.Inside(part, "k.npz")
    notes = profile.write(tmp_path / "all.json", merge=trace)
    assert "the only launch" in notes[-1]
    document = json.loads((tmp_path / "all.json").read_bytes())
    found = [e for e in document["traceEvents"] if e.get("cat") == "in_kernel"]
    assert [(e["name"], e["ts"], e["dur"]) for e in found] == [
        ("load", 1000.4, 1.0), ("load", 1000.4, 1.0), ("load", 1000.4, 1.0), ("store", 1020.4, 1.0),
    ]  # fmt: skip
    assert found[0]["args"] == {"SM": 0, "block": 0, "index": 0, "net ns": 1000.0}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert names[found[3]["pid"], found[3]["tid"]] == "block 3 warpgroup 0"
    again = thence.open(tmp_path / "all.json")
    assert again.tables.gpu["name"].to_list() == trace.tables.gpu["name"].to_list()
    assert again.tables.gpu["start"].to_list() == trace.tables.gpu["start"].to_list()
    assert again.meta.warnings == trace.meta.warnings


def test_parquet_has_them_as_a_table(tmp_path: Path) -> None:
    profile = thence.inside.Inside(uneven(), "k.npz")
    profile.write(tmp_path / "k.parquet")
    frame = pl.read_parquet(tmp_path / "k.parquet" / "inside.parquet")
    assert frame.height == uneven().ranges.height
    assert frame["name"].to_list()[:2] == ["load", "compute"]
    assert set(frame["kernel"]) == {"gemm"}


def test_launches_without_whole_times_begin_at_0_each() -> None:
    about = description(1, 2, flavour="mosaic", words_per_trace=8)
    parts = [
        (f"{i}", decode(mosaic_buffer([Trace(ranges((LOAD, 0, 100)), start=START + i * 10**6)], 8), about, 1.0))
        for i in range(2)
    ]  # fmt: skip
    timeline = standalone(parts)
    assert [p.ranges["start_ns"].to_list() for p in timeline.inside] == [[0], [0]]
    assert any("time between them is unknown" in note for note in timeline.notes)
    whole = standalone([("a", launched(START)), ("b", launched(START + 50_000))])
    assert [p.ranges["start_ns"][0] for p in whole.inside] == [0, 50_000]


def saved(tmp_path: Path) -> Path:
    traces = [Trace(ranges((LOAD, 0, 2000), (COMPUTE, 2000, 8000)), sm=n, **RATE) for n in range(4)]
    save(tmp_path / "k.npz", thence_buffer(traces, 8), description(4, 8, overhead_cycles=0))
    return tmp_path / "k.npz"


def test_command_line_prints_json_csv_and_tables(tmp_path: Path) -> None:
    path = saved(tmp_path)
    run = run_thence("inside", path, "--format", "json")
    assert (run.returncode, run.stderr) == (0, b"")
    document = json.loads(run.stdout)
    assert document["inputs"] == [str(path)]
    (found,) = document["kernels"]
    assert (found["kernel"], found["traces"], found["span_ns"]) == ("gemm", 4, 10_000)
    assert [(r["name"], r["count"], r["total_ns"], r["share"]) for r in found["rows"]] == [
        ("compute", 4, 12_000.0, 0.3), ("load", 4, 4000.0, 0.1),
    ]  # fmt: skip
    assert document["warnings"] == []
    lines = list(csv.DictReader(io.StringIO(run_thence("inside", path, "--format", "csv").stdout.decode())))
    assert [(line["input"], line["name"], line["count"]) for line in lines] == [
        (str(path), "compute", "4"), (str(path), "load", "4"),
    ]  # fmt: skip
    table = run_thence("inside", tmp_path, COLUMNS="150").stdout.decode()
    assert "gemm: 4 traces of 4 blocks, 10.00 us" in table
    assert "30.0 %" in table
    assert "unclosed" not in table


def test_command_line_writes_timelines(tmp_path: Path) -> None:
    path = saved(tmp_path)
    out = tmp_path / "k.pftrace"
    assert run_thence("inside", path, "-o", out).returncode == 0
    assert len(perfetto(out.read_bytes()).slices) == 8
    again = run_thence("inside", path, "-o", out)
    assert again.returncode == 2
    assert b"--force replaces it" in again.stderr
    assert run_thence("inside", path, "-o", out, "--force").returncode == 0
    events = [launch(1, 5), kernel(1, "911.200", "10.600", name="gemm")]
    trace = written(tmp_path / "t.json", events, baseTimeNanoseconds=START - 971_800)
    run = run_thence("inside", path, "-o", tmp_path / "all.json.gz", "--merge", trace)
    assert run.returncode == 0, run.stderr
    assert b"the only launch" in run.stderr


def test_command_line_on_the_mosaic_recording() -> None:
    run = run_thence("inside", RECORDED / "mosaic.npy", "--format", "json", "--clock-ghz", "2")
    (found,) = json.loads(run.stdout)["kernels"]
    words = np.load(RECORDED / "mosaic.npy").reshape(64, 64).astype(np.int64)
    compute = words[:, 14] - words[:, 12]
    row = next(r for r in found["rows"] if r["name"] == "compute")
    assert row["count"] == 64
    assert row["mean_ns"] == pytest.approx((compute - 11).mean() / 2)
    assert found["clock_sources"] == {"given": 64}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["missing.npz"], "no such file"),
        (["text.npz"], "not a buffer of in-kernel events"),
        (["cut.npz"], "cut or damaged"),
        (["k.npz", "-o", "k.txt"], "unknown file ending"),
        (["k.npz", "-o", "missing/k.pftrace"], "there is no folder"),
        (["k.npz", "--merge", "t.json"], "the file to write with -o"),
        (["k.npz", "--launch", "1", "-o", "k.pftrace"], "name the trace with --merge"),
        (["k.npz", "--clock-ghz", "1980"], "SM clocks run at"),
        (["empty"], "looked for *.npz, *.npy"),
        (["nothing.npz"], "all traces of the buffer are empty"),
    ],
)
def test_command_line_errors(tmp_path: Path, arguments: list[str], says: str) -> None:
    whole = saved(tmp_path).read_bytes()
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty").mkdir()
    (tmp_path / "t.json").write_text("no trace")
    save(tmp_path / "nothing.npz", np.zeros(32, np.uint32), description(1, 8))
    named = [a for a in arguments if a == "empty" or a.endswith(("npz", "txt", "json", "pftrace"))]
    paths = [str(tmp_path / a) if a in named else a for a in arguments]
    run = run_thence("inside", *paths)
    assert run.returncode == 2
    assert says in run.stderr.decode()
    assert b"Traceback" not in run.stderr
