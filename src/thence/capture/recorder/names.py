"""The names that records point to: each distinct name is numbered and demangled once."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from thence.model.kernel_names import demangle


class Names:
    """Numbers for strings, in the order of their first appearance.

    Number 0 means that there is no name.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._unsaved: list[bytes] = []

    def of_text(self, text: str) -> int:
        """Number of a string."""
        return self._of(text.encode(errors="replace"))

    def of_pointers(self, pointers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Numbers of the C strings at these addresses; 0 for a null pointer.

        Strings are read again for every buffer: when a module is unloaded, CUPTI may put another name at
        the same address.
        """
        unique, which = np.unique(pointers, return_inverse=True)
        numbers = [self._of(ctypes.string_at(p)) if p else 0 for p in unique.tolist()]
        return np.array(numbers, dtype=np.uint32)[which]

    def new(self) -> dict[str, Any]:
        """Columns of the names that are new since the last call: number, name, demangled."""
        names, self._unsaved = self._unsaved, []
        texts = [name.decode(errors="replace") for name in names]
        return {
            "number": np.array([self._numbers[name] for name in names], dtype=np.uint32),
            "name": texts,
            "demangled": [demangled(name) for name in names],
        }

    def _of(self, text: bytes) -> int:
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self._numbers) + 1
            self._unsaved.append(text)
        return number


def demangled(name: bytes) -> str | None:
    """The demangled name of a C++ symbol; None if it is not mangled or cannot be demangled here."""
    text = name.decode(errors="replace")
    plain = demangle(text)
    return None if plain == text else plain
