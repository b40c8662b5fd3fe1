"""Small Kineto traces of one thread that allocates memory, so that what is live can be counted by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import thence

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Memory:
    """A trace in the making.

    Attributes:
        allocated: bytes that the allocator has handed out.
        reserved: bytes that it holds of the device.
        events: of the trace.
        now: us; each event about memory takes one.
    """

    allocated: int = 0
    reserved: int = 1 << 20
    events: list[dict[str, Any]] = field(default_factory=list)
    now: float = 0.0

    def range(self, category: str, name: str, start: float, **args: Any) -> None:
        """A host range from ``start`` (us) until now."""
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": self.now - start,
             "args": args}
        )  # fmt: skip

    def change(self, address: int, size: int) -> None:
        """Hands out memory, or takes it back if the size is negative."""
        self.allocated += size
        self._instant("[memory]", {"Addr": address, "Bytes": size})

    def fail(self, size: int) -> None:
        """An allocation that does not fit."""
        self._instant("[OutOfMemory]", {"Bytes": size})

    def _instant(self, name: str, args: dict[str, Any]) -> None:
        self.now += 1.0
        known = {"Total Allocated": self.allocated, "Total Reserved": self.reserved, "Device Type": 1, "Device Id": 0}
        self.events.append(
            {"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": name, "pid": 1, "tid": 1, "ts": self.now,
             "args": known | args}
        )  # fmt: skip
        self.now += 1.0

    def opened(self, folder: Path, name: str = "trace.json") -> thence.Trace:
        """The trace, from a file."""
        path = folder / name
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events}))
        return thence.open(path)
