"""Which step each activity is of, in traces whose first step is not number 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helpers import event, kernel, launch, opened
from thence.analysis.diff.sample import run_steps

if TYPE_CHECKING:
    from pathlib import Path


def test_steps_are_counted_from_the_first_one_whatever_its_number(tmp_path: Path) -> None:
    events = []
    for place, number in enumerate((41, 7)):  # 100 us each, a kernel in each, in this order
        begin = 100 * place
        events += [
            event("user_annotation", f"ProfilerStep#{number}", begin, 100),
            launch(number, begin + 10), kernel(number, begin + 20, 30),
        ]  # fmt: skip
    found = run_steps(opened(tmp_path, events).tables)
    assert found.times["name"].cast(str).to_list() == ["ProfilerStep#41", "ProfilerStep#7"]
    assert found.of_activity.tolist() == [0, 1]
