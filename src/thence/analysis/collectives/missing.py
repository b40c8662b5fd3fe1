"""Explains why a trace does not describe its collectives, and how to record them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thence.analysis.kernel_groups import communicates
from thence.model.reasons import advice
from thence.units import format_share

if TYPE_CHECKING:
    import polars as pl

    from thence.model.attributed import Attributed

__all__ = ["undescribed_kernels", "why_no_collectives"]

_OTHER = "thence record and torch.profiler describe them"


def why_no_collectives(trace: Attributed) -> str:
    """The message for a trace that describes no collectives, to follow the input's name and a colon.

    A single GPU is given as the cause only if the trace has one GPU and no kernel communicates.
    """
    ranks = len(trace.ranks)
    devices = trace.gpu.select("rank", "device").n_unique()
    if communicates(trace).any():
        return f"describes no collectives, though kernels communicate: {_ways(trace)}"
    if devices < 2:
        return "describes no collectives, because it is of a single GPU"
    return f"describes no collectives, though it has {max(devices, ranks)} GPUs: {_ways(trace)}"


def undescribed_kernels(trace: Attributed, rows: pl.DataFrame) -> str:
    """The message on how much of the communication has no description, and how to record descriptions.

    Args:
        trace: attributed.
        rows: one row per kernel that communicates: described (false for some), collective, duration_ns.
    """
    without = rows.filter(~rows["described"])
    share = format_share(int(without["duration_ns"].sum()), int(rows["duration_ns"].sum()))
    batched = (
        "; batched sends and receives (batch_isend_irecv, pipeline schedules) get their description from the ops "
        "before their range nccl:coalesced on the same thread, if this range launched one kernel"
        if (without["collective"] == "send-recv").any()
        else ""
    )
    return (
        f"{without.height:,} of {rows.height:,} kernels that communicate, {share} of their time, have no description "
        f"(no message size, no group, so no bandwidth and no waits): {_ways(trace)}{batched}"
    )


def _ways(trace: Attributed) -> str:
    """How to record descriptions with the producers of the trace."""
    on = trace.meta.accelerators
    ways = dict.fromkeys(
        advice("no_collectives", [name], accelerators=on) for name in trace.meta.formats
    )
    return "; ".join(filter(None, ways)) or _OTHER
