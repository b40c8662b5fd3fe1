"""The compiled unpickler (``_unpickler.c``), if it was built. This module imports nothing that takes time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

VARIABLE = "THENCE_UNPICKLER"
"""Environment variable: ``python`` selects reading without the compiled unpickler."""


def compiled_unpickler() -> ModuleType | None:
    """The compiled module; None if it was not built, or if `VARIABLE` selects reading in Python."""
    if os.environ.get(VARIABLE) == "python":
        return None
    try:
        from thence.readers.memory_snapshot import _unpickler  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        return None
    return _unpickler  # type: ignore[no-any-return, unused-ignore]
