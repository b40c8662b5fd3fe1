"""What a program is importing right now."""

from __future__ import annotations

import sys

__all__ = ["torch_is_being_imported"]


def torch_is_being_imported() -> bool:
    """Whether the import of torch has begun and not ended."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
