"""A part of an answer: a result, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from thence.errors import MissingData

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Part(Generic[_Result]):
    """One part of a report.

    Attributes:
        result: None if the trace lacks the data that the analysis needs, or the part was not computed.
        reason: why there is no result; empty if there is one.
    """

    result: _Result | None
    reason: str = ""


def part(question: Callable[[], _Result]) -> Part[_Result]:
    """Runs an analysis; catches `MissingData` and keeps its message as the reason."""
    try:
        return Part(question())
    except MissingData as error:
        return Part(None, str(error))
