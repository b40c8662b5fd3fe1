"""What a kill loses is at the end, and is stated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from killed_programs import ENDINGS, killed

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("seconds", [0.0, 0.35, 1.1])
def test_a_killed_program_loses_its_end_alone_and_says_so(tmp_path: Path, seconds: float) -> None:
    result = killed(tmp_path, seconds)
    assert result.launched >= result.recorded
    assert not result.gap
    assert result.told
    assert result.stated > 0 or result.launched == 0
    assert result.labelled == 1


@pytest.mark.parametrize("ending", [ending for ending in ENDINGS if ending != "SIGKILL"])
def test_a_program_that_ends_in_another_way_loses_nothing(tmp_path: Path, ending: str) -> None:
    result = killed(tmp_path, 0.7, ending)
    assert 0 < result.launched <= result.recorded  # a thread may go on while the recording is completed
    assert result.lost_seconds == 0
    assert result.labelled == 1
