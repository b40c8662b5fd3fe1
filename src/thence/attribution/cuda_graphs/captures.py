"""The captures in a trace: API calls that add nodes to CUDA graphs and therefore have no device work in the trace.

Inference servers record such a trace once, when they capture a graph for every batch size, and replay the
graphs later. Between the calls that begin and end a capture, launches, memcpys and memsets leave no device
activity. AMD's profiler names the kernel of each launch (``kernel`` among the arguments of hipLaunchKernel and
similar calls: RoctracerActivity_inl.h of pytorch/kineto); NVIDIA's records only the calls and their order.

The calls are turned into activities of zero duration, so that the code that attributes activities can be used for
them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.attribute import attribute
from thence.attribution.cuda_graphs.eager_run import EagerRun
from thence.model.launches import CALLS
from thence.model.tables import GPU, Tables

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    for into, pattern in _BLIT.items():
        kind = pl.when(pl.col("name").str.contains(pattern)).then(pl.lit(into)).otherwise(kind)
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
    names = host["name"].unique().drop_nulls()
    text = names.cast(pl.String)
    kinds = [pl.when(text.str.contains(pattern)).then(pl.lit(kind)).otherwise(None) for kind, pattern in _CALLS.items()]
    told = pl.DataFrame({"name": names}).with_columns(
        pl.coalesce(kinds).alias("kind"),
        begins=text.str.contains(_BEGIN, literal=True),
        ends=text.str.contains(_END, literal=True),
    )
    known = pl.any_horizontal(pl.col("kind").is_not_null(), "begins", "ends")
    calls = host.select("row", *_THREAD, "name", "start", "correlation").join(
        told.filter(known), on="name", maintain_order="left"
    )
    worked = trace.gpu.select("rank", "correlation").unique().with_columns(worked=pl.lit(value=True))
    calls = calls.join(worked, on=["rank", "correlation"], how="left", maintain_order="left")
    shown = calls["begins"].any()
    found = _between(calls) if shown else _following(calls.filter(pl.col("kind").is_not_null()))
    return found.select("row", "rank", "kind", "capture")


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
    of_call: NDArray[np.int64]
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
    def windows(self) -> list[NDArray[np.int64]]:
        """The launches of ``run`` that each capture consists of, in order."""
        order = np.argsort(self.of_call, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(self.of_call[order])) + 1)

    @cached_property
    def kinds(self) -> NDArray[np.str_]:
        """Kind of every launch of ``run``."""
        kinds: NDArray[np.str_] = self.run.graph.nodes["type"].to_numpy().astype(np.str_)
        return kinds

    @cached_property
    def named(self) -> NDArray[np.bool_]:
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
        gpu=gpu, host=trace.host, collectives=trace.host_collectives, threads=trace.threads,
        meta=dataclasses.replace(trace.meta, losses=()),
    )  # fmt: skip


def _title(run: EagerRun, launches: NDArray[np.int64], number: int, count: int) -> str:
    """The name of a capture in messages: its number among all, and the outermost label that all its calls share."""
    labels = run.places["label"].gather(pl.Series(np.unique(run.label[launches]))).to_list()
    outermost = {(label or "").partition("/")[0] for label in labels}
    name = outermost.pop() if len(outermost) == 1 else ""
    return f"capture {number + 1} of {count}" + (f" ({name})" if name else "")
