"""The captures in a trace: API calls that add nodes to CUDA graphs and therefore have no device work in the trace.

Inference servers record such a trace once, when they capture a graph for every batch size, and replay the
graphs later. Between the calls that begin and end a capture, launches, memcpys and memsets leave no device
activity. AMD's profiler names the kernel of each launch (``kernel`` among the arguments of hipLaunchKernel and
similar calls: RoctracerActivity_inl.h of pytorch/kineto); NVIDIA's records only the calls and their order.

The calls are turned into activities of zero duration, so that the code that attributes activities can be used for
them.

The replays are matched with these launches in order (`by_sequence`). If the trace names the kernels of a capture
(AMD), an activity fits a launch of its own kernel (``capture_names``). Without names (NVIDIA) the place follows from
the order (``capture_order``): an activity may be any launch of its kind whose operator can have launched the kernel,
and counts more where the operator is known to launch such kernels. Counts alone prove nothing: at least one kernel
must fit its operator.

Whether an operator can have launched a kernel is known from two sources. Launches with device work, in the same
traces, show which operators launch which kernels: if a kernel and an operator both occur there, but never together,
they contradict each other. And the names of some families of kernels show what they compute (`_FAMILIES`): kernels of
PyTorch and cuBLAS, with their names in PyTorch 2.1 to 2.12. For all other kernels and operators the verdict is
unknown.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.attribute import attribute
from thence.attribution.cuda_graphs.by_sequence import FITS, POSSIBLE, BySequence, LaunchSequence
from thence.attribution.cuda_graphs.eager_run import EagerRun
from thence.attribution.cuda_graphs.replays import in_cuda_graph
from thence.attribution.cuda_graphs.signatures import KernelNames
from thence.model.launches import CALLS
from thence.model.names import distinct_names
from thence.model.tables import GPU, Tables

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from thence.attribution.cuda_graphs.assigned_labels import PlaceRows
    from thence.attribution.cuda_graphs.replays import Replays
    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed


_CALLS = {
    "kernel": r"^(?:cuda|cu|hip)\w*Launch\w*Kernel",
    "memcpy": r"^(?:cuda|cu|hip)Memcpy",
    "memset": r"^(?:cuda|cu|hip)Memset",
}
"""API calls that add a node to a graph that is being captured, by the kind of the node's activity."""
_BEGIN, _END = r"StreamBeginCapture", r"StreamEndCapture"
# On AMD's GPUs memcpys and memsets of a graph run as kernels of the runtime (rocclr/device/blitcl.cpp of ROCm/clr).
_BLIT = {"memcpy": r"^__amd_rocclr_copy", "memset": r"^__amd_rocclr_fill"}
_THREAD = ["rank", "process", "thread"]


def names_of_kinds(kinds: pl.DataFrame) -> pl.DataFrame:
    """Variants of activities, with kernels of AMD's runtime that copy or set as memcpys and memsets.

    Args:
        kinds: columns kind and name, as `signatures.Variants.frame`.
    """
    kind = pl.col("kind").cast(pl.String)
    for blit, pattern in _BLIT.items():
        kind = pl.when(pl.col("name").str.contains(pattern)).then(pl.lit(blit)).otherwise(kind)
    return kinds.with_columns(kind=kind.cast(kinds.schema["kind"]))


def captured_calls(trace: Tables) -> pl.DataFrame:
    """The calls of all captures of a trace, in the order of the calls.

    Args:
        trace: gpu and host are read.

    Returns:
        columns ``row`` (of host), ``rank``, ``kind``, and ``capture``: a number for each capture, in the order
        in which they began. If the trace shows no beginning of a capture, each run of consecutive calls without
        device work on one thread counts as a capture.
    """
    host = trace.host.with_row_index("row").filter(CALLS)
    names = distinct_names(host["name"])
    text = names.cast(pl.String)
    kinds = [pl.when(text.str.contains(pattern)).then(pl.lit(kind)).otherwise(None) for kind, pattern in _CALLS.items()]
    classified = pl.DataFrame({"name": names}).with_columns(
        pl.coalesce(kinds).alias("kind"),
        begins=text.str.contains(_BEGIN, literal=True),
        ends=text.str.contains(_END, literal=True),
    )
    known = pl.any_horizontal(pl.col("kind").is_not_null(), "begins", "ends")
    calls = host.select("row", *_THREAD, "name", "start", "correlation").join(
        classified.filter(known), on="name", maintain_order="left"
    )
    worked = trace.gpu.select("rank", "correlation").unique().with_columns(worked=pl.lit(value=True))
    calls = calls.join(worked, on=["rank", "correlation"], how="left", maintain_order="left")
    shown = calls["begins"].any()
    captured = _between(calls) if shown else _following(calls.filter(pl.col("kind").is_not_null()))
    return captured.select("row", "rank", "kind", "capture")


def _between(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls without device work between the beginning and the end of a capture.

    A capture includes the calls of all threads of its process, but if captures of several threads
    overlap, each includes only those of its own thread.
    """
    bounds = calls.filter(pl.col("begins") | pl.col("ends")).sort(*_THREAD, "start")
    after = pl.col("start").shift(-1).over(_THREAD)
    captures = (
        bounds.with_columns(until=pl.when(pl.col("ends").shift(-1).over(_THREAD)).then(after))
        .filter("begins", pl.col("until").is_not_null())
        .sort("rank", "start")
        .with_row_index("capture")
        .with_columns(before=pl.col("until").cum_max().shift(1).over("rank", "process"))
        .with_columns(apart=(pl.col("before") <= pl.col("start")).fill_null(value=True))
        .with_columns(alone=pl.col("apart") & pl.col("apart").shift(-1, fill_value=True).over("rank", "process"))
    )
    nodes = calls.filter(pl.col("kind").is_not_null(), pl.col("worked").is_null()).sort("start")
    inside = []
    for alone, by in ((True, ["rank", "process"]), (False, _THREAD)):
        part = captures.filter(pl.col("alone") == alone).sort("start")
        inside.append(
            nodes.join_asof(
                part.select(*by, "start", "until", "capture"), on="start", by=by, check_sortedness=False
            ).filter(pl.col("start") < pl.col("until"))
        )
    return pl.concat(inside).unique("row", keep="first").sort("rank", "start", "row")


def _following(calls: pl.DataFrame) -> pl.DataFrame:
    """Runs of consecutive calls without device work on one thread."""
    ordered = calls.sort(*_THREAD, "start")
    runs = ordered.with_columns(capture=pl.struct(*_THREAD, pl.col("worked").is_null()).rle_id().cast(pl.UInt32))
    return runs.filter(pl.col("worked").is_null()).sort("rank", "start", "row")


@dataclass(frozen=True)
class Captures:
    """The captures of one rank.

    Attributes:
        run: their calls as launches.
        of_call: number of the capture of each launch of ``run``.
        titles: the name of each capture in messages.
    """

    run: EagerRun
    of_call: Int64
    titles: tuple[str, ...]

    @classmethod
    def of(cls, trace: Attributed, rank: int) -> Captures | None:
        """The captures of a rank of a trace, None where there are none."""
        calls = captured_calls(trace).filter(pl.col("rank") == rank)
        if calls.is_empty():
            return None
        run = EagerRun.of(attribute(_as_activities(trace, calls), trace.own), rank)
        number = calls["capture"].to_numpy()[run.rows]
        order, of_call = np.unique(number, return_inverse=True)
        titles = [_title(run, np.flatnonzero(of_call == i), i, len(order)) for i in range(len(order))]
        return cls(run, of_call.astype(np.int64), tuple(titles))

    @cached_property
    def windows(self) -> list[Int64]:
        """The launches of ``run`` that each capture consists of, in order."""
        order = np.argsort(self.of_call, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(self.of_call[order])) + 1)

    @cached_property
    def kinds(self) -> NDArray[np.str_]:
        """Kind of every launch of ``run``."""
        kinds: NDArray[np.str_] = self.run.graph.nodes["type"].to_numpy().astype(np.str_)
        return kinds

    @cached_property
    def named(self) -> Mask:
        """Whether the trace names the kernel of every launch of ``run``; true for memcpys and memsets."""
        unnamed = pl.Series(self.run.names).str.contains(_CALLS["kernel"])
        return np.asarray((self.kinds != "kernel") | ~unnamed.to_numpy(), np.bool_)


def _as_activities(trace: Attributed, calls: pl.DataFrame) -> Tables:
    """The tables of the trace with the calls in place of its device activities."""
    host = trace.host[calls["row"]]
    name = host["kernel"].zip_with(host["kernel"].is_not_null(), host["name"])
    gpu = GPU.frame(
        {
            "rank": host["rank"],
            "device": np.zeros(host.height, np.int32),
            "stream": np.zeros(host.height, np.int64),
            "kind": calls["kind"],
            "name": name,
            "start": host["start"],
            "duration": np.zeros(host.height, np.int64),
            "correlation": host["correlation"],
            "external": host["external"],
        }
    )
    return Tables(
        gpu=gpu,
        host=trace.host,
        collectives=trace.host_collectives,
        threads=trace.threads,
        meta=dataclasses.replace(trace.meta, losses=()),
    )


def _title(run: EagerRun, launches: Int64, number: int, count: int) -> str:
    """The name of a capture in messages: its number among all, and the outermost label that all its calls share."""
    labels = run.places["label"].gather(pl.Series(np.unique(run.label[launches]))).to_list()
    outermost = {(label or "").partition("/")[0] for label in labels}
    name = outermost.pop() if len(outermost) == 1 else ""
    return f"capture {number + 1} of {count}" + (f" ({name})" if name else "")


# ---- Whether an operator can have launched a kernel


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
            named = seen.drop_nulls().unique().select(pl.all().cast(pl.String))
            pairs.update((str(name), str(op)) for name, op in named.iter_rows())
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
        fitting = [
            bool(operator_pattern.search(operator))
            for kernel_pattern, operator_pattern in _FAMILIES
            if kernel_pattern.search(kernel)
        ]
        if fitting:
            return Verdict.FITS if any(fitting) else Verdict.CONTRADICTS
        never_together = kernel in self.kernels and operator in self.operators
        return Verdict.CONTRADICTS if never_together else Verdict.UNKNOWN


# ---- Matching replays with captures


_UNNAMED = -1
_Launch = tuple[str, int, str | None]
"""Kind of activity, number of the kernel's name (`_UNNAMED` where the trace has none), and innermost operator."""
_WEIGHT = {Verdict.FITS: FITS, Verdict.UNKNOWN: POSSIBLE, Verdict.CONTRADICTS: 0}


def matched_captures(
    all_captures: Sequence[Captures], traces: Sequence[Attributed], replays: Replays, place_rows: PlaceRows
) -> tuple[BySequence, BySequence]:
    """The captures that name all their kernels, and the others.

    Args:
        all_captures: the captures of each trace.
        traces: the traces that hold them, and others of the same program.
        place_rows: the places by number; those of the captures are added.
    """
    frame = names_of_kinds(replays.kinds.frame)
    kernels = [kernel for captures in all_captures for kernel in captures.run.kernels]
    names = KernelNames(kernels, frame["name"].drop_nulls().unique(maintain_order=True))
    numbers: dict[_Launch, int] = {}
    sequences: dict[bool, list[LaunchSequence]] = {True: [], False: []}
    first_name = 0
    for captures in all_captures:
        run = captures.run
        root = [names.of_kernel(first_name + i) for i in range(len(run.kernels))]
        first_name += len(run.kernels)
        operator = run.places["op"].gather(pl.Series(run.label)).to_list()
        kernel = [root[i] for i in run.graph.nodes["kernel"]]
        launches = [
            (kind, -2, None) if kind != "kernel" else (kind, k, None) if named else (kind, _UNNAMED, op)
            for kind, k, named, op in zip(
                captures.kinds.tolist(), kernel, captures.named.tolist(), operator, strict=True
            )
        ]
        number = np.array([numbers.setdefault(x, len(numbers)) for x in launches], np.int64)
        place = run.label + place_rows.add(run.places)
        for title, window in zip(captures.titles, captures.windows, strict=True):
            sequence = LaunchSequence(title, number[window], place[window])
            sequences[bool(captures.named[window].all())].append(sequence)
    weight = _weights(list(numbers), names, frame, traces, replays)
    unnamed = np.array([k == _UNNAMED and op is not None for _, k, op in numbers], np.bool_)
    named, others = (
        BySequence(
            replays=replays,
            place_rows=place_rows,
            sequences=sequences[is_named],
            weight=weight,
            rule="capture_names" if is_named else "capture_order",
            repeated=None,
            doubted=unnamed & (not is_named),
            one_stream=True,
        )
        for is_named in (True, False)
    )
    return named, others


def _weights(
    launches: Sequence[_Launch], names: KernelNames, frame: pl.DataFrame, traces: Sequence[Attributed], replays: Replays
) -> NDArray[np.int8]:
    """Whether each kind of launch fits each variant of the replays, as `by_sequence.match` takes it."""
    weight = np.zeros((len(launches), frame.height), np.int8)
    variants = [
        (str(kind), name or "", names.of_trace(name)) for kind, name in frame.select("kind", "name").iter_rows()
    ]
    known: KernelOperators | None = None
    generated = {op for _, kernel, op in launches if kernel == _UNNAMED}
    for row, (kind, kernel, operator) in enumerate(launches):
        for column, (of_variant, name, number) in enumerate(variants):
            if kind != of_variant:
                continue
            if kernel != _UNNAMED:
                weight[row, column] = FITS if kind != "kernel" or kernel == number else 0
                continue
            if known is None:
                known = KernelOperators.of([*traces, attribute(replays.tables)])
            # Inductor names the range around the launch of a kernel that it generated after the kernel.
            elsewhere = name in generated and operator != name
            weight[row, column] = 0 if elsewhere else _WEIGHT[known.verdict(name, operator)]
    return weight
