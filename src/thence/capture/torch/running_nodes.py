"""Tests whether the compiled probe can read which autograd node runs (``_nodes.c``).

PyTorch's library exports a function that returns the node, and a node holds its number and the number of the thread
that made it, but their offsets are not documented. So hooks are set at first (`BackwardCalls`): when some of the nodes
with hooks run, the values that the probe reads are compared with those that Python reports. Once enough nodes have
agreed, no hooks are needed.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thence.capture.boundaries.node_places import LEAF, NodePlaces

if TYPE_CHECKING:
    from types import ModuleType

VARIABLE = "THENCE_BACKWARD"
"""Environment variable: with ``hooks``, hooks are always set."""
_CURRENT = "_ZN5torch8autograd16get_current_nodeEv"
"""``torch::autograd::get_current_node``"""
_THREAD = "_ZN2at14RecordFunction15currentThreadIdEv"
"""``at::RecordFunction::currentThreadId``"""
_ENOUGH = 3
"""How many nodes with different numbers have to agree."""
_HEAD = 16
"""Bytes of the header of a Python object."""


class RunningNodes:
    """Reads the autograd nodes that run, by the compiled probe.

    Attributes:
        trouble: why nodes cannot be read (yet); None if they can.
    """

    def __init__(self, torch: Any, native: ModuleType, places: NodePlaces) -> None:
        self.native = native
        self.places = places
        self.trouble: str | None = "no backward pass has run yet that shows how this PyTorch lays out autograd nodes"
        self._torch = torch
        self._agreed: set[int] = set()
        self._maker = 0
        self._trying = False
        self._size = 0
        self._begin()

    def _begin(self) -> None:
        inside = getattr(self._torch._C, "_current_autograd_node", None)  # noqa: SLF001 - no public name
        if os.environ.get(VARIABLE) == "hooks":
            self.trouble = f"the environment variable {VARIABLE} selects hooks"
        elif self.native.nodes_known():
            self.trouble = None
        elif inside is None or inside() is not None:
            self.trouble = "the recording began while an autograd node ran"
        else:
            addresses = [library_function(self._torch, name) for name in (_CURRENT, _THREAD)]
            words = self.native.look_for_nodes(*addresses) if all(addresses) else 0
            self._trying, self._size = words > 0, _HEAD + 8 * words
            if not self._trying:
                self.trouble = "the running autograd node cannot be read from this PyTorch version"

    def called(self) -> None:
        """Note the calling thread, which calls the engine: it has probably made the nodes."""
        if self._trying:
            self._maker = self.native.maker()

    def look(self) -> None:
        """Test on the node that the calling thread runs whether the probe reads the same node."""
        if self._trying:
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - the program comes first
                self._trying = False
                self.trouble = f"an internal error of thence: {error!r}"

    def _look(self) -> None:
        core = self._torch._C  # noqa: SLF001 - no public name
        node = core._current_autograd_node()  # noqa: SLF001
        if node is None or isinstance(node, core._FunctionBase):  # noqa: SLF001 - laid out differently
            return
        number = node._sequence_nr()  # noqa: SLF001 - no public name
        if type(node).__basicsize__ != self._size or number in (LEAF, *self._agreed):
            return  # not tested: its object holds more than a pointer to the node, or its number is no new one
        agrees = self.native.try_node(id(node), number, self._maker)
        if agrees is None:
            return
        if not agrees:
            self._trying = False
            self.trouble = "this PyTorch version lays out autograd nodes differently than expected"
            return
        self._agreed.add(number)
        if len(self._agreed) >= _ENOUGH and self.native.use_nodes():
            self._trying = False
            self.trouble = None


def library_function(torch: Any, name: str) -> int:
    """Address of a function of PyTorch's library by its mangled name; 0 if the library has no such function."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = getattr(ctypes.CDLL(str(path) if path.exists() else None), name)
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
