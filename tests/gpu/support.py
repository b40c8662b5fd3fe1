"""What the parts share: their command lines, programs of benchmarks/, and verdicts that become an exit code."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # programs and options that benchmarks share with parts

from captured_step import captured, warm_up
from command_line import documented_parser, folder_argument

__all__ = ["EXAMPLES", "captured", "documented_parser", "end", "folder_argument", "judge", "warm_up"]

EXAMPLES = Path(__file__).parents[2] / "examples"
_verdicts: list[bool] = []


def judge(right: bool, text: str) -> None:
    """Prints what was compared, as right or WRONG; one that is wrong makes the part fail."""
    _verdicts.append(bool(right))
    print(f"{'right' if right else 'WRONG'}: {text}", flush=True)


def end() -> None:
    """Ends the part: exit code 1 if anything was wrong, or nothing was compared."""
    wrong = _verdicts.count(False)
    print(f"{len(_verdicts)} comparisons, {wrong} wrong", flush=True)
    sys.exit(1 if wrong or not _verdicts else 0)
