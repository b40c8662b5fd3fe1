"""Parses names of Python frames into source lines, and finds the frames of the user's own code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["Frames", "_is_own", "parse_frames"]

_FRAME = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): .*", re.DOTALL)
# torch writes the paths of its own files relative to the installation: torch/nn/modules/linear.py.
_INSTALLED = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages)/|/lib/python[\d.]+/|^<|"
    r"^(?:torch|torchvision|torchaudio|triton|numpy|threading|contextlib|functools|typing|runpy|collections|"
    r"inspect|abc|os|enum|weakref|dataclasses|importlib|logging|warnings|copy|re|json|asyncio|concurrent|"
    r"multiprocessing|unittest|queue|socket|selectors|subprocess|random|pickle|tempfile|types)(?:/|\.py$)"
)


@dataclass(frozen=True)
class Frames:
    """The host rows that are Python frames.

    Attributes:
        line: Categorical ``file.py:12``, null where the row is no frame with a file.
        own: rows that are frames of the user's code.
        installed: rows that are frames of the standard library or of installed packages.
    """

    line: pl.Series
    own: npt.NDArray[np.bool_]
    installed: npt.NDArray[np.bool_]


def _is_own(file: str, own: Sequence[str] = ()) -> bool:
    """Whether a source file is the user's own code: not of the standard library or an installed package.

    Args:
        file: its path, as the producer wrote it.
        own: what else counts: names of packages or folders (``transformers``), or glob patterns that the
            path, or its end, matches (``*/site-packages/mylib/*``).
    """
    if not _INSTALLED.search(file):
        return True
    parts = PurePosixPath(file).parts
    return any(
        pattern in parts or fnmatchcase(file, pattern) or f"{pattern}.py" in parts
        for pattern in own
    )


def parse_frames(
    names: pl.Series, python: npt.NDArray[np.bool_], own: Sequence[str] = ()
) -> Frames:
    """Parses the source line of each host row that is a Python frame.

    Args:
        names: Categorical names of the host rows; frames are written ``file.py(12): function``.
        python: which rows are Python frames.
        own: what else counts as the user's own code: as `_is_own` takes it.
    """
    used = names.filter(pl.Series(python)).unique().drop_nulls()
    parsed = [_FRAME.fullmatch(name) for name in used.cast(pl.String).to_list()]
    matches = dict(zip(used.to_physical().to_list(), parsed, strict=True))
    lines = {code: f"{m['file']}:{m['line']}" for code, m in sorted(matches.items()) if m}
    users = [code for code, m in matches.items() if m and _is_own(m["file"], own)]
    code = names.to_physical().to_numpy()
    frame_codes = np.array(list(lines), code.dtype)
    is_line = python & np.isin(code, frame_codes)
    of_user = is_line & np.isin(code, users)
    number = np.full(len(code), -1, np.int64)
    number[is_line] = np.searchsorted(frame_codes, code[is_line])
    texts = pl.Series(list(lines.values()), dtype=pl.String).cast(pl.Categorical())
    line = texts.gather(pl.Series(number).replace(-1, None).cast(pl.UInt32))
    return Frames(line, of_user, is_line & ~of_user)
