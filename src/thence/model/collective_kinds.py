"""The kinds of collectives, by the names that libraries, profilers and kernels give them."""

from __future__ import annotations

import polars as pl

__all__ = ["kind_of", "kind_of_kernel"]

_KINDS = (  # the first match decides; names are in lower case, with only letters and digits
    ("ragged-all-to-all", "ragged"),
    ("reduce-scatter", "reducescatter"),
    ("all-gather", "allgather"),
    ("all-reduce", "allreduce|crossdevicereduce|(?:one|two)shot|multimem\\w*reduce"),
    ("all-to-all", "alltoall"),
    ("collective-permute", "collectivepermute"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
)
_PLAIN = (  # these must match the whole name, apart from a suffix of PyTorch
    *((kind, f"^{kind}(?:oop|coalesced)?$") for kind in ("reduce", "gather", "scatter")),
    ("send", "^i?send$"),
    ("recv", "^i?recv$"),
)
_KERNELS = (  # for names such as ncclDevKernel_Reduce_Sum_f32_RING_LL(...)
    ("send-recv", "^(?:nccl|rccl)(?:dev)?kernelsendrecv"),
    ("reduce", "^(?:nccl|rccl)(?:dev)?kernelreduce"),
)


def kind_of(name: pl.Expr) -> pl.Expr:
    """The kind of a collective, as XLA spells it, from the name that its library gives.

    ``_allgather_base`` and ``allgather_into_tensor_coalesced`` become all-gather; a name of no known kind
    stays as it is.
    """
    return pl.coalesce(_first(name, (*_KINDS, *_PLAIN)), name.cast(pl.String))


def kind_of_kernel(name: pl.Expr) -> pl.Expr:
    """The kind of collective in the name of a kernel; null if there is none, as in ``ncclDevKernel_Generic``."""
    return _first(name, (*_KINDS, *_KERNELS))


def _first(name: pl.Expr, patterns: tuple[tuple[str, str], ...]) -> pl.Expr:
    plain = name.cast(pl.String).str.to_lowercase().str.replace_all(r"[^a-z0-9]", "")
    return pl.coalesce(
        pl.when(plain.str.contains(pattern)).then(pl.lit(kind)) for kind, pattern in patterns
    )
