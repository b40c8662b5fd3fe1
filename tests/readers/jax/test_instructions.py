"""Packed integers of many rows, decoded together, against the reader of these tests."""

from __future__ import annotations

import random

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from hlo_building import F32, computation, instruction, shape
from protowire import message, pack, packed
from thence.errors import DamagedInput
from thence.readers.jax.hlo import decode_hlo
from thence.readers.jax.instructions import IntegerLists


def test_packed_fields_of_all_widths_and_lengths() -> None:
    chance = random.Random(1)
    rows = [
        [chance.randrange(-(1 << 63), 1 << 63) >> chance.randrange(64) for _ in range(count)]
        for count in (0, 3, 1, 0, 0, 40, 2, 0)
    ]
    fields = [pack(*row) for row in rows]
    lists = IntegerLists.packed(fields)
    assert lists.counts.tolist() == [len(row) for row in rows]
    assert [lists.of(row) for row in range(len(rows))] == rows
    assert [value % (1 << 64) for value in lists.items.tolist()] == packed(b"".join(fields))
    assert lists.column(lists.items).to_list() == rows


def test_rows_without_items() -> None:
    for count in (0, 2):
        lists = IntegerLists.packed([b""] * count)
        assert lists.column(lists.items).to_list() == [[]] * count
        assert lists.sums(lists.items).tolist() == [0] * count


def test_sums_are_exact_and_stop_at_the_largest_number() -> None:
    rows = [[1 << 62, (1 << 62) - 1], [1 << 62, 1 << 62], [], [(1 << 63) - 1] * 5, [2**53, 1, 2]]
    lists = IntegerLists.packed([pack(*row) for row in rows])
    assert lists.sums(lists.items).tolist() == [min(sum(row), (1 << 63) - 1) for row in rows]


@pytest.mark.parametrize(
    "fields",
    [
        [b"\x80"],
        [pack(1), b"\xff\xff", pack(2)],  # continued by the next row it would be a number
        [b"\x80" * 10 + b"\x01"],
    ],
)
def test_cut_and_overlong_numbers_are_damage(fields: list[bytes]) -> None:
    with pytest.raises(DecodeError):
        IntegerLists.packed(fields)
    assert IntegerLists.packed([pack(2**64 - 1)]).items.dtype == np.int64


@pytest.mark.parametrize("number", [3, 7, 36, 38])  # shape, metadata, operands, called
def test_damage_inside_an_instruction_is_one_error(number: int) -> None:
    broken = instruction("a", "add", 1, shape(F32)) + message((number, b"\x12\x80"))
    proto = message((1, message((1, "jit_f"), (3, computation(1, broken)))))
    with pytest.raises(DamagedInput, match="not an HLO module with instructions"):
        decode_hlo(proto, "x")
