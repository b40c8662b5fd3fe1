"""What kernels are made of, in HLO modules built by hand."""

from __future__ import annotations

import polars as pl
import pytest

from hlo_building import F32, build, computation, instruction, shape, tuple_of
from protowire import message, pack
from thence.attribution.xla.constituents import constituents_by_cost


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
        2, instruction("x", "parameter", 6, shape(F32, n)), instruction("f", "fusion", 7, shape(F32), (6, 6), (1,))
    )
    module = build(fused, entry)
    found = constituents_by_cost(module).filter(pl.col("instruction") == 6)
    # Bytes: 4 n each, and 4 for the result. Operations: n of 10 multiplications each, 10 of which take as long as a
    # byte, and 2 n of the dot, 200 of which do.
    read, operations = 8 * n + 4, n + n / 100
    exp = read**4 * (4 * n / read) + operations**4 * (n / operations)
    weights = dict(found.select("constituent", "weight").rows())
    exp /= read**4 + operations**4
    assert weights == pytest.approx({3: exp, 4: 1 - exp})


def fusion_of(*inner: bytes, size: int) -> dict[int, float]:
    """The weights of what is inside a fusion of two parameters, by row."""
    fused = computation(
        1,
        instruction("p", "parameter", 1, shape(F32, size), (), (), (9, 0)),
        instruction("q", "parameter", 2, shape(F32, size), (), (), (9, 1)),
        *inner,
        root=2 + len(inner),
    )
    entry = computation(
        2,
        instruction("x", "parameter", 30, shape(F32, size)),
        instruction("f", "fusion", 31, shape(F32, size), (30, 30), (1,)),
    )
    found = constituents_by_cost(build(fused, entry))
    top = found["instruction"].max()
    return dict(found.filter(pl.col("instruction") == top).select("constituent", "weight").rows())


def test_a_fusion_limited_by_arithmetic_is_divided_by_what_the_operations_cost() -> None:
    n = 1000
    sines = [instruction(f"s{i}", "sine", 3 + i, shape(F32, n), (1 if not i else 2 + i,)) for i in range(8)]
    adds = [instruction(f"a{i}", "add", 11 + i, shape(F32, n), (10 + i, 2)) for i in range(8)]
    weights = fusion_of(*sines, *adds, size=n)
    of_sines = sum(weights[row] for row in range(2, 10))
    # A sine takes as long as 39 multiplications: 312 of 320 operations. Their time is that of 32 n bytes, 12 n are
    # moved: of the time, (12 / 32)^4 = 2 % are by bytes.
    assert of_sines == pytest.approx(312 / 320, abs=0.02)


def test_arithmetic_costs_nothing_in_a_fusion_limited_by_memory() -> None:
    n = 1000
    weights = fusion_of(
        instruction("t", "sqrt", 3, shape(F32, n), (1,)),
        instruction("m", "multiply", 4, shape(F32, n), (3, 3)),
        instruction("a", "add", 5, shape(F32, n), (4, 2)),
        size=n,
    )
    # sqrt reads 4 n bytes, the add 4 n and writes 4 n; the 9 n operations take as long as 0.9 n bytes.
    assert weights == pytest.approx({2: 1 / 3, 3: 0, 4: 2 / 3}, abs=0.001)


def test_a_parameter_that_two_instructions_read_is_read_once() -> None:
    n = 1000
    weights = fusion_of(
        instruction("a", "negate", 3, shape(F32, n), (1,)),
        instruction("b", "multiply", 4, shape(F32, n), (1, 3)),
        instruction("c", "add", 5, shape(F32, n), (4, 2)),
        size=n,
    )
    assert weights == pytest.approx({2: 2 / 12, 3: 2 / 12, 4: 8 / 12}, abs=0.001)


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
