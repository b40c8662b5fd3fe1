"""Columns in protobuf's wire format against the protobuf package."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

from thence.writers import wire_format
from thence.writers.timelines.perfetto import packets as wire

uint64 = st.integers(0, (1 << 64) - 1)
int64 = st.integers(-(1 << 63), (1 << 63) - 1)


def annotation(**fields: object) -> bytes:
    """A DebugAnnotation as protobuf itself writes it."""
    return bytes(protos.DebugAnnotation(**fields).SerializeToString())


@given(st.lists(uint64, min_size=1))
def test_unsigned_numbers(values: list[int]) -> None:
    array = np.array(values, np.uint64)
    parts = [wire.constant(wire_format.field_tag(3, wire_format.VARINT), len(values)), wire.varint_column(array)]
    assert wire.joined(parts).tobytes() == b"".join(annotation(uint_value=v) for v in values)
    assert b"".join(wire_format.uint_field(3, v) for v in values) == wire.joined(parts).tobytes()


@given(st.lists(int64, min_size=1))
def test_signed_numbers(values: list[int]) -> None:
    array = np.array(values, np.int64)
    parts = [wire.constant(wire_format.field_tag(4, wire_format.VARINT), len(values)), wire.varint_column(array)]
    assert wire.joined(parts).tobytes() == b"".join(annotation(int_value=v) for v in values)


@given(st.lists(st.floats(allow_nan=False), min_size=1))
def test_doubles(values: list[float]) -> None:
    column = wire.double_column(np.array(values))
    parts = [wire.constant(wire_format.field_tag(5, wire_format.FIXED64), len(values)), column]
    assert wire.joined(parts).tobytes() == b"".join(annotation(double_value=v) for v in values)


@given(st.lists(st.tuples(uint64, uint64, st.booleans()), min_size=1))
def test_messages_that_only_some_rows_have(rows: list[tuple[int, int, bool]]) -> None:
    names, values = (np.array([row[i] for row in rows], np.uint64) for i in (0, 1))
    inner = [
        wire.constant(wire_format.field_tag(1, wire_format.VARINT), len(rows)), wire.varint_column(names),
        wire.constant(wire_format.field_tag(3, wire_format.VARINT), len(rows)), wire.varint_column(values),
    ]  # fmt: skip
    there = np.array([row[2] for row in rows])
    parts = wire.only_where(wire.delimited(11, inner), there)
    expected = b"".join(
        annotation(dict_entries=[protos.DebugAnnotation(name_iid=name, uint_value=value)])
        for name, value, present in rows
        if present
    )
    assert wire.joined(parts).tobytes() == expected


@given(st.lists(st.tuples(st.binary(max_size=300), uint64, st.binary(max_size=2)), min_size=1))
def test_any_number_of_bytes_per_row(rows: list[tuple[bytes, int, bytes]]) -> None:
    content = np.frombuffer(b"".join(row[0] for row in rows), np.uint8)
    length = np.array([len(row[0]) for row in rows])
    column = wire.varint_column(np.array([row[1] for row in rows], np.uint64))
    parts = [column, wire.ragged(content, length), wire.constant(b"xy", len(rows))]
    expected = b"".join(wire_format.varint(number) + extra + b"xy" for extra, number, _ in rows)
    assert wire.joined(parts).tobytes() == expected
    framed = b"".join(
        wire_format.bytes_field(7, wire_format.varint(number) + extra + b"xy") for extra, number, _ in rows
    )
    assert wire.joined(wire.delimited(7, parts)).tobytes() == framed


def test_text_that_utf8_cannot_hold() -> None:
    assert protos.DebugAnnotation.FromString(wire_format.text_field(10, "a\ud800b")).name == "a?b"
