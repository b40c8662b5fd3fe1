"""The collectives of PyTorch, labelled for as long as a recording runs.

A recording may begin before torch is imported, or while it is. Then imports are watched until torch is
there. Whatever comes, it is there when CUDA is initialised, and no kernel of NCCL runs before that.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from thence.errors import MissingRequirement
from thence.hooks.torch.collectives import hold_labels
from thence.importing import torch_is_being_imported, when_imported

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CollectiveLabels"]

_LOG = logging.getLogger("thence.recorder")


class CollectiveLabels:
    """Switches `thence.torch.label_collectives` on, and off again if nobody else wanted it.

    Nothing here raises, initialises CUDA or waits for its lock: it may be called from within
    torch.cuda's own initialisation.
    """

    def __init__(self) -> None:
        self._leave: Callable[[], None] | None = None
        self._waiting = False
        self._no_longer: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Now, or as soon as torch is there."""
        self._waiting = True
        if torch_is_being_imported():
            self._no_longer.append(when_imported("torch.cuda", self._ask_cuda))
        self._no_longer.append(when_imported("torch", lambda _torch: self._install()))

    def end(self) -> None:
        """Labels no longer, unless others asked for them, too."""
        self._stop_waiting()
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def forked(self) -> None:
        """This is a child process: what is installed stays, and costs little without a listener.

        To take it back would need torch's lock, which another thread of the parent may have held.
        """
        self._stop_waiting()
        self._leave = None

    def _ask_cuda(self, torch_cuda: Any) -> None:
        """Does what torch.cuda._lazy_call does, without its lock."""
        calls = getattr(torch_cuda, "_queued_calls", None)
        if isinstance(calls, list):
            calls.append((self._install, []))

    def _install(self) -> None:
        if not self._waiting:
            return
        self._stop_waiting()
        try:
            self._leave = hold_labels(self)
        except MissingRequirement:
            pass  # this PyTorch has no torch.distributed, so there are no collectives
        except Exception as error:  # noqa: BLE001 - the program comes first
            _LOG.warning("thence: the collectives of PyTorch are recorded without facts: %r", error)

    def _stop_waiting(self) -> None:
        self._waiting = False
        while self._no_longer:
            self._no_longer.pop()()
