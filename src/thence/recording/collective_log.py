"""Marks, and apart from them which collective of its group each one is.

What a collective moves repeats itself from step to step, its number never does. With the number left in,
the text of each call would be one of its own, to be made, kept and written; without it there are few.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.recording.mark_log import MarkLog

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.recorder.names import Names

__all__ = ["CollectiveLog"]

_NUMBER = "Seq"


class CollectiveLog(MarkLog):
    """A `MarkLog` that writes the numbers of collectives to a table of their own, ``collectives``.

    Its columns: ``serial`` of the mark, ``sequence``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: deque[tuple[int, object]] = deque()

    def opened(
        self, number: int, name: str, lane: str | None, metadata: Mapping[str, object]
    ) -> None:
        """A mark opens on this thread."""
        shared = getattr(metadata, "shared", None)  # of thence.frameworks.torch.CallFacts
        if shared is not None and _NUMBER in metadata:
            self._numbers.append((number, metadata[_NUMBER]))
            metadata = shared
        super().opened(number, name, lane, metadata)

    def take(self, names: Names) -> dict[str, dict[str, Any]]:
        """The moments, and the numbers of collectives, since the last question."""
        tables = super().take(names)
        pairs = [self._numbers.popleft() for _ in range(len(self._numbers))]
        if pairs:
            serial, sequence = np.array(pairs, np.int64).T
            tables["collectives"] = {"serial": serial.copy(), "sequence": sequence.copy()}
        return tables
