"""FLOP by shapes, against counts of every multiplication, and against torch's own counter where torch is there."""

from __future__ import annotations

import itertools
import json

import pytest

from thence.attribution.work.flop import FLOP, causal_pairs
from thence.attribution.work.operands import Tensor, arguments_of


def flop(name: str, *arguments: object) -> int | None:
    """FLOP of a call; lists are shapes of bf16 tensors."""
    given = [Tensor(tuple(a), "c10::BFloat16") if isinstance(a, list) else a for a in arguments]
    return FLOP[f"aten::{name}"](given)  # type: ignore[arg-type]


@pytest.mark.parametrize("bottom_right", [True, False])
def test_pairs_of_a_causal_mask_are_those_of_the_mask(bottom_right: bool) -> None:
    for queries, keys in itertools.product(range(7), repeat=2):
        shift = keys - queries if bottom_right else 0
        pairs = sum(key <= query + shift for query in range(queries) for key in range(keys))
        assert causal_pairs(queries, keys, bottom_right=bottom_right) == pairs, (queries, keys)


def test_products() -> None:
    assert flop("mm", [3, 5], [5, 7]) == 2 * 3 * 5 * 7
    assert flop("addmm", [7], [3, 5], [5, 7], "1", "1") == 2 * 3 * 5 * 7
    assert flop("bmm", [4, 3, 5], [4, 5, 7]) == 4 * 2 * 3 * 5 * 7
    assert flop("mv", [3, 5], [5]) == 2 * 3 * 5
    assert flop("dot", [5], [5]) == 2 * 5
    assert flop("mm", [3, 5], [6, 7]) is None
    assert flop("mm", [3, 5]) is None


@pytest.mark.parametrize(("left", "right", "expected"), [
    ([12, 5], [3, 5, 7], 2 * 12 * 5 * 7),  # each of 12 rows meets the matrix of its group
    ([5, 12], [12, 7], 2 * 5 * 12 * 7),  # each of 12 inner indices belongs to one product
    ([3, 5, 7], [7, 12], 2 * 12 * 5 * 7),  # each of 12 columns meets the matrix of its group
    ([3, 5, 7], [3, 7, 2], 3 * 2 * 5 * 7 * 2),
    ([12, 5], [3, 6, 7], None),
])  # fmt: skip
def test_products_of_groups_do_not_depend_on_their_sizes(
    left: list[int], right: list[int], expected: int | None
) -> None:
    assert flop("_grouped_mm", left, right, [3]) == flop("_scaled_grouped_mm", left, right) == expected


def test_products_of_servers() -> None:
    """FP8 with a 16-bit result; and experts: each of 9 tokens meets 2 of 8, whose weights are 5 x 8 and 4 x 5."""
    product = 2 * 3 * 5 * 7
    fp8 = [Tensor(shape, "c10::Float8_e4m3fn") for shape in ((3, 5), (5, 7))]
    assert FLOP["_C::cutlass_scaled_mm"]((Tensor((3, 7), "c10::BFloat16"), *fp8)) == product
    assert FLOP["sgl_kernel::fp8_scaled_mm"](fp8) == product
    packed = [Tensor(shape, "c10::Float4_e2m1fn_x2") for shape in ((3, 5), (5, 7))]
    assert FLOP["aten::_scaled_mm"](packed) is None, "two numbers in an element"

    def experts(first: tuple[int, ...], second: tuple[int, ...], kind: str = "c10::BFloat16") -> int | None:
        x, routed = Tensor((9, 5), "c10::BFloat16"), Tensor((9, 2), "int")
        return FLOP["vllm::outplace_fused_experts"]((x, Tensor(first, kind), Tensor(second, kind), routed, routed))

    assert experts((8, 8, 5), (8, 5, 4)) == 2 * 9 * 2 * (8 * 5 + 5 * 4)
    assert experts((8, 8, 5), (8, 5, 4), "c10::Float8_e4m3fn") == 2 * 9 * 2 * (8 * 5 + 5 * 4)
    assert experts((8, 8, 5), (8, 5, 4), "signed char") is None, "multiplied as integers, or converted before"
    assert experts((8, 8, 3), (8, 5, 2), "unsigned char") is None, "packed"


def applied(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Positions of a kernel along one dimension, by trying each."""
    last = size + 2 * padding - (kernel - 1) * dilation
    return len(range(0, last, stride))


@pytest.mark.parametrize(("stride", "padding", "dilation"), [*itertools.product((1, 2, 3), (0, 1, 2), (1, 2))])
def test_convolutions_by_every_position(stride: int, padding: int, dilation: int) -> None:
    """A kernel of 8 input channels in 4 groups: each of 12 outputs sees 2 inputs."""
    positions = applied(17, 3, stride, padding, dilation) * applied(11, 5, stride, padding, dilation)
    multiplications = 2 * positions * 12 * 2 * 3 * 5
    parameters = (f"[{stride}, {stride}]", f"[{padding}, {padding}]", f"[{dilation}, {dilation}]")
    convolution = ([2, 8, 17, 11], [12, 2, 3, 5], [12], *parameters, "False", "[0, 0]", "4")
    assert flop("convolution", *convolution) == 2 * multiplications
    assert flop("cudnn_convolution", *convolution[:2], *(parameters[n] for n in (1, 0, 2)), "4") == 2 * multiplications


def test_a_convolution_of_one_dimension_with_numbers_for_all() -> None:
    assert flop("convolution", [2, 4, 10], [6, 4, 3], None, "[1]", "[1]", "[1]", "False", "[0]", "1") == (
        2 * 2 * 10 * 6 * 4 * 3
    )


def test_gradients_of_a_convolution_are_counted_if_they_are_asked_for() -> None:
    rest = ("[12]", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1")
    once = 2 * 2 * 16 * 16 * 12 * 8 * 9
    shapes = ([2, 12, 16, 16], [2, 8, 16, 16], [12, 8, 3, 3])
    for mask, times in (("[True, True, True]", 2), ("[False, True, True]", 1), ("[False, False, True]", 0)):
        assert flop("convolution_backward", *shapes, *rest, mask) == times * once
    assert flop("convolution_backward", *shapes, *rest) is None, "a mask that was not recorded"


def test_attention_counts_what_the_mask_leaves() -> None:
    q, k = [2, 8, 10, 16], [2, 4, 14, 16]
    whole = 2 * 8 * (2 * 10 * 14 * 16 + 2 * 10 * 14 * 16)
    assert flop("_scaled_dot_product_flash_attention", q, k, k, "0.", "False") == whole
    assert flop("_scaled_dot_product_efficient_attention", q, k, k, None, "False", "0.", "False") == whole
    causal = 2 * 8 * sum(range(1, 11)) * 4 * 16
    assert flop("_scaled_dot_product_flash_attention", q, k, k, "0.", "True") == causal
    assert flop("_scaled_dot_product_flash_attention", q, k, k, "0.") is None, "unknown is not full"
    gradient = (q, q, k, k, q, [2, 8, 10], None, None, "10", "14", "0.", "True")
    assert flop("_scaled_dot_product_flash_attention_backward", *gradient) == 2.5 * causal


def test_sequences_of_different_lengths_are_unknown() -> None:
    shape = [1, 100, 8, 16]
    forward = (shape, shape, shape, None, [5], [5], "30", "30", "0.", "0")
    assert flop("_efficient_attention_forward", *forward) is None
    assert flop("_flash_attention_forward", [100, 8, 16], [100, 8, 16], [100, 8, 16], [5], [5], *"30", *"30") is None


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", '{"dims": [[2, 3]], "types": []}', '{"dims": [[-2, 3]], "types": ["float"]}', '{"dims": 3}',
        '{"dims": [[1000000000000, 1000000000000]], "types": ["float"]}',
    ],
)  # fmt: skip
def test_damaged_inputs_are_unknown(text: str) -> None:
    assert arguments_of(text) is None


def test_arguments_are_what_was_recorded() -> None:
    text = json.dumps(
        {
            "dims": [[2, 3], [[4], [5, 6]], [], []],
            "types": ["float", "TensorList", "Scalar", ""],
            "strides": [[0, 1], [[1], [6, 1]], [], []],
            "values": ["", "", "True", ""],
        }
    )
    assert arguments_of(text) == (Tensor((2, 3), "float", (0, 1)), (Tensor((4,)), Tensor((5, 6))), "True", None)
    expanded = arguments_of(text)
    assert expanded is not None
    assert isinstance(expanded[0], Tensor)
    assert expanded[0].bytes == 3 * 4, "an expanded dimension is stored once"
