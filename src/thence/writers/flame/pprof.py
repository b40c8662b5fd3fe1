"""Profiles for pprof: gzipped ``profile.proto``, a sample for each stack with its GPU time in nanoseconds.

Field numbers: proto/profile.proto of github.com/google/pprof.
"""

from __future__ import annotations

import gzip
import re
from typing import TYPE_CHECKING

from thence.writers.text.printable import printable
from thence.writers.wire_format import bytes_field, text_field, uint_field, varint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from thence.analysis.flame.answer import Flame

_SAMPLE_TYPE, _SAMPLE, _LOCATION, _FUNCTION, _TEXT, _DURATION, _COMMENT = 1, 2, 4, 5, 6, 10, 13
_LINE_OF_LOCATION = 4
_PLACES = (
    re.compile(r"(?P<file>[^\s:]+):(?P<line>\d{1,9}) ?(?P<function>.*)"),
    re.compile(r"(?P<file>[^(]+)\((?P<line>\d{1,9})\): (?P<function>.*)"),
)
"""Frames by source, ``model.py:27 Block.forward`` (without a function where none is known), and by stack,
``model.py(27): forward``."""


def pprof_file(flame: Flame) -> bytes:
    """The file. Frames of lines have their file, line and function; other frames are functions without a file."""
    return gzip.compress(b"".join(_profile(flame)), mtime=0)


def _profile(flame: Flame) -> Iterator[bytes]:
    texts: dict[str, int] = {"": 0}
    locations: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(printable(text), len(texts))

    weight = number("gpu_time" if flame.weight.value == "time" else flame.weight.value)
    unit = number("bytes" if flame.weight.unit == "bytes" else "nanoseconds")
    yield bytes_field(_SAMPLE_TYPE, uint_field(1, weight) + uint_field(2, unit))
    for names, self_ns in flame.stacks():
        stack = [locations.setdefault(name, len(locations) + 1) for name in reversed(names)]
        yield bytes_field(_SAMPLE, _packed(1, stack) + _packed(2, [self_ns]))
    for name, identity in locations.items():
        places = (pattern.fullmatch(name) for pattern in _PLACES if flame.of_files)
        place = next(filter(None, places), None)
        file, line = (place["file"], int(place["line"])) if place else ("", 0)
        function = (place["function"] or name) if place else name or "(no name)"
        # A function of profile.proto has one file: functions of equal names in several files are told apart.
        yield bytes_field(
            _FUNCTION, uint_field(1, identity) + uint_field(2, number(function)) + uint_field(4, number(file))
        )
        of_line = uint_field(1, identity) + uint_field(2, line)
        yield bytes_field(_LOCATION, uint_field(1, identity) + bytes_field(_LINE_OF_LOCATION, of_line))
    comment = number(f"{flame.title}: {', '.join(flame.meta.inputs)}")
    yield uint_field(_DURATION, flame.span_ns) + uint_field(_COMMENT, comment)
    yield from (text_field(_TEXT, text) for text in texts)


def _packed(number: int, values: Iterable[int]) -> bytes:
    return bytes_field(number, b"".join(map(varint, values)))
