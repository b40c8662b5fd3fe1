"""A Kineto file as a stream: metadata before the events, pieces of whole events, metadata after them.

Memory is bounded whatever the file holds: a piece, an event and the metadata before the events may not
exceed the limits below.

Exporters use one layout throughout a file. The bytes between the first two events (the separator) are
therefore the same between any two events, and a plain byte search finds where to cut, at memory
bandwidth. In a file without a regular layout, quotes and brackets are matched instead (`boundaries`), which is
about ten times slower.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.errors import DamagedInput
from thence.model.json_fields import NotAsWritten, decoded
from thence.readers.kineto.processes import PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from thence.readers.source import Source

_BETWEEN_EVENTS = re.compile(rb"(\s*)\}(\s*),(\s*)\{(\s*)(\"\w+\")")
_EVENT_START = re.compile(rb"\}\s*,\s*(?=\{\s*\"(?:ph|cat|name|args|ts|dur|pid|tid|id|bp)\"\s*:)")
# Separators of the C++ and the Python exporter, tried if no separator is found after the first event.
_EXPORTERS_SEPARATORS = (b"\n  },\n  {", b"},\n{")
INLINE_ANNOTATED = "cudaGraphInlineAnnotated"
"""Key before the events, by which torch 2.15 marks a file in which it annotated graphed activities."""
_BLOCK_BYTES = 1 << 20
_READ_BYTES = 1 << 20
_WINDOW_BYTES = 1 << 18
_MAX_HEAD_BYTES = 64 << 20
_MAX_EVENT_BYTES = 16 << 20
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_LAST_EVENT_END = re.compile(rb"\}\s*\]\s*(?:,\s*\"|\}\s*$|$)")
_CONTROL = re.compile(rb"[\x00-\x1f]")


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole events, without the brackets of an array around them.

    Attributes:
        offset: where the events begin in the decompressed file.
        size: in bytes.
        events: the bytes; None if they can be read from the file at the offset.
        annotated: whether the file states that graphed activities are annotated.
    """

    offset: int
    size: int
    events: bytes | None = None
    annotated: bool = False


@dataclass
class Envelope:
    """The parts of one file; `pieces` must be exhausted before `metadata` and `warnings` are complete.

    Attributes:
        metadata: every top-level key except the events.
        warnings: sentences about parts that could not be read.
        cuts: the warnings about a file that ends early.
    """

    source: Source
    metadata: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    cuts: list[str] = field(default_factory=list)
    _buffer: bytes = b""
    _offset: int = 0

    def pieces(self) -> Iterator[Piece]:
        """Every event of the file, in order, in pieces of about `PIECE_BYTES`.

        Raises:
            DamagedInput: there is no array of events, or an event of over 16 MB.
        """
        self._find_events()
        if self._fill(_READ_BYTES):
            yield from self._whole_pieces(find_separator(self._buffer[:_READ_BYTES]))
        yield from self._last_piece()

    def _whole_pieces(self, separator: bytes | None) -> Iterator[Piece]:
        """The pieces before the last one."""
        if self.source.plain and separator is not None:
            yield from self._peeked_pieces(separator)
        while self._fill(PIECE_BYTES):
            cut = self._last_cut(separator)
            if cut is None:
                if len(self._buffer) > _MAX_EVENT_BYTES:
                    raise DamagedInput(self.source.name, "an event of over 16 MB; torch.profiler writes none")
                if not self._fill(2 * len(self._buffer)):
                    break
                continue
            end, following = cut
            yield Piece(self._offset, end, self._buffer[:end], self._annotated)
            self._drop(following)

    def _peeked_pieces(self, separator: bytes) -> Iterator[Piece]:
        """Pieces of a plain file, without their bytes: reads only a window of the file before each cut.

        Stops near the end of the file, or at a window without a separator.
        """
        close, comma = separator.index(b"}") + 1, separator.index(b",") + 1
        while self._offset + 2 * PIECE_BYTES < self.source.stored_bytes:
            window = self._offset + PIECE_BYTES - _WINDOW_BYTES
            self.source.seek(window)
            position = self.source.read(_WINDOW_BYTES).rfind(separator)
            if position < 0:
                break
            size = window + position + close - self._offset
            yield Piece(self._offset, size, None, self._annotated)
            self._offset = window + position + comma
        self._buffer = b""
        self.source.seek(self._offset)

    @property
    def _annotated(self) -> bool:
        return INLINE_ANNOTATED in self.metadata

    def _fill(self, size: int) -> bool:
        """Reads until the buffer has at least ``size`` bytes; False if the file ends before."""
        while len(self._buffer) < size:
            more = self.source.read(max(_READ_BYTES, size - len(self._buffer)))
            if not more:
                return False
            self._buffer += more
        return True

    def _drop(self, length: int) -> None:
        self._buffer = self._buffer[length:]
        self._offset += length

    def _find_events(self) -> None:
        """Reads the metadata before the events and moves to the first event."""
        self._fill(_READ_BYTES)
        if self._buffer[:3] == b"\xef\xbb\xbf":  # UTF-8 byte order mark
            self._drop(3)
        stripped = self._buffer.lstrip()
        if stripped[:1] == b"[":  # Chrome's array format: only events
            self._drop(len(self._buffer) - len(stripped) + 1)
            return
        while (match := _EVENTS_KEY.search(self._buffer)) is None:
            size = len(self._buffer)
            if size > _MAX_HEAD_BYTES or not self._fill(2 * size + _READ_BYTES):
                if len(self._buffer) > size:
                    continue
                raise DamagedInput(
                    self.source.name,
                    'no "traceEvents" in it; expected the JSON that torch.profiler\'s export_chrome_trace() writes',
                )
        head = self._buffer[: match.start()].rstrip().rstrip(b",")
        self._add_metadata(head + b"}", "before")
        self._drop(match.end())

    def _last_cut(self, separator: bytes | None) -> tuple[int, int] | None:
        """End of the last event in the buffer that has a comma after it, and the offset after that comma."""
        if separator is not None:
            position = self._buffer.rfind(separator)
            if position > 0:
                return position + separator.index(b"}") + 1, position + separator.index(b",") + 1
        event_ends = boundaries(self._buffer)
        if event_ends.array_end >= 0 or len(event_ends.ends) < 2:
            return None
        # The last event may be followed by the end of the array; the event before it is followed by a comma.
        end = int(event_ends.ends[-2])
        return end, self._buffer.index(b",", end) + 1

    def _last_piece(self) -> Iterator[Piece]:
        """The events left in the buffer at the end of the file; reads the metadata after them."""
        rest = self._buffer
        event_ends = boundaries(rest)
        if event_ends.array_end >= 0:
            events, tail = rest[: event_ends.array_end], rest[event_ends.array_end + 1 :]
        elif (last := _find_last(_LAST_EVENT_END, rest)) is not None:
            # `boundaries` may miss the end of the array if quotes are not escaped; the last event then ends
            # before the last closing bracket of an array.
            events, tail = rest[: last.start() + 1], rest[rest.index(b"]", last.start()) + 1 :]
        else:
            events, tail = rest[: int(event_ends.ends[-1])] if len(event_ends.ends) else b"", b""
            self._warn_cut(self.source.damage or "the file ends inside an event", len(events))
        if events.strip(b" \t\r\n,"):
            events = events.rstrip().rstrip(b",")
            yield Piece(self._offset, len(events), events, self._annotated)
        if tail.strip():
            self._add_metadata(b"{" + tail.lstrip().lstrip(b","), "after")
            if self.metadata.pop("traceEvents", None) is not None:
                self.warnings.append(f"{self.source.name}: holds a second list of events, which is left out")
        if self.source.damage and not self.warnings:
            self._warn_cut(self.source.damage, len(rest))

    def _warn_cut(self, reason: str, read: int) -> None:
        end = self._offset + read
        self.cuts.append(f"{self.source.name}: cut short: {reason}; read up to byte {end:,}")
        self.warnings.append(self.cuts[-1])

    def _add_metadata(self, text: bytes, where: str) -> None:
        """Adds the keys of a JSON object to the metadata, or a warning if it is invalid."""
        if text.strip() in (b"{}", b"{", b"{ }"):
            return
        try:
            self.metadata |= decoded(text, dict[str, Any])
        except NotAsWritten:
            try:
                lenient = text.decode("utf-8", "replace").encode()
                self.metadata |= decoded(_CONTROL.sub(b" ", lenient), dict[str, Any])
            except NotAsWritten:
                self.warnings.append(f"{self.source.name}: the metadata {where} the events is not valid JSON; left out")


def _find_last(pattern: re.Pattern[bytes], text: bytes) -> re.Match[bytes] | None:
    last = None
    for last in pattern.finditer(text):  # noqa: B007 - the last one is what is wanted
        pass
    return last


def split_events(piece: bytes) -> list[bytes]:
    """The events of a piece one by one, even if some are not valid JSON.

    Args:
        piece: an array of events, with its brackets.
    """
    inner = piece.strip()[1:-1]
    parts = _EVENT_START.split(inner)
    return [part + b"}" for part in parts[:-1]] + ([parts[-1]] if parts[-1].strip() else [])


def find_separator(buffer: bytes) -> bytes | None:
    r"""The separator of events: the bytes from the end of one event to the beginning of the next.

    Args:
        buffer: begins with the first event.

    Returns:
        A closing and an opening brace with the bytes between and around them, such as ``\\n  },\\n  {``. A
        separator with a line break is safe, since no JSON string holds one; in a layout without line
        breaks the separator includes the first key as well: ``}, {"ph"``. None: no separator was found.
    """
    match = _first_gap(buffer)
    if match is None:
        return next((separator for separator in _EXPORTERS_SEPARATORS if buffer.count(separator) > 1), None)
    before, after_close, before_open, indent, key = match.groups()
    before = before[max(before.rfind(b"\n"), 0) :]  # some events have blank lines before the brace
    separator = before + b"}" + after_close + b"," + before_open + b"{"
    # With a line break between the events, the separator is safe without the first key.
    if b"\n" in before_open or b"\n" in after_close:
        return bytes(separator)
    return bytes(separator + indent + key)


def _first_gap(buffer: bytes) -> re.Match[bytes] | None:
    """The match of _BETWEEN_EVENTS at the end of the first event; None if there is none."""
    ends = boundaries(buffer).ends
    if len(ends) == 0:
        return None
    end = int(ends[0])
    begin = end - 1
    while begin > 0 and buffer[begin - 1 : begin].isspace():
        begin -= 1
    return _BETWEEN_EVENTS.match(buffer, begin)


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Where the events in a buffer end.

    Attributes:
        ends: offset just after each whole event, ascending.
        array_end: offset of the bracket that closes the array of events; -1 if it is not in the buffer.
    """

    ends: npt.NDArray[np.int64]
    array_end: int


def boundaries(buffer: bytes) -> Boundaries:
    """Finds the ends of events by matching quotes and brackets.

    Args:
        buffer: begins with an event or the gap before an event; must be valid JSON up to the end of the array.
    """
    text = np.frombuffer(buffer, np.uint8)
    ends = [np.empty(0, np.int64)]
    open_brackets = open_quotes = backslashes = 0
    # Block by block: the arrays below take forty bytes for each byte of text if all are brackets.
    for low in range(0, len(text), _BLOCK_BYTES):
        part = text[low : low + _BLOCK_BYTES]
        quotes = np.flatnonzero(part == ord('"'))
        escaped, backslashes = _escaped(part, quotes, backslashes)
        quotes = quotes[~escaped] + low
        opening = (part == ord("{")) | (part == ord("["))
        closing = (part == ord("}")) | (part == ord("]"))
        brackets = np.flatnonzero(opening | closing)
        brackets = brackets[(open_quotes + np.searchsorted(quotes - low, brackets)) % 2 == 0]
        depth = open_brackets + np.cumsum(np.where(opening[brackets], 1, -1))
        below = np.flatnonzero(depth < 0)
        whole = depth == 0 if not len(below) else (depth == 0) & (np.arange(len(depth)) < below[0])
        ends.append(low + brackets[whole & closing[brackets]] + 1)
        if len(below):
            return Boundaries(np.concatenate(ends), low + int(brackets[below[0]]))
        open_brackets = int(depth[-1]) if len(depth) else open_brackets
        open_quotes += len(quotes)
    return Boundaries(np.concatenate(ends), -1)


def _escaped(
    text: npt.NDArray[np.uint8], quotes: npt.NDArray[np.int64], before: int
) -> tuple[npt.NDArray[np.bool_], int]:
    """A mask of the quotes that are escaped: an odd number of backslashes precedes them.

    Args:
        quotes: indices of the quotes in the block.
        before: number of backslashes that end the text before the block.

    Returns:
        The mask, and the number of backslashes that end the text up to the end of the block.
    """
    places = np.flatnonzero(text == ord("\\"))
    is_first = np.ones(len(places), np.bool_)
    is_first[1:] = np.diff(places) > 1
    first = np.maximum.accumulate(np.where(is_first, places, 0))
    # For each place, the length of its run of backslashes up to it. Zeros stand for all other places.
    run = np.zeros(len(text) + 1, np.int64)
    run[places + 1] = places - first + 1 + np.where(first == 0, before, 0)
    run[0] = before
    return run[quotes] % 2 == 1, int(run[-1])
