"""Paths of names, built once for all rows that share them, against a walk from each row."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.attribution import paths
from thence.attribution.paths import path_names, path_tree
from thence.model.intervals import NO_ROW

settings.register_profile("thence", deadline=None, max_examples=examples(150))
settings.load_profile("thence")

Way = tuple[str, ...]


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[int], list[str], list[bool], list[int]]:
    """Parents, names, which rows are wanted, and some of these or none."""
    names = draw(st.lists(st.sampled_from(["a", "b", "a/b", "", "ä [red]"]), max_size=20))
    parent = [draw(st.integers(-1, i - 1)) for i in range(len(names))]
    wanted = [draw(st.booleans()) for _ in names]
    candidates = [NO_ROW, *(i for i, is_wanted in enumerate(wanted) if is_wanted)]
    rows = draw(st.lists(st.sampled_from(candidates), min_size=1, max_size=10))
    return parent, names, wanted, rows


def walked(parent: list[int], names: list[str], wanted: list[bool], row: int) -> Way:
    """Names of the wanted rows from the top to the row."""
    found = []
    while row != NO_ROW:
        if wanted[row]:
            found.append(names[row])
        row = parent[row]
    return tuple(reversed(found))


def arrays(
    parent: list[int], names: list[str], wanted: list[bool], rows: list[int]
) -> tuple[np.ndarray, pl.Series, np.ndarray, np.ndarray]:
    return (
        np.array(parent, np.int64),
        pl.Series(names, dtype=pl.String).cast(pl.Categorical()),
        np.array(rows, np.int64),
        np.array(wanted, np.bool_),
    )


@given(forests())
def test_a_path_is_the_wanted_names_from_the_outermost_to_the_row(
    forest: tuple[list[int], list[str], list[bool], list[int]],
) -> None:
    ways = [walked(*forest[:3], row) for row in forest[3]]
    result = path_names(*arrays(*forest))
    assert result.cast(pl.String).to_list() == ["/".join(way) if way else None for way in ways]


@given(forests())
def test_equal_paths_are_one_node_of_the_tree(forest: tuple[list[int], list[str], list[bool], list[int]]) -> None:
    ways = [walked(*forest[:3], row) for row in forest[3]]
    tree, node = path_tree(*arrays(*forest))
    names = tree.name.cast(pl.String).to_list()
    of_node: list[Way] = []
    for name, above in zip(names, tree.parent.tolist(), strict=True):
        assert above < len(of_node)  # a parent comes first
        of_node.append((*(of_node[above] if above != NO_ROW else ()), name))
    assert len(set(of_node)) == len(of_node)
    assert [of_node[n] if n != NO_ROW else () for n in node.tolist()] == ways
    # Nothing but the paths of the rows and what is around them.
    assert set(of_node) == {way[:end] for way in ways for end in range(1, len(way) + 1)}


@given(forests())
def test_deep_paths_are_shortened_and_still_told_apart(
    forest: tuple[list[int], list[str], list[bool], list[int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "MAX_LEVELS", 5)
        patch.setattr(paths, "KEPT_LEVELS", 2)
        result = path_names(*arrays(*forest)).cast(pl.String).to_list()
    found: dict[str | None, Way] = {}
    for row, text in zip(forest[3], result, strict=True):
        way = walked(*forest[:3], row)
        if len(way) <= 5:
            assert text == ("/".join(way) if way else None)
            continue
        assert text is not None
        begin, end = (f"{'/'.join(way[:2])}/[{len(way) - 4} levels left out", f"]/{'/'.join(way[-2:])}")
        assert text.startswith(begin)
        assert text.endswith(end)
        middle = text[len(begin) : len(text) - len(end)]
        assert middle == "" or middle.startswith(", ")
        assert found.setdefault(text, way) == way


def texts_of(*ways: list[str]) -> list[str]:
    """The texts of paths given as names, each a thread of its own."""
    parent: list[int] = []
    for way in ways:
        parent += [NO_ROW, *range(len(parent), len(parent) + len(way) - 1)]
    ends = np.cumsum([len(way) for way in ways]) - 1
    names = pl.Series([name for way in ways for name in way]).cast(pl.Categorical())
    found = path_names(np.array(parent), names, ends, np.ones(len(parent), np.bool_))
    return found.cast(pl.String).to_list()


def test_256_levels_are_written_in_full_and_257_are_not() -> None:
    way = [f"r{level}" for level in range(1, 258)]
    whole, shortened = texts_of(way[:256], way)
    assert whole == "/".join(way[:256])
    first, last = "/".join(way[:16]), "/".join(way[241:])
    assert (way[15], way[241], len(way[241:])) == ("r16", "r242", 16)
    assert shortened == f"{first}/[225 levels left out]/{last}"


def test_paths_that_differ_only_in_what_is_left_out_are_numbered() -> None:
    ways = [["f"] * 100 + [middle] + ["f"] * 200 for middle in ("x", "y", "x", "z")]
    ends = "/".join(["f"] * 16)
    gap = "269 levels left out"  # 301 - 32
    assert texts_of(*ways) == [
        f"{ends}/[{gap}]/{ends}", f"{ends}/[{gap}, 2]/{ends}", f"{ends}/[{gap}]/{ends}", f"{ends}/[{gap}, 3]/{ends}",
    ]  # fmt: skip


def test_a_name_that_reads_like_a_gap_does_not_make_two_paths_one() -> None:
    shortened = [*["f"] * 301]
    like = [*["f"] * 16, "[269 levels left out]", *["f"] * 16]
    texts = texts_of(shortened, like)
    assert texts[1] == "/".join(like)
    assert texts[0] != texts[1]
    assert texts[0].startswith("f/" * 16 + "[269 levels left out, ")


def test_long_names_around_many_ranges_do_not_multiply() -> None:
    """30 ranges of 5,000 characters around 4,000 others: 600 million characters, if each path had them all."""
    depth, leaves = 30, 4000
    parent = np.array([*range(-1, depth - 1), *[depth - 1] * leaves])
    parent[0] = NO_ROW
    names = pl.Series([f"{i}" + "x" * 5000 for i in range(depth)] + [f"leaf {i}" for i in range(leaves)])
    rows = np.arange(depth, depth + leaves)
    everywhere = np.ones(depth + leaves, np.bool_)
    texts = path_names(parent, names.cast(pl.Categorical()), rows, everywhere).cast(pl.String)
    assert texts.str.len_chars().sum() < 2_000_000
    assert texts.n_unique() == leaves
    assert texts[7].endswith("/leaf 7")
    few = path_names(parent, names.cast(pl.Categorical()), rows[:3], everywhere).cast(pl.String)
    assert few[1] == "/".join([*names[:depth], "leaf 1"])  # as long as that is affordable
