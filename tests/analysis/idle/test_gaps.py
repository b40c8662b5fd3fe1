"""Until when idle time before an activity is explained, by hand; `test_causes.py` has what follows from it."""

from __future__ import annotations

import numpy as np
import pytest

from thence.analysis.idle.gaps import Gaps, LaunchTimes
from thence.model.intervals import NEVER, NO_ROW

BEGIN, END = 1_000, 1_000_000
"""Of the gap before each activity, ns."""


@pytest.mark.parametrize(
    ("call", "held", "expected"),
    [
        pytest.param((200_000, 210_000), NEVER, (200_000, 210_000, 310_000, 310_000), id="100 us after its launch"),
        pytest.param((0, 10), NEVER, (BEGIN, BEGIN, 6_000, 6_000), id="5 us in a queue"),
        pytest.param((0, 10), 500_000, (BEGIN, BEGIN, 6_000, 500_000), id="until its event"),
        pytest.param((0, 10), 2_000, (BEGIN, BEGIN, 6_000, 101_000), id="100 us with an event"),
        pytest.param((-1, -1), NEVER, (BEGIN, BEGIN, BEGIN, END), id="not judged without its launch"),
    ],
)
def test_an_activity_may_begin(call: tuple[int, int], held: int, expected: tuple[int, int, int, int]) -> None:
    launched, returned, until = (np.array([value]) for value in (*call, held))
    number = np.array([0 if call[0] >= 0 else NO_ROW])
    starts = LaunchTimes.of(np.array([END]), number, launched, returned, until)
    parts = starts.parts(Gaps(np.array([BEGIN]), np.array([END]), np.array([0])))
    found = parts.launched, parts.returned, parts.latency_end, parts.held_end
    assert tuple(int(border[0]) for border in found) == expected


def test_nodes_of_a_graph_launch_that_has_begun_may_begin_at_any_time() -> None:
    both = np.array([0, 0])
    starts = LaunchTimes.of(np.array([500, END]), both, both, both + 10, np.array([NEVER, NEVER]))
    parts = starts.parts(Gaps(np.array([BEGIN]), np.array([END]), np.array([1])))
    assert parts.held_end.tolist() == [END]
