"""Tables of results on terminals of any width."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import polars as pl
import pytest
from rich.console import Console

from thence.writers.text.frame_table import frame_table

if TYPE_CHECKING:
    from collections.abc import Sequence


def printed(frame: pl.DataFrame, width: int, ranked: Sequence[str] = ()) -> list[str]:
    """The lines of a table of all columns of a frame."""
    stream = io.StringIO()
    headings = {column: column for column in frame.columns}
    Console(file=stream, width=width).print(frame_table(frame, headings, width, ranked))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


TEXTS = pl.DataFrame(
    {
        "by": ["kernel"],
        "name": ["a_kernel_with_a_name_of_more_than_forty_characters"],
        "count": [1234],
        "change": ["-475.6 us (-19.1 %)"],
        "verdict": ["unknown, 15+ more runs"],
    }
)


def test_everything_is_shown_where_it_fits() -> None:
    heading, row = printed(TEXTS, 120)
    assert heading.split() == TEXTS.columns
    assert row.split() == " ".join(map(str, TEXTS.row(0))).replace("1234", "1,234").split()


@pytest.mark.parametrize("width", range(40, 110, 5))
def test_no_heading_is_broken_and_left_out_columns_are_named(width: int) -> None:
    lines = printed(TEXTS, width)
    shown = lines[0].split()
    assert shown == TEXTS.columns[: len(shown)]
    left_out = TEXTS.columns[len(shown) :]
    note = " ".join(lines[1:]).partition("columns left out: ")[2].partition(";")[0]
    assert [name for name in note.split(", ") if name] == left_out
    assert max(map(len, lines)) <= width


def test_the_longest_text_becomes_narrower_first() -> None:
    lines = printed(TEXTS, 100)
    assert lines[0].split() == TEXTS.columns
    assert TEXTS["change"][0] in lines[1]
    assert TEXTS["verdict"][0] in lines[1]
    assert TEXTS["name"][0] not in lines[1]


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (120, ["by", "name", "count", "change", "verdict"]),
        (62, ["by", "name", "count", "change", "verdict"]),
        (61, ["by", "name", "change", "verdict"]),
        (54, ["name", "change", "verdict"]),
        (46, ["name", "verdict"]),
    ],
)
def test_the_least_important_columns_give_way_and_the_order_stays(width: int, shown: list[str]) -> None:
    """Needed are 12 for each name, 6 for kernel, 5 for count, 19 for the change, and 2 between any two."""
    lines = printed(TEXTS, width, ["name", "verdict", "change", "by"])
    assert lines[0].split() == shown
    assert "change" not in shown or TEXTS["change"][0] in lines[1]
