"""A comparison as Markdown: names are text there, whatever they hold."""

from __future__ import annotations

import re

import numpy as np
import polars as pl

from diff_runs import simulated
from thence.analysis.diff.answer import Diff, compare
from thence.writers.page.diff_page import diff_html
from thence.writers.text.diff import markdown, shown_rows

EVIL = [
    "a|b",
    "**bold**",
    "<script>alert(1)</script>",
    "[x](http://example.org)",
    "@all",
    "line\nbreak",
    "`code`",
    "\x1b[31m",
]


def hostile() -> Diff:
    generator = np.random.default_rng(1)
    sides = [
        [simulated(generator, dict.fromkeys(EVIL, 1000000.0 * factor), between=0.001) for _ in range(3)]
        for factor in (1, 1.5)
    ]
    return compare(*sides)


def test_every_row_is_one_line_of_the_table() -> None:
    text = markdown(hostile())
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2 + len(EVIL)  # head, busy and idle, labels
    for line in rows:
        assert len(re.findall(r"(?<!\\)\|", line)) == 9, line


def test_names_are_neither_markdown_nor_html() -> None:
    text = markdown(hostile())
    table = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    assert "<script" not in text
    assert "\x1b" not in text
    assert "](http" not in table
    assert "@all" not in table
    assert "**bold**" not in table


def test_what_is_the_same_is_counted_not_listed() -> None:
    generator = np.random.default_rng(2)
    runs = [simulated(generator, {"x": 1e6, "y": 1e6}, between=1e-5, within=1e-4) for _ in range(6)]
    text = markdown(compare(runs[:3], runs[3:]))
    assert "| label |" not in text
    assert "2 more rows, the same" in text


def test_the_page_escapes_and_needs_nothing() -> None:
    page = diff_html(hostile())
    assert "<script" not in page
    assert "\x1b" not in page
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\'' in page
    assert not re.search(r"(?:src|href)=", page)
    assert page.count("<tr>") == 1 + 1 + 2 + len(EVIL)  # two tables with a head each, rows


def test_rows_read_as_differences() -> None:
    rows = shown_rows(hostile())
    label = rows.filter(rows["by"] == "label").row(0, named=True)
    assert re.fullmatch(r"\+\d+\.\d us \(\+\d\d\.\d %\)", label["change"])
    assert re.fullmatch(r"\+\d\d\.\d to \+\d\d\.\d %", label["interval"])
    assert label["verdict"] == "slower"


def test_an_interval_below_minus_all_of_the_time_is_not_known() -> None:
    generator = np.random.default_rng(3)
    # Two runs a side that differ by a factor of three: Student's t with two degrees of freedom spans several steps.
    sides = [[simulated(generator, {"x": 1e6 * factor}) for factor in (1, 3)] for _ in range(2)]
    diff = compare(*sides)
    label = shown_rows(diff).filter(pl.col("by") == "label").row(0, named=True)
    assert label["low_ns"] < -label["before_ns"]
    assert label["interval"] == "not known"
    assert "vary by more than the step itself" in diff.explanation[0]
    assert "not even with 1,000 runs per side" in diff.explanation[0]
