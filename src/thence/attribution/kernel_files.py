"""The source files of Triton kernels, which torch.profiler records with their launches.

torch._inductor records ``kernel_file`` and other values with each launch (triton_heuristics.py). If the file is on
this machine, because the program was compiled here, it is searched for the line on which the kernel is defined;
nothing else of it is used or shown. The file may have been replaced since the recording, but its name holds a hash
of its content, by which the compiler itself identifies the content.
"""

from __future__ import annotations

import re
import stat
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thence.model.json_fields import decoded, field

if TYPE_CHECKING:
    from collections.abc import Iterable

_LARGEST = 4 << 20
"""Bytes of the largest file that is searched; Inductor's kernels have a few kB."""
FOUND, ABSENT = "kernel_file", "kernel_file_absent"
"""Codes of rules: the line was found; the file is not on this machine, or does not define the kernel."""


def kernel_places(launches: Iterable[tuple[str, str]]) -> dict[tuple[str, str], tuple[str, str]]:
    """The place, such as ``/tmp/torchinductor_me/ab/cab.py:18 triton_poi_fused_add_0``, and the code of the rule.

    Args:
        launches: for each, the name of the kernel and the metadata recorded with it (a JSON object).

    Returns:
        The place and the code by launch; launches that name no file are left out.
    """
    places = {}
    for kernel, metadata in launches:
        file = field(decoded(metadata, dict[str, Any]), "kernel_file", str)
        if file:
            line = _line_of(file, kernel)
            where = file if line is None else f"{file}:{line}"
            places[kernel, metadata] = f"{where} {kernel}", ABSENT if line is None else FOUND
    return places


@lru_cache(maxsize=4096)
def _line_of(file: str, kernel: str) -> int | None:
    """Line, from 1, on which a file defines a function; None if it cannot be determined."""
    path = Path(file)
    if path.suffix != ".py" or not path.is_absolute():
        return None
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            return None
        content = path.read_bytes()
    except (OSError, ValueError):
        return None
    found = re.search(rb"^def " + re.escape(kernel.encode()) + rb"\s*\(", content, re.MULTILINE)
    return None if found is None else content.count(b"\n", 0, found.start()) + 1
