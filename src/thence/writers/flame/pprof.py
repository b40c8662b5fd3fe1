"""Profiles for pprof: gzipped ``profile.proto``, a sample for each stack with its GPU time in nanoseconds.

Field numbers: proto/profile.proto of github.com/google/pprof.
"""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

from thence.writers.flame.source_frames import sample_type, source_frame
from thence.writers.text.printable import printable
from thence.writers.wire_format import bytes_field, packed_field, text_field, uint_field

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.analysis.flame.answer import Flame

# Fields of Profile and of Location in pprof's profile.proto.
_SAMPLE_TYPE, _SAMPLE, _LOCATION, _FUNCTION, _TEXT, _DURATION, _COMMENT = 1, 2, 4, 5, 6, 10, 13
_LINE_OF_LOCATION = 4


def pprof_file(flame: Flame) -> bytes:
    """The file. Frames of lines have their file, line and function; other frames are functions without a file."""
    return gzip.compress(b"".join(_profile(flame)), mtime=0)


def _profile(flame: Flame) -> Iterator[bytes]:
    texts: dict[str, int] = {"": 0}
    locations: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(printable(text), len(texts))

    weight, unit = sample_type(flame)
    yield bytes_field(_SAMPLE_TYPE, uint_field(1, number(weight)) + uint_field(2, number(unit)))
    for names, self_ns in flame.stacks():
        stack = [locations.setdefault(name, len(locations) + 1) for name in reversed(names)]
        yield bytes_field(_SAMPLE, packed_field(1, stack) + packed_field(2, [self_ns]))
    for name, identity in locations.items():
        frame = source_frame(name, of_files=flame.of_files)
        # A function of profile.proto has one file: functions of equal names in several files are told apart.
        yield bytes_field(
            _FUNCTION,
            uint_field(1, identity) + uint_field(2, number(frame.function)) + uint_field(4, number(frame.file)),
        )
        of_line = uint_field(1, identity) + uint_field(2, frame.line)
        yield bytes_field(_LOCATION, uint_field(1, identity) + bytes_field(_LINE_OF_LOCATION, of_line))
    comment = number(f"{flame.title}: {', '.join(flame.meta.inputs)}")
    yield uint_field(_DURATION, flame.span_ns) + uint_field(_COMMENT, comment)
    yield from (text_field(_TEXT, text) for text in texts)
