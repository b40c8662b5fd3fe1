"""GPU metrics of Nsight Systems, in exports made by hand: no recording of ours has any.

Rows are as the user guide's schema describes them, names and units as in public exports of nsys 2023 to 2025.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import thence
from nsight_data import thread, written

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import polars as pl

SMS, BANDWIDTH, HERTZ = 132, 4_000_000_000_000, 1_500_000_000
US = 1000
GPU = {"id": 0, "name": "NVIDIA H200", "memoryBandwidth": BANDWIDTH, "smCount": SMS, "cuDevice": 0,
       "computeMajor": 9, "computeMinor": 0}  # fmt: skip
METRICS = (
    "GPC Clock Frequency [MHz]",
    "SMs Active [Throughput %]",
    "Tensor Active [Throughput %]",
    "DRAM Read Bandwidth [Throughput %]",
    "DRAM Write Bandwidth [Throughput %]",
    "SM Issue [Throughput %]",
)
PRODUCT, COPY = (HERTZ, 100, 80, 10, 5, 40), (HERTZ, 50, 0, 60, 30, 3)
"""Values of the metrics while the two kernels run: for 400 and 600 us, 50 times in turn."""


def names(type_id: int = 0x100000000, metrics: Sequence[str] = METRICS) -> list[dict[str, object]]:
    return [{"typeId": type_id, "metricId": n, "metricName": name} for n, name in enumerate(metrics)]


def rows(times: Sequence[int], values: Sequence[Sequence[int]], type_id: int = 0x100000000) -> list[dict[str, object]]:
    return [
        {"timestamp": time, "typeId": type_id, "metricId": number, "value": value}
        for time, sample in zip(times, values, strict=True)
        for number, value in enumerate(sample)
    ]


def kernels(device: int = 0, process: int = 5) -> list[dict[str, object]]:
    begins = [(start, 1, 400) for start in range(0, 50_000, 1000)]
    begins += [(start, 2, 600) for start in range(400, 50_000, 1000)]
    return [
        {"start": begin * US, "end": (begin + lasting) * US, "deviceId": device, "streamId": 7, "correlationId": begin,
         "globalPid": thread(process, 0), "demangledName": name, "shortName": name}
        for begin, name, lasting in sorted(begins)
    ]  # fmt: skip


def tables(**changed: Any) -> Mapping[str, Sequence[Mapping[str, object]]]:
    samples = [(time, PRODUCT if (time - 100) % 1000 < 400 else COPY) for time in range(100, 50_001, 100)]
    return {
        "CUPTI_ACTIVITY_KIND_KERNEL": kernels(),
        "StringIds": [{"id": 1, "value": "gemm_bf16"}, {"id": 2, "value": "copy"}],
        "TARGET_INFO_GPU": [GPU],
        "TARGET_INFO_GPU_METRICS": names(),
        "GPU_METRICS": rows([time * US for time, _ in samples], [values for _, values in samples]),
        **changed,
    }


def counters(path: Path, **changed: Any) -> pl.DataFrame:
    return thence.open(written(path / "a.sqlite", tables(**changed))).tables.counters


def test_shares_become_amounts_of_kernels(tmp_path: Path) -> None:
    trace = thence.open(written(tmp_path / "a.sqlite", tables()))
    assert trace.tables.counters.height == 500
    answer = trace.roofline(by="kernel")
    found = {row["name"]: row["measured"] for row in answer.to_frame().to_dicts()}
    # 20 ms of products at 80 % of 132 multiprocessors with 4 x 1,024 FLOP in each of 1.5 billion cycles a second
    assert found["gemm_bf16"]["flop"] == pytest.approx(0.02 * 0.8 * 132 * 4 * 1024 * 1.5e9)
    assert found["gemm_bf16"]["sm_active_share"] == pytest.approx(1.0)
    assert found["gemm_bf16"]["clock_mhz"] == pytest.approx(1500)
    assert found["gemm_bf16"]["dram_read_bytes"] == pytest.approx(0.02 * 0.10 * 4e12)
    # 30 ms of copies at 60 % of 4 TB/s
    assert found["copy"]["dram_read_bytes"] == pytest.approx(0.03 * 0.60 * 4e12)
    assert found["copy"]["dram_write_bytes"] == pytest.approx(0.03 * 0.30 * 4e12)
    assert found["copy"]["sm_active_share"] == pytest.approx(0.5)
    assert found["copy"]["sampled_share"] == pytest.approx(1.0)
    assert answer.counters is not None
    assert answer.counters.interval_ns == 100 * US
    out = tmp_path / "a.pftrace"
    trace.convert(out)
    assert b"counted dram read" in out.read_bytes()


def test_a_gap_begins_a_window_and_old_clocks_are_in_mhz(tmp_path: Path) -> None:
    times = [(time + (40_000 if time > 500 else 0)) * US for time in range(100, 1001, 100)]
    found = counters(tmp_path, GPU_METRICS=rows(times, [(1500, *PRODUCT[1:])] * 10))
    assert found["start"].to_list() == [time - 100 * US for time in times]
    assert found["sm_elapsed_cycles"].to_list() == [pytest.approx(150_000)] * 10
    assert found["tensor_cycles"].to_list() == [pytest.approx(0.8 * 150_000 * 132 * 4)] * 10


def test_devices_are_those_of_the_process(tmp_path: Path) -> None:
    """The program sees GPU 3 as its device 0."""
    three = 0x100000003
    found = counters(
        tmp_path,
        TARGET_INFO_GPU=[{**GPU, "id": 3, "cuDevice": 3}, GPU],
        TARGET_INFO_CUDA_DEVICE=[{"gpuId": 3, "cudaId": 0, "pid": 5}],
        TARGET_INFO_GPU_METRICS=[*names(), *names(three)],
        GPU_METRICS=[*rows([100 * US, 200 * US], [COPY, COPY]), *rows([100 * US, 200 * US], [PRODUCT, PRODUCT], three)],
    )
    assert found["device"].to_list() == [0, 0]
    assert found["dram_read_bytes"].to_list() == [pytest.approx(1e-4 * 0.1 * 4e12)] * 2


@pytest.mark.parametrize(
    "changed",
    [
        {"GPU_METRICS": rows([100 * US, 200 * US], [(-5, 101, -1, 1 << 40, 3, 1)] * 2)},
        {"GPU_METRICS": rows([-500, 1 << 61], [PRODUCT] * 2)},
        {"GPU_METRICS": [{"timestamp": None, "typeId": None, "metricId": None, "value": None}]},
        {"TARGET_INFO_GPU_METRICS": names(metrics=["Unknown [%]"] * 6)},
        {"TARGET_INFO_GPU": [{"id": 9, "name": "x"}]},
        {"TARGET_INFO_GPU": [{**GPU, "smCount": -1, "memoryBandwidth": None}]},
    ],
)
def test_what_is_impossible_is_left_out(tmp_path: Path, changed: Any) -> None:
    trace = thence.open(written(tmp_path / "a.sqlite", tables(**changed)))
    found = trace.tables.counters
    for column in ("tensor_cycles", "sm_elapsed_cycles", "sm_active_cycles", "dram_read_bytes"):
        values = found[column].drop_nulls()
        assert ((values >= 0) & (values < 1e15)).all()
    assert trace.report("kernel").to_frame().height == 2
