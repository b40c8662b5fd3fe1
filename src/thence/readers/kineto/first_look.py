"""Rank and time of a Kineto file from its first bytes, to tell older runs apart before any file is decoded."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from thence.errors import ThenceError
from thence.model.json_fields import NotAsWritten, decoded
from thence.readers.kineto import metadata as describe
from thence.readers.kineto.sniffing import sniff
from thence.readers.source import Source

if TYPE_CHECKING:
    from thence.readers.expansion import Expansion
    from thence.units import Ns

_EVENTS = re.compile(rb',\s*"traceEvents"\s*:\s*\[')
_TIME = re.compile(rb'"ts"\s*:\s*(\d{1,19}(?:\.\d{1,9})?)\s*[,}]')


def rank_and_begin(name: str, expansion: Expansion) -> tuple[int, Ns] | None:
    """The rank that a file states, in its content or by its name, and the Unix time in ns of its first event.

    Args:
        expansion: how much larger than its stored size its content may be.

    Returns:
        None if the first bytes do not tell both, or the file is no Kineto file or cannot be read.
    """
    with suppress(ThenceError, OSError, NotAsWritten), Source.open(name, expansion) as source:
        head = source.head()
        events = _EVENTS.search(head) if sniff(head) else None
        first = _TIME.search(head, events.end()) if events else None
        if events is None or first is None:
            return None
        metadata = decoded(head[: events.start()].removeprefix(b"\xef\xbb\xbf") + b"}", dict[str, Any])
        rank = describe.rank_of(metadata, name)
        begin = round(float(first[1]) * 1000)
        zero = describe.epoch_ns(metadata, begin)
        if rank is not None and zero is not None:
            return rank, zero + begin
    return None
