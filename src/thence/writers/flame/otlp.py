"""Profiles in OpenTelemetry's protocol (OTLP): a sample for each stack with its GPU time.

The file is the body of a request to ``/v1development/profiles`` of a collector. Field numbers:
opentelemetry/proto/profiles/v1development/profiles.proto of github.com/open-telemetry/opentelemetry-proto 1.10, whose
profiles are alpha. Entry 0 of each table of its dictionary is empty and stands for "none".
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from thence.version import __version__
from thence.writers.flame.source_frames import sample_type, source_frame
from thence.writers.text.printable import printable
from thence.writers.wire_format import bytes_field, fixed64_field, packed_field, text_field, uint_field

if TYPE_CHECKING:
    from thence.analysis.flame.answer import Flame

_RESOURCE_PROFILES, _DICTIONARY = 1, 2  # fields of ProfilesData
# Fields of ProfilesDictionary.
_LOCATIONS, _FUNCTIONS, _LINKS, _TEXTS, _ATTRIBUTES, _STACKS = 2, 3, 4, 5, 6, 7
_MAPPINGS = 1
_FRAME_TYPE = "profile.frame.type"
"""Semantic conventions' attribute of a frame, here of `_GPU` or `_PYTHON`."""
_GPU, _PYTHON = "cuda", "cpython"


class _Table:
    """A table of the dictionary: messages by their content, of which the first is empty."""

    def __init__(self) -> None:
        self.rows: dict[bytes, int] = {b"": 0}

    def index(self, content: bytes) -> int:
        """The number of a message."""
        return self.rows.setdefault(content, len(self.rows))


class _Dictionary:
    """What samples refer to."""

    def __init__(self) -> None:
        self._texts, self._functions, self._locations = _Table(), _Table(), _Table()
        self._stacks, self._attributes = _Table(), _Table()

    def text(self, text: str) -> int:
        """The number of a text."""
        return self._texts.index(printable(text).encode("utf-8", "replace"))

    def stack(self, locations: list[int]) -> int:
        """The number of a stack, innermost frame first."""
        return self._stacks.index(packed_field(1, locations))

    def location(self, name: str, *, on_gpu: bool, of_files: bool) -> int:
        """The number of a frame."""
        frame = source_frame(name, of_files=of_files)
        frame_type = _GPU if on_gpu else _PYTHON if frame.file else None
        names = uint_field(1, self.text(frame.function)) + uint_field(3, self.text(frame.file))
        function = self._functions.index(names)
        line = bytes_field(3, uint_field(1, function) + uint_field(2, frame.line))
        if frame_type is None:
            return self._locations.index(line)
        attribute = uint_field(1, self.text(_FRAME_TYPE)) + bytes_field(2, text_field(1, frame_type))
        return self._locations.index(line + packed_field(4, [self._attributes.index(attribute)]))

    def message(self) -> bytes:
        """The message ``ProfilesDictionary``."""
        tables = {
            _LOCATIONS: self._locations,
            _FUNCTIONS: self._functions,
            _TEXTS: self._texts,
            _ATTRIBUTES: self._attributes,
            _STACKS: self._stacks,
        }
        rows = [bytes_field(number, row) for number, table in tables.items() for row in table.rows]
        return b"".join([bytes_field(_MAPPINGS, b""), bytes_field(_LINKS, b""), *rows])


def otlp_file(flame: Flame, service: str) -> bytes:
    """The file.

    Args:
        flame: the flame graph. Kernels and copies have the frame type ``cuda``; lines of Python, ``cpython``.
        service: the value of ``service.name``, by which backends keep profiles apart.
    """
    dictionary = _Dictionary()
    kinds = flame.nodes.filter(flame.nodes["kind"].is_in(["compute", "communication", "copy"]))
    on_gpu = set(kinds["name"].to_list())
    samples = []
    for names, value in flame.stacks():
        works = [*[False] * (len(names) - 1), names[-1] in on_gpu]
        frames = zip(reversed(names), reversed(works), strict=True)
        stack = [dictionary.location(name, on_gpu=work, of_files=flame.of_files) for name, work in frames]
        samples.append(bytes_field(2, uint_field(1, dictionary.stack(stack)) + packed_field(4, [value])))
    weight, unit = map(dictionary.text, sample_type(flame))
    content = b"".join([bytes_field(1, uint_field(1, weight) + uint_field(2, unit)), *samples])
    began = 0 if flame.meta.epoch_ns is None else max(flame.meta.epoch_ns + flame.start_ns, 0)
    content += fixed64_field(3, began) + uint_field(4, flame.span_ns)
    content += bytes_field(7, hashlib.sha256(content).digest()[:16])  # the same for the same profile
    scope = bytes_field(1, text_field(1, "thence") + text_field(2, __version__)) + bytes_field(2, content)
    named = text_field(1, "service.name") + bytes_field(2, text_field(1, printable(service)))
    resource = bytes_field(1, bytes_field(1, named)) + bytes_field(2, scope)
    return bytes_field(_RESOURCE_PROFILES, resource) + bytes_field(_DICTIONARY, dictionary.message())
