"""In-kernel profiles: the time that each range inside a kernel takes, in true nanoseconds.

    profile = thence.inside.open("gemm.npz")          # a buffer and its description
    profile.summary()                                 # count, total, percentiles of every range
    profile.write("gemm.pftrace")                     # a track per SM, block and warpgroup

description.py  description of a buffer: layout, names, launch
formats/        one decoder module for each layout: words -> columns
clocks.py       cycles and wrapped timers -> ns
ranges.py       enter and exit events -> ranges
decoding.py     the whole decoding: a buffer -> traces, ranges, events
files.py        reads and writes buffers on disk
profile.py      what `open` returns: the decoded buffer with its summary and timelines
summary.py      time of each range
launch_matching.py  the launch of a trace that a buffer belongs to
timeline.py     in-kernel ranges on timelines, alone or under their kernels
launches.py     allocates device buffers for launches and reads them back
cuda.py, thence_inside.cuh, triton.py, pallas_kernels.py, mosaic.py
                instrument kernels to write buffers; imported by name: ``from thence.inside import cuda``

The names in ``__all__`` are imported lazily, on first use.
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
    from thence.inside.profile import Inside as Inside
    from thence.inside.profile import open_inside as open

__all__ = ["Decoded", "Description", "Inside", "Limits", "decode", "open", "pallas", "save"]

_LATER = {
    "Decoded": ("thence.inside.decoding", "Decoded"),
    "Description": ("thence.inside.description", "Description"),
    "Inside": ("thence.inside.profile", "Inside"),
    "Limits": ("thence.inside.description", "Limits"),
    "decode": ("thence.inside.decoding", "decode"),
    "open": ("thence.inside.profile", "open_inside"),
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
