"""How the peak of memory changed between two runs, counted by hand."""

from __future__ import annotations

import polars as pl

from thence.analysis.diff.memory import MEMORY, memory_change, memory_text

_BEFORE = ("before the trace", "before the trace", 100)


def run(*rows: tuple[str, str | None, int]) -> pl.DataFrame:
    """What was live in a run."""
    return pl.DataFrame(rows, schema=MEMORY, orient="row", strict=False)


def test_the_change_of_the_peak_is_divided_among_places() -> None:
    before = [run(("all", "all", 1000), _BEFORE, ("module", "a", 900))] * 2
    after = [
        run(("all", "all", 4000), _BEFORE, ("module", "b", 2900), ("module", "a", 1000)),
        run(("all", "all", 4000), _BEFORE, ("module", "b", 3100), ("module", "a", 800)),
    ]
    change = memory_change(before, after)
    assert change is not None
    assert change.rows() == [
        ("all", "all", 1000, 4000, 3000),
        ("module", "b", 0, 3000, 3000),
        ("before the trace", "before the trace", 100, 100, 0),
        ("module", "a", 900, 900, 0),
    ]
    told = "the peak of memory rose by 3.000 kB, from 1.000 kB to 4.000 kB; most of it at b: 3.000 kB"
    assert memory_text(change) == told


def test_without_memory_on_one_side_or_a_change_nothing_is_said() -> None:
    assert memory_change([run()], [run(("all", "all", 1))]) is None
    assert memory_text(memory_change([run(("all", "all", 1000))], [run(("all", "all", 1001))])) is None
