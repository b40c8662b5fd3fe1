"""Decides which files hold the user's own code; called for every function that begins for the first time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from thence.model.own_code import OwnCode

if TYPE_CHECKING:
    from collections.abc import Sequence

_OURS = str(Path(__file__).parents[2])


class OwnFiles:
    """Whether a file is the user's, with a cache by file name.

    Args:
        own: further packages, folders or files whose code counts as the user's own.
    """

    def __init__(self, own: Sequence[str]) -> None:
        self._own = OwnCode.of(own)
        self._files: dict[str, bool] = {}

    def __call__(self, file: str) -> bool:
        """Whether a file is the user's."""
        own = self._files.get(file)
        if own is None:
            own = self._files[file] = not file.startswith(_OURS) and self._own(file)
        return own
