"""Bytes that an operator must at least move between memory and the GPU's cores, by the shapes of its inputs.

Each input is read once and each output written once, as if caches were perfect. Profilers record inputs only, so the
output follows from the operator. What a kernel really moves can be more (data read again, padding), or less where the
data is in the L2 cache. Each function returns None where the record lacks what it needs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from thence.attribution.work.flop import EXPERTS, FLOP, experts_of
from thence.attribution.work.operands import ELEMENT_TYPES, Tensor, flag_of, integers_of, tensor_at, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from thence.attribution.work.operands import Argument

    Arguments = Sequence[Argument]
    Traffic = Callable[[Arguments], int | None]

_TRUTH_BYTES = 1
_INDEX_BYTES = 8  # indices of PyTorch are int64


def _all_inputs(arguments: Arguments) -> int | None:
    """Bytes of all tensors that the operator takes."""
    sizes = [tensor.bytes for argument in arguments for tensor in tensors_of(argument)]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) and sizes else None


def _broadcast(tensors: Sequence[Tensor]) -> int:
    """Number of elements of tensors that are broadcast against each other."""
    longest = max(len(tensor.shape) for tensor in tensors)
    shapes = [(1,) * (longest - len(tensor.shape)) + tensor.shape for tensor in tensors]
    return math.prod(0 if 0 in sizes else max(sizes) for sizes in zip(*shapes, strict=True))


def _result_bytes(tensors: Sequence[Tensor]) -> int | None:
    """Bytes of an element of a result: tensors with dimensions decide before those without, floats before integers."""
    candidates = [tensor for tensor in tensors if tensor.shape] or list(tensors)
    types = [known for tensor in candidates if (known := ELEMENT_TYPES.get(tensor.type or "")) is not None]
    return max((known.floating, known.bytes) for known in types)[1] if len(types) == len(candidates) else None


def _pointwise(arguments: Arguments) -> int | None:
    """All inputs, and an output of their common shape."""
    return _with_output(arguments, None)


def _pointwise_truth(arguments: Arguments) -> int | None:
    """All inputs, and an output of truth values."""
    return _with_output(arguments, _TRUTH_BYTES)


def _with_output(arguments: Arguments, element_bytes: int | None) -> int | None:
    tensors = [tensor for argument in arguments for tensor in tensors_of(argument)]
    inputs = _all_inputs(arguments)
    if inputs is None:
        return None
    size = element_bytes or _result_bytes(tensors)
    return None if size is None else inputs + size * _broadcast(tensors)


def _in_place(arguments: Arguments) -> int | None:
    """All inputs, and the first once more, which is written."""
    inputs, first = _all_inputs(arguments), tensor_at(arguments, 0)
    if inputs is None or first is None or first.bytes is None:
        return None
    return inputs + first.bytes


def _copy(arguments: Arguments) -> int | None:
    """``copy_(to, from)``: one is written, the other read."""
    written, read = tensor_at(arguments, 0), tensor_at(arguments, 1)
    if written is None or read is None or written.bytes is None or read.bytes is None:
        return None
    return written.bytes + read.bytes


def _write(arguments: Arguments) -> int | None:
    """The first argument is written."""
    first = tensor_at(arguments, 0)
    return None if first is None else first.bytes


def _like_first(arguments: Arguments) -> int | None:
    """All inputs, and an output like the first."""
    inputs, first = _all_inputs(arguments), tensor_at(arguments, 0)
    if inputs is None or first is None or first.element_bytes is None:
        return None
    return inputs + first.element_bytes * first.elements


def _dropout(arguments: Arguments) -> int | None:
    """``native_dropout``: an output like the input, and a mask of truth values."""
    first, same = tensor_at(arguments, 0), _like_first(arguments)
    return None if first is None or same is None else same + _TRUTH_BYTES * first.elements


def _reduction(dimensions: int | None) -> Traffic:
    """The input, and an output without the dimensions that this argument names; of all of them if it is not given."""

    def traffic(arguments: Arguments) -> int | None:
        first = tensor_at(arguments, 0)
        if first is None or first.bytes is None or first.element_bytes is None:
            return None
        named = arguments[dimensions] if dimensions is not None and dimensions < len(arguments) else None
        axes = integers_of(named) if named is not None else ()
        if axes is None or any(not -len(first.shape) <= axis < len(first.shape) for axis in axes):
            return None
        kept = set(range(len(first.shape))) - {axis % len(first.shape) for axis in axes} if axes else set()
        return first.bytes + first.element_bytes * math.prod(first.shape[axis] for axis in kept)

    return traffic


def _product(left: int, right: int) -> Traffic:
    """All inputs, and the product [..., M, N], of the type of the left matrix; ``out=`` makes it one of the inputs."""

    def traffic(arguments: Arguments) -> int | None:
        given = [argument for argument in arguments if isinstance(argument, Tensor)]
        if len(given) > right + 1:
            return _all_inputs(arguments)
        inputs, a, b = _all_inputs(arguments), tensor_at(arguments, left), tensor_at(arguments, right)
        if inputs is None or a is None or b is None or a.element_bytes is None or not a.shape or not b.shape:
            return None
        columns = b.shape[-1] if len(b.shape) > 1 else 1
        return inputs + a.element_bytes * math.prod(a.shape[:-1]) * columns

    return traffic


def _embedding(arguments: Arguments) -> int | None:
    """``embedding(weight, indices)``: the rows that are taken are read and written."""
    weight, indices = tensor_at(arguments, 0), tensor_at(arguments, 1)
    if weight is None or indices is None or indices.bytes is None or weight.element_bytes is None or not weight.shape:
        return None
    return indices.bytes + 2 * indices.elements * weight.shape[-1] * weight.element_bytes


def _embedding_backward(arguments: Arguments) -> int | None:
    """``embedding_dense_backward(gradient, indices, rows)``: the gradient is read, all rows of the result written."""
    gradient, indices = tensor_at(arguments, 0), tensor_at(arguments, 1)
    rows = integers_of(arguments[2]) if len(arguments) > 2 else None
    if gradient is None or indices is None or gradient.element_bytes is None or not gradient.shape or not rows:
        return None
    read = gradient.element_bytes * gradient.elements + _INDEX_BYTES * indices.elements
    return read + gradient.element_bytes * rows[0] * gradient.shape[-1]


def _gather(index: int) -> Traffic:
    """The index is read, and as many elements are read and written."""

    def traffic(arguments: Arguments) -> int | None:
        first, taken = tensor_at(arguments, 0), tensor_at(arguments, index)
        if first is None or taken is None or first.element_bytes is None or taken.bytes is None:
            return None
        return taken.bytes + 2 * taken.elements * first.element_bytes

    return traffic


def _index_select(arguments: Arguments) -> int | None:
    """``index_select(input, dimension, index)``: whole slices are read and written."""
    first, index = tensor_at(arguments, 0), tensor_at(arguments, 2)
    axis = integers_of(arguments[1]) if len(arguments) > 2 else None
    if first is None or index is None or not axis or first.element_bytes is None or not first.shape:
        return None
    if not -len(first.shape) <= axis[0] < len(first.shape) or first.shape[axis[0]] == 0:
        return None
    taken = first.elements // first.shape[axis[0]] * index.elements
    return _INDEX_BYTES * index.elements + 2 * taken * first.element_bytes


def _index_copy(arguments: Arguments) -> int | None:
    """``index_copy_(to, dimension, index, source)``: the source is read, and as much is written."""
    index, source = tensor_at(arguments, 2), tensor_at(arguments, 3)
    if index is None or source is None or index.bytes is None or source.bytes is None:
        return None
    return index.bytes + 2 * source.bytes


def _arange(arguments: Arguments) -> int | None:
    """``arange(start, end, step, ...)``: as many numbers as there are steps are written; of int64 by default."""
    bounds = [_number(argument) for argument in arguments[: max(len(arguments) - _ARANGE_OPTIONS, 0)]]
    if not bounds or None in bounds:
        return None
    known = [bound for bound in bounds if bound is not None]
    start, end, step = {1: (0.0, *known, 1.0), 2: (*known, 1.0)}.get(len(known), tuple(known[:3]))
    return None if step == 0 else _INDEX_BYTES * max(math.ceil((end - start) / step), 0)


_ARANGE_OPTIONS = 4  # dtype, layout, device and pin_memory


def _number(argument: Argument) -> float | None:
    try:
        return float(argument) if isinstance(argument, str) else None
    except ValueError:
        return None


def _loss(arguments: Arguments) -> int | None:
    """``nll_loss_forward(input, target)``: one element of each row, and the target."""
    first, target = tensor_at(arguments, 0), tensor_at(arguments, 1)
    if first is None or target is None or target.bytes is None or first.element_bytes is None:
        return None
    return target.bytes + target.elements * first.element_bytes


def _loss_backward(arguments: Arguments) -> int | None:
    """``nll_loss_backward(gradient, input, target)``: one element of each row; another kernel writes the zeros."""
    return _loss(arguments[1:])


def _split(arguments: Arguments) -> int | None:
    """``split_with_sizes_copy(input, ...)``: the input is read, and as much is written."""
    first = tensor_at(arguments, 0)
    return None if first is None or first.bytes is None else 2 * first.bytes


def _attention(query: int, outputs: int) -> Traffic:
    """All inputs; outputs: of the forward pass one like the query, of the backward pass the three gradients."""

    def traffic(arguments: Arguments) -> int | None:
        inputs = _all_inputs(arguments)
        tensors = [tensor_at(arguments, query + number) for number in range(3)]
        sizes = [tensor.bytes for tensor in tensors[:outputs] if tensor is not None]
        known = [size for size in sizes if size is not None]
        return inputs + sum(known) if inputs is not None and len(known) == outputs else None

    return traffic


def _convolution(name: str, transposed: int | None = None) -> Traffic:
    """All inputs, and the output, whose positions are known from the FLOP; of no transposed convolution."""

    def traffic(arguments: Arguments) -> int | None:
        inputs, weight, flop = _all_inputs(arguments), tensor_at(arguments, 1), FLOP[name](arguments)
        if inputs is None or weight is None or flop is None or not weight.elements or weight.element_bytes is None:
            return None
        if transposed is not None and flag_of(arguments[transposed]):
            return None
        return inputs + flop // (2 * weight.elements) * weight.shape[0] * weight.element_bytes

    return traffic


def _convolution_backward(arguments: Arguments) -> int | None:
    """The inputs, and the gradients of input and weight that the mask asks for."""
    inputs = _all_inputs(arguments)
    mask = str(arguments[10]).strip("[]").split(",") if len(arguments) > 10 else []
    if inputs is None or len(mask) != 3:
        return None
    wanted = [tensor_at(arguments, number + 1) for number in range(2) if flag_of(mask[number].strip())]
    return inputs + sum(tensor.bytes or 0 for tensor in wanted if tensor is not None)


def _recurrent(arguments: Arguments) -> int | None:
    """``_cudnn_rnn(input, weights, stride, packed weights, ...)``: the input, the packed weights, and the output."""
    x, packed = tensor_at(arguments, 0), tensor_at(arguments, 3)
    hidden = integers_of(arguments[7]) if len(arguments) > 13 else None
    both = flag_of(arguments[13]) if len(arguments) > 13 else None
    if x is None or packed is None or not hidden or both is None or x.bytes is None or packed.bytes is None:
        return None
    return x.bytes + packed.bytes + (x.element_bytes or 0) * math.prod(x.shape[:-1]) * hidden[0] * (1 + both)


def _scaled_product(dtype: int) -> Traffic:
    """``_scaled_mm(a, b, scale_a, scale_b, bias, scale_result, out_dtype)``: all inputs, and the product."""

    def traffic(arguments: Arguments) -> int | None:
        inputs, a, b = _all_inputs(arguments), tensor_at(arguments, 0), tensor_at(arguments, 1)
        size = _stated_bytes(arguments, dtype, None)
        if inputs is None or a is None or b is None or size is None or not a.shape or not b.shape:
            return None
        return inputs + size * math.prod(a.shape[:-1]) * b.shape[-1]

    return traffic


def _grouped_product(offsets: int, dtype: int) -> Traffic:
    """``_grouped_mm(a, b, offsets, bias, dtype)``: all inputs, and the product; of the type of a, if none is stated.

    No more matrices of b are read than a has rows for them; fewer, if groups are empty, which only the device knows.
    """

    def traffic(arguments: Arguments) -> int | None:
        inputs, a, b = _all_inputs(arguments), tensor_at(arguments, 0), tensor_at(arguments, 1)
        size = _stated_bytes(arguments, dtype, None if a is None else a.element_bytes)
        groups = tensor_at(arguments, offsets)
        if inputs is None or a is None or b is None or b.bytes is None or size is None:
            return None
        dimensions = len(a.shape), len(b.shape)
        if dimensions == (2, 3):
            unread = max(b.shape[0] - a.shape[0], 0) * (b.bytes // max(b.shape[0], 1))
            return inputs - unread + size * a.shape[0] * b.shape[2]
        if dimensions == (2, 2) and groups is not None:
            return inputs + size * groups.elements * a.shape[0] * b.shape[1]
        if dimensions in ((3, 2), (3, 3)):
            matrices = a.shape[0] if dimensions == (3, 3) else 1
            return inputs + size * matrices * a.shape[1] * b.shape[-1]
        return None

    return traffic


def _experts(arguments: Arguments) -> int | None:
    """The tokens, read and written, and the weights of as many experts as the tokens can have."""
    x, weight, known = tensor_at(arguments, 0), tensor_at(arguments, 1), experts_of(arguments)
    if x is None or weight is None or known is None or x.bytes is None or weight.element_bytes is None:
        return None
    experts, elements, rows = known
    return 2 * x.bytes + min(experts, rows) * elements * weight.element_bytes


_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 8, 11: 1, 15: 2, 23: 1, 24: 1}
"""Bytes of an element by the number of its torch::ScalarType: Byte, Char, Short, Int, Long, Half, Float, Double, Bool,
BFloat16, Float8_e5m2, Float8_e4m3fn."""


def _stated_bytes(arguments: Arguments, number: int, default: int | None) -> int | None:
    """Bytes of an element of the type that an argument states; the default if it states none."""
    code = integers_of(arguments[number]) if number < len(arguments) and arguments[number] is not None else None
    return default if not code else _SCALAR_BYTES.get(code[0])


def _converted(arguments: Arguments) -> int | None:
    """``_to_copy(input, dtype)``: the input is read, and as many elements are written."""
    first = tensor_at(arguments, 0)
    size = _stated_bytes(arguments, 1, None)
    return None if first is None or first.bytes is None or size is None else first.bytes + size * first.elements


def _like(dtype: int) -> Traffic:
    """``ones_like(input, dtype)``: as many elements are written as the input has."""

    def traffic(arguments: Arguments) -> int | None:
        first = tensor_at(arguments, 0)
        size = None if first is None else _stated_bytes(arguments, dtype, first.element_bytes)
        return None if first is None or size is None else size * first.elements

    return traffic


def _created(sizes: int, dtype: int) -> Traffic:
    """``zeros(sizes, dtype)``: these elements are written; of float32 unless their type is stated."""

    def traffic(arguments: Arguments) -> int | None:
        shape = integers_of(arguments[sizes]) if sizes < len(arguments) else None
        size = _stated_bytes(arguments, dtype, 4)
        return None if shape is None or size is None or min(shape, default=0) < 0 else size * math.prod(shape)

    return traffic


def _inductor(arguments: Arguments) -> int | None:
    """A Triton kernel by Inductor: all its tensors, inputs and outputs alike; those changed in place count once."""
    return _all_inputs(arguments)


def _lists(read: Sequence[int], written: Sequence[int]) -> Callable[[Arguments, int | None], int | None]:
    """Lists of tensors by the positions of arguments; where their element type is not recorded, it must be given."""

    def traffic(arguments: Arguments, element_bytes: int | None) -> int | None:
        moved = [
            tensor
            for number in (*read, *written)
            if number < len(arguments)
            for tensor in tensors_of(arguments[number])
        ]
        sizes = [(tensor.element_bytes or element_bytes, tensor.elements) for tensor in moved]
        known = [size * elements for size, elements in sizes if size is not None]
        return sum(known) if known and len(known) == len(sizes) else None

    return traffic


def _chunk_cat(arguments: Arguments, element_bytes: int | None) -> int | None:
    """``_chunk_cat(tensors, dimension, chunks, out)``: the tensors are read, the result with its padding is written.

    Its kernel names the types only if it converts: else the tensors have the type of the result.
    """
    out = tensor_at(arguments, 3)
    if out is None or out.bytes is None:
        return _lists((0,), (0,))(arguments, element_bytes)
    read = _lists((0,), ())(arguments, element_bytes or out.element_bytes)
    return None if read is None else read + out.bytes


_POINTWISE = """
abs add addcdiv addcmul atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min cos cumsum
div elu elu_backward erf exp exp2 expm1 flip floor floor_divide fmod gelu gelu_backward glu_backward hardsigmoid
hardswish hardswish_backward hardtanh hardtanh_backward leaky_relu leaky_relu_backward lerp log log10 log1p log2
log_sigmoid_forward masked_fill maximum minimum mul nan_to_num neg pow reciprocal relu remainder roll round rsqrt rsub
sigmoid sigmoid_backward sign silu silu_backward sin softplus softplus_backward sqrt sub tanh tanh_backward
threshold_backward tril triu trunc where xlogy
"""
_TRUTH = """
eq ge gt isfinite isinf isnan le logical_and logical_not logical_or logical_xor lt ne
"""

_LIKE_FIRST = """
_fused_rms_norm _fused_rms_norm_backward _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data clone
cudnn_batch_norm cudnn_batch_norm_backward native_batch_norm native_batch_norm_backward native_dropout_backward
native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward rms_norm
"""

TRAFFIC: dict[str, Traffic] = {
    **{f"aten::{name}": _pointwise for name in _POINTWISE.split()},
    **{f"aten::{name}_": _in_place for name in _POINTWISE.split()},
    **{f"aten::{name}": _pointwise_truth for name in _TRUTH.split()},
    **{f"aten::{name}": _like_first for name in _LIKE_FIRST.split()},
    **{f"aten::{name}": _write for name in ("fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_")},
    **{f"aten::{name}": _reduction(1) for name in ("sum", "mean", "amax", "amin", "argmax", "argmin", "logsumexp")},
    **{f"aten::{name}": _reduction(1) for name in ("std", "var", "var_mean", "any", "all")},
    **{f"aten::{name}": _reduction(None) for name in ("max", "min", "prod")},
    **{f"aten::{name}": _product(0, 1) for name in ("mm", "mv", "dot", "vdot", "bmm", "_int_mm")},
    **{f"aten::{name}": _product(1, 2) for name in ("addmm", "addmv", "baddbmm", "_addmm_activation")},
    "aten::linalg_vector_norm": _reduction(2),
    "aten::copy_": _copy,
    "aten::native_dropout": _dropout,
    "aten::embedding": _embedding,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::gather": _gather(2),
    "aten::_to_copy": _converted,
    **{f"aten::{name}": _like(1) for name in ("ones_like", "zeros_like", "rand_like", "randn_like")},
    "aten::full_like": _like(2),
    **{f"aten::{name}": _created(0, 1) for name in ("zeros", "ones")},
    "aten::full": _created(0, 2),
    "aten::index_select": _index_select,
    "aten::index_copy_": _index_copy,
    "aten::arange": _arange,
    "aten::scalar_tensor": lambda _: _INDEX_BYTES,
    "aten::nll_loss_forward": _loss,
    "aten::nll_loss_backward": _loss_backward,
    "aten::split_with_sizes_copy": _split,
    "aten::_scaled_mm": _scaled_product(6),
    "aten::_grouped_mm": _grouped_product(2, 4),
    "aten::_scaled_grouped_mm": _grouped_product(4, 7),
    "_C::cutlass_scaled_mm": _all_inputs,
    **{f"sgl_kernel::{name}_scaled_mm": _scaled_product(4) for name in ("fp8", "int8")},
    **dict.fromkeys(EXPERTS, _experts),
    "aten::_cudnn_rnn": _recurrent,
    **{f"aten::{name}": _convolution(f"aten::{name}", 6) for name in ("convolution", "_convolution")},
    "aten::cudnn_convolution": _convolution("aten::cudnn_convolution"),
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_flash_attention": _attention(0, 1),
    "aten::_scaled_dot_product_efficient_attention": _attention(0, 1),
    "aten::_scaled_dot_product_cudnn_attention": _attention(0, 1),
    "aten::_flash_attention_forward": _attention(0, 1),
    "aten::_efficient_attention_forward": _attention(0, 1),
    "aten::_cudnn_attention_forward": _attention(0, 1),
    "aten::_scaled_dot_product_flash_attention_backward": _attention(1, 3),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention(1, 3),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention(1, 3),
    "aten::_flash_attention_backward": _attention(1, 3),
    "aten::_efficient_attention_backward": _attention(1, 3),
    "aten::_cudnn_attention_backward": _attention(1, 3),
}
"""By the name of the operator; one that is not here has no model."""

LISTS: dict[str, Callable[[Arguments, int | None], int | None]] = {
    # parameters, gradients, moments: all are read, and all but the gradients are written
    **{f"aten::_fused_{name}_": _lists((0, 1, 2, 3, 4), (0, 2, 3, 4)) for name in ("adam", "adamw")},
    "aten::_fused_sgd_": _lists((0, 1, 2), (0, 2)),
    "aten::_foreach_copy_": _lists((1,), (0,)),
    "aten::cat": _lists((0,), (0,)),
    "aten::stack": _lists((0,), (0,)),
    "aten::_chunk_cat": _chunk_cat,
    **{f"aten::_foreach_{name}_": _lists((0, 1), (0,)) for name in ("add", "sub", "mul", "div", "lerp")},
    **{f"aten::_foreach_{name}_": _lists((0, 1, 2), (0,)) for name in ("addcmul", "addcdiv")},
    **{f"aten::_foreach_{name}": _lists((0, 1), (0,)) for name in ("add", "sub", "mul", "div")},
    **{f"aten::_foreach_{name}": _lists((0,), (0,)) for name in ("sqrt", "neg")},
    "aten::_foreach_sqrt_": _lists((0,), (0,)),
    "aten::_foreach_zero_": _lists((), (0,)),
    "aten::_foreach_norm": _lists((0,), ()),
}
"""Operators on lists of tensors, whose element type Kineto does not record: also given the bytes of an element."""


def traffic_of(name: str, arguments: Arguments, element_bytes: int | None) -> int | None:
    """Bytes that a call moves at least; None if there is no model, or the record lacks what it needs.

    Args:
        name: of the operator, or of a Triton kernel by Inductor, whose launch is recorded as an operator.
        element_bytes: bytes of an element that the kernel computes with, for lists of tensors; None if unknown.
    """
    if name in TRAFFIC:
        return TRAFFIC[name](arguments)
    if name in LISTS:
        return LISTS[name](arguments, element_bytes)
    return _inductor(arguments) if name.startswith("triton_") else None
