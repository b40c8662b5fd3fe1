"""The parts of readers that are written in C and may be missing. This module imports nothing that takes time."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from thence.errors import MissingRequirement

if TYPE_CHECKING:
    from types import ModuleType


class CompiledPart(NamedTuple):
    """A compiled module, beside which there is a way in Python.

    Attributes:
        module: its name.
        variable: environment variable that selects the way in Python with ``python``.
        functions: what the module has; one that was built from an earlier source lacks some.
    """

    module: str
    variable: str
    functions: tuple[str, ...] = ()

    @property
    def switched_off(self) -> bool:
        """Whether `variable` selects the way in Python."""
        return os.environ.get(self.variable) == "python"

    @property
    def built(self) -> bool:
        """Whether the module is there; it is not imported."""
        return find_spec(self.module) is not None

    def load(self) -> ModuleType | None:
        """The module; None if it was not built, or is switched off.

        Raises:
            MissingRequirement: it was built from an earlier source.
        """
        if self.switched_off:
            return None
        try:
            module = import_module(self.module)
        except ImportError:
            return None
        if any(not hasattr(module, name) for name in self.functions):
            raise MissingRequirement(
                f"{module.__file__}: was compiled from another version of thence; install thence again "
                f"(pip install --no-deps --editable ., of a checkout), or set {self.variable}=python"
            )
        return module


SCANNER = CompiledPart("thence.readers.kineto._scanner", "THENCE_SCANNER", ("Scanner", "parents", "in_order"))
"""Reads pieces of Kineto files (``_scanner.c``, ``_json.h``)."""
UNPICKLER = CompiledPart("thence.readers.memory_snapshot._unpickler", "THENCE_UNPICKLER")
"""Reads pickles of memory snapshots (``_unpickler.c``)."""
