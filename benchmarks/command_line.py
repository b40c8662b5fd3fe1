"""The command lines of the scripts here: their docstrings say what they measure, how they are run and what they need.

Those that import torch or jax at their top read their options before that, so that ``--help`` needs neither.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def documented_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser without arguments yet, which shows a script's docstring as it is written."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def folder_argument(options: argparse.ArgumentParser, meaning: str) -> None:
    """Adds an optional argument ``folder``, None where it is not given."""
    options.add_argument("folder", type=Path, nargs="?", help=meaning)


def run_parts(
    doc: str | None,
    parts: Mapping[str, Callable[[Path], None]],
    inside: Mapping[str, Callable[[Path, str], None]],
    timeout_s: float,
) -> None:
    """Runs parts, each in a process of its own, and prints the exit code and the seconds of each.

    Args:
        doc: docstring of the script, whose arguments are OUT, a folder that is made, and parts.
        parts: all of them, by name; each is called with OUT.
        inside: what processes that parts start do: the argument ``KIND:NAME`` calls the function of the kind with OUT
            and the name.
        timeout_s: of a part.
    """
    arguments = documented_parser(doc)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("parts", nargs="*", help="default: all")
    given = arguments.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for part in given.parts or parts:
        kind, _, name = part.partition(":")
        if kind == "part":
            parts[name](given.out)
        elif kind in inside:
            inside[kind](given.out, name)
        else:
            _run_part(part, given.out, timeout_s)


def _run_part(part: str, out: Path, timeout_s: float) -> None:
    began = time.perf_counter()
    try:
        command = [sys.executable, sys.argv[0], str(out), f"part:{part}"]
        code = subprocess.run(command, check=False, timeout=timeout_s).returncode
    except subprocess.TimeoutExpired:
        traceback.print_exc()
        code = -1
    print(f"== {part}: code {code}, {time.perf_counter() - began:.0f} s", flush=True)
