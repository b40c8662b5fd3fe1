"""Groups of kernels: the patterns, their order, and what HLO says where names do not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from helpers import DATA, event, kernel, launch, opened, recording
from thence.analysis.grouping.kernel_groups import GROUPS, KERNEL_PATTERNS, OPCODE_PATTERNS, Patterns
from thence.analysis.grouping.kernel_groups import kernel_groups as groups_of
from thence.attribution.attribute import attribute
from thence.model.hlo import COMPUTATIONS, FRAMES, INSTRUCTIONS, LOOPS, HloModule
from thence.model.tables import COLLECTIVES, GPU, PROGRAMS, Tables

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

JAX = DATA / "jax"

NAMES = {
    "GEMM": [
        "ampere_bf16_s16816_tn_128x64_ldg8_f2f",
        "ampere_s16816_128x128_nn",
        "turing_h1688_nt",
        "input_dot_fusion",
        "loop_convert_dot_fusion.2",
        "nvjet_sm90_tst_128x64_64x8_1x2_h_bz_NNT",
        "ampere_sgemm_128x64_nn",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_nn_align8>(Params)",
        "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nchw_tilesize256x64x32",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasSplitKParams<float>)",
        "void gemv2T_kernel_val<int, int, float, float>(float)",
        "gemm_fusion_dot_general_2",
        "triton_gemm_dot.4",
        "triton_tem_fused_addmm_3",
        "Cijk_Alik_Bljk_SB_MT64x64x16_SE_K1",
        "matmul_kernel",
        "fused_moe_kernel",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>(Flash_fwd_params)",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, float*)",
        "_attn_fwd",
        "triton_tem_fused_flex_attention_0",
    ],
    "communication": [
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWork*)",
        "void vllm::cross_device_reduce_2stage<__half, 8>(vllm::RankData*)",
        "void two_shot_all_reduce_kernel<c10::BFloat16>(unsigned long)",
        "all_reduce_18_0_fusion_1",
        "all-gather-start.3",
        "reduce-scatter.1",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>()",
        "triton_poi_fused_gelu_view_8",
        "triton_poi_fused__scaled_dot_product_flash_attention_clone_view_5",
        "triton_poi_fused_addmm_relu_1",
        "loop_add_fusion_4",
        "wrapped_convert_10",
        "loop_convert_reduce_precision_fusion",
        "loop_transpose_multiply_fusion",
        "loop_dotted_line_fusion",
    ],
    "reduction": [
        "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16>>()",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>(int)",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForwardReg<c10::BFloat16>()",
        "triton_red_fused_mm_0",
        "triton_per_fused_native_layer_norm_3",
        "triton_softmax_31",
        "input_reduce_fusion_1",
        "loop_add_reduce_fusion.2",
        "wrapped_reduce",
    ],
    "copy": [
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>()",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, 3>()",
        "wrapped_transpose",
        "loop_dynamic_update_slice_fusion.3",
        "loop_slice_concatenate_fusion",
        "wrapped_concatenate",
        "copy_fusion",
        "memcpy128",
    ],
    "other": [
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float>()",
        "input_scatter_fusion_1",
        "fusion_280",
        "my_kernel",
        "",
    ],
}  # fmt: skip


def tables(rows: Iterable[tuple[str, str, str | None]], modules: tuple[HloModule, ...] = ()) -> Tables:
    """Activities of kind, name and HLO instruction; all of one program where there is a module."""
    kinds, names, instructions = zip(*rows, strict=True)
    count = len(names)
    columns = {
        "rank": [0] * count, "device": [0] * count, "stream": [7] * count, "kind": kinds, "name": names,
        "start": range(count), "duration": [1] * count, "hlo": instructions,
    }  # fmt: skip
    programs = PROGRAMS.empty()
    if modules:
        columns["program"] = [0] * count
        programs = PROGRAMS.frame({"rank": [0], "device": [0], "hlo": [0]})
    return Tables(gpu=GPU.frame(columns), programs=programs, hlo=modules)


def groups(of: Tables, *pairs: tuple[str, str]) -> list[str]:
    """By names and opcodes alone: no collective is described."""
    undescribed = dataclasses.replace(attribute(of), collectives=COLLECTIVES.empty())
    return groups_of(undescribed, Patterns(pairs)).to_list()


def test_a_kernel_has_its_group() -> None:
    right = [(group, name) for group, names in NAMES.items() for name in names]
    found = groups(tables([("kernel", name, None) for _, name in right]))
    assert list(zip(found, (name for _, name in right), strict=True)) == right


def test_every_group_of_the_tables_is_listed() -> None:
    for name, _ in (*KERNEL_PATTERNS, *OPCODE_PATTERNS):
        assert name in GROUPS
    assert set(NAMES) == set(GROUPS)


def test_copies_and_sets_are_copies_whatever_their_name() -> None:
    rows = [("memcpy", "Memcpy DtoD (gemm)", None), ("memset", "Memset (Device)", None)]
    assert groups(tables(rows)) == ["copy", "copy"]


def module(*instructions: tuple[int, str, str, str | None, str | None, list[int]]) -> HloModule:
    """Instructions: computation (0 is the entry), name, opcode, custom call target, op_name, called."""
    columns = ("computation", "name", "opcode", "custom_call_target", "op_name", "called")
    schema = {name: INSTRUCTIONS[name] for name in columns}
    frame = pl.DataFrame(instructions, schema=schema, orient="row")
    frame = frame.with_columns(id=pl.int_range(pl.len()), frame=pl.lit(0, pl.Int32))
    nothing = {n: [] if isinstance(t, pl.List) else None for n, t in INSTRUCTIONS.items()}
    missing = [pl.lit(nothing[n], t).alias(n) for n, t in INSTRUCTIONS.items() if n not in frame.columns]
    frame = frame.with_columns(missing).with_columns(top_level=pl.col("computation") == 0)
    empty = [pl.DataFrame(schema=s) for s in (COMPUTATIONS, LOOPS, FRAMES)]
    return HloModule("jit_f", 1, None, 0, None, None, frame.select(*INSTRUCTIONS), *empty)


def of_hlo(*instructions: tuple[int, str, str, str | None, str | None, list[int]]) -> str:
    """Group of a kernel whose name says nothing and whose instruction is called x."""
    return groups(tables([("kernel", "kernel_1", "x")], (module(*instructions),)))[0]


@pytest.mark.parametrize(
    ("group", "opcodes"),
    [
        ("GEMM", ["parameter", "dot", "add", "reduce"]),
        ("reduction", ["parameter", "multiply", "reduce"]),
        ("copy", ["parameter", "transpose", "bitcast"]),
        ("elementwise", ["parameter", "transpose", "add"]),
        ("elementwise", ["parameter", "reduce-precision"]),
        ("other", ["parameter", "scatter", "add"]),
    ],
)
def test_a_fusion_has_the_group_of_what_is_inside(group: str, opcodes: list[str]) -> None:
    inside = [(1, f"i{n}", opcode, None, None, []) for n, opcode in enumerate(opcodes)]
    assert of_hlo((0, "x", "fusion", None, "jit(f)/add", [1]), *inside) == group


def test_fusions_in_fusions_count() -> None:
    nested = [(1, "y", "fusion", None, None, [2, 1]), (2, "z", "dot", None, None, [])]
    assert of_hlo((0, "x", "fusion", None, None, [1]), *nested) == "GEMM"


@pytest.mark.parametrize(
    ("group", "opcode", "target", "op_name"),
    [
        ("GEMM", "custom-call", "__cublas$lt$matmul", None),
        ("GEMM", "custom-call", "vendor_call", "jit(f)/jvp(layer)/dot_general"),
        ("GEMM", "custom-call", "__cudnn$convForward", None),
        ("attention", "custom-call", "__cudnn$fmhaSoftmax", "jit(f)/dot_general"),
        ("attention", "custom-call", "te_fused_attn_forward_ffi", None),
        ("other", "custom-call", "vendor_call", "jit(f)/dot_general_like/add"),
        ("communication", "all-reduce-start", None, None),
        ("copy", "copy", None, None),
        ("other", "sort", None, None),
    ],
)
def test_an_instruction_has_the_group_of_its_opcode(
    group: str, opcode: str, target: str | None, op_name: str | None
) -> None:
    assert of_hlo((0, "x", opcode, target, op_name, [])) == group


def test_an_unknown_instruction_says_nothing() -> None:
    assert of_hlo((0, "another", "dot", None, None, [])) == "other"


def test_groups_of_the_user_come_first_and_in_order() -> None:
    rows = [("kernel", "nvjet_a", None), ("kernel", "nvjet_b", None), ("memset", "Memset", None)]
    own = (("mine", "_a$"), ("nvjet", "^nvjet"), ("sets", "^Memset"))
    assert groups(tables(rows), *own) == ["mine", "nvjet", "sets"]


def test_a_group_of_the_user_can_extend_one_there_is() -> None:
    assert groups(tables([("kernel", "my_kernel", None)]), ("GEMM", "my_")) == ["GEMM"]
    assert Patterns((("GEMM", "my_"),)).names == GROUPS


@pytest.mark.parametrize("expression", ["^inst", "dot", "layer7"])
def test_groups_of_the_user_see_instruction_opcodes_and_op_name(expression: str) -> None:
    hlo = module((0, "inst.3", "dot", None, "jit(f)/layer7/mul", []))
    assert groups(tables([("kernel", "k", "inst.3")], (hlo,)), ("mine", expression)) == ["mine"]


@pytest.mark.parametrize("name", ["", "a=b", "a!", " a", "<"])
def test_names_that_expectations_could_not_tell_are_refused(name: str) -> None:
    with pytest.raises(thence.UsageError, match="not a valid group name"):
        Patterns(((name, "x"),))


def test_a_broken_expression_is_refused() -> None:
    with pytest.raises(thence.UsageError, match="not a valid regular expression"):
        Patterns((("mine", "("),))


def test_a_described_collective_is_communication_whatever_its_name(tmp_path: Path) -> None:
    described = {"Collective name": "all_reduce", "In msg nelems": 4, "Group size": 2}
    events = [
        event("cpu_op", "record_param_comms", 0, 9, args={"External id": 1, **described}),
        launch(1, 1), kernel(1, 20, name="unknown", args=described), launch(2, 15), kernel(2, 30, name="unknown"),
    ]  # fmt: skip
    trace = opened(tmp_path, events)
    found = groups_of(trace.tables, Patterns()).to_list()
    assert found == ["communication", "other"]


def test_little_of_real_recordings_is_other() -> None:
    for name, most in (("torch_fsdp_rank0", 0.04), ("torch_compile_rank0", 0.06)):
        rows = thence.open(recording(name)).streams().rows
        other = rows.filter(pl.col("group") == "other")["total_ns"].sum()
        assert other <= most * rows["total_ns"].sum()


def test_triton_fusions_of_jax_are_gemms() -> None:
    trace = thence.open(JAX / "streams_moved.xplane.pb")
    found = groups_of(trace.tables, Patterns())
    names = trace.tables.gpu["name"].cast(pl.String)
    assert (found == "GEMM").to_list() == names.str.starts_with("gemm_fusion").to_list()
