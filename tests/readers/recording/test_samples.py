"""Which part of the time between two calls each sample of a recording stands for."""

from __future__ import annotations

import itertools
import random

import numpy as np
import polars as pl
import pytest

from thence.capture.boundaries.places import FRAME, LINE
from thence.model.formats import SAMPLE_STATES
from thence.readers.recording.counted_launches import boundaries_of
from thence.readers.recording.place_ranges import Cells, Noted, cells_of, place_ranges, without_notes

MS = 1_000_000
COLUMNS = ("time", "until", "thread", "line", "frame", "count", "state")
PYTHON, SLEEP = SAMPLE_STATES.index("python"), SAMPLE_STATES.index("sleep")


def samples(*rows: tuple[int, ...]) -> pl.DataFrame:
    """Rows of time (ms), thread, line, frame, state; each is one sample."""
    table = [(time * MS, time * MS, thread, line, frame, 1, state) for time, thread, line, frame, state in rows]
    return pl.DataFrame(table, schema=dict.fromkeys(COLUMNS, pl.Int64), orient="row")


def calls(*rows: tuple[int, int, int]) -> pl.DataFrame:
    """Rows of thread, start and end (ms)."""
    table = [(thread, start * MS, end * MS) for thread, start, end in rows]
    return pl.DataFrame(table, schema=dict.fromkeys(("thread", "start", "end"), pl.Int64), orient="row")


def shown(cells: Cells) -> list[tuple[int, ...]]:
    """Thread, start, end (rounded to ms), line and state of each cell."""
    times = np.stack([cells.thread, np.rint(cells.start / MS), np.rint(cells.end / MS), cells.line, cells.state], 1)
    return [tuple(row) for row in times.astype(int).tolist()]


def test_the_time_between_two_calls_is_divided_in_the_middle_between_samples() -> None:
    found = cells_of(
        samples((12, 1, 7, 70, PYTHON), (14, 1, 7, 70, PYTHON), (18, 1, 8, 80, SLEEP)), calls((1, 5, 10), (1, 20, 25))
    )
    # The call ended at 10, the next began at 20; between the samples at 14 and 18 the middle is 16.
    assert shown(found) == [(1, 10, 16, 7, PYTHON), (1, 16, 20, 8, SLEEP)]
    assert int((found.end - found.start).sum()) == 10 * MS - 2  # 1 ns is left before and after each call


def test_samples_of_other_gaps_and_threads_do_not_meet() -> None:
    found = cells_of(
        samples((12, 1, 7, 70, SLEEP), (22, 1, 7, 70, SLEEP), (13, 2, 9, 90, SLEEP)),
        calls((1, 5, 10), (1, 15, 20), (1, 25, 26), (2, 11, 12), (2, 16, 18)),
    )
    assert shown(found) == [(1, 10, 15, 7, SLEEP), (1, 20, 25, 7, SLEEP), (2, 12, 16, 9, SLEEP)]


def test_time_far_from_any_sample_is_of_none_unless_the_samples_around_it_are_alike() -> None:
    far = cells_of(samples((100, 1, 7, 70, PYTHON), (200, 1, 8, 80, PYTHON)), calls((1, 5, 50), (1, 300, 301)))
    assert shown(far) == [(1, 90, 110, 7, PYTHON), (1, 190, 210, 8, PYTHON)]
    alike = cells_of(samples((100, 1, 7, 70, SLEEP), (200, 1, 7, 70, SLEEP)), calls((1, 5, 50), (1, 300, 301)))
    assert shown(alike) == [(1, 90, 210, 7, SLEEP)]


def test_samples_reach_further_in_a_long_gap_in_which_they_are_further_apart() -> None:
    found = cells_of(
        samples((10_000, 1, 7, 70, PYTHON), (10_100, 1, 8, 80, PYTHON)), calls((1, 0, 1), (1, 10_200, 10_201))
    )
    # A 50th of the time since the last call: 200 ms.
    assert shown(found) == [(1, 9_800, 10_050, 7, PYTHON), (1, 10_050, 10_200, 8, PYTHON)]


def test_a_thread_without_a_call_has_samples_from_its_first_one_on() -> None:
    found = cells_of(samples((12, 1, 7, 70, SLEEP), (14, 1, 7, 70, SLEEP)), calls())
    assert shown(found) == [(1, 12, 24, 7, SLEEP)]
    assert not len(cells_of(samples(), calls((1, 5, 10))).thread)


@pytest.mark.parametrize("seed", range(30))
def test_cells_never_meet_a_call_and_never_overlap(seed: int) -> None:
    rng = random.Random(seed)
    gaps, now = [], 0
    made, moments = [], []
    for _ in range(20):
        made.append((1, now, now + (took := rng.randrange(1, 4))))
        begin = now + took
        now = begin + rng.randrange(1, 60)
        gaps.append((begin, now))
        times = sorted(rng.sample(range(begin, now + 1), min(rng.randrange(5), now - begin)))
        moments += [(time, 1, rng.randrange(1, 4), 1, rng.randrange(3)) for time in times]
    cells = cells_of(samples(*moments), calls(*made, (1, now, now + 1)))
    assert len(cells.thread) <= len(moments)
    assert (cells.end > cells.start).all()
    assert (cells.start[1:] >= cells.end[:-1]).all()
    for start, end in zip(cells.start.tolist(), cells.end.tolist(), strict=True):
        assert any(begin * MS <= start and end <= until * MS for begin, until in gaps)
    for time, *_ in moments:
        begin, until = next((b, u) for b, u in gaps if b <= time <= u)
        if begin < time < until:
            assert ((cells.start <= time * MS) & (cells.end >= time * MS)).any()


def test_a_cell_replaces_what_boundaries_say_and_its_end_restores_it() -> None:
    noted = Noted(np.array([1, 1, 1, 2]), np.array([10, 30, 50, 20]), np.array([3, 4, 5, 6]))
    cells = Cells(*(np.array(values) for values in ([1, 1], [12, 40], [35, 49], [7, 8], [0, 0], [0, 0])))
    found = without_notes(noted, cells, np.array([7, 8]))
    rows = list(zip(found.thread.tolist(), found.time.tolist(), found.place.tolist(), strict=True))
    # The boundary at 30 lies inside of the first cell; the one at 50 is that of the next call, right after the second.
    assert rows == [(1, 10, 3), (1, 12, 7), (1, 35, 4), (1, 40, 8), (1, 49, 5), (1, 50, 5), (2, 20, 6)]


def test_host_rows_of_samples_are_frames_inside_of_the_line_that_called_them() -> None:
    """A function of the user's calls a library, which waits: function, frames and state, and the launches unharmed."""
    places = pl.DataFrame(
        [
            (1, LINE, 0, "main", "train.py", 5), (2, LINE, 1, "load", "train.py", 9),
            (3, FRAME, 0, "load", "train.py", 9), (4, FRAME, 3, "get", "queue.py", 171),
            (5, FRAME, 4, "wait", "threading.py", 355),
        ],
        schema=["number", "kind", "parent", "name", "detail", "line"], orient="row",
    )  # fmt: skip
    rows = [(1, 10, 1, 1, 0), (2, 100, 1, 1, 0)]
    schema = dict.fromkeys(("counter", "time", "thread", "place", "flags"), pl.Int64)
    boundaries = boundaries_of(pl.DataFrame(rows, schema=schema, orient="row"))
    nothing = pl.DataFrame(schema={"thread": pl.Int64, "start": pl.Int64, "end": pl.Int64, "category": pl.String})
    lock = SAMPLE_STATES.index("lock")
    cells = Cells(*(np.array([value]) for value in (1, 20, 80, 2, 5, lock)))
    found = place_ranges(boundaries, places, nothing, 200, cells)
    assert found.sort("start", -pl.col("end")).select(
        "category", pl.col("name").cast(pl.String), "start", "end", "state"
    ).rows() == [
        ("python", "train.py(5): main", 10, 200, None),
        ("python", "train.py(9): load", 20, 80, None),
        ("sample", "train.py(9): load", 20, 80, None),
        ("sample", "queue.py(171): get", 20, 80, None),
        ("sample", "threading.py(355): wait", 20, 80, "lock"),
    ]  # fmt: skip


def test_samples_in_places_whose_names_are_lost_have_no_rows() -> None:
    rows = [(1, LINE, 0, None, None, 5), (2, LINE, 0, "load", "train.py", 9), (3, FRAME, 0, None, None, 171)]
    schema = ["number", "kind", "parent", "name", "detail", "line"]
    places = pl.DataFrame(rows, schema=schema, orient="row", schema_overrides={"name": pl.String, "detail": pl.String})
    noted = dict.fromkeys(("counter", "time", "thread", "place", "flags"), pl.Int64)
    nothing = pl.DataFrame(schema={"thread": pl.Int64, "start": pl.Int64, "end": pl.Int64, "category": pl.String})
    cells = Cells(*(np.array(pair) for pair in ((1, 1), (20, 50), (40, 80), (1, 2), (3, 3), (SLEEP, SLEEP))))
    found = place_ranges(boundaries_of(pl.DataFrame(schema=noted)), places, nothing, 200, cells)
    assert found.select(pl.col("name").cast(pl.String), "start", "end").rows() == [("train.py(9): load", 50, 80)]


def test_frames_of_samples_are_cut_where_a_named_range_begins() -> None:
    places = pl.DataFrame(
        [(1, LINE, 0, "main", "train.py", 0), (2, FRAME, 0, "main", "train.py", 7)],
        schema=["number", "kind", "parent", "name", "detail", "line"], orient="row",
    )  # fmt: skip
    schema = dict.fromkeys(("counter", "time", "thread", "place", "flags"), pl.Int64)
    boundaries = boundaries_of(pl.DataFrame([(1, 10, 1, 1, 0)], schema=schema, orient="row"))
    named = pl.DataFrame({"thread": [1], "start": [50], "end": [120], "category": ["range"]})
    cells = Cells(*(np.array([value]) for value in (1, 20, 80, 1, 2, SLEEP)))
    found = place_ranges(boundaries, places, named, 200, cells).filter(pl.col("category") == "sample")
    assert found.sort("start").select("start", "end", "state").rows() == [(20, 50, "sleep"), (50, 80, "sleep")]


def test_the_number_of_cells_is_at_most_that_of_the_samples() -> None:
    times = [(time, 1, 7, 70, PYTHON) for time in itertools.chain(range(10, 20), range(30, 40))]
    found = cells_of(samples(*times), calls((1, 0, 9), (1, 25, 26), (1, 50, 51)))
    assert shown(found) == [(1, 9, 25, 7, PYTHON), (1, 26, 49, 7, PYTHON)]
