"""Why a trace describes no collectives, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from thence.model.tables import Tables

__all__ = ["no_collectives"]

_LIBRARIES = r"(?i)^(?:void )?(?:nccl|rccl)"
_OTHER = "thence record and torch.profiler describe them"
_WAYS = {
    "thence recording": (
        "it was recorded with --without collectives, or they are called neither through"
        " torch.distributed nor by JAX: thence.torch.collective(...) around such a call describes it"
    ),
    "torch.profiler": (
        "torch 2.1 and newer write it for collectives of torch.distributed, if the profiler records"
        " CPU and CUDA; for those of CUDA graphs: thence label"
    ),
    "Nsight Systems": (
        "NCCL's NVTX ranges around their launches say what they move, and are missing: nsys profile"
        " --trace cuda,nvtx records them; for JAX, XLA's dump says it, with --hlo"
    ),
    "jax.profiler": "it holds no HLO that names them; where XLA dumped it, --hlo brings it",
}
"""By the beginning of the format's name."""


def no_collectives(tables: Tables) -> str:
    """What to tell who asks for the collectives of a trace that describes none: after a colon.

    It says that there are none only where nothing speaks against it.
    """
    ran = tables.gpu["name"].cast(pl.String).str.contains(_LIBRARIES).fill_null(value=False).any()
    ranks = len(tables.ranks)
    devices = tables.gpu.select("rank", "device").n_unique()
    if not ran and devices < 2:
        return "describes no collectives; one GPU has none"
    seen = "kernels of NCCL ran" if ran else f"it has {max(devices, ranks)} GPUs"
    ways = [
        way
        for beginning, way in _WAYS.items()
        if any(name.startswith(beginning) for name in tables.meta.formats)
    ]
    return f"describes no collectives, though {seen}: {'; '.join(ways) or _OTHER}"
