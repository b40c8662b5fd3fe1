"""A small Llama for `gpu_compiled.py`, without any package but torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

LAYERS, HIDDEN, HEADS, INNER, WORDS, BATCH, LENGTH = 2, 512, 8, 1408, 4096, 4, 256


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Any) -> Any:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return (x * scale).type_as(x) * self.weight


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN, bias=False))

    def forward(self, x: Any) -> Any:
        shape = (BATCH, LENGTH, HEADS, HIDDEN // HEADS)
        q, k, v = (
            projection(x).view(shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(BATCH, LENGTH, HIDDEN))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.self_attn = Norm(), Attention()
        self.post_norm, self.mlp = Norm(), Mlp()

    def forward(self, x: Any) -> Any:
        x = x + self.self_attn(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Llama(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, words: Any) -> Any:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
