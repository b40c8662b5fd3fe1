"""The roofline of places, against sums over the raw file and figures by hand."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import thence
from helpers import FSDP, run_thence
from thence.model.peaks import Peaks
from work_traces import BF16_TFLOPS, H100, Work

DATA = Path(__file__).parents[1] / "data" / "torch"
COMPILED = DATA / "torch_compile_rank0.json.gz"
H200 = {"bfloat16": 132 * 4096 * 1.83 / 1e3, "gbps": 4814.0}


@pytest.fixture(scope="module")
def trace() -> thence.Trace:
    return thence.open(COMPILED)


def raw_products() -> dict[str, tuple[int, float]]:
    """FLOP and kernel time (us) of the matrix products in the raw file, each operator once."""
    with gzip.open(COMPILED) as file:
        events = json.load(file)["traceEvents"]
    operators = {e["args"]["External id"]: e for e in events if e.get("cat") == "cpu_op"}
    times: dict[int, float] = defaultdict(float)
    for event in events:
        if event.get("cat") == "kernel":
            times[event["args"].get("External id", 0)] += event["dur"]
    sums: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for number, time in times.items():
        operator: dict[str, Any] = operators.get(number, {"name": ""})
        if operator["name"] in {"aten::mm", "aten::addmm"}:
            skipped = operator["name"] == "aten::addmm"  # the bias; a third matrix of mm is its output
            left, right = operator["args"]["Input Dims"][skipped : skipped + 2]
            flop, before = sums[operator["name"]]
            sums[operator["name"]] = (flop + 2 * left[0] * left[1] * right[1], before + time)
    return sums


def test_products_are_those_of_the_raw_file(trace: thence.Trace) -> None:
    rows = {row["name"]: row for row in trace.roofline("op").rows.iter_rows(named=True)}
    products = raw_products()
    assert set(products) == {"aten::mm", "aten::addmm"}
    for name, (flop, time_us) in products.items():
        row = rows[name]
        assert row["flop"] == pytest.approx(flop, rel=1e-12)
        assert row["total_ns"] >= 1e3 * time_us - row["count"], "memsets of a product count, too"
        assert row["tflops"] == pytest.approx(flop / time_us / 1e6, rel=2e-3)


@pytest.mark.parametrize("by", ["kernel", "op", "source", "phase", "rank"])
def test_rows_add_up_for_each_kind_of_place(trace: thence.Trace, by: str) -> None:
    found = trace.roofline(by)  # type: ignore[arg-type]
    rows = found.rows
    assert rows["total_ns"].sum() == trace.tables.gpu["duration"].sum()
    assert rows["modelled_ns"].sum() + found.reasons["total_ns"].sum() == rows["total_ns"].sum()
    assert rows["roofline_ns"].sum() + rows["headroom_ns"].sum() == pytest.approx(rows["modelled_ns"].sum())
    assert rows["share"].sum() == pytest.approx(1)
    assert (rows["peak_share"].drop_nulls() <= 1).all()


def test_a_row_names_its_device_unless_it_sums_several() -> None:
    trace = thence.open(FSDP[2:])
    for by, devices in (("rank", {(2, 2), (3, 3)}), ("op", {(None, None)})):
        rows = trace.roofline(by).rows  # type: ignore[arg-type]
        assert set(rows["by"]) == {by}
        most = rows.filter(pl.col("count") > 10)  # an operator may run on one of them alone
        assert set(most.select("rank", "device").rows()) == devices


def test_the_roofline_of_one_product_by_hand(trace: thence.Trace) -> None:
    """The first product of the file: the longer of its FLOP by the peak and its bytes by the bandwidth."""
    found = trace.roofline("op").rows.filter(pl.col("name") == "aten::mm")
    with gzip.open(COMPILED) as file:
        events = json.load(file)["traceEvents"]
    operators = {e["args"]["External id"]: e["args"]["Input Dims"] for e in events if e.get("name") == "aten::mm"}
    whole = 0.0
    for event in events:
        if event.get("cat") == "kernel" and event["args"].get("External id") in operators:
            (m, k), (_, n) = operators[event["args"]["External id"]][:2]
            compute = 2 * m * k * n / H200["bfloat16"] / 1e3
            memory = 2 * (m * k + k * n + m * n) / H200["gbps"]
            whole += min(max(compute, memory), 1e3 * event["dur"])
    assert found["roofline_ns"][0] == pytest.approx(whole, rel=1e-3)


def test_a_replay_without_operators_has_no_roofline() -> None:
    found = thence.open(DATA / "graph_replay_rank0.json.gz").roofline("kernel")
    assert found.totals["flop_modelled_ns"] == found.totals["bytes_only_ns"] == 0
    assert found.rows["bound"].unique().to_list() == ["unknown"]
    assert found.rows["tflops"].null_count() == found.rows.height, "unknown is not zero"
    assert found.reasons["code"].to_list() == ["no_operator"]


def test_peaks_of_the_user_replace_ours(trace: thence.Trace) -> None:
    half = Peaks("ours", {"bfloat16": H200["bfloat16"] / 2}, H200["gbps"], "given")
    name = pl.col("name") == "aten::mm"
    known, given = (trace.roofline("op", peaks).rows.filter(name) for peaks in (None, half))
    assert given["roofline_ns"][0] > known["roofline_ns"][0]
    assert given["flop"][0] == known["flop"][0]


def test_a_device_of_unknown_name_is_refused(tmp_path: Path) -> None:
    text = gzip.decompress(COMPILED.read_bytes()).replace(b"NVIDIA H200", b"NVIDIA Unheard")
    (tmp_path / "trace.json").write_bytes(text)
    with pytest.raises(thence.MissingData, match=r"peaks of NVIDIA Unheard are not known; --peak"):
        thence.open(tmp_path / "trace.json").roofline()
    arguments = ("roofline", tmp_path / "trace.json", "--by", "op", "--format", "json")
    done = run_thence(*arguments, "--peak", "fp16=989", "--bandwidth", "4814")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == 1
    assert {"by", "peaks", "totals", "rows", "reasons", "soundness", "warnings"} <= set(document)
    assert {row["code"] for row in document["reasons"]} >= {"no_peak"}


@pytest.mark.parametrize(
    "options", [["--peak", "bf16=989"], ["--bandwidth", "3"], ["--peak", "bf17=1", "--bandwidth", "3"]]
)
def test_peaks_that_say_too_little_are_refused(options: list[str]) -> None:
    done = run_thence("roofline", COMPILED, *options)
    assert done.returncode == 2
    assert b"--peak" in done.stderr


def test_peaks_that_cannot_be_measured_are_refused_before_the_program_runs(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    done = run_thence("record", "-o", tmp_path / "out", "--with", "peaks", "--", "touch", ran)
    assert done.returncode == 2
    assert b"thence: peaks could not be measured: measuring peaks needs" in done.stderr
    assert not ran.exists()
    assert not (tmp_path / "out").exists()


def test_products_in_wide_types_are_named_with_their_share(tmp_path: Path) -> None:
    """100 us of FP32 that the name of a kernel tells, 200 us of TF32 of an operator, 100 us of bfloat16."""
    made, square = Work(), [[4096, 4096], [4096, 4096]]
    made.call("aten::linear", square, ("ampere_sgemm_128x64_tn", 100.0), types=["unknown"])
    made.call("aten::mm", square, ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n", 200.0), types=["float", "float"])
    made.call("aten::mm", square, ("gemm_bf16", 100.0))
    found = made.opened(tmp_path).roofline("kernel")
    assert found.wide_ns == {"tf32": 200_000, "float32": 100_000}
    assert found.wide_share == 0.75
    assert "in TF32 for 50.0 % and in FP32 for 25.0 %" in found.wide_text
    assert "2.0 and 14.8 times" in found.wide_text, "989.4 TFLOP/s by 494.7 and 66.9"
    assert "torch.set_float32_matmul_precision" in found.wide_text
    assert found.wide_text in found.remarks()
    narrow = thence.open(DATA / "torch_eager_rank0.json.gz").roofline("kernel")
    assert narrow.wide_text == ""


def test_mfu_leaves_out_what_is_recomputed(tmp_path: Path) -> None:
    """Four steps of 1 ms with a product of 4096^3 each, and in the backward pass of a checkpoint the same again."""
    made = Work()
    for number in range(4):
        start = 1000.0 * number
        made.host = start + 1
        made.range(f"ProfilerStep#{number}", "user_annotation", start, start + 1000.0)
        made.call("aten::mm", [[4096, 4096], [4096, 4096]], ("gemm_bf16", 200.0))
        made.call("aten::mm", [[4096, 4096], [4096, 4096]], ("gemm_bf16", 250.0))
    trace = made.opened(tmp_path)
    found = trace.roofline("kernel")
    once = 2 * 4096**3
    (row,) = found.steps.iter_rows(named=True)
    assert row["steps"] == 3, "the first is left out"
    assert row["flop"] == 3 * 2 * once
    assert row["hfu"] == pytest.approx(2 * once / BF16_TFLOPS / 1e9, rel=1e-6), "over a step of 1 ms"
    assert row["mfu"] == row["hfu"], "nothing tells that the second product is recomputed"
    assert row["known_share"] == 1


def test_what_if_work_ran_at_its_roofline(tmp_path: Path) -> None:
    """Products of 250 us that the host launches ahead of the device: at 80 % of the roofline each is shorter."""
    made = Work()
    for _ in range(40):
        made.call("aten::mm", [[4096, 4096], [4096, 4096]], ("gemm_bf16", 250.0))
        made.call("aten::strange", [[8]], ("other", 20.0))
    trace = made.opened(tmp_path)
    ideal_us = 2 * 4096**3 / BF16_TFLOPS / 1e6
    rows = {
        row["change"]: row
        for row in trace.whatif(at_roofline=["op:mm=0.8", "op:strange", "op:aten"]).rows.iter_rows(named=True)
    }
    gained = rows["at-roofline op:mm=0.8"]
    assert gained["gain_ns"] == pytest.approx(40 * 1e3 * (250 - ideal_us / 0.8), rel=0.01)
    assert rows["at-roofline op:strange"]["verdict"] == "absent", "its roofline is not known"
    assert rows["at-roofline op:aten"]["modelled_share"] == pytest.approx(250 / 270)


@pytest.mark.parametrize("text", ["op:mm=0", "op:mm=1.5", "cause:host", "mm", "op:"])
def test_changes_to_a_roofline_that_cannot_be_are_refused(trace: thence.Trace, text: str) -> None:
    with pytest.raises(thence.UsageError, match="--at-roofline takes"):
        trace.whatif(at_roofline=[text])


def test_a_part_of_the_work_has_no_mfu(trace: thence.Trace) -> None:
    assert trace.roofline("kernel").steps.height == 1
    assert trace.select(only="gemm|nvjet").roofline("kernel").steps.is_empty()


def test_rows_are_named_as_in_a_report(trace: thence.Trace) -> None:
    for by in ("module", "op"):
        found, reported = trace.roofline(by).rows, trace.report(by).rows
        columns = ["name", "reason", "total_ns"]
        assert found.select(columns).sort("name").equals(reported.select(columns).sort("name"))
        nowhere = found.filter(pl.col("reason").is_not_null())
        assert nowhere["name"].str.starts_with("[").all()
    assert "[no nn.Module calls recorded]" in trace.roofline("module").rows["name"].to_list()


def test_a_report_has_the_work_of_each_row(tmp_path: Path) -> None:
    """A product of 4096^3 in 250 us, an addition of 2^27 elements in 400 us, and what has no model."""
    made = Work()
    made.call("aten::mm", [[4096, 4096], [4096, 4096]], ("gemm_bf16", 250.0))
    made.call("aten::add", [[1 << 27], [1 << 27]], ("add", 400.0))
    made.call("aten::strange", [[8]], ("other", 20.0))
    rows = {row["name"]: row for row in made.opened(tmp_path).report("op").rows.iter_rows(named=True)}
    flop, moved = 2 * 4096**3, 3 * 2 * 2**27
    product, addition = rows["aten::mm"], rows["aten::add"]
    assert (product["flop"], product["flop_ns"], product["modelled_ns"]) == (flop, 250_000, 250_000)
    assert product["tflops"] == pytest.approx(flop / 250e-6 / 1e12)
    assert product["headroom_ns"] == round(250_000 - flop / BF16_TFLOPS / 1e3)
    assert (addition["flop"], addition["tflops"], addition["bytes"]) == (None, None, moved)
    assert addition["headroom_ns"] == round(400_000 - moved / 3352)
    assert (product["bound"], addition["bound"]) == ("compute", "memory")
    assert addition["gbps"] == pytest.approx(moved / 400_000)
    assert addition["peak_share"] == pytest.approx(moved / 400_000 / 3352, abs=1e-5)
    assert [rows["aten::strange"][name] for name in ("flop", "bytes", "modelled_ns", "gbps", "bound")] == [None] * 5


def test_shares_of_what_is_attainable_stand_beside_those_of_the_data_sheet(tmp_path: Path) -> None:
    made = Work()
    made.call("aten::mm", [[4096, 4096], [4096, 4096]], ("gemm_bf16", 250.0))
    made.call("aten::strange", [[8]], ("other", 20.0))
    trace = made.opened(tmp_path)
    assert trace.roofline("op").rows["attainable_share"].null_count() == 2
    assert "of attainable" not in str(trace.roofline("op").views())
    meta = trace.recorded.meta
    slower = tuple(replace(device, clock_mhz=1220.0) for device in meta.devices)  # two thirds of 1.83 GHz
    at_clock = thence.Trace(replace(trace.recorded, meta=replace(meta, devices=slower))).roofline("op")
    row = at_clock.rows.filter(pl.col("name") == "aten::mm").row(0, named=True)
    assert row["attainable_share"] == pytest.approx(1.5 * row["peak_share"])
    assert any("at 1,220 MHz, the clock that was sampled" in text for text in at_clock.remarks())
    assert any("1,220 MHz in the median while it worked, 66.7 % of the 1,830 MHz" in t for t in at_clock.remarks())
    assert at_clock.to_json()["clocks"].to_dicts() == [{"rank": 0, "device": 0, "mhz": 1220.0, "peak_mhz": 1830.0}]
    kept = ({"measured_peaks": {"device": H100, "gbps": 3000.0, "bfloat16": BF16_TFLOPS / 1.25}},)
    measured = thence.Trace(replace(trace.recorded, meta=replace(meta, devices=slower, facts=kept))).roofline("op")
    found = measured.rows.filter(pl.col("name") == "aten::mm").row(0, named=True)
    assert found["attainable_share"] == pytest.approx(1.25 * found["peak_share"]), "measured before the clock"


def test_shapes_are_a_kind_of_place(trace: thence.Trace) -> None:
    rows = trace.report("shape").rows
    names = rows["name"].cast(pl.String).drop_nulls().to_list()
    assert any(name.startswith("aten::mm bf16[2048,512] bf16[512,2048]") for name in names)
    assert rows["total_ns"].sum() == trace.tables.gpu["duration"].sum()


def test_diff_tells_other_work_from_other_use(tmp_path: Path) -> None:
    """Before: 250 us for 4096^3. After: twice the columns in 600 us, so 100 us more than twice the time."""
    sides = []
    for name, columns, duration in (("before", 4096, 250.0), ("after", 8192, 600.0)):
        made = Work()
        for number in range(5):
            made.host = made.now = 1000.0 * number
            made.range(f"ProfilerStep#{number}", "user_annotation", made.host, made.host + 1000.0)
            made.call("aten::mm", [[4096, 4096], [4096, columns]], ("gemm_bf16", duration))
        (tmp_path / name).mkdir()
        sides.append(made.opened(tmp_path / name))
    found = sides[0].diff(sides[1])
    assert found.work is not None
    row = found.work.filter(pl.col("by") == "op").row(0, named=True)
    ideal_ns = 2 * 4096**3 / BF16_TFLOPS / 1e3
    assert row["difference_ns"] == pytest.approx(350_000)
    assert row["work_ns"] == pytest.approx(ideal_ns, rel=1e-6)
    assert row["use_ns"] == pytest.approx(350_000 - ideal_ns, rel=1e-6)
    assert any("by the work (FLOP +100.0 %" in text for text in found.explanation)


def test_work_of_one_side_alone_is_not_compared() -> None:
    known, unknown = (thence.open(DATA / name) for name in ("torch_eager_rank0.json.gz", "graph_replay_rank0.json.gz"))
    assert known.diff(unknown).work is None


def test_frames_by_headroom_add_up_to_it(trace: thence.Trace) -> None:
    flame = trace.flame("ops", weight="headroom")
    assert flame.total_ns == pytest.approx(trace.roofline("kernel").totals["headroom_ns"], abs=trace.tables.gpu.height)
    assert flame.title.startswith("Headroom by")
    assert not flame.nodes["idle"].fill_null(value=False).any()


def test_the_chart_has_the_rows_and_the_roofs(trace: thence.Trace) -> None:
    chart = trace.plot_roofline("op")
    frame = chart.to_frame()
    dots = {row["name"]: row for row in frame.iter_rows(named=True) if row["name"]}
    assert dots["aten::mm"]["tflops"] == trace.roofline("op").rows.filter(pl.col("name") == "aten::mm")["tflops"][0]
    roof = frame.filter(pl.col("series").str.starts_with("bfloat16"))
    assert roof["tflops"].max() == pytest.approx(H200["bfloat16"])
    assert roof["intensity"][1] == pytest.approx(1e3 * H200["bfloat16"] / H200["gbps"]), "the ridge"
    assert "<svg" in chart.to_html()


def test_counters_of_flop_return_to_zero(trace: thence.Trace) -> None:
    rate = trace.timeline().counters.filter(pl.col("counter") == "FLOP rate")
    assert rate["value"].max() > 100
    assert rate["value"][-1] == 0


def test_flop_per_second_say_of_what_share_of_a_rows_time_they_are(tmp_path: Path) -> None:
    """One row of a product of 250 us with FLOP and an addition of 750 us with bytes alone: a quarter."""
    made = Work()
    made.call("aten::mm", [[4096, 4096], [4096, 4096]], ("gemm_bf16", 250.0))
    made.call("aten::add", [[1 << 27], [1 << 27]], ("add", 750.0))
    found = made.opened(tmp_path).roofline("rank")
    (share,) = found.rows["flop_share"].to_list()
    assert share == pytest.approx(0.25)
    assert found.rows["modelled_share"].item() == pytest.approx(1.0)
    (dot,) = found.to_frame().select(pl.col("flop_share") * pl.col("total_ns")).to_series().to_list()
    assert dot == pytest.approx(250_000)


def test_headroom_of_collectives_is_said_to_hold_waits(trace: thence.Trace) -> None:
    text = "the headroom of work bound by a link includes waits of collectives for other ranks"
    assert text in thence.open(DATA / "torch_fsdp_rank0.json.gz").roofline("kernel").remarks()
    assert text not in trace.roofline("kernel").remarks()
