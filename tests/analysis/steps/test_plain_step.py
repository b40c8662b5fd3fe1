"""The step without recording: its median, its interval, and which steps count."""

from __future__ import annotations

import polars as pl
import pytest

from thence.analysis.steps.plain_step import median_interval, plain_step
from thence.model.tables import STEP_TIMES
from thence.model.thresholds import BETWEEN_PROCESSES_HOST_SHARE, BETWEEN_PROCESSES_SHARE


def times(*ranks: list[tuple[int, int, bool, bool]]) -> pl.DataFrame:
    """The table step_times: for each rank number, duration, recorded and counted of its steps."""
    rows = [
        {"rank": rank, "number": n, "start": 1000 * n, "duration": ns, "recorded": r, "counted": c}
        for rank, steps in enumerate(ranks)
        for n, ns, r, c in steps
    ]
    return STEP_TIMES.frame(pl.DataFrame(rows).to_dict())


@pytest.mark.parametrize(
    ("count", "ends"),
    [
        # k, counted from 1, of tables for the sign test (Conover, Practical Nonparametric Statistics, table A3): the
        # largest for which sum of C(n, i) for i < k is at most 0.025 * 2**n.
        (5, None),  # 1 > 0.8
        (6, (1, 6)),  # 1 <= 1.6 < 1 + 6
        (8, (1, 8)),  # 1 <= 6.4 < 1 + 8
        (9, (2, 8)),  # 1 + 9 <= 12.8 < 10 + 36
        (12, (3, 10)),  # 1 + 12 + 66 <= 102.4 < 79 + 220
        (15, (4, 12)),  # 1 + 15 + 105 + 455 <= 819.2 < 576 + 1365
        (20, (6, 15)),  # 1 + 20 + 190 + 1140 + 4845 + 15504 = 21700 <= 26214.4 < 21700 + 38760
    ],
)
def test_the_interval_of_a_median_is_that_of_order_statistics(count: int, ends: tuple[int, int] | None) -> None:
    found = median_interval(count)
    assert found == (None if ends is None else (ends[0] - 1, ends[1] - 1))


def test_five_plain_steps_are_too_few() -> None:
    assert plain_step(times([(n, 100, False, True) for n in range(5)])) is None
    assert plain_step(times([(n, 100, False, True) for n in range(6)])) is not None


def test_only_steps_that_count_make_the_median() -> None:
    plain = [(n, 1_000_000, False, True) for n in range(6)]
    first = [(6, 50_000_000, False, False)]
    recorded = [(n, 1_200_000, True, True) for n in range(7, 13)]
    far = [(n, 9_000_000, True, False) for n in range(13, 60)]
    found = plain_step(times(plain + first + recorded + far))
    assert found is not None
    assert found.recorded is not None
    assert (found.plain.median_ns, found.plain.count) == (1_000_000, 6)
    assert (found.recorded.median_ns, found.recorded.count) == (1_200_000, 6)
    assert found.added_share == pytest.approx(0.2)
    assert (found.plain.low_ns, found.plain.high_ns) == (1_000_000, 1_000_000)


def test_a_step_of_a_job_is_plain_if_it_is_on_all_ranks_and_lasts_as_long_as_the_longest() -> None:
    one = [(n, 100, False, True) for n in range(20)]
    other = [(n, 100 + n, n >= 8, True) for n in range(20)]
    found = plain_step(times(one, other))
    assert found is not None
    assert found.plain.count == 8
    assert found.plain.median_ns == 103.5  # of 100 to 107
    assert found.recorded is None


def test_the_interval_holds_the_median_of_each_window() -> None:
    # 40 steps of 100 us and a window of 6 steps of 150 us: order statistics alone would end at 100 us.
    fast = [(n, 100_000, False, True) for n in range(40)]
    slow = [(n, 150_000, False, True) for n in range(50, 56)]
    found = plain_step(times(fast + slow))
    assert found is not None
    assert found.plain.windows == 2
    assert found.plain.median_ns == 100_000
    assert (found.plain.low_ns, found.plain.high_ns) == (100_000, 150_000)


@pytest.mark.parametrize(
    ("busy_ns", "waits"),
    [(0, 1.0), (250_000, 0.75), (1_000_000, 0.0), (1_100_000, 0.0)],  # the last: kernels are slower while recorded
)
def test_other_processes_differ_by_the_time_in_which_the_gpu_waits_for_the_host(busy_ns: int, waits: float) -> None:
    steps = [(n, 1_000_000 + 1000 * n, False, True) for n in range(6)]  # median 1,002,500
    steps += [(n, 2_000_000, True, True) for n in range(6, 12)]
    found = plain_step(times(steps))
    assert found is not None
    wider = found.beside_other_processes(busy_ns * 1.0025)
    share = BETWEEN_PROCESSES_SHARE + waits * BETWEEN_PROCESSES_HOST_SHARE
    assert wider.plain.low_ns == pytest.approx(1_000_000 - share * 1_002_500, abs=1)
    assert wider.plain.high_ns == pytest.approx(1_005_000 + share * 1_002_500, abs=1)
    assert wider.recorded is not None
    assert wider.recorded.low_ns == pytest.approx(2_000_000 * (1 - share), abs=1)
    assert wider.added_interval == pytest.approx(
        (wider.recorded.low_ns / wider.plain.high_ns - 1, wider.recorded.high_ns / wider.plain.low_ns - 1)
    )
    assert wider.added_share == found.added_share  # medians stay


def test_the_text_has_both_ends_of_the_interval() -> None:
    found = plain_step(times([(n, 1_000_000 + 1000 * n, False, True) for n in range(6)]))
    assert found is not None
    assert found.text == "1.002 ms a step (1.000 ms to 1.005 ms)"


def test_a_trace_without_unrecorded_steps_has_no_plain_step() -> None:
    assert plain_step(STEP_TIMES.empty()) is None
    assert plain_step(times([(n, 100, True, True) for n in range(50)])) is None
