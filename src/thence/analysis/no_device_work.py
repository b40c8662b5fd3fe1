"""What to say of a trace without device work: every answer about device time refuses it in the same words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thence.analysis.soundness.evidence import Evidence
from thence.analysis.soundness.launch_rules import only_captured
from thence.errors import MissingData
from thence.model.reasons import advice

if TYPE_CHECKING:
    from thence.model.attributed import Attributed


def no_device_work(trace: Attributed) -> MissingData:
    """The error for a trace without device work: what the trace is, and what to do."""
    inputs = ", ".join(trace.meta.inputs)
    if trace.host.is_empty() and not trace.memory.is_empty():
        return MissingData(f"{inputs}: holds memory and no times of kernels; thence memory shows it")
    if trace.meta.warnings:  # a file that is cut short may have lost its GPU rows
        return MissingData(f"{inputs}: no GPU activity could be read; {'; '.join(trace.meta.warnings)}")
    if trace.host.is_empty():
        return MissingData(f"{inputs}: the trace is empty")
    captured = only_captured(Evidence(trace))
    if captured and set(captured) == set(trace.ranks):
        return MissingData(
            f"{inputs}: the trace of a capture: its {sum(captured.values()):,} launches were captured into CUDA graphs,"
            " and no graph was launched, so there is no GPU activity; thence label REPLAY --eager CAPTURE takes it to"
            " label a trace in which the graphs are launched"
        )
    accelerators = trace.meta.accelerators
    cures = [advice("no_gpu", trace.meta.formats, accelerators=accelerators)]
    if accelerators <= {"cuda"}:
        cures.append("make sure that no other profiler held the GPU's counters (CUPTI) meanwhile")
    return MissingData(
        f"{inputs}: the trace holds {trace.host.height:,} host ranges but no GPU activity; "
        f"{', and '.join(cure for cure in cures if cure)}"
    )
