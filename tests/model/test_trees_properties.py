"""Sums, depths and prefix trees of forests, against walks from each row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.model import trees
from thence.model.intervals import NO_ROW, chain_to

settings.register_profile("thence", deadline=None, max_examples=examples(150))
settings.load_profile("thence")


@st.composite
def forests(draw: st.DrawFn) -> list[int]:
    """Parents of up to 40 rows in any order, chains among them likely."""
    count = draw(st.integers(0, 40))
    parent = [draw(st.sampled_from([i - 1, draw(st.integers(-1, i - 1))])) for i in range(count)]
    place = draw(st.permutations(range(count)))
    result = [NO_ROW] * count
    for row, above in enumerate(parent):
        result[place[row]] = place[above] if above >= 0 else NO_ROW
    return result


def way_up(parent: list[int], row: int) -> list[int]:
    """The row and all around it, innermost first."""
    found = []
    while row != NO_ROW:
        found.append(row)
        row = parent[row]
    return found


@given(forests(), st.data())
def test_sums_minima_and_depths(parent: list[int], data: st.DataObject) -> None:
    values = [data.draw(st.integers(-(2**60), 2**60)) for _ in parent]
    below: list[list[int]] = [[] for _ in parent]
    for row in range(len(parent)):
        for above in way_up(parent, row):
            below[above].append(values[row] % 2**40)
    at, given_values = np.array(parent, np.int64), np.array(values, np.int64) % 2**40
    assert trees.depths(at).tolist() == [len(way_up(parent, row)) for row in range(len(parent))]
    assert trees.subtree_sums(at, given_values).tolist() == [sum(rows) for rows in below]
    assert trees.subtree_minima(at, given_values).tolist() == [min(rows) for rows in below]


@given(forests(), st.data())
def test_what_is_around_rows(parent: list[int], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(-1, len(parent) - 1), max_size=10))
    expected = {above for row in rows for above in way_up(parent, row)}
    marked = trees.ancestors(np.array(parent, np.int64), np.array(rows, np.int64))
    assert set(np.flatnonzero(marked).tolist()) == expected
    wanted = [data.draw(st.booleans()) for _ in parent]
    nearest = [next((r for r in way_up(parent, row) if wanted[r]), NO_ROW) for row in rows]
    found = chain_to(np.array(parent, np.int64), np.array(rows, np.int64), np.array(wanted, np.bool_))
    assert found.tolist() == nearest


@pytest.mark.parametrize("levels", [0, 1000], ids=["by hashes", "by levels"])
@given(parent=forests(), data=st.data())
def test_rows_are_one_node_where_all_codes_above_are_the_same(
    levels: int, parent: list[int], data: st.DataObject
) -> None:
    code = [data.draw(st.integers(-1, 2)) for _ in parent]
    paths = [tuple(code[r] for r in reversed(way_up(parent, row))) for row in range(len(parent))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trees, "_MAX_LEVELS", levels)
        node, first = trees.trie(np.array(parent, np.int64), np.array(code, np.int64))
    # By depth, then by first row.
    distinct = sorted(dict.fromkeys(paths), key=lambda path: (len(path), paths.index(path)))
    assert [distinct[n] for n in node.tolist()] == paths
    assert first.tolist() == [paths.index(path) for path in distinct]


@given(st.lists(st.sampled_from([-(2**40), -3, 0, 1, 2, 70_000, 2**40]), max_size=20))
def test_values_are_numbered_in_order_of_their_first_rows(values: list[int]) -> None:
    number, first = trees.numbered(np.array(values, np.int64))
    distinct = list(dict.fromkeys(values))
    assert [distinct[n] for n in number.tolist()] == values
    assert first.tolist() == [values.index(value) for value in distinct]


def test_steps_of_doubling_length_find_what_single_steps_find() -> None:
    # A chain, so deep that neither function goes on step by step; every 7th row is wanted.
    count = 50_000
    parent = np.arange(count, dtype=np.int64) - 1
    wanted = np.arange(count) % 7 == 3
    rows = np.array([NO_ROW, 0, 2, 3, 40_000, count - 1])
    assert chain_to(parent, rows, wanted).tolist() == [-1, -1, -1, 3, 39_994, 49_997]
    only_top = np.arange(count) == 5
    assert chain_to(parent, rows, only_top).tolist() == [-1, -1, -1, -1, 5, 5]
    every = np.arange(count, dtype=np.int64)
    assert (chain_to(parent, every, only_top) == np.where(every < 5, NO_ROW, 5)).all()
    assert trees.ancestors(parent, np.array([40_000])).sum() == 40_001
    assert (trees.depths(parent) == every + 1).all()
