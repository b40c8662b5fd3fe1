"""Bytes that operators move at least, counted by hand: every tensor once."""

from __future__ import annotations

import pytest

from thence.attribution.work.operands import Argument, Tensor
from thence.attribution.work.traffic import traffic_of

BF16 = "c10::BFloat16"


def tensor(*shape: int, kind: str = "float", strides: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(shape, kind, strides)


def experts(tokens: int, count: int) -> tuple[Argument, ...]:
    """Two experts for each token of width 5, gated, with 4 inner units."""
    weights = tensor(count, 2 * 4, 5, kind=BF16), tensor(count, 5, 4, kind=BF16)
    return (tensor(tokens, 5, kind=BF16), *weights, tensor(tokens, 2), tensor(tokens, 2, kind="int"))


TOKENS = tensor(8, 100, kind="long int")
OFFSETS, OFFSETS_BYTES = tensor(3, kind="int"), 4 * 3
FP8, FP8_BYTES = (tensor(8, 16, kind="c10::Float8_e4m3fn"), tensor(16, 4, kind="c10::Float8_e4m3fn")), 8 * 16 + 16 * 4
CASES: list[tuple[str, tuple[Argument, ...], int | None]] = [
    ("aten::mm", (tensor(3, 5), tensor(5, 7)), 4 * (15 + 35 + 21)),
    ("aten::mm", (tensor(3, 5), tensor(5, 7), tensor(3, 7)), 4 * (15 + 35 + 21)),
    ("aten::addmm", (tensor(7), tensor(3, 5), tensor(5, 7)), 4 * (7 + 15 + 35 + 21)),
    ("aten::bmm", (tensor(2, 3, 5, kind=BF16), tensor(2, 5, 7, kind=BF16)), 2 * 2 * (15 + 35 + 21)),
    ("aten::add", (tensor(8, 1), tensor(1, 9), "1"), 4 * (8 + 9 + 72)),
    ("aten::add", (tensor(8, kind=BF16), tensor(8)), 2 * 8 + 4 * 8 + 4 * 8),
    ("aten::mul", (tensor(8, kind=BF16), tensor(kind="double")), 2 * 8 + 8 + 2 * 8),
    ("aten::add_", (tensor(8, 9), tensor(9), "1"), 4 * (72 + 9 + 72)),
    ("aten::lt", (tensor(8), "0"), 4 * 8 + 8),
    ("aten::where", (tensor(8, kind="bool"), tensor(8), tensor(8)), 8 + 3 * 32),
    ("aten::copy_", (tensor(8, kind=BF16), tensor(8), "False"), 16 + 32),
    ("aten::copy_", (tensor(8, 9), tensor(8, 9, strides=(0, 1)), "False"), 4 * (72 + 9)),
    ("aten::fill_", (tensor(10), "0"), 40),
    ("aten::sum", (tensor(6, 7), "[0]", "True", None), 4 * (42 + 7)),
    ("aten::sum", (tensor(6, 7), None), 4 * (42 + 1)),
    ("aten::mean", (tensor(6, 7, 8), "[-1, 0]", "False", None), 4 * (336 + 7)),
    ("aten::sum", (tensor(6, 7), "[5]"), None),
    ("aten::_softmax", (tensor(6, 7), "-1", "False"), 4 * 84),
    ("aten::native_layer_norm", (tensor(6, 7), "[7]", tensor(7), tensor(7), "1e-5"), 4 * (42 + 14 + 42)),
    ("aten::native_dropout", (tensor(10), "0.1", "True"), 40 + 40 + 10),
    (  # 9 x 5 positions of 12 channels
        "aten::convolution",
        (tensor(2, 8, 17, 11), tensor(12, 8, 3, 3), tensor(12), "[2, 2]", "[1, 0]", "[1, 1]", "False", "[0, 0]", "1"),
        4 * (2 * 8 * 17 * 11 + 12 * 8 * 9 + 12 + 2 * 12 * 9 * 5),
    ),
    (
        "aten::convolution",
        (tensor(2, 8, 17, 11), tensor(8, 12, 3, 3), None, "[2, 2]", "[1, 0]", "[1, 1]", "True", "[0, 0]", "1"),
        None,
    ),
    ("aten::embedding", (tensor(50, 16), TOKENS, "-1"), 8 * 800 + 2 * 800 * 16 * 4),
    ("aten::embedding_dense_backward", (tensor(8, 100, 16), TOKENS, "50", "-1"), 4 * 12800 + 8 * 800 + 4 * 50 * 16),
    ("aten::nll_loss_forward", (tensor(9, 50), tensor(9, kind="long int")), 8 * 9 + 4 * 9),
    ("aten::index_select", (tensor(50, 16), "0", tensor(3, kind="long int")), 24 + 2 * 3 * 16 * 4),
    ("aten::gather", (tensor(50, 16), "0", tensor(3, 16, kind="long int")), 8 * 48 + 2 * 48 * 4),
    (
        "aten::_scaled_dot_product_flash_attention",
        (tensor(2, 4, 10, 16), tensor(2, 2, 14, 16), tensor(2, 2, 14, 16), "0.", "True"),
        4 * 2 * 16 * (40 + 28 + 28 + 40),
    ),
    ("triton_poi_fused_add_0", (tensor(8, 256), tensor(8, 256), "2048"), 2 * 4 * 2048),
    ("aten::_to_copy", (tensor(8, 9), "15", None), 4 * 72 + 2 * 72),
    ("aten::_to_copy", (tensor(8, 9), None), None),
    ("aten::ones_like", (tensor(8), None), 4 * 8),
    ("aten::full_like", (tensor(8), "1", "15"), 2 * 8),
    ("aten::zeros", ("[3, 5]", "4", None, None, "False"), 8 * 15),
    ("aten::zeros", ("[-3, 5]", "4"), None),
    ("aten::arange", ("2", "10", "3", None, None, None, "False"), 8 * 3),
    ("aten::arange", ("5", None, None, None, "False"), 8 * 5),
    ("aten::index_copy_", (tensor(9, 4), "0", tensor(2, kind="long int"), tensor(2, 4)), 16 + 2 * 32),
    ("aten::nll_loss_backward", (tensor(), tensor(9, 50), tensor(9, kind="long int")), 8 * 9 + 4 * 9),
    ("aten::split_with_sizes_copy", (tensor(4, 9), "[3, 6]"), 2 * 4 * 36),
    (
        "aten::_scaled_mm",
        (
            tensor(8, 16, kind="c10::Float8_e4m3fn"),
            tensor(16, 4, kind="c10::Float8_e4m3fn"),
            tensor(),
            tensor(),
            None,
            None,
            "15",
            "False",
        ),
        8 * 16 + 16 * 4 + 4 + 4 + 2 * 32,
    ),
    # 20 rows meet at most 3 of 3 matrices, 2 rows at most 2 of them
    ("aten::_grouped_mm", (tensor(20, 5), tensor(3, 5, 7), OFFSETS), 4 * (100 + 105 + 140) + OFFSETS_BYTES),
    ("aten::_grouped_mm", (tensor(2, 5), tensor(3, 5, 7), OFFSETS), 4 * (10 + 70 + 14) + OFFSETS_BYTES),
    ("aten::_grouped_mm", (tensor(5, 20), tensor(20, 7), OFFSETS), 4 * (100 + 140 + 3 * 35) + OFFSETS_BYTES),
    ("aten::_grouped_mm", (tensor(3, 5, 7), tensor(7, 20), OFFSETS, None, "6"), 4 * 345 + OFFSETS_BYTES),
    ("aten::_grouped_mm", (tensor(5, 20), tensor(20, 7)), None),
    ("_C::cutlass_scaled_mm", (tensor(8, 4, kind=BF16), *FP8, tensor(), tensor(), None), 64 + FP8_BYTES + 8),
    ("sgl_kernel::fp8_scaled_mm", (*FP8, tensor(), tensor(), "15", None), FP8_BYTES + 8 + 2 * 32),
    # 6 experts that 3 tokens can have, of 8; 4 x 5 weights to 2 x 4 inner units, and 4 x 5 back
    ("vllm::inplace_fused_experts", experts(3, 8), 2 * 3 * 5 * 2 + 6 * (2 * 4 * 5 + 4 * 5) * 2),
    ("sglang::outplace_fused_experts", experts(9, 8), 2 * 9 * 5 * 2 + 8 * (2 * 4 * 5 + 4 * 5) * 2),
    ("aten::unknown", (tensor(8),), None),
    ("aten::add", (Tensor((8,), "c10::Strange"), tensor(8)), None),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), CASES)
def test_every_tensor_is_moved_once(name: str, arguments: tuple[Argument, ...], expected: int | None) -> None:
    assert traffic_of(name, arguments, None) == expected


def test_lists_of_tensors_need_the_size_of_an_element() -> None:
    lists = tuple((Tensor((10, 3)), Tensor((5,))) for _ in range(4))
    assert traffic_of("aten::_fused_adamw_", lists, None) is None
    assert traffic_of("aten::_fused_adamw_", lists, 4) == 4 * 35 * (4 + 3)
    assert traffic_of("aten::cat", (lists[0], "0"), 2) == 2 * 35 * 2
    assert traffic_of("aten::_foreach_add_", (lists[0], lists[1], "1"), 4) == 4 * 35 * 3
    assert traffic_of("aten::cat", ((), "0"), 2) is None, "lists that were not recorded"


def test_tensors_that_are_put_into_chunks_have_the_type_of_the_result_unless_the_kernel_names_theirs() -> None:
    out = Tensor((4, 12), "float")  # 35 elements, padded to 48
    arguments = ((Tensor((10, 3)), Tensor((5,))), "0", "4", out)
    assert traffic_of("aten::_chunk_cat", arguments, None) == 4 * 35 + 4 * 48
    assert traffic_of("aten::_chunk_cat", arguments, 2) == 2 * 35 + 4 * 48
    assert traffic_of("aten::_chunk_cat", arguments[:3], None) is None
