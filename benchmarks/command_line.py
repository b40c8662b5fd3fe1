"""The command lines of the scripts here: their docstrings say what they measure, how they are run and what they need.

Those that import torch or jax at their top read their options before that, so that ``--help`` needs neither.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def documented_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser without arguments yet, which shows a script's docstring as it is written."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def folder_argument(options: argparse.ArgumentParser, meaning: str) -> None:
    """Adds an optional argument ``folder``, None where it is not given."""
    options.add_argument("folder", type=Path, nargs="?", help=meaning)
