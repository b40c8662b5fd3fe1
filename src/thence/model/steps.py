"""Kinds of steps: how the steps of a program were found, in words.

`thence.attribution.steps` finds them, and defines where each kind begins and ends.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

STEP_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "step": "marked by the program or its profiler",
        "pass": "passes of an inference server",
        "range": "named ranges that count steps",
        "program": "executions of the XLA program with most time",
        "optimizer": "from one optimizer step to the next",
        "graph": "launches of CUDA graphs that repeat",
        "module": "calls of the outermost module",
        "batch": "from one batch of a DataLoader to the next",
    }
)
"""Every kind of steps, in the order in which they are looked for: the first one that a trace has counts."""
ENDLESS = frozenset({"program", "graph", "module"})
"""Kinds whose last step ends with its own last work, because nothing marks its end."""
NO_STEPS = (
    "nothing marks steps (torch.profiler's step(), thence.step() and jax.profiler.StepTraceAnnotation do), and no "
    "XLA program, step of an optimizer, outermost module, CUDA graph or fetch of a batch is seen to repeat"
)
"""Why a trace has no steps, as a part of a sentence."""
