"""Why a whole trace has no places of some kind, and what would have recorded them.

What is missing is said in the same words for every trace; what to do about it depends on who made the
trace, and `ADVICE` has it by producer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "ADVICE",
    "COLLECTIVES",
    "EVERY_REASON",
    "GPU",
    "IN_GRAPH",
    "MISSING",
    "advice",
    "missing",
]

IN_GRAPH = "graph"
"""Beside the kinds of places: the trace holds one launch for a whole CUDA graph."""
GPU = "gpu"
"""Likewise: the trace holds no device activity at all."""
COLLECTIVES = "collectives"
"""Likewise: the trace describes no collectives, though there were some."""

MISSING: Mapping[str, str] = {
    "label": "no named ranges recorded",
    "module": "no nn.Module calls recorded",
    "op": "no operators recorded",
    "ops": "no operators recorded",
    "source": "no Python frames recorded",
    "stack": "no Python frames recorded",
    "phase": "no autograd ops recorded",
    "step": "no profiler steps recorded",
}
"""By kind of place: what a trace lacks that has no place of that kind at all."""

_JOINS = "thence label joins labels"
_FRAMES = "torch.profiler's with_stack=True records them, thence.mark names places"
_CALLS = "torch.profiler's with_stack=True records them, thence.mark names layers"
_EMIT_NVTX = "torch.autograd.profiler.emit_nvtx() names them"
_DEVICE_WORK_ALONE = "this CSV lists device work alone, the export holds more"
_ARCHIVE = "nsys-jax keeps none in its archive"
_NCCL_RANGES = (
    "NCCL's NVTX ranges around their launches say what they move, and are missing: nsys profile --trace"
    " cuda,nvtx records them; for JAX, XLA's dump says it, with --hlo"
)

ADVICE: Mapping[str, Mapping[str, str]] = {
    "torch.profiler (Kineto JSON)": {
        "label": "record_function, NVTX",
        "module": "with_stack=True records them",
        "op": "ProfilerActivity.CPU records them",
        "ops": "ProfilerActivity.CPU records them",
        "source": "with_stack=True records them",
        "stack": "with_stack=True records them",
        "step": "profiler.step() marks them",
        IN_GRAPH: _JOINS,
        GPU: "record with ProfilerActivity.CUDA",
        COLLECTIVES: (
            "torch 2.1 and newer write it for collectives of torch.distributed, if the profiler records CPU"
            " and CUDA; for those of CUDA graphs: thence label"
        ),
    },
    "thence recording": {
        "label": "thence.mark, NVTX",
        "module": _CALLS,
        "op": "torch.profiler records them",
        "ops": "torch.profiler records them",
        "source": _FRAMES,
        "stack": _FRAMES,
        "phase": "thence.mark around the forward records them",
        "step": "recording.step() marks them",
        IN_GRAPH: "thence.mark names it at capture",
        COLLECTIVES: (
            "it was recorded with --without collectives, or they are called neither through"
            " torch.distributed nor by JAX: thence.torch.collective(...) around such a call describes it"
        ),
    },
    "Nsight Systems export": {
        "label": "thence.mark, NVTX",
        "module": _CALLS,
        "op": _EMIT_NVTX,
        "ops": _EMIT_NVTX,
        "source": _FRAMES,
        "stack": _FRAMES,
        "phase": _EMIT_NVTX,
        "step": "an NVTX range ProfilerStep#1, 2 ... around each marks them",
        IN_GRAPH: _JOINS,
        GPU: "record with nsys profile --trace=cuda,nvtx",
        COLLECTIVES: _NCCL_RANGES,
    },
    "Nsight Systems cuda_gpu_trace (CSV)": {
        **dict.fromkeys(MISSING, _DEVICE_WORK_ALONE),
        COLLECTIVES: _NCCL_RANGES,
    },
    "nsys-jax archive": {
        "label": "jax.named_scope",
        "module": "jax.named_scope names layers",
        "op": _ARCHIVE,
        "ops": _ARCHIVE,
        "source": _ARCHIVE,
        "stack": _ARCHIVE,
        "step": _ARCHIVE,
    },
    "jax.profiler (XSpace)": {
        "label": "jax.named_scope, thence.mark",
        "module": "jax.named_scope names layers",
        "op": "host_tracer_level=2 of jax.profiler.ProfileOptions records them",
        "ops": "host_tracer_level=2 of jax.profiler.ProfileOptions records them",
        "source": "python_tracer_level=1 of jax.profiler.ProfileOptions records them",
        "stack": "python_tracer_level=1 of jax.profiler.ProfileOptions records them",
        "step": "jax.profiler.StepTraceAnnotation marks them",
        GPU: "record with device_tracer_level=1 of jax.profiler.ProfileOptions",
        COLLECTIVES: "it holds no HLO that names them; where XLA dumped it, --hlo brings it",
    },
}
"""By format of an input (``Meta.formats``) and kind: what would record what is missing."""

_FACTS = {**MISSING, IN_GRAPH: "inside a CUDA graph: the trace holds one launch for all of it"}


def missing(kind: str, formats: Iterable[str]) -> str:
    """Why nothing in a trace has a place of this kind, with what to do about it.

    Args:
        kind: one of `MISSING`, or `IN_GRAPH`.
        formats: of the trace's inputs.
    """
    return _said(kind, advice(kind, formats))


def advice(kind: str, formats: Iterable[str]) -> str | None:
    """What would record what is missing; None where nothing would, or nobody knows.

    Args:
        kind: one of `MISSING`, `IN_GRAPH` or `GPU`.
        formats: of the trace's inputs. Inputs of several producers get no advice: what fits one of them
            does not fit the others.
    """
    known = {name for name in formats if name in ADVICE}
    return ADVICE[known.pop()].get(kind) if len(known) == 1 else None


def _said(kind: str, what_to_do: str | None) -> str:
    fact = _FACTS[kind]
    if what_to_do is None:
        return fact
    return f"{fact}; {what_to_do}" if kind == IN_GRAPH else f"{fact} ({what_to_do})"


EVERY_REASON: tuple[str, ...] = tuple(
    dict.fromkeys(
        _said(kind, known.get(kind)) for kind in _FACTS for known in ({}, *ADVICE.values())
    )
)
"""Everything that `missing` can say."""
