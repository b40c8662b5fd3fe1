"""Copies a Kineto file and adds labels to the arguments of activities in CUDA graphs.

The file is copied event by event. Labelled events get further arguments; everything else in an event is kept,
including fields that thence does not read. Streams, times and flows do not change.
"""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import polars as pl

from thence.atomic_files import atomic_open, not_written
from thence.errors import ThenceError
from thence.readers.kineto.envelope import Envelope
from thence.readers.kineto.events import DeviceEvent
from thence.readers.kineto.sniffing import NAME as KINETO
from thence.readers.kineto.times import nanoseconds
from thence.readers.label_files import NAME as LABELS
from thence.readers.source import Source
from thence.writers.timelines.label_arguments import graph_arguments
from thence.writers.timelines.write import gzipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from thence.model.attributed import Attributed
    from thence.readers.kineto.envelope import Piece

_KEY = ("device", "stream", "start", "duration", "correlation")
_Waiting = defaultdict[tuple[int, ...], deque[bytes]]

_raw_events = msgspec.json.Decoder(list[msgspec.Raw])
_device_event = msgspec.json.Decoder(DeviceEvent)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Unmatched(ThenceError):
    """Some labelled activities were not found in the file, because the reader had to repair their events."""


def can_relabel(trace: Attributed, inputs: Sequence[str]) -> bool:
    """Whether a trace was read from one Kineto file, with or without a separate file of labels."""
    formats = [name for name in trace.meta.formats if name != LABELS]
    return formats == [KINETO] and len(inputs) == 1 and Path(inputs[0]).is_file()


def write_relabelled(trace: Attributed, source: str, target: str) -> None:
    """Copies a Kineto file with the joined labels.

    Args:
        trace: the attributed trace of the file, with joined labels.
        target: path ending in .json or .json.gz; replaced when the copy is complete.

    Raises:
        Unmatched: not every labelled activity was found; nothing is written.
        ThenceError: ``target`` cannot be written.
    """
    waiting = _waiting(trace)
    try:
        with Source.open(source) as opened, atomic_open(Path(target)) as stream:
            if target.lower().endswith(".gz"):
                with gzipped(stream) as zipped:
                    _copy(opened, zipped, waiting)
            else:
                _copy(opened, stream, waiting)
            left = sum(map(len, waiting.values()))
            if left:
                raise Unmatched(f"{source}: {left:,} labelled activities were not found again")
    except OSError as error:
        raise ThenceError(not_written(Path(target), error)) from error


def _waiting(trace: Attributed) -> _Waiting:
    """Arguments of the labelled activities, queued by the key that identifies their events."""
    arguments = graph_arguments(trace, collectives=True)
    keys = trace.gpu.select(pl.col(_KEY).fill_null(-1))[arguments["row"]]
    waiting: _Waiting = defaultdict(deque)
    for key, text in zip(keys.iter_rows(), arguments["text"].to_list(), strict=True):
        waiting[key].append(text.encode())
    return waiting


def _copy(source: Source, stream: IO[bytes], waiting: _Waiting) -> None:
    envelope = Envelope(source)
    between = b""
    before: set[str] | None = None
    for piece in envelope.pieces():
        if before is None:  # the first piece: the metadata in front of the events has been read
            before = set(envelope.metadata)
            _write_head(stream, envelope.metadata)
        for event in _edited(_bytes(piece, source), waiting):
            stream.write(between + event)
            between = b",\n"
    if before is None:
        before = set(envelope.metadata)
        _write_head(stream, envelope.metadata)
    after = {key: value for key, value in envelope.metadata.items() if key not in before}
    stream.write(b"\n]" + (b",\n" + msgspec.json.encode(after)[1:] if after else b"}") + b"\n")


def _write_head(stream: IO[bytes], metadata: Mapping[str, Any]) -> None:
    head = msgspec.json.encode(metadata)[:-1]
    stream.write(head + (b",\n" if metadata else b"") + b'"traceEvents": [\n')


def _bytes(piece: Piece, source: Source) -> bytes:
    if piece.events is not None:
        return piece.events
    with Path(source.path).open("rb") as file:
        file.seek(piece.offset)
        return file.read(piece.size)


def _edited(piece: bytes, waiting: _Waiting) -> Iterator[bytes]:
    """The events of a chunk; labelled events get additional arguments."""
    try:
        raw = [bytes(event) for event in _raw_events.decode(b"[" + piece + b"]")]
    except (msgspec.MsgspecError, RecursionError):
        yield piece  # copy damaged events unchanged; labels for them are reported as unmatched
        return
    rows = [i for i, event in enumerate(raw) if b'"kernel"' in event or b'"gpu_mem' in event]
    edited: list[DeviceEvent | None] = [None] * len(raw)
    for i in rows:
        try:
            edited[i] = _device_event.decode(raw[i])
        except (msgspec.MsgspecError, RecursionError):
            continue
    matched = [i for i in rows if edited[i] is not None]
    starts = nanoseconds([event.ts for i in matched if (event := edited[i])]).tolist()
    durations = nanoseconds([event.dur for i in matched if (event := edited[i])]).tolist()
    for i, start, duration in zip(matched, starts, durations, strict=True):
        event = edited[i]
        if event is not None and (texts := waiting.get(event.key(start, duration))):
            raw[i] = _with_arguments(raw[i], texts.popleft())
    yield from raw


def _with_arguments(event: bytes, text: bytes) -> bytes:
    members = _members.decode(event)
    arguments = _members.decode(members["args"]) if "args" in members else {}
    arguments |= _members.decode(b"{" + text[2:] + b"}")
    members["args"] = msgspec.Raw(msgspec.json.encode(arguments))
    return msgspec.json.encode(members)
