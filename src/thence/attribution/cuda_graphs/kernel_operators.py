"""Whether an operator can have launched a kernel: the check of an attribution by order alone.

There are two sources. Launches with device work, in the same traces, show which operators launch which kernels: if a
kernel and an operator both occur there, but never together, they contradict each other. And the names of some families
of kernels show what they compute (`_FAMILIES`): kernels of PyTorch and cuBLAS, with their names in PyTorch 2.1 to 2.12.
For all other kernels and operators the verdict is unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.cuda_graphs.replays import in_cuda_graph

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thence.model.attributed import Attributed


class Verdict(Enum):
    """What is known of a kernel and the operator that would have launched it."""

    FITS = "fits"
    UNKNOWN = "unknown"
    CONTRADICTS = "contradicts"


_PRODUCTS = r"mm|matmul|linear|conv|dot|mv|einsum|attention|lstm|gru|rnn|linalg|cholesky|solve|svd|outer|cdist|addr"
_FAMILIES = tuple(
    (re.compile(kernel), re.compile(operator))
    for kernel, operator in (
        (r"(?i)gemm|gemv|cublas|nvjet|splitK(?!v)|^Cijk_|s\d+gemm", _PRODUCTS),
        (r"(?i)flash_|fmha|::fused_attention", r"attention|flash|sdp"),
        (r"(?i)softmax|SoftMax", r"softmax|attention|cross_entropy|nll|multinomial|logit"),
        (r"layer_?norm|LayerNorm|GammaBeta", r"norm"),
        (r"FillFunctor", r"fill|zero|ones|full|new_|empty|mask|pad|scatter|index|sum|dropout|arange|eye|tri|like"),
        (r"CatArrayBatchedCopy", r"cat|stack|pack"),
        (r"embedding|Embedding", r"embedding"),
        (r"CUDAFunctor_add|CUDAFunctorOnSelf_add|CUDAFunctorOnOther_add", r"add|sub|accumulate|sum|lerp|conv|norm"),
        (r"gelu|Gelu", r"gelu"),
        (r"silu", r"silu|swish|glu"),
        (r"tanh_kernel", r"tanh|gelu|lstm|gru|rnn"),
        (r"sigmoid_kernel", r"sigmoid|glu|silu|lstm|gru"),
        (r"(?i)^nccl", r"nccl|c10d|collective|all_?reduce|all_?gather|reduce_scatter|send|recv|broadcast|all_?to"),
    )
)
"""Pairs of patterns: a kernel whose name matches the first must have an operator whose name matches the second.

This applies to PyTorch's own operators."""
_OWN_OPERATORS = re.compile(r"aten::|c10d::|nccl:")
_TRITON = re.compile(r"triton_\w+")
_SPECIALIZED = re.compile(r"_\d+[cd][\dcde]*")
"""What older versions of Triton append to a kernel's name: its specialized arguments."""


@dataclass
class KernelOperators:
    """Which operators launch which kernels, by the launches with device work of some traces.

    Attributes:
        pairs: the name of a kernel, and the name of an operator around a launch of it.
    """

    pairs: frozenset[tuple[str, str]] = frozenset()
    _known: dict[tuple[str, str | None], Verdict] = field(default_factory=dict)

    @cached_property
    def kernels(self) -> frozenset[str]:
        """Names of the kernels seen."""
        return frozenset(kernel for kernel, _ in self.pairs)

    @cached_property
    def operators(self) -> frozenset[str]:
        """Names of the operators seen."""
        return frozenset(operator for _, operator in self.pairs)

    @classmethod
    def of(cls, traces: Iterable[Attributed]) -> KernelOperators:
        """The pairs that these traces show."""
        pairs: set[tuple[str, str]] = set()
        for trace in traces:
            rows = ~in_cuda_graph(trace) & (trace.gpu["kind"] == "kernel").to_numpy()
            chosen = pl.Series(np.flatnonzero(rows))
            seen = pl.DataFrame({"name": trace.gpu["name"], "op": trace.places["op"]})[chosen]
            told = seen.drop_nulls().unique().select(pl.all().cast(pl.String))
            pairs.update((str(name), str(op)) for name, op in told.iter_rows())
        return cls(frozenset(pairs))

    def verdict(self, kernel: str, operator: str | None) -> Verdict:
        """Whether the operator can have launched the kernel."""
        key = kernel, operator
        if key not in self._known:
            self._known[key] = self._judged(kernel, operator)
        return self._known[key]

    def _judged(self, kernel: str, operator: str | None) -> Verdict:
        if operator is None:
            return Verdict.UNKNOWN
        if (kernel, operator) in self.pairs:
            return Verdict.FITS
        if _TRITON.match(operator):  # Inductor names it after its kernel
            rest = kernel.removeprefix(operator) if kernel.startswith(operator) else None
            same = rest == "" or (rest is not None and _SPECIALIZED.fullmatch(rest))
            return Verdict.FITS if same else Verdict.CONTRADICTS
        if not _OWN_OPERATORS.match(operator):
            return Verdict.UNKNOWN  # a custom operator can launch any kernel
        fitting = [bool(of.search(operator)) for name, of in _FAMILIES if name.search(kernel)]
        if fitting:
            return Verdict.FITS if any(fitting) else Verdict.CONTRADICTS
        never_together = kernel in self.kernels and operator in self.operators
        return Verdict.CONTRADICTS if never_together else Verdict.UNKNOWN
