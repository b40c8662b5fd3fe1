"""Losses: records that an input reports as lost, or that a reader had to leave out or repair.

A warning describes a loss to the user; a `Loss` describes it to `thence.analysis.soundness`, which judges it. This
module imports only the standard library and `thence.credentials`, which imports only the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from thence.credentials import without_credentials

if TYPE_CHECKING:
    from collections.abc import Mapping

LOSSES: Mapping[str, str] = MappingProxyType(
    {
        "cut": "the input ends early: later records are missing",
        "unreadable": "records that cannot be read are left out",
        "no_times": "records without a time are left out",
        "repaired": "impossible times or durations of device work were replaced",
        "dropped": "the recorder reports lost records",
        "recorder_error": "the recorder reports that something failed",
        "no_common_clock": "an input does not state the Unix time at which its clock starts",
    }
)
"""Code and meaning of every kind of loss."""

_LOST_WORDS = (
    *("drop", "lost", "lose", "discard", "overflow", "truncat", "incomplete", "full buffer"),
    *("buffer full", "not all ", "exceed", "out of memory", "missing", "terminating"),
)


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss.

    Attributes:
        code: of `LOSSES`.
        input: the input that has the loss, as the user named it, without credentials.
        count: how many records; 1 if unknown.
        text: a sentence about the loss.
    """

    code: str
    input: str
    count: int
    text: str

    def __post_init__(self) -> None:
        """Removes credentials from ``input`` and ``text``."""
        for name in ("input", "text"):
            object.__setattr__(self, name, without_credentials(getattr(self, name)))


def says_lost(message: str) -> bool:
    """Whether a message of a profiler says that records are missing."""
    lower = message.lower()
    return any(word in lower for word in _LOST_WORDS)
