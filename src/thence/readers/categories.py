"""Category of a host range, derived from the recorded category and the range's name.

``user_annotation`` holds what the user named with ``record_function`` and what libraries named in
the same way; ``python_function`` holds frames, built-in functions and nn.Module calls.
"""

from __future__ import annotations

import re

__all__ = ["category_of", "shown_name"]

_STEP = re.compile(r"ProfilerStep(?:\*|#\d+)")
# Ranges that torch itself opens: torch/optim/optimizer.py, torch/utils/data/dataloader.py,
# torch/distributed (fsdp, c10d, DDP), torch/_inductor and torch/_dynamo.
_FRAMEWORK = re.compile(
    r"(?:Optimizer\.(?:step|zero_grad)#|enumerate\(DataLoader\)#|FSDP::|FullyShardedDataParallel\.|nccl:|gloo:|ucc:|"
    r"mpi:|c10d::|DistributedDataParallel\.|torch\.distributed\.|## Call CompiledFxGraph|"
    r"Torch-Compiled Region|CompiledFunction|TorchDynamo|Inductor|DTensor|PyTorch Profiler|\[pl\])"
)
_MODULE = "nn.Module: "


def category_of(recorded: str, name: str) -> str:
    """The category, of `thence.model.tables.HOST_CATEGORIES`.

    Args:
        recorded: category that the event's ``cat`` stands for.
        name: name of the event.
    """
    if recorded == "range":
        if _STEP.fullmatch(name):
            return "step"
        return "framework" if _FRAMEWORK.match(name) else "range"
    if recorded == "python" and name.startswith(_MODULE):
        return "module"
    return recorded


def shown_name(name: str) -> str:
    """The name without what the category already says: ``Linear_3`` for ``nn.Module: Linear_3``."""
    return name.removeprefix(_MODULE)
