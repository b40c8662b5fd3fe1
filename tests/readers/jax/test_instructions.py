"""Packed integers of many rows, decoded together, against the reader of these tests."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from polars.testing import assert_frame_equal

from hlo_building import F32, build, computation, instruction, shape
from protowire import message, pack, packed
from thence.attribution.xla.constituents import constituents_by_cost
from thence.errors import DamagedInput
from thence.readers.jax.hlo import decode_hlo
from thence.readers.jax.instructions import IntegerLists

if TYPE_CHECKING:
    from thence.model.hlo import HloModule


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


@pytest.mark.parametrize("spread", ["operands", "callees", "both"])
def test_lists_may_be_packed_or_not(spread: str) -> None:
    """Protobuf's rule for readers: one field for each number says the same as a packed list."""

    def listed(number: int, values: tuple[int, ...], *, one_by_one: bool) -> list[tuple[int, object]]:
        return [(number, v) for v in values] if one_by_one else [(number, pack(*values))]

    first, second, high = 10, 300, 1 << 62

    def module(*, operands: bool, callees: bool) -> HloModule:
        def row(name: str, opcode: str, number: int, used: tuple[int, ...], called: tuple[int, ...]):
            lists = [*listed(36, used, one_by_one=operands), *listed(38, called, one_by_one=callees)]
            return message((1, name), (2, opcode), (3, shape(F32, 8)), (35, number), *lists)

        inner = computation(1, row("x", "parameter", 1, (), ()), row("y", "negate", 2, (1,), ()))
        outer = computation(
            2,
            row("p", "parameter", first, (), ()),
            row("q", "parameter", second, (), ()),
            row("far", "add", high, (first, second), ()),
            row("f", "fusion", 7, (high,), (1,)),
            row("c", "concatenate", 8, (second, 7, first, 7), ()),
        )
        return build(inner, outer)

    found = module(operands=spread != "callees", callees=spread != "operands")
    rows = {row["name"]: row for row in found.instructions.iter_rows(named=True)}
    operands = {name: row["operands"] for name, row in rows.items() if row["operands"]}
    assert operands == {
        "y": [1], "far": [first, second], "f": [high], "c": [second, 7, first, 7],
    }  # fmt: skip
    assert {name: row["called"] for name, row in rows.items() if row["called"]} == {"f": [1]}
    as_written = module(operands=False, callees=False)
    assert_frame_equal(found.instructions, as_written.instructions)
    assert_frame_equal(constituents_by_cost(found), constituents_by_cost(as_written))


@pytest.mark.parametrize("number", [3, 7, 36, 38])  # shape, metadata, operands, called
def test_damage_inside_an_instruction_is_one_error(number: int) -> None:
    broken = instruction("a", "add", 1, shape(F32)) + message((number, b"\x12\x80"))
    proto = message((1, message((1, "jit_f"), (3, computation(1, broken)))))
    with pytest.raises(DamagedInput, match="not an HLO module with instructions"):
        decode_hlo(proto, "x")
