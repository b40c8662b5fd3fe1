"""Category, order and nesting of host ranges, for all readers.

A row is nested in another row of its thread that begins no later and ends no earlier. Of rows with equal
times, the one whose category comes first in `thence.model.tables.HOST_CATEGORIES` contains the other. An
API call counts as an instant at its start, and nothing nests in it: its end is usually measured by another
clock than the ends of ranges, so a launch may seem to outlast the range in which it was made.

Profilers write rows nearly sorted by time, which `in_order` makes use of.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.columns import nullable
from thence.model.intervals import NO_ROW, enclosing
from thence.model.phases import POSITIONS, Position
from thence.model.server_steps import server_step
from thence.model.tables import API_CALLS, HOST_CATEGORIES
from thence.readers.compiled import SCANNER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from thence.model.arrays import Array, Int64, Mask

    Column = npt.NDArray[np.generic]


# ---- Categories


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
    """
    if recorded == "range":
        if _STEP.fullmatch(name) or server_step(name) is not None:
            return "step"
        return "framework" if _FRAMEWORK.match(name) else "range"
    if recorded == "python" and name.startswith(_MODULE):
        return "module"
    return recorded


def positions_of_functions(is_python: Mask) -> pl.Series:
    """Column ``position`` of the host table for profilers whose Python frames carry the line of the function.

    Profilers that hook into calls record that line instead of the current one: PyTorch's (``PyFrame_GetLineNumber``
    at the moment of the call, which is the line of ``def``; for functions that were already running when profiling
    began, the line that they had reached) and JAX's (``co_firstlineno``).

    Args:
        is_python: which ranges are Python frames.
    """
    unknown = _POSITIONS.new_from_index(1, len(is_python))
    if not is_python.any():
        return unknown
    return _POSITIONS.new_from_index(0, len(is_python)).zip_with(pl.Series(is_python), unknown)


_POSITIONS = pl.Series([Position.FUNCTION.value, None], dtype=pl.Enum(POSITIONS))


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
    names = set(ops)
    bare = {name.rpartition("::")[2] for name in names if "::" in name}
    phases = {name.partition(_PHASE_DATA)[0] for name in ranges if _PHASE_DATA in name}
    return {
        name
        for name in names - bare - phases - set(operators)
        if "::" not in name and not _NO_LABEL.match(name) and not _FRAMEWORK.match(name)
    }


def shown_name(name: str) -> str:
    """The name without the prefix that repeats the category: ``Linear_3`` for ``nn.Module: Linear_3``."""
    return name.removeprefix(_MODULE)


# ---- Order and nesting


IS_API_CALL = np.array([category in API_CALLS for category in HOST_CATEGORIES])
"""Whether a category is one of `API_CALLS`, by its index in HOST_CATEGORIES."""


def host_order(track: Column, category: Column, start: Int64, duration: Int64) -> npt.NDArray[np.intp]:
    """Row numbers sorted by thread, then start, outer rows before inner ones; the sort is stable.

    Args:
        track: number of each row's thread, ascending in the desired order of threads, shape (n,).
        category: index in HOST_CATEGORIES, shape (n,).
        start: ns, shape (n,).
        duration: ns, shape (n,).
    """

    def ties(rows: npt.NDArray[np.intp]) -> list[Column]:
        return [-_lengths(category[rows], duration[rows]), category[rows]]

    return in_order(track, start, ties)


def _lengths(category: Array, duration: Int64) -> Int64:
    """Length of each row for nesting, in ns: at least 1, and 1 for API calls."""
    lengths = np.maximum(duration, 1)
    lengths[IS_API_CALL.take(category)] = 1
    return lengths


def host_parents(track: Column, category: Column, start: Int64, duration: Int64) -> Int64:
    """The row of the innermost range around each row, `NO_ROW` for outermost rows, shape (n,).

    Args:
        track: number of each row's thread, shape (n,). Rows must be in the order of `host_order`.
        category: index in HOST_CATEGORIES, shape (n,).
        start: ns, shape (n,).
        duration: ns, shape (n,).
    """
    end = start + _lengths(category, duration)
    compiled = SCANNER.load()
    if compiled is None:
        return enclosing(track, start, end)
    parent = np.empty(len(end), np.int64)
    compiled.parents(np.ascontiguousarray(track, np.int64), np.ascontiguousarray(end), parent)
    return parent


def parent_column(parent: Int64) -> pl.Series:
    """Column ``parent`` of `HOST`: Int32, null for outermost rows."""
    return nullable(parent.astype(np.int32), parent == NO_ROW).alias("parent")


def in_order(
    track: npt.NDArray[np.generic],
    start: npt.NDArray[np.int64],
    ties: Callable[[npt.NDArray[np.intp]], Sequence[npt.NDArray[np.generic]]],
) -> npt.NDArray[np.intp]:
    """Row numbers sorted by track, start and then the tie-breaking columns; the sort is stable.

    Profilers write rows nearly in order of time, and a stable sort is fast on nearly sorted data. Few
    rows of one track have equal starts: the tie-breaking columns are compared for those rows only.

    Args:
        track: shape (n,). Small types are sorted faster: uint16 is best.
        start: shape (n,).
        ties: function of row numbers that returns the tie-breaking columns of those rows, the most
            significant first.
    """
    order = np.argsort(start, kind="stable")
    order = order[np.argsort(track[order], kind="stable")]
    begin, on = start[order], track[order]
    together = np.zeros(len(order) + 1, np.bool_)
    together[1:-1] = (begin[1:] == begin[:-1]) & (on[1:] == on[:-1])
    positions = np.flatnonzero(together[1:] | together[:-1])
    rows = order[positions]
    order[positions] = rows[np.lexsort((*reversed(ties(rows)), start[rows], track[rows]))]
    return order
