"""Work of HLO instructions, by the shapes of modules that are built here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hlo_building import BF16, F32, build, computation, instruction, shape, tuple_of
from protowire import message, pack
from thence.attribution.work.instruction_work import instruction_work

if TYPE_CHECKING:
    from thence.model.hlo import HloModule

U8, F8E4M3FN = 6, 20


def work(module: HloModule) -> dict[str, tuple[float | None, float | None, str | None]]:
    return {row[0]: row[1:] for row in instruction_work(module).select("hlo", "flop", "bytes", "type").iter_rows()}


def dot(name: str, number: int, result: bytes, operands: tuple[int, ...]) -> bytes:
    """Contracts the last dimension of the left with the first of the right."""
    numbers = message((1, pack(1)), (2, pack(0)))
    return instruction(name, "dot", number, result, operands, (), (30, numbers))


def test_a_product_inside_a_fusion_is_the_fusions() -> None:
    inner = computation(
        1,
        instruction("a", "parameter", 1, shape(BF16, 8, 16), (), (), (9, 0)),
        instruction("b", "parameter", 2, shape(BF16, 16, 4), (), (), (9, 1)),
        dot("d", 3, shape(F32, 8, 4), (1, 2)),
        instruction("e", "exponential", 4, shape(F32, 8, 4), (3,)),
        root=4,
    )
    outer = computation(
        2,
        instruction("x", "parameter", 10, shape(BF16, 8, 16), (), (), (9, 0)),
        instruction("y", "parameter", 11, shape(BF16, 16, 4), (), (), (9, 1)),
        instruction("f", "fusion", 12, shape(F32, 8, 4), (10, 11), (1,)),
        root=12,
    )
    flop, moved, kind = work(build(inner, outer))["f"]
    assert flop == 2 * 8 * 16 * 4, "the exponential is no product"
    assert moved == 2 * (8 * 16 + 16 * 4) + 4 * 8 * 4
    assert kind == "bfloat16"


def test_a_slice_of_an_operand_is_read_and_an_update_in_place_written() -> None:
    inner = computation(
        1,
        instruction("a", "parameter", 1, shape(F32, 100, 64), (), (), (9, 0)),
        instruction("i", "parameter", 2, shape(4), (), (), (9, 1)),
        instruction("s", "dynamic-slice", 3, shape(F32, 1, 64), (1, 2, 2)),
        instruction("n", "negate", 4, shape(F32, 1, 64), (3,)),
        instruction("u", "dynamic-update-slice", 5, shape(F32, 100, 64), (1, 4, 2, 2)),
        root=5,
    )
    outer = computation(
        2,
        instruction("x", "parameter", 10, shape(F32, 100, 64), (), (), (9, 0)),
        instruction("k", "parameter", 11, shape(4), (), (), (9, 1)),
        instruction("f", "fusion", 12, shape(F32, 100, 64), (10, 11), (1,)),
        root=12,
    )
    flop, moved, _ = work(build(inner, outer))["f"]
    assert flop is None
    assert 2 * 64 * 4 <= (moved or 0) <= 2 * 64 * 4 + 3 * 4, "a row read and written, and the index"


def test_a_result_of_a_library_that_nothing_uses_is_its_workspace() -> None:
    config = b'{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    module = build(
        computation(
            1,
            instruction("a", "parameter", 1, shape(BF16, 8, 16)),
            instruction("b", "parameter", 2, shape(BF16, 16, 4)),
            instruction(
                "c", "custom-call", 3, tuple_of(shape(BF16, 8, 4), shape(U8, 1 << 20)), (1, 2), (),
                (28, "__cublas$lt$matmul"), (43, config),
            ),
            instruction("g", "get-tuple-element", 4, shape(BF16, 8, 4), (3,)),
            root=4,
        )
    )  # fmt: skip
    assert work(module)["c"] == (2 * 8 * 16 * 4, 2 * (8 * 16 + 16 * 4 + 8 * 4), "bfloat16")


def test_a_product_of_float8_has_a_wider_result_and_scales() -> None:
    config = b'{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    given = [shape(F8E4M3FN, 8, 16), shape(F8E4M3FN, 4, 16), shape(F32), shape(F32)]
    parameters = [instruction(f"p{n}", "parameter", n, each) for n, each in enumerate(given, 1)]
    call = instruction(
        "c", "custom-call", 5, shape(BF16, 8, 4), (1, 2, 3, 4), (), (28, "__cublas$lt$matmul$f8"), (43, config)
    )
    assert work(build(computation(1, *parameters, call, root=5)))["c"] == (
        2 * 8 * 16 * 4, 8 * 16 + 4 * 16 + 2 * 4 + 2 * 8 * 4, "float8"
    )  # fmt: skip


@pytest.mark.parametrize(("mask", "pairs"), [("NO_MASK", 6 * 6), ("CAUSAL", 6 * 7 // 2), ("PADDING", 0)])
@pytest.mark.parametrize(("target", "times"), [("__cudnn$fmhaSoftmax", 1), ("__cudnn$fmhaSoftmaxBackward", 2.5)])
def test_attention_of_cudnn_counts_the_pairs_that_its_mask_leaves(
    mask: str, pairs: int, target: str, times: float
) -> None:
    config = (
        '{"cudnn_fmha_backend_config":{"mask_type":"%s","intermediate_tensor_shape":{"dimensions":["2","3","6","6"]}}}'
    )
    parameters = [instruction(name, "parameter", n, shape(BF16, 2, 6, 3, 64)) for n, name in enumerate("qkv", 1)]
    call = instruction(
        "f", "custom-call", 4, shape(BF16, 2, 6, 3, 64), (1, 2, 3), (), (28, target), (43, (config % mask).encode())
    )
    flop = work(build(computation(1, *parameters, call, root=4)))["f"][0]
    assert flop == (times * 2 * 2 * 3 * pairs * 128 if pairs else None), "lengths on the device are unknown"


@pytest.mark.parametrize(
    ("target", "operands", "result"),
    [
        ("__cudnn$convForward", ("x", "w"), "y"),
        ("__cudnn$convBackwardInput", ("y", "w"), "x"),
        ("__cudnn$convBackwardFilter", ("x", "y"), "w"),
    ],
)
def test_each_gradient_of_a_convolution_costs_as_much_as_the_convolution(
    target: str, operands: tuple[str, str], result: str
) -> None:
    """2 images of 3 channels and 8 x 8, 5 kernels of 3 x 3, stride 2: 4 x 4 positions."""
    shapes = {"x": shape(F32, 2, 3, 8, 8), "w": shape(F32, 5, 3, 3, 3), "y": shape(F32, 2, 5, 4, 4)}
    parameters = [instruction(name, "parameter", n, shapes[name]) for n, name in enumerate(operands, 1)]
    numbers = (16, message((5, 0)))  # kernel_output_feature_dimension
    call = instruction("c", "custom-call", 3, shapes[result], (1, 2), (), (28, target), numbers)
    flop = work(build(computation(1, *parameters, call, root=3)))["c"][0]
    assert flop == 2 * (2 * 4 * 4) * (5 * 3 * 3 * 3)


@pytest.mark.parametrize(("precision", "kind"), [((0, 0), "tf32"), ((1, 1), "tf32"), ((2, 2), "float32")])
def test_float32_is_multiplied_in_tf32_unless_the_program_asks_for_more(precision: tuple[int, int], kind: str) -> None:
    left, right = (instruction(n, "parameter", i, shape(F32, 4, 4)) for i, n in enumerate("ab", 1))
    numbers = message((1, pack(1)), (2, pack(0)))
    asked = message((1, pack(*precision)))
    product = instruction("d", "dot", 3, shape(F32, 4, 4), (1, 2), (), (30, numbers), (51, asked))
    assert work(build(computation(1, left, right, product, root=3)))["d"][2] == kind
