"""Attention of servers over sequences of different lengths, whose lengths lie on the device.

The operator's inputs tell heads and widths; the name of the server's step tells the sums of the lengths
(`thence.model.server_steps`). Each query counts with all keys up to its own, as in attention without a window.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from thence.attribution.work.operands import tensor_at
from thence.model.server_steps import server_step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thence.attribution.work.operands import Argument

SERVED_ATTENTION: Mapping[str, int | None] = MappingProxyType(
    {
        **dict.fromkeys(("vllm::unified_attention", "vllm::unified_attention_with_output")),
        **dict.fromkeys(("_vllm_fa2_C::varlen_fwd", "flash_attn::_flash_attn_varlen_forward")),
        **dict.fromkeys(("_vllm_fa3_C::fwd", "flash_attn_3::fwd", "sgl_kernel::fwd"), 5),
    }
)
"""Operators with query [tokens, heads, width], and key and value [..., heads, width], as their first three inputs; and
the position of a second part of the queries (FlashAttention 3: of latent attention), whose values are keys, too."""


def served_attention(name: str, arguments: Sequence[Argument], step: str | None) -> tuple[int | None, int | None]:
    """FLOP and bytes of one call; None where its inputs or the step do not tell, or contradict each other.

    Bytes are those of all keys and values that the queries attend to, of the queries and of the result.

    Args:
        name: of the operator, one of `SERVED_ATTENTION`.
        step: name of the step in which it was launched.
    """
    said = server_step(step) if step is not None else None
    tensors = [tensor_at(arguments, number) for number in range(3)]
    q, k, v = (tensor.shape if tensor is not None and len(tensor.shape) > 2 else None for tensor in tensors)
    if said is None or said.lengths is None or q is None or k is None or v is None or tensors[0] is None:
        return None, None
    lengths, size = said.lengths, tensors[0].element_bytes
    if len(q) != 3 or q[0] < lengths.queries or k[-2] == 0 or q[1] % k[-2] or q[2] != k[-1]:
        return None, None
    second = SERVED_ATTENTION[name]
    if second is not None and tensor_at(arguments, second) is not None:
        return None, None
    width = q[2] + v[-1]
    flop = 2 * lengths.pairs * q[1] * width
    return flop, None if size is None else size * width * (lengths.keys * k[-2] + lengths.queries * q[1])
