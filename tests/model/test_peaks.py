"""Peaks of GPUs against their data sheets: dense, in TFLOP/s, and GB/s."""

from __future__ import annotations

import pytest

from thence.model.peaks import DTYPES, peaks_of

DATA_SHEETS = {
    # name as the driver gives it: fp64 by tensor cores, fp32, tf32, bf16, 8 bits, GB/s
    "NVIDIA A100-SXM4-80GB": (19.5, 19.5, 156, 312, 624, 2039),
    "NVIDIA A100-SXM4-40GB": (19.5, 19.5, 156, 312, 624, 1555),
    "NVIDIA A100 80GB PCIe": (19.5, 19.5, 156, 312, 624, 1935),
    "NVIDIA H100 80GB HBM3": (67, 67, 494.7, 989.4, 1979, 3350),
    "NVIDIA H100 PCIe": (51, 51, 378, 756, 1513, 2039),
    "NVIDIA H100 NVL": (60, 60, 418, 835, 1671, 3938),
    "NVIDIA H200": (67, 67, 494.7, 989.4, 1979, 4800),
    "NVIDIA B200": (37, 75, 1125, 2250, 4500, 8000),
    "NVIDIA L40S": (1.4, 91.6, 183, 362, 733, 864),
    "NVIDIA L4": (0.47, 30.3, 60, 121, 242, 300),
    "NVIDIA A10": (0.49, 31.2, 62.5, 125, 250, 600),
    "AMD Instinct MI300X": (163.4, 163.4, 653.7, 1307, 2615, 5300),
}


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_peaks_are_those_of_the_data_sheet(name: str) -> None:
    fp64, fp32, tf32, bf16, eight, gbps = DATA_SHEETS[name]
    peaks = peaks_of(name)
    assert peaks is not None
    assert peaks.tflops["float64"] == pytest.approx(fp64, rel=0.06)
    assert peaks.tflops["float32"] == pytest.approx(fp32, rel=0.03)
    assert peaks.tflops["tf32"] == pytest.approx(tf32, rel=0.03)
    assert peaks.tflops["bfloat16"] == pytest.approx(bf16, rel=0.03)
    assert peaks.tflops["float16"] == peaks.tflops["bfloat16"]
    assert peaks.tflops["int8"] == pytest.approx(eight, rel=0.03)
    assert peaks.gbps == pytest.approx(gbps, rel=0.005)
    assert set(peaks.tflops) <= set(DTYPES)


@pytest.mark.parametrize("name", ["NVIDIA H20", "NVIDIA GB300", "Tesla T4", "", "NVIDIA L400", "NVIDIA H2000"])
def test_a_gpu_that_is_not_listed_has_no_peak(name: str) -> None:
    assert peaks_of(name) is None
