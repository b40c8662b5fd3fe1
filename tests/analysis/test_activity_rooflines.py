"""The roofline of an activity, its bound and its reasons, by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import DATA
from thence.analysis.activity_rooflines import activity_rooflines, known_peaks
from thence.model.peaks import Peaks
from work_traces import BF16_TFLOPS, GBPS, Work

if TYPE_CHECKING:
    from pathlib import Path


def rated(trace: thence.Trace, given: Peaks | None = None) -> list[dict[str, Any]]:
    tables = trace.tables
    rows = activity_rooflines(tables, known_peaks(tables, given))
    return list(rows.with_columns(name=tables.gpu["name"].cast(pl.String)).iter_rows(named=True))


def product(m: int, k: int, n: int) -> tuple[float, float]:
    """Ns of a bf16 product at the peak, and of its bytes at the memory's bandwidth."""
    return 2 * m * k * n / BF16_TFLOPS / 1e3, 2 * (m * k + k * n + m * n) / GBPS


def test_compute_memory_and_latency(tmp_path: Path) -> None:
    made = Work()
    made.call("aten::mm", [[4096, 4096], [4096, 4096]], ("gemm_bf16", 200.0))
    made.call("aten::mm", [[1, 8192], [8192, 8192]], ("gemv_bf16", 60.0))
    made.call("aten::mm", [[8, 8], [8, 8]], ("gemm_bf16", 3.0))
    large, narrow, tiny = rated(made.opened(tmp_path))
    assert (large["bound"], large["roofline_ns"]) == ("compute", pytest.approx(product(4096, 4096, 4096)[0]))
    assert (narrow["bound"], narrow["roofline_ns"]) == ("memory", pytest.approx(product(1, 8192, 8192)[1]))
    assert tiny["bound"] == "latency"
    assert large["compute_ns"] == large["roofline_ns"]


def test_bytes_that_fit_the_cache_may_be_faster_than_memory_and_others_may_not(tmp_path: Path) -> None:
    made = Work()
    small, large = [1 << 20], [1 << 27]  # 2 MB and 268 MB a tensor
    made.call("aten::add", [small, small], ("add", 6 * 2**20 / 1e7))  # 10 TB/s
    made.call("aten::add", [large, large], ("add", 6 * 2**27 / 1e7))
    cached, impossible = rated(made.opened(tmp_path))
    assert cached["bound"] == "cache"
    assert cached["roofline_ns"] == cached["duration"], "not more than its time"
    assert (impossible["reason"], impossible["bytes"], impossible["roofline_ns"]) == ("exceeds", None, None)


def test_flop_above_the_peak_are_counted_wrong_but_not_above_a_peak_of_the_user(tmp_path: Path) -> None:
    made = Work()
    made.call("aten::mm", [[4096, 4096], [4096, 4096]], ("gemm_bf16", 100.0))  # 1,374 TFLOP/s
    trace = made.opened(tmp_path)
    assert rated(trace)[0]["reason"] == "exceeds"
    given = rated(trace, Peaks("ours", {"bfloat16": 500.0}, 3000.0, "given"))[0]
    assert (given["reason"], given["roofline_ns"]) == (None, given["duration"])


def test_float32_that_is_faster_than_its_peak_was_computed_in_tf32(tmp_path: Path) -> None:
    made = Work()
    for duration in (3000.0, 500.0):  # 46 and 275 TFLOP/s of 67
        made.call("aten::mm", [[4096, 4096], [4096, 4096]], ("gemm", duration), types=["float", "float"])
    slow, fast = rated(made.opened(tmp_path))
    assert (slow["dtype"], fast["dtype"]) == ("float32", "tf32")


def test_communication_and_copies_have_the_ceilings_of_their_links(tmp_path: Path) -> None:
    made = Work()
    described = {
        "Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "Group size": 4,
        "dtype": "BFloat16", "Process Group Ranks": "[0, 1, 2, 3]",
    }  # fmt: skip
    made.activity(
        "kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 50.0, **described
    )
    made.activity("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 50.0)
    made.activity("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 50.0, bytes=1 << 20)
    made.activity("gpu_memcpy", "MemcpyD2H", 50.0, bytes=1 << 20)
    described_one, silent, copy, of_xla = rated(made.opened(tmp_path))
    assert described_one["bound"] == "link"
    assert described_one["bytes"] == pytest.approx(2 * 3 / 4 * 2 * (1 << 20)), "as bus bandwidth counts them"
    assert described_one["roofline_ns"] == pytest.approx(described_one["bytes"] / 450)
    assert silent["reason"] == "communication"
    assert (copy["bound"], copy["roofline_ns"]) == ("link", pytest.approx((1 << 20) / 64))
    assert (of_xla["bound"], of_xla["roofline_ns"]) == (copy["bound"], copy["roofline_ns"])


def test_what_is_unknown_has_its_reason(tmp_path: Path) -> None:
    made = Work()
    made.call("aten::strange", [[8]], ("strange", 5.0))
    made.activity("kernel", "nobody", 5.0)
    made.call("aten::mm", [[64, 64], [64, 64]], ("gemm", 50.0), types=["c10::complex<float>"] * 2)
    assert [row["reason"] for row in rated(made.opened(tmp_path))] == ["no_model", "no_operator", "no_peak"]


def test_work_of_jax_outside_of_programs_is_missed_by_no_operator() -> None:
    """PyTorch's record_shapes is no advice for XLA's autotuner."""
    tables = thence.open(DATA / "jax" / "recording").tables
    found = activity_rooflines(tables, known_peaks(tables, Peaks("GPU", {"bfloat16": 1e3}, 1e4, "given")))
    outside = found.filter(tables.gpu["program"].is_null(), tables.gpu["kind"] == "kernel")
    assert outside["reason"].unique().to_list() == ["no_program"]
    assert "no_operator" not in found["reason"].to_list()
