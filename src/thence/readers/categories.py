"""Category of a host range, derived from the recorded category and the range's name.

``user_annotation`` holds what the user named with ``record_function`` and what libraries named in
the same way; ``python_function`` holds frames, built-in functions and nn.Module calls.
"""

from __future__ import annotations

import re

import polars as pl

from thence.model.phases import POSITIONS, Position

__all__ = ["category_of", "positions_of_functions", "shown_name"]

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


def positions_of_functions(category: pl.Series) -> pl.Series:
    """Column ``position`` of host where Python frames carry the line of the function, not the line at hand.

    So do profilers that are told of calls: PyTorch's (``PyFrame_GetLineNumber`` at the moment of the call: the
    ``def``; of functions that were open when profiling began, where they were) and JAX's (``co_firstlineno``).

    Args:
        category: of the host rows.
    """
    function = pl.lit(Position.FUNCTION.value, pl.Enum(POSITIONS))
    rows = pl.DataFrame({"category": category})
    return rows.select(position=pl.when(pl.col("category") == "python").then(function)).to_series()


def shown_name(name: str) -> str:
    """The name without what the category already says: ``Linear_3`` for ``nn.Module: Linear_3``."""
    return name.removeprefix(_MODULE)
