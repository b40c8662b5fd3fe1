"""The compiled scanner (``_scanner.c``), if it was built. This module imports nothing that takes time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

VARIABLE = "THENCE_SCANNER"
"""Environment variable: ``python`` selects decoding without the compiled scanner."""


def compiled_scanner() -> ModuleType | None:
    """The compiled module; None if it was not built, or if `VARIABLE` selects decoding in Python."""
    if os.environ.get(VARIABLE) == "python":
        return None
    try:
        from thence.readers.kineto import _scanner  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        return None
    return _scanner  # type: ignore[no-any-return, unused-ignore]
