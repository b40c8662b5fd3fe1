"""The kinds of collectives: the names by which they are recognised, and what each means for time and bandwidth.

Bandwidths follow nccl-tests (doc/PERFORMANCE.md) and nsys-jax: with message size m in bytes, n
devices in the group and duration t in ns, in decimal GB/s (1 GB/s = 1 byte/ns)

    algorithm bandwidth = K m / t       K = n for all-gather and reduce-scatter, else 1
    bus bandwidth       = B K m / t     B = (n-1)/n for all-gather, reduce-scatter, all-to-all;
                                            2 (n-1)/n for all-reduce; else 1
"""

from __future__ import annotations

import polars as pl

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
    return pl.coalesce(pl.when(plain.str.contains(pattern)).then(pl.lit(kind)) for kind, pattern in patterns)


_OF_NCCL = "(?i)^(?:nccl|rccl)"
_TYPE = r"_(bf16|f16|f32|f64|[iu](?:8|16|32|64))_"
_TYPES = {
    "bf16": {"bfloat16"},
    "f16": {"half", "float16", "complexhalf", "complex32"},
    "f32": {"float", "float32", "complexfloat", "complex64"},
    "f64": {"double", "float64", "complexdouble", "complex128"},
}
"""Element types of reductions, in lower case, by what NCCL calls them in the names of kernels; it reduces complex
numbers as pairs."""
_FLOATING = frozenset(name for names in _TYPES.values() for name in names)
_CALLS = {
    "send-recv": {"all-to-all", "ragged-all-to-all", "gather", "scatter", "send", "recv"},
    "all-reduce": {"all-reduce", "barrier"},
    "broadcast": {"broadcast", "all-gather"},
    "reduce": {"reduce", "reduce-scatter"},
}
"""Kinds of calls that launch a kernel of a kind, where it is not only the same kind. PyTorch gathers and scatters
tensors of uneven sizes by broadcasts and reductions."""
_NAMED = frozenset(kind for kind, _ in (*_KINDS, *_PLAIN)) - {"collective-permute"}


def kernels_of_nccl(names: pl.Series) -> pl.DataFrame:
    """What the names of NCCL's kernels say: kind, and type of the elements that it reduces.

    Both are null for all other kernels, and where the name does not say it.
    """
    name = pl.col("name")
    columns = {"kind": kind_of_kernel(name), "type": name.cast(pl.String).str.extract(_TYPE)}
    is_nccl = name.cast(pl.String).str.contains(_OF_NCCL)
    return (
        names.rename("name")
        .to_frame()
        .select(pl.when(is_nccl).then(value).alias(key) for key, value in columns.items())
    )


def can_launch(kind: str | None, type_: str | None, call: str, element_type: str | None) -> bool:
    """Whether a call can have launched a kernel of NCCL: nothing contradicts it.

    Args:
        kind: of collective in the kernel's name; None if it names none.
        type_: of elements in the kernel's name; None if it names none.
        call: kind of the call. A kind that no library has, and a batch of calls, may launch any kernel.
        element_type: of the call; None if it has several.
    """
    if kind is not None and call in _NAMED and call not in _CALLS.get(kind, {kind}):
        return False
    if type_ is None or element_type is None or call == "barrier":
        return True
    element = element_type.removeprefix("torch.").lower()
    return element in _TYPES[type_] if type_ in _TYPES else element not in _FLOATING


JOINT = (*("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"), "barrier")
"""Every participant needs data from every other, so none can end before the last has begun, and they
end together."""
FROM_ROOT = ("broadcast", "scatter")
"""Receivers wait for the root; the root may end before they begin."""
TO_ROOT = ("reduce", "gather")
"""The root waits for all others; they may end before it begins."""
PEERS = ("send", "recv")
"""A pair: source and destination."""
MESSAGES = (*PEERS, "send-recv", "coalesced", "collective-permute")
"""Sends and receives, alone or in batches: a device waits for its neighbours only."""

_SCALED = ("all-gather", "reduce-scatter")
_PARTIAL = ("all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all")


def bandwidths(time_ns: str) -> tuple[pl.Expr, pl.Expr]:
    """Algorithm and bus bandwidth in GB/s from the columns collective, bytes and group_size.

    Args:
        time_ns: name of the column that holds the time; 0 and null give null.
    """
    kind, n = pl.col("collective"), pl.col("group_size").cast(pl.Float64)
    scale = pl.when(kind.is_in(_SCALED)).then(n).otherwise(1.0)
    bus = (
        pl.when(kind.is_in(_PARTIAL)).then((n - 1) / n).when(kind == "all-reduce").then(2 * (n - 1) / n).otherwise(1.0)
    )
    timed = pl.when(pl.col(time_ns) > 0).then(pl.col(time_ns))
    algorithm = scale * pl.col("bytes") / timed
    return algorithm, bus * algorithm
