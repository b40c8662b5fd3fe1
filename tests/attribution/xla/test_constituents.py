"""What kernels are made of, in HLO modules built by hand."""

from __future__ import annotations

import polars as pl
import pytest

from hlo_building import F32, at, build, computation, frame_index, instruction, shape, tuple_of
from protowire import message, pack
from thence.attribution.xla.constituents import constituents_by_cost, constituents_by_place
from thence.errors import DamagedInput


def test_equal_places_by_place_are_one_whatever_their_frame_number() -> None:
    """Frames 2 and 3 read the same; what has no frame, or is nested deeper, does not count."""
    reducer = computation(1, instruction("deep", "add", 1, shape(F32), (), (), at(4)))
    fused = computation(
        2,
        instruction("a", "add", 2, shape(F32), (), (), at(2, "s")),
        instruction("b", "add", 3, shape(F32), (), (), at(3, "s")),
        instruction("c", "add", 4, shape(F32), (), (), at(3, "t")),
        instruction("d", "reduce", 5, shape(F32), (), (1,), (7, message((2, "u")))),
    )
    entry = computation(3, instruction("f", "fusion", 6, shape(F32), (), (2,), at(4, "s")))
    index = frame_index((1, 0), (2, 1), (2, 1), (9, 0))
    module = build(reducer, fused, entry, more=(index,))
    found = constituents_by_place(module).filter(pl.col("instruction") == 5)
    names = module.instructions["name"].gather(found["constituent"]).to_list()
    assert sorted(zip(names, found["weight"], strict=True)) == [
        ("a", 1 / 3),
        ("c", 1 / 3),
        ("f", 1 / 3),
    ]


def test_by_place_prefers_stacks_then_scopes_then_itself() -> None:
    scopes = computation(
        1,
        instruction("a", "add", 1, shape(F32), (), (), (7, message((2, "s")))),
        instruction("b", "add", 2, shape(F32)),
    )
    nothing = computation(2, instruction("c", "add", 3, shape(F32)))
    entry = computation(
        3,
        instruction("f", "fusion", 4, shape(F32), (), (1,)),
        instruction("g", "fusion", 5, shape(F32), (), (2,)),
    )
    found = constituents_by_place(build(scopes, nothing, entry))
    assert found.filter(pl.col("instruction") >= 3).rows() == [(3, 0, 1.0), (4, 4, 1.0)]


def test_cost_is_what_enters_and_leaves_the_kernel_and_flops() -> None:
    """exp reads a parameter through a bitcast, dot reads another and is the root: the result."""
    n = 1 << 20
    numbers = (30, message((1, pack(0)), (2, pack(0))))
    fused = computation(
        1,
        instruction("p", "parameter", 1, shape(F32, n), (), (), (9, 0)),
        instruction("q", "parameter", 2, shape(F32, n), (), (), (9, 1)),
        instruction("b", "bitcast", 3, shape(F32, n), (1,)),
        instruction("exp", "exponential", 4, shape(F32, n), (3,)),
        instruction("dot", "dot", 5, shape(F32), (4, 2), (), numbers),
        root=5,
    )
    entry = computation(
        2,
        instruction("x", "parameter", 6, shape(F32, n)),
        instruction("f", "fusion", 7, shape(F32), (6, 6), (1,)),
    )
    module = build(fused, entry)
    found = constituents_by_cost(module).filter(pl.col("instruction") == 6)
    exp, dot = 4 * n + n / 14, 4 * n + 4 + 2 * n / 200
    weights = dict(found.select("constituent", "weight").rows())
    assert weights == pytest.approx({3: exp / (exp + dot), 4: dot / (exp + dot)})


def test_cost_follows_values_through_fusions_in_fusions() -> None:
    inner = computation(
        1,
        instruction("ip", "parameter", 1, shape(F32, 1400), (), (), (9, 0)),
        instruction("neg", "negate", 2, shape(F32, 1400), (1,)),
        root=2,
    )
    outer = computation(
        2,
        instruction("op", "parameter", 3, shape(F32, 1400), (), (), (9, 0)),
        instruction("abs", "abs", 4, shape(F32, 1400), (3,)),
        instruction("in", "fusion", 5, shape(F32, 1400), (4,), (1,)),
        root=5,
    )
    entry = computation(
        3,
        instruction("x", "parameter", 6, shape(F32, 1400)),
        instruction("f", "fusion", 7, shape(F32, 1400), (6,), (2,)),
    )
    found = constituents_by_cost(build(inner, outer, entry)).filter(pl.col("instruction") == 6)
    # abs reads 5600 bytes, negate writes 5600, each does 100 bytes' worth of flops
    assert dict(found.select("constituent", "weight").rows()) == pytest.approx({1: 0.5, 3: 0.5})


def test_cost_of_slices_updates_and_tuples_is_what_they_touch() -> None:
    fused = computation(
        1,
        instruction("p", "parameter", 1, shape(F32, 1000), (), (), (9, 0)),
        instruction("s", "slice", 2, shape(F32, 10), (1,)),
        instruction("u", "dynamic-update-slice", 3, shape(F32, 1000), (1, 2)),
        instruction("c", "copy", 4, shape(F32, 10), (2,)),
        instruction("t", "tuple", 5, tuple_of(shape(F32, 1000), shape(F32, 10)), (3, 4)),
        root=5,
    )
    entry = computation(2, instruction("f", "fusion", 6, shape(F32, 10), (), (1,)))
    found = constituents_by_cost(build(fused, entry))
    # slice reads 40 bytes, the update writes 40, the copy writes 40
    third = pytest.approx(1 / 3)
    assert found.rows() == [(5, 1, third), (5, 2, third), (5, 3, third)]


def test_calls_that_multiply_without_bound_are_refused() -> None:
    big = computation(1, *(instruction(f"a{i}", "add", i, b"") for i in range(5000)))
    calls = (instruction(f"f{i}", "fusion", 9000 + i, b"", (), (1,)) for i in range(5000))
    with pytest.raises(DamagedInput, match="instructions"):
        constituents_by_place(build(big, computation(2, *calls)))
