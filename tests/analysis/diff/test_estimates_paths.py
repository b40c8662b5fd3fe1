"""Layers of a model are one row of a comparison, and its rows a tree."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from helpers import TORCH, written
from thence.analysis.diff.estimates import folds
from thence.writers.text.diff import shown_rows

if TYPE_CHECKING:
    from pathlib import Path

    from thence.analysis.diff.answer import Diff

LAYERS = TORCH / "layers" / "layers36.json.gz"


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Diff:
    """The model of 36 layers, and the same with a ninth more for each of its 254 addmm kernels, 7 in every layer.

    Its kernels take 100 times as long as in the file, because a comparison leaves out a thousandth of a step. A layer
    takes 76.75 us in the file, that with the slow kernel 9 us more, and an addmm kernel 9 us.
    """
    events = json.loads(gzip.decompress(LAYERS.read_bytes()))["traceEvents"]
    folder: Path = tmp_path_factory.mktemp("slower")
    sides = []
    for more in (0, 100):
        longer = [
            {**e, "dur": 100 * e["dur"] + more * (e["name"] == "addmm_kernel")} if e["cat"] == "kernel" else e
            for e in events
        ]
        sides.append(thence.open(written(folder / f"{more}.json", longer)))
    return sides[0].diff(sides[1])


def test_a_folded_row_is_the_sum_of_its_layers(slower: Diff) -> None:
    assert slower.folded is not None
    rows = {row["name"]: row for row in slower.folded.iter_rows(named=True)}
    gate = rows["Model_0/DecoderLayer_*/MLP_*/Linear_*[0]"]
    assert (gate["before_ns"], gate["difference_ns"]) == (32_400_000, 3_600_000)
    layers = rows["Model_0/DecoderLayer_*/..."]
    assert (layers["before_ns"], layers["difference_ns"]) == (277_200_000, 7 * 3_600_000)
    assert not [name for name in rows if "DecoderLayer_1/" in name]
    assert slower.to_json()["folded"][0]["by"] in {"module", "label"}


def test_tables_show_folded_rows_unless_each_is_asked_for(slower: Diff) -> None:
    names = shown_rows(slower)["name"].to_list()
    assert "Model_0/DecoderLayer_*/..." in names
    each = shown_rows(slower, each=True)["name"].to_list()
    assert sum(name.startswith("Model_0/DecoderLayer_") for name in each) > 36
    assert not any("*" in name for name in each)


def test_a_tree_has_everything_inside_of_a_part(slower: Diff) -> None:
    tree = slower.tree(3).filter(pl.col("by") == "module")
    assert tree.select("level", "part", "difference_ns").rows()[:4] == [
        (1, "Model_0", 25_400_000),
        (2, "DecoderLayer_*", 25_200_000),
        (3, "Attention_*", 4 * 3_600_000),
        (3, "MLP_*", 3 * 3_600_000),
    ]


def test_rows_of_equal_layers_share_a_name() -> None:
    names = [f"layers.{n}.mlp" for n in range(5)] + ["head"]
    rows = pl.DataFrame({"by": ["module"] * 6, "name": names})
    assert folds(rows) == {("module", name): "layers.*.mlp" for name in names[:5]}
    assert folds(rows.with_columns(by=pl.lit("kernel"))) == {}
