"""FLOP of operators that multiply: matrix products, convolutions and attention, by their shapes.

A multiplication and an addition count as two operations. Counts are what the mathematics needs: for attention with a
causal mask only the pairs of query and key that are not masked, also where a kernel computes more. Formulas are those
of `torch.utils.flop_counter` where that is right; it counts masked pairs, which these do not.

Each function takes the arguments of a call (`thence.attribution.work.operands`) and returns None where the record
lacks what its formula needs. Signatures of ATen: native_functions.yaml of PyTorch 2.11 to 2.15.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from thence.attribution.work.operands import Tensor, flag_of, integers_of, tensor_at, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from thence.attribution.work.operands import Argument

BACKWARD_OF_ATTENTION = 2.5
"""FLOP of attention's backward pass, as a multiple of its forward pass: five matrix products (the scores again, dV, dP,
dQ, dK) instead of two."""

_PACKED = "_x2"
"""End of the name of a type of which a tensor holds two numbers for each of its elements."""


def _product(left: int, right: int) -> Callable[[Sequence[Argument]], int | None]:
    """2 M N K, for each matrix of a batch: left is [..., M, K], right [..., K, N] or, of a matrix and a vector, [K]."""

    def flop(arguments: Sequence[Argument]) -> int | None:
        a, b = tensor_at(arguments, left), tensor_at(arguments, right)
        if a is None or b is None or not a.shape or not b.shape or (a.type or "").endswith(_PACKED):
            return None
        columns = b.shape[-1] if len(b.shape) > 1 else 1
        inner = b.shape[-2] if len(b.shape) > 1 else b.shape[0]
        return 2 * a.elements * columns if a.shape[-1] == inner else None

    return flop


def _grouped_product(arguments: Sequence[Argument]) -> int | None:
    """``_grouped_mm(a, b, offsets)``: rows of a, columns of b or the inner dimension is divided among the groups.

    What is divided belongs to one group each, so the sizes of the groups, which lie on the device, do not matter.
    """
    a, b = tensor_at(arguments, 0), tensor_at(arguments, 1)
    if a is None or b is None or len(a.shape) < 2 or len(b.shape) < 2 or (a.type or "").endswith(_PACKED):
        return None
    if a.shape[-1] != b.shape[-2]:
        return None
    columns_divided = len(a.shape) == 3 and len(b.shape) == 2
    return 2 * a.elements * b.shape[-1] // (max(a.shape[0], 1) if columns_divided else 1)


def experts_of(arguments: Sequence[Argument]) -> tuple[int, int, int] | None:
    """Of ``fused_experts(x, w1, w2, weights, experts)``: experts, elements of the weights of one, and rows.

    x is [tokens, width], w1 [experts, 1 or 2 times the inner width, width], w2 [experts, width, inner width], and
    experts [tokens, experts of a token]. None for weights that are packed or padded, and where their type does not tell
    in which type they are multiplied.
    """
    x, first, second, chosen = (tensor_at(arguments, number) for number in (0, 1, 2, 4))
    if x is None or first is None or second is None or chosen is None:
        return None
    if [len(tensor.shape) for tensor in (x, first, second, chosen)] != [2, 3, 3, 2]:
        return None
    (experts, rows, width), inner = first.shape, second.shape[2]
    whole = x.shape[1] == width == second.shape[1] and rows in (inner, 2 * inner) and second.shape[0] == experts
    as_stored = first.type == second.type and first.type in (x.type, "c10::Float8_e4m3fn", "c10::Float8_e4m3fnuz")
    if not whole or not as_stored or chosen.shape[0] != x.shape[0]:
        return None
    return experts, width * (rows + inner), chosen.elements


def _experts(arguments: Sequence[Argument]) -> int | None:
    """Each token meets the weights of its experts."""
    known = experts_of(arguments)
    return None if known is None else 2 * known[2] * known[1]


def _convolution_product(batch: int, positions: Sequence[int], weight: Tensor) -> int:
    """2 x every weight x every position that it is applied at; a weight [C, C / groups, ...] is used once for each."""
    return 2 * batch * math.prod(positions) * weight.elements


def _output_positions(size: Sequence[int], weight: Tensor, *parameters: Sequence[int]) -> list[int] | None:
    """Sizes of the output of a convolution that is not transposed."""
    kernel = weight.shape[2:]
    padding, stride, dilation = (_per_dimension(values, len(kernel)) for values in parameters)
    if padding is None or stride is None or dilation is None or 0 in stride:
        return None
    return [
        max(0, (n + 2 * p - d * (k - 1) - 1) // s + 1)
        for n, k, p, s, d in zip(size, kernel, padding, stride, dilation, strict=True)
    ]


def _per_dimension(values: Sequence[int], dimensions: int) -> Sequence[int] | None:
    if len(values) == dimensions:
        return values
    return list(values) * dimensions if len(values) == 1 else None


def _convolution(
    padding: int, stride: int, dilation: int, transposed: int | None = None
) -> Callable[[Sequence[Argument]], int | None]:
    """Convolution of an input (argument 0) with a weight (argument 1); the others are positions of arguments."""

    def flop(arguments: Sequence[Argument]) -> int | None:
        x, weight = tensor_at(arguments, 0), tensor_at(arguments, 1)
        if x is None or weight is None or len(x.shape) < 3 or len(x.shape) != len(weight.shape):
            return None
        if transposed is not None:
            is_transposed = flag_of(arguments[transposed]) if transposed < len(arguments) else None
            if is_transposed is None:
                return None
            if is_transposed:
                return _convolution_product(x.shape[0], x.shape[2:], weight)
        numbers = [integers_of(arguments[n]) if n < len(arguments) else None for n in (padding, stride, dilation)]
        known = [values for values in numbers if values is not None]
        positions = _output_positions(x.shape[2:], weight, *known) if len(known) == len(numbers) else None
        return None if positions is None else _convolution_product(x.shape[0], positions, weight)

    return flop


def _transposed_convolution(arguments: Sequence[Argument]) -> int | None:
    x, weight = tensor_at(arguments, 0), tensor_at(arguments, 1)
    if x is None or weight is None or len(x.shape) != len(weight.shape):
        return None
    return _convolution_product(x.shape[0], x.shape[2:], weight)


def _convolution_backward(arguments: Sequence[Argument]) -> int | None:
    """As much as the forward pass for each of the two gradients, of input and weight, that the mask asks for.

    Arguments: grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
    output_mask.
    """
    gradient, x, weight = (tensor_at(arguments, number) for number in range(3))
    if gradient is None or x is None or weight is None or len(arguments) < 11:
        return None
    transposed = flag_of(arguments[7])
    mask = str(arguments[10]).strip("[]").split(",")
    if transposed is None or len(mask) != 3:
        return None
    gradients = sum(flag_of(text.strip()) is True for text in mask[:2])
    positions = x.shape[2:] if transposed else gradient.shape[2:]
    return gradients * _convolution_product(x.shape[0], positions, weight)


def causal_pairs(queries: int, keys: int, *, bottom_right: bool) -> int:
    """Pairs of query and key that a causal mask leaves.

    Args:
        queries: length of the sequence of queries.
        keys: of keys.
        bottom_right: the last query sees all keys (flash-attn); else the first query sees the first key (PyTorch).
    """
    first = keys - queries + 1 if bottom_right else 1  # keys that the first query sees; below 1 it sees none

    def up_to(seen: int) -> int:
        """Pairs of all rows that see at most this many keys, if each row saw one more than the one before it."""
        seen, beyond = max(0, min(seen, keys)), max(0, seen - keys)
        return seen * (seen + 1) // 2 + beyond * keys

    return up_to(first + queries - 1) - up_to(first - 1)


def _attention(
    query: int,
    causal: int,
    times: float = 1,
    *,
    heads_last: bool = False,
    bottom_right: bool = False,
    lengths: int | None = None,
) -> Callable[[Sequence[Argument]], int | None]:
    """Attention of query, key, value (consecutive arguments) of shape [batch, heads, length, width].

    Args:
        query: position of the query.
        causal: position of the argument that tells whether the mask is causal.
        times: the forward pass counts once.
        heads_last: shapes are [batch, length, heads, width].
        bottom_right: see `causal_pairs`.
        lengths: position of the tensor of cumulative lengths, which is given where sequences have different lengths.
    """

    def flop(arguments: Sequence[Argument]) -> int | None:
        if lengths is not None and tensor_at(arguments, lengths) is not None:
            return None  # the lengths lie on the device
        tensors = [tensor_at(arguments, query + number) for number in range(3)]
        is_causal = flag_of(arguments[causal]) if causal < len(arguments) else None
        shapes = [tensor.shape for tensor in tensors if tensor is not None]
        if is_causal is None or len(shapes) < 3 or any(len(shape) != 4 for shape in shapes):
            return None  # three dimensions: sequences of different lengths
        head, length = (2, 1) if heads_last else (1, 2)
        q, k, v = shapes
        queries, keys = q[length], k[length]
        pairs = causal_pairs(queries, keys, bottom_right=bottom_right) if is_causal else queries * keys
        return int(times * 2 * q[0] * q[head] * pairs * (q[3] + v[3]))

    return flop


def _recurrent(times: int) -> Callable[[Sequence[Argument]], int | None]:
    """``_cudnn_rnn(input, weights, ...)``: each row of the input meets each weight matrix of each layer and direction.

    The matrices of the state meet as many rows: one of each sequence and step.
    """

    def flop(arguments: Sequence[Argument]) -> int | None:
        x = tensor_at(arguments, 0)
        weights = [tensor for tensor in tensors_of(arguments[1]) if len(tensor.shape) == 2] if arguments[1:] else []
        if x is None or not x.shape or not weights:
            return None
        return times * 2 * math.prod(x.shape[:-1]) * sum(weight.elements for weight in weights)

    return flop


_TIMES = BACKWARD_OF_ATTENTION
EXPERTS = tuple(
    f"{server}::{where}_fused_experts" for server in ("vllm", "sglang") for where in ("inplace", "outplace")
)
"""Operators of servers for the experts of a mixture (Triton); which experts a token has is an input."""

FLOP: dict[str, Callable[[Sequence[Argument]], int | None]] = {
    "aten::mm": _product(0, 1),
    "aten::mv": _product(0, 1),
    "aten::dot": _product(0, 1),
    "aten::vdot": _product(0, 1),
    "aten::bmm": _product(0, 1),
    "aten::addmm": _product(1, 2),
    "aten::addmv": _product(1, 2),
    "aten::baddbmm": _product(1, 2),
    "aten::addbmm": _product(1, 2),
    "aten::_addmm_activation": _product(1, 2),
    "aten::_int_mm": _product(0, 1),
    **{f"aten::_scaled_mm{version}": _product(0, 1) for version in ("", "_v2")},
    "aten::_grouped_mm": _grouped_product,
    **{f"aten::_scaled_grouped_mm{version}": _grouped_product for version in ("", "_v2")},
    "_C::cutlass_scaled_mm": _product(1, 2),
    "sgl_kernel::fp8_scaled_mm": _product(0, 1),
    "sgl_kernel::int8_scaled_mm": _product(0, 1),
    **dict.fromkeys(EXPERTS, _experts),
    "aten::convolution": _convolution(4, 3, 5, 6),
    "aten::_convolution": _convolution(4, 3, 5, 6),
    "aten::convolution_overrideable": _convolution(4, 3, 5, 6),
    "aten::cudnn_convolution": _convolution(2, 3, 4),
    "aten::cudnn_convolution_relu": _convolution(4, 3, 5),
    "aten::miopen_convolution": _convolution(3, 4, 5),
    "aten::mkldnn_convolution": _convolution(3, 4, 5),
    "aten::_slow_conv2d_forward": _convolution(5, 4, 4),
    "aten::cudnn_convolution_transpose": _transposed_convolution,
    "aten::miopen_convolution_transpose": _transposed_convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_flash_attention": _attention(0, 4),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention(0, 4),
    "aten::_scaled_dot_product_efficient_attention": _attention(0, 6),
    "aten::_scaled_dot_product_cudnn_attention": _attention(0, 6),
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention(0, 5),
    "aten::_scaled_dot_product_flash_attention_backward": _attention(1, 11, _TIMES),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention(1, 7, _TIMES),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention(1, 11, _TIMES),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention(1, 14, _TIMES),
    "aten::_flash_attention_forward": _attention(0, 8, heads_last=True, bottom_right=True),
    "aten::_flash_attention_backward": _attention(1, 11, _TIMES, heads_last=True, bottom_right=True),
    "aten::_efficient_attention_forward": _attention(0, 9, heads_last=True, lengths=4),
    "aten::_efficient_attention_backward": _attention(1, 14, _TIMES, heads_last=True, lengths=6),
    "aten::_cudnn_attention_forward": _attention(0, 10),
    "aten::_cudnn_attention_backward": _attention(1, 14, _TIMES),
    "aten::_cudnn_rnn": _recurrent(1),
    "aten::_cudnn_rnn_backward": _recurrent(2),
    "flash_attn::_flash_attn_forward": _attention(0, 5, heads_last=True, bottom_right=True),
    "flash_attn::_flash_attn_backward": _attention(1, 11, _TIMES, heads_last=True, bottom_right=True),
}
"""By the name of the operator; one that is not here does no matrix product, or its shapes do not tell how much."""
