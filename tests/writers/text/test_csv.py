"""CSV that a spreadsheet shows and does not execute."""

import csv
import io

import polars as pl
import pytest

from thence.writers.text.csv import csv_text

FORMULAS = ("=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "=1\n=2", "\uff1d1+1")
TEXTS = ("-", "=", "gemm<-1>", "a=b", "'quoted", " spaced", "\u2212")


@pytest.mark.parametrize("dtype", [pl.String, pl.Categorical])
def test_a_formula_is_written_as_text(dtype):
    rows = pl.DataFrame({"name": [*FORMULAS, *TEXTS]}).cast({"name": dtype})
    cells = [row["name"] for row in csv.DictReader(io.StringIO(csv_text(rows), newline=""))]
    assert cells[: len(FORMULAS)] == ["'" + text for text in FORMULAS]
    assert cells[len(FORMULAS) :] == list(TEXTS)


def test_numbers_stay_numbers():
    rows = pl.DataFrame({"n": [-1, None], "x": [-0.5, 1e-9], "ok": [True, False]})
    assert csv_text(rows) == rows.write_csv()


def test_fields_of_structs_are_columns():
    rows = pl.DataFrame({"name": ["a", "b"], "measured": [{"flop": 1.0, "error": {"flop": 0.5, "text": "=1"}}, None]})
    assert csv_text(rows) == "name,measured.flop,measured.error.flop,measured.error.text\na,1.0,0.5,'=1\nb,,,\n"
