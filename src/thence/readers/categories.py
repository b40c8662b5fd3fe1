"""Category of a host range, derived from the recorded category and the range's name.

``user_annotation`` holds what the user named with ``record_function`` and what libraries named in
the same way; ``python_function`` holds frames, built-in functions and nn.Module calls. ``cpu_op`` holds
operators, autograd nodes, and ranges that were opened by `torch._C._profiler._RecordFunctionFast`, by users
and by PyTorch's compiler.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import polars as pl

from thence.model.phases import POSITIONS, Position
from thence.model.server_steps import server_step

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["category_of", "positions_of_functions", "ranges_among_ops", "shown_name"]

_STEP = re.compile(r"ProfilerStep(?:\*|#\d+)")
# Ranges that torch itself opens: torch/optim/optimizer.py, torch/utils/data/dataloader.py,
# torch/distributed (fsdp, c10d, DDP), torch/_inductor and torch/_dynamo (phases of the compiler).
_FRAMEWORK = re.compile(
    r"(?:Optimizer\.(?:step|zero_grad)#|enumerate\(DataLoader\)#|FSDP::|FullyShardedDataParallel\.|nccl:|gloo:|ucc:|"
    r"mpi:|c10d::|DistributedDataParallel\.|torch\.distributed\.|## Call CompiledFxGraph|"
    r"Torch-Compiled Region|CompiledFunction|TorchDynamo|Inductor|DTensor|PyTorch Profiler|\[pl\]|"
    r"[\w.]+_data: (?:.*, )?compile_id=)"
)
# Among the operators: ranges that torch itself opens there (torch/_dynamo, torch/_functorch, torch/_inductor,
# torch/distributed), autograd nodes, and Inductor's kernels.
_NO_LABEL = re.compile(
    r"Pregraph bytecode|AOTDispatcher |Python(?:DispatchMode|Subclass|TLSSnapshot)$|record_param_comms$|"
    r"triton_(?:poi|per|red|tem|mix|for|spl)_|"
    r"GeneratedBackwardFor_|\w+Backward\d*$|.*\(dynamo_timed\)$|## |DataParallel\."
)
_PHASE_DATA = "_data: "
_MODULE = "nn.Module: "


def category_of(recorded: str, name: str) -> str:
    """The category, of `thence.model.tables.HOST_CATEGORIES`.

    Args:
        recorded: category that the event's ``cat`` stands for.
        name: name of the event.
    """
    if recorded == "range":
        if _STEP.fullmatch(name) or server_step(name) is not None:
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


def ranges_among_ops(
    ops: Iterable[str], operators: Iterable[str], ranges: Iterable[str]
) -> set[str]:
    """The names among operators that somebody gave to a range.

    They have no ``::``, PyTorch recorded no schema or autograd sequence number with them, and they are not
    what an operator calls itself (``detach`` inside ``aten::detach``). PyTorch's compiler names its phases in
    the same way, each with a further range ``<phase>_data: ...``.

    Args:
        ops: names of all that was recorded as an operator.
        operators: those of them that are operators or kernels, by what was recorded with them.
        ranges: names of user annotations.
    """
    every = set(ops)
    bare = {name.rpartition("::")[2] for name in every if "::" in name}
    phases = {name.partition(_PHASE_DATA)[0] for name in ranges if _PHASE_DATA in name}
    return {
        name
        for name in every - bare - phases - set(operators)
        if "::" not in name and not _NO_LABEL.match(name) and not _FRAMEWORK.match(name)
    }


def shown_name(name: str) -> str:
    """The name without what the category already says: ``Linear_3`` for ``nn.Module: Linear_3``."""
    return name.removeprefix(_MODULE)
