"""In-kernel profiles: where the cycles of a kernel go, range by range, in true nanoseconds.

    profile = thence.inside.open("gemm.npz")          # a buffer and its description
    profile.summary()                                 # count, total, percentiles of every range
    profile.write("gemm.pftrace")                     # a track per SM, block and warpgroup

The object that `open` returns is in `thence.profile`, above the analyses and writers that it calls.

description.py  what a buffer holds: layout, names, launch
formats/        one module for each layout: words -> columns
clocks.py       cycles and wrapped timers -> ns
matching.py     enters and exits -> ranges
decoding.py     all of it: a buffer -> traces, ranges, events
files.py        buffers on disk
launches.py     buffers of launches on their devices
cuda.py, thence_inside.cuh, triton.py, pallas_kernels.py, mosaic.py
                what makes kernels write buffers; imported by name: ``from thence.inside import cuda``

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thence.inside.decoding import Decoded as Decoded
    from thence.inside.decoding import decode as decode
    from thence.inside.description import Description as Description
    from thence.inside.description import Limits as Limits
    from thence.inside.files import save as save
    from thence.inside.pallas_kernels import pallas as pallas
    from thence.profile import Inside as Inside
    from thence.profile import open_inside as open

__all__ = ["Decoded", "Description", "Inside", "Limits", "decode", "open", "pallas", "save"]

_LATER = {
    "Decoded": ("thence.inside.decoding", "Decoded"),
    "Description": ("thence.inside.description", "Description"),
    "Inside": ("thence.profile", "Inside"),
    "Limits": ("thence.inside.description", "Limits"),
    "decode": ("thence.inside.decoding", "decode"),
    "open": ("thence.profile", "open_inside"),
    "pallas": ("thence.inside.pallas_kernels", "pallas"),
    "save": ("thence.inside.files", "save"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'thence.inside' has no attribute {name!r}")
    module, attribute = _LATER[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*_LATER]
