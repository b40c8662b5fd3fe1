"""``--format json --top N``: N rows and one for the rest, in the same units; without ``--top`` all rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from helpers import output, recording
from thence.cli.json_rows import with_most_rows

if TYPE_CHECKING:
    from collections.abc import Mapping


def test_what_adds_up_is_summed_and_the_rest_is_null() -> None:
    rows = [
        {"name": n, "total_ns": ns, "mean_ns": ns, "share": ns / 100} for n, ns in (("a", 50), ("b", 30), ("c", 20))
    ]
    for given in (rows, pl.DataFrame(rows)):
        made = with_most_rows({"rows": given, "sum_ns": 100}, 1)
        rest = {"name": None, "total_ns": 50, "mean_ns": None, "share": pytest.approx(0.5), "rest": 2}
        assert made == {"rows": [rows[0], rest], "rows_total": 3, "sum_ns": 100}


def test_unknown_values_make_the_sum_unknown_and_trees_are_not_summed() -> None:
    rows = [{"name": "a", "flop": 1.0}, {"name": "b", "flop": 2.0}, {"name": "c", "flop": None}]
    assert with_most_rows({"rows": rows}, 1)["rows"][1]["flop"] is None
    tree = [{"name": "model", "total_ns": 9}, {"name": "layer", "total_ns": 5}, {"name": "mlp", "total_ns": 4}]
    assert with_most_rows({"tree": tree}, 1)["tree"][1] == {"name": None, "total_ns": None, "rest": 2}


def tables(value: Any, path: str = "") -> Mapping[str, list[Any]]:
    """Every list of objects in a document."""
    found = {}
    if isinstance(value, dict):
        for key, inner in value.items():
            found |= tables(inner, f"{path}.{key}")
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        found[path] = value
        for number, row in enumerate(value):
            found |= tables(row, f"{path}[{number}]")
    return found


@pytest.mark.parametrize(
    "verb", [("report", "--by", "kernel"), ("idle",), ("steps",), ("roofline", "--by", "op"), ("streams",), ("check",)],
    ids=lambda words: words[0],
)  # fmt: skip
def test_every_table_of_a_document_is_short_and_adds_up(
    capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]
) -> None:
    asked = (*verb, recording("torch_eager_rank0"), "--format", "json")
    whole, short = (json.loads(output(capsys, *asked, *more)[0]) for more in ((), ("--top", "2")))
    assert "rows_total" not in whole
    everything = tables(whole)
    shortened = tables(short)
    assert all(len(rows) <= 3 for rows in shortened.values())
    for path, rows in everything.items():
        if path not in shortened or any("rest" in row for row in rows):
            continue
        for column in {"total_ns", "count", "duration_ns", "headroom_ns"} & rows[0].keys():
            if any(row[column] is None for row in rows):
                assert shortened[path][-1][column] is None
            elif "spread" not in path and "outliers" not in path:
                assert sum(row[column] for row in shortened[path]) == pytest.approx(sum(row[column] for row in rows))
