"""A large Kineto trace made from a real one: the recording again and again, later each time.

Times, correlation ids, op ids, flow ids and sequence numbers are shifted in every repetition, so
that the result is what a longer run would have written, with the same mix of events.
"""

from __future__ import annotations

import gzip
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_SHIFTED = re.compile(
    rb'("ts": |"correlation": |"External id": |"Sequence number": |"Ev Idx": |"ph": "[sf]", "id": )(\d+)'
)
_NUMBER_STEP = 1_000_000


def write_repeated(recording: Path, target: Path, size: int) -> int:
    """Writes at least ``size`` bytes and returns the number of repetitions."""
    text = gzip.decompress(recording.read_bytes())
    begin = text.index(b'"traceEvents": [') + len(b'"traceEvents": [')
    end = text.rindex(b"\n  ],")
    events = text[begin:end]
    starts = [int(value) for value in re.findall(rb'"ts": (\d+)', events)]
    step_us = max(starts) - min(starts) + 1_000
    parts = _SHIFTED.split(events)
    constant, keys, numbers = parts[0::3], parts[1::3], [int(value) for value in parts[2::3]]
    steps = [step_us if key == b'"ts": ' else _NUMBER_STEP for key in keys]
    repetitions = -(-size // len(events))
    with target.open("wb") as file:
        file.write(text[:begin])
        for repetition in range(repetitions):
            if repetition:
                file.write(b",")
            shifted = (b"%d" % (n + repetition * s) for n, s in zip(numbers, steps, strict=True))
            file.write(constant[0])
            file.write(b"".join(x for three in zip(keys, shifted, constant[1:], strict=True) for x in three))
        file.write(text[end:])
    return repetitions
