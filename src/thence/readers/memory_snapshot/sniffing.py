"""Recognises snapshots of PyTorch's memory: pickles of a dict whose first key is one that only they have."""

from __future__ import annotations

import re

NAME = "snapshot of PyTorch's memory (torch.cuda.memory._dump_snapshot)"
PATTERNS: tuple[str, ...] = ("*snapshot*.pickle", "*snapshot*.pkl", "*memory*.pickle", "*memory*.pkl")
_BEGINNING = re.compile(
    rb"\x80[\x02-\x05](?:\x95.{8})?\}(?:\x94|q\x00)?\("
    rb"(?:\x8c.|X.{4})(?:segments|device_traces|allocator_settings|external_annotations|host_segments|host_traces)"
    rb"(?:\x94|[qr])",
    re.DOTALL,
)


def sniff(head: bytes) -> bool:
    """Whether a file that begins like this is a snapshot."""
    return _BEGINNING.match(head) is not None
