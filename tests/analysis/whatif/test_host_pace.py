"""The pace of the host, of planted programs whose steps and ranks take known times for the same work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from helpers import event, kernel, launch, opened
from thence.analysis.whatif.graph import program_graph
from thence.analysis.whatif.prediction import host_pieces, pace_spread

if TYPE_CHECKING:
    from pathlib import Path

LAUNCHES, PIECE, PAUSE = 20, 30.0, 4_000.0


def spread(folder: Path, paces: list[float], pause: float = 0.0) -> float:
    """Of a program whose steps launch three kernels in turns, in these paces, after a pause each."""
    events: list[dict[str, Any]] = []
    time = 1000.0
    for step, pace in enumerate(paces):
        begin = time
        time += pause
        for number in range(LAUNCHES):
            correlation = step * LAUNCHES + number + 1
            name = "abc"[number % 3]
            events.append(launch(correlation, time))
            events.append(kernel(correlation, time + 6, 2, name=name))
            time += PIECE * pace * (1 + number % 3)
        events.append(event("user_annotation", f"ProfilerStep#{step}", begin, time - begin))
    trace = opened(folder, events).whole
    return pace_spread(host_pieces(trace, program_graph(trace)))


def test_even_steps_have_one_pace_whatever_they_pause(tmp_path: Path) -> None:
    assert spread(tmp_path, [1.0] * 6, PAUSE) == pytest.approx(0, abs=0.001)


def test_the_spread_is_that_of_the_steps_without_the_first(tmp_path: Path) -> None:
    paces = [5.0, 1.0, 1.0, 2.0, 1.0, 2.0, 1.0, 1.0]
    expected = np.std(np.array(paces[1:]) / np.median(paces[1:]), ddof=1)
    assert spread(tmp_path, paces, PAUSE) == pytest.approx(expected, rel=0.01)


def test_a_trace_without_repeats_says_nothing(tmp_path: Path) -> None:
    assert spread(tmp_path, [1.0, 3.0]) == 0
