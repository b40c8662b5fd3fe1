"""What the host was in while no thread of a process was in a recorded range or call.

The main thread of a Python program is inside a Python frame from its begin to its end: what it runs is called from
there. So where the trace shows that it runs (it has rows before and behind), and would show the operators and calls
that it is in, what is left is Python between them. That is what a trace with stacks says of the same time, in whose
frames the main thread is then. It is told of torch.profiler's traces, if operators of that thread are in them, and of
recordings, which are of Python programs and have no operators but lines. Other traces may lack any part of it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from thence.model.tables import HOST_CATEGORIES

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.attributed import Attributed

    Int64 = npt.NDArray[np.int64]

__all__ = ["python_runs", "python_threads", "says_what_runs"]

_KINETO, _RECORDING = "torch.profiler (Kineto JSON)", "thence recording"
_NAMES = re.compile(r"(?i)python|^MainThread$|pt_main_thread")
"""Names that main threads of Python programs have: Python's own, the program's, and PyTorch's."""
_SAYING = np.isin(HOST_CATEGORIES, ("op", "compile", "python", "module"))


def python_runs(trace: Attributed, begins: Int64, end: Int64) -> dict[int, tuple[int, int]]:
    """When the main thread of each rank is known to run Python where it is in nothing recorded: first and last ns.

    Args:
        trace: attributed.
        begins: the first row of each thread in host.
        end: of each row of host, ns.
    """
    ranks = trace.host["rank"].to_numpy()
    return {
        int(ranks[begins[number]]): span
        for number, span in python_threads(trace, begins, end).items()
    }


def python_threads(trace: Attributed, begins: Int64, end: Int64) -> dict[int, tuple[int, int]]:
    """As `python_runs`, by the number of the thread.

    Args:
        trace: attributed.
        begins: the first row of each thread in host.
        end: of each row of host, ns.
    """
    formats, host = set(trace.meta.formats), trace.host
    if not formats or not formats <= {_KINETO, _RECORDING} or host.is_empty():
        return {}
    category = host["category"].to_physical().to_numpy()
    keys = host.select("rank", "process", "thread")[begins.tolist()]
    named = {key[:3]: key[3] for key in trace.threads.select(*keys.columns, "name").rows()}
    start = host["start"].to_numpy()
    result = {}
    highs = np.append(begins[1:], host.height)
    for number, ((rank, process, thread), low, high) in enumerate(
        zip(keys.rows(), begins, highs, strict=True)
    ):
        name = named.get((rank, process, thread))
        if thread != process or not (name is None or _NAMES.search(name)):
            continue
        if formats == {_RECORDING} or _SAYING[category[low:high]].any():
            result[number] = (int(start[low]), int(end[low:high].max()))
    return result


def says_what_runs(trace: Attributed, begins: Int64) -> dict[int, bool]:
    """Whether the trace holds operators, compilations, modules or Python frames of each rank."""
    if trace.host.is_empty():
        return {}
    category = trace.host["category"].to_physical().to_numpy()
    ranks = trace.host["rank"].to_numpy()
    result: dict[int, bool] = {}
    for low, high in zip(begins, np.append(begins[1:], len(category)), strict=True):
        said = bool(_SAYING[category[low:high]].any())
        result[int(ranks[low])] = said or result.get(int(ranks[low]), False)
    return result
