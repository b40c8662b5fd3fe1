"""Names that fit a width keep what tells them apart."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thence.model.shortened_names import affordable, fitted

GEMMS = [
    f"sm90_xmma_gemm_f32f32_tf32f32_f32_{layout}_n_tilesize{tile}x128x32_warpgroupsize1x1x1_execute_segment_k_off"
    for layout, tile in (("nt", 128), ("tn", 128), ("nn", 64))
]


def test_what_differs_stays() -> None:
    for name, text in zip(GEMMS, fitted(GEMMS, 42), strict=True):
        assert len(text) == 42
        assert name[34:36] in text.replace("segment", "").replace("execute", "")


def test_short_names_stay_as_they_are() -> None:
    assert fitted(["a", "b" * 42, "a"], 42) == ["a", "b" * 42, "a"]


def test_paths_lose_what_they_share() -> None:
    names = [f"model.decoder.layers.{layer}/self_attention/query_projection" for layer in range(8)]
    texts = fitted(names, 30)
    assert [any(part == str(layer) for part in _numbers(text)) for layer, text in enumerate(texts)] == [True] * 8


def _numbers(text: str) -> list[str]:
    return "".join(c if c.isdigit() else " " for c in text).split()


words = st.lists(st.sampled_from(["gemm", "_", "f32", "nt", "nn", "128", "x", "::", "é", "<", ">"]), max_size=60)


@given(st.lists(words.map("".join), max_size=12), st.integers(1, 60))
def test_different_names_stay_different_and_fit(names: list[str], width: int) -> None:
    texts = fitted(names, width)
    assert len(set(texts)) == len(set(names))
    assert [texts[names.index(name)] for name in names] == texts, "equal names stay equal"
    assert all(len(text) <= max(width, 8) for text in texts)


@pytest.mark.parametrize("width", [8, 20, 96])
def test_names_without_any_difference_that_fits_are_numbered(width: int) -> None:
    names = ["a" * 500 + "b" * n for n in range(500, 504)]
    assert len(set(fitted(names, width))) == 4


PLACES = [
    "/home/user/project/workloads/train.py:20 Model.forward",
    "/home/user/project/workloads/train.py:132 Trainer.<locals>.step",
    "/usr/lib/python3.12/site-packages/torch/nn/functional.py:12 linear",
]


@pytest.mark.parametrize("width", range(20, 70))
def test_file_and_line_of_a_source_line_stay(width: int) -> None:
    for place, text in zip(PLACES, fitted(PLACES, width), strict=True):
        assert place.split("/")[-1].split()[0] in text
        assert len(text) <= width


def test_folders_go_before_the_function() -> None:
    assert fitted(PLACES, 40) == [
        "…/workloads/train.py:20 Model.forward",
        "…/train.py:132 Trainer.<locals>.step",
        "…/torch/nn/functional.py:12 linear",
    ]


@pytest.mark.parametrize("width", range(18, 40))
def test_over_several_lines_file_and_line_stand_on_one(width: int) -> None:
    for place, text in zip(PLACES, fitted(PLACES, width, 3), strict=True):
        file, _, function = text.partition(" ")
        assert len(file) <= width
        assert file.endswith(place.split()[0].rpartition("/")[2])
        assert function == place.split(" ")[1]


def test_names_are_narrowed_only_as_far_as_all_their_uses_need() -> None:
    names = pl.Series(["a" * 50_000, "a" * 49_000 + "b", "short", None])
    few, many = np.array([1, 1, 1, 1]), np.array([900, 1, 9, 9])
    assert affordable(names, few, 1000, 10) is names  # shorter than each written once
    narrow = affordable(names, many, 100_000, 10)
    assert narrow.n_unique() == 4
    assert narrow.to_list()[2:] == ["short", None]
    assert [len(name) for name in narrow.to_list()[:2]] == [100, 100]
    assert (narrow.str.len_chars().fill_null(0).to_numpy() * many).sum() < 110_000
