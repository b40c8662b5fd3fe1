"""Short kernel names: what an engineer looks for in a signature, in the width of a table."""

from __future__ import annotations

import ctypes
import ctypes.util
import random
import time

import pytest

from thence.model import kernel_names
from thence.model.kernel_names import clip, demangle, short_names

GELU_FLOAT = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl("
    "at::TensorIteratorBase&, at::native::GeluType)::{lambda()#2}::operator()() const::{lambda()#2}"
    "::operator()() const::{lambda(float)#1}, std::array<char*, 2ul> >(int, at::native::"
    "GeluCUDAKernelImpl(at::TensorIteratorBase&, at::native::GeluType)::{lambda()#2}::operator()() "
    "const::{lambda()#2}::operator()() const::{lambda(float)#1}, std::array<char*, 2ul>)"
)
GELU_BFLOAT16 = (
    "void at::native::vectorized_elementwise_kernel<8, at::native::GeluCUDAKernelImpl("
    "at::TensorIteratorBase&, at::native::GeluType)::{lambda()#2}::operator()() const::{lambda()#4}"
    "::operator()() const::{lambda(c10::BFloat16)#1}, std::array<char*, 2ul> >(int, at::native::"
    "GeluCUDAKernelImpl(at::TensorIteratorBase&, at::native::GeluType)::{lambda()#2}::operator()() "
    "const::{lambda()#4}::operator()() const::{lambda(c10::BFloat16)#1}, std::array<char*, 2ul>)"
)
GELU_FLOAT_BY_NSYS = (
    "void at::native::vectorized_elementwise_kernel<(int)4, at::native::GeluCUDAKernelImpl("
    "at::TensorIteratorBase &, at::native::GeluType)::[lambda() (instance 2)]::operator ()() const"
    "::[lambda() (instance 2)]::operator ()() const::[lambda(float) (instance 1)], "
    "std::array<char *, (unsigned long)2>>(int, T2, T3)"
)
COPY_BFLOAT16 = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
    "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::"
    "{lambda()#12}::operator()() const::{lambda(c10::BFloat16)#1}>(at::TensorIteratorBase&, at::"
    "native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::"
    "{lambda()#12}::operator()() const::{lambda(c10::BFloat16)#1} const&)::{lambda(int)#1}>(int, "
    "at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(at::Tens"  # cut off
)
RANDOM_BY_NSYS = (
    "void at::native::<unnamed>::distribution_elementwise_grid_stride_kernel<float, (int)4, void at"
    "::native::templates::cuda::normal_and_transform<float, float, at::CUDAGeneratorImpl *, void at"
    "::native::templates::cuda::normal_kernel<at::CUDAGeneratorImpl *>(const at::TensorBase &, "
    "double, T1)::[lambda() (instance 1)]::operator ()() const::[lambda(float) (instance 1)]>"
    "(at::TensorIteratorBase &, T3, T4)::[lambda(curandStatePhilox4_32_10 *) (instance 2)]>(long)"
)
FLASH = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<{size}, 128, 64, 4, false, false,"
    " cutlass::{dtype}, Flash_kernel_traits<{size}, 128, 64, 4, cutlass::{dtype}> >, false, true>"
    "(pytorch_flash::Flash_fwd_params)"
)
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::"
    "FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>, float const*, double, bool>("
    "at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>, float const*)"
)
DIVIDE = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::TensorListMetadata<1>, at::native::(anonymous namespace)::BinaryOpScalarFunctor<"
    "float, 1, 1, 0>, std::plus<float>, float>(float)"
)
SUM = (
    "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16, at::native::"
    "func_wrapper_t<c10::BFloat16, at::native::sum_functor<c10::BFloat16, float, c10::BFloat16>::"
    "operator()(at::TensorIterator&)::{lambda(float, float)#1}>, unsigned int, c10::BFloat16, 4, 8>"
    " >(at::native::ReduceOp<c10::BFloat16, unsigned int, c10::BFloat16, 4, 8>)"
)
MULTIPLY = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::BUnaryFunctor<float, float, "
    "float, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 2ul> >(int)"
)
INDEX = (
    "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::"
    "index_kernel_impl<at::native::OpaqueType<4> >(at::TensorIteratorBase&, c10::ArrayRef<long>)::"
    "{lambda(char*, char const*, long)#1}>(at::TensorIteratorBase&)::{lambda(int)#1}>(int)"
)
FLASH_3 = (
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::"
    "CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>, cute::C<1> >, cutlass::bfloat16_t> > > >"
    "(flash::FlashAttnFwdSm90::Params)"
)
FILL_BY_THRUST = (
    "void thrust::cuda_cub::core::_kernel_agent<thrust::cuda_cub::__parallel_for::ParallelForAgent<"
    "thrust::cuda_cub::__uninitialized_fill::functor<thrust::device_ptr<float>, float>, unsigned "
    "long>, thrust::cuda_cub::__uninitialized_fill::functor<thrust::device_ptr<float>, float>, "
    "unsigned long>(thrust::device_ptr<float>, float)"
)
SORT = (
    "void cub::CUB_200301_860_NS::DeviceRadixSortOnesweepKernel<cub::CUB_200301_860_NS::"
    "DeviceRadixSortPolicy<unsigned long, unsigned int, unsigned int>::Policy900, (bool)0, unsigned"
    " long, unsigned int, int, cub::CUB_200301_860_NS::detail::identity_decomposer_t>(T7 *, T7 *)"
)
SILU = (
    "void vllm::act_and_mul_kernel<c10::BFloat16, &(c10::BFloat16 vllm::silu_kernel<c10::BFloat16>("
    "c10::BFloat16 const&)), true>(c10::BFloat16*, c10::BFloat16 const*, int)"
)
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<float, float, float, {}, false>(float*)"

ALONE = {
    GELU_FLOAT: "vectorized_elementwise_kernel<GeluCUDAKernelImpl>",
    GELU_FLOAT_BY_NSYS: "vectorized_elementwise_kernel<GeluCUDAKernelImpl>",
    COPY_BFLOAT16: "elementwise_kernel<direct_copy_kernel_cuda>",
    RANDOM_BY_NSYS: "distribution_elementwise_grid_stride_kernel<normal_kernel>",
    FLASH.format(size=128, dtype="bfloat16_t"): "flash_fwd_kernel",
    FLASH_3: "device_kernel<FlashAttnFwdSm90>",
    ADAM: "multi_tensor_apply_kernel<FusedAdamMathFunctor>",
    DIVIDE: "multi_tensor_apply_kernel<BinaryOpScalarFunctor, plus>",
    SUM: "reduce_kernel<sum_functor>",
    MULTIPLY: "vectorized_elementwise_kernel<BUnaryFunctor<MulFunctor>>",
    INDEX: "index_elementwise_kernel<index_kernel_impl>",
    FILL_BY_THRUST: "_kernel_agent<__uninitialized_fill::functor>",
    SORT: "DeviceRadixSortOnesweepKernel",
    SILU: "act_and_mul_kernel<silu_kernel>",
    SOFTMAX.format(8): "softmax_warp_forward",
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_16x6_nn_align4>(T1::Params)": (
        "Kernel2<cutlass_80_tensorop_s1688gemm_64x64_16x6_nn_align4>"
    ),
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": (
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"
    ),
    "stream_executor::gpu::<unnamed>::DelayKernel(volatile stream_executor::GpuSemaphoreState *)": ("DelayKernel"),
    "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float, 7, false>(int)": ("gemvx::kernel"),
    "unsigned int fill(unsigned int*, int) [clone .kd]": "fill",
    "void scan<float>(float*)::{lambda(int)#1}::operator()(int) const": "scan",
}

PLAIN = [
    "",
    "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN",
    "triton_per_fused__to_copy_add_native_layer_norm_native_layer_norm_backward_view_10",
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_CMS_SN_LDSB0",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_kernel0_0",
    "loop_multiply_tanh_fusion_3",
    "Memcpy HtoD (Pinned -> Device)",
    "Memset (Device)",
    "[CUDA memcpy DtoH]",
    "jit(step)/jit(main)/mul",
    "copy, then add<float>",
    "_ZNot_mangled_at_all",
]


@pytest.mark.parametrize(("full", "short"), ALONE.items(), ids=ALONE.values())
def test_a_signature_keeps_its_function_and_its_operation(full, short):
    assert short_names([full]) == {full: short}


@pytest.mark.parametrize("name", PLAIN)
def test_a_name_that_is_no_signature_stays_as_it_is(name):
    assert short_names([name]) == {name: name}


def test_kernels_that_differ_in_element_type_get_it_added():
    assert list(short_names([GELU_FLOAT, GELU_BFLOAT16]).values()) == [
        "vectorized_elementwise_kernel<GeluCUDAKernelImpl, float>",
        "vectorized_elementwise_kernel<GeluCUDAKernelImpl, BFloat16>",
    ]


def test_the_element_type_is_that_of_the_operation_not_of_the_launch_helper_around_it():
    copy_float = COPY_BFLOAT16.replace("c10::BFloat16", "float")
    assert list(short_names([COPY_BFLOAT16, copy_float]).values()) == [
        "elementwise_kernel<direct_copy_kernel_cuda, BFloat16>",
        "elementwise_kernel<direct_copy_kernel_cuda, float>",
    ]


def test_the_element_type_is_found_inside_traits():
    names = [FLASH.format(size=64, dtype=dtype) for dtype in ("half_t", "bfloat16_t")]
    assert list(short_names(names).values()) == ["flash_fwd_kernel<half_t>", "flash_fwd_kernel<bfloat16_t>"]


def test_kernels_that_differ_in_namespace_only_get_it_added():
    names = ["void flash::combine<float>(int)", "void pytorch_flash::combine<float>(int)"]
    assert list(short_names(names).values()) == ["flash::combine<float>", "pytorch_flash::combine<float>"]


def test_kernels_that_differ_in_numbers_get_all_numbers_added():
    assert list(short_names([SOFTMAX.format(8), SOFTMAX.format(10)]).values()) == [
        "softmax_warp_forward<float, float, float, 8, 0>",
        "softmax_warp_forward<float, float, float, 10, 0>",
    ]
    names = [FLASH.format(size=size, dtype="half_t") for size in (64, 128)]
    assert list(short_names(names).values()) == [
        "flash_fwd_kernel<64, 128, 64, 4, 0, 0, half_t, 0, 1>",
        "flash_fwd_kernel<128, 128, 64, 4, 0, 0, half_t, 0, 1>",
    ]


def test_kernels_that_differ_in_parameters_only_get_a_hash():
    names = ["void axpy(float*)", "void axpy(double*)"]
    first, second = short_names(names).values()
    assert first != second
    assert {first[:5], second[:5]} == {"axpy#"}
    assert len(first) == len(second) == len("axpy#") + 6


def test_a_hash_is_lengthened_until_it_is_unique():
    overload = "void axpy(float*)"
    short = short_names([overload, "void axpy(double*)"])[overload]
    assert short_names([short])[short] == short
    clashing = short_names([overload, "void axpy(double*)", short])
    assert len(set(clashing.values())) == 3
    assert clashing[overload].startswith(short)
    assert clashing[overload] != short


def test_a_collision_leaves_the_other_kernels_alone():
    short = short_names([GELU_FLOAT, GELU_BFLOAT16, SUM, "axpy", "void axpy(double*)"])
    assert short[SUM] == "reduce_kernel<sum_functor>"


def test_short_names_do_not_depend_on_the_order_of_the_kernels():
    names = [*ALONE, *PLAIN, GELU_BFLOAT16, *(f"void axpy({i})" for i in range(50))]
    shuffled = random.Random(0).sample(names, len(names))
    assert short_names(names) == short_names(shuffled)


def test_short_names_come_in_the_order_of_the_first_occurrence():
    assert list(short_names(["b", "a", "b"])) == ["b", "a"]


def test_a_long_name_without_a_distinctive_detail_gets_a_hash_rather_than_a_wall_of_numbers():
    wall = "void gemm<{}>(int)".format(", ".join(str(i) for i in range(1000, 1100)))
    short = short_names([wall, wall.replace("1000", "2000")])
    assert [name.partition("#")[0] for name in short.values()] == ["gemm", "gemm"]


@pytest.mark.parametrize(
    "name",
    [
        "<" * 1_000_000,
        "(" * 1_000_000,
        "f<" * 500_000,
        "f<" + "a," * 500_000,
        "f<" + "a::" * 300_000,
        "f<" + "((a b" * 200_000,
        "{lambda(" * 100_000,
        "operator " * 100_000,
        " (instance 1" * 100_000,
        "f [clone " * 100_000,
        "_Z1f" + "P" * 1_000_000 + "i",
        "_Z\0",
        "_Z\ud800",
        "\ud800::f<\udfff>()",
    ],
    ids=lambda name: ascii(name[:12]),
)
def test_hostile_names_take_little_time_and_stay_distinct(name):
    started = time.process_time()
    short = short_names([name, name + "("])
    assert time.process_time() - started < 2
    assert len(set(short.values())) == 2
    assert isinstance(demangle(name), str)


def test_thousands_of_names_are_shortened_without_quadratic_work():
    names = [GELU_FLOAT.replace("float", f"float{i}") for i in range(3_000)]
    started = time.process_time()
    short = short_names(names)
    assert time.process_time() - started < 5  # about 0.3 s; quadratic work would take minutes
    assert len(set(short.values())) == len(names)


def test_mangled_names_are_read_with_the_cpp_runtime():
    if kernel_names._demangler() is None:
        pytest.skip("no C++ runtime here")
    mangled = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_"
    assert demangle(mangled) == (
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, "
        "std::array<char*, 1ul> >(int, at::native::FillFunctor<float>, std::array<char*, 1ul>)"
    )
    assert short_names([mangled]) == {mangled: "vectorized_elementwise_kernel<FillFunctor>"}


@pytest.mark.parametrize("name", ["", "main", "_Z", "_Zfoo", "_Z1f\0", "_Z1é", "_Z1\ud800", "Z1fv"])
def test_what_is_not_mangled_is_not_demangled(name):
    assert demangle(name) == name


def test_back_references_that_would_explode_are_not_followed():
    bomb = "_Z1f1AIiiES_I" + "".join(f"S{i}_S{i}_ES_I" for i in "0123456789ABCDEFGHIJKLMN") + "iE"
    assert demangle(bomb) == "f"


@pytest.fixture
def no_runtime(monkeypatch):
    """A machine without a C++ runtime."""

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(ctypes.util, "find_library", lambda _: None)
    kernel_names._demangler.cache_clear()
    yield
    kernel_names._demangler.cache_clear()


@pytest.mark.usefixtures("no_runtime")
def test_without_a_cpp_runtime_mangled_names_are_read_up_to_the_function():
    assert demangle("_Z1fi") == "f"
    short = short_names(["_Z1fi", "_Z1ff"])
    assert {text.partition("#")[0] for text in short.values()} == {"f"}
    assert len(set(short.values())) == 2


@pytest.mark.parametrize(
    ("width", "clipped"),
    [
        (-1, ""),
        (0, ""),
        (1, "…"),
        (2, "n…"),
        (3, "n…T"),
        (12, "nvjet_…b_TNT"),
        (19, "nvjet_128x64_bz_b_TNT"[:9] + "…" + "_bz_b_TNT"),
        (21, "nvjet_128x64_bz_b_TNT"),
        (80, "nvjet_128x64_bz_b_TNT"),
    ],
)
def test_clipping_keeps_the_start_and_the_end(width, clipped):
    assert clip("nvjet_128x64_bz_b_TNT", width) == clipped
