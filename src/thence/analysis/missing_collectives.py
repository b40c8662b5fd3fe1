"""Explains why a trace describes no collectives, and how to record them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.model.reasons import advice

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

__all__ = ["why_no_collectives"]

_LIBRARIES = r"(?i)^(?:void )?(?:nccl|rccl)"
_OTHER = "thence record and torch.profiler describe them"


def why_no_collectives(trace: Attributed) -> str:
    """The message for a trace that describes no collectives, to follow the input's name and a colon.

    It claims that there were none only if the trace has one GPU and no NCCL or RCCL kernels.
    """
    nccl_ran = (
        trace.gpu["name"].cast(pl.String).str.contains(_LIBRARIES).fill_null(value=False).any()
    )
    ranks = len(trace.ranks)
    devices = trace.gpu.select("rank", "device").n_unique()
    if not nccl_ran and devices < 2:
        return "describes no collectives, because it is of a single GPU"
    on = trace.meta.accelerators
    library = "RCCL" if on == {"rocm"} else "NCCL"
    seen = f"kernels of {library} ran" if nccl_ran else f"it has {max(devices, ranks)} GPUs"
    ways = dict.fromkeys(
        advice("no_collectives", [name], accelerators=on) for name in trace.meta.formats
    )
    return f"describes no collectives, though {seen}: {'; '.join(filter(None, ways)) or _OTHER}"
