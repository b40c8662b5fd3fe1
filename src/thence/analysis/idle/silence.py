"""Decides whether the host ran the program while no thread of a process was in a recorded range or call.

The main thread of a Python program is inside a Python frame from beginning to end: everything that it runs is called
from there. So if the trace shows that the thread was running (it has rows before and after), and would show its
operators and calls, the program itself took the time between them: by Python, by C code that it called, or by waiting.
This holds for traces of torch.profiler, if they contain operators of that thread, and for recordings of thence, which
are of Python programs and contain lines but no operators. Traces in other formats may lack rows of any kind, so nothing
is concluded from them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from thence.model.formats import KINETO_TRACE, THENCE_RECORDING
from thence.model.tables import HOST_CATEGORIES

if TYPE_CHECKING:
    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed


_NAMES = re.compile(r"(?i)python|^MainThread$|pt_main_thread")
"""Names of main threads of Python programs: set by Python, by the program, and by PyTorch."""
_SAYING = np.isin(HOST_CATEGORIES, ("op", "compile", "python", "module"))


def program_runs(trace: Attributed, begins: Int64, end: Int64) -> dict[int, tuple[int, int]]:
    """By rank, the first and the last ns between which its main thread runs the program whenever it is in no row.

    Args:
        trace: attributed.
        begins: the first row of each thread in host.
        end: end of each row of host, ns.
    """
    ranks = trace.host["rank"].to_numpy()
    return {int(ranks[begins[number]]): span for number, span in program_threads(trace, begins, end).items()}


def program_threads(trace: Attributed, begins: Int64, end: Int64) -> dict[int, tuple[int, int]]:
    """As `program_runs`, by the number of the thread.

    Args:
        trace: attributed.
        begins: the first row of each thread in host.
        end: end of each row of host, ns.
    """
    formats, host = set(trace.meta.formats), trace.host
    if not formats or not formats <= {KINETO_TRACE, THENCE_RECORDING} or host.is_empty():
        return {}
    category = host["category"].to_physical().to_numpy()
    keys = host.select("rank", "process", "thread")[begins.tolist()]
    named = {key[:3]: key[3] for key in trace.threads.select(*keys.columns, "name").rows()}
    start = host["start"].to_numpy()
    result = {}
    highs = np.append(begins[1:], host.height)
    for number, ((rank, process, thread), low, high) in enumerate(zip(keys.rows(), begins, highs, strict=True)):
        name = named.get((rank, process, thread))
        if thread != process or not (name is None or _NAMES.search(name)):
            continue
        if formats == {THENCE_RECORDING} or _SAYING[category[low:high]].any():
            result[number] = (int(start[low]), int(end[low:high].max()))
    return result


def says_what_runs(trace: Attributed, begins: Int64) -> dict[int, bool]:
    """By rank, whether the trace holds operators, compilations, modules or Python frames of it."""
    if trace.host.is_empty():
        return {}
    category = trace.host["category"].to_physical().to_numpy()
    ranks = trace.host["rank"].to_numpy()
    result: dict[int, bool] = {}
    for low, high in zip(begins, np.append(begins[1:], len(category)), strict=True):
        said = bool(_SAYING[category[low:high]].any())
        result[int(ranks[low])] = said or result.get(int(ranks[low]), False)
    return result
