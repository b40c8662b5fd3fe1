"""thence: where did the GPU time come from?

    import thence

    trace = thence.open("trace.json.gz")     # or several ranks: thence.open("traces/")
    trace.report(by="label")                # displays as a table in a notebook
    trace.activities.filter(...)             # a Polars frame

Attributes are imported when they are first used, so that ``import thence`` is nearly free.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from thence.errors import (
    Contradiction,
    DamagedInput,
    InputError,
    MissingData,
    MissingRequirement,
    ThenceError,
    UnknownFormat,
    UsageError,
    WrongArgument,
)
from thence.importing import own_imports
from thence.version import __version__

if TYPE_CHECKING:
    from thence import inside as inside
    from thence import integrations as integrations
    from thence import jax as jax
    from thence import torch as torch
    from thence.analysis.report.summary import Summary
    from thence.capture.marks import captured_nodes as captured_nodes
    from thence.capture.marks import mark as mark
    from thence.capture.marks import save_labels as save_labels
    from thence.capture.recorder.options import Counters as Counters
    from thence.capture.recorder.options import RecordOptions as RecordOptions
    from thence.capture.recorder.options import Sampling as Sampling
    from thence.capture.recorder.options import Schedule as Schedule
    from thence.capture.session.record import record as record
    from thence.opening import open_trace as open
    from thence.timing.measure import measure as measure
    from thence.trace import Trace

__all__ = [
    "Contradiction",
    "Counters",
    "DamagedInput",
    "InputError",
    "MissingData",
    "MissingRequirement",
    "RecordOptions",
    "Sampling",
    "Schedule",
    "Summary",
    "ThenceError",
    "Trace",
    "UnknownFormat",
    "UsageError",
    "WrongArgument",
    "__version__",
    "captured_nodes",
    "mark",
    "measure",
    "open",
    "record",
    "save_labels",
]

_MODULES = {name: f"thence.{name}" for name in ("inside", "integrations", "jax", "torch")}
"""Modules available as attributes without an import of their own. They are not in ``__all__``, because a star import
would then shadow the frameworks of the same names."""


_LATER = {
    "Counters": ("thence.capture.recorder.options", "Counters"),
    "RecordOptions": ("thence.capture.recorder.options", "RecordOptions"),
    "Sampling": ("thence.capture.recorder.options", "Sampling"),
    "Schedule": ("thence.capture.recorder.options", "Schedule"),
    "Summary": ("thence.analysis.report.summary", "Summary"),
    "Trace": ("thence.trace", "Trace"),
    "captured_nodes": ("thence.capture.marks", "captured_nodes"),
    "mark": ("thence.capture.marks", "mark"),
    "measure": ("thence.timing.measure", "measure"),
    "open": ("thence.opening", "open_trace"),
    "record": ("thence.capture.session.record", "record"),
    "save_labels": ("thence.capture.marks", "save_labels"),
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _LATER:
        raise AttributeError(f"module 'thence' has no attribute {name!r}")
    module, attribute = _LATER[name]
    with own_imports():
        value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]
