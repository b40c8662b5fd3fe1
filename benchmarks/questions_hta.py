"""Answers of HTA's functions (HolisticTraceAnalysis, pandas below 3) to the questions of docs/questions.md.

    python tests/questions/score.py --command 'HTA_PYTHON benchmarks/questions_hta.py {trace} {questions} 2> /dev/null'

It prints a JSON object: the answer by ask, null where HTA has none. HTA's categories of idle time do not tell loading
data from launching or from other code, so that it abstains on the cause.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def kernels(found: Any) -> dict[str, Any]:
    """Shares of kernels that compute."""
    _, frame = found.get_gpu_kernel_breakdown(visualize=False, num_kernels=50)
    sums = frame.groupby("name")["sum (us)"].sum().drop("others", errors="ignore").sort_values(ascending=False)
    shares = {f"where:kernel_share:{name}": us / sums.sum() for name, us in sums.items()}
    return {"where:kernel": sums.index[0], **shares}


def busy(found: Any) -> dict[str, Any]:
    """Busy share of the time from the first to the last kernel: HTA knows no other."""
    frame = found.get_temporal_breakdown(visualize=False)
    parts = [frame[f"{part}_time(us)"].sum() for part in ("idle", "compute", "non_compute")]
    return {"step:busy_share": 1 - parts[0] / sum(parts)}


def stragglers(found: Any) -> dict[str, Any]:
    """The rank that is most likely late."""
    late = found.get_potential_stragglers()
    return {"late:rank": int(late[0]) if late else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="+")
    parser.add_argument("questions", type=Path)
    given = parser.parse_args()
    answers: dict[str, Any] = {}
    functions: tuple[Callable[[Any], dict[str, Any]], ...] = (kernels, busy, stragglers)
    with contextlib.redirect_stdout(io.StringIO()):
        from hta.trace_analysis import TraceAnalysis

        try:
            found = TraceAnalysis(trace_files=dict(enumerate(given.trace)), trace_dir="/")
        except Exception as error:  # noqa: BLE001 - a library that fails answers nothing
            print(error, file=sys.stderr)
            functions = ()
        for function in functions:
            try:
                answers |= function(found)
            except Exception as error:  # noqa: BLE001 - the same
                print(function.__name__, error, file=sys.stderr)
    asked = [question["ask"] for question in json.loads(given.questions.read_text())["questions"]]
    print(json.dumps({ask: answers.get(ask) for ask in asked}, default=float))


if __name__ == "__main__":
    main()
