"""A small Llama for `compiled.py` and `job_programs.py`, without any package but torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

LAYERS, HIDDEN, HEADS, INNER, WORDS, BATCH, LENGTH = 2, 512, 8, 1408, 4096, 4, 256


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Any) -> Any:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return (x * scale).type_as(x) * self.weight


class Attention(nn.Module):
    """Causal self-attention; of tensor parallel ranks each has some of the heads."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.size = hidden // heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(hidden, hidden, bias=False))

    def forward(self, x: Any) -> Any:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.input_norm, self.self_attn = Norm(hidden), Attention(hidden, heads)
        self.post_norm, self.mlp = Norm(hidden), Mlp(hidden, inner)

    def forward(self, x: Any) -> Any:
        x = x + self.self_attn(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Llama(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, layers: int = LAYERS, hidden: int = HIDDEN, heads: int = HEADS, inner: int = INNER) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, inner) for _ in range(layers))
        self.norm = Norm(hidden)
        self.head = nn.Linear(hidden, WORDS, bias=False)

    def forward(self, words: Any) -> Any:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
