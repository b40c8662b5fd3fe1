"""JSON in pieces is, character for character, what msgspec writes at once."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
import polars as pl
import pytest

from thence.cli import json_pieces as module
from thence.cli.json_pieces import json_pieces

_CELLS: tuple[Any, ...] = (
    None, True, 7, -0.5, "", "a\nb", 'q"\\u0000\\', "é\u2028", [], [1, 2], {}, {"x": [{"y": 1}]}, [[]],
)  # fmt: skip


def at_once(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n"


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 9])
def test_lists_and_mappings(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(module, "_ROWS", 3)
    several = [{"a": cell, "b": number} for number, cell in enumerate(_CELLS[:rows])]
    for value in (several, tuple(several), {"rows": several, "n": rows}, {"a": {"rows": several}}):
        assert "".join(json_pieces(value)) == at_once(value)


def test_every_pair_of_cells() -> None:
    for first, second in product(_CELLS, repeat=2):
        for value in (first, {"a": first, 'k"\n': second}, [first, second]):
            assert "".join(json_pieces(value)) == at_once(value)


def test_tables_are_lists_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", 2)
    frame = pl.DataFrame({"name": ["a", None, "c\n"], "parts": [[1], [], [2, 3]]})
    rows = [{"name": "a", "parts": [1]}, {"name": None, "parts": []}, {"name": "c\n", "parts": [2, 3]}]
    assert "".join(json_pieces(frame)) == at_once(rows)
    assert "".join(json_pieces({"t": frame, "e": frame.clear()})) == at_once({"t": rows, "e": []})


def test_no_piece_is_a_large_document() -> None:
    rows = [{"name": "x" * 100, "n": n} for n in range(100_000)]
    pieces = list(json_pieces({"rows": rows}))
    assert sum(map(len, pieces)) > 13e6
    assert max(map(len, pieces)) < 1.5e6


def test_what_is_no_json_is_found_before_a_short_document_begins() -> None:
    with pytest.raises(UnicodeEncodeError):
        next(json_pieces({"a": [1] * 5000, "name": "\udcff"}))
