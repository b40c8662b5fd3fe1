"""Losses of a Kineto file: records that it reports as missing, and events that its reader left out or replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thence.model.losses import Loss, says_lost
from thence.units import several

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from thence.readers.kineto.envelope import Envelope

_LOG_LEVELS = ("ERROR", "WARNING")
"""Keys of the metadata under which Kineto stores its log messages."""


def losses(envelope: Envelope, counts: Mapping[str, Any], unusable: int) -> tuple[Loss, ...]:
    """The losses of one file.

    Args:
        envelope: of the file, which is read to its end.
        counts: numbers of events: events (all), damaged, timeless.
        unusable: device activities without a usable duration.
    """
    return tuple(_losses(envelope, counts, unusable))


def _losses(envelope: Envelope, counts: Mapping[str, Any], unusable: int) -> Iterator[Loss]:
    name = envelope.source.name
    for text in envelope.cuts:
        yield Loss("cut", name, 1, text)
    if damaged := counts["damaged"]:
        text = f"{name}: {damaged:,} of {counts['events']:,} events could not be read"
        yield Loss("unreadable", name, damaged, text)
    if timeless := counts["timeless"]:
        yield Loss("no_times", name, timeless, f"{name}: {several(timeless, 'event')} without a start time")
    if unusable:
        text = f"{name}: {several(unusable, 'device activity')} without a duration, or with a negative one"
        yield Loss("repaired", name, unusable, text)
    for message in _logged(envelope.metadata):
        yield Loss("dropped", name, 1, f"{name}: the profiler logged: {message}")


def _logged(metadata: Mapping[str, Any]) -> Iterator[str]:
    """The profiler's log messages about records that it lost."""
    for level in _LOG_LEVELS:
        messages = metadata.get(level)
        for message in messages if isinstance(messages, list) else [messages]:
            if isinstance(message, str) and says_lost(message):
                yield message.strip()
