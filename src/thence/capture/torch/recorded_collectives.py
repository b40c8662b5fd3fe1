"""Labels the collectives of PyTorch for as long as a recording runs.

A recording may begin before torch is imported, or during its import. Then imports are watched until torch has
been imported. This is the case at the latest when CUDA is initialised, and no kernel of NCCL runs before that.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from thence.capture.torch.collectives import hold_labels
from thence.errors import MissingRequirement
from thence.importing import torch_is_being_imported, when_imported

if TYPE_CHECKING:
    from collections.abc import Callable

_LOG = logging.getLogger("thence.capture.recorder")


class CollectiveLabels:
    """Switches the labels of `thence.torch.label_collectives` on, and off again if no one else holds them.

    Nothing here raises, initialises CUDA or waits for the lock of torch.cuda's initialisation: it may be
    called from within that initialisation.
    """

    def __init__(self) -> None:
        self._leave: Callable[[], None] | None = None
        self._waiting = False
        self._no_longer: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Label collectives from now on, or as soon as torch has been imported."""
        self._waiting = True
        if torch_is_being_imported():
            self._no_longer.append(when_imported("torch.cuda", self._ask_cuda))
        self._no_longer.append(when_imported("torch", lambda _torch: self._install()))

    def end(self) -> None:
        """Stop labelling, unless other holders want the labels."""
        self._stop_waiting()
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def forked(self) -> None:
        """Leave the labels installed in this child process, where they cost little without a consumer.

        Removing them needs a lock of torch's, which another thread of the parent may have held.
        """
        self._stop_waiting()
        self._leave = None

    def _ask_cuda(self, torch_cuda: Any) -> None:
        """Queue the installation for CUDA's initialisation, as torch.cuda._lazy_call does, but without its lock."""
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
