"""Category of a host range, derived from the recorded category and the range's name.

``user_annotation`` holds ranges that the user or a library opened with ``record_function``;
``python_function`` holds frames, built-in functions and nn.Module calls. ``cpu_op`` holds operators,
autograd nodes, and ranges that users and PyTorch's compiler opened with
`torch._C._profiler._RecordFunctionFast`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import polars as pl

from thence.model.phases import POSITIONS, Position
from thence.model.server_steps import server_step

if TYPE_CHECKING:
    from collections.abc import Iterable

_STEP = re.compile(r"ProfilerStep(?:\*|#\d+)")
# Ranges that torch itself opens: torch/optim/optimizer.py, torch/utils/data/dataloader.py,
# torch/distributed (fsdp, c10d, DDP), torch/_inductor and torch/_dynamo (phases of the compiler).
_FRAMEWORK = re.compile(
    r"(?:Optimizer\.(?:step|zero_grad)#|enumerate\(DataLoader\)#|FSDP::|FullyShardedDataParallel\.|nccl:|gloo:|ucc:|"
    r"mpi:|c10d::|DistributedDataParallel\.|torch\.distributed\.|## Call CompiledFxGraph|"
    r"Torch-Compiled Region|CompiledFunction|TorchDynamo|Inductor|DTensor|PyTorch Profiler|\[pl\]|"
    r"[\w.]+_data: (?:.*, )?compile_id=)"
)
# Operator names that are not user annotations: ranges that torch itself opens (torch/_dynamo,
# torch/_functorch, torch/_inductor, torch/distributed), autograd nodes, and Inductor's kernels.
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
    """Column ``position`` of the host table for profilers whose Python frames carry the line of the function.

    Profilers that hook into calls record that line instead of the current one: PyTorch's (``PyFrame_GetLineNumber``
    at the moment of the call, which is the line of ``def``; for functions that were already running when profiling
    began, the line that they had reached) and JAX's (``co_firstlineno``).
    """
    python = category == "python"
    if not python.any():
        return pl.Series([None], dtype=pl.Enum(POSITIONS)).new_from_index(0, len(category))
    function = pl.lit(Position.FUNCTION.value, pl.Enum(POSITIONS))
    return pl.select(pl.when(pl.lit(python)).then(function)).to_series()


def ranges_among_ops(ops: Iterable[str], operators: Iterable[str], ranges: Iterable[str]) -> set[str]:
    """The names recorded as operators that are names of a user's ranges.

    Such a name has no ``::``, PyTorch recorded no schema or autograd sequence number with it, and it is not
    the bare name of an operator (``detach`` inside ``aten::detach``). PyTorch's compiler records its phases in
    the same way, but adds a range ``<phase>_data: ...`` for each, by which they are left out.

    Args:
        ops: names of all events recorded as operators.
        operators: names among ``ops`` that are operators or kernels for certain, by other recorded fields.
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
    """The name without the prefix that repeats the category: ``Linear_3`` for ``nn.Module: Linear_3``."""
    return name.removeprefix(_MODULE)
