"""Why a trace describes no collectives, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.model.reasons import ADVICE

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

__all__ = ["no_collectives"]

_LIBRARIES = r"(?i)^(?:void )?(?:nccl|rccl)"
_OTHER = "thence record and torch.profiler describe them"


def no_collectives(trace: Attributed) -> str:
    """What to tell who asks for the collectives of a trace that describes none: after a colon.

    It says that there are none only where nothing speaks against it.
    """
    ran = trace.gpu["name"].cast(pl.String).str.contains(_LIBRARIES).fill_null(value=False).any()
    ranks = len(trace.ranks)
    devices = trace.gpu.select("rank", "device").n_unique()
    if not ran and devices < 2:
        return "describes no collectives; one GPU has none"
    seen = "kernels of NCCL ran" if ran else f"it has {max(devices, ranks)} GPUs"
    ways = dict.fromkeys(ADVICE.get(name, {}).get("no_collectives") for name in trace.meta.formats)
    return f"describes no collectives, though {seen}: {'; '.join(filter(None, ways)) or _OTHER}"
