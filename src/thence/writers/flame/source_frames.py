"""What profiles say of flame graphs: the unit of samples, and each frame as a function, its file and a line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from thence.analysis.flame.answer import Flame

_PLACES = (
    re.compile(r"(?P<file>[^\s:]+):(?P<line>\d{1,9}) ?(?P<function>.*)"),
    re.compile(r"(?P<file>[^(]+)\((?P<line>\d{1,9})\): (?P<function>.*)"),
)
"""Frames by source, ``model.py:27 Block.forward`` (without a function where none is known), and by stack,
``model.py(27): forward``."""


class SourceFrame(NamedTuple):
    """A frame; without a file, the file is empty and the line 0."""

    function: str
    file: str
    line: int


def source_frame(name: str, *, of_files: bool) -> SourceFrame:
    """The frame of a name.

    Args:
        name: as the flame graph has it.
        of_files: whether frames that name a file and a line are read as such (`Flame.of_files`).
    """
    places = (pattern.fullmatch(name) for pattern in _PLACES if of_files)
    place = next(filter(None, places), None)
    if place is None:
        return SourceFrame(name or "(no name)", "", 0)
    return SourceFrame(place["function"] or name, place["file"], int(place["line"]))


def sample_type(flame: Flame) -> tuple[str, str]:
    """What the value of a sample is, and its unit."""
    what = "gpu_time" if flame.weight.value == "time" else flame.weight.value
    return what, "bytes" if flame.weight.unit == "bytes" else "nanoseconds"
