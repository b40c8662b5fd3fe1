"""The data type of a kernel is that of its name, or of what the trace describes; else it is unknown."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import polars as pl
import pytest

import thence
from helpers import FSDP, recording
from thence.attribution.work.data_types import data_type_of_name, data_types


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(Params)", "float32"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_execute_kernel__5x_cublas", "float32"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_nt_n_tilesize128x128x32", "tf32"),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_bf16_tn_n_tilesize128x128x64", "bfloat16"),
        ("ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_nn", "float16"),
        ("nvjet_sm90_tst_128x64_64x8_1x2_h_bz_NNT", "bfloat16"),
        ("nvjet_sm90_hsh_128x64_64x8_1x2_h_bz_NNT", "float16"),
        ("void softmax_warp_forward<c10::BFloat16, float, float, 8, false>(float*)", "bfloat16"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)", "float32"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<double, Sum>>(R)", "float64"),
        ("void cast_kernel<c10::Half, c10::BFloat16>(void*)", None),
        ("void cast_kernel<float, double>(void*)", None),
        ("void fft<c10::complex<float>>(void*)", None),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64", None),
        ("triton_poi_fused_gelu_view_8", None),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "bfloat16"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", None),
        ("void half_way_kernel(int)", None),
    ],
)  # fmt: skip
def test_by_the_name(kernel: str, expected: str | None) -> None:
    assert data_type_of_name(kernel) == expected


def test_a_collective_whose_name_says_nothing_has_the_type_of_its_elements() -> None:
    spelled = {"Float": "float32", "BFloat16": "bfloat16"}
    events = json.loads(gzip.decompress(FSDP[0].read_bytes()))["traceEvents"]
    written = [e["args"]["dtype"] for e in events if e.get("cat") == "kernel" and "AllGather_RING" in e["name"]]
    trace = thence.open(FSDP[0])
    gathers = trace.tables.gpu["name"].cast(pl.String).str.contains("AllGather_RING")
    counted = Counter(data_types(trace.tables).filter(gathers).cast(pl.String))
    assert counted == Counter(spelled[name] for name in written)
    assert counted.total() > 0


@pytest.mark.parametrize("name", ["torch_eager_rank0", "torch_compile_rank0"])
def test_every_nanosecond_has_a_type_or_the_reason_why_not(name: str) -> None:
    trace = thence.open(recording(name))
    gpu = trace.tables.gpu
    rows = trace.report("dtype").rows
    assert rows["total_ns"].sum() == gpu["duration"].sum()
    assert set(rows.filter(~pl.col("attributed"))["reason"]) == {"no_data_type"}
    products = gpu.filter(pl.col("name").cast(pl.String).str.starts_with("nvjet_sm90_tst_"))["duration"].sum()
    assert rows.filter(pl.col("name") == "bfloat16")["total_ns"].sum() >= products > 0


def test_copies_compute_nothing() -> None:
    trace = thence.open(recording("torch_eager_rank0"))
    copies = trace.tables.gpu["kind"] != "kernel"
    assert copies.any()
    assert data_types(trace.tables).filter(copies).null_count() == copies.sum()
