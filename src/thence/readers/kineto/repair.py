"""Lenient decoding of pieces that strict decoding rejects.

A piece is rejected if one of its events is not valid JSON or has a field of another type than Kineto
documents. Its events are then decoded one by one. An event that strict decoding accepts gives the same result
as in any other piece. In other events, values of unusual types are converted or dropped, and known kinds of
broken JSON are repaired; events that remain unreadable are counted. None of the 64 pieces of our recordings needs this;
it is for quotes that Kineto before July 2026 did not escape, and for damaged files.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import msgspec

from thence.readers.kineto.envelope import split_events

if TYPE_CHECKING:
    from collections.abc import Iterator

_INT64 = range(-(1 << 63), 1 << 63)
_UINT64 = range(1 << 64)
_UNSIGNED = ("graph", "node")
_OF_ANY_SIZE = ("pid", "tid")  # (pid, tid) pairs are only numbered, so their values are not limited
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
"""Possibly an integer beyond 64 bits, which strict decoding accepts but no column can hold."""

# Bare non-finite numbers, which JSON does not have; Kineto wrote inf for blocks per SM, Python's json writes NaN.
_NO_NUMBER = re.compile(rb"(?<=[:,\[])\s*-?(?:inf|infinity|nan)\b", re.IGNORECASE)
_CONTROL = re.compile(rb"[\x00-\x1f]")
_QUOTE_OR_BRACKET = re.compile(rb"\\.|[\"\[\]{}]", re.DOTALL)
# The text that may follow the closing quote of a string, inside an object and inside an array.
_AFTER_STRING = re.compile(rb"\s*(?::|[}\]]|,\s*\"[^\"\n]*\"\s*:)")
_AFTER_ITEM = re.compile(rb"\s*(?:\]|,\s*[\"\[{\d-])")


def decode_leniently(piece: bytes, event_type: type[Any], args_type: type[Any]) -> tuple[list[Any], list[bytes], int]:
    """The events of a piece, one by one.

    Args:
        piece: a JSON array of events, possibly broken.
        event_type: struct of an event; a field whose value cannot be converted to its type gets its default.
        args_type: struct of the arguments, treated in the same way.

    Returns:
        The events that could be read, the text of each, and the number of events that could not be read.
    """
    events, texts, damaged = [], [], 0
    strict = msgspec.json.Decoder(event_type)
    for text in _split(piece):
        if _LONG_NUMBER.search(text) is None:
            with contextlib.suppress(msgspec.MsgspecError, RecursionError, ValueError):
                events.append(strict.decode(text))
                texts.append(text)
                continue
        read = _fields(text)
        if read is None:
            damaged += 1
            continue
        fields, times = read
        args = fields.get("args")
        values = _fitting(fields, event_type) | {
            "args": args_type(**_fitting(args, args_type)) if isinstance(args, dict) else args_type()
        }
        values |= times
        events.append(event_type(**values))
        texts.append(text)
    return events, texts, damaged


def _split(piece: bytes) -> list[bytes]:
    """The texts of the events of a piece: split exactly if it is valid JSON, else where events seem to begin."""
    try:
        return [bytes(raw) for raw in _elements.decode(piece)]
    except (msgspec.MsgspecError, RecursionError):
        return split_events(piece)


class _Times(msgspec.Struct):
    """The times of an event, which stay text as in strict decoding: see times.py."""

    ts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    dur: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_times = msgspec.json.Decoder(_Times)
_elements = msgspec.json.Decoder(list[msgspec.Raw])


def _fields(text: bytes) -> tuple[dict[str, Any], dict[str, msgspec.Raw]] | None:
    """The fields of an event, and its times as text; None if the event cannot be read."""
    for candidate in _candidates(text):
        try:
            decoded = msgspec.json.decode(candidate)
            if not isinstance(decoded, dict):
                return None
            times = msgspec.structs.asdict(_times.decode(candidate))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        return decoded, {name: raw for name, raw in times.items() if raw is not msgspec.UNSET}
    return None


def _candidates(text: bytes) -> Iterator[bytes]:
    """The text of an event: unchanged, then with more and more repairs."""
    yield text
    text = text.decode("utf-8", "replace").encode()
    text = _CONTROL.sub(b" ", _NO_NUMBER.sub(b" null", text))
    yield text
    yield _with_inner_quotes_escaped(text)


def _with_inner_quotes_escaped(text: bytes) -> bytes:
    """The text with quotes inside strings escaped, which Kineto before July 2026 did not do.

    A quote ends its string only if the text after the quote may follow a string.
    """
    result, copied = [], 0
    in_string, brackets = False, [b"{"]
    for match in _QUOTE_OR_BRACKET.finditer(text):
        token = match.group()
        if in_string:
            after = _AFTER_ITEM if brackets[-1] == b"[" else _AFTER_STRING
            if token != b'"':
                continue
            if after.match(text, match.end()):
                in_string = False
            else:
                result += [text[copied : match.start()], b'\\"']
                copied = match.end()
        elif token == b'"':
            in_string = True
        elif token in (b"{", b"["):
            brackets.append(token)
        elif token in (b"}", b"]") and len(brackets) > 1:
            brackets.pop()
    return b"".join([*result, text[copied:]])


def _fitting(values: dict[str, Any], struct: type[Any]) -> dict[str, Any]:
    """The values that fit a field of the struct, converted to its type, by the field's Python name."""
    result = {}
    for info in msgspec.structs.fields(struct):
        value = values.get(info.encode_name)
        if value is None or info.name in ("ts", "dur", "args"):
            continue
        if info.type is msgspec.Raw:
            result[info.name] = msgspec.Raw(msgspec.json.encode(value))
            continue
        try:
            fitted = msgspec.convert(value, info.type, strict=False)
        except (msgspec.ValidationError, RecursionError):
            continue
        allowed = _UINT64 if info.name in _UNSIGNED else _INT64
        numbers = fitted if isinstance(fitted, tuple | list) else (fitted,)
        if info.name in _OF_ANY_SIZE or all(not isinstance(number, int) or number in allowed for number in numbers):
            result[info.name] = fitted
    return result
